"""Rehearsal of weight sync at full size: all 8,466,202,624 codes of LFM2.5-8B-A1B through the real S3 server on this machine.

    python -m benchmarks.pulse --full

Publisher and joins are processes of their own, one after the other, so that each has its own peak of memory. The first
version quantises float32 masters; later changes are drawn directly on the codes, 0.5 % each. A Mac joins over a link of
1 Gbit/s, and once more with the anchor on its disk, each to the first sampled token (`pulse_join.py`); another process
joins on loopback as fast as this machine goes, and takes ten versions at once.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from benchmarks.proxy import Faults
from benchmarks.pulse_join import far, join_apart, peak_bytes
from benchmarks.pulse_masters import LFM25, full_layout
from benchmarks.servers import CREDENTIALS, bucket_store
from stoa.bucket import keys
from stoa.bucket.head import HeadWriter, read_head
from stoa.bucket.manifest import Signer
from stoa.bucket.run_document import claim_run, new_run, read_run, upload_model_files
from stoa.bucket.store import Store
from stoa.config.run import Bucket, Learning, RunConfig
from stoa.contracts.errors import DiskFullError
from stoa.weights import grid
from stoa.weights.history import NUM_READERS, manifest_of
from stoa.weights.layout import Layout, TensorSpec
from stoa.weights.snapshot import Masters
from stoa.weights.sync import Publisher, Puller

NEEDED_BYTES: Final = 40_000_000_000
RUN: Final = "rehearsal"
RATE: Final = 0.005
LINK: Final = Faults(link_rate=125e6, latency_seconds=0.02)
"""1 Gbit/s, 20 ms."""
PART_BYTES: Final = 128 << 20
_SIGNER: Final = Signer.from_seed(bytes(32))


def rehearse(folder: Path | None, num_deltas: int) -> dict[str, Any]:
    """Everything, in a temporary folder under `folder`. Raises DiskFullError if there is no room."""
    free = shutil.disk_usage(folder or tempfile.gettempdir()).free
    if free < NEEDED_BYTES:
        raise DiskFullError(f"the rehearsal needs {NEEDED_BYTES} bytes of disk, there are {free}", hint="give another place by --folder")
    with tempfile.TemporaryDirectory(dir=folder) as scratch, bucket_store(Path(scratch)) as store:
        arguments = [store.settings.endpoint, store.settings.name, scratch, str(num_deltas)]
        published = _process("publish", arguments)
        loopback = {"loopback_bytes_per_second": _line_rate(store), **_process("update", arguments)}
        shutil.rmtree(Path(scratch) / "mac")
        return {**published, **loopback, **_joins(store, Path(scratch) / "mac", num_deltas)}


def _joins(store: Store, folder: Path, num_deltas: int) -> dict[str, Any]:
    """A Mac's cold join over the link, and its re-join with the anchor and half of the deltas on disk."""
    with far(store, LINK) as endpoint:
        link = store.settings.model_copy(update={"endpoint": endpoint})
        attainable = _line_rate(Store(link, CREDENTIALS, patience_seconds=60.0))
        _say("joining over the link")
        cold = join_apart(link, RUN, folder)
        for path in (folder / "deltas").iterdir():
            if int(path.name[9:17]) > num_deltas // 2:
                path.unlink()
        _forget_pages(folder)
        _say("joining again")
        again = join_apart(link, RUN, folder)
    return {
        "cold_join_seconds": cold.token_seconds,
        "cold_join_weights_seconds": cold.weights_seconds,
        "join_bytes": cold.num_bytes,
        "cold_join_line_rate_fraction": cold.num_bytes / LINK.link_rate / cold.token_seconds,
        "cold_join_weights_line_rate_fraction": cold.num_bytes / LINK.link_rate / cold.weights_seconds,
        "join_link_bytes_per_second": LINK.link_rate,
        "join_link_attainable_fraction": attainable / LINK.link_rate,
        "rejoin_seconds": again.token_seconds,
        "rejoin_weights_seconds": again.weights_seconds,
        "rejoin_bytes": again.num_bytes,
        "rejoin_disk_seconds": _disk_seconds(folder / "anchors"),
        "mac_peak_bytes": max(cold.peak_bytes, again.peak_bytes),
        "joins_verified": cold.verified and again.verified,
    }


def _say(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


def _forget_pages(folder: Path) -> None:
    """Let the system drop what it keeps of these files in memory, where it lets one ask."""
    if hasattr(os, "posix_fadvise"):
        os.sync()
        for path in folder.rglob("*.safetensors"):
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _disk_seconds(folder: Path) -> float:
    """Plain reads of the same files, as many at once, from disk: what any re-join takes at least."""
    _forget_pages(folder)

    def read(path: Path) -> None:
        buffer = bytearray(1 << 20)
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass

    started = time.monotonic()
    with ThreadPoolExecutor(NUM_READERS) as pool:
        list(pool.map(read, sorted(folder.rglob("*.safetensors"))))
    return time.monotonic() - started


def _process(what: str, arguments: list[str]) -> dict[str, Any]:
    """Run one part in a process of its own; its last line of stdout is its result."""
    command = [sys.executable, "-m", "benchmarks.pulse_full", what, *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.strip().rpartition("\n")[2])


def _first_masters(layout: Layout) -> Masters:
    """float32 masters made of one random block over and over."""
    block = np.random.default_rng(0).standard_normal(1 << 22, np.float32) * np.float32(0.02)
    for spec in layout.tensors:
        yield spec.name, np.resize(block, spec.shape) if spec.kind == "int8" else _raw_master(spec)


def _no_masters(layout: Layout) -> Iterator[tuple[str, NDArray[np.float32]]]:
    for spec in layout.tensors:
        yield spec.name, np.broadcast_to(np.float32(0), spec.shape) if spec.kind == "int8" else _raw_master(spec)


def _raw_master(spec: TensorSpec) -> NDArray[np.float32]:
    """Norms of one, everything else small and random, the same at every version: a model whose numbers are numbers."""
    if "norm" in spec.name:
        return np.ones(spec.shape, np.float32)
    return np.random.default_rng(len(spec.name)).standard_normal(spec.shape, np.float32) * np.float32(0.05)


class _Drawn:
    """In place of `grid.scan`: each code moves by one step with probability 0.5 %."""

    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)

    def __call__(
        self,
        weights: NDArray[np.float32],
        codes: NDArray[np.uint8],
        scales: NDArray[np.uint16],
        biases: NDArray[np.uint16],
        hysteresis: float,
    ) -> grid.Scan:
        flat = codes.reshape(-1)
        positions = np.cumsum(self._random.geometric(RATE, int(flat.size * RATE * 1.1) + 100)) - 1
        positions = positions[positions < flat.size]
        old = flat[positions]
        up = (self._random.random(len(positions), np.float32) < 0.5) & (old < 255) | (old == 0)
        none = np.empty(0, np.uint16)
        new = np.where(up, old + np.uint8(1), old - np.uint8(1))
        return grid.Scan(positions, new, np.empty(0, np.int64), none, none, np.empty((0, 64), np.uint8), 0, 0.0)


def _publish(store: Store, scratch: Path, num_deltas: int) -> dict[str, Any]:
    layout = full_layout()
    model = scratch / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(LFM25))
    config = RunConfig(run=RUN, learning=Learning(dtype="bfloat16"))
    files = upload_model_files(store, RUN, model)
    document = claim_run(store, new_run(config, _SIGNER, layout_id=layout.layout_id, model_files=files), _SIGNER)
    writer = HeadWriter(store, RUN, _SIGNER, owner="rehearsal", interval_seconds=0.0)
    writer.acquire(1000)
    publisher = Publisher(store, document, _SIGNER, hysteresis=0.0, anchor_part_bytes=PART_BYTES)
    seconds: list[dict[str, float]] = []
    sizes: list[int] = []
    anchor_seconds = 0.0
    for version in range(num_deltas + 1):
        started = time.monotonic()
        first = version == 0
        masters = _first_masters(layout) if first else _no_masters(layout)
        quantise = grid.scan if first else _Drawn(version)
        prepared = publisher.prepare(masters, step=4 * version, epoch=1000, version=version, anchor=first, quantise=quantise)
        names = {"manifest_key": prepared.manifest_key, "manifest_sha256": prepared.manifest_sha256}
        head = writer.swap(1000, version=version, **names, published_at=time.time())
        publisher.commit(prepared)
        if first:
            anchor_seconds = time.monotonic() - started
        else:
            seconds.append(manifest_of(store, document, head).stats.seconds)
            sizes.append(prepared.delta_bytes)
        print(f"version {version} after {time.monotonic() - started:.1f} s, peak {peak_bytes() / 1e9:.2f} GB", file=sys.stderr, flush=True)
    publisher.background.flush(600)
    publisher.close()
    stages = {f"publish_{stage}_seconds": median(found[stage] for found in seconds) for stage in seconds[0]}
    mirror = layout.num_bytes
    return {
        "num_codes": layout.num_codes,
        "weights_bytes": mirror,
        "num_deltas": num_deltas,
        "first_version_seconds": anchor_seconds,
        "delta_bytes": median(sizes),
        **stages,
        "publish_without_scan_and_network_seconds": median(found["encode"] + found["apply"] + found["digest"] for found in seconds),
        "publisher_peak_bytes": peak_bytes(),
        "publisher_peak_above_mirror_bytes": peak_bytes() - mirror,
    }


def _line_rate(store: Store) -> float:
    """Bytes a second of plain parallel reads of the anchor's parts, nothing checked and nothing written."""
    parts = [item for item in store.list(f"{keys.root(RUN)}anchors/") if item.key.endswith(".safetensors")][:24]
    started = time.monotonic()
    with ThreadPoolExecutor(8) as pool:
        num_bytes = sum(pool.map(lambda part: sum(len(chunk) for chunk in store.open_range(part.key, 0, part.num_bytes).chunks), parts))
    return num_bytes / (time.monotonic() - started)


def _update(store: Store, scratch: Path, num_deltas: int) -> dict[str, Any]:
    """A join half way up, as fast as this machine goes, then the update to the newest version in place."""
    document = read_run(store, RUN)
    head, _ = read_head(store, RUN, document.public_key)
    puller = Puller(store, document, scratch / "mac")
    started = time.monotonic()
    state = puller.build(head, num_deltas // 2)
    joined = time.monotonic()
    join_bytes = puller.bytes_downloaded
    staged = puller.stage(head, num_deltas // 2, str(state.verified_id))
    staged_at = time.monotonic()
    puller.apply(staged, state)
    applied = time.monotonic()
    puller.verify(staged, state)
    return {
        "loopback_join_seconds": joined - started,
        "loopback_join_bytes": join_bytes,
        "update_versions": num_deltas - num_deltas // 2,
        "update_bytes": staged.num_bytes,
        "update_stage_seconds": staged_at - joined,
        "update_changes": sum(hop.ref.num_changed for hop, _ in staged.deltas),
        "update_pause_seconds": applied - staged_at,
        "update_verify_seconds": time.monotonic() - applied,
        "joiner_peak_bytes": peak_bytes(),
        "joiner_peak_above_weights_bytes": peak_bytes() - puller.layout.num_bytes,
    }


if __name__ == "__main__":
    what, endpoint, name, scratch, num_deltas = sys.argv[1:]
    store = Store(Bucket(endpoint=endpoint, name=name, head_interval_seconds=0.0), CREDENTIALS, patience_seconds=600.0)
    part = {"publish": _publish, "update": _update}[what]
    print(json.dumps(part(store, Path(scratch), int(num_deltas))))
