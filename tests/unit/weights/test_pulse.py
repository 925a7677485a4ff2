"""The codec of deltas: round trips of every kind of change, sizes against the Shannon bound, refusal of nonsense."""

import math
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stoa.contracts.errors import FormatError, WrongStateError
from stoa.weights.layout import TensorSpec, make_layout
from stoa.weights.pulse import (
    NIBBLE,
    PCO,
    Change,
    Counts,
    counts_of,
    decode_change,
    decode_positions,
    decode_segments,
    encode_change,
    encode_positions,
    merge,
    merge_positions,
    segments_of,
)
from stoa.weights.state import WeightState
from tests.unit.weights.changes import LAYOUT, NUM_CODES, changes, same, sorted_positions

CODECS = [PCO, NIBBLE]


@pytest.mark.parametrize("codec", CODECS)
@given(change=changes())
@settings(max_examples=80, deadline=None)
def test_any_change_comes_back_as_it_went(codec: str, change: Change):
    assert same(decode_change(encode_change(change, codec), counts_of(change), LAYOUT, codec), change)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("positions", [[0, 2**32], [2**33 + 5], [5, 2**32 + 6], [2**31, 2**32 - 1, 2**32, 2**34]])
def test_positions_beyond_32_bits_come_back(positions: list[int], codec: str):
    change = Change(np.array(positions), np.ones(len(positions), dtype=np.int16))
    layout = make_layout([TensorSpec("a.weight", (2**10, 2**25), "int8", "uint8")], "float32")
    sections = encode_change(change, codec)
    assert same(decode_change(sections, counts_of(change), layout, codec), change)
    assert sections["segments"].sum() == len(positions)


@given(changes(), st.sampled_from(CODECS))
def test_change_in_segments_comes_back_and_is_never_whole(change: Change, codec: str):
    sections = encode_change(change, codec, segment_codes=128)
    counts = counts_of(change)
    assert same(decode_change(sections, counts, LAYOUT, codec, segment_codes=128), change)
    for number, part in enumerate(decode_segments(sections, counts, LAYOUT, codec, segment_codes=128)):
        assert ((part.positions >= 128 * number) & (part.positions < 128 * (number + 1))).all()


@pytest.mark.parametrize("segments", [[1, 1, 1], [3, 0], [2, -1], [1], [0, 2], [0, 0, 0, 0, 0, 0, 0, 2]])
def test_segments_that_do_not_hold_the_changes_are_refused(segments: list[int]):
    change = Change(np.array([3, 200]), np.array([1, -1], dtype=np.int16))
    sections = encode_change(change, segment_codes=128)
    assert sections["segments"].tolist() == [1, 1]
    with pytest.raises(FormatError):
        decode_change({**sections, "segments": np.array(segments)}, Counts(2, 0, 0), LAYOUT, PCO, segment_codes=128)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_two_changes_in_a_row_merge_into_one_with_the_same_end(data: st.DataObject):
    start = WeightState.empty(LAYOUT)
    for spec in LAYOUT.quantised:
        start.quantised(spec)[0][...] = 128
    first, second = data.draw(changes(largest=40)), data.draw(changes(largest=40))
    second = replace(second, codes=np.full_like(second.codes, 100))
    first = replace(first, codes=np.full_like(first.codes, 90))
    step, leap = start.copy(), start.copy()
    step.apply(first)
    step.apply(second)
    merged = merge(first, second)
    leap.apply(decode_change(encode_change(merged), counts_of(merged), LAYOUT, PCO))
    assert leap.state_id() == step.state_id()
    assert len(merged.positions) <= len(np.union1d(first.positions, second.positions))


@pytest.mark.parametrize("codec", CODECS)
def test_small_object_that_claims_many_changes_allocates_nothing(codec: str):
    layout = make_layout(
        [TensorSpec("a.weight", (2**10, 2**23), "int8", "uint8"), TensorSpec("c.weight", (5,), "raw", "float32")], "float32"
    )
    change = Change(np.array([3]), np.array([1], dtype=np.int16), np.array([2]), np.array([7], dtype=np.uint32))
    sections = encode_change(change, codec)
    many = 8_000_000_000
    spread = np.full(16, many // 16)
    tracemalloc.start()
    try:
        for claim, extra in ((Counts(many, 1, 0), {}), (Counts(many, 1, 0), {"segments": spread}), (Counts(1, 1, many // 64), {})):
            with pytest.raises(FormatError):
                decode_change({**sections, **extra}, claim, layout, codec)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_change_of_nothing_has_no_sections():
    assert encode_change(Change()) == {}
    assert same(decode_change({}, Counts(0, 0, 0), LAYOUT, PCO), Change())


def test_differences_of_one_step_carry_no_magnitudes():
    change = Change(np.array([3, 9]), np.array([1, -1], dtype=np.int16))
    assert set(encode_change(change)) == {"gaps", "signs"}
    assert encode_change(change)["signs"].tolist() == [0b01]
    larger = Change(np.array([3, 9]), np.array([1, -2], dtype=np.int16))
    assert set(encode_change(larger)) == {"gaps", "signs", "magnitudes"}


@pytest.mark.parametrize(("codec", "most"), [(PCO, 1.02), (NIBBLE, 1.03)])
def test_half_a_percent_of_changes_costs_what_shannon_says(codec: str, most: float):
    rate, size = 0.005, 8_000_000
    chance = np.random.default_rng(1)
    positions = np.flatnonzero(chance.random(size) < rate)
    differences = chance.choice(np.array([-1, 1], dtype=np.int16), len(positions))
    sections = encode_change(Change(positions, differences), codec)
    num_bits = 8 * sum(section.nbytes for section in sections.values())
    found = len(positions) / size
    bound = size * (-found * math.log2(found) - (1 - found) * math.log2(1 - found)) + len(positions)
    assert num_bits / bound <= most
    assert num_bits / len(positions) <= 10.3


@pytest.mark.parametrize("differences", [[0], [256], [-256]])
def test_difference_no_code_can_take_is_refused(differences: list[int]):
    with pytest.raises(FormatError):
        encode_change(Change(np.array([1]), np.array(differences, dtype=np.int16)))


@pytest.mark.parametrize("positions", [[3, 3], [4, 2]])
def test_positions_that_do_not_increase_are_refused(positions: list[int]):
    with pytest.raises(FormatError):
        encode_positions(np.array(positions, dtype=np.int64))


@pytest.mark.parametrize("codec", CODECS)
def test_position_at_the_limit_is_refused(codec: str):
    blob = encode_positions(np.array([0, 99], dtype=np.int64), codec)
    assert decode_positions(blob, 2, 100, codec).tolist() == [0, 99]
    with pytest.raises(FormatError):
        decode_positions(blob, 2, 99, codec)


def test_gaps_whose_sum_wraps_are_refused():
    gaps = np.full(4, 2**62, dtype=np.uint64)
    from pcodec import ChunkConfig, standalone

    blob = np.frombuffer(b"\x08" + standalone.simple_compress(gaps, ChunkConfig()), dtype=np.uint8)
    with pytest.raises(FormatError):
        decode_positions(blob, 4, 2**63 - 1, PCO)


@pytest.mark.parametrize("widest", [2**32 - 1, 2**32 - 2])
def test_a_gap_that_no_step_can_be_is_refused(widest: int):
    """One more than the widest gap wraps to a step of 0, which would give one position twice."""
    from pcodec import ChunkConfig, standalone

    gaps = np.array([5, widest, 0], dtype=np.uint32)
    blob = np.frombuffer(b"\x04" + standalone.simple_compress(gaps, ChunkConfig()), dtype=np.uint8)
    with pytest.raises(FormatError):
        decode_positions(blob, 3, 2**32, PCO)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("wrong", [Counts(3, 1, 1), Counts(2, 2, 1), Counts(2, 1, 2), Counts(2, 1, 0), Counts(0, 1, 1), Counts(-1, 1, 1)])
def test_counts_that_differ_from_the_sections_are_refused(codec: str, wrong: Counts):
    change = Change(
        np.array([3, 9]),
        np.array([1, 5], dtype=np.int16),
        np.array([2]),
        np.array([7], dtype=np.uint32),
        np.array([4]),
        np.array([1], dtype=np.uint16),
        np.array([2], dtype=np.uint16),
        np.zeros((1, 64), dtype=np.uint8),
    )
    assert same(decode_change(encode_change(change, codec), Counts(2, 1, 1), LAYOUT, codec), change)
    with pytest.raises(FormatError):
        decode_change(encode_change(change, codec), wrong, LAYOUT, codec)


def test_counts_beyond_the_layout_are_refused_before_any_buffer_is_made():
    for counts in (Counts(2**50, 0, 0), Counts(0, 2**50, 0), Counts(0, 0, 2**50)):
        with pytest.raises(FormatError):
            decode_change({}, counts, LAYOUT, PCO)


def test_code_inside_a_regridded_group_and_unknown_sections_are_refused():
    inside = Change(
        np.array([65]),
        np.array([1], dtype=np.int16),
        groups=np.array([1]),
        scales=np.zeros(1, np.uint16),
        biases=np.zeros(1, np.uint16),
        codes=np.zeros((1, 64), np.uint8),
    )
    with pytest.raises(FormatError, match="with its group"):
        decode_change(encode_change(inside), counts_of(inside), LAYOUT, PCO)
    with pytest.raises(FormatError, match="belongs to nothing"):
        decode_change({"surprise": np.zeros(1, np.uint8)}, Counts(0, 0, 0), LAYOUT, PCO)


@pytest.mark.parametrize("codec", CODECS)
@given(positions=sorted_positions(NUM_CODES, 60).filter(bool), noise=st.integers(0, 2**32 - 1))
@settings(max_examples=80, deadline=None)
def test_damaged_gaps_give_sound_positions_or_a_typed_error(codec: str, positions: list[int], noise: int):
    blob = encode_positions(np.array(positions, dtype=np.int64), codec).copy()
    chance = np.random.default_rng(noise)
    blob[chance.integers(len(blob))] ^= 1 << chance.integers(8)
    try:
        found = decode_positions(blob, len(positions), NUM_CODES, codec)
    except FormatError:
        return
    assert len(found) == len(positions)
    assert (np.diff(found) > 0).all()
    assert 0 <= found[0] <= found[-1] < NUM_CODES


@given(st.lists(changes(largest=3), min_size=1, max_size=4))
@settings(max_examples=60, deadline=None)
def test_merged_positions_sum_to_what_the_changes_do_one_after_the_other(steps: list[Change]):
    total = np.zeros(NUM_CODES, dtype=int)
    for step in steps:
        total[step.positions] += step.differences
    groups = np.unique(np.concatenate([step.groups for step in steps]))
    positions, differences = merge_positions(steps, groups)
    for group in groups:
        total[group * 64 : group * 64 + 64] = 0
    assert positions.tolist() == np.flatnonzero(total).tolist()
    assert differences.tolist() == total[positions].tolist()


@given(changes(largest=100))
@settings(max_examples=80, deadline=None)
def test_apply_does_what_plain_arithmetic_does_and_undo_takes_it_back(change: Change):
    state = WeightState.empty(LAYOUT)
    for spec in LAYOUT.quantised:
        state.arrays[spec.name][...] = 128
    before = state.copy()
    flat = np.full(NUM_CODES, 128)
    flat[change.positions] += change.differences
    for group, codes in zip(change.groups, change.codes, strict=True):
        flat[group * 64 : group * 64 + 64] = codes
    undo = state.apply(change)
    found = np.concatenate([state.arrays[name].reshape(-1) for name in ("a.weight", "b.weight")])
    assert found.tolist() == flat.tolist()
    scales = np.concatenate([state.arrays[name].reshape(-1) for name in ("a.scales", "b.scales")])
    assert scales[change.groups].tolist() == change.scales.tolist()
    raw = state.arrays["c.weight"].view(np.uint32)
    assert raw[change.raw_positions].tolist() == change.raw_values.tolist()
    state.undo(undo)
    assert state.state_id() == before.state_id()


@pytest.mark.parametrize(("code", "difference"), [(255, 1), (0, -1), (250, 6), (100, -101)])
def test_change_that_would_wrap_a_code_is_refused_and_writes_nothing(code: int, difference: int):
    state = WeightState.empty(LAYOUT)
    state.arrays["a.weight"][...] = 128
    state.arrays["b.weight"][...] = code
    before = state.state_id()
    change = Change(np.array([0, 300]), np.array([1, difference], dtype=np.int16), np.array([0]), np.array([9], dtype=np.uint32))
    with pytest.raises(FormatError, match="leaves the codes"):
        state.apply(change)
    assert state.state_id() == before


@given(changes(largest=100), st.integers(1, 7))
@settings(max_examples=60, deadline=None)
def test_segments_written_at_once_give_what_the_whole_change_gives(change: Change, num_groups: int):
    whole, parts = WeightState.empty(LAYOUT), WeightState.empty(LAYOUT)
    for state in (whole, parts):
        for spec in LAYOUT.quantised:
            state.arrays[spec.name][...] = 128
    whole.apply(change)
    parts.apply_segments(segments_of(change, 64 * num_groups))
    assert parts.verified_id is None
    assert parts.state_id() == whole.state_id()


@pytest.mark.parametrize("wrong", [0, 2, 4, 6])
def test_segment_that_cannot_be_applied_leaves_all_as_it_was_or_says_that_it_did_not(wrong: int):
    state = WeightState.empty(LAYOUT)
    for spec in LAYOUT.quantised:
        state.arrays[spec.name][...] = 128
    before = state.state_id()
    positions = np.arange(7) * 128
    differences = np.where(np.arange(7) == wrong, 200, 1).astype(np.int16)
    with pytest.raises(WrongStateError, match="in part") as caught:
        state.apply_segments(segments_of(Change(positions, differences), 128))
    assert "leaves the codes" in caught.value.message
    assert state.verified_id is None
    alone = state.copy()
    with pytest.raises(FormatError, match="leaves the codes"):
        alone.apply_segments([Change(positions[wrong : wrong + 1], differences[wrong : wrong + 1])])
    assert alone.state_id() == state.state_id() != before


def test_changes_that_break_off_are_told_as_torn_where_something_was_written():
    def torn(num_good: int):
        yield from (Change(np.array([n]), np.ones(1, np.int16)) for n in range(num_good))
        raise FormatError("a pcodec stream is torn")

    for num_good, error in ((0, FormatError), (1, WrongStateError), (30, WrongStateError)):
        with pytest.raises(error, match="torn"):
            WeightState.empty(LAYOUT).apply_segments(torn(num_good))
