"""What a report reads from a real bucket: how long each version took to be named."""

import time
from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import pytest

from cli.report.collect import Collector, Newest, sessions_of
from cli.temporal import Control
from stoa.bucket.steps import STEP_FORMAT, HostCounts, StepManifest, write_step
from stoa.contracts.errors import RunMissingError, ServiceUnavailableError
from stoa.contracts.fleet_messages import FleetPage, SessionStatus
from stoa.contracts.messages import RunResult, RunStatus, StopConditions
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
        fleet_view=lambda _: FleetPage(),
        present=lambda _: (),
        sessions=lambda *_: (),
        is_running=lambda _: False,
        result=lambda _: RunResult("small", "done", 0, 0, gpu_hours=2.0),
    )
    assert Collector(run.document, store, cast(Control, control)).collect().gpu_hours == 2.0
    control.status = lambda _: replace(ended, state="running", stop=StopConditions(max_steps=123, dollars_per_gpu_hour=2.5))
    goes_on = Collector(run.document, store, cast(Control, control)).collect()
    assert goes_on.gpu_hours == 9.0
    # What it was resumed with, not what it was started with.
    assert (goes_on.max_steps, goes_on.facts.gpu_usd_an_hour) == (123, 2.5)
    assert Collector(run.document, store, None).collect().max_steps == run.document.config.stop.max_steps


class _Gone:
    """Temporal after a run's workers have ended: queries find nobody, results are kept, or `forgotten`."""

    def __init__(self, *, forgotten: bool) -> None:
        self._forgotten = forgotten

    def status(self, _run: str) -> RunStatus:
        raise ServiceUnavailableError("its control process does not answer")

    def is_running(self, _run: str) -> bool:
        return False

    def result(self, run: str) -> RunResult:
        if self._forgotten:
            raise RunMissingError(f"run {run}: no such run")
        return RunResult(run, "all 2 steps are done", 2, 0, gpu_hours=0.5)

    def ended_sessions(self, _run: str) -> tuple[SessionStatus, ...]:
        return (SessionStatus("mac-1", "ended", 9, 1, num_groups=7, bytes_down=11),)


@pytest.mark.parametrize("forgotten", [False, True])
def test_run_that_ended_is_told_when_its_workers_are_gone(store, tmp_path, forgotten: bool) -> None:
    run = SmallRun(store, tmp_path)
    key = ""
    for step in (1, 2):
        hosts = {"mac-1": HostCounts(accepted=2, num_sampled_tokens=30), "mac-2": HostCounts(accepted=step)}
        key = write_step(store, StepManifest(STEP_FORMAT, "small", 1000, step, 0, key, (), (), (), hosts, {}, 9.0, 0.0, 0.1))
        run.head = run.writer.swap(1000, step=step, step_manifest_key=key)
    collector = Collector(run.document, store, cast(Control, _Gone(forgotten=forgotten)))
    assert "control process" in collector.collect().waiting_for, "a run that goes on waits for it"
    run.writer.swap(1000, state="stopped")
    found = collector.collect()
    assert (found.state, found.waiting_for, found.step) == ("stopped", "", 2)
    assert (found.end_reason, found.gpu_hours) == (("", 0.0) if forgotten else ("all 2 steps are done", 0.5))
    macs = {session.host: (session.state, session.num_groups, session.bytes_down) for session in found.sessions}
    assert macs == {"mac-1": ("ended", 4, 0) if forgotten else ("ended", 7, 11), "mac-2": ("ended", 3, 0)}


def test_of_a_mac_steps_tell_groups_and_tokens_but_no_times() -> None:
    counts = HostCounts(accepted=2, num_sampled_tokens=30, decode_seconds=5.0, pull_latency_seconds=0.5)
    steps = [StepManifest(STEP_FORMAT, "small", 1, n, n - 1, "", (), (), (), {"a": counts}, {}, 1.0, 0.0, 0.1) for n in (1, 2)]
    told = sessions_of(steps)["a"]
    assert (told.num_groups, told.num_sampled_tokens, told.version, told.pull_latency_seconds_last) == (4, 60, 1, 0.5)
    assert told.decode_seconds == 0.0, "a manifest has that of the newest sweep alone: sums of it mean nothing"


class _Ended(_Gone):
    """A run of 30 s that was resumed and went on from second 1000 to 1090, with another limit."""

    def result(self, run: str) -> RunResult:
        stop = StopConditions(max_steps=400)
        return RunResult(run, "done", 2, 0, gpu_hours=0.5, started_at=1000.0, ended_at=1090.0, seconds_before=30.0, stop=stop)


class _StillAnswers(_Ended):
    """The same one while its workers are there."""

    def status(self, run: str) -> RunStatus:
        return RunStatus(run, "stopped", "", started_at=1000.0, seconds_before=30.0, stop=StopConditions(max_steps=400))

    def fleet_view(self, _run: str) -> FleetPage:
        return FleetPage()

    def present(self, _run: str) -> tuple[str, ...]:
        return ()

    def sessions(self, _run: str, _hosts: tuple[str, ...]) -> tuple[SessionStatus, ...]:
        return ()


@pytest.mark.parametrize("kind", [_Ended, _StillAnswers])
def test_ended_run_took_as_long_whoever_is_asked(store, tmp_path, kind: type[_Ended]) -> None:
    run = SmallRun(store, tmp_path)
    take_step(run, 1, "", {})
    run.writer.swap(1000, state="stopped")
    found = Collector(run.document, store, cast(Control, kind(forgotten=False))).collect()
    assert (found.started_at, found.ended_at, found.seconds, found.max_steps) == (1000.0, 1090.0, 120.0, 400)


def test_version_of_a_new_lease_is_not_late_by_the_time_nobody_worked(store, tmp_path) -> None:
    run = SmallRun(store, tmp_path)
    key = write_step(store, StepManifest(STEP_FORMAT, "small", 1000, 1, 0, "", (), (), (), {}, {}, time.time() - 136.0, 0.0, 0.1))
    run.head = run.writer.swap(1000, step=1, step_manifest_key=key)
    prepared = run.publisher.prepare(run.weights.items(), step=1, epoch=2000, version=0, anchor=True, inline=True)
    run.publisher.commit(prepared)
    run.head = run.writer.swap(1000, version=0, manifest_key=prepared.manifest_key, manifest_sha256=prepared.manifest_sha256)
    child = run.publisher.prepare(run.weights.items(), step=1, epoch=2000, version=1, anchor=False, inline=True)
    run.writer.swap(1000, version=1, manifest_key=child.manifest_key, manifest_sha256=child.manifest_sha256)
    assert [row.latency_seconds for row in Collector(run.document, store, None).collect().versions] == [0.0, 0.0]


class _Begins(_Gone):
    """A run that was resumed, and whose workers are still to come: its result would be waited for to its end."""

    def is_running(self, _run: str) -> bool:
        return True

    def result(self, run: str) -> RunResult:
        raise AssertionError(f"run {run}: this would wait")


def test_resumed_run_is_shown_before_its_workers_are_there(store, tmp_path) -> None:
    run = SmallRun(store, tmp_path)
    take_step(run, 1, "", {})
    run.writer.swap(1000, state="stopped")
    found = Collector(run.document, store, cast(Control, _Begins(forgotten=False))).collect()
    assert (found.state, found.waiting_for) == ("created", "waiting for the trainer's control process to start")
    assert (found.seconds, found.max_steps) == (0.0, 0), "since when it goes on and to which step, nobody tells yet"


def test_a_glance_reads_a_bounded_number_of_objects_however_long_the_run(store, tmp_path) -> None:
    run, key, control = SmallRun(store, tmp_path), "", cast(Control, _Gone(forgotten=True))
    for step in range(1, 13):
        hosts = {"mac-1": HostCounts(accepted=2)}
        key = write_step(store, StepManifest(STEP_FORMAT, "small", 1000, step, step - 1, key, (), (), (), hosts, {}, 9.0, 0.0, 0.1))
        run.head = run.writer.swap(1000, step=step, step_manifest_key=key)
        run.publish()

    def reads() -> tuple[int, int]:
        kinds = store.meters.by_kind()
        return kinds["steps"].requests_down, kinds["manifests"].requests_down

    before = reads()
    collector = Collector(run.document, store, control, newest=Newest(num_steps=5, num_versions=3))
    glance = collector.collect()
    assert [a - b for a, b in zip(reads(), before, strict=True)] == [5, 3]
    assert [row.step for row in glance.steps] == [8, 9, 10, 11, 12]
    assert [row.version for row in glance.versions] == [run.head.version - 2, run.head.version - 1, run.head.version]
    assert (glance.step, glance.version) == (12, run.head.version)
    run.publish()
    before = reads()
    assert [row.version for row in collector.collect().versions][-1] == run.head.version
    assert [a - b for a, b in zip(reads(), before, strict=True)] == [0, 1]
    run.writer.swap(1000, state="stopped")  # nobody but all steps tells now what a Mac brought
    assert [(one.host, one.num_groups) for one in collector.collect().sessions] == [("mac-1", 24)]
