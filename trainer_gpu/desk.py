"""The engines of the control process, all over one bucket: grants, examinations, HEAD.state.

`control.py` hosts the workflows and activities that use them. No torch here, and nothing that imports it.
"""

import json
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from stoa.bucket.head import HeadWriter, read_head
from stoa.bucket.invite import seal_key
from stoa.bucket.revocations import Revoked
from stoa.bucket.tickets import Mint
from stoa.config.load import bucket_credentials
from stoa.config.run import RunConfig
from stoa.contracts.errors import FormatError, ObjectMissingError
from stoa.contracts.messages import HeadStateRequest, HeadStateResult, LeaseFound, LeaseQuestion
from stoa.contracts.ports import Progress
from trainer_gpu.exam import Examiner
from trainer_gpu.grants import GrantKeeper
from trainer_gpu.run_handle import RunHandle
from trainer_gpu.versions import KnownVersions

_VERSIONS_KEPT = 1000
_KEYS_KEPT = 10_000


class StateKeeper:
    """Implements `stoa.contracts.ports.HeadKeeper` for one run."""

    def __init__(self, handle: RunHandle) -> None:
        self._run = handle.run
        self._lock = threading.Lock()
        self._writer = HeadWriter(
            handle.store,
            handle.run,
            handle.signer,
            owner=handle.owner,
            interval_seconds=handle.config.bucket.head_interval_seconds,
        )

    def find_lease(self, request: LeaseQuestion, progress: Progress) -> LeaseFound:
        """See `ports.HeadKeeper`."""
        if request.run != self._run:
            raise FormatError(f"this control process serves run {self._run}, not {request.run}")
        progress.report("reading HEAD")
        with self._lock:
            try:
                return LeaseFound(self._writer.read()[0].epoch)
            except ObjectMissingError:
                return LeaseFound(0)

    def set_state(self, request: HeadStateRequest, progress: Progress) -> HeadStateResult:
        """See `ports.HeadKeeper`. Raises ObjectMissingError if no trainer ever took the run."""
        if request.run != self._run:
            raise FormatError(f"this control process serves run {self._run}, not {request.run}")
        progress.report(f"setting HEAD.state to {request.state}")
        with self._lock:
            head = self._writer.set_state(request.state, request.nonce)
        return HeadStateResult(head.state, head.version, head.step, head.epoch)


@dataclass(frozen=True, slots=True)
class Desk:
    """What the control activities need, for one run."""

    granter: GrantKeeper
    examiner: Examiner
    keeper: StateKeeper
    seal_key_of: Callable[[str], bytes]
    """Id of an invitation -> the key that seals its tickets."""


def open_desk(handle: RunHandle, here: RunConfig) -> Desk:
    """The engines of one run. `here`: this host's configuration, which says how Macs reach the bucket."""
    config, store, public_key = handle.config, handle.store, handle.signer.public_key
    bucket = here.bucket
    mint = Mint(handle.run, bucket_credentials(bucket), here.macs.bucket_endpoint or bucket.endpoint, bucket.name, bucket.region)
    versions = KnownVersions(store, handle.run, public_key, window=_VERSIONS_KEPT)

    def known(version: int) -> str | None:
        if versions.state_of(version) is None:
            versions.follow(read_head(store, handle.run, public_key)[0], version)
        return versions.state_of(version)

    vocab_size = int(json.loads((handle.model_folder / "config.json").read_bytes())["vocab_size"])
    questions = handle.environment.question_ids("train")
    return Desk(
        GrantKeeper(store, config, public_key, questions, tickets=(mint, Revoked(store, handle.run, public_key))),
        Examiner(store, config, handle.environment, vocab_size=vocab_size, known=known),
        StateKeeper(handle),
        lru_cache(maxsize=_KEYS_KEPT)(lambda invite: seal_key(handle.signer.seed, handle.run, invite)),
    )
