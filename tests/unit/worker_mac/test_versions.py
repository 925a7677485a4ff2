"""Weights brought in between sweeps: resumed before the rescan, shipped after it, and built anew in the same memory."""

import time
from pathlib import Path

import numpy as np
import pytest

from stoa.bucket.store import Store
from stoa.contracts.errors import ObjectMissingError, WrongStateError
from stoa.weights.state import WeightState
from stoa.weights.sync import Puller, Staged
from tests.unit.worker_mac.policies import TINY
from tests.unit.worker_mac.publishing import Publishing
from worker_mac.versions import Versions


@pytest.fixture
def publishing(store: Store, tmp_path: Path) -> Publishing:
    return Publishing(store, tmp_path)


@pytest.fixture
def versions(publishing: Publishing, tmp_path: Path):
    versions = Versions(publishing.store, publishing.document, TINY, tmp_path / "weights")
    yield versions
    versions.close()


def newest(versions: Versions):
    return versions.newest(versions.head(), 0)[0]


def flip(served) -> None:
    name = served.live.state.layout.quantised[0].name
    served.live.state.arrays[name].reshape(-1)[7] ^= 1


def test_update_is_served_at_once_and_its_verdict_comes_after(publishing: Publishing, versions: Versions):
    publishing.publish()
    first = newest(versions)
    assert first.verdict is None  # a join is verified before it is served
    state_id = publishing.publish()
    second = newest(versions)
    assert second.verdict is not None
    assert (second.version, second.state_id) == (1, state_id)
    second.await_verdict()
    assert second.live.state.state_id() == state_id


def test_a_mac_that_joins_counts_a_versions_way_from_its_first_look_and_the_next_from_its_publication(
    publishing: Publishing, versions: Versions
):
    publishing.publish(seconds_ago=3600.0)
    _, joined = versions.newest(versions.head(), 0)
    assert joined.pull_seconds <= joined.latency_seconds < 600.0
    publishing.publish()
    time.sleep(0.3)
    _, updated = versions.newest(versions.head(), 0)
    assert 0.3 <= updated.latency_seconds < 600.0


def test_room_for_weights_is_made_while_their_bytes_come(publishing: Publishing, versions: Versions):
    publishing.publish()
    coming: list[bool] = []
    rooms = versions._new_memory

    def noted():
        coming.append(versions._puller._cache._coming is not None)
        return rooms()

    versions._new_memory = noted
    newest(versions)
    assert coming == [True]


def test_bit_that_flips_in_memory_is_in_the_verdict_and_the_weights_are_built_anew_in_place(publishing: Publishing, versions: Versions):
    publishing.publish()
    first = newest(versions)
    memory = {name: array.__array_interface__["data"] for name, array in first.live.state.arrays.items()}
    flip(first)
    state_id = publishing.publish()
    wrong = newest(versions)
    with pytest.raises(WrongStateError):
        wrong.await_verdict()
    right = newest(versions)
    right.await_verdict()
    assert right.live.state.state_id() == state_id
    assert {name: array.__array_interface__["data"] for name, array in right.live.state.arrays.items()} == memory
    assert right.model is first.model


class Forgetful(Puller):
    """Applies an update to weights of its own, which nobody samples from."""

    def apply(self, staged: Staged, state: WeightState) -> None:
        super().apply(staged, state.copy())


def test_a_swap_that_forgets_the_engine_is_in_the_verdict_of_the_weights_that_are_sampled_from(publishing: Publishing, versions: Versions):
    """The digest is of the engine's own memory, after the swap: nothing sampled with the old weights is shipped as the new."""
    old_id = publishing.publish()
    first = newest(versions)
    versions._puller = Forgetful(publishing.store, publishing.document, versions._puller._folder)
    new_id = publishing.publish()
    forgotten = newest(versions)
    assert forgotten.state_id == new_id and forgotten.live.state.state_id() == old_id
    with pytest.raises(WrongStateError):
        forgotten.await_verdict()
    versions.distrust()
    right = newest(versions)
    assert right.verdict is None and right.live.state.state_id() == new_id and right.model is first.model


def test_update_by_way_of_an_anchor_needs_no_second_copy(publishing: Publishing, versions: Versions):
    publishing.publish()
    first = newest(versions)
    publishing.publish()
    middle = publishing.writer.read()[0]
    state_id = publishing.publish(anchor=True)
    store = publishing.store
    store.delete([item.key for item in store.list("runs/demo/deltas/")])
    memory = first.live.state.arrays[first.live.state.layout.quantised[0].name].__array_interface__["data"]
    served = newest(versions)
    assert middle.version == 1
    assert (served.version, served.live.state.state_id()) == (2, state_id)
    assert served.live.state.arrays[served.live.state.layout.quantised[0].name].__array_interface__["data"] == memory


def test_mac_without_a_way_plays_on_only_what_may_still_be_trained_on(publishing: Publishing, versions: Versions):
    state_id = publishing.publish()
    newest(versions)
    publishing.publish()
    store = publishing.store
    store.delete([item.key for kind in ("deltas", "anchors") for item in store.list(f"runs/demo/{kind}/")])
    served, _ = versions.newest(versions.head(), 0)
    assert (served.version, served.live.state.state_id()) == (0, state_id)
    with pytest.raises(ObjectMissingError):
        versions.newest(versions.head(), 1)


def test_model_computes_with_what_was_written_in_place(publishing: Publishing, versions: Versions):
    publishing.publish()
    first = newest(versions)
    name = first.live.state.layout.quantised[0].name
    publishing.masters[name] += 0.05
    publishing.publish()
    served = newest(versions)
    packed = np.array(served.live.arrays[name]).view(np.uint8)
    assert packed.tobytes() == publishing.publisher.mirror.arrays[name].tobytes()


def test_a_mac_without_room_for_two_sets_of_weights_examines_an_older_one_in_place_and_comes_back(store: Store, tmp_path: Path):
    publishing = Publishing(store, tmp_path)
    versions = Versions(store, publishing.document, TINY, tmp_path / "weights", holds_two=lambda: False)
    base_id = publishing.publish()
    publishing.publish()
    state_id = publishing.publish()
    live = newest(versions)
    memory = {name: array.__array_interface__["data"] for name, array in live.live.state.arrays.items()}
    pinned, _ = versions.pinned(versions.head(), 0)
    assert (pinned.version, pinned.live.state.state_id()) == (0, base_id)
    assert {name: array.__array_interface__["data"] for name, array in pinned.live.state.arrays.items()} == memory
    assert pinned.model is live.model
    assert versions.version == -1  # nothing newer is in memory now
    again, _ = versions.pinned(versions.head(), 0)
    assert again is pinned
    back = newest(versions)
    assert (back.version, back.live.state.state_id(), back.model is live.model) == (2, state_id, True)
    other, _ = versions.pinned(versions.head(), 0)
    assert other is not pinned and other.live.state.state_id() == base_id
    versions.close()
