"""Large objects on their way to a real server: a server that pauses, refuses or hangs up costs time, never a byte."""

import random
import time

import pytest

from benchmarks.proxy import Faults, Seen, fault_proxy, reply
from stoa.bucket.store import LARGE_BYTES, Store
from stoa.contracts.errors import AccessDeniedError, ServiceUnavailableError
from tests.servers import CREDENTIALS

DATA = random.Random(11).randbytes(LARGE_BYTES + 1_000_003)


def through(store: Store, endpoint: str, patience_seconds: float = 0.0) -> Store:
    return Store(store.settings.model_copy(update={"endpoint": endpoint}), CREDENTIALS, patience_seconds=patience_seconds)


def test_server_that_pauses_in_the_middle_of_a_body_is_waited_for(store: Store):
    """The time to connect, 3 s elsewhere, is also the longest silence of a server that is sent a body."""
    body = 3 * DATA  # more than the buffers of two sockets hold
    with fault_proxy(store.settings.endpoint, Faults(pause_after_bytes=4e6, pause_seconds=5.0)) as (proxy, endpoint):
        far, told = through(store, endpoint), []
        far.on_retry = told.append
        far.create("k/big", body)
        assert [seen.method for seen in proxy.seen] == ["PUT"]
        assert any(f"of {len(body)} bytes" in reason and "k/big" in reason for reason in told)
    assert store.get("k/big", max_bytes=len(body)).data == body


def test_body_is_sent_whole_again_after_refusals_that_may_pass(store: Store):
    refusals = [4]  # more than boto3 tries by itself

    def busy(seen: Seen) -> bytes | None:
        refusals[0] -= 1
        return reply(503, "SlowDown") if refusals[0] >= 0 else None

    with fault_proxy(store.settings.endpoint) as (proxy, endpoint):
        proxy.answer = busy
        far = through(store, endpoint, patience_seconds=30.0)
        far.create("k/big", DATA)
        assert len(proxy.seen) == 5
    assert store.get("k/big", max_bytes=len(DATA)).data == DATA


def test_server_that_is_gone_is_told_with_the_object_and_its_size(store: Store):
    with fault_proxy(store.settings.endpoint) as (proxy, endpoint):
        proxy.answer = lambda seen: b""
        with pytest.raises(ServiceUnavailableError, match=f"{len(DATA)} bytes were on their way to k/big"):
            through(store, endpoint).create("k/big", DATA)
        proxy.answer = lambda seen: reply(403, "AccessDenied")
        with pytest.raises(AccessDeniedError):
            through(store, endpoint).create("k/big", DATA)
    assert not store.exists("k/big")


def test_who_watches_may_end_a_large_write(store: Store):
    def stop(reason: str) -> None:
        raise ServiceUnavailableError("asked to end")

    with fault_proxy(store.settings.endpoint, Faults(upload_rate=3e6)) as (_, endpoint):
        far = through(store, endpoint, patience_seconds=60.0)
        far.on_retry = stop
        started = time.monotonic()
        with pytest.raises(ServiceUnavailableError, match="asked to end"):
            far.create("k/big", 3 * DATA)  # more than the buffers on the way take in at once
        assert time.monotonic() - started < 40
    assert not store.exists("k/big")
