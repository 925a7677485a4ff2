"""Anchors and roll-ups beside the trainer's steps: bit for bit the published versions, announced later or not at all."""

import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from stoa.bucket.store import Store
from stoa.contracts.errors import AccessDeniedError, ServiceUnavailableError
from stoa.weights.chain import plan
from stoa.weights.history import manifest_of, rebuild, walk
from stoa.weights.sync import Puller
from tests.servers import CREDENTIALS
from tests.unit.weights.small_run import SmallRun, drift


class GatedStore(Store):
    """Holds uploads of anchors back until `gate` is open; `fault`, if set, is raised once instead."""

    def __init__(self, run: SmallRun) -> None:
        super().__init__(run.store.settings, CREDENTIALS)
        self.gate = threading.Event()
        self.fault: Exception | None = None

    def create(self, key: str, data: bytes | bytearray | memoryview, *, kind: str = "") -> str:
        if "/anchors/" in key:
            assert self.gate.wait(30)
            fault, self.fault = self.fault, None
            if fault is not None:
                raise fault
        return super().create(key, data, kind=kind)


@pytest.fixture
def run(store, tmp_path):
    run = SmallRun(store, tmp_path)
    yield run
    run.publisher.close()


def step(run: SmallRun, *, anchor: bool = False, size: float = 2e-5) -> str:
    if run.head.version >= 0:
        run.weights = drift(run.weights, run.head.version, size)
    return run.publish(anchor=anchor, inline=False).state_id


def test_anchor_is_the_mirror_of_its_version_though_later_versions_were_published_meanwhile(run: SmallRun, tmp_path):
    states = [step(run)]
    slow = run.publisher.background.store = GatedStore(run)
    states.append(step(run, anchor=True))
    states += [step(run, size=2e-4) for _ in range(3)]
    assert manifest_of(run.store, run.document, run.head).anchor.version == 0
    slow.gate.set()
    assert run.publisher.background.flush(30)
    states.append(step(run))
    newest = manifest_of(run.store, run.document, run.head)
    assert (newest.anchor.version, newest.anchor.state_id) == (1, states[1])
    assert run.publisher.anchor_version == 1
    cold = Puller(run.store, run.document, tmp_path / "cold")
    assert cold.join(run.head).state_id() == states[-1] == run.publisher.mirror.state_id()
    assert [path.name for path in (tmp_path / "cold" / "anchors").iterdir()] == ["00000001"]
    step(run)
    assert manifest_of(run.store, run.document, run.head).anchor == newest.anchor


def test_anchor_that_was_not_announced_is_simply_not_there(run: SmallRun, tmp_path):
    step(run)
    run.publisher.background.store = GatedStore(run)
    step(run, anchor=True)
    state_id = step(run)
    restarted = run.new_publisher()  # the process was killed: nothing of the upload goes on
    restarted.load_published(run.head)
    assert restarted.anchor_version == 0
    run.publisher.background.store.gate.set()
    run.publisher.close()
    assert Puller(run.store, run.document, tmp_path / "mac").join(run.head).state_id() == state_id
    run.publisher = restarted
    step(run)
    assert manifest_of(run.store, run.document, run.head).anchor.version == 0


def test_outage_delays_an_anchor_and_a_refusal_gives_it_up_for_the_next(run: SmallRun):
    step(run)
    slow = run.publisher.background.store = GatedStore(run)
    slow.gate.set()
    slow.fault = ServiceUnavailableError("the bucket is away")
    step(run, anchor=True)
    assert run.publisher.background.flush(30)
    step(run)
    assert run.publisher.anchor_version == 1
    slow.fault = AccessDeniedError("the bucket refuses our key")
    step(run, anchor=True)
    assert run.publisher.background.flush(30)
    step(run)
    assert run.publisher.anchor_version == 1
    step(run, anchor=True)
    assert run.publisher.background.flush(30)
    step(run)
    assert run.publisher.anchor_version == 5


def test_anchor_that_is_due_while_one_is_on_its_way_is_left_out(run: SmallRun):
    step(run)
    slow = run.publisher.background.store = GatedStore(run)
    step(run, anchor=True)
    step(run, anchor=True)
    slow.gate.set()
    assert run.publisher.background.flush(30)
    step(run)
    step(run)
    assert run.publisher.anchor_version == 1


def test_version_that_is_rolled_back_takes_its_roll_ups_with_it(run: SmallRun, tmp_path):
    for _ in range(2):
        step(run)
    run.weights = drift(run.weights, 70)
    run.publisher.prepare(run.weights.items(), step=8, epoch=1000, version=2, anchor=True, inline=True)
    run.publisher.rollback()
    run.weights = drift(run.weights, 71)
    state_id = run.publish().state_id
    assert Puller(run.store, run.document, tmp_path / "mac").join(run.head).state_id() == state_id


@pytest.mark.parametrize("seed", range(3))
def test_every_anchor_delta_and_roll_up_lead_to_one_state_id(store, tmp_path, seed: int):
    chance = np.random.default_rng(seed)
    run = SmallRun(store, tmp_path, hysteresis=float(chance.choice([0.0, 0.02])))
    states = [step(run)]
    for version in range(1, 28):
        if chance.random() < 0.2:  # a row leaves its grid
            spec = run.layout.quantised[chance.integers(len(run.layout.quantised))]
            run.weights[spec.name] = run.weights[spec.name] * np.float32(1.5)
        states.append(step(run, anchor=version % 10 == 0, size=float(chance.choice([0.0, 2e-5, 1e-3]))))
        if chance.random() < 0.5:
            assert run.publisher.background.flush(30)
    run.publisher.background.flush(30)
    states.append(step(run))
    manifests = walk(store, run.document, manifest_of(store, run.document, run.head), 0)
    rollups = [ref for manifest in manifests for ref in manifest.rollups]
    assert {ref.version - ref.base for ref in rollups} >= {2, 4, 8, 16}
    assert any(ref.version - ref.base not in (2, 4, 8, 16) for ref in rollups)  # from an anchor
    for target in sorted({int(v) for v in chance.integers(1, 29, 4)} | {28}):
        found = set()
        anchors = {manifest.anchor.version for manifest in manifests if manifest.version <= target}
        for anchor in anchors:
            for cheap in (True, False):  # with roll-ups preferred, and without any
                known = manifests if cheap else [replace(manifest, rollups=()) for manifest in manifests]
                way = plan(known, target, anchors={anchor})
                found.add(rebuild(way, run.layout, "small", lambda key, _, size: store.get(key, max_bytes=size).data).state_id())
        assert found == {states[target]}
    run.publisher.close()


def test_fifty_versions_without_a_step_are_empty_deltas_of_one_state(run: SmallRun, tmp_path):
    state_id = step(run)
    for _ in range(50):
        prepared = run.publish(inline=False)
        assert prepared.state_id == state_id
        assert prepared.changed_fraction == 0.0
    manifests = walk(run.store, run.document, manifest_of(run.store, run.document, run.head), 1)
    assert [manifest.delta.num_changed for manifest in manifests] == [0] * 50
    assert all(manifest.delta.num_bytes < 1024 for manifest in manifests)
    assert Puller(run.store, run.document, tmp_path / "mac").join(run.head).state_id() == state_id


def test_manifest_tells_what_changed_by_tensor_and_how_long_each_stage_took(run: SmallRun):
    step(run)
    name = run.layout.quantised[2].name
    run.weights[name] = run.weights[name].copy()
    scales = run.publisher.mirror.dequantise(name)
    run.weights[name] = scales  # exactly on the grid
    run.publish(inline=False)
    before = run.publisher.mirror.quantised(run.layout.by_name[name])[0].copy()
    width = np.abs(np.diff(np.sort(scales.reshape(-1, 64), axis=1), axis=1))
    run.weights[name] = scales.copy()
    run.weights[name][0, :5] += np.float32(width[width > 0].min() * 3)
    run.publish(inline=False)
    stats = manifest_of(run.store, run.document, run.head).stats
    moved = run.publisher.mirror.quantised(run.layout.by_name[name])[0].astype(int) - before
    assert stats.tensors[name].num_changed == np.count_nonzero(moved) > 0
    assert stats.tensors[name].num_unit == np.count_nonzero(abs(moved) == 1)
    assert sum(tensor.num_changed for tensor in stats.tensors.values()) == stats.tensors[name].num_changed
    assert stats.changed_fraction == pytest.approx(np.count_nonzero(moved) / run.layout.num_codes)
    delta = manifest_of(run.store, run.document, run.head).delta
    assert sum(tensor.num_bytes for tensor in stats.tensors.values()) == pytest.approx(delta.num_bytes, abs=30)
    assert stats.seconds.keys() == {"scan", "encode", "apply", "digest", "upload"}


def test_lag_is_what_a_code_stays_behind_its_master(run: SmallRun):
    step(run)
    spec = run.layout.quantised[0]
    codes, scales, _ = (array.copy() for array in run.publisher.mirror.quantised(spec))
    on_grid = run.publisher.mirror.dequantise(spec.name)
    step_size = np.abs((scales.astype(np.uint32) << 16).view(np.float32)).repeat(64, axis=1)
    middle = (codes > 5) & (codes < 250)
    lag = np.float32(0.515)  # beyond half a step, but within the dead band of 0.02
    run.weights = {name: run.publisher.mirror.dequantise(name) for name in run.weights}
    run.weights[spec.name] = np.where(middle, on_grid + lag * step_size, on_grid).astype(np.float32)
    run.publish(inline=False)
    stats = manifest_of(run.store, run.document, run.head).stats
    assert stats.changed_fraction == 0.0
    assert stats.largest_lag_steps == pytest.approx(0.515, abs=0.004)


def test_temporary_files_of_a_killed_publisher_are_removed_by_the_next(run: SmallRun, tmp_path):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    left = Path(tempfile.mkdtemp(prefix=f"stoa-publish-small-{dead.pid}-"))
    step(run)
    started = time.monotonic()
    assert not left.exists()
    own = run.publisher.background._folder
    assert own.exists()
    run.publisher.close()
    assert not own.exists()
    assert time.monotonic() - started < 10


def test_mirror_must_not_change_before_its_anchor_is_on_disk(run: SmallRun):
    step(run)
    background, gate = run.publisher.background, threading.Event()
    write = background._write_parts
    background._write_parts = lambda mirror, anchor: gate.wait(20) and write(mirror, anchor)
    step(run, anchor=True)
    waiting = threading.Thread(target=background.wait_for_mirror)
    waiting.start()
    waiting.join(0.2)
    assert waiting.is_alive()
    gate.set()
    waiting.join(20)
    assert not waiting.is_alive()
