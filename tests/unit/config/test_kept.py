"""What a worker that starts at log-in needs of the environment: kept for its owner's eyes, read back beneath the environment."""

import json
import stat
from pathlib import Path

import pytest

from stoa.config.load import KEPT_FILE, bucket_credentials, keep_environment, kept_environment, load_run
from stoa.config.run import RunConfig
from stoa.contracts.errors import AccessDeniedError, ConfigError

FAR = {"STOA_BUCKET_ENDPOINT": "https://a.r2.example.com", "STOA_TEMPORAL_ADDRESS": "t.example.com:7233"}


def far_run(environ: dict[str, str]) -> RunConfig:
    return load_run(None, environ=environ)


def test_endpoints_and_the_buckets_key_are_kept_and_nothing_else(tmp_path: Path) -> None:
    environ = FAR | {"AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s", "STOA_SIGNING_KEY": "x", "HOME": "/h", "STOA_BUCKET_NAME": ""}
    kept = keep_environment(tmp_path, far_run(environ), environ=environ)
    path = tmp_path / KEPT_FILE
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert json.loads(path.read_text()) == FAR | {"STOA_BUCKET_KEY": "k", "STOA_BUCKET_SECRET": "s"}
    assert kept == tuple(sorted(json.loads(path.read_text())))

    later = kept_environment(tmp_path, environ={"STOA_TEMPORAL_ADDRESS": "other.example.com:7233"})
    assert far_run(dict(later)).temporal.address == "other.example.com:7233"
    credentials = bucket_credentials(far_run(dict(later)).bucket, environ=later)
    assert (credentials.key, credentials.secret) == ("k", "s")


def test_a_run_on_this_machine_keeps_no_key(tmp_path: Path) -> None:
    assert keep_environment(tmp_path, far_run({}), environ={"AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s"}) == ()


def test_without_a_key_for_the_bucket_nothing_is_kept(tmp_path: Path) -> None:
    with pytest.raises(AccessDeniedError, match="no key for the bucket"):
        keep_environment(tmp_path, far_run(FAR), environ=FAR)
    assert list(tmp_path.iterdir()) == []


def test_what_others_may_read_is_not_used(tmp_path: Path) -> None:
    keep_environment(tmp_path, far_run({}), environ={})
    (tmp_path / KEPT_FILE).chmod(0o640)
    with pytest.raises(ConfigError) as caught:
        kept_environment(tmp_path, environ={})
    assert caught.value.hint == f"run `chmod 600 {tmp_path / KEPT_FILE}`"


@pytest.mark.parametrize("text", [None, "", "[]", '{"PATH": "/x"}', '{"STOA_BUCKET_KEY": 3}'])
def test_a_file_that_is_not_ours_is_refused(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / KEPT_FILE).write_text(text)
        (tmp_path / KEPT_FILE).chmod(0o600)
    with pytest.raises(ConfigError) as caught:
        kept_environment(tmp_path, environ={})
    assert "stoa join --at-login" in caught.value.hint
