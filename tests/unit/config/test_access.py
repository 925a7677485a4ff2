"""How a host speaks to Temporal and to the bucket: settings from the file, secrets from the environment only."""

from pathlib import Path

import pytest

from stoa.config.load import Credentials, load_run, mac_credentials, temporal_access
from stoa.config.run import Bucket, Temporal
from stoa.contracts.access import PLAIN
from stoa.contracts.errors import AccessDeniedError, ConfigError

CLOUD = Temporal(address="run.a2dd6.tmprl.cloud:7233", tls=True)
PEM = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"
PRIVATE = "-----BEGIN PRIVATE KEY-----\nBBBB\n-----END PRIVATE KEY-----\n"


def test_a_server_on_this_machine_needs_nothing() -> None:
    assert temporal_access(Temporal(), environ={}) == PLAIN


def test_api_key_and_server_name_are_taken(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('[temporal]\naddress = "cloud.example.org:7233"\ntls = true\ntls_server_name = "frontend.example.org"\n')
    access = temporal_access(load_run(path, environ={}).temporal, environ={"STOA_TEMPORAL_API_KEY": "ey.secret"})
    assert (access.tls, access.server_name, access.api_key) == (True, "frontend.example.org", "ey.secret")
    assert "ey.secret" not in repr(access)


def test_certificates_are_read_from_the_paths_given(tmp_path: Path) -> None:
    ca, certificate, key = (tmp_path / name for name in ("ca.pem", "cert.pem", "key.pem"))
    for path, text in ((ca, PEM), (certificate, PEM), (key, PRIVATE)):
        path.write_text(text)
    key.chmod(0o600)
    environ = {"STOA_TEMPORAL_CA": str(ca), "STOA_TEMPORAL_CERT": str(certificate), "STOA_TEMPORAL_KEY": str(key)}
    access = temporal_access(CLOUD, environ=environ)
    assert (access.ca, access.certificate, access.private_key) == (PEM.encode(), PEM.encode(), PRIVATE.encode())
    assert "BBBB" not in repr(access)
    key.chmod(0o644)
    with pytest.raises(ConfigError, match="STOA_TEMPORAL_KEY: others than its owner") as caught:
        temporal_access(CLOUD, environ=environ)
    assert "chmod 600" in caught.value.hint


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"STOA_TEMPORAL_CERT": "x"}, "go together"),
        ({"STOA_TEMPORAL_KEY": "x"}, "go together"),
        ({"STOA_TEMPORAL_CA": "/nowhere/ca.pem"}, "STOA_TEMPORAL_CA: /nowhere/ca.pem cannot be read"),
        ({"STOA_TEMPORAL_CA": "/dev/null"}, "is no PEM file"),
    ],
)
def test_half_a_pair_and_unreadable_files_are_told(environ: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        temporal_access(CLOUD, environ=environ)


def test_a_key_is_never_sent_in_clear_beyond_this_machine() -> None:
    clear = Temporal(address="temporal.example.org:7233")
    with pytest.raises(ConfigError, match="in clear") as caught:
        temporal_access(clear, environ={"STOA_TEMPORAL_API_KEY": "k"})
    assert "temporal.tls = true" in caught.value.hint
    with pytest.raises(ConfigError, match="certificates are set"):
        temporal_access(clear, environ={"STOA_TEMPORAL_CA": "x"})
    assert temporal_access(Temporal(), environ={"STOA_TEMPORAL_API_KEY": "k", "STOA_TEMPORAL_CA": "/nowhere"}) == PLAIN


def test_macs_get_a_key_of_their_own_never_the_owners() -> None:
    owner = {"STOA_BUCKET_KEY": "owner", "STOA_BUCKET_SECRET": "s"}
    far = Bucket(endpoint="https://x.r2.cloudflarestorage.com")
    with pytest.raises(AccessDeniedError, match="no key for Macs"):
        mac_credentials(far, environ=owner)
    with pytest.raises(AccessDeniedError):
        mac_credentials(far, environ={"STOA_MAC_BUCKET_KEY": "k"})
    assert mac_credentials(Bucket(), environ=owner) == Credentials("stoa-mac", "stoa-mac-on-loopback")
    given = {"STOA_MAC_BUCKET_KEY": "k", "STOA_MAC_BUCKET_SECRET": "s", "STOA_MAC_BUCKET_SESSION": "t"}
    assert mac_credentials(far, environ=given) == Credentials("k", "s", "t")
    assert "k" not in repr(mac_credentials(far, environ=given)).replace("Credentials", "")


def test_how_macs_reach_the_servers_is_checked_as_every_address(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(
        '[macs]\ntemporal_address = "macs.example.org:7234"\ntemporal_tls = true\nbucket_endpoint = "https://bucket.example.org"\n'
    )
    macs = load_run(path, environ={}).macs
    assert (macs.temporal_address, macs.temporal_tls, macs.bucket_endpoint) == ("macs.example.org:7234", True, "https://bucket.example.org")
    path.write_text('[macs]\ntemporal_address = "macs.example.org"\n')
    with pytest.raises(ConfigError, match=r"run\.toml:2: macs\.temporal_address = 'macs\.example\.org': should be a host and a port"):
        load_run(path, environ={})
    path.write_text('[macs]\nbucket_endpoint = "bucket"\n')
    with pytest.raises(ConfigError, match="should be a URL"):
        load_run(path, environ={})
