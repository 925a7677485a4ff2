"""A process that publishes or pulls and is killed (SIGKILL, by itself) at a chosen step. Run by the tests of kills.

publish STEP WHEN HOW: the STEP-th write to the bucket is its last; WHEN says if that write still happens, HOW if the
anchor is announced at once (inline) or uploaded beside. pull STEP: the STEP-th change of a file in its folder is its
last; below 0, a kill while weights are written. race LEASE: take the run and publish until fenced, four times and more
until that was worth a version.
"""

import os
import random
import signal
import sys
import time
from pathlib import Path

from stoa.bucket.head import HeadWriter, read_head
from stoa.bucket.manifest import Signer
from stoa.bucket.run_document import read_run
from stoa.bucket.store import Store
from stoa.config.run import Bucket
from stoa.contracts.errors import FencedError, PreconditionError
from stoa.weights.sync import Publisher, Puller
from tests.servers import CREDENTIALS
from tests.unit.weights.small_run import drift, masters

RUN = "small"
SIGNER = Signer.from_seed(bytes(range(32)))


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class DyingStore(Store):
    """Kills this process at its `step`-th write, before or after the server has it."""

    step, when, num_writes = 0, "", 0

    def _put(self, key, arguments):
        self.num_writes += 1
        if self.num_writes == self.step and self.when == "before":
            die()
        answer = super()._put(key, arguments)
        if self.num_writes == self.step:
            die()
        return answer


def publish(store: DyingStore, step: int, when: str, how: str) -> None:
    document = read_run(store, RUN)
    store.step, store.when = step, when
    writer = HeadWriter(store, RUN, SIGNER, owner=f"pid-{os.getpid()}", interval_seconds=0.0)
    before, _ = writer.read()
    head = writer.acquire((before.epoch // 1000 + 1) * 1000)
    publisher = Publisher(store, document, SIGNER, hysteresis=0.02, anchor_part_bytes=50_000)
    publisher.load_published(head)
    weights = drift(masters(publisher.layout), 1000 + head.version)
    version = head.version + 1
    prepared = publisher.prepare(weights.items(), step=4, epoch=head.epoch, version=version, anchor=True, inline=how == "inline")
    writer.swap(head.epoch, version=version, manifest_key=prepared.manifest_key, manifest_sha256=prepared.manifest_sha256)
    publisher.commit(prepared)
    publisher.background.flush(20)
    print(store.num_writes)
    publisher.close()


def pull(store: Store, folder: Path, step: int) -> None:
    head, _ = read_head(store, RUN, SIGNER.public_key)
    done = [0]

    def watch(event: str, arguments: tuple) -> None:
        writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        if (writes or event in ("os.rename", "os.remove", "os.truncate", "os.mkdir")) and str(folder) in str(arguments[0]):
            done[0] += 1
            if done[0] == step:
                die()

    sys.addaudithook(watch)
    puller = Puller(store, read_run(store, RUN), folder)
    state = puller.build(head, head.version - 1)
    staged = puller.stage(head, head.version - 1, str(state.verified_id))
    if step < 0:
        apply = state.apply

        def half(change):
            apply(change)
            die()

        state.apply = half
    puller.apply(staged, state)
    puller.verify(staged, state)
    print(done[0])


def race(store: Store, lease: int) -> None:
    document, chance, won = read_run(store, RUN), random.Random(lease), []
    writer = HeadWriter(store, RUN, SIGNER, owner=f"racer-{lease}", interval_seconds=0.0)
    publisher = Publisher(store, document, SIGNER, hysteresis=0.02, anchor_part_bytes=50_000)
    for attempt in range(40):
        if attempt >= 4 and won:
            break
        try:
            before, _ = writer.read()
            head = writer.acquire(before.epoch + 1)
            publisher.load_published(head)
            weights = drift(masters(publisher.layout), lease)
            for _ in range(6):
                weights, version = drift(weights, chance.randrange(1 << 30)), head.version + 1
                prepared = publisher.prepare(weights.items(), step=4, epoch=head.epoch, version=version, anchor=False)
                names = {"manifest_key": prepared.manifest_key, "manifest_sha256": prepared.manifest_sha256}
                head = writer.swap(head.epoch, version=version, **names)
                publisher.commit(prepared)
                won.append(f"{version}:{prepared.manifest_sha256}")
        except (FencedError, PreconditionError):
            publisher.rollback()
            time.sleep(chance.random() * 0.2)
    publisher.close()
    print(" ".join(won))


if __name__ == "__main__":
    what, endpoint, bucket, folder, *rest = sys.argv[1:]
    store = DyingStore(Bucket(endpoint=endpoint, name=bucket, head_interval_seconds=0.0), CREDENTIALS)
    if what == "publish":
        publish(store, int(rest[0]), *rest[1:])
    elif what == "pull":
        pull(store, Path(folder), int(rest[0]))
    else:
        race(store, int(rest[0]))
