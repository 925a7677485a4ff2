"""One sweep: all episodes of all groups in one batch, turn by turn, each group handed over as its last episode ends.

It decides who is stepped, fed, finished and evicted; it knows no model (a `Rows` does the arithmetic), no bucket and no
clock but the one of the report. An episode lost to infrastructure makes no sample; everything else is the policy's own.

Legend: E episodes, C token capacity of an episode, R rows still in the batch.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

import numpy as np
import structlog
from numpy.typing import NDArray

from environments.base import Environment
from stoa.contracts.errors import InfrastructureFaultError
from stoa.rollouts.records import Episode, StopReason, Turn
from worker_mac.sampler import uniforms

_log = structlog.get_logger(__name__)

FEED_SHARE: Final = 4
"""Replies of the environment are fed when those waiting are at least 1 in this many of the rows that go on."""
EVICT_SHARE: Final = 8
"""Rows are compacted when at least 1 in this many has ended."""


class Rows(Protocol):
    """A batch of rows bound to a model; see `worker_mac.decoder.Decoder`."""

    def begin(self, prompts: Sequence[NDArray[np.int32]], rows: NDArray[np.intp]) -> int: ...  # noqa: D102

    def feed(self, rows: NDArray[np.intp], tokens: Sequence[NDArray[np.int32]]) -> None: ...  # noqa: D102

    def step(  # noqa: D102
        self, tokens: NDArray[np.int32], uniform: NDArray[np.float32], active: NDArray[np.bool_]
    ) -> tuple[NDArray[np.int32], NDArray[np.float32]]: ...

    def keep(self, rows: NDArray[np.intp]) -> None: ...  # noqa: D102

    def routing(self, row: int, num_tokens: int) -> NDArray[np.uint8] | None: ...  # noqa: D102


@dataclass(frozen=True, slots=True)
class Casting:
    """Who plays: one episode of `question_id` in group `group`; `key` (uint64) is its stream of random numbers."""

    group: int
    question_id: str
    key: int


@dataclass(frozen=True, slots=True)
class Played:
    """What a sweep did. `num_lost` episodes had an infrastructure fault; `ended` is False if it was broken off."""

    ended: bool
    num_episodes: int
    num_lost: int
    num_sampled_tokens: int
    num_prompt_tokens: int
    reward_sum: float
    num_steps: int
    seconds: float

    def plus(self, other: "Played") -> "Played":
        """Both, one after the other."""
        return Played(
            self.ended and other.ended,
            self.num_episodes + other.num_episodes,
            self.num_lost + other.num_lost,
            self.num_sampled_tokens + other.num_sampled_tokens,
            self.num_prompt_tokens + other.num_prompt_tokens,
            self.reward_sum + other.reward_sum,
            self.num_steps + other.num_steps,
            self.seconds + other.seconds,
        )


NOTHING_PLAYED: Final = Played(True, 0, 0, 0, 0, 0.0, 0, 0.0)
OnGroup = Callable[[int, list[Episode]], None]


@dataclass(slots=True)
class _Play:
    """An episode's lists that are touched once a turn; its tokens are in the table."""

    casting: Casting
    turns: list[Turn] = field(default_factory=list)
    sampled: list[tuple[int, ...]] = field(default_factory=list)
    reply: NDArray[np.int32] | None = None


class Sweep:
    """State of one sweep. `play` runs it to the end; `on_group(group, episodes)` is called as each group ends."""

    def __init__(
        self,
        rows: Rows,
        environment: Environment,
        castings: Sequence[Casting],
        on_group: OnGroup,
    ) -> None:
        self._batch, self._environment, self._on_group = rows, environment, on_group
        limits = environment.limits
        self._plays = [_Play(casting) for casting in castings]
        num = len(castings)
        self._keys = np.array([casting.key for casting in castings], np.uint64)
        self._ids = np.zeros((num, limits.max_episode_tokens + 1), np.int32)
        self._mask = np.zeros(self._ids.shape, np.uint8)
        self._logprobs = np.zeros(self._ids.shape, np.float32)
        self._length = np.zeros(num, np.int64)
        self._turn_start = np.zeros(num, np.int64)
        self._stop_ids = np.array(sorted(environment.stop_ids), np.int32)
        self._rows = np.arange(num)  # episode of each row
        self._live = np.ones(num, bool)
        self._waiting = np.zeros(num, bool)
        self._finished: dict[int, list[tuple[int, Episode]]] = {}
        self._due: dict[int, int] = {}
        for casting in castings:
            self._due[casting.group] = self._due.get(casting.group, 0) + 1
        self._num_done = self._num_lost = self._num_steps = self._num_sampled = self._num_prompt = 0
        self._reward_sum = 0.0
        self._began = time.monotonic()

    def play(self, should_stop: Callable[[], bool] = lambda: False, on_step: Callable[[int, int], None] | None = None) -> Played:
        """Play until every episode has ended, or `should_stop()`; `on_step(episodes done, tokens sampled)` after each step."""
        self._begin()
        ended = True
        while self._live.any():
            if should_stop():
                ended = False
                break
            self._step()
            if on_step is not None:
                on_step(self._num_done, self._num_sampled)
        return Played(
            ended, self._num_done, self._num_lost, self._num_sampled, self._num_prompt, self._reward_sum, self._num_steps,
            time.monotonic() - self._began,
        )  # fmt: skip

    def _begin(self) -> None:
        """Feed each distinct question once; its episodes start from copies."""
        first: dict[str, int] = {}
        prompts: list[NDArray[np.int32]] = []
        for episode, play in enumerate(self._plays):
            question = play.casting.question_id
            if question not in first:
                first[question] = len(prompts)
                prompts.append(np.array(self._environment.prompt_ids(question), np.int32))
            prompt = prompts[first[question]]
            self._ids[episode, : len(prompt)] = prompt
            self._length[episode] = self._turn_start[episode] = len(prompt)
        order = np.array([first[play.casting.question_id] for play in self._plays], np.intp)
        if len(order):
            self._num_prompt = self._batch.begin(prompts, order)

    def _step(self) -> None:
        """One token for every row that is not waiting; then turns that ended; then replies; then eviction."""
        rows = self._rows
        active = self._live[rows] & ~self._waiting[rows]
        length = self._length[rows]
        last = self._ids[rows, length - 1]
        drawn, logprobs = self._batch.step(last, uniforms(self._keys[rows], length), active)
        self._num_steps += 1
        playing = rows[active]
        places = length[active]
        tokens = drawn[active]
        self._ids[playing, places] = tokens
        self._logprobs[playing, places] = logprobs[active]
        self._mask[playing, places] = 1
        self._length[playing] = places + 1
        self._num_sampled += len(playing)
        limits = self._environment.limits
        stopped = np.isin(tokens, self._stop_ids)
        turn_ended = (
            stopped | (places + 1 - self._turn_start[playing] >= limits.max_turn_tokens) | (places + 1 >= limits.max_episode_tokens)
        )
        for index in np.flatnonzero(turn_ended):
            self._end_turn(int(playing[index]), bool(stopped[index]))
        self._feed_replies()
        self._evict()

    def _end_turn(self, episode: int, stopped: bool) -> None:
        """Ask the environment what follows the turn that just ended."""
        play = self._plays[episode]
        start, end = int(self._turn_start[episode]), int(self._length[episode])
        play.turns.append(Turn(start, end, stopped))
        play.sampled.append(tuple(self._ids[episode, start:end].tolist()))
        limits, question = self._environment.limits, play.casting.question_id
        try:
            reply = self._environment.reply(question, play.sampled)
            if reply.stop_reason:
                self._finish(episode, reply.stop_reason)
            elif end + len(reply.ids) >= limits.max_episode_tokens:
                self._finish(episode, "token_limit")
            elif len(play.turns) >= limits.max_turns:
                self._finish(episode, "turn_limit")
            else:
                play.reply = np.array(reply.ids, np.int32)
                self._waiting[episode] = True
        except InfrastructureFaultError as fault:
            _log.warning("episode_lost", question=question, reason=fault.message)
            self._num_lost += 1
            self._leave(episode, None)

    def _finish(self, episode: int, reason: StopReason) -> None:
        play, length = self._plays[episode], int(self._length[episode])
        outcome = self._environment.score(play.casting.question_id, play.sampled)
        mask = self._mask[episode, :length].copy()
        self._reward_sum += outcome.reward
        record = Episode(
            question_id=play.casting.question_id,
            ids=self._ids[episode, :length].copy(),
            mask=mask,
            logprobs=self._logprobs[episode, :length][mask == 1],
            turns=tuple(play.turns),
            reward=outcome.reward,
            reward_parts=outcome.parts,
            stop_reason=reason,
            seconds=time.monotonic() - self._began,
            routing=self._batch.routing(int(np.searchsorted(self._rows, episode)), length),
        )
        self._leave(episode, record)

    def _leave(self, episode: int, record: Episode | None) -> None:
        """Take an episode out; hand its group over if it was the last."""
        self._live[episode] = False
        self._num_done += 1
        group = self._plays[episode].casting.group
        finished = self._finished.setdefault(group, [])
        if record is not None:
            finished.append((episode, record))
        self._due[group] -= 1
        if self._due[group] == 0:
            self._on_group(group, [one for _, one in sorted(finished, key=lambda pair: pair[0])])
            del self._finished[group]

    def _feed_replies(self) -> None:
        """Feed what the environment answered, once enough rows wait for it or nobody else goes on."""
        waits = self._live[self._rows] & self._waiting[self._rows]
        num_waiting = int(waits.sum())
        going_on = int(self._live[self._rows].sum()) - num_waiting
        if not num_waiting or num_waiting * FEED_SHARE < going_on:
            return
        rows = np.flatnonzero(waits)
        pieces: list[NDArray[np.int32]] = []
        for episode in self._rows[rows]:
            reply = self._plays[episode].reply
            if reply is None:
                raise AssertionError("a waiting episode has no reply")
            start = int(self._length[episode])
            self._ids[episode, start : start + len(reply)] = reply
            self._length[episode] = self._turn_start[episode] = start + len(reply)
            # The last sampled token is not in the cache yet; the last token of the reply is the next step's input.
            pieces.append(self._ids[episode, start - 1 : start + len(reply) - 1])
            self._plays[episode].reply = None
        self._batch.feed(rows, pieces)
        self._num_prompt += sum(len(piece) for piece in pieces)
        self._waiting[self._rows[rows]] = False

    def _evict(self) -> None:
        live = self._live[self._rows]
        num_dead = len(live) - int(live.sum())
        if num_dead < len(live) and num_dead * EVICT_SHARE >= len(live):
            keep = np.flatnonzero(live)
            self._batch.keep(keep)
            self._rows = self._rows[keep]
