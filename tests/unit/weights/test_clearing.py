"""Passes of retention over a real bucket, with readers in the middle of a download: theirs stays, or they plan anew."""

import threading
from dataclasses import replace

import pytest

from stoa.bucket import keys
from stoa.bucket.clearing import clear, policy_of
from stoa.bucket.head import read_head
from stoa.bucket.retention import TOO_LARGE, Lease, Policy
from stoa.bucket.steps import STEP_FORMAT, Refused, StepManifest, write_step
from stoa.bucket.store import RangeReply, Store
from stoa.config.run import Publish, Retention
from stoa.contracts.errors import ObjectMissingError
from stoa.weights.sync import Puller
from tests.servers import CREDENTIALS
from tests.unit.weights.small_run import SmallRun


class Paused(Store):
    """A store whose first read of an object under `prefix` waits until it is let go."""

    def __init__(self, store: Store, prefix: str) -> None:
        super().__init__(store.settings, CREDENTIALS)
        self.prefix = prefix
        self.reached, self.let_go = threading.Event(), threading.Event()

    def open_range(self, key: str, start: int, num_bytes: int, *, etag: str = "", stall_seconds: float = 20.0) -> RangeReply:
        if key.startswith(self.prefix) and not self.let_go.is_set():
            self.reached.set()
            assert self.let_go.wait(40)
        return super().open_range(key, start, num_bytes, etag=etag, stall_seconds=stall_seconds)


def passes(run: SmallRun, leases: list[Lease], times: tuple[float, ...], grace_seconds: float = 0.0) -> int:
    """Passes at these moments; returns how many objects went."""
    policy = policy_of(run.document, grace_seconds=grace_seconds)
    return sum(len(clear(run.store, run.document, leases, policy, now=now).due) for now in times)


def test_policy_is_what_the_run_was_started_with(store, tmp_path):
    run = SmallRun(store, tmp_path)
    assert policy_of(run.document) == Policy()
    kept = Retention(grace_hours=0.5, anchors=3, group_versions=1)
    config = run.document.config.model_copy(update={"retention": kept, "publish": Publish(keep_checkpoints=4)})
    found = policy_of(replace(run.document, config=config))
    assert found == Policy(num_anchors=3, num_checkpoints=4, extra_group_versions=1, grace_seconds=1800.0)
    assert policy_of(replace(run.document, config=config), grace_seconds=7.0).grace_seconds == 7.0


def reader(run: SmallRun, paused: Paused, folder) -> tuple[threading.Thread, list[object]]:
    """A join of HEAD as it is now, which stops in the middle of its download."""
    head, found = run.head, []

    def join() -> None:
        try:
            found.append(Puller(paused, run.document, folder).join(head))
        except ObjectMissingError as error:
            found.append(error)

    thread = threading.Thread(target=join)
    thread.start()
    assert paused.reached.wait(30)
    return thread, found


def test_paused_reader_with_a_lease_finds_everything_when_it_goes_on(store, tmp_path):
    run = SmallRun(store, tmp_path)
    run.publish_many(4, anchor_every=5)
    promised = run.publisher.mirror.state_id()
    paused = Paused(store, keys.root("small") + "deltas/")
    thread, found = reader(run, paused, tmp_path / "mac")
    run.publish_many(14, anchor_every=5)
    run.publish_many(5, anchor_every=5)
    assert passes(run, [Lease("mac", 3, 9e9), Lease("other", 16, 9e9)], (100.0, 101.0)) == 4
    left = {keys.parse_anchor(item.key).version for item in store.list(keys.root("small") + "anchors/")}
    assert left == {0, 10, 15, 20}  # it starts from anchor 0: all but anchor 5, which no way needs, is there
    paused.let_go.set()
    thread.join(40)
    assert found[0].state_id() == promised


def test_paused_reader_nobody_knows_of_is_kept_for_the_grace_and_then_plans_anew(store, tmp_path):
    run = SmallRun(store, tmp_path)
    run.publish_many(4, anchor_every=5)
    promised = run.publisher.mirror.state_id()
    paused = Paused(store, keys.root("small") + "deltas/")
    thread, found = reader(run, paused, tmp_path / "mac")
    run.publish_many(14, anchor_every=5)
    assert passes(run, [], (100.0, 150.0, 199.0), grace_seconds=100.0) == 0
    paused.let_go.set()
    thread.join(40)
    assert found[0].state_id() == promised
    late = Paused(store, keys.root("small") + "anchors/")
    run.head = read_head(store, "small", run.document.public_key)[0]
    old = run.head
    thread, found = reader(run, late, tmp_path / "late")
    run.publish_many(12, anchor_every=5)
    assert passes(run, [], (1000.0, 1100.0, 1200.0), grace_seconds=50.0) > 20
    late.let_go.set()
    thread.join(40)
    assert isinstance(found[0], ObjectMissingError)
    # HEAD has moved on: the same machine joins by it, with what it has on disk
    assert run.head.version > old.version
    assert Puller(store, run.document, tmp_path / "late").join(run.head).state_id() == run.publisher.mirror.state_id()


def test_passes_keep_every_version_that_a_lease_or_an_anchor_keeps_and_a_new_trainer_goes_on(store, tmp_path):
    run = SmallRun(store, tmp_path)
    states: dict[int, str] = {}
    for _ in range(17):
        run.publish_many(1, anchor_every=4)
        states[run.head.version] = run.publisher.mirror.state_id()
    before = {item.key for item in store.list(keys.root("small"))}
    assert passes(run, [Lease("mac", 9, 9e9)], (100.0,)) == 0
    dry = clear(store, run.document, [Lease("mac", 9, 9e9)], policy_of(run.document, grace_seconds=0.0), now=101.0, dry_run=True)
    assert dry.due
    assert before < {item.key for item in store.list(keys.root("small"))}  # only a notice came
    assert passes(run, [Lease("mac", 9, 9e9)], (102.0,)) == len(dry.due)
    for version in range(8, 17):
        assert Puller(store, run.document, tmp_path / f"v{version}").build(run.head, version).state_id() == states[version]
    mac = Puller(store, run.document, tmp_path / "v9")
    state = mac.build(run.head, 9)
    mac.apply(mac.stage(run.head, 9, states[9]), state)
    assert state.state_id() == states[16]
    with pytest.raises(ObjectMissingError):
        Puller(store, run.document, tmp_path / "gone").build(run.head, 5)
    run.publisher = run.new_publisher()
    run.publisher.load_published(run.head)
    run.publish_many(1, anchor_every=4)
    assert Puller(store, run.document, tmp_path / "next").join(run.head).state_id() == run.publisher.mirror.state_id()


def test_object_that_is_needed_again_gets_a_new_grace(store, tmp_path):
    run = SmallRun(store, tmp_path)
    run.publish_many(13, anchor_every=4)
    lease = [Lease("mac-1", 1, 9e9), Lease("mac-2", 5, 9e9)]
    assert passes(run, [], (100.0,), grace_seconds=50.0) == 0  # announced
    assert passes(run, lease, (140.0,), grace_seconds=50.0) == 0  # needed again: no longer announced
    assert passes(run, [], (160.0, 200.0), grace_seconds=50.0) == 0  # announced anew at 160
    assert passes(run, [], (210.0,), grace_seconds=50.0) > 10
    notices = [item.key for item in store.list(keys.retention_prefix("small"))]
    assert notices == [keys.retention_notice("small", 210)]


def test_notice_that_is_torn_announces_nothing(store, tmp_path):
    run = SmallRun(store, tmp_path)
    run.publish_many(13, anchor_every=4)
    passes(run, [], (100.0,))
    key = keys.retention_notice("small", 100)
    data = store.get(key, max_bytes=1 << 20).data
    store.delete([key])
    store.create(key, data[: len(data) // 2])
    assert passes(run, [], (101.0,)) == 0
    assert passes(run, [], (102.0,)) > 10


def test_what_says_that_something_is_whole_goes_before_its_parts(store, tmp_path):
    class Noting(Store):
        def delete(self, names) -> None:
            gone.append(list(names))
            super().delete(gone[-1])

    gone: list[list[str]] = []
    run = SmallRun(store, tmp_path)
    run.publish_many(14, anchor_every=3)
    noting = Noting(store.settings, CREDENTIALS)
    for now in (100.0, 101.0):
        clear(noting, run.document, [], policy_of(run.document, grace_seconds=0.0), now=now)
    kinds = [key.endswith(".json") for key in next(names for names in gone if any("/anchors/" in key for key in names))]
    assert kinds == sorted(kinds, reverse=True)
    assert set(kinds) == {True, False}


def test_a_key_that_was_refused_as_too_large_is_cleared_again_and_never_read(store, tmp_path):
    run = SmallRun(store, tmp_path)
    run.publish()
    group = keys.group("small", 0, "mac", 0, 0)
    refused = (Refused(group, "mac", TOO_LARGE), Refused(keys.group("small", 0, "mac", 0, 1), "mac", "unreadable"))
    step = write_step(store, StepManifest(STEP_FORMAT, "small", 1000, 1, 0, "", (), (), refused, {}, {}, 9.0, 0.0, 0.1))
    run.head = run.writer.swap(1000, step=1, step_manifest_key=step)
    before = store.meters.by_kind().get("groups")
    for now in (100.0, 200.0):
        store.create(group, b"small, and sent with the ticket that is still good")
        found = clear(store, run.document, [], Policy(), now=now)
        assert [item.key for item in found.due] == [group]
        assert not store.exists(group)
    after = store.meters.by_kind()["groups"]
    assert after.requests_down - (before.requests_down if before else 0) == store.meters.by_kind()["groups"].bytes_down == 0
