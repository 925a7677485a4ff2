import os
import shutil
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from environments.base import Limits, Reply
from stoa.bucket import keys
from stoa.bucket.store import Store
from stoa.contracts.errors import InfrastructureFaultError, ObjectMissingError, StarvedError
from stoa.contracts.fleet_messages import SweepRequest, SweepResult
from stoa.rollouts.records import Group
from stoa.rollouts.shard import MAX_GROUP_BYTES, decode_group
from tests.unit.worker_mac.publishing import Publishing, Quiet, train_request
from tests.unit.worker_mac.tasks import Dialogue
from worker_mac.engine import MacEngine, Waits
from worker_mac.memory import CACHE_BYTES
from worker_mac.uploader import Spool


@pytest.fixture
def published(store: Store, tmp_path: Path) -> Publishing:
    folder = tmp_path / "base"
    folder.mkdir()
    run = Publishing(store, folder)
    run.publish()
    return run


@pytest.fixture
def make(published: Publishing, tmp_path: Path) -> Iterator[object]:
    engines: list[MacEngine] = []

    def build(environment: Dialogue | None = None, *, host: str = "mac-1", wait_seconds: float = 20.0) -> MacEngine:
        folder = tmp_path / host
        folder.mkdir(exist_ok=True)
        engines.append(
            MacEngine(
                published.store,
                published.document,
                environment or Dialogue(),
                host=host,
                folder=folder,
                model_folder=tmp_path / "base",
                waits=Waits(pause=wait_seconds, version=wait_seconds),
            )
        )
        return engines[-1]

    yield build
    for engine in engines:
        engine.close()


def groups_of(store: Store, version: int, sweep: int, host: str = "mac-1") -> dict[int, Group]:
    found = {}
    for listed in store.list(keys.groups_of_sweep("demo", version, host, sweep)):
        parts = keys.parse_group(listed.key)
        found[parts.group] = decode_group(store.get(listed.key, max_bytes=MAX_GROUP_BYTES).data)
    return found


def test_a_sweep_joins_plays_and_ships_every_group(published: Publishing, make: object) -> None:
    progress = Quiet()
    result = make().sweep(train_request(), progress)
    groups = groups_of(published.store, 0, 0)
    assert (result.status, result.version, result.num_groups, result.num_episodes) == ("done", 0, 8, 64)
    assert sorted(groups) == list(range(8))
    state_id = published.publisher.mirror.state_id()
    for index, group in groups.items():
        assert (group.run, group.host, group.sweep, group.group, group.purpose) == ("demo", "mac-1", 0, index, "train")
        assert (group.version, group.state_id, group.temperature, group.question_id) == (0, state_id, 1.0, str(index))
        assert len(group.episodes) == 8
        assert group.timings.decode_seconds > 0
        assert group.fingerprint.engine.startswith("mlx 0.")
    sizes = [listed.num_bytes for listed in published.store.list(keys.groups_of_version("demo", 0))]
    assert result.bytes_up == sum(sizes)
    assert result.bytes_down >= published.layout.num_bytes
    assert result.num_sampled_tokens == sum(len(e.logprobs) for group in groups.values() for e in group.episodes)
    assert result.reward_mean == pytest.approx(np.mean([e.reward for group in groups.values() for e in group.episodes]))
    assert result.decode_seconds > 0
    assert result.pull_seconds > 0
    assert result.pull_latency_seconds >= 0
    assert any("episodes" in detail for detail in progress.details)


def test_a_delta_is_staged_during_a_sweep_and_applied_before_the_next(published: Publishing, make: object) -> None:
    engine = make()
    engine.sweep(train_request(0), Quiet())
    published.publish()
    published.publish()
    second = engine.sweep(train_request(1), Quiet())
    assert second.version == 2
    # A version that appears while a sweep plays is on this machine before the next one starts.
    engine._versions.stage_ahead(0.05)
    state_id = published.publish()
    deadline = time.monotonic() + 10
    while engine._versions._staged is None and time.monotonic() < deadline:
        time.sleep(0.02)
    assert engine._versions._staged.version == 3
    third = engine.sweep(train_request(2, min_version=3), Quiet())
    assert third.version == 3
    assert {group.state_id for group in groups_of(published.store, 3, 2).values()} == {state_id}
    assert third.bytes_down < published.layout.num_bytes / 4


def test_state_folder_removed_under_a_living_worker_is_made_again(published: Publishing, make: object, tmp_path: Path) -> None:
    engine = make()
    assert engine.sweep(train_request(0), Quiet()).status == "done"
    shutil.rmtree(engine._folder)
    published.publish()
    played = engine.sweep(train_request(1), Quiet())
    assert (played.status, played.version) == ("done", 1)


def test_a_mac_that_cannot_reach_the_newest_version_plays_on_within_the_bound(published: Publishing, make: object) -> None:
    engine = make()
    assert engine.sweep(train_request(0), Quiet()).version == 0
    published.publish()
    published.store.delete([found.key for found in published.store.list(f"{keys.root('demo')}deltas/")])
    played = engine.sweep(train_request(1), Quiet())
    assert (played.status, played.version) == ("done", 0)
    assert set(groups_of(published.store, 0, 1)) == set(range(8))
    with pytest.raises(ObjectMissingError):
        engine.sweep(train_request(2, min_version=1), Quiet())
    published.publish(anchor=True)
    assert engine.sweep(train_request(2, min_version=1), Quiet()).version == 2


def test_the_same_sweep_on_two_machines_in_two_states_gives_the_same_groups(published: Publishing, make: object, tmp_path: Path) -> None:
    walked = make()
    walked.sweep(train_request(0), Quiet())
    published.publish()
    walked.sweep(train_request(5), Quiet())
    first = groups_of(published.store, 1, 5)
    walked.close()
    published.store.delete([listed.key for listed in published.store.list(keys.groups_of_version("demo", 1))])
    for path in (tmp_path / "mac-1").rglob("*"):
        if path.is_file():
            path.unlink()
    make().sweep(train_request(5), Quiet())  # the same host name on an empty disk: a cold join at version 1
    again = groups_of(published.store, 1, 5)
    assert sorted(again) == sorted(first)
    for index, group in again.items():
        for one, other in zip(group.episodes, first[index].episodes, strict=True):
            np.testing.assert_array_equal(one.ids, other.ids)
            np.testing.assert_array_equal(one.logprobs, other.logprobs)


def test_a_redone_sweep_plays_only_what_is_missing_at_any_version(published: Publishing, make: object) -> None:
    engine = make()
    engine.sweep(train_request(3), Quiet())
    lost = [keys.group("demo", 0, "mac-1", 3, index) for index in (2, 6)]
    published.store.delete(lost)
    published.publish()
    result = engine.sweep(train_request(3), Quiet())
    assert (result.status, result.version, result.num_groups) == ("done", 1, 2)
    assert sorted(groups_of(published.store, 0, 3)) == [0, 1, 3, 4, 5, 7]
    assert sorted(groups_of(published.store, 1, 3)) == [2, 6]


def test_seven_groups_are_in_the_bucket_while_one_episode_is_held_open(published: Publishing, make: object) -> None:
    class Holding(Dialogue):
        """One turn an episode, but the first one of question 0 goes on until the test has seen the other groups."""

        limits = Limits(20_000, 1, 20_000)

        def __init__(self) -> None:
            self.stop_ids = frozenset(range(256))
            self.first = ()

        def reply(self, question_id: str, turns: list) -> Reply:
            if question_id == "0" and not released.is_set():
                self.first = self.first or tuple(turns[0])
                return Reply((100,), False, "")
            return Reply((), True, "answered")

    released = threading.Event()
    results: list[SweepResult] = []
    engine = make(Holding())
    thread = threading.Thread(target=lambda: results.append(engine.sweep(train_request(), Quiet())))
    thread.start()
    deadline = time.monotonic() + 30
    seen: set[int] = set()
    while len(seen) < 7 and time.monotonic() < deadline and thread.is_alive():
        seen = {keys.parse_group(listed.key).group for listed in published.store.list(keys.groups_of_version("demo", 0))}
        time.sleep(0.02)
    still_playing = thread.is_alive() and not results
    released.set()
    thread.join(30)
    assert seen == {1, 2, 3, 4, 5, 6, 7}
    assert still_playing
    assert (results[0].status, results[0].num_groups) == ("done", 8)


def test_an_episode_lost_to_infrastructure_costs_only_its_place(published: Publishing, make: object) -> None:
    class Flaky(Dialogue):
        calls = 0

        def reply(self, question_id: str, turns: list) -> object:
            if question_id == "4":
                self.calls += 1
                if self.calls <= 3:
                    raise InfrastructureFaultError("the index is away")
            if question_id == "5":
                raise InfrastructureFaultError("the index is away")
            return super().reply(question_id, turns)

    result = make(Flaky()).sweep(train_request(), Quiet())
    groups = groups_of(published.store, 0, 0)
    assert (result.status, result.num_groups, result.num_episodes) == ("partial", 7, 53)
    assert "1 groups" in result.reason
    assert len(groups[4].episodes) == 5
    assert 5 not in groups


def test_an_evaluation_on_an_older_version_leaves_the_live_weights_alone(published: Publishing, make: object) -> None:
    base_id = published.publisher.mirror.state_id()
    engine = make()
    published.publish()
    published.publish()
    engine.sweep(train_request(0), Quiet())
    live = engine._versions._served
    questions = tuple(str(number) for number in range(40, 60))
    request = SweepRequest("demo", "mac-1", 1, "eval", questions, 1, version=0, evaluation="v0", part=3)
    result = engine.sweep(request, Quiet())
    key = keys.eval_part("demo", 0, "v0", 3, "mac-1")
    assert (result.status, result.version, result.keys, result.num_episodes) == ("done", 0, (key,), 20)
    part = decode_group(published.store.get(key, max_bytes=MAX_GROUP_BYTES).data)
    assert (part.purpose, part.version, part.state_id) == ("eval", 0, base_id)
    assert sorted(episode.question_id for episode in part.episodes) == sorted(questions)
    assert engine._versions._served is live
    assert live.live.state.state_id() == published.publisher.mirror.state_id()
    assert not list(published.store.list(keys.groups_of_sweep("demo", 0, "mac-1", 1)))


def test_an_evaluation_does_not_depend_on_how_questions_are_dealt(published: Publishing, make: object) -> None:
    questions = tuple(str(number) for number in range(40, 52))
    deals = [("mac-1", questions[:8]), ("mac-2", questions[8:]), ("mac-3", questions[::-1])]
    for part, (host, dealt) in enumerate(deals):
        request = SweepRequest("demo", host, 0, "eval", dealt, 1, version=0, evaluation="e", part=part)
        make(host=host).sweep(request, Quiet())
    found = [
        {e.question_id: e.ids.tolist() for e in decode_group(published.store.get(k, max_bytes=MAX_GROUP_BYTES).data).episodes}
        for k in (keys.eval_part("demo", 0, "e", part, host) for part, (host, _) in enumerate(deals))
    ]
    assert found[0] | found[1] == found[2]


def test_an_evaluation_samples_as_its_settings_say_and_training_does_not(published: Publishing, tmp_path: Path) -> None:
    """At temperature 0 nothing is left to chance, whatever the seed; the settings are the evaluation's alone."""
    found = {}
    for seed in (1, 2):
        evaluation = published.document.config.evaluation.model_copy(update={"temperature": 0.0, "top_k": 5, "top_p": 0.9, "min_p": 0.01})
        config = published.document.config.model_copy(update={"seed": seed, "evaluation": evaluation})
        folder = tmp_path / f"mac-{seed}"
        engine = MacEngine(
            published.store, replace(published.document, config=config), Dialogue(), host=f"mac-{seed}", folder=folder,
            model_folder=tmp_path / "base",
        )  # fmt: skip
        request = SweepRequest("demo", f"mac-{seed}", 0, "eval", ("40", "41", "42"), 1, version=0, evaluation=f"e{seed}", part=0)
        (key,) = engine.sweep(request, Quiet()).keys
        found[seed] = decode_group(published.store.get(key, max_bytes=MAX_GROUP_BYTES).data)
        assert found[seed].temperature == 0.0
        if seed == 2:
            engine.sweep(train_request(1, host="mac-2"), Quiet())
            groups = groups_of(published.store, 0, 1, "mac-2")
            assert {group.temperature for group in groups.values()} == {1.0}
            assert len({episode.ids.tobytes() for episode in groups[0].episodes}) > 1
        engine.close()
    for one, other in zip(found[1].episodes, found[2].episodes, strict=True):
        np.testing.assert_array_equal(one.ids, other.ids)
        assert (one.logprobs == 0).all()


def test_an_ending_run_plays_no_more_training_sweeps(published: Publishing, make: object) -> None:
    published.writer.set_state("draining", "n1")
    result = make(wait_seconds=60.0).sweep(train_request(), Quiet())
    assert (result.status, result.num_groups) == ("paused", 0)


def test_a_paused_run_is_waited_for_and_then_answered(published: Publishing, make: object) -> None:
    published.writer.set_state("paused", "n1")
    result = make(wait_seconds=0.3).sweep(train_request(), Quiet())
    assert (result.status, result.num_groups) == ("paused", 0)


def test_a_run_that_goes_on_in_time_is_played(published: Publishing, make: object) -> None:
    published.writer.set_state("paused", "n1")
    timer = threading.Timer(0.5, lambda: published.writer.set_state("running", "n2"))
    timer.start()
    assert make().sweep(train_request(), Quiet()).status == "done"
    timer.join()


def test_a_stopped_run_is_said_so_and_remembered(published: Publishing, make: object) -> None:
    published.writer.set_state("stopped", "n1")
    engine = make()
    assert engine.sweep(train_request(), Quiet()).status == "stopped"
    assert engine.run_stopped


def test_a_run_that_stops_during_a_sweep_ends_it(published: Publishing, make: object) -> None:
    class Stopping(Dialogue):
        def reply(self, question_id: str, turns: list) -> object:
            if engine._versions.run_state != "stopped":
                published.writer.set_state("stopped", "n1")
                deadline = time.monotonic() + 10
                while engine._versions.run_state != "stopped" and time.monotonic() < deadline:
                    time.sleep(0.02)
            return super().reply(question_id, turns)

    engine = make(Stopping())
    result = engine.sweep(train_request(), Quiet())
    assert result.status == "stopped"
    assert result.num_groups < 8


def test_a_version_that_does_not_come_is_an_error_that_may_pass(published: Publishing, make: object) -> None:
    with pytest.raises(StarvedError, match="version 0, this sweep needs version 7"):
        make(wait_seconds=0.3).sweep(train_request(min_version=7), Quiet())


def test_a_worker_that_is_asked_to_end_finishes_its_sweep_within_the_grace(published: Publishing, make: object) -> None:
    class Asking(Dialogue):
        def reply(self, question_id: str, turns: list) -> object:
            progress.stopping = True
            return super().reply(question_id, turns)

    progress = Quiet()
    result = make(Asking()).sweep(train_request(), progress)
    assert (result.status, result.num_groups) == ("done", 8)


def test_a_cancelled_sweep_ends_at_the_next_step(published: Publishing, make: object) -> None:
    class Cancelling(Dialogue):
        def reply(self, question_id: str, turns: list) -> object:
            progress.cancelled = True
            return super().reply(question_id, turns)

    progress = Quiet()
    result = make(Cancelling()).sweep(train_request(), progress)
    assert result.status == "partial"
    assert result.num_groups < 8


@pytest.mark.parametrize("noticed", [True, False], ids=["before the update", "by the rescan after it"])
def test_damaged_weights_in_memory_are_rebuilt_and_never_sampled_from(published: Publishing, make: object, noticed: bool) -> None:
    engine = make()
    engine.sweep(train_request(0), Quiet())
    live = engine._versions._served.live
    view = live.state.arrays["model.embed_tokens.weight"].reshape(-1)
    view[100] ^= 1
    if noticed:
        live.state.verified_id = None
    state_id = published.publish()
    result = engine.sweep(train_request(1), Quiet())
    assert result.version == 1
    assert {group.state_id for group in groups_of(published.store, 1, 1).values()} == {state_id}
    assert engine._versions._served.live.state.state_id() == state_id


def test_spooled_groups_of_an_earlier_process_are_sent_before_anything_is_replayed(
    published: Publishing, make: object, tmp_path: Path
) -> None:
    first = make()
    first.sweep(train_request(0), Quiet())
    first.close()
    key, old = keys.group("demo", 0, "mac-1", 0, 5), keys.group("demo", 0, "mac-9", 0, 5)
    data = published.store.get(key, max_bytes=MAX_GROUP_BYTES).data
    published.store.delete([key])
    spool = Spool(tmp_path / "mac-1" / "spool")
    spool.add(key, data)
    spool.add(old, data)
    result = make().sweep(train_request(0), Quiet())
    assert result.num_groups == 0
    assert published.store.get(key, max_bytes=MAX_GROUP_BYTES).data == data
    assert not published.store.exists(old)
    assert spool.held() == []


def test_memory_after_a_sweep_is_what_it_was_before(make: object) -> None:
    engine = make()
    for sweep in range(2):
        engine.sweep(train_request(sweep), Quiet())
    before = mx.get_active_memory()
    for sweep in range(2, 5):
        engine.sweep(train_request(sweep), Quiet())
    assert mx.get_active_memory() == before
    assert mx.get_cache_memory() <= CACHE_BYTES


def test_worker_folder_is_left_with_no_part_files(make: object, tmp_path: Path) -> None:
    make().sweep(train_request(), Quiet())
    assert [name for _, _, files in os.walk(tmp_path / "mac-1") for name in files if name.endswith(".part")] == []
