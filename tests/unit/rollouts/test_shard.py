"""A group goes through bytes unchanged, the bytes are those of the format's table, and nonsense is refused cheaply."""

import contextlib
import dataclasses
import json
import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from stoa.contracts.errors import FormatError
from stoa.rollouts.records import Episode, Fingerprint, Group, Timings, Turn
from stoa.rollouts.shard import MAX_GROUP_BYTES, decode_group, encode_group
from tests.fakes import toy
from tests.golden.group_small import content as content_by_hand

GOLDEN = Path(__file__).parents[2] / "golden"
KNOWN = json.loads((GOLDEN / "group-small.json").read_text())


def assert_same(left: Group, right: Group) -> None:
    for field in dataclasses.fields(Group):
        if field.name != "episodes":
            assert getattr(left, field.name) == getattr(right, field.name), field.name
    assert len(left.episodes) == len(right.episodes)
    for one, two in zip(left.episodes, right.episodes, strict=True):
        for field in dataclasses.fields(Episode):
            mine, theirs = getattr(one, field.name), getattr(two, field.name)
            if isinstance(mine, np.ndarray):
                assert mine.dtype == theirs.dtype
                np.testing.assert_array_equal(mine, theirs)
            else:
                assert mine == theirs, field.name


def known_group() -> Group:
    """The golden group, spelt out."""
    arrays = {name: np.array(tensor["values"]).reshape(tensor["shape"]) for name, tensor in KNOWN["tensors"].items()}
    ids, mask = arrays["ids"].astype(np.int32), arrays["mask"].astype(np.uint8)
    logprobs, routing = arrays["logprobs"].astype(np.float32), arrays["routing"].astype(np.uint8)
    cuts = [(0, 9, 0, 5), (9, 12, 5, 6), (12, 15, 6, 7), (15, 18, 7, 8)]
    turns = [(Turn(2, 5, True), Turn(6, 8, False)), *[(Turn(2, 3, False),)] * 3]
    told = KNOWN["document"]["episodes"]
    episodes = tuple(
        Episode(
            "q-7", ids[a:b], mask[a:b], logprobs[c:d], turns[i], told[i]["reward"], told[i]["reward_parts"],
            told[i]["stop_reason"], told[i]["seconds"], routing[a:b],
        )
        for i, (a, b, c, d) in enumerate(cuts)
    )  # fmt: skip
    return Group(
        "golden", "mac-a", 3, 1, "train", "q-7", 5, KNOWN["document"]["state_id"], 1.0, 2**63 - 1, episodes,
        Fingerprint("by hand", "0.1.0"), Timings(1700000000.5, 12.5, 0.75, 0.125, 8, 0.75, 0.875, 123456789),
    )  # fmt: skip


def unpack(data: bytes) -> bytes:
    return zstandard.ZstdDecompressor().decompress(data)


def pack(content: bytes) -> bytes:
    return zstandard.ZstdCompressor(level=1).compress(content)


def rewritten(change, *, group: Group | None = None) -> bytes:
    """An honest group's bytes after `change(tensors, document)`."""
    content = unpack(encode_group(group or toy.group()))
    (size,) = struct.unpack_from("<Q", content)
    tensors = dict(safetensors.numpy.load(content))
    document = json.loads(json.loads(content[8 : 8 + size])["__metadata__"]["group"])
    change(tensors, document)
    text = json.dumps(document, sort_keys=True, separators=(",", ":"))
    return pack(safetensors.numpy.save(tensors, metadata={"group": text}))


def test_golden_group_has_its_known_contents():
    assert_same(decode_group((GOLDEN / "group-small.safetensors.zst").read_bytes()), known_group())


def test_encoded_bytes_are_those_of_the_byte_table():
    assert unpack(encode_group(known_group())) == content_by_hand(KNOWN)
    assert unpack((GOLDEN / "group-small.safetensors.zst").read_bytes()) == content_by_hand(KNOWN)


def test_frame_declares_its_size_and_has_a_checksum():
    frame = zstandard.get_frame_parameters(encode_group(known_group()))
    assert frame.content_size == len(content_by_hand(KNOWN))
    assert frame.has_checksum


def test_torch_reads_the_golden_group_by_itself():
    torch = pytest.importorskip("torch")
    load = pytest.importorskip("safetensors.torch").load
    found = load(unpack((GOLDEN / "group-small.safetensors.zst").read_bytes()))
    types = {"I64": torch.int64, "I32": torch.int32, "F32": torch.float32, "U8": torch.uint8}
    for name, tensor in KNOWN["tensors"].items():
        assert found[name].dtype == types[tensor["dtype"]]
        assert list(found[name].shape) == tensor["shape"]
        assert found[name].flatten().tolist() == tensor["values"]


def test_mlx_reads_the_golden_group_by_itself(tmp_path):
    mx = pytest.importorskip("mlx.core")
    path = tmp_path / "group.safetensors"
    path.write_bytes(unpack((GOLDEN / "group-small.safetensors.zst").read_bytes()))
    found = mx.load(str(path))
    types = {"I64": mx.int64, "I32": mx.int32, "F32": mx.float32, "U8": mx.uint8}
    for name, tensor in KNOWN["tensors"].items():
        assert found[name].dtype == types[tensor["dtype"]]
        assert found[name].flatten().tolist() == tensor["values"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("pull_latency_seconds", 1.7e308), ("decode_seconds", -1e13), ("batch_occupancy", 1.5), ("prefix_hit_share", -0.1),
        ("peak_memory_bytes", 10**400), ("num_sampled_tokens", -1), ("peak_memory_bytes", 2**53),
    ],
)  # fmt: skip
def test_numbers_about_a_sweep_that_no_sum_survives_are_refused(name, value):
    """They are only for reports, but a step's record with an infinite mean could not be written."""
    with pytest.raises(FormatError, match=name):
        decode_group(rewritten(lambda tensors, document: document["timings"].update({name: value})))


def test_group_of_an_engine_that_says_nothing_of_its_load_is_read():
    def strip(tensors, document):
        for name in ("batch_occupancy", "prefix_hit_share", "peak_memory_bytes"):
            del document["timings"][name]

    assert decode_group(rewritten(strip)).timings == toy.group().timings


@st.composite
def groups(draw) -> Group:
    purpose = draw(st.sampled_from(["train", "eval"]))
    num_episodes = draw(st.integers(4, 8) if purpose == "train" else st.integers(1, 20))
    routed = draw(st.booleans())
    episodes = []
    for _ in range(num_episodes):
        cuts = draw(st.lists(st.integers(1, 30), min_size=2, max_size=6, unique=True).map(sorted))
        turns = tuple(Turn(a, b, draw(st.booleans())) for a, b in zip(cuts[::2], cuts[1::2], strict=False))
        num_tokens = cuts[-1] + draw(st.integers(0, 3))
        mask = np.zeros(num_tokens, np.uint8)
        for turn in turns:
            mask[turn.start : turn.end] = 1
        seed = draw(st.integers(0, 2**32 - 1))
        chance = np.random.default_rng(seed)
        episodes.append(
            Episode(
                draw(st.text(max_size=8)),
                chance.integers(0, 2**31 - 1, num_tokens, dtype=np.int32),
                mask,
                -chance.random(int(mask.sum()), dtype=np.float32),
                turns,
                draw(st.floats(-1, 1)),
                draw(st.dictionaries(st.text(max_size=5), st.floats(allow_nan=False, allow_infinity=False), max_size=3)),
                draw(st.sampled_from(["answered", "malformed", "turn_limit", "token_limit", "call_limit"])),
                draw(st.floats(0, 1e6)),
                chance.integers(0, 32, (num_tokens, 3, 2), dtype=np.uint8) if routed else None,
            )
        )
    return Group(
        "run", "host", draw(st.integers(0, 10**8 - 1)), draw(st.integers(0, 99)), purpose, draw(st.text(max_size=9)),
        draw(st.integers(0, 10**8 - 1)), "00", draw(st.floats(0, 2)), draw(st.integers(0, 2**63 - 1)), tuple(episodes),
        Fingerprint(draw(st.text(max_size=9)), "b"), Timings(num_sampled_tokens=draw(st.integers(0, 10**9))),
    )  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(groups())
def test_every_group_comes_back_unchanged(group):
    data = encode_group(group)
    assert_same(decode_group(data), group)
    assert encode_group(decode_group(data)) == data


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_changed_byte_is_refused_or_harmless(data):
    good = encode_group(toy.group())
    place = data.draw(st.integers(0, len(good) - 1))
    bad = bytearray(good)
    bad[place] ^= data.draw(st.integers(1, 255))
    try:
        found = decode_group(bytes(bad))
    except FormatError:
        return
    assert_same(found, toy.group())


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_changed_byte_inside_the_frame_never_raises_anything_but_format_error(data):
    good = unpack(encode_group(toy.group()))
    bad = bytearray(good)
    for _ in range(data.draw(st.integers(1, 3))):
        bad[data.draw(st.integers(0, len(good) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(FormatError):
        decode_group(pack(bytes(bad)))


def test_every_truncation_is_refused():
    good = encode_group(toy.group())
    for length in range(len(good)):
        with pytest.raises(FormatError):
            decode_group(good[:length])


def test_bytes_after_the_frame_are_refused():
    good = encode_group(toy.group())
    for tail in (b"\0", good, pack(b"x")):
        with pytest.raises(FormatError):
            decode_group(good + tail)


def test_a_frame_without_a_size_or_beyond_the_limit_is_refused():
    content = unpack(encode_group(toy.group()))
    with pytest.raises(FormatError, match="declare"):
        decode_group(zstandard.ZstdCompressor(write_content_size=False).compress(content))
    with pytest.raises(FormatError, match="declare"):
        decode_group(pack(bytes(MAX_GROUP_BYTES + 1)))


def test_a_claimed_size_is_not_allocated():
    # A single-segment frame that declares 4 MiB and holds one byte: magic, descriptor, size, last raw block.
    lie = b"\x28\xb5\x2f\xfd" + b"\xa0" + struct.pack("<I", 4 << 20) + (1 | (1 << 3)).to_bytes(3, "little") + b"x"
    decode_group(encode_group(toy.group()))
    tracemalloc.start()
    with pytest.raises(FormatError):
        decode_group(lie)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2 << 20


def test_a_wide_window_is_refused():
    wide = zstandard.ZstdCompressor(compression_params=zstandard.ZstdCompressionParameters.from_level(3, window_log=24))
    content = np.random.default_rng(0).bytes(20 << 20)
    with pytest.raises(FormatError, match="window"):
        decode_group(wide.compress(content))


@pytest.mark.parametrize("header", [b"{}", b"[]", b"{" * 9, b'{"__metadata__":{}}', b'{"__metadata__":{"group":3}}', b"[" * 100_000])
def test_a_header_without_metadata_is_refused(header):
    with pytest.raises(FormatError):
        decode_group(pack(struct.pack("<Q", len(header)) + header))


@pytest.mark.parametrize("size", [2**63, 2**20 + 1, 2**16])
def test_a_header_of_a_claimed_size_is_refused(size):
    with pytest.raises(FormatError, match="header"):
        decode_group(pack(struct.pack("<Q", size) + b"{}"))


def set_tensor(name, value):
    return lambda tensors, document: tensors.__setitem__(name, value)


def set_field(name, value):
    return lambda tensors, document: document.__setitem__(name, value)


def set_episode_field(name, value):
    return lambda tensors, document: document["episodes"][1].__setitem__(name, value)


@pytest.mark.parametrize(
    "change",
    [
        lambda t, d: t.pop("mask"),
        lambda t, d: t.__setitem__("extra", np.zeros(1, np.int32)),
        lambda t, d: t.__setitem__("ids", t["ids"].astype(np.int64)),
        lambda t, d: t.__setitem__("mask", t["mask"][:-1]),
        lambda t, d: t.__setitem__("mask", t["mask"] * 2),
        lambda t, d: t.__setitem__("logprobs", t["logprobs"][:-1]),
        lambda t, d: t["episode_offsets"].__setitem__(0, 1),
        lambda t, d: t["episode_offsets"].__setitem__(1, t["episode_offsets"][2]),
        lambda t, d: t["episode_offsets"].__setitem__(1, 2**62),
        lambda t, d: t["episode_offsets"].__setitem__(1, -1),
        lambda t, d: t["turn_spans"].__setitem__((0, 0), 4),
        lambda t, d: t["turn_spans"].__setitem__((0, 0), -1),
        lambda t, d: t["turn_spans"].__setitem__((0, 2), 10_000),
        lambda t, d: t["turn_spans"].__setitem__((0, 3), 2),
        lambda t, d: t.__setitem__("turn_spans", t["turn_spans"][::-1].copy()),
        lambda t, d: t.__setitem__("turn_spans", t["turn_spans"][:, :3].copy()),
        lambda t, d: t.__setitem__("routing", np.zeros((3, 1, 1), np.uint8)),
        lambda t, d: d.pop("seed"),
        lambda t, d: d["episodes"].pop(),
        lambda t, d: d["episodes"].extend([d["episodes"][0]] * 8),
        set_field("format", "stoa-group-2"),
        set_field("surprise", 1),
        set_field("version", -1),
        set_field("version", True),
        set_field("version", 3.0),
        set_field("sweep", 10**8),
        set_field("group", 100),
        set_field("seed", 2**63),
        set_field("purpose", "test"),
        set_field("question_id", "x" * 1000),
        set_field("temperature", "1"),
        set_field("temperature", 10**400),
        set_episode_field("reward", None),
        set_episode_field("stop_reason", "bored"),
        set_episode_field("reward_parts", {"a": "b"}),
        set_episode_field("reward_parts", {str(i): 0.0 for i in range(65)}),
    ],
)
def test_a_group_that_breaks_the_format_is_refused(change):
    with pytest.raises(FormatError):
        decode_group(rewritten(change))


@pytest.mark.parametrize("text", ['{"a":1,"a":1}', '{"a": 1}', '{"a":NaN}', '{"a":1e999}', '{"a":"\\ud800"}', "9" * 9000])
def test_metadata_that_is_not_canonical_json_is_refused(text):
    tensors = safetensors.numpy.load(unpack(encode_group(toy.group())))
    with pytest.raises(FormatError):
        decode_group(pack(safetensors.numpy.save(tensors, metadata={"group": text})))


def test_a_group_that_could_not_be_read_back_is_not_written():
    good = toy.group()
    few = dataclasses.replace(good, episodes=good.episodes[:3])
    long_ids = dataclasses.replace(good.episodes[0], ids=good.episodes[0].ids.astype(np.int64))
    not_a_number = dataclasses.replace(good.episodes[0], reward=float("nan"))
    for bad in (few, dataclasses.replace(good, episodes=()), dataclasses.replace(good, seed=-1)):
        with pytest.raises(FormatError):
            encode_group(bad)
    for bad_episode in (long_ids, not_a_number):
        with pytest.raises(FormatError):
            encode_group(dataclasses.replace(good, episodes=(bad_episode, *good.episodes[1:])))


def test_decoded_arrays_cannot_be_written_to():
    found = decode_group(encode_group(toy.group()))
    with pytest.raises(ValueError, match="read-only"):
        found.episodes[0].ids[0] = 3


def test_long_list_of_wrong_episodes_is_refused_at_the_first() -> None:
    """Each has five faults; a message for every one of them would take seconds and much memory."""
    content = bytearray(zstandard.ZstdDecompressor().decompress(encode_group(toy.group())))
    (size,) = struct.unpack_from("<Q", content)
    header = json.loads(content[8 : 8 + size])
    document = json.loads(header["__metadata__"]["group"])
    document["episodes"] = [{}] * 300_000
    header["__metadata__"]["group"] = json.dumps(document, sort_keys=True, separators=(",", ":"))
    text = json.dumps(header).encode()
    frame = zstandard.compress(struct.pack("<Q", len(text)) + text + bytes(content[8 + size :]))
    tracemalloc.start()
    with pytest.raises(FormatError, match=r"episodes\.0"):
        decode_group(frame)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 64 << 20


def test_frame_of_many_empty_blocks_is_refused_before_they_are_walked() -> None:
    blocks = b"\x00\x00\x00" * 1_000_000 + b"\x01\x00\x00"
    frame = struct.pack("<IBQ", 0xFD2FB528, 0xE0, 4096) + blocks
    assert zstandard.get_frame_parameters(frame).content_size == 4096
    with pytest.raises(FormatError, match="cut off"):
        decode_group(frame)


def test_content_beyond_the_callers_limit_is_not_unpacked() -> None:
    data = encode_group(toy.group())
    num_bytes = len(zstandard.ZstdDecompressor().decompress(data))
    assert decode_group(data, num_bytes).host == "mac-a"
    with pytest.raises(FormatError, match="content size"):
        decode_group(data, num_bytes - 1)
