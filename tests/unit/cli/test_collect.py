"""What a report reads from a real bucket: how long each version took to be named."""

import time
from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import pytest

from cli.report.collect import Collector
from cli.temporal import Control
from stoa.bucket.steps import STEP_FORMAT, StepManifest, write_step
from stoa.contracts.messages import RunResult, RunStatus
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


def test_gpu_hours_of_an_ended_run_are_those_of_its_result(store, tmp_path) -> None:
    """Its workflow still answers, by a clock that runs on."""
    run = SmallRun(store, tmp_path)
    ended = RunStatus("small", "stopped", "", gpu_hours=9.0, started_at=1.0)
    control = SimpleNamespace(
        status=lambda _: ended,
        fleet=lambda _: (),
        sessions=lambda *_: (),
        is_running=lambda _: False,
        result=lambda _: RunResult("small", "done", 0, 0, gpu_hours=2.0),
    )
    assert Collector(run.document, store, cast(Control, control)).collect().gpu_hours == 2.0
    control.status = lambda _: replace(ended, state="running")
    assert Collector(run.document, store, cast(Control, control)).collect().gpu_hours == 9.0
