import random
import threading
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from metal.sizes import PAGE_TOKENS
from stoa.rollouts.records import Episode, Fingerprint, Group
from stoa.rollouts.shard import decode_group, encode_group
from tests.unit.worker_mac.policies import TINY, model_of, random_state
from tests.unit.worker_mac.reference import logprobs as reference_logprobs
from tests.unit.worker_mac.tasks import Dialogue, Fixed, ScriptedRows, play
from worker_mac.pages import Pages, PoolKey
from worker_mac.sampler import seed_of
from worker_mac.sweep import Casting, Played, Sweep, cast

STATE = random_state(TINY, spread=0.08)
MODEL = model_of(TINY, STATE)
GROUPS = [Casting(group, str(group), seed_of("sweep", group, episode)) for group in range(8) for episode in range(8)]


@pytest.fixture(scope="module")
def whole() -> tuple[Played, dict[int, list[Episode]]]:
    return play(MODEL, Dialogue(), GROUPS)


def test_every_group_comes_whole_and_counts_are_honest(whole: tuple[Played, dict[int, list[Episode]]]) -> None:
    played, found = whole
    episodes = [episode for group in found.values() for episode in group]
    assert sorted(found) == list(range(8))
    assert [len(group) for group in found.values()] == [8] * 8
    assert played.ended
    assert (played.num_episodes, played.num_lost) == (64, 0)
    assert played.num_sampled_tokens == sum(int(episode.mask.sum()) for episode in episodes)
    assert played.reward_sum == sum(episode.reward for episode in episodes)
    # Each distinct prompt is fed once, all but its last token; then what follows a sampled token on a new turn.
    prompts = sum(6 + number - 1 for number in range(8))
    assert played.num_prompt_tokens == prompts + sum(3 * (len(episode.turns) - 1) for episode in episodes)
    assert len({len(episode.turns) for episode in episodes}) > 1


def test_episodes_are_prefixes_of_themselves_and_marked_where_sampled(whole: tuple[Played, dict[int, list[Episode]]]) -> None:
    environment = Dialogue()
    for group, episodes in whole[1].items():
        for episode in episodes:
            ids, marks, sampled = list(environment.prompt_ids(str(group))), [], []
            marks += [0] * len(ids)
            for number, turn in enumerate(episode.turns):
                assert turn.start == len(ids)
                sampled.append(tuple(episode.ids[turn.start : turn.end].tolist()))
                ids += sampled[-1]
                marks += [1] * len(sampled[-1])
                assert turn.stopped == (sampled[-1][-1] in environment.stop_ids)
                assert not set(sampled[-1][:-1]) & environment.stop_ids
                reply = environment.reply(str(group), sampled)
                assert reply.done == (number == len(episode.turns) - 1)
                ids += reply.ids
                marks += [0] * len(reply.ids)
            assert episode.ids.tolist() == ids
            assert episode.mask.tolist() == marks
            assert len(episode.logprobs) == sum(marks)
            assert episode.reward == environment.score(str(group), sampled).reward
            assert episode.stop_reason == ("answered" if episode.turns[-1].stopped else "malformed")


def test_an_episode_alone_is_the_same_as_in_a_batch_of_64(whole: tuple[Played, dict[int, list[Episode]]]) -> None:
    for index in (0, 9, 27, 38, 63):
        _, alone = play(MODEL, Dialogue(), [GROUPS[index]], pace=Fixed(3))
        (found,), wanted = alone[index // 8], whole[1][index // 8][index % 8]
        np.testing.assert_array_equal(found.ids, wanted.ids)
        np.testing.assert_array_equal(found.logprobs, wanted.logprobs)
        assert found.turns == wanted.turns


def test_logprobs_are_those_of_a_float64_forward_over_the_whole_episode(whole: tuple[Played, dict[int, list[Episode]]]) -> None:
    for episode in (whole[1][0][0], whole[1][3][5], whole[1][7][7]):
        wanted = reference_logprobs(TINY, STATE, episode.ids)
        places = np.flatnonzero(episode.mask)
        assert np.abs(episode.logprobs - wanted[places - 1, episode.ids[places]]).max() < 1e-4


def test_recorded_routing_is_that_of_a_float64_forward_and_survives_bytes(whole: tuple[Played, dict[int, list[Episode]]]) -> None:
    _, found = play(MODEL, Dialogue(), GROUPS, pace=Fixed(50), record_routing=True)
    for group, index in ((0, 3), (5, 0), (7, 6)):
        episode = found[group][index]
        np.testing.assert_array_equal(episode.ids, whole[1][group][index].ids)
        wanted: list[np.ndarray] = []
        reference_logprobs(TINY, STATE, episode.ids, wanted)
        assert episode.routing.shape == (len(episode.ids), 2, 2)
        np.testing.assert_array_equal(episode.routing[:-1], np.stack(wanted, axis=1)[:-1])
        assert episode.routing[-1].tolist() == [[0, 1], [0, 1]]
    shipped = Group("demo", "mac-1", 4, 2, "train", "5", 7, "ab" * 32, 1.0, 11, tuple(found[5]), Fingerprint("mlx", "0"))
    for one, other in zip(decode_group(encode_group(shipped)).episodes, found[5], strict=True):
        np.testing.assert_array_equal(one.routing, other.routing)


def test_a_group_survives_its_way_through_bytes(whole: tuple[Played, dict[int, list[Episode]]]) -> None:
    group = Group("demo", "mac-1", 4, 2, "train", "2", 7, "ab" * 32, 1.0, 11, tuple(whole[1][2]), Fingerprint("mlx", "0"))
    back = decode_group(encode_group(group))
    assert replace(back, episodes=()) == replace(group, episodes=())
    for one, other in zip(back.episodes, group.episodes, strict=True):
        np.testing.assert_array_equal(one.ids, other.ids)
        np.testing.assert_array_equal(one.logprobs, other.logprobs)
        assert (one.turns, one.reward, one.reward_parts) == (other.turns, other.reward, other.reward_parts)


def countdown(length_of: dict[int, int]) -> ScriptedRows:
    """Rows of one-turn episodes: the prompt's first id says after how many tokens the stop id 0 comes."""
    return ScriptedRows(lambda fed: 0 if len(fed) >= length_of[fed[0]] else 77)


def first_id(question: int) -> int:
    return Dialogue().prompt_ids(str(question))[0]


def test_groups_are_handed_over_while_one_episode_is_held_open() -> None:
    # Question 0's episodes take 110 tokens, all others 10 to 17.
    rows = countdown({first_id(q): 116 if q == 0 else 16 + q for q in range(8)})
    handed: list[tuple[int, int]] = []
    environment = Dialogue(num_turns=1, max_turn_tokens=120, stop_ids=frozenset({0}))

    class Watched(dict):
        def __setitem__(self, group: int, _: object) -> None:
            handed.append((group, len(rows.steps)))

    pages = Pages(400, PoolKey(0, "", PAGE_TOKENS, ""))
    sweep = Sweep(rows, cast(environment, GROUPS, pages, max_rows=64), environment, GROUPS, Watched().__setitem__)
    assert sweep.play().ended
    assert [group for group, _ in handed] == [1, 2, 3, 4, 5, 6, 7, 0]
    # One step for the prompts; a group's first token comes from the second.
    assert handed[6][1] <= 13
    assert handed[7][1] == 112


def test_ended_rows_leave_the_batch() -> None:
    rows = countdown({first_id(q): 60 if q == 0 else 16 for q in range(8)})
    play(rows, Dialogue(num_turns=1, max_turn_tokens=100, stop_ids=frozenset({0})), GROUPS)
    assert rows.steps[:2] == [0, 64]
    assert rows.steps[-1] == 8


def test_a_turn_without_its_stop_ends_at_the_turn_limit() -> None:
    rows = ScriptedRows(lambda fed: 77)
    _, found = play(rows, Dialogue(), GROUPS[:1])
    (episode,) = found[0]
    assert [(turn.start, turn.end, turn.stopped) for turn in episode.turns] == [(6, 18, False)]
    assert episode.stop_reason == "malformed"


def test_an_episode_that_would_outgrow_its_limit_stops_for_tokens() -> None:
    # The stop id is the 126th of at most 128 ids, so the three ids of the reply have no room.
    rows = ScriptedRows(lambda fed: 0 if len(fed) == 125 else 77)
    _, found = play(rows, Dialogue(max_turn_tokens=130, stop_ids=frozenset({0})), GROUPS[:1])
    (episode,) = found[0]
    assert (episode.stop_reason, len(episode.ids), len(episode.turns)) == ("token_limit", 126, 1)


def test_an_environment_that_never_ends_meets_the_turn_limit() -> None:
    _, found = play(ScriptedRows(lambda fed: 0), Dialogue(num_turns=99), GROUPS[:1])
    (episode,) = found[0]
    assert (episode.stop_reason, len(episode.turns)) == ("turn_limit", 4)


def test_an_episode_lost_to_infrastructure_is_no_sample() -> None:
    environment = Dialogue()
    environment.faults = {"3"}
    played, found = play(MODEL, environment, GROUPS)
    assert (played.num_episodes, played.num_lost) == (64, 8)
    assert found[3] == []
    assert all(len(found[group]) == 8 for group in range(8) if group != 3)


def test_a_sweep_that_is_broken_off_hands_over_only_whole_groups() -> None:
    rows = countdown({first_id(q): 116 if q == 0 else 16 for q in range(8)})
    environment = Dialogue(num_turns=1, max_turn_tokens=120, stop_ids=frozenset({0}))
    played, found = play(rows, environment, GROUPS, should_stop=lambda: len(rows.steps) >= 50)
    assert not played.ended
    assert sorted(found) == [1, 2, 3, 4, 5, 6, 7]


def test_nothing_to_play_ends_at_once() -> None:
    assert play(ScriptedRows(lambda fed: 0), Dialogue(), []) == (Played(True, 0, 0, 0, 0, 0.0, 0, pytest.approx(0, abs=1)), {})


def test_an_episode_is_bit_identical_alone_in_64_in_any_order_and_parked_and_resumed(
    whole: tuple[Played, dict[int, list[Episode]]],
) -> None:
    """Tokens and logprobs; the pools here are so small that episodes are parked, and the budgets cut stretches anywhere."""
    longest = -(-Dialogue().limits.max_episode_tokens // PAGE_TOKENS)
    backwards = GROUPS[::-1]
    ways = {
        "parked": play(MODEL, Dialogue(), GROUPS, num_pages=longest + 2 + 25, record_routing=True),
        "parked, a few tokens a step": play(MODEL, Dialogue(), GROUPS[:32], num_pages=longest + 2 + 9, pace=Fixed(11)),
        "in the other order, nine at a time": play(MODEL, Dialogue(), backwards, max_rows=9, pace=Fixed(37)),
        "in sixteens, as on a GPU": play(MODEL, Dialogue(), GROUPS[20:60], pad_to=16),
    }
    for way in list(ways)[:2]:
        assert ways[way][0].num_parked > 0, way
    for way, (played, found) in ways.items():
        assert played.ended, way
        for group, episodes in found.items():
            wanted = whole[1][group]
            if way.startswith("in the other"):
                wanted = wanted[::-1]
            if way.startswith("in sixteens") and len(episodes) < 8:
                wanted = wanted[4:] if group == 2 else wanted[:4]
            for episode, one in zip(episodes, wanted, strict=True):
                np.testing.assert_array_equal(episode.ids, one.ids, err_msg=way)
                np.testing.assert_array_equal(episode.logprobs, one.logprobs, err_msg=way)
    _, recorded = play(MODEL, Dialogue(), GROUPS, record_routing=True)
    for group, episodes in ways["parked"][1].items():
        for episode, one in zip(episodes, recorded[group], strict=True):
            np.testing.assert_array_equal(episode.routing, one.routing)


class Elsewhere(Dialogue):
    """The same dialogue whose tools are on a server: each reply takes as long as `delay(question, turns)` does."""

    def __init__(self, delay: Callable[[str, list], object], *, reply_seconds: float = 20.0, **options: object) -> None:
        super().__init__(**options)
        self.limits = replace(self.limits, reply_seconds=reply_seconds)
        self.delay = delay

    def reply(self, question_id: str, turns: list) -> object:
        self.delay(question_id, turns)
        return super().reply(question_id, turns)


@pytest.mark.parametrize("pages", [None, 24])
def test_episodes_are_bit_identical_whenever_their_tools_answer(whole: tuple[Played, dict[int, list[Episode]]], pages: int | None) -> None:
    """Also where memory is short, so that some are parked while they wait."""
    for seed in (1, 2):
        moods = random.Random(seed)
        environment = Elsewhere(lambda question, turns, moods=moods: time.sleep(moods.choice([0.0, 0.001, 0.02])))
        played, found = play(MODEL, environment, GROUPS, num_pages=pages)
        assert (played.ended, played.num_episodes, played.num_lost) == (True, 64, 0)
        assert played.reward_sum == whole[0].reward_sum
        assert pages is None or played.num_parked > 0
        for group, episodes in whole[1].items():
            for one, other in zip(found[group], episodes, strict=True):
                np.testing.assert_array_equal(one.ids, other.ids)
                np.testing.assert_array_equal(one.logprobs, other.logprobs)
                assert (one.turns, one.reward, one.stop_reason) == (other.turns, other.reward, other.stop_reason)


def test_routing_is_whole_where_an_episode_ends_while_it_is_parked(whole: tuple[Played, dict[int, list[Episode]]]) -> None:
    _, recorded = play(MODEL, Dialogue(), GROUPS, record_routing=True)
    environment = Elsewhere(lambda question, turns: time.sleep(0.01))
    played, found = play(MODEL, environment, GROUPS, num_pages=24, record_routing=True)
    assert played.num_parked > 0
    for group, episodes in recorded.items():
        for one, other in zip(found[group], episodes, strict=True):
            np.testing.assert_array_equal(one.routing, other.routing)


def test_others_are_decoded_to_their_end_while_one_search_hangs() -> None:
    gone_on = threading.Event()
    rows = ScriptedRows(lambda fed: 0)
    handed: list[int] = []

    class Watched(dict):
        def __setitem__(self, group: int, _: object) -> None:
            handed.append(group)
            if len(handed) == 7:
                gone_on.set()

    environment = Elsewhere(lambda question, turns: question != "0" or gone_on.wait(20.0))
    pages = Pages(400, PoolKey(0, "", PAGE_TOKENS, ""))
    assert Sweep(rows, cast(environment, GROUPS, pages, max_rows=64), environment, GROUPS, Watched().__setitem__).play().ended
    assert gone_on.is_set()
    assert handed[7] == 0


def test_a_tool_that_gives_no_answer_loses_its_episodes_and_scores_none() -> None:
    release = threading.Event()
    environment = Elsewhere(lambda question, turns: question != "3" or release.wait(20.0), reply_seconds=0.4)
    played, found = play(ScriptedRows(lambda fed: 0), environment, GROUPS[: 5 * 8])
    release.set()
    assert (played.ended, played.num_lost) == (True, 8)
    assert found[3] == []
    assert all(len(found[group]) == 8 for group in (0, 1, 2, 4))


def test_a_sweep_that_only_waits_still_stops_when_it_is_told_to() -> None:
    release, looks = threading.Event(), [0]

    def should_stop() -> bool:
        looks[0] += 1
        return looks[0] > 8

    environment = Elsewhere(lambda question, turns: release.wait(20.0))
    beats: list[tuple[int, int]] = []
    options = {"should_stop": should_stop, "on_step": lambda *at: beats.append(at)}
    played, found = play(ScriptedRows(lambda fed: 0), environment, GROUPS[:8], **options)
    release.set()
    assert (played.ended, found) == (False, {})
    assert len(beats) == 8
