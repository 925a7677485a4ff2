"""A group as bytes: one zstd frame around one safetensors file, and back.

Nothing here judges a group's honesty (`admit.py`) or names its key (`stoa/bucket/keys.py`); what is decoded is only
well formed. Bytes may come from a stranger: sizes are checked before anything is unpacked, memory grows with what
arrives and not with what is claimed, and every fault is a FormatError.

Frame        zstd, content size declared (at most 64 MiB), window at most 8 MiB, no dictionary, checksum written.
Content      8 bytes little-endian header size, at most 1 MiB; JSON header; tensors, little-endian:

    name              dtype    shape                  contents
    ids               int32    [T]                    token ids of all episodes, one after another
    mask              uint8    [T]                    1 where the token was sampled, else 0
    logprobs          float32  [sum(mask)]            natural logarithms, one a sampled token, in order
    episode_offsets   int64    [E + 1]                start of each episode in ids, and T
    turn_spans        int32    [K, 4]                 episode, start, end (exclusive, in the episode), 1 if it ended with a stop id
    routing           uint8    [T, layers, top_k]     optional: experts chosen by the sampler

Metadata     one entry, `group`: canonical JSON of everything else, see `_Document`. E is 4 to 8, in an evaluation 1 to 256.

Legend: T tokens, E episodes, K turns.
"""

import io
import json
import struct
from dataclasses import dataclass
from typing import Annotated, Final, cast

import numpy as np
import safetensors
import safetensors.numpy
import zstandard
from numpy.typing import NDArray
from pydantic import ConfigDict, FailFast, Field, TypeAdapter

from stoa.bucket.manifest import canonical, parse_canonical, validate
from stoa.contracts.errors import FormatError
from stoa.contracts.fleet_messages import Purpose
from stoa.rollouts.records import Episode, Fingerprint, Group, StopReason, Timings, Turn

GROUP_FORMAT: Final = "stoa-group-1"
MAX_GROUP_BYTES: Final = 64 * 1024 * 1024
"""Limit of a group's content, and so of its object."""
NUM_EPISODES: Final = {"train": (4, 8), "eval": (1, 256)}
"""Fewest and most episodes of an object, by purpose."""

_LEVEL: Final = 3
_MAX_WINDOW_BYTES: Final = 8 * 1024 * 1024
MAX_HEADER_BYTES: Final = 1024 * 1024
TURN_BYTES: Final = 16
"""Of one row of turn_spans."""
_LEAST_BLOCK_BYTES: Final = 256
"""Of content, in the mean: a frame of many smaller blocks takes longer to look through than it can be worth."""
_MAX_TURNS_AN_EPISODE: Final = 256
_READ_BYTES: Final = 1024 * 1024
_TENSORS: Final = {
    "ids": ("I32", "<i4", 1),
    "mask": ("U8", "u1", 1),
    "logprobs": ("F32", "<f4", 1),
    "episode_offsets": ("I64", "<i8", 1),
    "turn_spans": ("I32", "<i4", 2),
    "routing": ("U8", "u1", 3),
}
"""safetensors type, numpy type and number of dimensions of every tensor."""
_STRICT: Final = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
_OPTIONAL: Final = {"routing"}

_Name = Annotated[str, Field(max_length=256)]
_Counter = Annotated[int, Field(ge=0, le=99_999_999)]
_Number = Annotated[float, Field(ge=-1e12, le=1e12)]
_Share = Annotated[float, Field(ge=0.0, le=1.0)]
_Amount = Annotated[int, Field(ge=0, lt=2**53)]
_Tensors = dict[str, NDArray[np.generic]]


@dataclass(frozen=True, slots=True)
class _EpisodeDocument:
    __pydantic_config__ = _STRICT

    question_id: _Name
    reward: float
    reward_parts: Annotated[dict[_Name, float], Field(max_length=64)]
    stop_reason: StopReason
    seconds: float


@dataclass(frozen=True, slots=True)
class _TimingsDocument:
    __pydantic_config__ = _STRICT

    # Bounded, so that sums and means of a stranger's numbers stay finite. Clocks differ: seconds may be below 0.
    sweep_started_at: _Number
    decode_seconds: _Number
    pull_latency_seconds: _Number
    idle_seconds: _Number
    num_sampled_tokens: _Amount
    batch_occupancy: _Share = 0.0
    prefix_hit_share: _Share = 0.0
    peak_memory_bytes: _Amount = 0


@dataclass(frozen=True, slots=True)
class _Document:
    """The metadata of a group."""

    __pydantic_config__ = _STRICT

    format: _Name
    run: _Name
    host: _Name
    sweep: _Counter
    group: Annotated[int, Field(ge=0, le=99)]
    purpose: Purpose
    question_id: _Name
    version: _Counter
    state_id: _Name
    temperature: float
    seed: Annotated[int, Field(ge=0, lt=2**63)]
    engine: _Name
    build: _Name
    timings: _TimingsDocument
    # A stranger's list may be long and all wrong: the first fault is enough.
    episodes: Annotated[tuple[_EpisodeDocument, ...], FailFast(), Field(max_length=256)]


_DOCUMENT: Final = TypeAdapter(_Document)


def encode_group(group: Group) -> bytes:
    """The bytes of a group, or of one part of an evaluation. Equal groups give equal bytes.

    Raises FormatError if the group is one that `decode_group` would not give back.
    """
    tensors = _tensors(group)
    document = canonical(_DOCUMENT.dump_python(_document(group), mode="json"))
    _group(tensors, _read_document(document))
    content = safetensors.numpy.save(
        {name: np.ascontiguousarray(array) for name, array in tensors.items()}, metadata={"group": document.decode()}
    )
    if len(content) > MAX_GROUP_BYTES:
        raise FormatError(f"group: {len(content)} bytes are more than the {MAX_GROUP_BYTES} a group may have")
    return zstandard.ZstdCompressor(level=_LEVEL, write_checksum=True, write_content_size=True).compress(content)


def decode_group(data: bytes, max_bytes: int = MAX_GROUP_BYTES) -> Group:
    """The group in `data`. Raises FormatError for anything that `encode_group` would not have written.

    max_bytes: content beyond it is not unpacked, and raises FormatError. Arrays are read-only views of one buffer a tensor.
    """
    content = _decompress(data, max_bytes)
    document = _read_document(_metadata(content))
    try:
        found = safetensors.deserialize(content)
    except safetensors.SafetensorError as error:
        raise FormatError(f"group: not a safetensors file: {error}") from error
    return _group({name: _array(name, spec) for name, spec in found}, document)


def _decompress(data: bytes, max_bytes: int) -> bytes:
    try:
        frame = zstandard.get_frame_parameters(data)
        claimed = frame.content_size
        if claimed in (zstandard.CONTENTSIZE_UNKNOWN, zstandard.CONTENTSIZE_ERROR) or claimed > max_bytes:
            raise FormatError(f"group: the frame does not declare a content size of at most {max_bytes} bytes")
        if frame.window_size > _MAX_WINDOW_BYTES or frame.dict_id:
            raise FormatError("group: the frame needs a dictionary or a window of more than 8 MiB")
        if _frame_end(data, zstandard.frame_header_size(data), frame.has_checksum, claimed) != len(data):
            raise FormatError("group: the frame is cut off, or bytes follow it")
        reader = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW_BYTES).stream_reader(data)
        content = io.BytesIO()
        while content.tell() <= claimed and (chunk := reader.read(_READ_BYTES)):
            content.write(chunk)
    except zstandard.ZstdError as error:
        raise FormatError(f"group: not a zstd frame: {error}") from error
    if content.tell() != claimed:
        raise FormatError(f"group: the frame holds other than the {claimed} bytes it declares")
    return content.getvalue()


def _frame_end(data: bytes, at: int, has_checksum: bool, claimed: int) -> int:
    """Where the frame ends whose first block is at `at` (RFC 8878, 3.1.1.2): a stream reader would not miss a cut-off tail.

    -1 if it is cut off, or has more blocks than content of `claimed` bytes needs.
    """
    last = False
    num_left = 16 + claimed // _LEAST_BLOCK_BYTES
    while not last and num_left and at + 3 <= len(data):
        num_left -= 1
        block = int.from_bytes(data[at : at + 3], "little")
        last = bool(block & 1)
        at += 3 + (1 if (block >> 1) & 3 == 1 else block >> 3)
    return at + 4 * has_checksum if last else -1


def _metadata(content: bytes) -> bytes:
    """The `group` entry of the safetensors header, which the safetensors package does not give from bytes."""
    if len(content) < 8:
        raise FormatError("group: too short for a safetensors header")
    (num_bytes,) = struct.unpack_from("<Q", content)
    if num_bytes > min(MAX_HEADER_BYTES, len(content) - 8):
        raise FormatError(f"group: a safetensors header of {num_bytes} bytes")
    try:
        header = json.loads(content[8 : 8 + num_bytes])
        return header["__metadata__"]["group"].encode()
    except (ValueError, RecursionError, LookupError, TypeError, AttributeError) as error:
        raise FormatError("group: no safetensors header with a `group` entry") from error


def _read_document(data: bytes) -> _Document:
    parse_canonical(data, "group: metadata")
    document = validate(_DOCUMENT, data, "group: metadata")
    if document.format != GROUP_FORMAT:
        raise FormatError(f"group: format {document.format!r} is not {GROUP_FORMAT}")
    return document


def _array(name: str, spec: object) -> NDArray[np.generic]:
    found = cast(dict[str, object], spec)
    wanted = _TENSORS.get(name)
    shape = cast(list[int], found["shape"])
    if wanted is None or found["dtype"] != wanted[0] or len(shape) != wanted[2]:
        raise FormatError(f"group: tensor {name[:64]!r} is {found['dtype']} {shape[:4]}, which no group has")
    array = np.frombuffer(cast(bytearray, found["data"]), dtype=wanted[1]).reshape(shape)
    array.flags.writeable = False
    return array


def _tensors(group: Group) -> _Tensors:
    episodes = group.episodes
    if not episodes:
        raise FormatError("group: no episodes")
    for e in episodes:
        # Each by itself: what one has too many and the next too few would move to the other unseen.
        num_sampled = int(np.count_nonzero(e.mask))
        if len(e.mask) != len(e.ids) or len(e.logprobs) != num_sampled or (e.routing is not None and len(e.routing) != len(e.ids)):
            raise FormatError(f"group: an episode of {len(e.ids)} tokens has {len(e.logprobs)} logprobs for {num_sampled} sampled ones")
    spans = [(i, t.start, t.end, int(t.stopped)) for i, e in enumerate(episodes) for t in e.turns]
    tensors: _Tensors = {
        "ids": np.concatenate([e.ids for e in episodes]),
        "mask": np.concatenate([e.mask for e in episodes]),
        "logprobs": np.concatenate([e.logprobs for e in episodes]),
        "episode_offsets": np.cumsum([0] + [len(e.ids) for e in episodes], dtype=np.int64),
        "turn_spans": np.array(spans, dtype=np.int32).reshape(-1, 4),
    }
    routing = [e.routing for e in episodes if e.routing is not None]
    if routing:
        if len(routing) != len(episodes):
            raise FormatError("group: only some episodes have their routing")
        tensors["routing"] = np.concatenate(routing)
    for name, array in tensors.items():
        if array.dtype != np.dtype(_TENSORS[name][1]) or array.ndim != _TENSORS[name][2]:
            raise FormatError(f"group: {name} is {array.dtype} {array.shape}")
    return tensors


def _document(group: Group) -> _Document:
    return _Document(
        format=GROUP_FORMAT,
        run=group.run,
        host=group.host,
        sweep=group.sweep,
        group=group.group,
        purpose=group.purpose,
        question_id=group.question_id,
        version=group.version,
        state_id=group.state_id,
        temperature=group.temperature,
        seed=group.seed,
        engine=group.fingerprint.engine,
        build=group.fingerprint.build,
        timings=_TimingsDocument(**{name: getattr(group.timings, name) for name in Timings.__slots__}),
        episodes=tuple(_EpisodeDocument(e.question_id, e.reward, e.reward_parts, e.stop_reason, e.seconds) for e in group.episodes),
    )


def _group(tensors: _Tensors, document: _Document) -> Group:
    low, high = NUM_EPISODES[document.purpose]
    if not low <= len(document.episodes) <= high:
        raise FormatError(f"group: {len(document.episodes)} episodes, purpose {document.purpose} has {low} to {high}")
    return Group(
        run=document.run,
        host=document.host,
        sweep=document.sweep,
        group=document.group,
        purpose=document.purpose,
        question_id=document.question_id,
        version=document.version,
        state_id=document.state_id,
        temperature=document.temperature,
        seed=document.seed,
        episodes=_episodes(tensors, document.episodes),
        fingerprint=Fingerprint(document.engine, document.build),
        timings=Timings(**{name: getattr(document.timings, name) for name in Timings.__slots__}),
    )


def _episodes(tensors: _Tensors, told: tuple[_EpisodeDocument, ...]) -> tuple[Episode, ...]:
    missing = set(_TENSORS) - _OPTIONAL - set(tensors)
    if missing:
        raise FormatError(f"group: tensor {sorted(missing)[0]!r} is missing")
    ids = cast(NDArray[np.int32], tensors["ids"])
    mask = cast(NDArray[np.uint8], tensors["mask"])
    logprobs = cast(NDArray[np.float32], tensors["logprobs"])
    routing = cast("NDArray[np.uint8] | None", tensors.get("routing"))
    offsets = tensors["episode_offsets"]
    num_tokens = len(ids)
    if len(mask) != num_tokens or (routing is not None and len(routing) != num_tokens):
        raise FormatError("group: mask or routing do not have one entry a token")
    if len(offsets) != len(told) + 1 or offsets[0] != 0 or offsets[-1] != num_tokens or bool(np.any(np.diff(offsets) <= 0)):
        raise FormatError("group: episode_offsets do not cut the tokens into the episodes of the metadata")
    if bool(np.any(mask > 1)):
        raise FormatError("group: mask holds other than 0 and 1")
    bounds = [int(offset) for offset in cast(NDArray[np.int64], offsets)]
    sampled = np.concatenate([[0], np.cumsum(mask, dtype=np.int64)])[bounds]
    if len(logprobs) != int(sampled[-1]):
        raise FormatError(f"group: {len(logprobs)} logprobs for {int(sampled[-1])} sampled tokens")
    turns = _turns(cast(NDArray[np.int32], tensors["turn_spans"]), bounds)
    return tuple(
        Episode(
            question_id=document.question_id,
            ids=ids[bounds[i] : bounds[i + 1]],
            mask=mask[bounds[i] : bounds[i + 1]],
            logprobs=logprobs[int(sampled[i]) : int(sampled[i + 1])],
            turns=turns[i],
            reward=document.reward,
            reward_parts=document.reward_parts,
            stop_reason=document.stop_reason,
            seconds=document.seconds,
            routing=None if routing is None else routing[bounds[i] : bounds[i + 1]],
        )
        for i, document in enumerate(told)
    )


def _turns(spans: NDArray[np.int32], bounds: list[int]) -> list[tuple[Turn, ...]]:
    num_episodes = len(bounds) - 1
    if spans.shape[1] != 4 or len(spans) > num_episodes * _MAX_TURNS_AN_EPISODE:
        raise FormatError(f"group: turn_spans of shape {spans.shape}")
    turns: list[list[Turn]] = [[] for _ in range(num_episodes)]
    last = (0, 0)
    for episode, start, end, stopped in cast(list[list[int]], spans.tolist()):
        inside = 0 <= episode < num_episodes and 0 <= start < end <= bounds[episode + 1] - bounds[episode]
        if not inside or stopped not in (0, 1) or (episode, start) < last:
            raise FormatError(f"group: turn ({episode}, {start}, {end}, {stopped}) is out of place")
        turns[episode].append(Turn(start, end, bool(stopped)))
        last = (episode, end)
    return [tuple(found) for found in turns]
