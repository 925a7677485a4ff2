"""A trainer against a real bucket: one version, a death, a successor, and a lineage without repeats."""

import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from stoa.bucket import keys
from stoa.bucket.manifest import read_manifest
from stoa.bucket.steps import lineage, read_step
from stoa.bucket.store import Store, kind_of
from stoa.contracts.errors import FencedError, LostStateError, ReplayedError, ServiceUnavailableError, UsageError
from stoa.contracts.messages import AcquireRequest, CheckpointRequest, PublishRequest, StepRequest
from tests.servers import CREDENTIALS
from tests.unit.trainer_gpu.recorded import lacking
from tests.unit.trainer_gpu.runs import Reports, await_version, config_of, head_of, ship_sweep, start_run
from trainer_gpu.checkpoint import MANIFEST
from trainer_gpu.engine import TrainerEngine
from trainer_gpu.lease import next_token
from trainer_gpu.policy import Policy
from trainer_gpu.run_handle import RunHandle


@pytest.fixture
def handle(store: Store) -> RunHandle:
    return start_run(store, config_of(store, groups_per_step=4))


@pytest.fixture
def engines(handle: RunHandle) -> Iterator[list[TrainerEngine]]:
    made = [TrainerEngine(handle), TrainerEngine(handle)]
    yield made
    for engine in made:
        engine.close()


def policy_of(engine: TrainerEngine) -> Policy:
    engine.prepare()
    assert engine._policy is not None
    return engine._policy


@pytest.mark.loop
@pytest.mark.timeout(200)
def test_successor_resumes_from_head_and_no_group_is_trained_on_twice(handle: RunHandle, engines: list[TrainerEngine]) -> None:
    first, second = engines
    progress = Reports()
    questions = list(handle.environment.question_ids("train"))
    acquired = first.acquire(AcquireRequest("test", 1), 1, progress)
    assert (acquired.token, acquired.step, acquired.version) == (1001, 0, 0)
    head = head_of(handle)
    assert (head.epoch, head.version, head.step) == (1001, 0, 0)
    assert head.checkpoint_key == keys.checkpoint("test", 1001, 0, MANIFEST), "the first checkpoint proves the path at step 0"

    shipped = ship_sweep(handle, policy_of(first), questions[:20], host="mac-a", sweep=0, seed=1)
    for step in (1, 2):
        done = first.train_step(StepRequest("test", 1001, step, groups_running=8 * step - 9), progress)
        assert (done.status, done.num_groups) == ("done", 4)
        assert read_step(handle.store, "test", done.manifest_key).metrics.get("groups_running") == (None if step == 1 else 7.0)
        assert lacking(read_step(handle.store, "test", done.manifest_key), after_a_version=False) == []
    again = first.train_step(StepRequest("test", 1001, 2), progress)
    assert again == done
    published = first.publish(PublishRequest("test", 1001, 2, anchor=False, checkpoint=True), progress)
    assert published.version == 1
    head = await_version(handle, 1)
    delta = read_manifest(handle.store, "test", head.manifest_key, head.manifest_sha256, handle.signer.public_key).delta
    assert delta is not None
    assert 0 < delta.num_bytes < 400_000
    assert (head.version, head.step, head.epoch) == (1, 2, 1001)
    assert head.checkpoint_key.startswith(keys.checkpoints_prefix("test"))
    at_publish = {name: t.clone() for name, t in policy_of(first).state().items()}

    # One more step that HEAD never names: its groups must come back.
    ship_sweep(handle, policy_of(first), questions[20:40], host="mac-a", sweep=1, seed=2)
    lost = first.train_step(StepRequest("test", 1001, 3), progress)
    assert lost.status == "done"
    assert lacking(read_step(handle.store, "test", lost.manifest_key), after_a_version=True) == []
    after_lost = {name: t.clone() for name, t in policy_of(first).state().items()}

    resumed = second.acquire(AcquireRequest("test", 2), 1, progress)
    # HEAD names version 1 with these weights already.
    assert (resumed.token, resumed.step, resumed.version) == (2001, 2, 1)
    for name, tensor in policy_of(second).state().items():
        assert torch.equal(tensor, at_publish[name]), name

    first.publish(PublishRequest("test", 1001, 3, anchor=False, checkpoint=True), progress)
    with pytest.raises(FencedError):  # what became of it is met by the next call
        first.checkpoint(CheckpointRequest("test", 1001, 3), progress)
    with pytest.raises(LostStateError):
        first.train_step(StepRequest("test", 1001, 4), progress)
    with pytest.raises(LostStateError):
        second.train_step(StepRequest("test", 2001, 4), progress)

    redone = second.train_step(StepRequest("test", 2001, 3), progress)
    assert redone.status == "done"
    saved = second.checkpoint(CheckpointRequest("test", 2001, 3), progress)
    head = head_of(handle)
    assert (head.step, head.version, head.epoch, head.checkpoint_key) == (3, 1, 2001, saved.key)
    steps = list(lineage(handle.store, head))
    assert [(m.step, m.epoch) for m in steps] == [(3, 2001), (2, 1001), (1, 1001)]
    consumed = [key for m in steps for key in m.consumed]
    assert len(consumed) == len(set(consumed)) == 12
    # The lost step's groups were given back, and the successor did the same step with them, bit for bit.
    assert read_step(handle.store, "test", lost.manifest_key).consumed == steps[0].consumed
    for name, tensor in policy_of(second).state().items():
        assert torch.equal(tensor, after_lost[name]), name
    assert set(steps[1].consumed) | set(steps[2].consumed) <= set(shipped)
    settled = set(consumed) | {d.key for m in steps for d in m.dropped}
    newest_consumed = max(consumed)
    assert all(key in settled for key in shipped if key < newest_consumed)


class Held(Store):
    """A store that holds back the manifests of versions until it is let go."""

    def __init__(self, store: Store) -> None:
        super().__init__(store.settings, CREDENTIALS, patience_seconds=30.0)
        self.let_go = threading.Event()
        self.let_go.set()

    def create(self, key: str, data: bytes | bytearray | memoryview, *, kind: str = "") -> str:
        if kind_of(key) == "manifests":
            assert self.let_go.wait(60)
        return super().create(key, data, kind=kind)


@pytest.mark.loop
@pytest.mark.timeout(200)
def test_version_with_a_checkpoint_is_on_its_way_while_the_next_step_is_taken(store: Store) -> None:
    held, progress = Held(store), Reports()
    handle = start_run(held, config_of(store, groups_per_step=4))
    engine = TrainerEngine(handle)
    try:
        token = engine.acquire(AcquireRequest("test", 1), 1, progress).token
        ship_sweep(handle, policy_of(engine), list(handle.environment.question_ids("train"))[:20], host="mac", sweep=0, seed=1)
        before = head_of(handle)
        held.let_go.clear()
        for step in (1, 2):
            assert engine.train_step(StepRequest("test", token, step), progress).status == "done"
            if step == 1:
                assert engine.publish(PublishRequest("test", token, 1, anchor=False, checkpoint=True), progress).version == 1
        assert head_of(handle) == before, "nothing is named that is not whole"
        held.let_go.set()
        head = await_version(handle, 1)
        assert (head.step, head.checkpoint_key) == (1, keys.checkpoint("test", token, 1, MANIFEST))
        stepped = engine.train_step(StepRequest("test", token, 3), progress)
        metrics = read_step(store, "test", stepped.manifest_key).metrics
        assert metrics["publish_latency_version"] == 1
        assert 0 < metrics["publish_latency_seconds"] < 300, "from the end of step 1 to HEAD naming version 1"
        engine.publish(PublishRequest("test", token, 3, anchor=False, checkpoint=True), progress)
        engine.checkpoint(CheckpointRequest("test", token, 3), progress)
        kept = {place.step for _, place in keys.ours((i.key for i in store.list(keys.checkpoints_prefix("test"))), keys.parse_checkpoint)}
        assert kept == {1, 3}, "the first one, of step 0, went once HEAD named its second successor"
        assert head_of(handle).checkpoint_key == keys.checkpoint("test", token, 3, MANIFEST)
    finally:
        held.let_go.set()
        engine.close()


@pytest.mark.loop
def test_starved_step_says_why_and_reports_while_it_waits(store: Store) -> None:
    progress = Reports()
    engine = TrainerEngine(start_run(store, config_of(store, groups_per_step=4, starved_seconds=1.0)))
    token = engine.acquire(AcquireRequest("test", 1), 1, progress).token
    result = engine.train_step(StepRequest("test", token, 1), progress)
    assert (result.status, result.step) == ("starved", 1)
    assert "0 of 4 groups" in result.reason
    assert any("waiting for groups" in seen for seen in progress.seen)
    progress.stopping = True
    assert engine.train_step(StepRequest("test", token, 1), progress).status == "stopped"
    engine.close()


@pytest.mark.loop
def test_cancelled_acquisition_does_not_fence_the_holder(handle: RunHandle, engines: list[TrainerEngine]) -> None:
    """What a trainer that was frozen does with a task that meanwhile went to another."""
    holder, frozen = engines
    holder.acquire(AcquireRequest("test", 1), 2, Reports())
    with pytest.raises(ServiceUnavailableError):
        frozen.acquire(AcquireRequest("test", 1), 1, Reports(cancelled=True))
    assert head_of(handle).epoch == 1002


@pytest.mark.loop
def test_old_head_put_back_is_refused_before_anything_is_written(handle: RunHandle, engines: list[TrainerEngine]) -> None:
    """From it the next version would be published a second time, with other weights."""
    holder, successor = engines
    holder.acquire(AcquireRequest("test", 1), 1, Reports())
    old = handle.store.get(keys.head("test"), max_bytes=1 << 20)
    holder.publish(PublishRequest("test", 1001, 0, anchor=False, checkpoint=True), Reports())
    newest = handle.store.get(keys.head("test"), max_bytes=1 << 20)
    handle.store.swap(keys.head("test"), old.data, newest.etag)
    with pytest.raises(ReplayedError, match="is at version 0, the run published version 1") as caught:
        successor.acquire(AcquireRequest("test", 2, min_version=1), 1, Reports())
    assert "stoa resume test" in caught.value.hint
    assert handle.store.get(keys.head("test"), max_bytes=1 << 20).data == old.data
    handle.store.delete([keys.head("test")])
    with pytest.raises(ReplayedError):
        successor.acquire(AcquireRequest("test", 2, min_version=1), 1, Reports())


@pytest.mark.loop
def test_anchor_of_a_step_that_was_published_without_one_is_another_version(engines: list[TrainerEngine]) -> None:
    engine = engines[0]
    engine.acquire(AcquireRequest("test", 1), 1, Reports())
    plain, anchored = (PublishRequest("test", 1001, 0, anchor=anchor, checkpoint=False) for anchor in (False, True))
    first = engine.publish(anchored, Reports())
    assert (first.version, first.anchor_bytes > 0) == (0, True)
    engine.acquire(AcquireRequest("test", 2), 1, Reports())
    plain, anchored = (replace(request, token=2001) for request in (plain, anchored))
    known = engine.publish(plain, Reports())
    assert (known.version, known.anchor_bytes) == (0, first.anchor_bytes), "the lease before it has published these weights"
    assert engine.publish(anchored, Reports()) == known
    assert engine._lease is not None
    engine._lease.last_published = None
    assert engine.publish(plain, Reports()).version == 1
    second = engine.publish(anchored, Reports())
    assert (second.version, second.anchor_bytes > 0) == (2, True)
    assert engine.publish(anchored, Reports()) == engine.publish(plain, Reports()) == second


@pytest.mark.loop
def test_new_lease_makes_a_version_only_if_head_names_other_weights(handle: RunHandle, engines: list[TrainerEngine]) -> None:
    first, second = engines
    progress = Reports()
    first.acquire(AcquireRequest("test", 1), 1, progress)
    base = read_state_id(handle)
    ship_sweep(handle, policy_of(first), list(handle.environment.question_ids("train"))[:20], host="mac-a", sweep=0, seed=1)
    first.train_step(StepRequest("test", 1001, 1), progress)
    first.publish(PublishRequest("test", 1001, 1, anchor=False, checkpoint=False), progress)
    await_version(handle, 1)
    ahead = read_state_id(handle)
    taken = second.acquire(AcquireRequest("test", 2), 1, progress)
    assert (taken.step, taken.version) == (0, 2), "the checkpoint is older than version 1"
    assert read_state_id(handle) != ahead != base
    before = head_of(handle)
    again = first.acquire(AcquireRequest("test", 3), 1, progress)
    assert (again.token, again.step, again.version) == (3001, 0, 2)
    head = head_of(handle)
    assert (head.epoch, head.version, head.manifest_key, head.seq) == (3001, 2, before.manifest_key, before.seq + 1)
    with pytest.raises(FencedError):
        second.checkpoint(CheckpointRequest("test", 2001, 0), progress)


def read_state_id(handle: RunHandle) -> str:
    head = head_of(handle)
    return read_manifest(handle.store, "test", head.manifest_key, head.manifest_sha256, handle.signer.public_key).state_id


@pytest.mark.loop
def test_other_run_and_unheld_lease_are_refused(handle: RunHandle, engines: list[TrainerEngine]) -> None:
    with pytest.raises(UsageError):
        engines[0].acquire(AcquireRequest("other", 1), 1, Reports())
    with pytest.raises(LostStateError):
        engines[0].train_step(StepRequest("test", 1001, 1), Reports())


@pytest.mark.loop
def test_lease_is_announced_and_its_loss_too(handle: RunHandle) -> None:
    told: list[int | None] = []
    engine = TrainerEngine(handle, on_lease=lambda lease: told.append(lease.token if lease else None))
    other = TrainerEngine(handle)
    engine.acquire(AcquireRequest("test", 1), 1, Reports())
    other.acquire(AcquireRequest("test", 2), 1, Reports())
    with pytest.raises(FencedError):
        engine.checkpoint(CheckpointRequest("test", 1001, 0), Reports())
    assert told == [1001, None]
    engine.close()
    other.close()


@pytest.mark.parametrize(
    ("lease", "attempt", "epoch", "token"),
    [(1, 1, 0, 1001), (1, 2, 1001, 2002), (3, 1, 1001, 3001), (1, 1, 7004, 8001), (8, 5, 7004, 8005)],
)
def test_token_is_above_every_one_before_it(lease: int, attempt: int, epoch: int, token: int) -> None:
    assert next_token(lease, attempt, epoch) == token > epoch


def test_thousandth_attempt_is_refused() -> None:
    with pytest.raises(UsageError):
        next_token(1, 1000, 0)
