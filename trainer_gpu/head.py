"""The vocabulary head: log-probabilities and entropies of given tokens without ever holding all logits.

Logits are made a chunk of rows at a time, in fp32, and made again in the backward pass. Where rows come from and
what is done with the result is not known here.

Shapes: R rows, D hidden, V vocabulary, C rows of a chunk.
"""

from typing import Any

import torch

# fp32 logits of one chunk. Their exponentials live beside them, so the peak is twice this.
MAX_LOGITS_BYTES = 64 * 2**20


def token_logprobs(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, max_logits_bytes: int = MAX_LOGITS_BYTES
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logarithm of softmax(hidden @ weight.T) at `targets`, and the entropy of each row's distribution.

    Args:
        hidden: [R, D], fp32 or bf16.
        weight: [V, D], same type.
        targets: int64 [R], each below V.
        max_logits_bytes: of the fp32 logits made at once; at least one row is.

    Returns:
        logprob fp32 [R], differentiable in hidden and weight; entropy in nats fp32 [R], not differentiable.
    """
    return _TokenLogprobs.apply(hidden, weight, targets, max_logits_bytes)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, max_logits_bytes: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.chunks = _chunks(len(targets), weight.shape[0], max_logits_bytes)
        logprob = torch.empty(len(targets), dtype=torch.float32, device=hidden.device)
        normaliser, entropy = torch.empty_like(logprob), torch.empty_like(logprob)
        for rows in ctx.chunks:
            logits = _logits(hidden[rows], weight)
            normaliser[rows] = torch.logsumexp(logits, -1)
            log_p = logits.sub_(normaliser[rows, None])
            logprob[rows] = log_p.gather(1, targets[rows, None]).squeeze(1)
            entropy[rows] = log_p.exp().mul_(log_p).sum(-1).neg_()
        ctx.save_for_backward(hidden, weight, targets, normaliser)
        ctx.mark_non_differentiable(entropy)
        return logprob, entropy

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None]:
        grad_logprob = grad_outputs[0]
        hidden, weight, targets, normaliser = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
        for rows in ctx.chunks:
            # d ln p[target] / d logits = onehot(target) - p
            grad = _logits(hidden[rows], weight).sub_(normaliser[rows, None]).exp_()
            grad.mul_(-grad_logprob[rows, None])
            grad.scatter_add_(1, targets[rows, None], grad_logprob[rows, None])
            grad = grad.to(weight.dtype)
            grad_hidden[rows] = grad @ weight
            grad_weight += grad.t() @ hidden[rows]
        return grad_hidden, grad_weight.to(weight.dtype), None, None


def _logits(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """fp32 [C, V], accumulated in fp32 whatever the inputs' type."""
    if hidden.dtype == torch.float32:
        return hidden @ weight.t()
    if hidden.is_cuda:
        return torch.mm(hidden, weight.t(), out_dtype=torch.float32)
    return hidden.float() @ weight.float().t()


def _chunks(num_rows: int, vocab_size: int, max_logits_bytes: int) -> list[slice]:
    size = max(1, max_logits_bytes // (4 * vocab_size))
    return [slice(start, min(start + size, num_rows)) for start in range(0, num_rows, size)]
