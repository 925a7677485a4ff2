"""Which Mac teaches which rows of a step, and how many at once. Pure: every rank computes the same from the same numbers.

An update is the sum over all rows of a step whoever computed them, so a division may follow speed and memory freely: a
fast Mac takes more rows, a small one shorter ones.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from environments.demonstrations import Demonstration

PAD_TO: Final = 8
"""Rows are padded to a multiple of this, so that fewer sizes of buffers come up."""


@dataclass(frozen=True, slots=True)
class Host:
    """What one rank can do: its speed in any unit, and the longest row its memory takes."""

    share: float
    max_tokens: int


def padded(length: int) -> int:
    """The length a row is computed at."""
    return -(-length // PAD_TO) * PAD_TO


def split_rows(lengths: Sequence[int], hosts: Sequence[Host]) -> list[list[int]]:
    """Rows by rank, the longest first, each to the rank that would be done with it soonest; rows too long for all are in none."""
    loads = [0.0] * len(hosts)
    rows: list[list[int]] = [[] for _ in hosts]
    for row in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        able = [rank for rank, host in enumerate(hosts) if lengths[row] <= host.max_tokens]
        if not able:
            continue
        best = min(able, key=lambda rank: ((loads[rank] + lengths[row]) / hosts[rank].share, rank))
        loads[best] += lengths[row]
        rows[best].append(row)
    return rows


def micro_batches(rows: Sequence[int], lengths: Sequence[int], rows_at: Callable[[int], int]) -> list[list[int]]:
    """Rows in order of length, as many at once as `rows_at(padded length of the longest)` allows."""
    batches: list[list[int]] = []
    left = sorted(rows, key=lambda index: (-lengths[index], index))
    while left:
        take = max(1, rows_at(padded(lengths[left[0]])))
        batches.append(left[:take])
        left = left[take:]
    return batches


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows padded on the right. B rows, T tokens, P targets.

    `ids`: int32 [B, T]. `places`: int32 [P], the flat places in [B, T] that a target follows; `targets`: int32 [P];
    `weights`: float32 [P].
    """

    ids: np.ndarray
    places: np.ndarray
    targets: np.ndarray
    weights: np.ndarray

    @classmethod
    def of(cls, rows: Sequence[Demonstration]) -> "Batch":
        """The rows, the longest of which sets T."""
        length = padded(max(len(row.ids) for row in rows))
        ids_BT = np.zeros((len(rows), length), np.int32)
        weights_BT = np.zeros((len(rows), length), np.float32)
        for index, row in enumerate(rows):
            ids_BT[index, : len(row.ids)] = row.ids
            weights_BT[index, : len(row.ids)] = row.weights
        shown, following = weights_BT[:, 1:], ids_BT[:, 1:]
        at_B, at_T = np.nonzero(shown)
        places = (at_B * length + at_T).astype(np.int32)
        return cls(ids_BT, places, following[at_B, at_T], shown[at_B, at_T])
