"""Two real processes over gloo against one: data parallel, and with the experts cut over them."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.servers import free_ports
from tests.unit.trainer_gpu import checkpoints
from tests.unit.trainer_gpu.two_processes import ROWS, row
from trainer_gpu.convert import mlx_tensors
from trainer_gpu.model import token_logprobs_packed
from trainer_gpu.parallel import build_optimizer

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("expert", [1, 2], ids=["data parallel", "expert parallel"])
def test_two_processes_take_the_step_of_one(expert: int, moe_folder: Path, tmp_path: Path) -> None:
    launch = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-addr", "127.0.0.1", "--master-port", str(free_ports(1)[0])]
    program = ["-m", "tests.unit.trainer_gpu.two_processes", str(moe_folder), str(tmp_path), str(expert)]
    done = subprocess.run([sys.executable, *launch, *program], cwd=ROOT, capture_output=True, text=True, timeout=55)
    assert done.returncode == 0, done.stderr[-3000:]

    config, model = checkpoints.load(moe_folder)
    start = {name: t.clone() for name, t in mlx_tensors(model, config)}
    alone = build_optimizer(model, lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0, clip_grad=0.05)
    norm = alone.step(
        [lambda lengths=lengths: -token_logprobs_packed(model, row(lengths), lengths)[0].sum() / 55 for lengths in ROWS[expert]]
    )
    assert norm > 0.05, "clipping must have taken part"

    ranks = [load_file(tmp_path / f"rank{rank}.safetensors") for rank in (0, 1)]
    assert all(torch.equal(t, ranks[1][name]) for name, t in ranks[0].items()), "both processes export the same weights"
    assert float(ranks[0].pop("norm")) == pytest.approx(norm, rel=1e-5)
    expected = dict(mlx_tensors(model, config))
    assert ranks[0].keys() == expected.keys()
    wrong = torch.cat([(ranks[0][name] - t).flatten() for name, t in expected.items()]).norm()
    moved = torch.cat([(start[name] - t).flatten() for name, t in expected.items()]).norm()
    assert float(wrong / moved) < 1e-3

    _, reread = checkpoints.load(tmp_path / "hub")
    assert all(torch.equal(t, ranks[0][name]) for name, t in mlx_tensors(reread, config))
    states = [set(load_file(tmp_path / f"state{rank}.safetensors")) for rank in (0, 1)]
    assert states[0] | states[1] == set(alone.state_tensors()), "an expert's state carries its number in the whole model"
    assert (states[0] == states[1]) == (expert == 1)
