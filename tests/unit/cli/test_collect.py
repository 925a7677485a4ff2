"""What a report reads from a real bucket: how long each version took to be named."""

import time

import pytest

from cli.report.collect import Collector
from stoa.bucket.steps import STEP_FORMAT, StepManifest, write_step
from tests.unit.weights.small_run import SmallRun


def take_step(run: SmallRun, step: int, parent_key: str, metrics: dict[str, float]) -> str:
    """A step that ended just now, in HEAD."""
    manifest = StepManifest(
        STEP_FORMAT, "small", 1000, step, max(run.head.version, 0), parent_key, (), (), (), {}, metrics, time.time() - 0.1, 0.0, 0.1
    )
    key = write_step(run.store, manifest)
    run.head = run.writer.swap(1000, step=step, step_manifest_key=key)
    return key


def test_version_is_as_late_as_the_trainer_says_and_else_as_its_manifest_does(store, tmp_path) -> None:
    run = SmallRun(store, tmp_path)
    key = ""
    told = {3: {"publish_latency_version": 1.0, "publish_latency_seconds": 7.5}}
    for step in (1, 2, 3):
        key = take_step(run, step, key, told.get(step, {}))
        version = run.head.version + 1
        prepared = run.publisher.prepare(run.weights.items(), step=step, epoch=1000, version=version, anchor=False, inline=True)
        names = {"manifest_key": prepared.manifest_key, "manifest_sha256": prepared.manifest_sha256}
        run.head = run.writer.swap(1000, version=version, **names)
        run.publisher.commit(prepared)
    found = {row.version: row.latency_seconds for row in Collector(run.document, store, None).collect().versions}
    assert found[1] == 7.5
    assert found[0] == 0.0, "the base checkpoint's version comes after no step of its own"
    assert 0 < found[2] < 60
    assert found[2] != pytest.approx(7.5)
