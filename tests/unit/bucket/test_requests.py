"""Requests as R2 sees them: over TLS, before a real server, by R2's rules that the local server does not have."""

import datetime
import hashlib
import ipaddress
import random
import ssl
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from benchmarks.proxy import FaultProxy, Seen, fault_proxy, reply
from stoa.bucket import download, keys
from stoa.bucket.head import HeadWriter
from stoa.bucket.store import Store
from stoa.contracts.errors import ServiceUnavailableError
from stoa.weights.sync import Puller
from tests.servers import CREDENTIALS
from tests.unit.weights.small_run import SmallRun, drift


def certificate(folder: Path) -> tuple[ssl.SSLContext, Path]:
    """A server's context for 127.0.0.1, and the file that a client must trust."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "127.0.0.1")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(hours=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    public, private = folder / "public.pem", folder / "private.pem"
    public.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    private.write_bytes(key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(public, private)
    return context, public


@pytest.fixture
def far(store: Store, tmp_path, monkeypatch) -> Iterator[tuple[Store, FaultProxy]]:
    """The bucket as it looks over TLS, and the link before it."""
    context, trusted = certificate(tmp_path)
    monkeypatch.setenv("AWS_CA_BUNDLE", str(trusted))
    with fault_proxy(store.settings.endpoint, tls=context) as (proxy, endpoint):
        assert endpoint.startswith("https://")
        yield Store(store.settings.model_copy(update={"endpoint": endpoint}), CREDENTIALS, patience_seconds=20.0), proxy


def r2_would_refuse(seen: Seen) -> str:
    """What R2 answers an error to, of the things a client of S3 may send."""
    headers = seen.headers
    if "aws-chunked" in headers.get("content-encoding", "") or "x-amz-trailer" in headers:
        return "checksum trailer"
    if headers.get("x-amz-content-sha256", "").startswith("STREAMING"):
        return "streaming signature"
    if "chunked" in headers.get("transfer-encoding", ""):
        return "no length"
    for name in ("x-amz-tagging", "x-amz-acl", "x-amz-object-lock-mode", "x-amz-checksum-mode", "x-amz-server-side-encryption"):
        if name in headers:
            return name
    query = seen.target.partition("?")[2]
    if "uploads" in query or "uploadId" in query:
        return "multipart, whose parts must be equal"
    if seen.num_body_bytes >= 5 << 30:
        return "5 GiB in one PUT"
    return ""


def test_a_whole_publish_and_pull_sends_nothing_that_r2_refuses(far, tmp_path):
    store, proxy = far
    run = SmallRun(store, tmp_path / "trainer")
    run.publish_many(3, anchor_every=2)
    state = Puller(store, run.document, tmp_path / "mac").join(run.head)
    assert run.publisher.mirror is not None
    assert state.state_id() == run.publisher.mirror.state_id()
    list(store.list(""))
    store.delete([keys.run_json("small")])
    assert [(seen.method, seen.target, why) for seen in proxy.seen if (why := r2_would_refuse(seen))] == []
    writes = [seen for seen in proxy.seen if seen.method == "PUT"]
    assert len(writes) > 10
    for seen in writes:
        # every write has a condition, its length, and a sha256 of our own that readers check
        assert seen.headers.get("if-none-match") == "*" or "if-match" in seen.headers
        assert int(seen.headers["content-length"]) == seen.num_body_bytes > 0
        assert len(seen.headers["x-amz-meta-sha256"]) == 64
        assert "if-match" not in seen.headers or seen.target.endswith("/HEAD.json")
    assert {seen.target.rpartition("/")[2] for seen in writes if "if-match" in seen.headers} == {"HEAD.json"}


def test_ranges_are_small_and_bound_to_one_object(far, tmp_path):
    store, proxy = far
    data = random.Random(2).randbytes(20 << 20)
    store.create("k/big", data)
    etag = store._client.head_object(Bucket=store.settings.name, Key="k/big")["ETag"]
    first = len(proxy.seen)
    download.fetch(store, "k/big", tmp_path / "big", num_bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
    gets = [seen for seen in proxy.seen[first:] if seen.method == "GET"]
    spans = [tuple(map(int, seen.headers["range"].removeprefix("bytes=").split("-"))) for seen in gets]
    assert all(end - start < download.RANGE_BYTES for start, end in spans)
    assert sorted(start for start, _ in spans) == [0, *sorted(end + 1 for _, end in spans)[:-1]]
    assert all(seen.headers.get("if-match", etag) == etag for seen in gets)
    assert sum("if-match" not in seen.headers for seen in gets) <= download.NUM_RANGES
    assert [why for seen in proxy.seen if (why := r2_would_refuse(seen))] == []


class OneWriteASecond:
    """R2's rule for one key: 429 for a write within a second of the one before."""

    def __init__(self, key: str) -> None:
        self.key = key
        self.taken: list[float] = []
        self.refused = 0

    def __call__(self, seen: Seen) -> bytes | None:
        if seen.method != "PUT" or not seen.target.endswith(self.key):
            return None
        if self.taken and seen.at - self.taken[-1] < 1.0:
            self.refused += 1
            return reply(429, "TooManyRequests")
        self.taken.append(seen.at)
        return None


def test_one_writer_of_head_never_meets_the_limit(far, tmp_path):
    store, proxy = far
    run = SmallRun(store, tmp_path / "trainer")
    time.sleep(1.0)
    proxy.answer = limit = OneWriteASecond("HEAD.json")
    run.writer = HeadWriter(store, "small", run.signer, owner="trainer", interval_seconds=1.0)
    run.head = run.writer.acquire(2000)
    for step in range(1, 4):
        run.head = run.writer.swap(2000, step=step)
    assert limit.refused == 0
    assert len(limit.taken) == 4


def test_two_writers_of_head_under_the_limit_both_get_through(far, tmp_path):
    store, proxy = far
    run = SmallRun(store, tmp_path / "trainer")
    run.publish()
    control = HeadWriter(store, "small", run.signer, owner="control", interval_seconds=1.0)
    trainer = HeadWriter(store, "small", run.signer, owner="trainer", interval_seconds=1.0)
    proxy.answer = limit = OneWriteASecond("HEAD.json")
    thread = threading.Thread(target=lambda: [control.set_state(state, state) for state in ("paused", "running")])
    thread.start()
    for step in range(1, 4):
        trainer.swap(1000, step=step)
    thread.join(40)
    head, _ = trainer.read()
    assert (head.step, head.state, head.version) == (3, "running", 0)
    assert all(later - sooner >= 1.0 for sooner, later in zip(limit.taken, limit.taken[1:], strict=False))


def test_lost_reply_of_a_write_over_tls_is_a_success(far, tmp_path):
    store, proxy = far
    run = SmallRun(store, tmp_path / "trainer")
    run.publish()
    run.weights = drift(run.weights, 1)
    prepared = run.publisher.prepare(run.weights.items(), step=4, epoch=1000, version=1, anchor=False)
    lost = [True]

    def lose(seen: Seen) -> bytes | None:
        if seen.method == "PUT" and seen.target.endswith("HEAD.json") and lost.pop() if lost else False:
            # the server takes the write, by another way; its reply never comes
            near = Store(store.settings.model_copy(update={"endpoint": proxy.server}), CREDENTIALS)
            HeadWriter(near, "small", run.signer, owner="trainer", interval_seconds=0.0).swap(
                1000, version=1, manifest_key=prepared.manifest_key, manifest_sha256=prepared.manifest_sha256
            )
            return b""
        return None

    proxy.answer = lose
    head = run.writer.swap(1000, version=1, manifest_key=prepared.manifest_key, manifest_sha256=prepared.manifest_sha256)
    assert (head.version, head.manifest_sha256) == (1, prepared.manifest_sha256)


def test_server_whose_certificate_is_not_trusted_is_a_typed_error(store: Store, tmp_path):
    context, _ = certificate(tmp_path)
    with fault_proxy(store.settings.endpoint, tls=context) as (_, endpoint), pytest.raises(ServiceUnavailableError):
        Store(store.settings.model_copy(update={"endpoint": endpoint}), CREDENTIALS).check()
