"""The bucket as this project uses it: create-only writes, one compare-and-swap, bounded checked reads, byte meters.

The only importer of boto3. It knows requests, not documents: keys are `keys.py`'s, HEAD's protocol is `head.py`'s. It
assumes nothing of the server beyond conditional PUTs and strong consistency, and keeps R2's rules (sha256 on every
object, no multipart). A Store may be used from any thread; make one a process.
"""

import base64
import hashlib
import io
import random
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from boto3.session import Session
from botocore.config import Config
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    HTTPClientError,
    IncompleteReadError,
    NoCredentialsError,
)
from botocore.exceptions import ConnectionError as NoConnectionError

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

SMALL_BYTES: Final = 1 << 20
"""Limit for JSON documents."""
_Answer = TypeVar("_Answer")
_CHUNK_BYTES: Final = 64 * 1024
"""Read at a time from a range: what is lost when the connection breaks inside it."""
LARGE_BYTES: Final = 8 << 20
"""From here on a write may take long: it is told of on its way, and the server gets more time."""
_SEND_STALL_SECONDS: Final = 20.0
"""How long the server may take in nothing of a large body."""
_STORE_SECONDS: Final = 120.0
"""How long it may then take to put it away."""
_TELL_SECONDS: Final = 2.0
_SHA256 = "sha256"
_SETUP_HINT = "run `stoa setup`, or set STOA_BUCKET_NAME to a bucket that is there"
_ACCESS_HINT = "set STOA_BUCKET_KEY and STOA_BUCKET_SECRET to a key that may use this bucket"
_PORTAL_HINT = "something on the way answers for the bucket"
_ENDPOINT_HINT = "start the bucket (`stoa services` on this machine), or set STOA_BUCKET_ENDPOINT"


@dataclass(frozen=True, slots=True)
class Stored:
    """An object as read. `etag` is only good for a later conditional request."""

    data: bytes
    etag: str
    metadata: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class RangeReply:
    """The reply to a ranged read. `chunks` ends with the range or raises what broke it; close it to end early.

    object_bytes: size of the whole object; -1 if the server does not say.
    """

    etag: str
    chunks: Generator[bytes, None, None]
    object_bytes: int = -1


@dataclass(frozen=True, slots=True)
class Listed:
    """An object as listed. `modified_at` is Unix seconds."""

    key: str
    num_bytes: int
    modified_at: float


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes and requests of one kind of object, as seen by this process."""

    bytes_up: int = 0
    bytes_down: int = 0
    requests_up: int = 0
    requests_down: int = 0


class Meters:
    """Counts bytes and requests by kind of object (HEAD, manifests, deltas, groups, ...). Safe from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kinds: dict[str, Traffic] = {}

    def add(self, kind: str, *, up: int = -1, down: int = -1, num_requests: int = 1) -> None:
        """Count requests with this many bytes of payload in all; -1 means not this direction."""
        with self._lock:
            old = self._kinds.get(kind, Traffic())
            self._kinds[kind] = Traffic(
                old.bytes_up + max(up, 0),
                old.bytes_down + max(down, 0),
                old.requests_up + (up >= 0) * num_requests,
                old.requests_down + (down >= 0) * num_requests,
            )

    def by_kind(self) -> Mapping[str, Traffic]:
        """A copy of the counts so far."""
        with self._lock:
            return dict(self._kinds)

    def total(self) -> Traffic:
        """The sum over kinds."""
        parts = self.by_kind().values()
        return Traffic(
            sum(p.bytes_up for p in parts),
            sum(p.bytes_down for p in parts),
            sum(p.requests_up for p in parts),
            sum(p.requests_down for p in parts),
        )


class Store:
    """One bucket. `patience_seconds` is how long an outage is ridden out inside a call.

    `on_retry` (if set) is called with a short reason before each wait and while large objects are on their way, so that a
    heartbeat can go on; what it raises ends the call.
    """

    def __init__(self, settings: Bucket, credentials: Credentials, *, patience_seconds: float = 0.0) -> None:
        self.settings = settings
        self.patience_seconds = patience_seconds
        self.on_retry: Callable[[str], None] | None = None
        self.meters = Meters()
        self._config = Config(
            signature_version="s3v4",
            # R2 refuses the checksum trailers that are sent by default over https.
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            s3={"addressing_style": "path"},
            retries={"mode": "standard", "total_max_attempts": 3},
            connect_timeout=3,
            read_timeout=20,
            max_pool_connections=24,
        )
        self._credentials = credentials
        self._client = self._new_client(self._config)
        self._clients_lock = threading.Lock()
        self._clients: dict[tuple[float, float, int], Any] = {}

    def _new_client(self, config: Config) -> Any:
        try:
            return Session().client(
                "s3",
                endpoint_url=self.settings.endpoint,
                region_name=self.settings.region,
                aws_access_key_id=self._credentials.key,
                aws_secret_access_key=self._credentials.secret,
                aws_session_token=self._credentials.session or None,
                config=config,
            )
        except ValueError as error:
            raise ConfigError(
                f"bucket.endpoint is {self.settings.endpoint!r}: {error}", hint="for example http://127.0.0.1:8333"
            ) from error

    def _client_of(self, connect_seconds: float, read_seconds: float, num_tries: int) -> Any:
        """A client with timeouts of its own, which tries so often by itself.

        The time to connect is also how long the server may take in nothing of a body: urllib3 leaves it on while it sends.
        """
        wanted = connect_seconds, read_seconds, num_tries
        with self._clients_lock:
            if wanted not in self._clients:
                retries = {"mode": "standard", "total_max_attempts": num_tries}
                change = Config(connect_timeout=connect_seconds, read_timeout=read_seconds, retries=retries)
                self._clients[wanted] = self._new_client(self._config.merge(change))
            return self._clients[wanted]

    @property
    def name(self) -> str:
        """Endpoint and bucket, for messages."""
        return f"{self.settings.endpoint}/{self.settings.name}"

    def get(self, key: str, *, max_bytes: int) -> Stored:
        """The object. Raises ObjectMissingError, ObjectTooLargeError, DigestError if it has not its own sha256."""
        found = self._read(key, max_bytes, {})
        if found is None:
            raise ObjectMissingError(f"{self.name}/{key}: the server sent no object")
        return found

    def get_if_changed(self, key: str, etag: str, *, max_bytes: int) -> Stored | None:
        """The object, or None if it still has this etag."""
        return self._read(key, max_bytes, {"IfNoneMatch": etag} if etag else {})

    def open_range(self, key: str, start: int, num_bytes: int, *, etag: str = "", stall_seconds: float = 20.0) -> RangeReply:
        """Begin to read bytes [start, start + num_bytes). One try: resuming is the caller's business.

        stall_seconds: longest silence of the server.

        Raises, here and from the chunks, ServiceUnavailableError for what may pass (a broken, silent or busy server);
        here also if something else than the range came; DigestError if the object is shorter, and with `etag`
        PreconditionError if it is another object by now.
        """
        client = self._client_of(3, stall_seconds, 1)
        condition = {"IfMatch": etag} if etag else {}
        with self._mapping(key):
            span = f"bytes={start}-{start + num_bytes - 1}"
            reply = client.get_object(Bucket=self.settings.name, Key=key, Range=span, **condition)
        came, _, whole_bytes = str(reply.get("ContentRange", "")).rpartition("/")
        if whole_bytes.isdecimal() and int(whole_bytes) < start + num_bytes:
            reply["Body"].close()
            raise self._too_short(key, start + num_bytes)
        if came != f"bytes {start}-{start + num_bytes - 1}" or reply["ContentLength"] != num_bytes:
            reply["Body"].close()
            raise ServiceUnavailableError(
                f"{self.name}/{key}: asked for {span}, the server sent {came or 'no range'}",
                hint=_PORTAL_HINT,
            )
        self.meters.add(kind_of(key), down=0)
        size = int(whole_bytes) if whole_bytes.isdecimal() else -1
        return RangeReply(str(reply["ETag"]), self._chunks(key, reply["Body"], num_bytes), size)

    def _chunks(self, key: str, body: Any, num_bytes: int) -> Generator[bytes, None, None]:
        left = num_bytes
        try:
            while left:
                with self._mapping(key):
                    chunk = body.read(min(_CHUNK_BYTES, left))
                    if not chunk:
                        raise IncompleteReadError(actual_bytes=num_bytes - left, expected_bytes=num_bytes)
                left -= len(chunk)
                self.meters.add(kind_of(key), down=len(chunk), num_requests=0)
                yield chunk
        finally:
            body.close()

    def create(self, key: str, data: bytes | bytearray | memoryview, *, kind: str = "") -> str:
        """Write an object that must not be there yet; returns its etag.

        An object that is there with the same bytes is a success (a reply was lost, or a retry came late); other bytes
        raise ObjectExistsError. The sha256 is kept in the metadata and checked by the server.
        """
        body = bytes(data)
        digest = hashlib.sha256(body)
        arguments = {
            "Body": body,
            "IfNoneMatch": "*",
            "Metadata": {_SHA256: digest.hexdigest()},
            "ChecksumSHA256": base64.b64encode(digest.digest()).decode("ascii"),
        }
        self.meters.add(kind or kind_of(key), up=len(body))
        try:
            return self._put(key, arguments)
        except PreconditionError as error:
            found = self._call(key, lambda: self._client.head_object(Bucket=self.settings.name, Key=key))
            if found["ContentLength"] == len(body) and found["Metadata"].get(_SHA256) == digest.hexdigest():
                return str(found["ETag"])
            raise ObjectExistsError(f"{self.name}/{key} is there already, with other bytes") from error

    def swap(self, key: str, data: bytes, etag: str | None) -> str:
        """Write the object if it still has `etag` (None: if it is not there); returns the new etag.

        Raises PreconditionError if it lost. A lost reply looks the same, so the caller must look for its own nonce.
        """
        condition = {"IfNoneMatch": "*"} if etag is None else {"IfMatch": etag}
        metadata = {"Metadata": {_SHA256: hashlib.sha256(data).hexdigest()}}
        self.meters.add(kind_of(key), up=len(data))
        return self._put(key, {"Body": data, **condition, **metadata})

    def list(self, prefix: str, start_after: str = "") -> Iterator[Listed]:
        """Objects under a prefix in key order, after `start_after`."""
        token: dict[str, str] = {"StartAfter": start_after} if start_after else {}
        while True:
            arguments = {"Bucket": self.settings.name, "Prefix": prefix, **token}
            page = self._call(prefix, lambda arguments=arguments: self._client.list_objects_v2(**arguments))
            self.meters.add("list", up=0)
            for item in page.get("Contents", ()):
                yield Listed(item["Key"], int(item["Size"]), item["LastModified"].timestamp())
            if not page.get("IsTruncated"):
                return
            token = {"ContinuationToken": page["NextContinuationToken"]}

    def exists(self, key: str) -> bool:
        """True if there is an object under this key."""
        try:
            self._call(key, lambda: self._client.head_object(Bucket=self.settings.name, Key=key))
        except ObjectMissingError:
            return False
        return True

    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects; one that is not there is no error."""
        names = list(keys)
        for start in range(0, len(names), 1000):
            batch = [{"Key": name} for name in names[start : start + 1000]]
            what = {"Objects": batch, "Quiet": True}
            reply = self._call(names[start], lambda what=what: self._client.delete_objects(Bucket=self.settings.name, Delete=what))
            for fault in reply.get("Errors", ()):
                raise BucketError(f"{self.name}/{fault.get('Key')} was not deleted: {fault.get('Code')}")

    def ensure_bucket(self) -> None:
        """Make the bucket if it is not there."""
        try:
            self.check()
        except SetupMissingError:
            self._call("", lambda: self._client.create_bucket(Bucket=self.settings.name))

    def check(self) -> None:
        """Raises ServiceUnavailableError, AccessDeniedError or SetupMissingError if the bucket cannot be used."""
        # HEAD replies have no body, hence no error code: a listing tells a missing bucket from a refused key.
        self._call("", lambda: self._client.list_objects_v2(Bucket=self.settings.name, MaxKeys=1))

    def _read(self, key: str, max_bytes: int, condition: Mapping[str, str]) -> Stored | None:
        def read() -> Stored | None:
            try:
                reply = self._client.get_object(Bucket=self.settings.name, Key=key, **condition)
            except ClientError as error:
                if _status(error) == 304:
                    return None
                raise
            if "ETag" not in reply or "ContentLength" not in reply:
                reply["Body"].close()
                raise ServiceUnavailableError(f"{self.name}/{key}: what the server sent is no object", hint=_PORTAL_HINT)
            num_bytes = int(reply["ContentLength"])
            if num_bytes > max_bytes:
                reply["Body"].close()
                raise ObjectTooLargeError(f"{self.name}/{key} has {num_bytes} bytes, more than {max_bytes}")
            data = reply["Body"].read()
            if len(data) != num_bytes:
                raise IncompleteReadError(actual_bytes=len(data), expected_bytes=num_bytes)
            return Stored(data, str(reply["ETag"]), dict(reply.get("Metadata", {})))

        found = self._call(key, read)
        self.meters.add(kind_of(key), down=len(found.data) if found else 0)
        if found is not None and _SHA256 in found.metadata:
            check_sha256(found.data, found.metadata[_SHA256], f"{self.name}/{key}")
        return found

    def _put(self, key: str, arguments: Mapping[str, Any]) -> str:
        body = arguments["Body"]
        large = len(body) >= LARGE_BYTES
        client = self._client_of(_SEND_STALL_SECONDS, _STORE_SECONDS, 3) if large else self._client

        def put() -> Any:
            told = {"Body": _Told(body, lambda num_sent: self._tell(key, num_sent, len(body)))} if large else {}
            return client.put_object(Bucket=self.settings.name, Key=key, **{**arguments, **told})

        try:
            return str(self._call(key, put, conditional=True)["ETag"])
        except ServiceUnavailableError as error:
            if large:
                raise ServiceUnavailableError(f"{error.message} ({len(body)} bytes were on their way to {key})", hint=error.hint) from error
            raise

    def _tell(self, key: str, num_sent: int, num_bytes: int) -> None:
        if self.on_retry is not None:
            self.on_retry(f"sending {key}: {num_sent} of {num_bytes} bytes")

    def _call(self, key: str, request: Callable[[], _Answer], *, conditional: bool = False) -> _Answer:
        """Do one request, mapping errors, and waiting out failures that may pass for `patience_seconds`."""
        deadline = time.monotonic() + self.patience_seconds
        wait_seconds = 0.2
        while True:
            try:
                with self._mapping(key, conditional=conditional):
                    return request()
            except ServiceUnavailableError as error:
                if time.monotonic() >= deadline:
                    raise
                cause = type(error.__cause__).__name__
            if self.on_retry is not None:
                self.on_retry(f"waiting for the bucket: {cause}")
            time.sleep(wait_seconds * random.uniform(0.5, 1.0))
            wait_seconds = min(wait_seconds * 2, 5.0)

    @contextmanager
    def _mapping(self, key: str, *, conditional: bool = False) -> Iterator[None]:
        """Turns what boto3 raises inside into errors of ours."""
        try:
            yield
        except ClientError as error:
            raise self._map(error, key, conditional) from error
        except NoCredentialsError as error:
            raise AccessDeniedError(f"{self.name}: no key for the bucket", hint=_ACCESS_HINT) from error
        except (NoConnectionError, HTTPClientError, IncompleteReadError, OSError) as error:
            raise self._unavailable(error) from error
        except RecursionError as error:  # botocore asks for the bucket's region, and is redirected again
            raise ServiceUnavailableError(f"{self.name} sends us elsewhere without end", hint=_PORTAL_HINT) from error
        except BotoCoreError as error:
            raise BucketError(f"{self.name}/{key}: {error}") from error

    def _unavailable(self, error: Exception) -> ServiceUnavailableError:
        return ServiceUnavailableError(f"{self.name} does not answer: {error}", hint=_ENDPOINT_HINT)

    def _too_short(self, key: str, num_bytes: int = 0) -> DigestError:
        wanted = f"the {num_bytes} bytes" if num_bytes else "the range"
        return DigestError(f"{self.name}/{key} is shorter than {wanted} asked for", hint="the object is damaged in the bucket")

    def _map(self, error: ClientError, key: str, conditional: bool) -> StoaError:
        code, status = str(error.response.get("Error", {}).get("Code", "")), _status(error)
        where = f"{self.name}/{key}"
        if code == "NoSuchBucket":
            return SetupMissingError(f"{self.settings.endpoint} has no bucket {self.settings.name!r}", hint=_SETUP_HINT)
        if conditional and status in (404, 409, 412):
            return PreconditionError(f"{where} changed since it was read")
        if status == 412:
            return PreconditionError(f"{where} is another object by now")
        if status == 416:
            return self._too_short(key)
        if status == 404:
            return ObjectMissingError(f"{where} is not there")
        if code == "RequestTimeTooSkewed":
            return AccessDeniedError(f"{where}: this machine's clock is wrong", hint="set the clock: requests are signed with the time")
        if status in (401, 403):
            return AccessDeniedError(f"{where}: the bucket refused our key ({code})", hint=_ACCESS_HINT)
        if status >= 500 or status == 429:
            return self._unavailable(error)
        return BucketError(f"{where}: {code or status}: {error}")


class _Told(io.BytesIO):
    """A body that tells now and then how much of it was sent."""

    def __init__(self, body: bytes, tell: Callable[[int], None]) -> None:
        super().__init__(body)
        self._tell = tell
        self._told_at = time.monotonic()

    def read(self, size: int | None = -1, /) -> bytes:
        if time.monotonic() - self._told_at >= _TELL_SECONDS:
            self._told_at = time.monotonic()
            self._tell(self.tell())
        return super().read(size)


def kind_of(key: str) -> str:
    """The kind of object a key is for: the part after the run (`deltas`, `groups`, `HEAD.json`, ...)."""
    parts = key.split("/")
    return parts[2] if len(parts) > 2 else "other"


def check_sha256(data: bytes | memoryview, expected: str, where: str) -> None:
    """Raises DigestError if the bytes do not have this sha256 (hex)."""
    found = hashlib.sha256(data).hexdigest()
    if found != expected:
        raise DigestError(f"{where}: sha256 is {found[:16]}.., expected {expected[:16]}..", hint="fetch it again")


def _status(error: ClientError) -> int:
    """HTTP status of a refused request; 0 if there is none."""
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
