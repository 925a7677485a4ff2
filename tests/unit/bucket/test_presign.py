"""Presigned PUTs: equal to the signatures of botocore, which is another implementation, and to the published example."""

from datetime import UTC, datetime
from urllib.parse import parse_qs, urlsplit

import pytest
from botocore.auth import S3SigV4QueryAuth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials
from hypothesis import given
from hypothesis import strategies as st

from stoa.bucket.presign import MAX_SECONDS, Scope, sign, signing_key, url

AT = int(datetime(2026, 12, 1, 7, 8, 9, tzinfo=UTC).timestamp())


def by_botocore(endpoint: str, path: str, scope: Scope, secret: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL botocore signs at `scope.at`."""
    monkeypatch.setattr("botocore.auth.get_current_datetime", lambda *_, **__: datetime.fromtimestamp(scope.at, UTC).replace(tzinfo=None))
    request = AWSRequest("PUT", f"{endpoint}{path}", headers={"If-None-Match": "*"})
    S3SigV4QueryAuth(Credentials(scope.access_key, secret), "s3", scope.region, expires=scope.seconds).add_auth(request)
    return str(request.url)


@pytest.mark.parametrize(
    ("endpoint", "path"),
    [
        ("http://127.0.0.1:8333", "/stoa/runs/demo/groups/v00000003/mac-1/00000012/07.safetensors.zst"),
        ("https://0123456789abcdef.r2.cloudflarestorage.com", "/my.bucket/runs/a/evals/v00000001/final/0003-mac-1.safetensors.zst"),
        ("https://bucket.example.org:443", "/b/k"),
        ("http://bucket.example.org:443", "/b/k"),
        ("http://[::1]:8333", "/b/k"),
    ],
)
def test_url_is_the_one_botocore_signs(endpoint: str, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    scope = Scope("AKIDEXAMPLE/+=", "auto", AT, MAX_SECONDS)
    ours = url(scope, endpoint, path, sign(signing_key("secret/+=", scope), scope, endpoint, path))
    theirs = by_botocore(endpoint, path, scope, "secret/+=", monkeypatch)
    assert urlsplit(ours)._replace(query="") == urlsplit(theirs)._replace(query="")
    assert parse_qs(urlsplit(ours).query) == parse_qs(urlsplit(theirs).query)


@given(st.text(min_size=1, max_size=60), st.text("abc/XYZ+=", min_size=1), st.integers(1, MAX_SECONDS), st.integers(0, 4_000_000_000))
def test_any_key_and_time_sign_as_botocore_does(name: str, secret: str, seconds: int, at: int) -> None:
    scope, path = Scope("AKID", "eu-west-1", at, seconds), f"/bucket/{name}"
    with pytest.MonkeyPatch.context() as patch:
        quoted = url(scope, "http://127.0.0.1:8333", path, b"").partition("?")[0].removeprefix("http://127.0.0.1:8333")
        theirs = by_botocore("http://127.0.0.1:8333", quoted, scope, secret, patch)
    ours = sign(signing_key(secret, scope), scope, "http://127.0.0.1:8333", path)
    assert parse_qs(urlsplit(theirs).query)["X-Amz-Signature"] == [ours.hex()]


def test_a_signature_stands_for_one_object_one_host_and_one_time() -> None:
    scope = Scope("AKID", "auto", AT, 3600)
    key = signing_key("secret", scope)
    seen = {
        sign(key, scope, "http://a:1", "/b/k"),
        sign(key, scope, "http://a:1", "/b/k2"),
        sign(key, scope, "http://a:1", "/b2/k"),
        sign(key, scope, "http://a:2", "/b/k"),
        sign(key, Scope("AKID", "auto", AT + 1, 3600), "http://a:1", "/b/k"),
        sign(key, Scope("AKID", "auto", AT, 3601), "http://a:1", "/b/k"),
        sign(key, Scope("AKIE", "auto", AT, 3600), "http://a:1", "/b/k"),
    }
    assert len(seen) == 7
