"""Loads a hub checkpoint in a process of its own and prints what that took beside the model: `... load_memory FOLDER`.

It then maps the files and looks at every tensor, as a control: the measure must see that.
"""

import json
import resource
import sys
from contextlib import ExitStack
from pathlib import Path

import torch
from safetensors import safe_open

from trainer_gpu import host
from trainer_gpu.convert import load_hub
from trainer_gpu.model import build_model, read_model_config


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def peak_bytes() -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def main(folder: Path) -> None:
    host.setup_process(num_threads=1, seed=0)
    config = read_model_config(folder)
    model = build_model(config, torch.bfloat16)
    for parameter in model.parameters():
        parameter.data.fill_(0)  # all pages of the model are there before the measure begins
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    before = resident_bytes()
    load_hub(model, config, folder)
    beside = peak_bytes() - before
    with ExitStack() as stack:
        files = [stack.enter_context(safe_open(path, framework="pt")) for path in folder.glob("*.safetensors")]
        total = sum(float(file.get_tensor(name).float().sum()) for file in files for name in file.keys())  # noqa: SIM118
        mapped = peak_bytes() - before
    print(
        json.dumps(
            {"beside_bytes": beside, "mapped_bytes": mapped, "model_bytes": sum(2 * p.numel() for p in model.parameters()), "sum": total}
        )
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
