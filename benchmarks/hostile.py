"""Objects that a hostile Mac might put into the bucket, made from honest groups: what admission must refuse by itself.

Each kind is told from the object, its key and what the run has seen before; lies that need other groups to compare with
(plausible logprobs) are `distrust.py`'s. Every mutation is drawn from a seed.
"""

import json
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import zstandard

from stoa.bucket import keys
from stoa.contracts.errors import FormatError
from stoa.rollouts.records import Episode, Group, Turn
from stoa.rollouts.shard import decode_group, encode_group

Chance = np.random.Generator
Bytes = Callable[[bytes, Chance], bytes]
Edit = Callable[[Group, Chance], Group]
FUTURE: Final = 5_000_000


@dataclass(frozen=True, slots=True)
class Hostile:
    """One object, its key, the question that its slot was granted, and what is wrong with it."""

    kind: str
    key: str
    data: bytes
    question_id: str


def key_of(group: Group) -> str:
    """Where an honest Mac would put it."""
    return keys.group(group.run, group.version, group.host, group.sweep, group.group)


def _frame(content: bytes, *, declared: bool = True) -> bytes:
    return zstandard.ZstdCompressor(level=3, write_checksum=True, write_content_size=declared).compress(content)


def _content(data: bytes) -> bytes:
    return zstandard.ZstdDecompressor().decompress(data)


def _header(content: bytes) -> tuple[dict, bytes]:
    (size,) = struct.unpack_from("<Q", content)
    return json.loads(content[8 : 8 + size]), content[8 + size :]


def _with_header(header: dict, body: bytes) -> bytes:
    text = json.dumps(header).encode()
    return _frame(struct.pack("<Q", len(text)) + text + body)


def _changed_header(change: Callable[[dict, Chance], None]) -> Bytes:
    def spoil(data: bytes, chance: Chance) -> bytes:
        header, body = _header(_content(data))
        change(header, chance)
        return _with_header(header, body)

    return spoil


def _changed_group(name: str, value: Callable[[Chance], object]) -> Bytes:
    """One field of the metadata; canonical, so that only the value is wrong."""

    def change(header: dict, chance: Chance) -> None:
        document = json.loads(header["__metadata__"]["group"])
        document[name] = value(chance)
        header["__metadata__"]["group"] = json.dumps(document, sort_keys=True, separators=(",", ":"))

    return _changed_header(change)


def _flipped(data: bytes, chance: Chance) -> bytes:
    """One bit. A packed form has a few, three in a thousand, that say nothing: they leave the group as it was, and are drawn again."""
    while True:
        spoiled = bytearray(data)
        spoiled[int(chance.integers(len(data)))] ^= 1 << int(chance.integers(8))
        try:
            decode_group(bytes(spoiled))
        except FormatError:
            return bytes(spoiled)


def _flipped_tensor(name: str) -> Bytes:
    """One bit of a tensor of which every bit is checked; the frame is whole."""

    def spoil(data: bytes, chance: Chance) -> bytes:
        header, body = _header(_content(data))
        start, end = header[name]["data_offsets"]
        changed = bytearray(body)
        changed[int(chance.integers(start, end))] ^= 1 << int(chance.integers(8))
        return _with_header(header, bytes(changed))

    return spoil


def _shape(header: dict, chance: Chance) -> None:
    name = str(chance.choice(["ids", "mask", "logprobs", "turn_spans", "episode_offsets"]))
    header[name]["shape"][0] = int(chance.choice([0, 1, 2**31, 2**62, -1]))


def _offsets(header: dict, chance: Chance) -> None:
    name = str(chance.choice(["ids", "mask", "logprobs"]))
    header[name]["data_offsets"] = [int(chance.choice([0, 4, 2**40])), int(chance.choice([2**40, 2**62, 3]))]


def _extra_tensor(header: dict, chance: Chance) -> None:
    header[f"extra{chance.integers(100)}"] = dict(header["ids"])


def _many_blocks(data: bytes, chance: Chance) -> bytes:
    """A frame of raw blocks of no bytes: long to walk through, nothing to unpack."""
    num = int(chance.integers(100_000, 300_000))
    return struct.pack("<IBQ", 0xFD2FB528, 0xE0, 1_000_000) + b"\x00\x00\x00" * num + b"\x01\x00\x00"


def _window(data: bytes, chance: Chance) -> bytes:
    """A frame that asks for a window of gigabytes."""
    window = int(chance.integers(0xA8, 0xFF))
    return struct.pack("<IBBQ", 0xFD2FB528, 0xC0, window, 1000) + b"\x01\x00\x00"


BYTES: Final[dict[str, Bytes]] = {
    "flipped bit": _flipped,
    "cut off": lambda data, chance: data[: int(chance.integers(len(data)))],
    "bytes after the end": lambda data, chance: data + chance.bytes(int(chance.integers(1, 64))),
    "noise": lambda data, chance: chance.bytes(int(chance.integers(1, 4096))),
    "noise in a frame": lambda data, chance: _frame(chance.bytes(int(chance.integers(1, 4096)))),
    "no content size": lambda data, chance: _frame(_content(data), declared=False),
    "bomb of zeros": lambda data, chance: _frame(bytes(int(chance.integers(32, 128)) << 20)),
    "bomb in the body": lambda data, chance: _frame(_content(data) + bytes(32 << 20)),
    "bomb of blocks": _many_blocks,
    "huge window": _window,
    "frame in a frame": lambda data, chance: _frame(data),
    "flipped mask": _flipped_tensor("mask"),
    "flipped offsets": _flipped_tensor("episode_offsets"),
    "flipped turns": _flipped_tensor("turn_spans"),
    "huge header": lambda data, chance: _frame(struct.pack("<Q", int(chance.integers(2**40, 2**62))) + _content(data)[8:]),
    "deep JSON": lambda data, chance: _frame(struct.pack("<Q", 200_000) + b"[" * 200_000),
    "wrong shape": _changed_header(_shape),
    "wrong places": _changed_header(_offsets),
    "another tensor": _changed_header(_extra_tensor),
    "huge number": _changed_group("seed", lambda chance: 10 ** int(chance.integers(20, 4000))),
    "sweep out of range": _changed_group("sweep", lambda chance: int(chance.integers(10**8, 2**62))),
    "temperature not a number": _changed_group("temperature", lambda chance: float("nan")),
    "episodes without end": _changed_group("episodes", lambda chance: [{}] * int(chance.integers(300, 300_000))),
    "another format": _changed_group("format", lambda chance: f"stoa-group-{chance.integers(2, 99)}"),
    "an unknown field": _changed_group("admitted", lambda chance: True),
    "a long name": _changed_group("host", lambda chance: "m" * int(chance.integers(300, 100_000))),
}
"""Kinds of bytes that are no group of this run."""


def _episode(group: Group, chance: Chance, change: Callable[[Episode], Episode]) -> Group:
    """The group with one of its episodes changed."""
    place = int(chance.integers(len(group.episodes)))
    episodes = list(group.episodes)
    episodes[place] = change(episodes[place])
    return replace(group, episodes=tuple(episodes))


def _logprob(value: Callable[[Chance], float]) -> Edit:
    def edit(group: Group, chance: Chance) -> Group:
        def change(episode: Episode) -> Episode:
            logprobs = episode.logprobs.copy()
            logprobs[int(chance.integers(len(logprobs)))] = value(chance)
            return replace(episode, logprobs=logprobs)

        return _episode(group, chance, change)

    return edit


def _id(where: Callable[[Episode, Chance], int], value: Callable[[int, Chance], int]) -> Edit:
    def edit(group: Group, chance: Chance) -> Group:
        def change(episode: Episode) -> Episode:
            ids = episode.ids.copy()
            place = where(episode, chance)
            ids[place] = value(int(ids[place]), chance)
            return replace(episode, ids=ids)

        return _episode(group, chance, change)

    return edit


def invented_results(group: Group, chance: Chance) -> Group:
    """Every search result replaced by tokens in another order; the group as it is if nothing was searched for."""

    def change(episode: Episode) -> Episode:
        ids = episode.ids.copy()
        for turn, after in zip(episode.turns, episode.turns[1:], strict=False):
            ids[turn.end : after.start] = ids[turn.end : after.start][::-1].copy()
        return replace(episode, ids=ids)

    return replace(group, episodes=tuple(change(episode) for episode in group.episodes))


def searched(group: Group) -> bool:
    """Whether an episode of the group has a search result."""
    return any(len(episode.turns) > 1 for episode in group.episodes)


def _cut(group: Group, chance: Chance) -> Group:
    """The last turn of every searching episode is left out, as if the policy had stopped."""

    def change(episode: Episode) -> Episode:
        if len(episode.turns) < 2:
            return episode
        end = episode.turns[-2].end
        turns = episode.turns[:-1]
        num = sum(turn.end - turn.start for turn in turns)
        return replace(episode, ids=episode.ids[:end], mask=episode.mask[:end], logprobs=episode.logprobs[:num], turns=turns, reward=0.0)

    return replace(group, episodes=tuple(change(episode) for episode in group.episodes))


def inflated(group: Group, chance: Chance) -> Group:
    """Every episode claims the highest reward; an honest group of right answers stays as it is."""
    return replace(group, episodes=tuple(replace(episode, reward=1.0) for episode in group.episodes))


def _repeated(group: Group, chance: Chance) -> Group:
    """The least likely episode in every place, as from a Mac that keeps the draw it likes."""
    rarest = min(group.episodes, key=lambda episode: float(episode.logprobs.sum()))
    made_rarer = replace(rarest, logprobs=np.minimum(rarest.logprobs, np.float32(-3.0)))
    return replace(group, episodes=(made_rarer,) * len(group.episodes))


def _prompt_place(episode: Episode, chance: Chance) -> int:
    return int(chance.integers(episode.turns[0].start))


def _any_place(episode: Episode, chance: Chance) -> int:
    return int(chance.integers(len(episode.ids)))


def _result_place(episode: Episode, chance: Chance) -> int:
    """In a search result, or in the prompt where nothing was searched for."""
    if len(episode.turns) < 2:
        return _prompt_place(episode, chance)
    return int(chance.integers(episode.turns[0].end, episode.turns[1].start))


EDITS: Final[dict[str, Edit]] = {
    "NaN logprob": _logprob(lambda chance: float("nan")),
    "infinite logprob": _logprob(lambda chance: float(chance.choice([np.inf, -np.inf]))),
    "probability above one": _logprob(lambda chance: float(chance.uniform(0.001, 30))),
    "token never sampled": _logprob(lambda chance: -float(chance.uniform(101, 1e6))),
    "id beyond the vocabulary": _id(_any_place, lambda old, chance: int(chance.integers(10**6, 2**31 - 1))),
    "negative id": _id(_any_place, lambda old, chance: -int(chance.integers(1, 2**31 - 1))),
    "edited prompt": _id(_prompt_place, lambda old, chance: old + 1 if old < 20 else old - 1),
    "edited result": _id(_result_place, lambda old, chance: old + 1 if old < 20 else old - 1),
    "edited reward": lambda group, chance: _episode(group, chance, lambda one: replace(one, reward=1.0 - one.reward)),
    "reward above one": lambda group, chance: _episode(group, chance, lambda one: replace(one, reward=float(chance.uniform(1.1, 1e9)))),
    "forged host": lambda group, chance: replace(group, host=f"mac-{chance.integers(100, 10**6)}"),
    "forged run": lambda group, chance: replace(group, run=f"run-{chance.integers(10**6)}"),
    "another sweep": lambda group, chance: replace(group, sweep=group.sweep + int(chance.integers(1, 10**6))),
    "another number": lambda group, chance: replace(group, group=(group.group + int(chance.integers(1, 90))) % 99),
    "future version inside": lambda group, chance: replace(group, version=group.version + int(chance.integers(1, 10**6))),
    "other weights": lambda group, chance: replace(group, state_id=chance.bytes(32).hex()),
    "cool sampling": lambda group, chance: replace(group, temperature=float(chance.uniform(0.0, 0.99))),
    "an evaluation's": lambda group, chance: replace(group, purpose="eval"),
    "unknown question": lambda group, chance: replace(group, question_id=f"no-{chance.integers(10**6)}"),
    "mixed questions": lambda group, chance: _episode(group, chance, lambda one: replace(one, question_id=f"no-{chance.integers(10**6)}")),
    "turn moved": lambda group, chance: _episode(
        group,
        chance,
        lambda one: replace(one, turns=(Turn(one.turns[0].start - 1, one.turns[0].end, one.turns[0].stopped), *one.turns[1:])),
    ),
    "turn said not to stop": lambda group, chance: _episode(
        group, chance, lambda one: replace(one, turns=(*one.turns[:-1], replace(one.turns[-1], stopped=not one.turns[-1].stopped)))
    ),
    "one draw kept": _repeated,
}
"""Kinds of groups that are well formed and wrong."""
SEARCH_EDITS: Final[dict[str, Edit]] = {"invented results": invented_results, "cut episodes": _cut}
"""The same, of groups that searched."""


def hostile_objects(honest: Sequence[Group], num: int, seed: int) -> Iterator[Hostile]:
    """`num` objects, all kinds in turn, from groups that admission has been given before (slots, episodes, questions).

    honest: at least two groups, one of which searched.
    """
    chance = np.random.default_rng(seed)
    searching = [group for group in honest if searched(group)]
    kinds = [*BYTES, *EDITS, *SEARCH_EDITS, "inflated", "copied episodes", "replayed object", "future version", "no group's key"]
    for number in range(num):
        kind = kinds[number % len(kinds)]
        group = honest[int(chance.integers(len(honest)))]
        # A slot of its own, so that nothing is refused only because its slot is taken.
        group = replace(group, host="mac-hostile", sweep=number)
        if kind in BYTES:
            yield _of(kind, group, BYTES[kind](encode_group(group), chance))
        elif kind in EDITS:
            yield _of(kind, group, encode_group(EDITS[kind](group, chance)))
        elif kind in SEARCH_EDITS:
            group = replace(searching[int(chance.integers(len(searching)))], host="mac-hostile", sweep=number)
            yield _of(kind, group, encode_group(SEARCH_EDITS[kind](group, chance)))
        elif kind == "inflated":
            poor = [one for one in honest if one.rewards.min() < 1.0]
            group = replace(poor[int(chance.integers(len(poor)))], host="mac-hostile", sweep=number)
            yield _of(kind, group, encode_group(inflated(group, chance)))
        else:
            yield _replayed(kind, group, honest, chance)


def _of(kind: str, group: Group, data: bytes) -> Hostile:
    return Hostile(kind, key_of(group), data, group.question_id)


def copied(group: Group, theirs: Group, chance: Chance) -> Group:
    """Another Mac's episodes in the slot of `group`, said to be of that slot's question or of their own."""
    question_id = group.question_id if chance.random() < 0.5 else theirs.question_id
    episodes = tuple(replace(episode, question_id=question_id) for episode in reversed(theirs.episodes))
    return replace(group, question_id=question_id, episodes=episodes)


def _replayed(kind: str, group: Group, honest: Sequence[Group], chance: Chance) -> Hostile:
    """An honest group where it does not belong."""
    match kind:
        case "copied episodes":
            others = [one for one in honest if one.question_id != group.question_id]
            stolen = copied(group, others[int(chance.integers(len(others)))], chance)
            return _of(kind, group, encode_group(stolen))
        case "replayed object":  # the same bytes under another key
            return _of(kind, group, encode_group(honest[int(chance.integers(len(honest)))]))
        case "future version":
            ahead = replace(group, version=FUTURE + int(chance.integers(10**6)))
            return _of(kind, ahead, encode_group(ahead))
        case _:
            return Hostile(kind, f"runs/{group.run}/groups/../{chance.integers(10**6)}", encode_group(group), group.question_id)
