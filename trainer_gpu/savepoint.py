"""The checkpoints of one lease: saved, proven at the run's beginning, and pruned. Their objects are `checkpoint.py`'s.

A checkpoint counts once HEAD names it, which is the caller's to do.
"""

from stoa.contracts.ports import Progress
from trainer_gpu.checkpoint import Facts, Saved, prune_checkpoints, read_document, save_checkpoint
from trainer_gpu.grant_book import GrantBook
from trainer_gpu.lease import Lease, identity_of
from trainer_gpu.policy import Policy
from trainer_gpu.run_handle import RunHandle


class Savepoint:
    """Where one process saves the state of the run it trains."""

    def __init__(self, handle: RunHandle, grants: GrantBook) -> None:
        self._handle = handle
        self._grants = grants

    def save(self, lease: Lease, policy: Policy, progress: Progress) -> Saved:
        """Write a checkpoint of the present step; HEAD does not name it yet."""
        handle = self._handle
        progress.report(f"saving step {lease.step}")
        position, is_open = self._grants.outline()
        facts = Facts(
            epoch=lease.token,
            step=lease.step,
            version=lease.version,
            step_manifest_key=lease.step_manifest_key,
            settled=tuple(sorted(lease.settled)),
            grants_position=position,
            grants_open=is_open,
            rng=policy.capture_rng(),
        )
        parts = policy.save_parts(
            handle.store,
            handle.run,
            lease.token,
            lease.step,
            part_bytes=handle.config.publish.anchor_part_bytes,
            on_part=lambda name: progress.report(f"saving {name} of step {lease.step}"),
        )
        return save_checkpoint(handle.store, handle.signer, identity_of(handle, policy), facts, parts)

    def prove(self, lease: Lease, policy: Policy, progress: Progress) -> str:
        """Save the state a run begins with and take it back: better now than after a week. Returns the checkpoint's key."""
        saved = self.save(lease, policy, progress)
        handle = self._handle
        document = read_document(handle.store, saved.key, identity_of(handle, policy), handle.signer.public_key)
        policy.restore_parts(handle.store, document.parts, document.facts.rng)
        return saved.key

    def prune(self, lease: Lease, named: str) -> None:
        """Delete checkpoints beyond those that are kept; never `named`, the one HEAD names."""
        handle = self._handle
        keep = handle.config.publish.keep_checkpoints
        prune_checkpoints(handle.store, handle.run, epoch=lease.token, keep=keep, named=named, unusable=lease.unusable)
