"""What a trainer does when it takes up a run: it publishes before it waits, and judges what it finds in the bucket."""

import itertools
import time
from collections.abc import Iterator

import pytest

from stoa.bucket import keys
from stoa.bucket.evals import write_summary
from stoa.bucket.steps import read_step
from stoa.bucket.store import Store
from stoa.contracts.evaluation_messages import EvaluationResult
from stoa.contracts.messages import AcquireRequest, PublishRequest, StepRequest
from stoa.learning.marks import wilson_95
from tests.unit.trainer_gpu.runs import Reports, config_of, head_of, ship_sweep, start_run, state_of
from trainer_gpu.engine import TrainerEngine
from trainer_gpu.run_handle import RunHandle


@pytest.fixture
def handle(store: Store) -> RunHandle:
    bounds = {"max_staleness": 0, "max_staleness_hard": 1}
    return start_run(store, config_of(store, groups_per_step=2, learning_rate=1e-2, starved_seconds=4.0, **bounds))


@pytest.fixture
def engines(handle: RunHandle) -> Iterator[list[TrainerEngine]]:
    made = [TrainerEngine(handle), TrainerEngine(handle)]
    yield made
    for engine in made:
        engine.close()


def play(handle: RunHandle, engine: TrainerEngine, sweep: int) -> list[str]:
    """A Mac plays a sweep with the version that HEAD names now: it knows of no other."""
    questions = list(handle.environment.question_ids("train"))[sweep * 16 : sweep * 16 + 16]
    return ship_sweep(handle, engine.prepare(), questions, host="mac", sweep=sweep, seed=sweep)


@pytest.mark.loop
def test_trainer_publishes_what_it_has_before_it_waits_so_that_nobody_waits_for_it(handle: RunHandle, engines: list[TrainerEngine]) -> None:
    """A Mac can only play a version that HEAD names, and a step takes groups of no newer one: neither waits for the other.

    The bound on staleness is 1 here, so that groups from before the loss are of no use: only the version that the
    successor publishes by itself can feed it.
    """
    holder, successor = engines
    progress = Reports()
    first = holder.acquire(AcquireRequest("test", 1), 1, progress)
    assert (first.version, head_of(handle).version) == (0, 0), "HEAD names a version before anybody is asked for groups"
    play(handle, holder, 0)
    for step in (1, 2):
        assert holder.train_step(StepRequest("test", first.token, step), progress).status == "done"
        holder.publish(PublishRequest("test", first.token, step, anchor=False, checkpoint=step == 1), progress)
    holder._arrive(holder._lease, progress)
    lost = head_of(handle)
    assert (lost.version, lost.step) == (2, 2)

    # The holder is gone with the state of step 2; HEAD's version 2 is one that its successor does not have.
    second = successor.acquire(AcquireRequest("test", 2), 1, progress)
    head = head_of(handle)
    assert (second.step, second.version, head.version) == (1, 3, 3)
    assert state_of(handle, head) != state_of(handle, lost)
    starved = successor.train_step(StepRequest("test", second.token, 2), progress)
    assert starved.status == "starved", "nothing of a version it may use has come, and it says so instead of waiting on"
    assert "2 groups" in starved.reason
    sent = play(handle, successor, 1)
    assert all(keys.parse_group(key).version == 3 for key in sent)
    assert successor.train_step(StepRequest("test", second.token, 2), progress).status == "done"


@pytest.mark.loop
def test_step_after_a_version_and_a_held_out_result_tells_of_both_whatever_the_clock_says(
    handle: RunHandle, engines: list[TrainerEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engines[0]
    progress = Reports()
    token = engine.acquire(AcquireRequest("test", 1), 1, progress).token
    play(handle, engine, 0)
    seen: list[dict[str, float]] = []

    def step(number: int) -> None:
        done = engine.train_step(StepRequest("test", token, number), progress)
        assert done.status == "done", done.reason
        seen.append(read_step(handle.store, "test", done.manifest_key).metrics)

    def examine(version: int, num_right: int) -> None:
        key = keys.eval_summary("test", version, f"v{version}")
        write_summary(
            handle.store,
            EvaluationResult("test", f"v{version}", version, 100, num_right / 100, wilson_95(num_right, 100), 0.5, key=key),
            (),
        )

    examine(0, 60)
    step(1)
    published = engine.publish(PublishRequest("test", token, 1, anchor=False, checkpoint=True), progress)
    now, hours = time.time(), itertools.count()
    with monkeypatch.context() as patched:
        patched.setattr(time, "time", lambda: now - 3600.0 * next(hours))  # set back all the time
        step(2)
    examine(1, 30)
    step(3)
    assert [metrics.get("changed_fraction") for metrics in seen] == [None, published.changed_fraction, None]
    assert published.changed_fraction > 0
    assert [metrics.get("eval_version") for metrics in seen] == [0.0, None, 1.0]
    assert [metrics["eval_seen"] for metrics in seen] == [0.0, 0.0, 1.0]
    assert seen[2]["alarm_eval_fall"] == 1.0
    assert "alarm_eval_fall" not in seen[0]
    assert all({"queue_seconds_mean", "quarantined_share", "infra_fault_rate"} <= metrics.keys() for metrics in seen)
    assert ["update_norm" in metrics for metrics in seen] == [True, False, False]
