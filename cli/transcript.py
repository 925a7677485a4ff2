"""One episode as a person reads it: its turns as stretches of text, each sampled and kept, dropped by the gate, or given.

Reads one group object, and what the step that trained on it told of the gate. A group comes from a Mac: it is decoded with
all of `shard.py`'s distrust, and its rewards are the Mac's own words (what was trained on was scored again at admission).

Legend: T tokens of an episode, S sampled tokens of it.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from environments import known
from environments.base import Environment
from stoa.bucket import keys
from stoa.bucket.head import read_head
from stoa.bucket.run_document import RunDocument
from stoa.bucket.steps import StepManifest, lineage
from stoa.bucket.store import Store, check_sha256
from stoa.chat.render import ChatRenderer
from stoa.chat.turns import read_turn
from stoa.contracts.errors import FormatError, ObjectMissingError, StoaError, UsageError
from stoa.rollouts.records import Episode, Group
from stoa.rollouts.shard import MAX_GROUP_BYTES, decode_group

Kind = Literal["given", "kept", "dropped"]
"""given: prompt and tool results, never learned from. dropped: sampled, and the gate gave it no gradient."""
_ID: Final = re.compile(r"v?(\d{1,8})/([a-z0-9-]+)/(\d{1,8})/(\d{1,2})(?:/(\d{1,3}))?")
_TOKENIZER_BYTES: Final = 64 << 20


@dataclass(frozen=True, slots=True)
class Stretch:
    """Tokens one after another that were treated alike."""

    kind: Kind
    text: str
    num_tokens: int


@dataclass(frozen=True, slots=True)
class TurnView:
    """One sampled turn and what came before it: the prompt, or the environment's answer to the turn before."""

    before: str
    stretches: tuple[Stretch, ...]
    calls: tuple[str, ...]
    fault: str
    """Why the turn is malformed, "" if it is not."""


@dataclass(frozen=True, slots=True)
class EpisodeView:
    """One episode. `num_dropped` is -1 where nobody kept what the gate did with it; `step` is 0 where it is not known."""

    id: str
    key: str
    question_id: str
    question: str
    answers: tuple[str, ...]
    host: str
    version: int
    step: int
    fate: str
    """What the run did with its group: trained on, or why not; "" if that is not known yet."""
    reward: float
    reward_parts: dict[str, float]
    stop_reason: str
    num_tokens: int
    num_sampled: int
    num_dropped: int
    turns: tuple[TurnView, ...]
    after: str
    """What the environment said after the last turn."""

    @property
    def num_masked(self) -> int:
        """Tokens that were given and not sampled."""
        return self.num_tokens - self.num_sampled


@dataclass(frozen=True, slots=True)
class Fate:
    """What became of a group: the step that settled it (0: none yet), how, and the gate's drops where they were kept."""

    step: int = 0
    words: str = ""
    gated: tuple[tuple[int, ...], ...] | None = None


def episode_id(key: str, episode: int) -> str:
    """`v<version>/<host>/<sweep>/<group>/<episode>`, what `stoa episode show` takes."""
    parts = keys.parse_group(key)
    return f"v{parts.version}/{parts.host}/{parts.sweep}/{parts.group}/{episode}"


def parse_id(run: str, text: str) -> tuple[str, int]:
    """Key of the group and number of the episode (0 where it is left out). Raises UsageError for anything else."""
    found = _ID.fullmatch(text)
    if found is None:
        raise UsageError(
            f"{text!r} is no episode", hint=f"one is called VERSION/MAC/SWEEP/GROUP/EPISODE, like v3/mac-1/12/4/0: `stoa episode ls {run}`"
        )
    version, host, sweep, group, episode = found.groups()
    return keys.group(run, int(version), host, int(sweep), int(group)), int(episode or 0)


class Reader:
    """Reads episodes of one run. The tokenizer is fetched once, when the first is read."""

    def __init__(self, store: Store, document: RunDocument) -> None:
        self._store = store
        self._document = document

    @cached_property
    def _tokenizer(self) -> bytes:
        file = next((file for file in self._document.model_files if file.name == "tokenizer.json"), None)
        if file is None:
            raise FormatError(f"run {self._document.run} names no tokenizer.json")
        data = self._store.get(file.key, max_bytes=_TOKENIZER_BYTES).data
        check_sha256(data, file.sha256, file.key)
        return data

    @cached_property
    def _renderer(self) -> ChatRenderer:
        return ChatRenderer(self._tokenizer)

    @cached_property
    def _environment(self) -> Environment | None:
        """None where the task's data is not on this machine: then only the ids are told of a question."""
        settings = self._document.config.environment
        try:
            return known.create(settings.name, settings.settings, self._tokenizer)
        except StoaError:
            return None

    def group(self, key: str) -> Group:
        """The group under `key`. Raises UsageError if there is none, FormatError if it is garbled."""
        try:
            return decode_group(self._store.get(key, max_bytes=MAX_GROUP_BYTES).data)
        except ObjectMissingError:
            raise UsageError(
                f"{self._store.name} has no group {key}",
                hint=f"`stoa episode ls {self._document.run}` lists those that are there; settled ones are cleared after some versions",
            ) from None

    def fate(self, key: str) -> Fate:
        """What the run's steps say of a group, newest first: a group is settled at most `max_staleness_hard` versions on."""
        sampled = keys.parse_group(key).version
        try:
            head, _ = read_head(self._store, self._document.run, self._document.public_key)
        except ObjectMissingError:
            return Fate()
        for step in lineage(self._store, head):
            if (found := fate_in(step, key)) is not None:
                return found
            if step.version < sampled:
                break
        return Fate()

    def view(self, key: str, group: Group, number: int, fate: Fate) -> EpisodeView:
        """Episode `number` of a group. Raises UsageError if the group has fewer."""
        if not 0 <= number < len(group.episodes):
            raise UsageError(f"{key}: has no episode {number}", hint=f"its episodes are 0 to {len(group.episodes) - 1}")
        episode = group.episodes[number]
        places = fate.gated[number] if fate.gated is not None and number < len(fate.gated) else None
        question, answers = self._question(episode.question_id)
        turns, after = self._turns(episode, kinds_of(episode.mask, places or ()))
        return EpisodeView(
            id=episode_id(key, number),
            key=key,
            question_id=episode.question_id,
            question=question,
            answers=answers,
            host=group.host,
            version=group.version,
            step=fate.step,
            fate=fate.words,
            reward=episode.reward,
            reward_parts=dict(episode.reward_parts),
            stop_reason=episode.stop_reason,
            num_tokens=len(episode.ids),
            num_sampled=len(episode.logprobs),
            num_dropped=-1 if places is None else len(places),
            turns=turns,
            after=after,
        )

    def _question(self, question_id: str) -> tuple[str, tuple[str, ...]]:
        if self._environment is None:
            return "", ()
        try:
            question = self._environment.question(question_id)
        except StoaError:
            return "", ()
        return question.text, question.answers

    def _turns(self, episode: Episode, kinds: "NDArray[np.str_]") -> tuple[tuple[TurnView, ...], str]:
        ids = [int(i) for i in episode.ids]
        turns: list[TurnView] = []
        at = 0
        for turn in episode.turns:
            read = read_turn(self._renderer, ids[turn.start : turn.end])
            stretches = tuple(
                Stretch(kind, self._renderer.decode(ids[start:end]), end - start)
                for kind, start, end in runs_of(kinds, turn.start, turn.end)
            )
            calls = tuple(f"{call.name}({', '.join(f'{name}={value!r}' for name, value in call.arguments.items())})" for call in read.calls)
            turns.append(TurnView(self._renderer.decode(ids[at : turn.start]), stretches, calls, str(read.fault or "")))
            at = turn.end
        return tuple(turns), self._renderer.decode(ids[at:])


def fate_in(step: StepManifest, key: str) -> Fate | None:
    """What one step says of a group; None if it says nothing."""
    if key in step.consumed:
        return Fate(step.step, "trained on", step.gated.get(key))
    for drop in step.dropped:
        if drop.key == key:
            return Fate(step.step, f"dropped: {drop.reason.replace('_', ' ')}")
    for refused in step.refused:
        if refused.key == key:
            return Fate(step.step, f"refused: {refused.reason.replace('_', ' ')}")
    return None


def kinds_of(mask_T: NDArray[np.uint8], places: Sequence[int]) -> "NDArray[np.str_]":
    """The kind of every token; `places` count sampled tokens, those beyond the last are of another episode and passed over."""
    kinds = np.where(mask_T.astype(bool), "kept", "given").astype("<U8")
    where_S = np.flatnonzero(mask_T)
    kinds[where_S[[place for place in places if place < len(where_S)]]] = "dropped"
    return kinds


def runs_of(kinds: "NDArray[np.str_]", start: int, end: int) -> Iterator[tuple[Kind, int, int]]:
    """Stretches [start, end) of tokens of one kind."""
    at = start
    for place in range(start + 1, end + 1):
        if place == end or kinds[place] != kinds[at]:
            kind: Kind = "given" if kinds[at] == "given" else "kept" if kinds[at] == "kept" else "dropped"
            yield kind, at, place
            at = place
