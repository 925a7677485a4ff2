"""Hostile objects are all refused, honest groups beside them all kept, and cheats found out while honest Macs are not."""

from functools import cache

import numpy as np

from benchmarks import admission
from benchmarks.distrust import CHEATS, EDITED_NATS, catch, edited_logprobs
from benchmarks.hostile import BYTES, EDITS, SEARCH_EDITS, hostile_objects
from stoa.bucket.store import Store
from stoa.rollouts.records import Group


@cache
def honest() -> tuple[Group, ...]:
    return tuple(admission.honest_groups(24))


def test_every_kind_of_hostile_object_is_refused_and_honest_groups_are_kept() -> None:
    num_kinds = len(BYTES) + len(EDITS) + len(SEARCH_EDITS) + 5
    judged = admission.judge_all(list(honest()), 4 * num_kinds, seed=7)
    assert judged.accepted_kinds == {}
    assert (judged.hostile_accepted, judged.honest_refused) == (0, 0)
    assert (judged.num_hostile, judged.num_honest) == (4 * num_kinds, 24)
    assert judged.slowest_seconds < 5.0
    assert judged.mib_more_at_peak < 128, "a bomb of 128 MiB must not be unpacked"
    assert len({thing.kind for thing in hostile_objects(honest(), num_kinds, 0)}) == num_kinds


def test_hostile_objects_come_again_from_their_seed() -> None:
    first, again, other = ([thing.data for thing in hostile_objects(honest(), 30, seed)] for seed in (1, 1, 2))
    assert first == again != other


def test_edited_logprobs_move_a_tenth_of_the_tokens_by_enough() -> None:
    group = honest()[0]
    edited = edited_logprobs(group, np.random.default_rng(0))
    for before, after in zip(group.episodes, edited.episodes, strict=True):
        moved = np.abs(after.logprobs - before.logprobs) > EDITED_NATS - 1e-5
        assert moved.sum() >= 0.1 * len(moved)
        assert after.logprobs.max() <= 0.0


def test_four_cheats_among_six_honest_macs_are_each_suspected_within_three_sweeps(store: Store) -> None:
    caught = catch(store)
    assert set(caught.sweeps) == set(CHEATS)
    assert max(caught.sweeps.values()) <= 3
    assert caught.honest_suspected == ()
    words = {"inflates": "wrong_reward", "copies": "wrong_", "invents": "invented_result", "edits": "sigma"}
    for host, word in words.items():
        assert word in caught.reasons[host]


def test_a_cheat_fails_its_trial_and_an_honest_mac_wrongly_on_trial_is_trusted_again(store: Store) -> None:
    """Its trial goes on under a new lease of the trainer: three clean sweeps in all."""
    caught = catch(store, framed="honest-6", cheats=("edits",), wait_seconds=1.0, takeover=True)
    assert set(caught.failed) == {"edits"}
    assert "sigma" in caught.failed["edits"]
    assert caught.trusted_again["honest-6"] in (3, 4)  # one more may be under way when the third is judged
    assert caught.honest_suspected == ()
