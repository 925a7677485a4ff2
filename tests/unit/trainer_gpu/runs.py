"""A run in a real bucket, its grants and its groups, for tests of what a trainer does with them."""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from stoa.bucket import keys
from stoa.bucket.head import Head, read_head
from stoa.bucket.manifest import Signer, read_manifest
from stoa.bucket.run_document import claim_run, new_run, upload_model_files
from stoa.bucket.store import Store
from stoa.config.run import RunConfig
from stoa.learning.ledger import GrantRecord
from stoa.rollouts.records import Group
from stoa.rollouts.shard import encode_group
from stoa.weights.layout import layout_of
from tests.unit.trainer_gpu.player import POLICY, group_of, play, search
from trainer_gpu.grant_book import GrantBook
from trainer_gpu.policy import Policy
from trainer_gpu.run_handle import RunHandle


@dataclass
class Reports:
    """A `Progress` that keeps what it is told."""

    cancelled: bool = False
    stopping: bool = False
    seen: list[str] = field(default_factory=list)

    def report(self, detail: str, *, version: int = -1, key: str = "") -> None:
        self.seen.append(detail)


def config_of(store: Store, **learning: object) -> RunConfig:
    base = RunConfig(run="test", model=str(POLICY), bucket=store.settings)
    return base.model_copy(update={"learning": base.learning.model_copy(update={"starved_seconds": 10.0, **learning})})


def start_run(store: Store, config: RunConfig, *, owner: str = "gpu-1") -> RunHandle:
    signer = Signer.generate()
    layout_id = layout_of(json.loads((POLICY / "config.json").read_text()), config.learning.dtype).layout_id
    files = upload_model_files(store, config.run, POLICY)
    document = claim_run(store, new_run(config, signer, layout_id=layout_id, model_files=files), signer)
    return RunHandle(store, document, signer, search(), POLICY, owner, word_seconds=0.0)


def head_of(handle: RunHandle) -> Head:
    return read_head(handle.store, handle.run, handle.signer.public_key)[0]


def await_version(handle: RunHandle, version: int) -> Head:
    """HEAD once it names `version`, which is on its way."""
    deadline = time.monotonic() + 30
    while (head := head_of(handle)).version < version:
        assert time.monotonic() < deadline, f"HEAD is at version {head.version}, not {version}"
        time.sleep(0.05)
    return head


def state_of(handle: RunHandle, head: Head) -> str:
    return read_manifest(handle.store, handle.run, head.manifest_key, head.manifest_sha256, handle.signer.public_key).state_id


def ship_sweep(
    handle: RunHandle, policy: Policy, question_ids: Sequence[str], *, host: str, sweep: int, seed: int, grant: bool = True
) -> list[str]:
    """Play a sweep with the policy's present weights as HEAD's version; returns the keys of its groups."""
    head = head_of(handle)
    state_id = state_of(handle, head)
    if grant:
        GrantBook(handle.store, handle.run).write(GrantRecord(host, sweep, sweep * 100, tuple(question_ids), 0.0, 0))
    played = play(policy.trainable.model, handle.environment, list(question_ids), num_episodes=8, seed=seed)
    return [
        put_group(handle, group_of(e, run=handle.run, host=host, sweep=sweep, group=i, version=head.version, state_id=state_id))
        for i, e in enumerate(played)
    ]


def put_group(handle: RunHandle, group: Group) -> str:
    key = keys.group(group.run, group.version, group.host, group.sweep, group.group)
    handle.store.create(key, encode_group(group))
    return key
