"""Schedules on rows without a model: whatever is shared, parked and fed in pieces, every episode is what it is alone."""

import hashlib
import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from environments.base import Limits, Outcome, Question, Reply
from metal.sizes import PAGE_TOKENS
from stoa.contracts.errors import GpuInterruptedError
from tests.unit.worker_mac.tasks import Dialogue, Fixed, ScriptedRows, play
from worker_mac.decoder import Drawn
from worker_mac.pages import Pages, PoolKey
from worker_mac.plan import Work
from worker_mac.schedule import Schedule, State, least_pages
from worker_mac.sweep import MOST_INTERRUPTIONS, Casting

LONGEST = 160


def digest(fed: list[int]) -> int:
    return int.from_bytes(hashlib.sha256(bytes(str(fed), "ascii")).digest()[:4], "big")


def next_id(fed: list[int]) -> int:
    """A stop id (below 8) one time in eight, by what was fed."""
    number = digest(fed)
    return number % 8 if number % 64 < 8 else 8 + number % 200


class Varied:
    """Prompts with a common beginning, replies of 0 to 40 ids, 1 to 4 turns."""

    name = "varied"
    stop_ids = frozenset(range(8))
    limits = Limits(4, 40, LONGEST)

    def __init__(self, common: int = 0, *, waits: bool = False) -> None:
        self.common = common
        if waits:
            self.limits = replace(self.limits, reply_seconds=20.0)

    def question_ids(self, split: str) -> list[str]:
        return [str(number) for number in range(20)]

    def question(self, question_id: str) -> Question:
        return Question(question_id, question_id, (), "train", "")

    def prompt_ids(self, question_id: str) -> tuple[int, ...]:
        number = int(question_id)
        return (*range(50, 50 + self.common), *(10 + (number * 31 + place) % 200 for place in range(1 + number * 7 % 61)))

    def reply(self, question_id: str, turns: list) -> Reply:
        number = digest([*turns[-1], len(turns)])
        if self.limits.reply_seconds:
            time.sleep(number % 5 * 0.0005)
        if number % 3 == 0:
            return Reply((), True, "answered")
        return Reply(tuple(9 + (number + place) % 200 for place in range(1 + number // 3 % 40)), False, "")

    def score(self, question_id: str, turns: list) -> Outcome:
        return Outcome(float(len(turns)), {})


def castings(groups: int, size: int) -> list[Casting]:
    return [Casting(group, str(group), 1000 * group + episode) for group in range(groups) for episode in range(size)]


def told_apart(next_of: object, keys: bool = True) -> ScriptedRows:
    """Rows in which the episodes of a group differ: what is drawn depends on the uniform number too."""

    class Rows(ScriptedRows):
        def step(self, work: Work, uniform: np.ndarray) -> Drawn:
            drawn = super().step(work, uniform)
            mixed = [next_id([token, int(number * 2**23)]) for token, number in zip(drawn.tokens, uniform[work.samples], strict=True)]
            return Drawn(np.array(mixed, np.int32), drawn.logprobs)

    return Rows(next_of)


def alone(environment: object, casting: Casting) -> object:
    _, found = play(told_apart(next_id), environment, [casting])
    return found[casting.group][0]


@settings(max_examples=40, deadline=None)
@example(groups=5, size=2, common=96, spare=1, budget=1, rows=2, expected=0, waits=False)
@example(groups=5, size=4, common=96, spare=4, budget=30, rows=9, expected=0, waits=True)
@given(
    groups=st.integers(1, 5),
    size=st.integers(1, 6),
    common=st.sampled_from([0, 40, 70, 96]),
    spare=st.integers(0, 40),
    budget=st.integers(1, 90),
    rows=st.integers(1, 30),
    expected=st.sampled_from([0, 60, LONGEST]),
    waits=st.booleans(),
)
def test_every_episode_is_what_it_is_alone_however_it_is_shared_parked_held_and_fed(
    groups: int, size: int, common: int, spare: int, budget: int, rows: int, expected: int, waits: bool
) -> None:
    environment = Varied(common, waits=waits)
    dealt = castings(groups, size)
    num_pages = -(-LONGEST // PAGE_TOKENS) + 2 + spare
    scripted = told_apart(next_id)
    played, found = play(scripted, environment, dealt, num_pages=num_pages, max_rows=rows, pace=Fixed(budget), expected_tokens=expected)
    assert played.ended
    assert played.num_episodes == len(dealt)
    assert played.most_pages <= num_pages - 1
    for casting in dealt[:: max(1, len(dealt) // 5)]:
        wanted = alone(Varied(common), casting)
        episode = found[casting.group][casting.key % 1000]
        np.testing.assert_array_equal(episode.ids, wanted.ids)
        assert (episode.turns, episode.stop_reason, episode.reward) == (wanted.turns, wanted.stop_reason, wanted.reward)
    if not played.num_parked and spare >= 40:
        sampled = sum(int(e.mask.sum()) for group in found.values() for e in group)
        assert scripted.fed_tokens == played.num_prompt_tokens + sampled


def test_a_group_feeds_its_prompt_once_and_a_common_beginning_is_fed_once_for_all() -> None:
    for common, shared in ((0, 0), (70, 64), (128, 128)):
        environment = Varied(common)
        environment.reply = lambda question, turns: Reply((), True, "answered")
        rows = told_apart(next_id)
        played, found = play(rows, environment, castings(4, 8))
        prompts = [len(environment.prompt_ids(str(group))) for group in range(4)]
        sampled = sum(int(e.mask.sum()) for group in found.values() for e in group)
        assert played.num_prompt_tokens == sum(prompt - 1 for prompt in prompts) - 3 * shared
        assert rows.fed_tokens == played.num_prompt_tokens + sampled


def test_one_episode_a_question_shares_nothing_and_needs_no_stem() -> None:
    rows = told_apart(next_id)
    dealt = [Casting(0, str(number), number) for number in range(6)]
    played, found = play(rows, Varied(), dealt)
    assert played.num_episodes == 6
    assert rows.steps[0] == 6  # the first step draws already
    for casting in dealt:
        np.testing.assert_array_equal(found[0][casting.key].ids, alone(Varied(), casting).ids)


def test_the_youngest_are_parked_when_pages_run_out_and_the_oldest_group_ends_first() -> None:
    ended: list[int] = []
    environment = Dialogue(num_turns=1, max_turn_tokens=120, stop_ids=frozenset({0}))
    rows = ScriptedRows(lambda fed: 0 if len(fed) >= 100 else 77)
    dealt = castings(4, 4)
    played, found = play(rows, environment, dealt, num_pages=22)
    ended = list(found)
    assert played.num_parked > 0
    assert ended == [0, 1, 2, 3]
    assert all(len(group) == 4 for group in found.values())
    # 16 episodes of 4 pages want 64; with 21 only a few run at a time, and what is fed again is bounded.
    assert max(rows.steps) <= 16
    assert rows.fed_tokens < 3 * 16 * 101


def test_who_is_expected_to_grow_is_not_admitted_where_it_would_be_parked() -> None:
    environment = Dialogue(num_turns=1, max_turn_tokens=120, stop_ids=frozenset({0}))
    rows = ScriptedRows(lambda fed: 0 if len(fed) >= 100 else 77)
    played, _ = play(rows, environment, castings(4, 4), num_pages=22, expected_tokens=101)
    assert (played.num_episodes, played.num_parked) == (16, 0)
    assert max(rows.steps) <= 6


def test_a_step_feeds_no_more_than_its_budget_and_decoding_goes_first() -> None:
    sizes: list[tuple[int, int]] = []

    class Counting(ScriptedRows):
        def step(self, work: Work, uniform: np.ndarray) -> Drawn:
            sizes.append((work.num_tokens, int((work.counts == 1).sum())))
            return super().step(work, uniform)

    play(Counting(next_id), Varied(), castings(4, 4), pace=Fixed(20))
    assert max(tokens for tokens, _ in sizes) <= 20
    assert any(0 < single < tokens for tokens, single in sizes)


def test_nothing_begins_while_nothing_may_and_what_has_begun_ends() -> None:
    environment = Dialogue(num_turns=1, max_turn_tokens=60, stop_ids=frozenset({0}))
    rows = ScriptedRows(lambda fed: 0 if len(fed) >= 40 else 77)
    played, found = play(rows, environment, castings(4, 4), max_rows=6, rows_allowed=lambda: 6 if len(rows.steps) < 5 else 0)
    assert not played.ended
    assert sorted(found) == [0, 1]  # six rows: the first group and a part of the second, which has all its members played
    assert played.num_episodes == 8


def test_fewer_rows_are_let_in_while_the_mac_is_wanted() -> None:
    environment = Dialogue(num_turns=1, max_turn_tokens=60, stop_ids=frozenset({0}))
    rows = ScriptedRows(lambda fed: 0 if len(fed) >= 20 else 77)
    play(rows, environment, castings(4, 8), rows_allowed=lambda: 4)
    assert max(rows.steps) == 4


def test_a_step_the_system_ended_costs_no_episode_and_is_tried_with_fewer_tokens() -> None:
    class Fragile(ScriptedRows):
        num_ended = 0

        def step(self, work: Work, uniform: np.ndarray) -> Drawn:
            if work.num_tokens > 100 or (len(self.steps) > 10 and not self.num_ended):
                self.num_ended += 1
                raise GpuInterruptedError("Impacting Interactivity")
            return super().step(work, uniform)

    environment = Varied()
    rows = Fragile(next_id)
    played, found = play(rows, environment, castings(5, 2), pace=Fixed(256))
    assert played.ended
    assert 1 <= rows.num_ended <= MOST_INTERRUPTIONS
    for casting in castings(5, 2)[::3]:
        _, wanted = play(ScriptedRows(next_id), environment, [casting])
        np.testing.assert_array_equal(found[casting.group][casting.key % 1000].ids, wanted[casting.group][0].ids)


def test_a_gpu_that_ends_every_step_fails_the_sweep() -> None:
    class Broken(ScriptedRows):
        def step(self, work: Work, uniform: np.ndarray) -> Drawn:
            self.steps.append(work.num_tokens)
            raise GpuInterruptedError("Impacting Interactivity")

    rows = Broken(next_id)
    with pytest.raises(GpuInterruptedError):
        play(rows, Varied(), castings(2, 4))
    assert len(rows.steps) == MOST_INTERRUPTIONS + 1
    assert rows.steps == sorted(rows.steps, reverse=True)


def test_a_pool_too_small_for_one_episode_is_refused() -> None:
    key = PoolKey(0, "", PAGE_TOKENS, "")
    prompts = [np.arange(10, dtype=np.int32)]
    least = least_pages(Pages(2, key), LONGEST)
    Schedule(prompts, [0], Pages(least, key), max_rows=1, max_tokens=LONGEST)
    with pytest.raises(AssertionError, match="cannot hold one episode"):
        Schedule(prompts, [0], Pages(least - 1, key), max_rows=1, max_tokens=LONGEST)


def test_pages_and_slots_of_who_is_done_are_free_at_once() -> None:
    pages = Pages(40, PoolKey(0, "", PAGE_TOKENS, ""))
    schedule = Schedule([np.arange(20, dtype=np.int32)], [0, 0], pages, max_rows=2, max_tokens=60)
    for _ in range(2):
        schedule.advance(schedule.plan(100))
    assert schedule.state.tolist() == [State.RUNNING, State.RUNNING, State.READY]
    # The stem's 19 tokens lie in one page, of which each episode has a copy.
    assert pages.num_used == 3
    schedule.finish(0)
    assert (pages.num_used, schedule.state[2]) == (2, State.READY)
    schedule.finish(1)
    assert (pages.num_used, schedule.state[2]) == (0, State.DONE)
    assert schedule.is_over
