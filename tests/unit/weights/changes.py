"""Strategies of hypothesis and a layout for tests of the codec, and the golden delta."""

from pathlib import Path

import numpy as np
from hypothesis import strategies as st

from stoa.weights.layout import Layout, TensorSpec, make_layout
from stoa.weights.pulse import Change

GOLDEN = np.load(Path(__file__).parents[2] / "golden" / "delta.npz")
SPECS = [
    TensorSpec("a.weight", (2, 64), "int8", "uint8"),
    TensorSpec("b.weight", (3, 2, 128), "int8", "uint8"),
    TensorSpec("c.weight", (5,), "raw", "float32"),
    TensorSpec("m.expert_bias", (4,), "raw", "float32"),
]
LAYOUT = make_layout(SPECS, "float32")
NUM_CODES = 2 * 64 + 3 * 2 * 128


def golden_layout() -> Layout:
    """The layout of delta.npz, under the id it was written with."""
    import hashlib

    return Layout(hashlib.sha256(b"golden").hexdigest(), LAYOUT.tensors, "float32")


def golden_arrays(which: str) -> dict[str, np.ndarray]:
    """Arrays of the state the golden delta starts from (`base`) or ends at (`next`)."""
    return {name.partition(".")[2]: GOLDEN[name].copy() for name in GOLDEN.files if name.startswith(f"{which}.")}


def sorted_positions(limit: int, max_size: int) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, limit - 1), max_size=max_size, unique=True).map(sorted)


@st.composite
def changes(draw: st.DrawFn, *, largest: int = 255) -> Change:
    """Any change of LAYOUT: none, all, first and last position, large differences, raw values, whole groups."""
    groups = draw(sorted_positions(NUM_CODES // 64, 4))
    free = np.array([p for p in range(NUM_CODES) if p // 64 not in groups], dtype=np.int64)
    positions = draw(
        st.one_of(st.just(free), sorted_positions(NUM_CODES, 60).map(lambda p: np.intersect1d(free, np.array(p, dtype=np.int64))))
    )
    nonzero = st.integers(-largest, largest).filter(bool)
    sizes = draw(st.sampled_from([st.sampled_from([-1, 1]), nonzero]))
    differences = draw(st.lists(sizes, min_size=len(positions), max_size=len(positions)))
    raw = draw(sorted_positions(5, 5))
    bits = draw(st.lists(st.integers(0, 2**32 - 1), min_size=len(raw), max_size=len(raw)))
    short = st.lists(st.integers(0, 2**16 - 1), min_size=len(groups), max_size=len(groups))
    codes = draw(st.binary(min_size=64 * len(groups), max_size=64 * len(groups)))
    return Change(
        positions,
        np.array(differences, dtype=np.int16),
        np.array(raw, dtype=np.int64),
        np.array(bits, dtype=np.uint32),
        np.array(groups, dtype=np.int64),
        np.array(draw(short), dtype=np.uint16),
        np.array(draw(short), dtype=np.uint16),
        np.frombuffer(codes, dtype=np.uint8).reshape(-1, 64),
    )


def same(left: Change, right: Change) -> bool:
    """True if every array of two changes is equal."""
    return all(np.array_equal(getattr(left, name), getattr(right, name)) for name in Change.__dataclass_fields__)
