"""How long an update of these weights takes: a delta as wide as a version's, encoded, applied in place and rescanned.

It is drawn at random, one code in a hundred by one step up or down, and goes through the same functions as a version's.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from stoa.weights.layout import Layout
from stoa.weights.pulse import PCO, SEGMENT_CODES, Change, decode_segments, encode_segments
from stoa.weights.state import WeightState

ONE_IN: Final = 100
"""Codes to each one that changes."""


@dataclass(frozen=True, slots=True)
class Update:
    """Seconds of each part, on this machine's processor."""

    num_changed: int
    num_bytes: int
    """Of the encoded delta, without its header."""
    encode_seconds: float
    """The trainer's part in a run."""
    apply_seconds: float
    """Decoded and written in place: nothing is played meanwhile."""
    rescan_seconds: float
    """Digests of all weights, beside decoding."""


def measure_update(state: WeightState) -> Update:
    """Change `state` once, as a version does."""
    drawn = list(_changes(state))
    started = time.perf_counter()
    sections, counts = encode_segments(drawn)
    encoded = time.perf_counter()
    del drawn
    begun = time.perf_counter()
    state.apply_segments(decode_segments(sections, counts, state.layout, PCO))
    applied = time.perf_counter()
    state.state_id()
    done = time.perf_counter()
    num_bytes = sum(section.nbytes for section in sections.values())
    return Update(counts.num_changed, num_bytes, encoded - started, applied - begun, done - applied)


def _changes(state: WeightState) -> Iterator[Change]:
    """One change a segment: about one position in ONE_IN, a step away from the nearer end of the codes."""
    chance, layout = np.random.default_rng(0), state.layout
    for start in range(0, layout.num_codes, SEGMENT_CODES):
        size = min(SEGMENT_CODES, layout.num_codes - start)
        positions = start + np.unique(chance.integers(0, size, max(1, size // ONE_IN), dtype=np.int64))
        yield Change(positions, np.where(_codes_at(state, layout, positions) < 128, 1, -1).astype(np.int16))


def _codes_at(state: WeightState, layout: Layout, positions: np.ndarray) -> np.ndarray:
    """uint8 [C]: the codes at these increasing positions of the code space."""
    codes, offset = np.empty(len(positions), np.uint8), 0
    for spec in layout.quantised:
        first, last = np.searchsorted(positions, [offset, offset + spec.num_elements])
        codes[first:last] = state.arrays[spec.name].view(np.uint8).reshape(-1)[positions[first:last] - offset]
        offset += spec.num_elements
    return codes
