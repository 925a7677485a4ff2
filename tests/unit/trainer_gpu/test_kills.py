"""A trainer that dies at any write to the bucket, before it or after it: the next one ends with the same weights, bit for bit."""

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from stoa.bucket import keys
from stoa.bucket.steps import lineage
from stoa.bucket.store import Store
from stoa.contracts.errors import StoaError
from stoa.contracts.messages import AcquireRequest, PublishRequest, StepRequest
from tests.servers import CREDENTIALS, BucketServer
from tests.unit.trainer_gpu.runs import Reports, config_of, head_of, ship_sweep
from tests.unit.trainer_gpu.test_two_ranks import start
from trainer_gpu.engine import TrainerEngine
from trainer_gpu.run_handle import RunHandle

LAST_STEP = 2


class Killed(RuntimeError):
    """This process is no more."""


class DyingStore(Store):
    """Dies at its `fatal`th write, before or after it has reached the bucket; from then on no call gets through."""

    fatal = 0
    after = False
    num_writes = 0
    dead = False
    _count = threading.Lock()

    def _write(self, write: Callable[[], Any]) -> Any:
        with self._count:
            if self.dead:
                raise Killed
            self.num_writes += 1
            self.dead = self.num_writes == self.fatal
            if not self.dead or self.after:
                result = write()
            if self.dead:
                raise Killed
            return result

    def create(self, *args: Any, **more: Any) -> Any:
        return self._write(lambda: Store.create(self, *args, **more))

    def swap(self, *args: Any, **more: Any) -> Any:
        return self._write(lambda: Store.swap(self, *args, **more))

    def delete(self, *args: Any, **more: Any) -> Any:
        return self._write(lambda: Store.delete(self, *args, **more))


def train(handle: RunHandle, lease: int) -> dict[str, torch.Tensor]:
    """Take the run and bring it to LAST_STEP, a version with a checkpoint after each step; the state at the end."""
    engine = TrainerEngine(handle)
    progress = Reports()
    try:
        acquired = engine.acquire(AcquireRequest("test", lease), 1, progress)
        step = acquired.step
        while step < LAST_STEP:
            step += 1
            assert engine.train_step(StepRequest("test", acquired.token, step), progress).status == "done"
            engine.publish(PublishRequest("test", acquired.token, step, anchor=False, checkpoint=True), progress)
        assert engine._policy is not None
        return {name: tensor.clone() for name, tensor in engine._policy.state().items()}
    finally:
        engine.close()


@pytest.mark.faults
@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore:Exception in thread publish-background:pytest.PytestUnhandledThreadExceptionWarning")  # it dies too
def test_death_at_any_write_costs_no_group_and_no_bit(bucket_server: BucketServer, tmp_path: Path) -> None:
    def fresh(name: str) -> DyingStore:
        store = DyingStore(bucket_server.settings(name), CREDENTIALS)
        store.ensure_bucket()
        return store

    first = fresh("kills-source")
    source = start(first, config_of(first, groups_per_step=3, learning_rate=1e-3))
    player = TrainerEngine(source)
    player.acquire(AcquireRequest("test", 1), 1, Reports())
    assert player._policy is not None
    shipped = ship_sweep(source, player._policy, list(source.environment.question_ids("train"))[:20], host="mac", sweep=0, seed=1)
    player.close()
    objects = {key: first.get(key, max_bytes=1 << 26).data for key in (*shipped, keys.grant("test", "mac", 0))}

    def run_in(name: str) -> tuple[RunHandle, DyingStore]:
        store = fresh(name)
        handle = start(store, config_of(store, groups_per_step=3, learning_rate=1e-3))
        for key, data in objects.items():
            store.create(key, data)
        store.num_writes = 0
        return handle, store

    handle, store = run_in("kills-none")
    expected = train(handle, 1)
    num_writes = store.num_writes
    consumed = [key for manifest in lineage(store, head_of(handle)) for key in manifest.consumed]
    assert num_writes > 12
    for fatal in range(1, num_writes + 1):
        handle, store = run_in(f"kills-{fatal}")
        store.fatal, store.after = fatal, fatal % 2 == 0
        try:
            train(handle, 1)
        except (Killed, StoaError):
            assert store.dead
        alive = Store(store.settings, CREDENTIALS)
        found = train(replace(handle, store=alive), 2)
        assert [name for name, tensor in expected.items() if not torch.equal(tensor, found[name])] == [], f"killed at write {fatal}"
        again = [key for manifest in lineage(alive, head_of(replace(handle, store=alive))) for key in manifest.consumed]
        assert again == consumed, f"killed at write {fatal}"
        alive._client.delete_bucket(Bucket=alive.settings.name)
    print(f"{num_writes} writes")
