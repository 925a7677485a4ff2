"""A Mac that joins: from nothing, and again with an old anchor on disk, each to its first sampled token.

Publisher aside, it is the real thing: the real S3 server behind a link of a stated rate, a process of its own a join, the
Mac's own weights, model and decoder. Clocks start before run.json is read and stop when a token is drawn; starting Python
and importing MLX is not in them. The model has the demo's architecture, once as it is and once widened until bytes count.
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from benchmarks.proxy import Faults, in_process
from benchmarks.servers import CREDENTIALS, bucket_store
from stoa.bucket.head import HeadWriter
from stoa.bucket.manifest import Signer
from stoa.bucket.run_document import claim_run, new_run, upload_model_files
from stoa.bucket.store import Store
from stoa.config.run import Bucket, Learning, RunConfig
from stoa.weights.layout import layout_of
from stoa.weights.sync import Publisher

if TYPE_CHECKING:
    from worker_mac.model import Model

POLICY: Final = Path(__file__).parents[1] / "environments" / "search" / "policy"
WIDE: Final[Mapping[str, object]] = {
    "hidden_size": 512,
    "intermediate_size": 2048,
    "moe_intermediate_size": 512,
    "num_attention_heads": 8,
    "num_experts": 16,
    "vocab_size": 32_768,
}
LINK: Final = Faults(link_rate=4e6, latency_seconds=0.02)
"""As narrow for the widened model as 6 Gbit/s are for 9 GB."""
NUM_DELTAS: Final = 7
SIGNER: Final = Signer.from_seed(bytes(32))
LEARNING_RATE: Final = 2e-5
NUM_PROMPT_TOKENS: Final = 32


@dataclass(frozen=True, slots=True)
class Join:
    """One join. `weights_seconds`: until verified weights are in memory; `token_seconds`: until the first token is sampled."""

    version: int
    num_bytes: int
    weights_seconds: float
    token_seconds: float
    peak_bytes: int
    verified: bool


def measure() -> dict[str, object]:
    """Cold join and re-join of the widened model, and of the demo's as it is."""
    wide, demo = _joins(WIDE), _joins({})
    return {
        "cold_join_seconds": wide["cold"].token_seconds,
        "cold_join_weights_seconds": wide["cold"].weights_seconds,
        "cold_join_line_rate_fraction": wide["cold"].num_bytes / LINK.link_rate / wide["cold"].token_seconds,
        "cold_join_weights_line_rate_fraction": wide["cold"].num_bytes / LINK.link_rate / wide["cold"].weights_seconds,
        "join_bytes": wide["cold"].num_bytes,
        "rejoin_seconds": wide["again"].token_seconds,
        "rejoin_weights_seconds": wide["again"].weights_seconds,
        "rejoin_bytes": wide["again"].num_bytes,
        "joins_verified": all(join.verified for join in (*wide.values(), *demo.values())),
        "join_link_bytes_per_second": LINK.link_rate,
        "join_link_latency_seconds": LINK.latency_seconds,
        "demo_cold_join_seconds": demo["cold"].token_seconds,
        "demo_join_bytes": demo["cold"].num_bytes,
        "demo_rejoin_seconds": demo["again"].token_seconds,
        "joins": {f"{size}_{name}": asdict(join) for size, found in (("wide", wide), ("demo", demo)) for name, join in found.items()},
    }


def _joins(changes: Mapping[str, object]) -> dict[str, Join]:
    with tempfile.TemporaryDirectory() as scratch, bucket_store() as store:
        folder = Path(scratch)
        _publish(store, folder, changes)
        with far(store, LINK) as endpoint:
            settings = store.settings.model_copy(update={"endpoint": endpoint})
            cold = join_apart(settings, "join", folder / "mac")
            for path in (folder / "mac").glob("deltas/*"):
                path.unlink()  # what a Mac has that left before they came
            return {"cold": cold, "again": join_apart(settings, "join", folder / "mac")}


def _publish(store: Store, folder: Path, changes: Mapping[str, object]) -> None:
    """An anchor and seven versions after it that drift."""
    model_config = {**json.loads((POLICY / "config.json").read_text(encoding="utf-8")), **changes}
    model = folder / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(model_config))
    layout = layout_of(model_config, "float32")
    config = RunConfig(run="join", learning=Learning(dtype="float32"))
    files = upload_model_files(store, "join", model)
    document = claim_run(store, new_run(config, SIGNER, layout_id=layout.layout_id, model_files=files), SIGNER)
    writer = HeadWriter(store, "join", SIGNER, owner="benchmark", interval_seconds=0.0)
    writer.acquire(1000)
    publisher = Publisher(store, document, SIGNER, hysteresis=0.02, anchor_part_bytes=8 << 20)
    chance = np.random.default_rng(0)
    masters = {
        spec.name: chance.standard_normal(spec.shape, np.float32) * np.float32(0.05) + np.float32("norm" in spec.name)
        for spec in layout.tensors
    }
    for version in range(NUM_DELTAS + 1):
        for spec in layout.tensors if version else ():
            if not spec.frozen:
                masters[spec.name] += chance.standard_normal(spec.shape, np.float32) * np.float32(LEARNING_RATE)
        prepared = publisher.prepare(masters.items(), step=4 * version, epoch=1000, version=version, anchor=not version, inline=True)
        names = {"manifest_key": prepared.manifest_key, "manifest_sha256": prepared.manifest_sha256}
        writer.swap(1000, version=version, **names, published_at=time.time())
        publisher.commit(prepared)
    publisher.close()


@contextmanager
def far(store: Store, link: Faults) -> Iterator[str]:
    """The endpoint of the bucket behind a link."""
    with in_process(store.settings.endpoint, link) as (_, endpoint):
        yield endpoint


def join_apart(bucket: Bucket, run: str, folder: Path) -> Join:
    """A join in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.pulse_join", bucket.endpoint, bucket.name, run, str(folder)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return Join(**json.loads(done.stdout.strip().rpartition("\n")[2]))


def join(store: Store, run: str, folder: Path) -> Join:
    """Join a run as a Mac does, and sample one token."""
    import mlx.core as mx

    from stoa.bucket.run_document import read_run
    from stoa.weights.history import manifest_of
    from worker_mac.versions import Versions

    mx.eval(mx.zeros(1))
    started = time.monotonic()
    document = read_run(store, run)
    config_file = next(file for file in document.model_files if file.name == "config.json")
    model_config: dict[str, Any] = json.loads(store.get(config_file.key, max_bytes=config_file.num_bytes).data)
    versions = Versions(store, document, model_config, folder)
    head = versions.head()
    if head is None:
        raise SystemExit(f"run {run} has no version")
    served, pulled = versions.newest(head, 0)
    weights_at = started + pulled.pull_seconds
    _sample(served.model)
    sampled_at = time.monotonic()
    found = store.meters.total().bytes_down
    verified = served.live.state.state_id() == manifest_of(store, document, head).state_id
    versions.close()
    return Join(served.version, found, weights_at - started, sampled_at - started, peak_bytes(), verified)


def _sample(model: "Model") -> None:
    """Feed a prompt and draw the token after it."""
    from metal.sizes import PAGE_TOKENS
    from worker_mac.decoder import Decoder
    from worker_mac.plan import Work

    num_pages = -(-NUM_PROMPT_TOKENS // PAGE_TOKENS)
    one, count = np.ones(1, np.int32), np.full(1, NUM_PROMPT_TOKENS, np.int32)
    tokens, tables = np.arange(NUM_PROMPT_TOKENS, dtype=np.int32), 1 + np.arange(num_pages, dtype=np.int32)[None]
    work = Work(np.zeros(1, np.intp), 0 * one, count, np.ones(1, np.bool_), tokens, tables, one)
    drawn = Decoder(model, 1 + num_pages, 2).step(work, np.full(1, 0.5, np.float32))
    if len(drawn.tokens) != 1:
        raise SystemExit("no token was sampled")


def peak_bytes() -> int:
    """Largest memory of this process so far."""
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


if __name__ == "__main__":
    endpoint, name, run, folder = sys.argv[1:]
    bucket = Bucket(endpoint=endpoint, name=name, head_interval_seconds=0.0)
    print(json.dumps(asdict(join(Store(bucket, CREDENTIALS, patience_seconds=600.0), run, Path(folder)))))
