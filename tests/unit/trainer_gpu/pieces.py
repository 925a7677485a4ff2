"""Whole tensors from the named pieces that several processes hold."""

import math
import re

import torch


def joined(pieces: dict[str, torch.Tensor], like: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Whole tensors from named pieces of several processes; every element must come exactly once."""
    whole: dict[str, torch.Tensor] = {}
    filled: dict[str, int] = {}
    for name, tensor in pieces.items():
        found = re.fullmatch(r"(.*)\[(\d+):(\d+)\]", name)
        if not found:
            whole[name] = tensor
            continue
        base, start, stop = found[1], int(found[2]), int(found[3])
        target = whole.setdefault(base, torch.full(like[base].shape, math.nan, dtype=tensor.dtype))
        assert torch.isnan(target.view(-1)[start:stop]).all(), f"{name} overlaps another piece"
        target.view(-1)[start:stop] = tensor
        filled[base] = filled.get(base, 0) + stop - start
    assert all(size == whole[name].numel() for name, size in filled.items())
    return whole
