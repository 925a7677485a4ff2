"""What publishing costs the trainer: the scan, and nothing of the uploads, however slow the uplink is."""

import threading
import time
from types import SimpleNamespace

import pytest
import torch

from stoa.bucket.store import Store
from stoa.contracts.errors import AccessDeniedError, ServiceUnavailableError
from stoa.weights.history import manifest_of
from stoa.weights.sync import Prepared, Puller
from tests.servers import CREDENTIALS
from tests.unit.weights.small_run import SmallRun, drift
from trainer_gpu.publish import VersionPublisher

VERSIONS_AN_ANCHOR = 5
STEPS = 4


class Uplink(Store):
    """A store whose writes share one uplink of `rate` bytes a second; `faults` are raised by the next writes, one each."""

    rate = 0.0

    def __init__(self, run: SmallRun) -> None:
        super().__init__(run.store.settings, CREDENTIALS)
        self.faults: list[Exception] = []
        self._line = threading.Lock()

    def create(self, key: str, data: bytes | bytearray | memoryview, *, kind: str = "") -> str:
        if self.faults:
            raise self.faults.pop(0)
        if self.rate and "/manifests/" not in key:  # at full size a manifest is a hundred-thousandth of an anchor
            for start in range(0, len(data), 2048):  # small pieces, so that an anchor and a delta share the line
                with self._line:
                    time.sleep(min(2048, len(data) - start) / self.rate)
        return super().create(key, data, kind=kind)


@pytest.fixture
def run(store, tmp_path) -> SmallRun:
    return SmallRun(store, tmp_path, hysteresis=0.02)


@pytest.fixture
def uplink(run: SmallRun) -> Uplink:
    return Uplink(run)


@pytest.fixture
def publisher(run: SmallRun, uplink: Uplink):
    publish = SimpleNamespace(hysteresis=0.02, anchor_part_bytes=50_000)
    handle = SimpleNamespace(config=SimpleNamespace(publish=publish), store=uplink, document=run.document, signer=run.signer, folder=None)
    publisher = VersionPublisher(handle)  # pyright: ignore[reportArgumentType] - what it needs of a run
    yield publisher
    publisher.close(0.0)


def publish(run: SmallRun, publisher: VersionPublisher, *, anchor: bool = False) -> float:
    """Begin to publish the next version; returns CPU seconds of the trainer's thread: wall clock is other programs' too."""
    policy = SimpleNamespace(wire_tensors=lambda: ((name, torch.from_numpy(value)) for name, value in run.weights.items()))
    version = run.head.version + 1

    def swap(prepared: Prepared) -> None:
        names = {"manifest_key": prepared.manifest_key, "manifest_sha256": prepared.manifest_sha256}
        run.head = run.writer.swap(1000, version=prepared.version, published_at=1.0, **names)

    started = time.thread_time()
    publisher.publish(policy, step=4 * version, token=1000, version=version, anchor=anchor, inline=False, swap=swap)
    return time.thread_time() - started


@pytest.mark.loop
@pytest.mark.timeout(180)
def test_slow_uplink_costs_the_trainer_one_percent_of_its_step_time_at_most(run: SmallRun, uplink: Uplink, publisher, tmp_path):
    publish(run, publisher)
    first = publisher.finish(lambda: None)
    step_seconds = 0.5
    uplink.rate = first.anchor_bytes / (VERSIONS_AN_ANCHOR * STEPS * step_seconds)
    held: list[float] = []
    while publisher.anchor_version < 1:
        version = run.head.version + 1
        run.weights = drift(run.weights, version, 2e-6)
        started = time.monotonic()
        publisher.finish(lambda: None)
        held.append(time.monotonic() - started + publish(run, publisher, anchor=version == 1))
        time.sleep(STEPS * step_seconds)  # the optimizer steps
    assert VERSIONS_AN_ANCHOR <= len(held) < 4 * VERSIONS_AN_ANCHOR
    publisher.finish(lambda: None)
    # The median, because a pause of this machine's scheduler is not ours. A delta's upload alone would take longer.
    assert sorted(held)[len(held) // 2] <= 0.01 * STEPS * step_seconds
    assert max(held) <= VERSIONS_AN_ANCHOR * STEPS * step_seconds / 3  # nor is it ever held while the anchor goes out
    mac = Puller(run.store, run.document, tmp_path / "mac")
    assert mac.join(run.head).state_id() == manifest_of(run.store, run.document, run.head).state_id


def test_outage_is_met_by_the_next_wait_and_the_version_arrives_after_it(run: SmallRun, uplink: Uplink, publisher):
    publish(run, publisher)
    publisher.finish(lambda: None)
    uplink.faults = [ServiceUnavailableError("the bucket is away")] * 2
    run.weights = drift(run.weights, 1)
    publish(run, publisher)
    for _ in range(2):
        with pytest.raises(ServiceUnavailableError):
            publisher.finish(lambda: None)
    assert run.head.version == 0
    assert publisher.finish(lambda: None).version == 1
    assert run.head.version == 1


def test_refused_version_leaves_what_is_published_and_the_number_to_the_next(run: SmallRun, uplink: Uplink, publisher, tmp_path):
    publish(run, publisher)
    before = publisher.finish(lambda: None)
    uplink.faults = [AccessDeniedError("the bucket refuses our key")]
    run.weights = drift(run.weights, 1)
    publish(run, publisher)
    with pytest.raises(AccessDeniedError):
        publisher.finish(lambda: None)
    assert publisher.finish(lambda: None) is None
    assert Puller(run.store, run.document, tmp_path / "mac").join(run.head).state_id() == before.state_id
    publish(run, publisher)
    assert publisher.finish(lambda: None).version == 1
