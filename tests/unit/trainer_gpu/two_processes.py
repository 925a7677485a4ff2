"""One of two processes that torchrun starts: train a step in fp32 and in bf16, with the experts cut in two or not, and write what came out.

Run as `python -m torch.distributed.run --nproc-per-node 2 -m tests.unit.trainer_gpu.two_processes CHECKPOINT OUT EXPERT`.
OUT/one-DTYPE.safetensors holds the state of one process after the same step, which is taken back at the end.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from tests.unit.trainer_gpu import checkpoints
from trainer_gpu import host
from trainer_gpu.convert import mlx_tensors, save_hub
from trainer_gpu.layout import Layout
from trainer_gpu.model import token_logprobs_packed
from trainer_gpu.parallel import Trainable, build_optimizer

# Sequence lengths of rank 0 and rank 1, uneven on purpose.
ROWS = ((9, 4, 12), (30,))
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def row(lengths: tuple[int, ...]) -> torch.Tensor:
    draw = torch.Generator().manual_seed(len(lengths))
    return torch.randint(0, checkpoints.VOCAB, (sum(lengths),), generator=draw).to(host.device())


def step(trainable: Trainable, rows: tuple[tuple[int, ...], ...]) -> float:
    """One step on rows of these lengths; the gradient norm."""
    model = trainable.model
    return trainable.step([lambda lengths=lengths: -token_logprobs_packed(model, row(lengths), lengths)[0].sum() / 55 for lengths in rows])


def made(model) -> Trainable:
    return build_optimizer(model, lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0, clip_grad=0.05)


def main(checkpoint: Path, out: Path, expert: int) -> None:
    host.setup_process(num_threads=1, seed=0, layout=Layout(expert=expert))
    rank = dist.get_rank()
    for name, dtype in DTYPES.items():
        config, model = checkpoints.load(checkpoint, dtype)
        trainable = made(model)
        norm = step(trainable, ROWS[rank : rank + 1])
        if dtype == torch.float32:
            save_hub(model, config, out / "hub")
        tensors = {name: t.clone() for name, t in mlx_tensors(model, config, trainable.masters())}
        tensors["update_norm"] = torch.tensor(trainable.update_norm())
        save_file(tensors | {"norm": torch.tensor(norm)}, out / f"wire-{name}-{rank}.safetensors")
        save_file({name: t.contiguous() for name, t in trainable.state.tensors(own=True).items()}, out / f"state-{name}-{rank}.safetensors")

        saved = load_file(out / f"one-{name}.safetensors")
        trainable.state.check_names(saved)
        trainable.load_state((full, t) for full, t in saved.items() if trainable.state.wants(full))
        restored = {name: t.clone() for name, t in mlx_tensors(model, config, trainable.masters())}
        save_file(restored, out / f"restored-{name}-{rank}.safetensors")
        weights = {name: t.clone() for name, t in mlx_tensors(model, config)}
        save_file(weights, out / f"weights-{name}-{rank}.safetensors")
    host.teardown_process()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
