"""The bucket goes away in the middle of a call and comes back: the call goes on, and says so while it waits."""

import threading
import time
from pathlib import Path

import pytest

from stoa.contracts.errors import ServiceUnavailableError
from stoa.contracts.messages import AcquireRequest, CheckpointRequest, StepRequest
from tests.servers import bucket_server, free_ports
from tests.unit.trainer_gpu.runs import Reports, config_of, head_of, ship_sweep, start_run
from trainer_gpu.engine import TrainerEngine


@pytest.mark.faults
@pytest.mark.timeout(240)
def test_outage_costs_time_and_nothing_else(tmp_path: Path) -> None:
    ports = free_ports(5, reserve_offset=10000)
    progress = Reports()
    with bucket_server(tmp_path, ports=ports) as server:
        store = server.store("outage", patience_seconds=60.0)
        store.ensure_bucket()
        handle = start_run(store, config_of(store, groups_per_step=2, starved_seconds=60.0))
        engine = TrainerEngine(handle)
        token = engine.acquire(AcquireRequest("test", 1), 1, progress).token
    answers: list[object] = []

    def calls() -> None:
        answers.append(engine.checkpoint(CheckpointRequest("test", token, 0), progress))
        answers.append(engine.train_step(StepRequest("test", token, 1), progress))

    working = threading.Thread(target=calls)
    working.start()
    time.sleep(3.0)
    assert working.is_alive()
    assert any("waiting for the bucket" in seen for seen in progress.seen)
    with bucket_server(tmp_path, ports=ports):
        policy = engine._policy
        assert policy is not None
        questions = list(handle.environment.question_ids("train"))[:16]
        ship_sweep(handle, policy, questions, host="mac", sweep=0, seed=3)
        working.join(90)
        assert not working.is_alive()
        saved, stepped = answers
        assert head_of(handle).checkpoint_key == saved.key  # pyright: ignore[reportAttributeAccessIssue]
        assert stepped.status == "done"  # pyright: ignore[reportAttributeAccessIssue]

    # Asked to end while the bucket is away: give up at once instead of after the whole patience.
    progress.stopping = True
    began = time.monotonic()
    with pytest.raises(ServiceUnavailableError):
        engine.checkpoint(CheckpointRequest("test", token, 1), progress)
    assert time.monotonic() - began < 20
    engine.close()
