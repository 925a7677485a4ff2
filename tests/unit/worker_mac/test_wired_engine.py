"""A Mac's engine over a wired set: a real bucket, real updates, groups as one machine would have made them."""

import io
import json
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from stoa.bucket.store import Store
from stoa.config.run import Rollout
from stoa.contracts.errors import RankLostError, WiredError, WrongStateError
from stoa.weights.pulse import Change
from tests.unit.worker_mac.policies import TINY, model_of, random_state
from tests.unit.worker_mac.publishing import Publishing, Quiet, train_request
from tests.unit.worker_mac.tasks import Dialogue, play
from tests.unit.worker_mac.test_engine import groups_of
from tests.unit.worker_mac.test_wired import same
from tests.unit.worker_mac.wired import fill, wired_set
from worker_mac.cluster.lead import WiredSet
from worker_mac.cluster.parts import PartState, SpreadState, part_of
from worker_mac.cluster.set_engine import SetPlayer, SetVersions, bytes_of, joined, split_model
from worker_mac.cluster.split import Strength, arrays_of, tensors_of
from worker_mac.cluster.wire import Message
from worker_mac.engine import MacEngine, Waits
from worker_mac.forced import Forced
from worker_mac.guest import Guest
from worker_mac.memory import SPARE_BYTES, Play, plan_memory
from worker_mac.model_config import read_model_config
from worker_mac.pace import MOST_TOKENS
from worker_mac.pages import Pages, PoolKey
from worker_mac.sampler import seed_of
from worker_mac.sweep import NOTHING_PLAYED, Casting, Played, Sweep, cast
from worker_mac.versions import Served

MACS = [Strength(None, 1.0), Strength(None, 1.0)]
SPANS = [range(2), range(2, 3)]


@pytest.fixture
def published(store: Store, tmp_path: Path) -> Publishing:
    folder = tmp_path / "base"
    folder.mkdir()
    run = Publishing(store, folder)
    run.publish()
    return run


@pytest.fixture
def wired() -> Iterator[WiredSet]:
    with wired_set(TINY, None, SPANS) as made:
        yield made


def engine_of(published: Publishing, wired: WiredSet, folder: Path) -> MacEngine:
    return MacEngine(
        published.store,
        published.document,
        Dialogue(),
        host="set-1",
        folder=folder / "set-1",
        model_folder=folder / "base",
        waits=Waits(20.0, 20.0),
        make_versions=partial(SetVersions, wired),
        make_player=partial(SetPlayer, wired, MACS),
    )


def check_groups(published: Publishing, version: int, sweep: int) -> None:
    """Every group is what one machine makes of the published weights and the group's seed."""
    model = model_of(TINY, published.publisher.mirror)
    groups = groups_of(published.store, version, sweep, "set-1")
    assert sorted(groups) == list(range(8))
    castings = [Casting(index, one.question_id, seed_of(one.seed, n)) for index, one in groups.items() for n in range(8)]
    _, expected = play(model, Dialogue(), castings)
    same({index: group.episodes for index, group in groups.items()}, expected)


def test_an_engine_over_a_set_joins_follows_updates_and_ships_what_one_machine_would(
    published: Publishing, wired: WiredSet, tmp_path: Path
) -> None:
    engine = engine_of(published, wired, tmp_path)
    try:
        first = engine.sweep(train_request(0, host="set-1"), Quiet())
        assert (first.status, first.version, first.num_groups) == ("done", 0, 8)
        check_groups(published, 0, 0)
        published.publish()
        published.publish()
        second = engine.sweep(train_request(1, host="set-1"), Quiet())
        assert (second.status, second.version) == ("done", 2)
        check_groups(published, 2, 1)
        assert second.bytes_down < published.layout.num_bytes / 4
    finally:
        engine.close()


def test_weights_that_one_mac_holds_wrongly_ship_nothing_and_are_built_anew(published: Publishing, wired: WiredSet, tmp_path: Path) -> None:
    engine = engine_of(published, wired, tmp_path)
    try:
        engine.sweep(train_request(0, host="set-1"), Quiet())
        # Another Mac's memory goes wrong unnoticed: the rescan after the next update finds it.
        name = "model.layers.2.feed_forward.switch_mlp.up_proj.weight"
        wired.ranks.put(1, name, 0, memoryview(bytes(64)))
        published.publish()
        second = engine.sweep(train_request(1, host="set-1"), Quiet())
        assert (second.status, second.version) == ("done", 1)
        check_groups(published, 1, 1)
    finally:
        engine.close()


def test_a_change_is_applied_on_each_mac_as_it_is_on_one(wired: WiredSet) -> None:
    state, numbers = random_state(TINY), np.random.default_rng(5)
    fill(wired, state)
    groups = np.sort(numbers.choice(state.layout.num_codes // 64, 40, replace=False))
    positions = np.sort(numbers.choice(state.layout.num_codes, 3000, replace=False))
    positions = positions[~np.isin(positions // 64, groups)]
    flat = np.concatenate([state.arrays[spec.name].reshape(-1) for spec in state.layout.quantised])
    raws = np.sort(numbers.choice(state.layout.num_raw, 50, replace=False))
    change = Change(
        positions,
        np.where(flat[positions] > 127, -3, 3).astype(np.int16),
        raws,
        numbers.integers(0, 1 << 30, 50).astype(np.uint32),
        groups,
        numbers.integers(0, 1 << 14, 40).astype(np.uint16),
        numbers.integers(0, 1 << 14, 40).astype(np.uint16),
        numbers.integers(0, 255, (40, 64)).astype(np.uint8),
    )
    wired.weights.state.apply(change)
    state.apply(change)
    assert wired.weights.state.state_id() == state.state_id()
    everything = [part_of(change, state.layout, [spec.name for spec in state.layout.tensors])]
    assert everything[0].positions.tolist() == positions.tolist()
    assert not len(part_of(change, state.layout, []).positions)


EMBEDDING = "model.embed_tokens.weight"


@pytest.mark.parametrize("damaged", [0, 1])
def test_copies_of_the_embedding_that_differ_have_the_digest_of_neither(wired: WiredSet, damaged: int) -> None:
    state = random_state(TINY)
    fill(wired, state)
    whole = wired.weights.state
    assert whole.tensor_digests()[EMBEDDING] == state.tensor_digests()[EMBEDDING]
    if damaged:
        wired.ranks.put(1, EMBEDDING, 0, memoryview(b"\1\2\3"))
    else:
        wired.weights.part.put(EMBEDDING, 0, b"\1\2\3")
    assert whole.tensor_digests()[EMBEDDING] == "" and whole.state_id() != state.state_id()


class Deaf:
    """Another Mac that takes nothing of what it is given."""

    def __init__(self, part: PartState) -> None:
        self.part = part

    def put(self, rank: int, name: str, at: int, data: memoryview) -> None:
        pass

    def digests(self, rank: int, names: tuple[str, ...]) -> dict[str, str]:
        return self.part.digests_of(names)


@pytest.mark.parametrize("name", [EMBEDDING, "model.layers.2.conv.in_proj.weight"])
def test_bytes_that_did_not_arrive_on_every_mac_that_holds_them_are_not_accepted(name: str) -> None:
    state = random_state(TINY)
    layout, parts = state.layout, []
    for span in SPANS:
        parts.append({one.name: np.zeros_like(state.arrays[one.name]) for one in arrays_of(layout, span, 3)})
    holders = [{spec.name for spec in tensors_of(layout, span, 3)} for span in SPANS]
    spread = SpreadState(layout, parts[0], holders, Deaf(PartState(layout, parts[1])))
    data = io.BytesIO(state.arrays[name].tobytes())
    assert spread.fill(name, data.readinto, name) != state.tensor_digests()[name]


def test_a_plan_for_weights_that_a_mac_does_not_have_is_refused(wired: WiredSet) -> None:
    fill(wired, random_state(TINY))
    decoder = wired.decoder(9, 4)
    wired.ranks.revision[1] += 1
    with pytest.raises(WrongStateError, match="weights here are of revision"):
        Forced(model_of(TINY, random_state(TINY)), 1, 32, make=lambda *_: decoder).feed([np.arange(4, dtype=np.int32)])
    # What was sent for that step is not taken for the next one's: the set is at its end.
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            wired.ranks.all(Message("peak"))
        except RankLostError:
            return
    raise AssertionError("the set went on")


def test_weights_of_one_rank_are_at_most_six_tenths_at_two_ranks() -> None:
    ten = TINY | {"num_hidden_layers": 10, "layer_types": ["conv", "full_attention"] * 5}
    state = random_state(ten)
    spans = split_model(read_model_config(ten), state.layout, MACS, 128)
    with wired_set(ten, state, spans) as wired:
        decoder = wired.decoder(9, 4)
        assert max(wired.weights_bytes) / state.layout.num_bytes <= 0.6
        assert max(decoder.cache_bytes) / sum(decoder.cache_bytes) <= 0.6
        assert json.dumps(wired.peaks())


def test_a_model_that_does_not_fit_one_ranks_stated_limit_plays_on_two() -> None:
    ten = TINY | {"num_hidden_layers": 10, "layer_types": ["conv", "full_attention"] * 5}
    state, parsed = random_state(ten), read_model_config(ten)
    stated = Strength(SPARE_BYTES + int(0.8 * state.layout.num_bytes), 1.0)
    with pytest.raises(WiredError, match="do not fit these 1 Macs"):
        split_model(parsed, state.layout, [stated], 128)
    who = [Casting(0, "1", seed) for seed in range(4)]
    _, expected = play(model_of(ten, state), Dialogue(), who)
    with wired_set(ten, state, split_model(parsed, state.layout, [stated] * 2, 128)) as wired:
        found = {}
        schedule = cast(Dialogue(), who, Pages(20, PoolKey(0, "", 32, "float32")), max_rows=4)
        Sweep(wired.decoder(20, schedule.num_slots), schedule, Dialogue(), who, found.__setitem__).play()
    same(found, expected)


def test_a_sweep_is_as_wide_as_the_mac_with_least_room_allows_whichever_it_is() -> None:
    state, parsed, asked = random_state(TINY), read_model_config(TINY), Play(4, 128)
    parts = [bytes_of(parsed, state.layout, span, 4) for span in SPANS]
    # Room for two groups to the page on one, for everything on the other.
    pages = 1 + 2 * asked.group_pages
    for tight in (0, 1):
        part = parts[tight]
        room = plan_memory(part, asked, most_groups=2, memory_bytes=None, step_tokens=MOST_TOKENS).total_bytes
        player = SetPlayer.__new__(SetPlayer)
        player._bytes = parts
        player._macs = [Strength(room if rank == tight else 1 << 50, 1.0) for rank in range(2)]
        plan = player._narrowest(asked, 8)
        assert (plan.groups, plan.num_pages) == (2, pages)


def test_halves_of_a_sweep_take_together_what_was_planned(wired: WiredSet, tmp_path: Path) -> None:
    state, config, environment, rollout = random_state(TINY), read_model_config(TINY), Dialogue(), Rollout()
    fill(wired, state)
    places = {"folder": tmp_path, "state_folder": tmp_path}
    player = SetPlayer(wired, MACS, environment, rollout, state.layout, config, Guest(), **places)
    size = rollout.group_size
    who = [Casting(group, str(group), 1000 * group + episode) for group in range(4) for episode in range(size)]
    # Room for two of the four groups at once.
    asked = player._play_of("0")
    plans = [
        plan_memory(bytes_of(config, state.layout, span, 4), asked, most_groups=2, memory_bytes=None, step_tokens=MOST_TOKENS)
        for span in SPANS
    ]
    macs = [Strength(plan.total_bytes, 1.0) for plan in plans]
    player = SetPlayer(wired, macs, environment, rollout, state.layout, config, Guest(), **places)
    found = {}
    served = Served(0, "", wired.model, wired.weights)
    played = player.play(served, who, found.__setitem__, should_stop=lambda: False, on_step=lambda *_: None)
    assert played.ended and played.num_episodes == 4 * size and sorted(found) == [0, 1, 2, 3]
    made = player._made
    assert made and made.num_pages <= max(plan.num_pages for plan in plans) + 1
    # A slot for each row of two groups, one for each question's stem, and the scrap one.
    assert made.num_slots <= 2 * size + 4 + 1
    _, expected = play(model_of(TINY, state), environment, who)
    same(found, expected)


def test_what_halves_did_is_told_as_of_one_sweep() -> None:
    one = Played(True, 4, 1, 40, 20, 3.0, 10, 2.0, 1, 6, 12.0)
    other = Played(True, 2, 0, 10, 5, 1.0, 7, 3.0, 2, 3, 6.0)
    assert joined([one, other]) == Played(True, 6, 1, 50, 25, 4.0, 17, 3.0, 3, 9, (12.0 * 4 + 6.0 * 2) / 6)
    assert not joined([one, replace(other, ended=False)]).ended
    assert joined([NOTHING_PLAYED]).mean_tokens == 0.0


def test_a_stage_without_experts_asks_for_no_expert_kernel() -> None:
    state = random_state(TINY)
    with wired_set(TINY, state, [range(1), range(1, 3)]) as wired:
        assert wired.model.dims.num_experts == 0 and wired.model.dims.inner == 0
