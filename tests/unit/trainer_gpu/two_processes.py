"""One of two processes that torchrun starts: train one step with the experts cut in two, and write what came out.

Run as `python -m torch.distributed.run --nproc-per-node 2 -m tests.unit.trainer_gpu.two_processes CHECKPOINT OUT EXPERT`.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from stoa.contracts.errors import LayoutError
from tests.unit.trainer_gpu import checkpoints
from trainer_gpu import host
from trainer_gpu.convert import mlx_tensors, save_hub
from trainer_gpu.layout import Layout
from trainer_gpu.model import token_logprobs_packed
from trainer_gpu.parallel import build_optimizer

# Sequence lengths of rank 0 and rank 1. Uneven, except where cutting the experts forbids it on a CPU.
ROWS = {1: ((9, 4, 12), (30,)), 2: ((9, 9, 12), (30,))}


def row(lengths: tuple[int, ...]) -> torch.Tensor:
    draw = torch.Generator().manual_seed(len(lengths))
    return torch.randint(0, checkpoints.VOCAB, (sum(lengths),), generator=draw)


def main(checkpoint: Path, out: Path, expert: int) -> None:
    host.setup_process(num_threads=1, seed=0, layout=Layout(expert=expert))
    rank = dist.get_rank()
    config, model = checkpoints.load(checkpoint)
    trainable = build_optimizer(model, lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0, clip_grad=0.05)
    lengths = ROWS[expert][rank]
    norm = trainable.step([lambda: -token_logprobs_packed(model, row(lengths), lengths)[0].sum() / 55])
    save_hub(model, config, out / "hub")
    tensors = {name: t.clone() for name, t in mlx_tensors(model, config, trainable.masters())}
    save_file(tensors | {"norm": torch.tensor(norm)}, out / f"rank{rank}.safetensors")
    save_file({name: t.contiguous() for name, t in trainable.state_tensors().items()}, out / f"state{rank}.safetensors")
    if expert > 1:
        uneven = 5 + rank
        try:
            token_logprobs_packed(model, row((uneven,)), (uneven,))
        except LayoutError as error:
            assert "rows of [5, 6] tokens" in str(error)
        else:
            raise AssertionError("uneven rows must be refused")
    host.teardown_process()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
