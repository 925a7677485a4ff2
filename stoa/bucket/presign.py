"""Signatures that let somebody without a key create one object: AWS Signature Version 4 in the query of a PUT.

What is signed: the method, the object's path, the host, and `If-None-Match: *`, so that the URL creates an object that
is not there and does nothing else. Not signed: the body, whose bytes are not known yet, and hence its length: S3 can
bound it in a POST policy only, which R2 has not. Pure arithmetic over strings; who gets a signature is `tickets.py`'s.

The algorithm is that of the public document "Authenticating Requests: Using Query Parameters (AWS Signature Version 4)".
"""

import hashlib
import hmac
import time
from dataclasses import dataclass
from typing import Final
from urllib.parse import quote, urlsplit

MAX_SECONDS: Final = 7 * 86_400
"""Longest life of a signature that S3 and R2 take."""
CREATE_ONLY: Final = {"If-None-Match": "*"}
"""The header that every PUT with such a signature must carry."""
_ALGORITHM: Final = "AWS4-HMAC-SHA256"
_SIGNED_HEADERS: Final = "host;if-none-match"
_DEFAULT_PORTS: Final = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class Scope:
    """What all signatures of one minting share. `at`: Unix seconds of their making; `seconds`: how long they are good."""

    access_key: str
    region: str
    at: int
    seconds: int

    @property
    def expires_at(self) -> int:
        """Unix seconds at which they end."""
        return self.at + self.seconds


def signing_key(secret: str, scope: Scope) -> bytes:
    """The key of a day, region and service; the secret does not follow from it."""
    key = f"AWS4{secret}".encode()
    for part in (_date(scope), scope.region, "s3", "aws4_request"):
        key = hmac.digest(key, part.encode(), "sha256")
    return key


def sign(key: bytes, scope: Scope, endpoint: str, path: str) -> bytes:
    """32-byte signature of creating the object at `path` (`/<bucket>/<key>`) of `endpoint`. `key`: see `signing_key`."""
    headers = f"host:{_host(endpoint)}\nif-none-match:*\n"
    request = "\n".join(("PUT", _escaped(path), _query(scope), headers, _SIGNED_HEADERS, "UNSIGNED-PAYLOAD"))
    digest = hashlib.sha256(request.encode()).hexdigest()
    text = "\n".join((_ALGORITHM, _time(scope), _credential_scope(scope), digest))
    return hmac.digest(key, text.encode(), "sha256")


def url(scope: Scope, endpoint: str, path: str, signature: bytes) -> str:
    """The URL to PUT to, with `CREATE_ONLY` as its header."""
    return f"{endpoint.rstrip('/')}{_escaped(path)}?{_query(scope)}&X-Amz-Signature={signature.hex()}"


def _query(scope: Scope) -> str:
    parts = {
        "X-Amz-Algorithm": _ALGORITHM,
        "X-Amz-Credential": f"{scope.access_key}/{_credential_scope(scope)}",
        "X-Amz-Date": _time(scope),
        "X-Amz-Expires": str(scope.seconds),
        "X-Amz-SignedHeaders": _SIGNED_HEADERS,
    }
    return "&".join(f"{name}={quote(value, safe='-_.~')}" for name, value in parts.items())


def _host(endpoint: str) -> str:
    parts = urlsplit(endpoint)
    is_default = parts.port is None or parts.port == _DEFAULT_PORTS.get(parts.scheme)
    name = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname or ""
    return name if is_default else f"{name}:{parts.port}"


def _escaped(path: str) -> str:
    return quote(path, safe="/-_.~")


def _date(scope: Scope) -> str:
    return time.strftime("%Y%m%d", time.gmtime(scope.at))


def _time(scope: Scope) -> str:
    return time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(scope.at))


def _credential_scope(scope: Scope) -> str:
    return f"{_date(scope)}/{scope.region}/s3/aws4_request"
