"""AdamW over pieces of weights, with its state in a chosen type and place: what Megatron's distributed optimizer steps.

It stands where TransformerEngine's fused optimizer would: it owns the fp32 masters, reads `decoupled_grad`, and writes
the weights that the forward pass reads. Which piece of which weight this process has is Megatron's; names are
`state.py`'s. The update itself is torch's.

Shapes: N elements of a piece, C elements of a block.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.adamw import adamw

from trainer_gpu import host

BLOCK = 1 << 22
"""Elements that are worked on at once where the state is not where or as the update wants it."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece's weights [N] as the forward pass reads them, and its state. An fp32 weight is its own master."""

    weight: torch.Tensor
    master: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor


class Adam:
    """AdamW (arXiv 1711.05101) with bias correction. `param_groups` are Megatron's: lr and weight_decay may change between steps."""

    def __init__(
        self, param_groups: list[dict[str, Any]], *, betas: tuple[float, float], eps: float, moment_dtype: torch.dtype, on_host: bool
    ) -> None:
        """Begin with zero moments.

        Args:
            param_groups: each with `params` (1-D pieces on the device, fp32 or bf16), `lr` and `weight_decay`.
            moment_dtype: of both moments between steps; fp32 or bf16. The update is computed in fp32.
            on_host: keep masters and moments in the host's memory, and update there.
        """
        self.param_groups = param_groups
        self.num_steps = 0
        self._betas, self._eps = betas, eps
        place = torch.device("cpu") if on_host else host.device()
        self._in_blocks = on_host or moment_dtype != torch.float32
        self._gradients = torch.empty(BLOCK if on_host else 0, pin_memory=on_host and host.HAS_CUDA)
        """A block of gradients on their way to the host."""
        self._pieces: dict[torch.Tensor, Piece] = {}
        for group in param_groups:
            for weight in group["params"]:
                master = weight.detach().to(place, torch.float32)
                moments = [torch.zeros(master.shape, dtype=moment_dtype, device=place) for _ in range(2)]
                self._pieces[weight] = Piece(weight.detach(), master, *moments)

    def piece(self, weight: torch.Tensor) -> Piece:
        """The piece of an element of some group's `params`."""
        return self._pieces[weight]

    @torch.no_grad()
    def step(self) -> None:
        """One update from every weight's `decoupled_grad`, fp32 or bf16 [N] on the device."""
        self.num_steps += 1
        for group in self.param_groups:
            grads = [weight.decoupled_grad for weight in group["params"]]
            pieces = [self._pieces[weight] for weight in group["params"]]
            if self._in_blocks:
                for piece, grad in zip(pieces, grads, strict=True):
                    for first in range(0, len(grad), BLOCK):
                        self._step_block(group, piece, grad, slice(first, first + BLOCK))
                continue
            self._update(
                group, [p.master for p in pieces], [g.float() for g in grads], [p.exp_avg for p in pieces], [p.exp_avg_sq for p in pieces]
            )
            for piece in pieces:
                if piece.master.data_ptr() != piece.weight.data_ptr():
                    piece.weight.copy_(piece.master)

    @torch.no_grad()
    def update_norm(self) -> float:
        """Norm of the last update of all pieces, worked out again from the moments; weight decay is left out. 0 before a step."""
        if not self.num_steps:
            return 0.0
        first, second = (1 - beta**self.num_steps for beta in self._betas)
        total = 0.0
        for group in self.param_groups:
            squares: list[torch.Tensor] = []
            for piece in (self._pieces[weight] for weight in group["params"]):
                for rows in (slice(start, start + BLOCK) for start in range(0, len(piece.master), BLOCK)):
                    moved = piece.exp_avg[rows].float() / ((piece.exp_avg_sq[rows].float() / second).sqrt_().add_(self._eps))
                    squares.append(moved.square_().sum())
            total += (group["lr"] / first) ** 2 * float(torch.stack(squares).sum()) if squares else 0.0
        return math.sqrt(total)

    @torch.no_grad()
    def forget(self) -> None:
        """Take the weights, which somebody has filled anew, as masters of an optimizer that never stepped."""
        self.num_steps = 0
        for piece in self._pieces.values():
            piece.master.copy_(piece.weight)
            piece.exp_avg.zero_()
            piece.exp_avg_sq.zero_()

    def _step_block(self, group: dict[str, Any], piece: Piece, grad: torch.Tensor, rows: slice) -> None:
        """The update of a block [C] of one piece, where its state is, in fp32."""
        master, slope = piece.master[rows], grad[rows]
        if len(self._gradients):
            slope = self._gradients[: len(slope)].copy_(slope)
        moments = [moment[rows].float() for moment in (piece.exp_avg, piece.exp_avg_sq)]
        self._update(group, [master], [slope.float()], [moments[0]], [moments[1]])
        for kept, moment in zip((piece.exp_avg, piece.exp_avg_sq), moments, strict=True):
            kept[rows].copy_(moment)
        piece.weight[rows].copy_(master)

    def _update(
        self,
        group: dict[str, Any],
        masters: list[torch.Tensor],
        grads: list[torch.Tensor],
        exp_avgs: list[torch.Tensor],
        exp_avg_sqs: list[torch.Tensor],
    ) -> None:
        """Torch's fused AdamW, in place; it counts the step itself."""
        adamw(
            masters,
            grads,
            exp_avgs,
            exp_avg_sqs,
            [],
            self._counts(masters),
            fused=True,
            amsgrad=False,
            beta1=self._betas[0],
            beta2=self._betas[1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=self._eps,
            maximize=False,
        )

    def _counts(self, masters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [torch.tensor(float(self.num_steps - 1), device=master.device) for master in masters]
