"""Who holds a run: tokens, and a trainer that was frozen and comes back while another has it."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from stoa.bucket.head import read_head
from stoa.bucket.store import Store
from stoa.contracts.errors import FencedError, LostStateError, ServiceUnavailableError, UsageError
from stoa.contracts.messages import AcquireRequest, CheckpointRequest, PublishRequest, StepRequest
from tests.unit.trainer_gpu.runs import Reports, config_of, start_run
from trainer_gpu.engine import TrainerEngine
from trainer_gpu.lease import next_token
from trainer_gpu.run_handle import RunHandle


@pytest.fixture
def handle(store: Store) -> RunHandle:
    return start_run(store, config_of(store))


@pytest.fixture
def engines(handle: RunHandle) -> Iterator[list[TrainerEngine]]:
    made = [TrainerEngine(handle), TrainerEngine(handle)]
    yield made
    for engine in made:
        engine.close()


@pytest.mark.parametrize(("lease", "attempt", "epoch", "token"), [(1, 1, 0, 1001), (3, 999, 3998, 3999), (8, 1, 7002, 8001)])
def test_strict_token_is_the_workflows_own(lease: int, attempt: int, epoch: int, token: int) -> None:
    assert next_token(lease, attempt, epoch, strict=True) == token > epoch


@pytest.mark.parametrize(("lease", "attempt", "epoch"), [(3, 1, 3002), (3, 2, 3002), (2, 999, 3001)])
def test_task_from_before_the_present_lease_is_fenced(lease: int, attempt: int, epoch: int) -> None:
    with pytest.raises(FencedError):
        next_token(lease, attempt, epoch, strict=True)


def test_thousandth_attempt_is_refused_also_when_strict() -> None:
    with pytest.raises(UsageError):
        next_token(1, 1000, 0, strict=True)


def test_trainer_that_was_frozen_can_neither_take_the_run_back_nor_write_to_it(handle: RunHandle, engines: list[TrainerEngine]) -> None:
    frozen, healthy = engines
    old = frozen.acquire(AcquireRequest("test", 1, strict=True), 1, Reports()).token
    # It is frozen now. Its next task, lease 2 attempt 1, is handed to it and lost; the second attempt goes to another.
    held = healthy.acquire(AcquireRequest("test", 2, strict=True), 2, Reports()).token
    before, _ = read_head(handle.store, "test", handle.signer.public_key)
    for write in (
        lambda: frozen.checkpoint(CheckpointRequest("test", old, 0), Reports()),
        lambda: frozen.publish(PublishRequest("test", old, 0, anchor=True, checkpoint=True, announce=True), Reports()),
        lambda: frozen.acquire(AcquireRequest("test", 2, strict=True), 1, Reports()),
        lambda: frozen.acquire(AcquireRequest("test", 1, strict=True), 1, Reports()),
        lambda: frozen.train_step(StepRequest("test", old, 1), Reports()),
    ):
        with pytest.raises((FencedError, LostStateError)):
            write()
        assert read_head(handle.store, "test", handle.signer.public_key)[0] == before
    assert before.epoch == held
    healthy.checkpoint(CheckpointRequest("test", held, 0), Reports())
    assert read_head(handle.store, "test", handle.signer.public_key)[0].seq == before.seq + 1


class Unwanted:
    """A `Progress`: the answer to its heartbeat, that the task is another's, is there when it is looked for the third time."""

    stopping = False

    def __init__(self) -> None:
        self.num_looks = 0

    @property
    def cancelled(self) -> bool:
        self.num_looks += 1
        return self.num_looks >= 3

    def report(self, detail: str, *, version: int = -1, key: str = "") -> None:
        pass


def test_a_task_that_is_another_ones_by_now_takes_nothing(handle: RunHandle, engines: list[TrainerEngine]) -> None:
    engines[0].acquire(AcquireRequest("test", 1, strict=True), 1, Reports())
    before, _ = read_head(handle.store, "test", handle.signer.public_key)
    engines.append(TrainerEngine(replace(handle, word_seconds=20.0)))
    with pytest.raises(ServiceUnavailableError, match="asked to give up before the run was taken"):
        engines[-1].acquire(AcquireRequest("test", 2, strict=True), 1, Unwanted())
    assert read_head(handle.store, "test", handle.signer.public_key)[0] == before
