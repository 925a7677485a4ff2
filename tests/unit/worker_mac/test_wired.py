import threading
from dataclasses import replace
from itertools import pairwise

import pytest

from metal.sizes import PAGE_TOKENS
from tests.unit.worker_mac.policies import DENSE, TINY, WIDE, model_of, random_state
from tests.unit.worker_mac.tasks import Dialogue, Fixed, play
from tests.unit.worker_mac.wired import wired_set
from worker_mac.cluster.lanes import Lane, Lanes
from worker_mac.pages import Pages, PoolKey
from worker_mac.sampler import NEUTRAL, Sampling
from worker_mac.sweep import Casting, Sweep, cast

TEN = TINY | {"num_hidden_layers": 10, "layer_types": ["conv", "full_attention"] * 5}


def castings(groups: int = 3, size: int = 4) -> list[Casting]:
    return [Casting(group, str(group), 1000 * group + episode) for group in range(groups) for episode in range(size)]


def same(one, other) -> None:
    assert sorted(one) == sorted(other)
    for group in one:
        for a, b in zip(one[group], other[group], strict=True):
            assert a.ids.tolist() == b.ids.tolist()
            assert a.logprobs.tobytes() == b.logprobs.tobytes()
            assert (a.routing is None) == (b.routing is None)
            if a.routing is not None:
                assert a.routing.tolist() == b.routing.tolist()


@pytest.mark.parametrize(("config", "cuts"), [(TINY, (1,)), (TINY, (1, 2)), (WIDE, (3,)), (DENSE, (2,))])
def test_a_sweep_on_a_set_is_bit_equal_to_one_machine(config, cuts) -> None:
    state = random_state(config)
    edges = [0, *cuts, config["num_hidden_layers"]]
    spans = [range(a, b) for a, b in pairwise(edges)]
    environment, who = Dialogue(stop_ids=frozenset(range(config["vocab_size"] // 10))), castings()
    # So few pages that episodes are parked and fed again.
    alone, expected = play(model_of(config, state), environment, who, num_pages=7, pace=Fixed(24), record_routing=True)
    assert alone.num_parked > 0
    with wired_set(config, state, spans) as wired:
        pages = Pages(7, PoolKey(0, "", PAGE_TOKENS, "float32"))
        schedule = cast(environment, who, pages, max_rows=len(who))
        decoder = wired.decoder(7, schedule.num_slots, record_routing=True)
        found = {}
        played = Sweep(decoder, schedule, environment, who, found.__setitem__, pace=Fixed(24)).play()
    assert played.ended and played.num_parked == alone.num_parked
    same(found, expected)


def test_the_last_mac_samples_as_the_first_is_told_to() -> None:
    state, environment, who, few = random_state(TINY), Dialogue(), castings(), Sampling(0.7, top_k=5, top_p=0.9)
    _, plain = play(model_of(TINY, state), environment, who)
    _, expected = play(model_of(TINY, state), environment, who, sampling=few)
    assert [one.ids.tolist() for one in expected[0]] != [one.ids.tolist() for one in plain[0]]
    with wired_set(TINY, state, [range(2), range(2, 3)]) as wired:
        schedule = cast(environment, who, Pages(81, PoolKey(0, "", PAGE_TOKENS, "float32")), max_rows=len(who))
        for sampling, wanted in ((few, expected), (NEUTRAL, plain)):
            found = {}
            decoder = wired.decoder(81, schedule.num_slots, sampling=sampling)
            again = cast(environment, who, Pages(81, PoolKey(0, "", PAGE_TOKENS, "float32")), max_rows=len(who))
            assert Sweep(decoder, again, environment, who, found.__setitem__).play().ended
            same(found, wanted)


class Hanging(Dialogue):
    """The same whose tools answer the even questions only once two odd ones have been played."""

    def __init__(self) -> None:
        super().__init__()
        self.limits = replace(self.limits, reply_seconds=30.0)
        self.others_over = threading.Event()

    def reply(self, question_id: str, turns: list) -> object:
        assert int(question_id) % 2 or self.others_over.wait(20.0)
        return super().reply(question_id, turns)


@pytest.mark.parametrize("environment", [Dialogue(), Hanging()])
def test_two_halves_in_flight_give_what_one_batch_gives(environment: Dialogue) -> None:
    """Also where all that one half does is wait for its tools until the other has come to its end."""
    state, who = random_state(TINY), castings(4)
    _, expected = play(model_of(TINY, state), Dialogue(), who)
    with wired_set(TINY, state, [range(2), range(2, 3)]) as wired:
        found, halves, first_page, first_slot = {}, [], 0, 0
        decoder = wired.decoder(81, 40)
        lanes = Lanes(decoder)

        def on_group(group: int, episodes: list) -> None:
            found[group] = episodes
            if isinstance(environment, Hanging) and {1, 3} <= set(found):
                environment.others_over.set()

        for half in (0, 1):
            ours = [one for one in who if one.group % 2 == half]
            pages = Pages(40, PoolKey(0, "", PAGE_TOKENS, "float32"))
            schedule = cast(environment, ours, pages, max_rows=len(ours))
            lane = Lane(lanes, first_page, first_slot)
            halves.append(Sweep(lane, schedule, environment, ours, on_group, apart=lane.apart).play)
            first_page, first_slot = first_page + 39, first_slot + schedule.num_slots - 1
        played = lanes.run(halves)
    assert all(one.ended for one in played)
    same(found, expected)
