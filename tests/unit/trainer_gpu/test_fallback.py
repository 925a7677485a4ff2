"""A checkpoint that HEAD names and nobody can load: the newest before it takes its place, and the run goes on from there."""

from collections.abc import Callable

import pytest
import torch

from stoa.bucket import keys
from stoa.bucket.steps import STEP_FORMAT, StepManifest, write_step
from stoa.bucket.store import Store
from stoa.config.run import Learning
from stoa.contracts.errors import CheckpointError
from stoa.contracts.messages import AcquireRequest
from tests.unit.trainer_gpu.player import POLICY
from tests.unit.trainer_gpu.runs import Reports, config_of, head_of, start_run
from tests.unit.trainer_gpu.test_policy import layout_id, nudge
from trainer_gpu.grant_book import GrantBook
from trainer_gpu.lease import Lease, take_lease
from trainer_gpu.policy import Policy
from trainer_gpu.run_handle import RunHandle
from trainer_gpu.savepoint import Savepoint

State = dict[str, torch.Tensor]


def take(handle: RunHandle, policy: Policy, number: int) -> Lease:
    lease, _ = take_lease(handle, policy, GrantBook(handle.store, "test"), AcquireRequest("test", number), 1, Reports())
    lease.intake.close()
    lease.publisher.close(0.0)
    return lease


def save_step(handle: RunHandle, policy: Policy, lease: Lease, step: int) -> tuple[str, State]:
    """Bring the policy to `step`, with a manifest of each step on the way; (checkpoint that HEAD then names, its state)."""
    while lease.step < step:
        nudge(policy, 1e-3)
        lease.step += 1
        manifest = StepManifest(STEP_FORMAT, "test", lease.token, lease.step, 0, lease.step_manifest_key, (), (), (), {}, {}, 0.0, 0.0, 0.0)
        lease.step_manifest_key = write_step(handle.store, manifest)
    saved = Savepoint(handle, GrantBook(handle.store, "test")).save(lease, policy, Reports())
    lease.writer.swap(lease.token, step=step, step_manifest_key=lease.step_manifest_key, checkpoint_key=saved.key)
    return saved.key, {name: tensor.clone() for name, tensor in policy.state().items()}


def truncate(store: Store, key: str) -> None:
    data = store.get(key, max_bytes=1 << 26).data
    store.delete([key])
    store.create(key, data[: len(data) // 2])


def part_of(store: Store, manifest: str) -> str:
    folder = manifest.rpartition("/")[0]
    return next(one.key for one in store.list(f"{folder}/") if one.key != manifest)


DAMAGES: dict[str, Callable[[Store, str], None]] = {
    "part lost": lambda store, key: store.delete([part_of(store, key)]),
    "part cut": lambda store, key: truncate(store, part_of(store, key)),
    "manifest lost": lambda store, key: store.delete([key]),
}


def test_damaged_checkpoint_costs_the_steps_after_the_one_before_it_and_nothing_else(store: Store) -> None:
    handle = start_run(store, config_of(store))
    policy = Policy(POLICY, Learning(dtype="float32"), seed=0, layout_id=layout_id("float32"))
    lease = take(handle, policy, 1)
    whole = [save_step(handle, policy, lease, step) for step in (0, 2, 3, 4)]
    for number, (damage, (key, _)) in enumerate(zip(DAMAGES.values(), reversed(whole), strict=False), start=2):
        damage(store, key)
        taken = take(handle, policy, number)
        older, state = whole[-number]
        head = head_of(handle)
        assert (head.epoch, head.step, head.checkpoint_key) == (number * 1000 + 1, taken.step, older)
        assert taken.step == (3, 2, 0)[number - 2]
        assert head.step_manifest_key == taken.step_manifest_key
        assert head.step_manifest_key == ("" if taken.step == 0 else keys.step_manifest("test", 1001, taken.step))
        assert key in taken.unusable
        assert [name for name, tensor in policy.state().items() if not torch.equal(tensor, state[name])] == []
    healthy = take(handle, policy, 5)
    assert (healthy.step, healthy.unusable) == (0, ())

    truncate(store, part_of(store, whole[0][0]))
    with pytest.raises(CheckpointError, match=r"s00000000/part-0000.* cannot be used"):
        take(handle, policy, 6)
    assert head_of(handle).checkpoint_key == whole[0][0]
