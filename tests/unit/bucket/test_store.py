"""The store over a real S3 server: conditions, digests, limits, outages, lost replies, and what goes over https."""

import threading
import time

import pytest
from botocore.awsrequest import AWSResponse

from benchmarks.proxy import fault_proxy
from stoa.bucket.store import Store, kind_of
from stoa.config.load import Credentials
from stoa.config.run import Bucket
from stoa.contracts.errors import (
    AccessDeniedError,
    BucketError,
    ConfigError,
    DigestError,
    ObjectExistsError,
    ObjectMissingError,
    ObjectTooLargeError,
    PreconditionError,
    ServiceUnavailableError,
    SetupMissingError,
    StoaError,
)
from tests.servers import CREDENTIALS, bucket_server, free_ports
from tests.unit.bucket.flaky import flaky_proxy


def through(proxy, store: Store) -> Store:
    """The same bucket by way of a proxy."""
    return Store(store.settings.model_copy(update={"endpoint": proxy.endpoint}), CREDENTIALS)


def test_object_comes_back_with_its_etag(store: Store):
    etag = store.create("runs/r/deltas/a", b"hello")
    found = store.get("runs/r/deltas/a", max_bytes=5)
    assert (found.data, found.etag) == (b"hello", etag)


def test_create_again_with_the_same_bytes_succeeds_and_with_others_is_refused(store: Store):
    first = store.create("k/a", b"one")
    assert store.create("k/a", memoryview(b"one")) == first
    with pytest.raises(ObjectExistsError):
        store.create("k/a", b"two")
    with pytest.raises(ObjectExistsError):
        store.create("k/a", b"")
    assert store.get("k/a", max_bytes=9).data == b"one"


def test_missing_object_is_a_typed_error(store: Store):
    with pytest.raises(ObjectMissingError, match="k/none"):
        store.get("k/none", max_bytes=9)
    with pytest.raises(ObjectMissingError):
        store.open_range("k/none", 0, 4)
    assert not store.exists("k/none")


def test_object_beyond_the_limit_is_not_read(store: Store):
    store.create("k/big", b"x" * 1000)
    with pytest.raises(ObjectTooLargeError, match="1000"):
        store.get("k/big", max_bytes=999)


def test_object_that_does_not_have_its_own_sha256_is_refused(store: Store):
    metadata = {"sha256": "0" * 64}
    store._client.put_object(Bucket=store.settings.name, Key="k/bad", Body=b"tampered", Metadata=metadata)
    with pytest.raises(DigestError):
        store.get("k/bad", max_bytes=99)


def test_server_refuses_bytes_that_changed_on_the_way(store: Store):
    import base64
    import hashlib

    checksum = base64.b64encode(hashlib.sha256(b"meant").digest()).decode()
    with pytest.raises(StoaError, match="BadDigest"):
        store._put("k/x", {"Body": b"arrived", "ChecksumSHA256": checksum})


def test_poll_sees_a_change_once(store: Store):
    etag = store.swap("k/head", b"1", None)
    assert store.get_if_changed("k/head", etag, max_bytes=9) is None
    store.swap("k/head", b"2", etag)
    found = store.get_if_changed("k/head", etag, max_bytes=9)
    assert found is not None
    assert found.data == b"2"
    assert store.get_if_changed("k/head", "", max_bytes=9) == found


def test_swap_with_an_old_etag_or_over_something_loses(store: Store):
    first = store.swap("k/head", b"1", None)
    with pytest.raises(PreconditionError):
        store.swap("k/head", b"x", None)
    store.swap("k/head", b"2", first)
    with pytest.raises(PreconditionError):
        store.swap("k/head", b"3", first)
    with pytest.raises(PreconditionError):
        store.swap("k/none", b"3", first)
    assert store.get("k/head", max_bytes=9).data == b"2"


def test_of_racing_swaps_one_wins(store: Store):
    for round_number in range(4):
        key = f"k/race{round_number}"
        etag = store.swap(key, b"start", None)
        won: list[int] = []

        def race(number: int, key: str = key, etag: str = etag, won: list[int] = won) -> None:
            try:
                store.swap(key, b"writer %d" % number, etag)
                won.append(number)
            except PreconditionError:
                pass

        threads = [threading.Thread(target=race, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(won) == 1
        assert store.get(key, max_bytes=99).data == b"writer %d" % won[0]


def test_list_goes_over_pages_in_order_and_after_a_key(store: Store, monkeypatch: pytest.MonkeyPatch):
    for number in range(7):
        store.create(f"p/{number}", b"x" * number)
    store.create("q/0", b"")
    found = list(store.list("p/"))
    assert [(item.key, item.num_bytes) for item in found] == [(f"p/{n}", n) for n in range(7)]
    assert abs(found[0].modified_at - time.time()) < 300
    assert [item.key for item in store.list("p/", start_after="p/4")] == ["p/5", "p/6"]


def test_more_objects_than_a_page_are_all_listed(store: Store):
    pages: list[int] = []
    store._client.meta.events.register(
        "before-parameter-build.s3.ListObjectsV2", lambda params, **_: (params.__setitem__("MaxKeys", 3), pages.append(1))
    )
    for number in range(8):
        store.create(f"p/{number}", b"")
    assert [item.key for item in store.list("p/")] == [f"p/{n}" for n in range(8)]
    assert len(pages) == 3


def test_deleted_objects_are_gone_and_deleting_twice_is_no_error(store: Store):
    store.create("k/a", b"1")
    store.create("k/b", b"2")
    store.delete(["k/a", "k/none"])
    store.delete(["k/a"])
    store.delete([])
    assert [item.key for item in store.list("k/")] == ["k/b"]


def test_bucket_that_is_not_there_names_the_setup_command(bucket_server):
    absent = bucket_server.store("absent-bucket")
    for call in (absent.check, lambda: absent.get("k", max_bytes=1), lambda: absent.create("k", b""), lambda: list(absent.list(""))):
        with pytest.raises(SetupMissingError, match="absent-bucket") as caught:
            call()
        assert "stoa setup" in caught.value.hint
    absent.ensure_bucket()
    absent.ensure_bucket()
    absent.check()


@pytest.mark.parametrize("credentials", [Credentials("stoa", "wrong"), Credentials("nobody", "stoa-on-loopback")])
def test_wrong_credentials_name_the_variables(store: Store, bucket_server, credentials: Credentials):
    denied = bucket_server.store(store.settings.name, credentials=credentials)
    for call in (denied.check, lambda: denied.get("k", max_bytes=1), lambda: denied.create("k", b""), denied.ensure_bucket):
        with pytest.raises(AccessDeniedError) as caught:
            call()
        assert "STOA_BUCKET_SECRET" in caught.value.hint


def test_server_that_is_not_there_names_the_endpoint():
    endpoint = f"http://127.0.0.1:{free_ports(1)[0]}"
    with pytest.raises(ServiceUnavailableError, match=endpoint) as caught:
        Store(Bucket(endpoint=endpoint), CREDENTIALS).check()
    assert "STOA_BUCKET_ENDPOINT" in caught.value.hint


def test_endpoint_that_is_no_url_is_a_config_error():
    with pytest.raises(ConfigError, match="endpoint"):
        Store(Bucket().model_copy(update={"endpoint": "not a url"}), CREDENTIALS)


def test_outage_is_ridden_out_within_the_patience_and_reported(tmp_path):
    ports = free_ports(5, reserve_offset=10000)
    with bucket_server(tmp_path, ports=ports) as server:
        store = server.store("outage", patience_seconds=40)
        store.ensure_bucket()
        store.create("k/a", b"kept")
    reasons: list[str] = []
    store.on_retry = reasons.append
    found: list[bytes] = []
    reader = threading.Thread(target=lambda: found.append(store.get("k/a", max_bytes=9).data))
    reader.start()
    time.sleep(1.0)
    with bucket_server(tmp_path, ports=ports):
        reader.join(30)
    assert found == [b"kept"]
    assert reasons
    assert "waiting for the bucket" in reasons[0]


def test_what_on_retry_raises_ends_the_wait():
    store = Store(Bucket(endpoint=f"http://127.0.0.1:{free_ports(1)[0]}"), CREDENTIALS, patience_seconds=60)

    def stop(reason: str) -> None:
        raise ServiceUnavailableError("asked to end")

    store.on_retry = stop
    started = time.monotonic()
    with pytest.raises(ServiceUnavailableError, match="asked to end"):
        store.check()
    assert time.monotonic() - started < 20


def test_create_whose_reply_is_lost_succeeds(store: Store):
    with flaky_proxy(store.settings.endpoint) as proxy:
        other = through(proxy, store)
        proxy.swallow = 1
        other.create("k/lost", b"written once")
        assert proxy.swallow == 0
    assert store.get("k/lost", max_bytes=99).data == b"written once"


def test_range_that_breaks_gives_its_first_bytes_and_then_an_error_that_may_pass(store: Store):
    data = bytes(range(256)) * 8192
    store.create("k/long", data)
    with flaky_proxy(store.settings.endpoint) as proxy:
        other = Store(store.settings.model_copy(update={"endpoint": proxy.endpoint}), CREDENTIALS)
        proxy.cut_after_bytes, proxy.num_cuts = 600_000, 1
        held = bytearray()
        with pytest.raises(ServiceUnavailableError):
            for chunk in other.open_range("k/long", 1000, len(data) - 1000).chunks:
                held.extend(chunk)
        assert 500_000 < len(held) < 600_000
        assert held == data[1000 : 1000 + len(held)]
        rest = other.open_range("k/long", 1000 + len(held), len(data) - 1000 - len(held)).chunks
        assert bytes(held) + b"".join(rest) == data[1000:]


def test_range_beyond_the_end_is_a_digest_error(store: Store):
    store.create("k/short", b"12345")
    assert b"".join(store.open_range("k/short", 1, 3).chunks) == b"234"
    for start, num_bytes in ((0, 6), (3, 3), (5, 1), (9, 2)):
        with pytest.raises(DigestError):
            store.open_range("k/short", start, num_bytes)


def test_range_of_an_object_that_was_replaced_is_refused(store: Store):
    etag = store.swap("k/x", b"12345", None)
    store.swap("k/x", b"67890", etag)
    with pytest.raises(PreconditionError):
        store.open_range("k/x", 0, 3, etag=etag)


def test_meters_count_bytes_and_requests_by_kind(store: Store):
    store.create("runs/r/groups/v1/a", b"12345")
    store.create("runs/r/deltas/a", b"123")
    store.get("runs/r/deltas/a", max_bytes=9)
    assert list(store.open_range("runs/r/deltas/a", 0, 2).chunks) == [b"12"]
    kinds = store.meters.by_kind()
    assert (kinds["groups"].bytes_up, kinds["groups"].requests_up) == (5, 1)
    assert (kinds["deltas"].bytes_up, kinds["deltas"].bytes_down, kinds["deltas"].requests_down) == (3, 5, 2)
    assert store.meters.total().bytes_up == 8


@pytest.mark.parametrize(("key", "kind"), [("runs/r/HEAD.json", "HEAD.json"), ("runs/r/evals/v1/x", "evals"), ("probe", "other")])
def test_kind_of_an_object_is_the_part_after_its_run(key: str, kind: str):
    assert kind_of(key) == kind


def test_requests_over_https_carry_no_checksum_trailer_that_r2_refuses():
    store = Store(Bucket(endpoint="https://bucket.invalid"), CREDENTIALS)
    sent: list[dict[str, str]] = []

    class Body:
        def stream(self, **_: object) -> list[bytes]:
            return [b""]

    def answer(request, **_: object) -> AWSResponse:
        sent.append({name.lower(): str(value) for name, value in request.headers.items()})
        return AWSResponse(request.url, 200, {"ETag": '"e"'}, Body())

    store._client.meta.events.register("before-send.s3.PutObject", answer)
    store.create("k/a", b"data")
    store.swap("k/b", b"data", None)
    created, swapped = sent
    for headers in sent:
        assert headers["if-none-match"].strip("b'") == "*"
        assert "x-amz-trailer" not in headers
        assert "aws-chunked" not in headers.get("content-encoding", "")
        assert "x-amz-checksum-crc32" not in headers
        assert "STREAMING" not in headers["x-amz-content-sha256"]
    assert "x-amz-checksum-sha256" in created
    assert "x-amz-checksum-sha256" not in swapped


@pytest.mark.parametrize(
    ("status", "code", "error", "told"),
    [
        (401, "Unauthorized", AccessDeniedError, "Unauthorized"),
        (403, "RequestTimeTooSkewed", AccessDeniedError, "clock"),
        (404, "NoSuchBucket", SetupMissingError, "no bucket"),
        (404, "NoSuchKey", PreconditionError, "changed"),
        (409, "ConditionalRequestConflict", PreconditionError, "changed"),
        (412, "PreconditionFailed", PreconditionError, "changed"),
        (429, "TooManyRequests", ServiceUnavailableError, "does not answer"),
        (503, "SlowDown", ServiceUnavailableError, "does not answer"),
        (400, "InvalidPart", BucketError, "InvalidPart"),
    ],
)
def test_refusals_of_a_conditional_write_become_typed_errors(status: int, code: str, error: type[Exception], told: str):
    store = Store(Bucket(endpoint="http://bucket.invalid"), CREDENTIALS)

    class Body:
        def stream(self, **_: object) -> list[bytes]:
            return [f"<Error><Code>{code}</Code><Message>no</Message></Error>".encode()]

    store._client.meta.events.register("before-send.s3.PutObject", lambda request, **_: AWSResponse(request.url, status, {}, Body()))
    with pytest.raises(error, match=told) as caught:
        store.swap("k/a", b"data", '"etag"')
    assert type(caught.value) is error


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 15\r\nContent-Type: text/html\r\n\r\n<html>log in</h",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
        b"HTTP/1.1 302 Found\r\nLocation: http://login.invalid/\r\nContent-Length: 0\r\n\r\n",
    ],
    ids=["page", "page in chunks", "redirect"],
)
def test_login_page_in_place_of_the_bucket_may_pass(store: Store, answer: bytes):
    store.create("k/d", b"12345")
    with fault_proxy(store.settings.endpoint) as (proxy, endpoint):
        far = Store(store.settings.model_copy(update={"endpoint": endpoint}), CREDENTIALS)
        proxy.answer = lambda seen: answer
        with pytest.raises(ServiceUnavailableError):
            far.get_if_changed("k/d", "", max_bytes=100)
        proxy.answer = None
        assert far.get("k/d", max_bytes=100).data == b"12345"
