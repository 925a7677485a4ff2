"""Writes of an invited Mac: PUTs to presigned URLs, over the same HTTP client as every other request.

Such a Mac cannot look at what it has written. An object that is there already is therefore taken for its own: nobody
else had a ticket for its key. No URL appears in an error, because the signature in it is the right to write.
"""

import base64
import hashlib
from typing import Final

from botocore.awsrequest import AWSPreparedRequest, AWSRequest
from botocore.exceptions import ConnectionError as NoConnectionError
from botocore.exceptions import HTTPClientError
from botocore.httpsession import URLLib3Session
from botocore.session import Session
from botocore.utils import get_environ_proxies

from stoa.bucket import presign
from stoa.bucket.store import Store, kind_of
from stoa.bucket.tickets import TicketBook
from stoa.contracts.errors import BucketError, ObjectExistsError, ServiceUnavailableError, TicketError

CONNECT_SECONDS: Final = 3.0
READ_SECONDS: Final = 60.0
_CODES: Final = (
    b"SignatureDoesNotMatch",
    b"AccessDenied",
    b"ExpiredRequest",
    b"InvalidAccessKeyId",
    b"RequestTimeTooSkewed",
    b"NoSuchBucket",
)


class TicketTarget:
    """Creates objects with tickets where a `Store` would with a key. Any thread."""

    def __init__(self, store: Store, book: TicketBook) -> None:
        """`store`: says where the bucket is, and counts bytes."""
        self._store, self._book = store, book
        # Certificates and proxies as boto3 finds them for everything else.
        verify = Session().get_config_variable("ca_bundle") or True
        proxies = get_environ_proxies(store.settings.endpoint)
        self._session = URLLib3Session(verify, proxies, timeout=(CONNECT_SECONDS, READ_SECONDS), max_pool_connections=4)

    def create(self, key: str, data: bytes, *, kind: str = "") -> str:
        """Create an object; returns its etag.

        Raises:
            TicketError: no good ticket for `key`, or the bucket does not take the one there is.
            ObjectExistsError: the object is there; this Mac wrote it before.
            ServiceUnavailableError: what may pass, also bytes that were damaged on their way.
        """
        settings = self._store.settings
        url = self._book.url(key, settings.endpoint, settings.name)
        digest = base64.b64encode(hashlib.md5(data, usedforsecurity=False).digest()).decode("ascii")
        headers = {**presign.CREATE_ONLY, "Content-MD5": digest, "Content-Length": str(len(data))}
        self._store.meters.add(kind or kind_of(key), up=len(data))
        request: AWSPreparedRequest = AWSRequest("PUT", url, headers=headers, data=data).prepare()
        try:
            reply = self._session.send(request)
        except (HTTPClientError, NoConnectionError, OSError) as error:
            # What botocore says names the whole URL.
            raise ServiceUnavailableError(
                f"{self._store.name} does not answer: {type(error).__name__}", hint="the object is kept and sent later"
            ) from None
        if reply.status_code == 200:
            return str(reply.headers.get("ETag", ""))
        raise self._refusal(key, reply.status_code, next((code.decode() for code in _CODES if code in reply.content), ""))

    def _refusal(self, key: str, status: int, code: str) -> BucketError | ServiceUnavailableError:
        where = f"{self._store.name}/{key}"
        if status == 412:
            return ObjectExistsError(f"{where} is there already")
        if status == 409:  # two writes of one key at once
            return ServiceUnavailableError(f"{where}: another write of it is under way")
        if status in (401, 403) or code == "ExpiredRequest":
            return TicketError(
                f"{where}: the bucket does not take our ticket ({code or status})",
                hint="it has expired, or the run signs for another endpoint: macs.bucket_endpoint must be the one in the token",
            )
        if code == "BadDigest":
            return ServiceUnavailableError(f"{where}: the bytes were damaged on their way", hint="the object is kept and sent again")
        if status >= 500 or status == 429:
            return ServiceUnavailableError(f"{self._store.name} answers {status}", hint="the object is kept and sent later")
        return BucketError(f"{where}: the bucket answered {code or status}")
