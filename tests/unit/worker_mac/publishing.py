"""The trainer's side of a bucket for the Mac worker's tests: a claimed run, and versions published with the real code."""

import json
import time
from pathlib import Path

import numpy as np

from stoa.bucket.head import HeadWriter
from stoa.bucket.manifest import Signer
from stoa.bucket.run_document import RunDocument, claim_run, new_run, upload_model_files
from stoa.bucket.store import Store
from stoa.config.run import Bucket, Learning, Rollout, RunConfig, Timeouts
from stoa.contracts.fleet_messages import SweepRequest
from stoa.weights.layout import layout_of
from stoa.weights.sync import Publisher
from tests.unit.worker_mac.policies import TINY

TOKEN = 1000


class Quiet:
    """A Progress that nobody listens to; flags are set by the test."""

    def __init__(self) -> None:
        self.details: list[str] = []
        self.cancelled = False
        self.stopping = False

    def report(self, detail: str, *, version: int = -1, key: str = "") -> None:
        self.details.append(detail)


class Publishing:
    """A run whose masters move a little at each publish; `folder` holds its config.json, or gets the tiny one."""

    def __init__(
        self,
        store: Store,
        folder: Path,
        *,
        run: str = "demo",
        bucket: Bucket | None = None,
        signer: Signer | None = None,
        learning: Learning | None = None,
    ) -> None:
        if not (folder / "config.json").is_file():
            (folder / "config.json").write_text(json.dumps(TINY))
            (folder / "tokenizer.json").write_text("{}")
        self.store, self.run = store, run
        self.layout = layout_of(json.loads((folder / "config.json").read_text()), "float32")
        config = RunConfig(
            run=run,
            bucket=bucket or Bucket(),
            rollout=Rollout(groups=8, group_size=8, min_group_size=4),
            learning=learning or Learning(max_staleness_hard=3),
            timeouts=Timeouts(head_poll_seconds=0.1),
        )
        self.signer = signer or Signer.generate()
        document = new_run(config, self.signer, layout_id=self.layout.layout_id, model_files=upload_model_files(store, run, folder))
        self.document: RunDocument = claim_run(store, document, self.signer)
        self.writer = HeadWriter(store, run, self.signer, owner="test", interval_seconds=0.0)
        self.publisher = Publisher(store, self.document, self.signer, hysteresis=0.02, anchor_part_bytes=1 << 20)
        self.numbers = np.random.default_rng(0)
        self.masters = {
            spec.name: self.numbers.normal(0, 0.08, spec.shape).astype(np.float32) + ("norm" in spec.name) for spec in self.layout.tensors
        }
        self.writer.acquire(TOKEN)

    def publish(self, *, anchor: bool = False, steps_per_version: int = 4, seconds_ago: float = 0.0) -> str:
        """Publish the next version; returns its state_id. steps_per_version: 0 for a run whose steps are looked for."""
        version = self.writer.read()[0].version + 1
        if version:
            for spec in self.layout.tensors:
                if not spec.frozen:
                    self.masters[spec.name] += self.numbers.normal(0, 2e-4, spec.shape).astype(np.float32)
        tensors = [(name, self.masters[name].astype(np.float32)) for name in sorted(self.masters)]
        prepared = self.publisher.prepare(
            tensors, step=version * steps_per_version, epoch=TOKEN, version=version, anchor=anchor or not version, inline=True
        )
        self.writer.swap(
            TOKEN,
            version=version,
            manifest_key=prepared.manifest_key,
            manifest_sha256=prepared.manifest_sha256,
            step=version * steps_per_version,
            published_at=time.time() - seconds_ago,
        )
        self.publisher.commit(prepared)
        return prepared.state_id


def train_request(sweep: int = 0, *, run: str = "demo", host: str = "mac-1", min_version: int = 0, first: int = 0) -> SweepRequest:
    """A sweep of questions first .. first + 7."""
    return SweepRequest(run, host, sweep, "train", tuple(str(first + group) for group in range(8)), 8, min_version)
