"""Two real processes over gloo against one: optimizer state cut in two, experts cut in two or not, states that cross over."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from stoa.contracts.errors import CheckpointError
from tests.servers import free_ports
from tests.unit.trainer_gpu import checkpoints
from tests.unit.trainer_gpu.pieces import joined
from tests.unit.trainer_gpu.two_processes import DTYPES, ROWS, made, step
from trainer_gpu.convert import mlx_tensors

ROOT = Path(__file__).parents[3]
TOLERANCE = {"fp32": 1e-6, "bf16": 2e-2}
"""Largest difference of a moment over the norm of all; bf16 sums of two ranks are rounded once more."""


@pytest.mark.loop
@pytest.mark.timeout(240)
@pytest.mark.parametrize("expert", [1, 2], ids=["data parallel", "expert parallel"])
def test_two_processes_take_the_step_of_one(expert: int, moe_folder: Path, tmp_path: Path) -> None:
    alone, expected, start = {}, {}, {}
    for name, dtype in DTYPES.items():
        config, model = checkpoints.load(moe_folder, dtype)
        start[name] = {key: t.float().clone() for key, t in mlx_tensors(model, config)}
        alone[name] = made(model)
        norm = step(alone[name], ROWS)
        assert norm > 0.05, "clipping must have taken part"
        expected[name] = {"norm": torch.tensor(norm), "update_norm": torch.tensor(alone[name].update_norm())} | {
            key: t.clone() for key, t in mlx_tensors(model, config, alone[name].masters())
        }
        save_file({key: t.clone() for key, t in alone[name].state.tensors().items()}, tmp_path / f"one-{name}.safetensors")

    launch = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-addr", "127.0.0.1", "--master-port", str(free_ports(1)[0])]
    program = ["-m", "tests.unit.trainer_gpu.two_processes", str(moe_folder), str(tmp_path), str(expert)]
    done = subprocess.run([sys.executable, *launch, *program], cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]

    for name in DTYPES:
        wire = [load_file(tmp_path / f"wire-{name}-{rank}.safetensors") for rank in (0, 1)]
        assert all(torch.equal(t, wire[1][key]) for key, t in wire[0].items()), "both processes export the same weights"
        assert wire[0].keys() == expected[name].keys()
        for norm in ("norm", "update_norm"):
            assert float(wire[0].pop(norm)) == pytest.approx(float(expected[name].pop(norm)), rel=1e-5 if name == "fp32" else 1e-2)
        wrong = torch.cat([(wire[0][key] - t).flatten() for key, t in expected[name].items()]).norm()
        moved = torch.cat([(start[name][key] - t).flatten() for key, t in expected[name].items()]).norm()
        assert float(wrong / moved) < (1e-3 if name == "fp32" else 0.2)

        # Each state once over both ranks; the optimizer's is the one process's, in halves.
        pieces = [load_file(tmp_path / f"state-{name}-{rank}.safetensors") for rank in (0, 1)]
        assert not pieces[0].keys() & pieces[1].keys()
        sizes = [sum(t.numel() for key, t in each.items() if key.startswith("exp_avg.")) for each in pieces]
        assert max(sizes) < 0.55 * sum(sizes)
        ours = alone[name].state.tensors()
        theirs = joined({**pieces[0], **pieces[1]}, ours)
        assert theirs.keys() == ours.keys()
        for kind in ("exp_avg.", "exp_avg_sq."):
            norm = torch.cat([t.flatten() for key, t in ours.items() if key.startswith(kind)]).norm()
            worst = max(float((t - theirs[key]).abs().max()) for key, t in ours.items() if key.startswith(kind))
            assert worst / norm < TOLERANCE[name]

        # A state crosses over bit for bit: of one process into two, and of two into one.
        weights = dict(mlx_tensors(alone[name].model, config))
        for rank in (0, 1):
            restored = load_file(tmp_path / f"restored-{name}-{rank}.safetensors")
            assert all(torch.equal(restored[key], t) for key, t in expected[name].items())
            served = load_file(tmp_path / f"weights-{name}-{rank}.safetensors")
            assert all(torch.equal(served[key], t) for key, t in weights.items())
        alone[name].state.check_names([*pieces[0], *pieces[1]])
        alone[name].load_state([*pieces[1].items(), *pieces[0].items()])
        assert all(torch.equal(t, theirs[key]) for key, t in alone[name].state.tensors().items())
        lost = next(key for key in pieces[1] if key.startswith("master."))
        with pytest.raises(CheckpointError, match="lacks 1 tensors"):
            alone[name].state.check_names([*pieces[0], *(key for key in pieces[1] if key != lost)])
        with pytest.raises(CheckpointError, match="lacks 1 tensors"):
            alone[name].load_state((key, t) for each in pieces for key, t in each.items() if key != lost)

    _, reread = checkpoints.load(tmp_path / "hub")
    exported = load_file(tmp_path / "wire-fp32-0.safetensors")
    assert all(torch.equal(t, exported[key]) for key, t in mlx_tensors(reread, config))
