"""Sequences laid one after another in one row: where each begins, and what follows from that.

Computed once a forward pass and handed to every layer in place of Megatron's own PackedSeqParams. Which sequences
share a row is decided elsewhere.

Shapes: T tokens of the row, B sequences, S longest sequence.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from megatron.core.packed_seq_params import PackedSeqParams

# RoPE tables are cached per length; a coarse step keeps the cache small.
_LENGTH_STEP = 64


@dataclass
class PackedRow(PackedSeqParams):
    """Megatron's parameters of a packed row plus index tensors."""

    positions: torch.Tensor = field(default_factory=torch.Tensor)  # int64 [T], index in the own sequence
    padded_slots: torch.Tensor = field(default_factory=torch.Tensor)  # int64 [T], slot in a [B * S] padded batch
    num_sequences: int = 0
    longest: int = 0


def pack_row(seq_lens: Sequence[int], device: torch.device) -> PackedRow:
    """Describe a row of sequences of `seq_lens` tokens each (all > 0), in order."""
    if not seq_lens or min(seq_lens) < 1:
        raise ValueError(f"a packed row needs sequences of at least one token, got lengths {list(seq_lens)[:8]}")
    lengths = torch.tensor(seq_lens, dtype=torch.int64)
    starts = torch.zeros(len(seq_lens) + 1, dtype=torch.int64)
    torch.cumsum(lengths, 0, out=starts[1:])
    num_tokens, longest = int(starts[-1]), max(seq_lens)
    positions = torch.arange(num_tokens) - starts[:-1].repeat_interleave(lengths)
    rows = torch.arange(len(seq_lens)).repeat_interleave(lengths)
    # Megatron reads a RoPE table of exactly T rows as "one table for all sequences"; keep clear of that.
    table = -(-longest // _LENGTH_STEP) * _LENGTH_STEP
    table += _LENGTH_STEP if table == num_tokens else 0
    offsets = starts.to(device, torch.int32)
    return PackedRow(
        qkv_format="thd",
        cu_seqlens_q=offsets,
        cu_seqlens_kv=offsets,
        max_seqlen_q=table,
        max_seqlen_kv=table,
        positions=positions.to(device),
        padded_slots=(rows * longest + positions).to(device),
        num_sequences=len(seq_lens),
        longest=longest,
    )
