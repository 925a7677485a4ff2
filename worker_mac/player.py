"""Plays castings on a model within what this Mac has: plans memory, holds the pages, wires what is needed, learns widths.

What is played on which version, and what becomes of a group, is the engine's business; when to play the guest's. All
methods but `groups` are for the engine's thread.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import mlx.core as mx
import structlog

from environments.base import Environment
from metal.sizes import PAGE_TOKENS
from stoa.config.run import Rollout
from stoa.weights.layout import Layout
from worker_mac.decoder import Decoder
from worker_mac.guest import Guest
from worker_mac.holds import wired, wired_bytes
from worker_mac.memory import CACHE_BYTES, MemoryPlan, Play, model_bytes, plan_memory
from worker_mac.model import Model
from worker_mac.model_config import ModelConfig
from worker_mac.pace import MOST_TOKENS, Pace
from worker_mac.pages import Pages, PoolKey
from worker_mac.sampler import NEUTRAL, Sampling
from worker_mac.schedule import Schedule, State
from worker_mac.sweep import Casting, OnGroup, Played, Sweep, cast
from worker_mac.versions import Served
from worker_mac.width import choose_groups, learn, read_knee, read_learned, write_learned

_log = structlog.get_logger(__name__)

_SPREAD: Final = 1.15
"""Episodes are planned for as this much longer than their mean."""
MOST_SPARE: Final = 1.25
"""A pool is kept for the next sweep unless it is larger than needed by more than this: prompts differ a little in length."""
_WIDEST: Final = 64
"""Groups that memory is asked for at most."""


@dataclass(slots=True)
class Load:
    """How a sweep has used this Mac so far; nothing is said of a wired set."""

    batch_occupancy: float = 0.0
    """Mean episodes of a step over the most that could run at once."""
    prefix_hit_share: float = 0.0
    """Share of the prompt tokens of episodes begun that were in the cache already; those fed again count against it."""
    peak_memory_bytes: int = 0
    """Most that MLX has held since this process began."""


class Player:
    """One run's, on one Mac."""

    def __init__(
        self,
        environment: Environment,
        rollout: Rollout,
        layout: Layout,
        config: ModelConfig,
        guest: Guest,
        *,
        folder: Path,
        state_folder: Path,
    ) -> None:
        """`folder` keeps what is learned in this run, `state_folder` what was measured of this Mac."""
        self._environment, self._rollout, self._guest, self._folder = environment, rollout, guest, folder
        item_bytes = 4 if layout.raw_dtype == "float32" else 2
        self._model = model_bytes(config, layout, item_bytes=item_bytes, activation_bytes=item_bytes)
        self._learned = read_learned(folder)
        self._knee = read_knee(state_folder, layout.layout_id)
        self._pace = Pace()
        self._said = ""
        self._loaded: Callable[[], Load] = Load
        self._pool: tuple[Model, Pages, Decoder] | None = None
        """Kept from sweep to sweep: the next one takes no other memory."""
        bound_memory(self._memory_bytes())

    @property
    def groups(self) -> int:
        """Groups to ask for at a time. For any thread."""
        groups, reason = choose_groups(self._asked, memory_groups=self._memory_groups(), knee=self._knee, learned=self._learned)
        if reason and reason != self._said:
            _log.info("sweep_narrowed", groups=groups, reason=reason)
        self._said = reason
        return groups

    @property
    def load(self) -> Load:
        """Of the sweep that is played, or of the last one."""
        return self._loaded()

    @property
    def holds_two(self) -> bool:
        """True if memory has room for two sets of weights and the least of pools."""
        memory_bytes = self._memory_bytes()
        pool_bytes = self._play_of("").least_pages * self._model.page_bytes
        return memory_bytes is None or 2 * self._model.weights_bytes + pool_bytes <= memory_bytes

    @property
    def _asked(self) -> int | None:
        return None if self._rollout.groups == "auto" else self._rollout.groups

    def drop_pool(self) -> None:
        """Give the memory of the pages back."""
        self._pool = None
        mx.clear_cache()

    def play(
        self,
        served: Served,
        castings: Sequence[Casting],
        on_group: OnGroup,
        *,
        should_stop: Callable[[], bool],
        on_step: Callable[[int, int], None],
        record_routing: bool = False,
        sampling: Sampling = NEUTRAL,
    ) -> Played:
        """Play castings, as many at once as memory and the Mac's owner allow.

        It is broken off when `should_stop()`, and when everything that has begun has ended and the owner lets nothing
        more begin.
        """
        plan = self._plan(castings)
        pages = self._pages(plan, served)
        places = min(plan.max_rows, len(castings))
        schedule = cast(self._environment, castings, pages, max_rows=places, expected_tokens=self._mean_tokens(castings))
        num_steps = num_rows = 0

        def counted(num_done: int, num_tokens: int) -> None:
            nonlocal num_steps, num_rows
            num_steps, num_rows = num_steps + 1, num_rows + schedule.num_running
            on_step(num_done, num_tokens)

        self._loaded = lambda: Load(num_rows / max(1, num_steps * places), hit_share(schedule), mx.get_peak_memory())
        decoder = self._decoder(served.model, pages, schedule.num_slots, record_routing=record_routing, sampling=sampling)
        with wired(wired_bytes(plan.total_bytes, self._memory_bytes()), mx.set_wired_limit):
            sweep = Sweep(decoder, schedule, self._environment, castings, on_group, pace=self._pace)
            played = sweep.play(should_stop, counted, lambda: self._rows_allowed(plan.max_rows))
        if played.num_parked:
            _log.info("episodes_parked", times=played.num_parked, pages=plan.num_pages)
        return played

    def learn(self, played: Played, groups: int, *, lag: int, most_lag: int) -> None:
        """Take a sweep of the run's own groups as a lesson; `lag`: versions published while it was played."""
        before, memory = self._learned, self._memory_groups()
        self._learned = learn(before, groups=groups, mean_tokens=played.mean_tokens, lag=lag, most_lag=most_lag, memory_groups=memory)
        if self._learned != before:
            write_learned(self._folder, self._learned)
        if self._learned.most_groups != before.most_groups:
            _log.info("width_learned", most_groups=self._learned.most_groups, groups=groups, lag=lag)

    def _rows_allowed(self, most: int) -> int:
        decision = self._guest.decision
        return max(1, round(most * decision.width)) if decision.starts else 0

    def _mean_tokens(self, castings: Sequence[Casting]) -> int:
        longest = self._environment.limits.max_episode_tokens
        return min(longest, round(self._learned.mean_tokens * _SPREAD)) if self._shared(castings) else longest

    def _shared(self, castings: Sequence[Casting]) -> bool:
        """True if these are groups of one question each, as lessons are learned from."""
        return len({casting.question_id for casting in castings}) < len(castings)

    def holds(self, castings: Sequence[Casting]) -> bool:
        """True if memory has room for all of these at once."""
        groups, play, plan = self._planned(castings)
        return plan.groups == groups and plan.num_pages > groups * play.group_pages

    def _planned(self, castings: Sequence[Casting]) -> tuple[int, Play, MemoryPlan]:
        """Groups that are to be played at once, the size of one, and what memory has room for."""
        groups = max(1, round(-(-len(castings) // self._rollout.group_size) * self._guest.decision.share))
        play = self._play_of(castings[0].question_id if self._shared(castings) else "")
        plan = plan_memory(self._model, play, most_groups=groups, memory_bytes=self._memory_bytes(), step_tokens=MOST_TOKENS)
        return groups, play, plan

    def _plan(self, castings: Sequence[Casting]) -> MemoryPlan:
        groups, _, plan = self._planned(castings)
        if plan.groups < groups:
            _log.info("sweep_narrowed", groups=plan.groups, wanted=groups, memory_bytes=self._memory_bytes(), pages=plan.num_pages)
        return plan

    def _play_of(self, question_id: str) -> Play:
        """The size of a group of this question; with "" of episodes that share nothing and may have any length."""
        longest, size = self._environment.limits.max_episode_tokens, self._rollout.group_size
        if not question_id:
            return Play(size, longest)
        mean = min(longest, round(self._learned.mean_tokens * _SPREAD))
        return Play(size, longest, len(self._environment.prompt_ids(question_id)), mean)

    def _memory_groups(self) -> int:
        memory_bytes = self._memory_bytes()
        if memory_bytes is None:
            return _WIDEST
        play = self._play_of(self._environment.question_ids("train")[0])
        return plan_memory(self._model, play, most_groups=_WIDEST, memory_bytes=memory_bytes, step_tokens=MOST_TOKENS).groups

    def _memory_bytes(self) -> int | None:
        """What the owner lets weights and pages take of the GPU's memory; None where it has no limit of its own."""
        if not mx.metal.is_available():
            return None
        return int(int(mx.device_info()["max_recommended_working_set_size"]) * self._guest.allowed.memory_fraction)

    def _pages(self, plan: MemoryPlan, served: Served) -> Pages:
        """The accounting of the pool at hand, emptied; a new one if there is none of about this size."""
        key = PoolKey(served.version, served.state_id, PAGE_TOKENS, str(served.model.cache_shape.dtype))
        if self._pool is not None and plan.num_pages <= self._pool[1].num_pages <= MOST_SPARE * plan.num_pages:
            pages = self._pool[1]
            if not pages.turn_to(key):
                for holder in list(pages.holders()):
                    pages.release(holder)
            return pages
        self.drop_pool()
        return Pages(plan.num_pages, key)

    def _decoder(self, model: Model, pages: Pages, num_slots: int, *, record_routing: bool, sampling: Sampling) -> Decoder:
        if self._pool is not None and self._pool[0] is model and self._pool[2].num_slots == num_slots:
            decoder = self._pool[2]
            decoder.record_routing, decoder.sampling = record_routing, sampling
            return decoder
        self.drop_pool()
        decoder = Decoder(model, pages.num_pages, num_slots, record_routing=record_routing, sampling=sampling)
        self._pool = model, pages, decoder
        return decoder


def hit_share(schedule: Schedule) -> float:
    """Share of the prompt tokens of episodes begun that a schedule had not to feed for each; 0 before there are any."""
    begun = (schedule.state[: schedule.num_episodes] != State.WAITING) | (schedule.length[: schedule.num_episodes] > schedule.prompt_length)
    num_tokens = int((schedule.prompt_length - 1)[begun].sum())
    return max(0.0, 1.0 - schedule.counts.prompt_tokens / num_tokens) if num_tokens else 0.0


def bound_memory(memory_bytes: int | None) -> None:
    """What MLX keeps of freed buffers, and takes in all, where that is known: its own bounds fill a Mac's memory."""
    mx.set_cache_limit(CACHE_BYTES)
    if memory_bytes is not None:
        mx.set_memory_limit(memory_bytes)
