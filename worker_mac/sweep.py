"""One sweep: the episodes of all groups, turn by turn, each group handed over as its last episode ends.

It decides what follows a token: the next one, the environment's reply, the end. Who is fed when is the schedule's
business, the arithmetic that of `Rows`; there is no bucket here and no clock but that of the report. An episode lost to
infrastructure makes no sample; everything else is the policy's own.

Legend: E episodes, C token capacity of an episode, Q sequences (episodes and stems), L MoE layers, K experts a token.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Protocol

import numpy as np
import structlog
from numpy.typing import NDArray

from environments.base import Environment, Outcome
from stoa.contracts.errors import GpuInterruptedError, InfrastructureFaultError
from stoa.rollouts.records import Episode, StopReason, Turn
from worker_mac.pace import Pace
from worker_mac.pages import Pages
from worker_mac.plan import Work
from worker_mac.replies import Replies
from worker_mac.sampler import seed_of, uniforms
from worker_mac.schedule import Schedule

_log = structlog.get_logger(__name__)

MOST_INTERRUPTIONS: Final = 3
"""Steps in a row that the system may end on the GPU before the sweep fails."""
WAIT_SECONDS: Final = 0.05
"""Where every episode waits for its environment, the sweep looks up so often."""


class Result(Protocol):
    """What a step gave; see `worker_mac.decoder.Drawn`."""

    @property
    def tokens(self) -> NDArray[np.int32]: ...  # noqa: D102

    @property
    def logprobs(self) -> NDArray[np.float32]: ...  # noqa: D102

    @property
    def routes(self) -> NDArray[np.uint8] | None: ...  # noqa: D102


class Rows(Protocol):
    """A model that computes what the schedule says; see `worker_mac.decoder.Decoder`."""

    def step(self, work: Work, uniform: NDArray[np.float32]) -> Result: ...  # noqa: D102

    def reset(self) -> None: ...  # noqa: D102


@dataclass(frozen=True, slots=True)
class Casting:
    """Who plays: one episode of `question_id` in group `group`; `key` (uint64) is its stream of random numbers."""

    group: int
    question_id: str
    key: int


def exam_castings(question_ids: Sequence[str], num_samples: int, seed: int) -> list[Casting]:
    """Samples of each question one after another, all in one group; streams depend on question and sample alone."""
    return [
        Casting(0, question, seed_of(seed, question, sample) if sample else seed_of(seed, question))
        for question in question_ids
        for sample in range(num_samples)
    ]


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
    num_parked: int = 0
    """Times an episode had to give its pages back."""
    most_pages: int = 0
    mean_tokens: float = 0.0
    """Mean length of the episodes that ended; 0 without any."""


def cast(environment: Environment, castings: Sequence[Casting], pages: Pages, *, max_rows: int, expected_tokens: int = 0) -> Schedule:
    """The schedule of these castings: each distinct question's prompt once; see `Schedule` for the numbers."""
    number: dict[str, int] = {}
    questions = [number.setdefault(casting.question_id, len(number)) for casting in castings]
    prompts = [np.array(environment.prompt_ids(question), np.int32) for question in number]
    max_tokens = environment.limits.max_episode_tokens
    return Schedule(prompts, questions, pages, max_rows=max_rows, max_tokens=max_tokens, expected_tokens=expected_tokens)


NOTHING_PLAYED: Final = Played(True, 0, 0, 0, 0, 0.0, 0, 0.0)
OnGroup = Callable[[int, list[Episode]], None]


@dataclass(slots=True)
class _Play:
    """An episode's lists that are touched once a turn; its tokens are in the schedule."""

    casting: Casting
    turns: list[Turn] = field(default_factory=list)
    sampled: list[tuple[int, ...]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Follow:
    """What follows a turn: ids to append, or why the episode is over and what it is worth."""

    ids: tuple[int, ...]
    reason: StopReason | None = None
    outcome: Outcome | None = None


class Sweep:
    """State of one sweep. `play` runs it to the end; `on_group(group, episodes)` is called as each group ends."""

    def __init__(
        self,
        rows: Rows,
        schedule: Schedule,
        environment: Environment,
        castings: Sequence[Casting],
        on_group: OnGroup,
        *,
        pace: Pace | None = None,
        apart: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        """`schedule` is that of the castings, by `cast`. `apart()` is held while there is nothing to do but wait."""
        self._rows, self._schedule, self._environment, self._on_group = rows, schedule, environment, on_group
        self._pace, self._apart = pace or Pace(), apart
        self._replies: Replies[_Follow] | None = None
        if environment.limits.reply_seconds > 0:
            self._replies = Replies(environment.limits.reply_seconds)
        self._plays = [_Play(casting) for casting in castings]
        num, capacity = schedule.num_episodes, schedule.ids.shape[1]
        self._keys = np.zeros(len(schedule.length), np.uint64)
        self._keys[:num] = [casting.key for casting in castings]
        self._mask = np.zeros((num, capacity), np.uint8)
        self._logprobs = np.zeros((num, capacity), np.float32)
        self._turn_start = schedule.prompt_length.copy()
        self._stop_ids = np.array(sorted(environment.stop_ids), np.int32)
        self._routes: NDArray[np.uint8] | None = None
        """uint8 [Q, C, L, K] once there are any."""
        self._finished: dict[int, list[tuple[int, Episode]]] = {}
        self._due: dict[int, int] = {}
        for casting in castings:
            self._due[casting.group] = self._due.get(casting.group, 0) + 1
        self._num_done = self._num_lost = self._num_sampled = self._num_tokens = self._num_interruptions = 0
        self._reward_sum = 0.0
        self._began = time.monotonic()

    def play(
        self,
        should_stop: Callable[[], bool] = lambda: False,
        on_step: Callable[[int, int], None] | None = None,
        rows_allowed: Callable[[], int | None] = lambda: None,
    ) -> Played:
        """Play until every episode has ended, or `should_stop()`; `on_step(episodes done, tokens sampled)` after each step.

        `rows_allowed()`: most episodes to run at once, None for as many as fit; 0 to begin no further group.
        Raises GpuInterruptedError if the system keeps ending steps on the GPU, however small.
        """
        try:
            ended = self._play(should_stop, on_step, rows_allowed)
        finally:
            if self._replies is not None:
                self._replies.close()
        counts = self._schedule.counts
        return Played(
            ended, self._num_done, self._num_lost, self._num_sampled, max(0, counts.tokens - self._num_sampled), self._reward_sum,
            counts.steps, time.monotonic() - self._began, counts.parked, counts.most_pages,
            self._num_tokens / max(1, self._num_done),
        )  # fmt: skip

    def _play(
        self, should_stop: Callable[[], bool], on_step: Callable[[int, int], None] | None, rows_allowed: Callable[[], int | None]
    ) -> bool:
        """As `play`; True if every episode has ended."""
        while not self._schedule.is_over:
            if should_stop():
                return False
            allowed = rows_allowed()
            work = self._schedule.plan(self._pace.tokens, max_rows=allowed or None, may_begin=allowed != 0)
            if work is not None:
                self._step(work)
            elif self._replies:
                with self._apart():
                    self._replies.wait(WAIT_SECONDS)
            else:
                return False
            if self._replies:
                for episode, reply in self._replies.take():
                    self._schedule.go_on(episode)
                    self._go_on(episode, reply)
            if on_step is not None:
                on_step(self._num_done, self._num_sampled)
        return True

    def _step(self, work: Work) -> None:
        """Feed what is to be fed, take what was drawn; then turns that ended."""
        schedule = self._schedule
        sequences = work.sequences
        started = time.monotonic()
        try:
            drawn = self._rows.step(work, uniforms(self._keys[sequences], schedule.length[sequences]))
        except GpuInterruptedError as fault:
            self._recover(work, fault)
            return
        self._num_interruptions = 0
        self._pace.saw(work.num_tokens, time.monotonic() - started)
        schedule.advance(work)
        if drawn.routes is not None:
            self._keep_routes(work, drawn.routes)
        playing = sequences[work.samples]
        places, tokens = schedule.length[playing], drawn.tokens
        schedule.append(playing, tokens)
        self._logprobs[playing, places] = drawn.logprobs
        self._mask[playing, places] = 1
        self._num_sampled += len(playing)
        limits = self._environment.limits
        stopped = (tokens[:, None] == self._stop_ids).any(axis=1)
        turn_ended = (
            stopped | (places + 1 - self._turn_start[playing] >= limits.max_turn_tokens) | (places + 1 >= limits.max_episode_tokens)
        )
        for index in np.flatnonzero(turn_ended):
            self._end_turn(int(playing[index]), bool(stopped[index]))

    def _recover(self, work: Work, fault: GpuInterruptedError) -> None:
        """What is in the cache is lost, the tokens are not: they are fed again, fewer at a time."""
        self._num_interruptions += 1
        if self._num_interruptions > MOST_INTERRUPTIONS:
            raise fault
        _log.warning("step_interrupted", tokens=work.num_tokens, reason=fault.message)
        self._schedule.forget_all()
        self._rows.reset()
        self._pace.interrupted(work.num_tokens)

    def _end_turn(self, episode: int, stopped: bool) -> None:
        """Ask the environment what follows the turn that just ended, now or beside the others' decoding."""
        play, schedule = self._plays[episode], self._schedule
        start, end = int(self._turn_start[episode]), int(schedule.length[episode])
        play.turns.append(Turn(start, end, stopped))
        play.sampled.append(tuple(schedule.ids[episode, start:end].tolist()))
        reply = partial(self._follow, play.casting.question_id, tuple(play.sampled), end)
        if self._replies is None:
            self._go_on(episode, reply)
        else:
            schedule.hold(episode)
            self._replies.ask(episode, reply)

    def _follow(self, question: str, sampled: tuple[tuple[int, ...], ...], length: int) -> _Follow:
        """What follows the sampled turns of an episode of `length` tokens. For any thread, as the environment is."""
        limits = self._environment.limits
        reply = self._environment.reply(question, sampled)
        reason: StopReason | None = reply.stop_reason or None
        if reason is None and length + len(reply.ids) >= limits.max_episode_tokens:
            reason = "token_limit"
        if reason is None and len(sampled) >= limits.max_turns:
            reason = "turn_limit"
        return _Follow(reply.ids) if reason is None else _Follow((), reason, self._environment.score(question, sampled))

    def _go_on(self, episode: int, reply: Callable[[], _Follow]) -> None:
        """Append what the environment says, or end the episode, which an outage ends without a sample."""
        schedule = self._schedule
        try:
            follow = reply()
        except InfrastructureFaultError as fault:
            _log.warning("episode_lost", question=self._plays[episode].casting.question_id, reason=fault.message)
            self._num_lost += 1
            self._leave(episode, None)
            return
        if follow.reason is not None and follow.outcome is not None:
            self._finish(episode, follow.reason, follow.outcome)
        else:
            schedule.extend(episode, np.array(follow.ids, np.int32))
            self._turn_start[episode] = schedule.length[episode]

    def _finish(self, episode: int, reason: StopReason, outcome: Outcome) -> None:
        play, length = self._plays[episode], int(self._schedule.length[episode])
        mask = self._mask[episode, :length].copy()
        self._reward_sum += outcome.reward
        record = Episode(
            question_id=play.casting.question_id,
            ids=self._schedule.ids[episode, :length].copy(),
            mask=mask,
            logprobs=self._logprobs[episode, :length][mask == 1],
            turns=tuple(play.turns),
            reward=outcome.reward,
            reward_parts=outcome.parts,
            stop_reason=reason,
            seconds=time.monotonic() - self._began,
            routing=self._routing(episode, length),
        )
        self._leave(episode, record)

    def _leave(self, episode: int, record: Episode | None) -> None:
        """Take an episode out; hand its group over if it was the last."""
        self._schedule.finish(episode)
        self._num_done += 1
        self._num_tokens += int(self._schedule.length[episode])
        group = self._plays[episode].casting.group
        finished = self._finished.setdefault(group, [])
        if record is not None:
            finished.append((episode, record))
        self._due[group] -= 1
        if self._due[group] == 0:
            self._on_group(group, [one for _, one in sorted(finished, key=lambda pair: pair[0])])
            del self._finished[group]

    def _keep_routes(self, work: Work, routes: NDArray[np.uint8]) -> None:
        if self._routes is None:
            self._routes = np.zeros((*self._schedule.ids.shape, *routes.shape[1:]), np.uint8)
        owners = np.repeat(work.sequences, work.counts)
        places = np.arange(work.num_tokens) + np.repeat(work.starts - np.cumsum(work.counts) + work.counts, work.counts)
        self._routes[owners, places] = routes

    def _routing(self, episode: int, length: int) -> NDArray[np.uint8] | None:
        """Experts of an episode's tokens, uint8 [T, L, K]; None if they are not recorded.

        The last token of an episode is sampled but never fed: it gets experts 0 .. K - 1, which nobody uses.
        """
        if self._routes is None:
            return None
        found = self._routes[episode, :length].copy()
        for stem, num_shared in self._schedule.lineage(episode):
            found[:num_shared] = self._routes[stem, :num_shared]
        found[length - 1] = np.arange(found.shape[2], dtype=np.uint8)
        return found
