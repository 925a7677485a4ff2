"""The real S3 server for benchmarks, alone, in a folder of its own, ended with the block."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cli.processes import Household
from cli.services import start_bucket
from stoa.bucket.store import Store
from stoa.config.load import Credentials
from stoa.config.run import Bucket

CREDENTIALS = Credentials("stoa", "stoa-on-loopback")


@contextmanager
def bucket_store(folder: Path | None = None) -> Iterator[Store]:
    """A store on an empty bucket of a fresh server; its data lie under `folder` (default: a temporary one)."""
    with tempfile.TemporaryDirectory(dir=folder) as scratch, Household(Path(scratch)) as house:
        endpoint = start_bucket(house, Path(scratch), Path(scratch) / "logs", CREDENTIALS)
        store = Store(Bucket(endpoint=endpoint, name="benchmark", head_interval_seconds=0.0), CREDENTIALS, patience_seconds=60.0)
        store.ensure_bucket()
        yield store
