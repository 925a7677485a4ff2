"""Bytes of deltas and anchors: the golden delta, agreement with the safetensors package, and refusal of damage."""

import contextlib
import dataclasses
import json
import struct

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from stoa.contracts.errors import FormatError, LayoutError, WrongBaseError, WrongStateError
from stoa.weights import container
from stoa.weights.container import DeltaHeader, decode_delta, encode_delta, read_table, write_table
from stoa.weights.pulse import Change, Counts, counts_of
from stoa.weights.state import WeightState
from tests.unit.weights.changes import GOLDEN, LAYOUT, changes, golden_arrays, golden_layout, same

BASE_ID, NEXT_ID = (str(value) for value in GOLDEN["state_ids"])
GOLDEN_HEADER = DeltaHeader("golden", 6, 7, BASE_ID, NEXT_ID, golden_layout().layout_id, "pco-8")
GOLDEN_COUNTS = Counts(9, 2, 1)
GOLDEN_BYTES = GOLDEN["delta"].tobytes()
HEADER = DeltaHeader("run", 3, 4, "0" * 64, "1" * 64, LAYOUT.layout_id, "pco-8")


def test_golden_delta_turns_the_golden_base_into_the_golden_next_state():
    state = WeightState(golden_layout(), golden_arrays("base"))
    assert state.state_id() == BASE_ID
    state.apply(decode_delta(GOLDEN_BYTES, GOLDEN_HEADER, GOLDEN_COUNTS, golden_layout()))
    for name, array in golden_arrays("next").items():
        assert state.arrays[name].tobytes() == array.tobytes(), name
    assert state.state_id() == NEXT_ID


@given(changes(), st.sampled_from(["pco-8", "nibble-zstd-1"]))
@settings(max_examples=40, deadline=None)
def test_delta_comes_back_as_it_went_and_opens_with_the_safetensors_package(change: Change, codec: str):
    header = dataclasses.replace(HEADER, codec=codec)
    data = encode_delta(header, change)
    assert same(decode_delta(data, header, counts_of(change), LAYOUT), change)
    sections = safetensors.numpy.load(data)
    assert ("signs" in sections) == bool(len(change.positions))


@pytest.mark.parametrize(
    ("field", "value", "error"),
    [
        ("run", "other", WrongBaseError),
        ("base", 2, WrongBaseError),
        ("version", 5, WrongBaseError),
        ("base_state_id", "2" * 64, WrongBaseError),
        ("state_id", "2" * 64, WrongBaseError),
        ("layout_id", "2" * 64, WrongBaseError),
        ("codec", "nibble-zstd-1", FormatError),
    ],
)
def test_delta_that_says_otherwise_than_its_manifest_is_refused(field: str, value: object, error: type[Exception]):
    data = encode_delta(HEADER, Change(np.array([1]), np.array([1], dtype=np.int16)))
    with pytest.raises(error, match=field):
        decode_delta(data, dataclasses.replace(HEADER, **{field: value}), Counts(1, 0, 0), LAYOUT)


def test_delta_with_other_counts_than_its_manifest_is_refused():
    data = encode_delta(HEADER, Change(np.array([1]), np.array([1], dtype=np.int16)))
    with pytest.raises(FormatError, match="num_changed"):
        decode_delta(data, HEADER, Counts(2, 0, 0), LAYOUT)


@given(st.integers(0, 8 * len(GOLDEN_BYTES) - 1))
@settings(max_examples=150, deadline=None)
def test_golden_delta_with_a_flipped_bit_never_crashes_the_decoder(bit: int):
    damaged = bytearray(GOLDEN_BYTES)
    damaged[bit // 8] ^= 1 << bit % 8
    with contextlib.suppress(FormatError, WrongBaseError):
        decode_delta(bytes(damaged), GOLDEN_HEADER, GOLDEN_COUNTS, golden_layout())


@given(st.integers(0, len(GOLDEN_BYTES) - 1))
@settings(max_examples=60, deadline=None)
def test_truncated_delta_is_refused(length: int):
    with pytest.raises((FormatError, WrongBaseError)):
        decode_delta(GOLDEN_BYTES[:length], GOLDEN_HEADER, GOLDEN_COUNTS, golden_layout())


def test_table_opens_with_the_safetensors_package_and_back():
    arrays = {"codes": np.arange(12, dtype=np.uint32).reshape(3, 4), "bytes": np.arange(5, dtype=np.uint8)}
    data = write_table({"codes": ("U32", arrays["codes"]), "bytes": ("U8", arrays["bytes"])}, {"a": "b"})
    for name, array in safetensors.numpy.load(data).items():
        assert array.tolist() == arrays[name].tolist()
    theirs = read_table(safetensors.numpy.save(arrays, metadata={"x": "y"}))
    assert theirs.metadata == {"x": "y"}
    assert {name: array.tolist() for name, array in theirs.arrays.items()} == {name: array.tolist() for name, array in arrays.items()}


def _file(header: object, body: bytes) -> bytes:
    text = json.dumps(header).encode() if not isinstance(header, bytes) else header
    return struct.pack("<Q", len(text)) + text + body


def _entry(dtype: str, shape: object, *offsets: object) -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": list(offsets)}


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x00" * 7,
        struct.pack("<Q", 2**62) + b"{}",
        _file(b"[]", b""),
        _file(b"{" * 5000, b""),
        _file({"a": _entry("U8", [4], 0, 4)}, b"123"),
        _file({"a": _entry("U8", [3], 0, 3)}, b"1234"),
        _file({"a": _entry("U8", [2], 1, 3)}, b"123"),
        _file({"a": _entry("U8", [2], 0, 2), "b": _entry("U8", [2], 1, 3)}, b"123"),
        _file({"a": _entry("U32", [1], 0, 3)}, b"123"),
        _file({"a": _entry("F64", [1], 0, 8)}, b"12345678"),
        _file({"a": _entry("U8", [-1, -3], 0, 3)}, b"123"),
        _file({"a": _entry("U8", [True], 0, 1)}, b"1"),
        _file({"a": _entry("U8", [2**40, 2**40], 0, 3)}, b"123"),
        _file({"a": _entry("U8", "3", 0, 3)}, b"123"),
        _file({"a": _entry("U8", [3], 0)}, b"123"),
        _file({"a": 5}, b"123"),
        _file({"__metadata__": {"a": 1}}, b""),
        _file({"a": _entry("U8", [2**70, 0], 0, 0)}, b""),
        _file({"a": _entry("I64", [2**61, 0, 2**61], 0, 0)}, b""),
    ],
    ids=range(20),
)
def test_file_whose_arrays_do_not_fill_it_exactly_is_refused(data: bytes):
    with pytest.raises(FormatError):
        read_table(data)


def _anchor() -> tuple[WeightState, bytes, container.AnchorPart]:
    state = WeightState.empty(LAYOUT)
    chance = np.random.default_rng(0)
    for array in state.arrays.values():
        array[...] = chance.integers(0, 100, array.shape) if array.dtype != np.float32 else chance.normal(size=array.shape)
    (arrays,) = container.anchor_groups(LAYOUT, 1 << 30)
    data = container.encode_anchor_part(state, arrays, run="run", version=3)
    return state, data, container.AnchorPart("key", "", len(data), tuple(array.name for array in arrays))


def test_anchor_part_gives_back_the_state_bit_for_bit():
    state, data, part = _anchor()
    found = WeightState.empty(LAYOUT)
    container.decode_anchor_part(data, part, found)
    assert found.state_id() == state.state_id()


def test_every_flipped_or_missing_byte_of_a_part_on_disk_is_told_by_its_form_or_by_the_digests(tmp_path):
    state, data, part = _anchor()
    path, expected = tmp_path / "part", state.tensor_digests()
    path.write_bytes(data)
    found = WeightState.empty(LAYOUT)
    assert container.read_anchor_part(path, part, found) == expected
    found.accept(expected, state.state_id(), "whole")
    assert found.verified_id == state.state_id() == found.state_id()
    for bit in range(5, 8 * len(data), 61):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        with contextlib.suppress(FormatError):
            if (digests := container.read_anchor_part(path, part, found)) == expected:
                # a name or a version in the header's text: every array is as it was
                assert bit // 8 < 8 + int.from_bytes(data[:8], "little")
                assert found.state_id() == state.state_id()
            else:
                with pytest.raises(WrongStateError):
                    found.accept(digests, state.state_id(), "damaged")
                assert found.verified_id is None
    for length in (0, 7, 8, 100, len(data) - 1):
        path.write_bytes(data[:length])
        with pytest.raises(FormatError):
            container.read_anchor_part(path, part, found)
    for other in (dataclasses.replace(part, arrays=part.arrays[1:]), dataclasses.replace(part, arrays=(*part.arrays, "x"))):
        path.write_bytes(data)
        with pytest.raises(FormatError):
            container.read_anchor_part(path, other, found)


def test_anchor_is_split_into_whole_tensors_and_every_array_comes_once():
    groups = list(container.anchor_groups(LAYOUT, 200))
    assert [[array.name for array in group] for group in groups] == [
        ["a.weight", "a.scales", "a.biases", "b.weight", "b.scales", "b.biases"],
        ["c.weight", "m.expert_bias"],
    ]


def test_anchor_part_with_other_arrays_shapes_or_types_is_refused_and_writes_nothing():
    _, data, part = _anchor()
    table = read_table(data)
    for name in ("a.weight", "a.scales", "c.weight"):
        entries = {n: (table.dtypes[n], a) for n, a in table.arrays.items()}
        entries[name] = (table.dtypes[name], np.concatenate([entries[name][1]] * 2))
        found = WeightState.empty(LAYOUT)
        with pytest.raises(FormatError):
            container.decode_anchor_part(write_table(entries, table.metadata), part, found)
        assert found.state_id() == WeightState.empty(LAYOUT).state_id()
    with pytest.raises(FormatError):
        container.decode_anchor_part(data, dataclasses.replace(part, arrays=part.arrays[1:]), WeightState.empty(LAYOUT))


def test_state_of_other_shapes_or_types_or_memory_order_is_refused():
    good = WeightState.empty(LAYOUT).arrays
    for name, wrong in {
        "a.weight": np.zeros((2, 128), np.uint8),
        "a.scales": np.zeros((2, 1), np.float32),
        "b.weight": np.zeros((128, 2, 3), np.uint8).T,
    }.items():
        with pytest.raises(LayoutError, match=name):
            WeightState(LAYOUT, {**good, name: wrong})
    with pytest.raises(LayoutError):
        WeightState(LAYOUT, {name: array for name, array in good.items() if name != "c.weight"})
