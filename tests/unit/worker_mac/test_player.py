"""Sweeps within what a Mac has: its memory, its owner's word, what was learned."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from stoa.config.run import Rollout
from stoa.rollouts.records import Episode
from tests.unit.worker_mac.policies import TINY, model_of, random_state
from tests.unit.worker_mac.tasks import Dialogue
from worker_mac.guest import Guest
from worker_mac.model_config import read_model_config
from worker_mac.player import Load, Player
from worker_mac.power import PLAY
from worker_mac.sampler import Sampling, seed_of
from worker_mac.sweep import Casting, Played
from worker_mac.versions import Served
from worker_mac.weights import LiveWeights
from worker_mac.width import LEARNED_FILE

STATE = random_state(TINY, spread=0.08)
MODEL = model_of(TINY, STATE)
GROUPS = [Casting(group, str(group), seed_of("player", group, episode)) for group in range(6) for episode in range(8)]


class Limited(Player):
    """On a Mac of so many bytes."""

    memory_bytes: int | None = None

    def _memory_bytes(self) -> int | None:
        return self.memory_bytes


def make(folder: Path, *, groups: object = 6, guest: Guest | None = None, memory_bytes: int | None = None) -> Limited:
    Limited.memory_bytes = memory_bytes
    return Limited(
        Dialogue(), Rollout(groups=groups, group_size=8), STATE.layout, read_model_config(TINY), guest or Guest(), folder=folder,
        state_folder=folder,
    )  # fmt: skip


def served(version: int = 0) -> Served:
    return Served(version, f"state {version}", MODEL, LiveWeights(STATE.layout))


def play(
    player: Player, castings: list[Casting] = GROUPS, version: int = 0, should_stop: Callable[[], bool] = lambda: False, **options: object
) -> tuple[Played, dict[int, list[Episode]]]:
    found: dict[int, list[Episode]] = {}
    played = player.play(
        served(version), castings, found.__setitem__, should_stop=should_stop, on_step=lambda done, tokens: None, **options
    )
    return played, found


def same(one: dict[int, list[Episode]], other: dict[int, list[Episode]]) -> None:
    assert sorted(one) == sorted(other)
    for group, episodes in one.items():
        for episode, wanted in zip(episodes, other[group], strict=True):
            np.testing.assert_array_equal(episode.ids, wanted.ids)
            np.testing.assert_array_equal(episode.logprobs, wanted.logprobs)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[Episode]]:
    return play(make(tmp_path_factory.mktemp("whole")))[1]


def test_pages_of_another_version_are_let_go_of_and_the_pool_itself_is_kept(tmp_path: Path, whole: dict[int, list[Episode]]) -> None:
    player = make(tmp_path)
    play(player, should_stop=iter([False] * 9 + [True] * 9).__next__)  # broken off: pages are left in hand
    _, pages, decoder = player._pool
    assert pages.num_used > 0
    assert pages.key.version == 0
    played, found = play(player, version=1)
    assert played.ended
    assert player._pool[1] is pages and player._pool[2] is decoder
    assert (pages.key.version, pages.key.state_id, pages.num_used) == (1, "state 1", 0)
    same(found, whole)


def test_a_broken_off_sweep_leaves_nothing_to_the_next_of_its_version(tmp_path: Path, whole: dict[int, list[Episode]]) -> None:
    player = make(tmp_path)
    play(player, should_stop=iter([False] * 9 + [True] * 9).__next__)
    same(play(player)[1], whole)


def test_a_pool_of_another_size_takes_the_place_of_the_old_one(tmp_path: Path) -> None:
    player = make(tmp_path)
    play(player)
    mx.synchronize()
    large = mx.get_active_memory()
    play(player, GROUPS[:8])
    mx.synchronize()
    assert mx.get_active_memory() < large
    player.drop_pool()
    assert player._pool is None


def test_short_memory_narrows_a_sweep_and_costs_no_episode(tmp_path: Path, whole: dict[int, list[Episode]]) -> None:
    model_bytes = make(tmp_path)._model
    # Room for the weights, what a step takes, and some 60 pages: about two groups at their longest.
    room = model_bytes.weights_bytes + (192 << 20) + 1024 * model_bytes.token_bytes + 60 * model_bytes.page_bytes
    player = make(tmp_path, groups="auto", memory_bytes=room)
    assert 1 <= player.groups <= 2
    played, found = play(player)
    assert played.ended
    assert played.most_pages <= 60
    same(found, whole)


def test_what_is_learned_of_lengths_lets_more_groups_in(tmp_path: Path) -> None:
    model_bytes = make(tmp_path)._model
    room = model_bytes.weights_bytes + (192 << 20) + 1024 * model_bytes.token_bytes + 60 * model_bytes.page_bytes
    player = make(tmp_path, groups="auto", memory_bytes=room)
    before = player.groups
    played, _ = play(player)
    player.learn(played, 6, lag=0, most_lag=3)
    assert player.groups > before
    assert json.loads((tmp_path / LEARNED_FILE).read_text())["mean_tokens"] == pytest.approx(played.mean_tokens)
    assert make(tmp_path, groups="auto", memory_bytes=room).groups == player.groups


def test_a_sweep_that_took_too_long_is_followed_by_a_narrower_one(tmp_path: Path) -> None:
    player = make(tmp_path, groups="auto")
    assert player.groups == 8
    played, _ = play(player)
    player.learn(played, 8, lag=6, most_lag=3)
    assert player.groups == 4
    assert make(tmp_path).groups == 6  # what the run asks for by number stands


def test_an_owner_who_wants_the_mac_back_gets_it_when_what_has_begun_has_ended(tmp_path: Path) -> None:
    guest = Guest()
    player = make(tmp_path, guest=guest)
    steps = 0

    def on_step(done: int, tokens: int) -> None:
        nonlocal steps
        steps += 1
        if steps == 3:
            guest.decision = replace(PLAY, state="hold", reason="you are using the Mac")

    found: dict[int, list[Episode]] = {}
    guest.decision = replace(PLAY, state="gentle")
    played = player.play(served(), GROUPS, found.__setitem__, should_stop=lambda: False, on_step=on_step)
    assert not played.ended
    assert 1 <= len(found) < 6
    assert all(len(group) == 8 for group in found.values())


def test_an_evaluation_may_take_the_likeliest_token(tmp_path: Path) -> None:
    player = make(tmp_path)
    alone = [Casting(0, str(number), number) for number in range(5)]
    _, found = play(player, alone, sampling=Sampling(temperature=0.0))
    _, again = play(player, [replace(casting, key=casting.key + 1000) for casting in alone], sampling=Sampling(temperature=0.0))
    for one, other in zip(found[0], again[0], strict=True):
        np.testing.assert_array_equal(one.ids, other.ids)
        assert (one.logprobs == 0).all()


@pytest.mark.parametrize(("memory_bytes", "two"), [(None, True), (1 << 40, True), (STATE.layout.num_bytes * 3 // 2, False)])
def test_two_sets_of_weights_need_room(tmp_path: Path, memory_bytes: int | None, two: bool) -> None:
    assert make(tmp_path, memory_bytes=memory_bytes).holds_two is two


def test_load_tells_filled_places_shared_prompts_and_memory(tmp_path: Path) -> None:
    """Counted here from what the schedule is asked to run; eight episodes a question feed its prompt about once."""
    player = make(tmp_path)
    assert player.load == Load()
    play(player)
    load = player.load
    assert 0.1 < load.batch_occupancy < 1.0, "episodes of other lengths leave places empty"
    assert load.prefix_hit_share == pytest.approx(7 / 8, abs=0.06)
    assert load.peak_memory_bytes >= mx.get_active_memory() > 0
    alone = [Casting(0, "1", seed_of("player", 1, 0))]
    play(player, alone)
    assert player.load.prefix_hit_share == 0.0
    assert player.load.batch_occupancy > 0.8, "one episode in one place"
