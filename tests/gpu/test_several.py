"""Two CUDA devices against one: NCCL, tokens sent to experts all-to-all, and the optimizer's state in halves."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.servers import free_ports
from tests.unit.trainer_gpu import checkpoints
from tests.unit.trainer_gpu.pieces import joined
from tests.unit.trainer_gpu.two_processes import DTYPES, ROWS, made, step

ROOT = Path(__file__).parents[2]
TOLERANCE = {"fp32": 1e-5, "bf16": 5e-2}


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.timeout(240)
@pytest.mark.parametrize("expert", [1, 2], ids=["data parallel", "expert parallel"])
def test_two_devices_take_the_step_of_one(expert: int, moe_folder: Path, tmp_path: Path) -> None:
    alone = {}
    for name, dtype in DTYPES.items():
        _, model = checkpoints.load(moe_folder, dtype)
        alone[name] = made(model)
        step(alone[name], ROWS)
        save_file({key: t.clone() for key, t in alone[name].state.tensors().items()}, tmp_path / f"one-{name}.safetensors")
    launch = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-addr", "127.0.0.1", "--master-port", str(free_ports(1)[0])]
    program = ["-m", "tests.unit.trainer_gpu.two_processes", str(moe_folder), str(tmp_path), str(expert)]
    done = subprocess.run([sys.executable, *launch, *program], cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    for name in DTYPES:
        ours = {key: t.cpu() for key, t in alone[name].state.tensors().items()}
        pieces = [load_file(tmp_path / f"state-{name}-{rank}.safetensors") for rank in (0, 1)]
        theirs = joined({**pieces[0], **pieces[1]}, ours)
        norm = torch.cat([t.flatten() for key, t in ours.items() if key.startswith("exp_avg.")]).norm()
        worst = max(float((t - theirs[key]).abs().max()) for key, t in ours.items() if key.startswith("exp_avg."))
        assert worst / norm < TOLERANCE[name]
