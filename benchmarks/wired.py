"""Several ring processes of this machine as one: what wired Macs give, against one process, side by side.

    python -m benchmarks.wired --json

`pipeline_max_difference`: largest distance of a logprob or logit, whole multi-turn sweeps with evictions, prefill and
decode, 2 and 3 ranks, lfm2_moe, lfm2 and four of mlx-lm's families at 4 and 8 bits; infinite if a token or a chosen expert
differs. `tensor_parallel_max_difference`: the same of a set whose layers are dealt out to 2 and 4 ranks, and of logits with 8.
Fractions are of the rank with most, at 2 ranks. Keys that begin with `warmstart_` are `benchmarks.warmstart`'s.
"""

import argparse
import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import warmstart
from stoa.config.load import PROJECT_ROOT
from worker_mac.cluster.launch import calm

RANK_SECONDS = 600.0
Found = dict[str, Any]


def run(sizes: Sequence[int] = (2, 3), shares: Sequence[int] = (2, 4, 8)) -> Found:
    """All measurements."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        pipelines = {size: launch("pipeline", size, folder) for size in sizes}
        stocks = {size: launch("stock", size, folder) for size in sizes}
        tensors = {size: launch("tensor", size, folder) for size in shares}
        launch("mismatch", 2, folder)
        told = json.loads((folder / "mismatch-2.mismatch").read_text("utf-8"))
    two = pipelines[2]["lfm2_moe"]
    ours = [one["difference"] for found in pipelines.values() for one in found.values()]
    return {
        "pipeline_max_difference": max([*ours, *(value for found in stocks.values() for value in found.values())]),
        "tensor_parallel_max_difference": max(found["difference"] for found in tensors.values()),
        "peak_weights_fraction": two["peak_weights_fraction"],
        "peak_kv_fraction": two["kv_fraction"],
        "link_bytes_a_step": two["hidden_bytes_a_step"],
        "plan_bytes_a_step": two["plan_bytes_a_step"],
        "fits_one_rank": two["fits_one_rank"],
        "runs_on_two_ranks": two["runs_on_the_set"],
        "mismatch_seconds": told["seconds"],
        "mismatch_message": told["message"],
        "mismatch_sums_seconds": told["sums_seconds"],
        "pipeline": pipelines,
        "stock_families": stocks,
        "tensor_parallel": tensors,
        "conditions": "loopback ring, fp32 activations, random weights, ranks share this machine's cores: times say nothing of Macs",
    }


def launch(mode: str, size: int, folder: Path) -> Found:
    """What rank 0 of a ring of so many ranks says."""
    port = free_run(size + 1)
    out = folder / f"{mode}-{size}.json"
    awaited = [out, out.with_suffix(".mismatch")] if mode == "mismatch" else [out]
    line = (
        str(Path(sys.executable).with_name("mlx.launch")), "-n", str(size), "--backend", "ring", "--starting-port", str(port),
        "--cwd", str(PROJECT_ROOT), "--python", sys.executable, "--",
        "-m", "benchmarks.wired_rank", mode, "--out", str(out), "--control", str(port + size),
    )  # fmt: skip
    with (folder / f"{mode}-{size}.log").open("wb") as log:
        # The input stays open: at its end `mlx.launch` would spin.
        process = subprocess.Popen(line, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True)
        calm(process.pid, size)
        deadline = time.monotonic() + RANK_SECONDS
        try:
            # Not for `mlx.launch`: what is calm sees late that its ranks have ended.
            while process.poll() is None and time.monotonic() < deadline and not all(path.is_file() for path in awaited):
                time.sleep(0.1)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if not out.is_file():
        raise SystemExit(f"{mode} on {size} ranks gave nothing:\n{Path(log.name).read_text('utf-8')[-3000:]}")
    return json.loads(out.read_text("utf-8"))


def free_run(count: int) -> int:
    """The first of so many ports in a row that are free now, below the range of outgoing connections."""
    chance = random.Random(os.urandom(8))
    while True:
        first = chance.randrange(11000, 22000)
        try:
            for port in range(first, first + count):
                with socket.socket() as one:
                    one.bind(("127.0.0.1", port))
        except OSError:
            continue
        return first


def main(arguments: Sequence[str] | None = None) -> int:
    """Run and print; the last line is one JSON object."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.wired", description=__doc__)
    parser.add_argument("--json", action="store_true", help="only the JSON line")
    asked = parser.parse_args(arguments)
    found = run() | warmstart.measure()
    if not asked.json:
        for key, value in found.items():
            print(f"{key:32} {value}")
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
