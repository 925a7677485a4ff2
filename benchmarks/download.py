"""How much of a bad link our download uses, and how much it fetches twice, beside stock boto3's `download_file`.

    python -m benchmarks.download [--json] [--mib 192]

The real S3 server stands behind a link of 16 MB/s that lets one connection have 4 MB/s, answers 20 ms late and cuts
connections after 24 MB on average; once more with every fifth cut a silence instead. Line rate is the link's. The same
link without a fault, read by eight bare connections, shows what this machine can carry while it is measured.
"""

import argparse
import hashlib
import json
import random
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.proxy import Faults, in_process
from benchmarks.servers import CREDENTIALS, bucket_store
from stoa.bucket.download import STALL_SECONDS, fetch
from stoa.bucket.store import Store
from stoa.bucket.transfer import Wanted

LINK = Faults(connection_rate=4e6, link_rate=16e6, latency_seconds=0.02, reset_every_bytes=24e6, seed=7)
KEY = "download/object"
STALLS = replace(LINK, stall_fraction=0.2)


@dataclass(frozen=True, slots=True)
class Trial:
    """One download over the link. `redownloaded_fraction`: bytes the link carried beyond the objects' own, over these."""

    whole: bool
    seconds: float
    line_rate_fraction: float
    redownloaded_fraction: float
    num_resets: int
    num_stalls: int
    link_cpu_fraction: float
    """Of one core: what the link itself took of this machine."""
    error: str = ""


def ours(store: Store, wanted: Wanted) -> None:
    """What a Mac does with each part of an anchor."""
    fetch(store, wanted.key, wanted.path, num_bytes=wanted.num_bytes, sha256=wanted.sha256)


def stock(store: Store, wanted: Wanted) -> None:
    """boto3 as it comes: ten threads, ranges of 8 MiB, its own retries."""
    _client(store).download_file(store.settings.name, wanted.key, str(wanted.path))


def presigned(store: Store, key: str) -> str:
    """A URL that anyone may read `key` by."""
    return _client(store).generate_presigned_url("get_object", Params={"Bucket": store.settings.name, "Key": key})


def _client(store: Store) -> Any:
    import boto3

    return boto3.client(
        "s3",
        endpoint_url=store.settings.endpoint,
        region_name=store.settings.region,
        aws_access_key_id=CREDENTIALS.key,
        aws_secret_access_key=CREDENTIALS.secret,
    )


def bare(store: Store, wanted: Wanted) -> None:
    """Eight connections that read an eighth each: no retry, no check. The most a link without faults gives."""
    url = presigned(store, wanted.key)
    size = -(-wanted.num_bytes // 8)

    def one(start: int) -> bytes:
        span = f"bytes={start}-{min(start + size, wanted.num_bytes) - 1}"
        with urllib.request.urlopen(urllib.request.Request(url, headers={"Range": span}), timeout=60) as reply:
            return reply.read()

    with ThreadPoolExecutor(8) as pool, wanted.path.open("wb") as file:
        for data in pool.map(one, range(0, wanted.num_bytes, size)):
            file.write(data)


def trial(store: Store, faults: Faults, data: bytes, how: Callable[[Store, Wanted], None]) -> Trial:
    """One download over a fresh link with these faults."""
    with tempfile.TemporaryDirectory() as folder, in_process(store.settings.endpoint, faults) as (counts, endpoint):
        far = Store(store.settings.model_copy(update={"endpoint": endpoint}), CREDENTIALS, patience_seconds=60.0)
        wanted = Wanted(KEY, Path(folder) / "object", len(data), hashlib.sha256(data).hexdigest())
        started, error = time.monotonic(), ""
        try:
            how(far, wanted)
        except Exception as problem:  # the baseline may fail, and that is a result
            if how is ours:
                raise
            error = type(problem).__name__
        seconds = time.monotonic() - started
        whole = not error and wanted.path.read_bytes() == data
        seen = counts()
    return Trial(
        whole,
        round(seconds, 3),
        round(len(data) / seconds / faults.link_rate, 4) if whole else 0.0,
        round(seen.bytes_down / len(data) - 1, 4),
        seen.num_resets,
        seen.num_stalls,
        round(seen.cpu_seconds / seconds, 3),
        error,
    )


def measure(mib: int) -> dict[str, object]:
    """All four trials."""
    data = random.Random(3).randbytes(mib << 20)
    with bucket_store() as store:
        store.create(KEY, data)
        attainable = trial(store, replace(LINK, reset_every_bytes=0.0), data, bare)
        resets, stalls = trial(store, LINK, data, ours), trial(store, STALLS, data, ours)
        boto, boto_stalls = trial(store, LINK, data, stock), trial(store, STALLS, data, stock)
    return {
        "line_rate_fraction": resets.line_rate_fraction,
        "line_rate_fraction_with_stalls": stalls.line_rate_fraction,
        "redownloaded_fraction": max(resets.redownloaded_fraction, stalls.redownloaded_fraction),
        "boto3_line_rate_fraction": boto.line_rate_fraction,
        "boto3_line_rate_fraction_with_stalls": boto_stalls.line_rate_fraction,
        "boto3_redownloaded_fraction": max(boto.redownloaded_fraction, boto_stalls.redownloaded_fraction),
        "link_attainable_fraction": attainable.line_rate_fraction,
        "link_cpu_fraction": max(resets.link_cpu_fraction, stalls.link_cpu_fraction),
        "num_bytes": len(data),
        "stall_seconds": STALL_SECONDS,
        "link": asdict(STALLS),
        "trials": {
            "resets": asdict(resets),
            "stalls": asdict(stalls),
            "boto3_resets": asdict(boto),
            "boto3_stalls": asdict(boto_stalls),
        },
    }


def main() -> None:
    """Print the numbers: JSON to standard output, or a few lines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--mib", type=int, default=192, help="size of the download")
    arguments = parser.parse_args()
    found = measure(arguments.mib)
    if arguments.json:
        print(json.dumps(found, indent=2))
        return
    for name, value in found.items():
        if isinstance(value, int | float):
            print(f"{name:40} {value}", file=sys.stdout)


if __name__ == "__main__":
    main()
