"""What `stoa bench` finds of a run beside this machine: its line to the bucket, and how much the run's Macs sample."""

from pathlib import Path

from cli.bench import _of_run
from cli.doctor.scene import Scene
from stoa.bucket.steps import STEP_FORMAT, HostCounts, StepManifest, write_step
from stoa.bucket.store import Store
from stoa.config.run import RunConfig
from tests.servers import CREDENTIALS
from tests.unit.weights.small_run import SmallRun


def test_line_and_rate_of_the_run_are_told_and_where_there_is_none_nothing_is(store: Store, tmp_path: Path) -> None:
    run = SmallRun(store, tmp_path)
    scene = Scene("all", RunConfig(run="small", bucket=store.settings), tmp_path, store, CREDENTIALS)
    found = _of_run(scene)
    assert found["run_tokens_per_second"] is None, "it has no step yet"
    metrics = {"fleet_tokens_per_second": 640.0}
    key = write_step(store, StepManifest(STEP_FORMAT, "small", 1000, 1, 0, "", (), (), (), {"a": HostCounts()}, metrics, 9.0, 0.0, 0.1))
    run.head = run.writer.swap(1000, step=1, step_manifest_key=key)
    found = _of_run(Scene("all", scene.config, tmp_path, store, CREDENTIALS))
    assert found["run_tokens_per_second"] == 640.0
    down, up = found["line"]
    assert down > 0 and up > 0
    guest = _of_run(Scene("mac", scene.config, tmp_path, store, CREDENTIALS))
    assert guest["line"][1] is None, "an invited Mac's key writes nothing"
    nowhere = RunConfig(run="nowhere", bucket=store.settings)
    assert _of_run(Scene("all", nowhere, tmp_path, store, CREDENTIALS)) == {"line": None}
