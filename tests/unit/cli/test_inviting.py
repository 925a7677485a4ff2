"""`stoa invite`, `stoa revoke` and `stoa join TOKEN` as commands, at a real bucket; what an owner is kept from handing out."""

import base64
import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from cli.inviting import check_mac_key, reads_steps, seconds_of
from stoa.bucket import keys
from stoa.bucket.invite import BucketDoor, TemporalDoor, read_invite, write_invite
from stoa.bucket.manifest import Signer
from stoa.bucket.run_document import claim_run, new_run, read_run
from stoa.bucket.store import Store
from stoa.config.load import PROJECT_ROOT, Credentials
from stoa.config.run import Macs, RunConfig
from stoa.contracts.errors import AccessDeniedError, BuildTooOldError, ConfigError, InviteError, InviteExpiredError, UsageError
from tests.servers import CREDENTIALS, MAC_CREDENTIALS
from worker_mac.identity import pin_key
from worker_mac.invited import enter, keep_invite

SEED = bytes(range(32))
SIGNER = Signer.from_seed(SEED)


def token_for(
    host: str = "attic", *, run: str = "friends", signer: Signer = SIGNER, seconds: float = 7200.0, build: str = "", address: str = ""
) -> str:
    return write_invite(
        signer,
        run,
        host,
        seconds=seconds,
        temporal=TemporalDoor(address or "macs.example.org:7234", "mac", tls=True),
        bucket=BucketDoor("https://bucket.example.org", "stoa", "auto", "read-key", "read-secret"),
        min_build=build,
        now=None if seconds > 0 else 1_700_000_000,
    )[0]


def stoa(*arguments: str, text: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("STOA_", "AWS_"))}
    command = [sys.executable, "-m", "cli.main", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=50, cwd=PROJECT_ROOT, env={**clean, **environment}, input=text, check=False
    )


@pytest.fixture
def owner(store: Store, tmp_path: Path) -> dict[str, str]:
    """A run in the bucket, and the environment of who started it."""
    config = RunConfig(run="friends", bucket=store.settings, macs=Macs(temporal_address="macs.example.org:7234", temporal_tls=True))
    claim_run(store, new_run(config, SIGNER, layout_id="x", model_files=()), SIGNER)
    return {
        "STOA_STATE": str(tmp_path / "owner"),
        "STOA_SIGNING_KEY": base64.b64encode(SEED).decode(),
        "STOA_BUCKET_ENDPOINT": store.settings.endpoint,
        "STOA_BUCKET_NAME": store.settings.name,
    }


def test_invite_prints_one_token_and_says_the_rest_beside_it(owner: dict[str, str], store: Store) -> None:
    done = stoa("invite", "friends", "--host", "attic", "--expires", "12h", **owner)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 1
    invite = read_invite(done.stdout)
    assert (invite.run, invite.host, invite.public_key) == ("friends", "attic", SIGNER.public_key)
    assert invite.expires_at - invite.issued_at == 12 * 3600
    assert (invite.temporal.address, invite.temporal.tls) == ("macs.example.org:7234", True)  # of the run, where none is named
    assert invite.credentials == MAC_CREDENTIALS
    assert f"note: for Macs on this machine only: {store.settings.endpoint} is loopback" in done.stderr
    assert f"stoa revoke friends {invite.invite}" in done.stderr
    for secret in (done.stdout.strip(), invite.proof, MAC_CREDENTIALS.secret, owner["STOA_SIGNING_KEY"]):
        assert secret not in done.stderr
    assert [found.key for found in store.list("runs/friends/") if "probe" in found.key] == []


def test_invite_says_which_live_runs_mac_has_the_same_name(owner: dict[str, str], store: Store) -> None:
    for run in ("friends-attic", "friends-attic-2"):  # of the second no Mac is spelt like friends' attic-2
        config = RunConfig(run=run, bucket=store.settings)
        claim_run(store, new_run(config, SIGNER, layout_id="x", model_files=()), SIGNER)
    done = stoa("invite", "friends", "--host", "attic-2", **owner)
    (note,) = [line for line in done.stderr.splitlines() if "one name in Temporal" in line]
    assert note.startswith("note: Mac attic-2 of run friends and Mac 2 of run friends-attic have one name in Temporal: ")
    assert "one name" not in stoa("invite", "friends", "--host", "attic", **owner).stderr


def test_a_damaged_run_with_a_name_spelt_alike_does_not_stop_an_invitation(owner: dict[str, str], store: Store) -> None:
    store.create(keys.run_json("friends-attic"), b"torn")
    done = stoa("invite", "friends", "--host", "attic-2", **owner)
    assert (done.returncode, "one name" in done.stderr) == (0, False), done.stderr


def test_invite_as_json_draws_a_name_and_carries_a_certificate(owner: dict[str, str], tmp_path: Path) -> None:
    ca = tmp_path / "ca.pem"
    ca.write_text("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")
    facts = [json.loads(stoa("invite", "friends", "--json", "--ca", str(ca), **owner).stdout) for _ in range(2)]
    assert facts[0]["host"] != facts[1]["host"]
    invite = read_invite(facts[0]["token"])
    assert (invite.host, invite.invite, invite.expires_at) == (facts[0]["host"], facts[0]["invite"], facts[0]["expires_at"])
    assert invite.access.ca == ca.read_bytes()
    ca.write_text("-----BEGIN CERTIFICATE-----\n-----BEGIN PRIVATE KEY-----\n")
    refused = stoa("invite", "friends", "--ca", str(ca), **owner)
    assert (refused.returncode, "not a file of certificates alone" in refused.stderr) == (2, True)


def test_an_owner_is_kept_from_handing_out_too_much(owner: dict[str, str], store: Store) -> None:
    wrong_signer = stoa("invite", "friends", **{**owner, "STOA_SIGNING_KEY": base64.b64encode(bytes(32)).decode()})
    assert (wrong_signer.returncode, "signed by another key" in wrong_signer.stderr) == (1, True)
    own_key = {"STOA_MAC_BUCKET_KEY": CREDENTIALS.key, "STOA_MAC_BUCKET_SECRET": CREDENTIALS.secret}
    assert "the owner's own" in stoa("invite", "friends", **owner, **own_key).stderr
    unknown = {"STOA_MAC_BUCKET_KEY": "nobody", "STOA_MAC_BUCKET_SECRET": "x"}
    done = stoa("invite", "friends", **owner, **unknown)
    assert (done.returncode, "cannot read the run" in done.stderr, done.stdout) == (1, True, "")
    missing = stoa("invite", "nosuch", **owner)
    assert (missing.returncode, "has no run 'nosuch'" in missing.stderr) == (2, True)


def test_a_key_for_macs_that_writes_is_found_out_and_leaves_nothing(
    owner: dict[str, str], store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STOA_BUCKET_KEY", "another")
    monkeypatch.setenv("STOA_BUCKET_SECRET", "key")
    with pytest.raises(UsageError, match="may write to the bucket"):
        check_mac_key(store, "friends", CREDENTIALS)
    assert [found.key for found in store.list("runs/friends/probe")] == []
    check_mac_key(store, "friends", MAC_CREDENTIALS)
    with pytest.raises(AccessDeniedError, match="cannot read"):
        check_mac_key(store, "friends", Credentials("nobody", "x"))


def test_a_key_for_macs_that_opens_step_manifests_is_told_of(owner: dict[str, str], store: Store) -> None:
    """They tell who is suspected. A bucket whose read-only keys open all of it (R2) is used all the same."""
    document = read_run(store, "friends")
    assert not reads_steps(store, document, MAC_CREDENTIALS)
    assert reads_steps(store, document, CREDENTIALS)  # before the first step
    store.create(keys.step_manifest("friends", 1, 1), b"{}")
    assert not reads_steps(store, document, MAC_CREDENTIALS)
    assert reads_steps(store, document, CREDENTIALS)
    assert "Mac that is suspected" not in stoa("invite", "friends", **owner).stderr


def test_revoke_takes_an_invitation_or_a_host_once(owner: dict[str, str]) -> None:
    first = stoa("revoke", "friends", "attic.0123abcd", "--reason", "sold", **owner)
    assert (first.returncode, "is revoked" in first.stderr) == (0, True)
    assert "was revoked before" in stoa("revoke", "friends", "attic.0123abcd", **owner).stderr
    found = stoa("revoke", "friends", "--host", "attic", "--json", **owner)
    assert json.loads(found.stdout) == {"run": "friends", "revoked": "attic", "is_new": True}
    again = stoa("invite", "friends", "--host", "attic", **owner)
    assert (again.returncode, "choose another --host" in again.stderr) == (2, True)
    for wrong in ((), ("attic.0123abcd", "--host", "attic"), ("Not/A/Name",)):
        assert stoa("revoke", "friends", *wrong, **owner).returncode == 2
    assert "`stoa fleet friends` shows the names" in stoa("revoke", "friends", **owner).stderr


@pytest.mark.parametrize(("text", "seconds"), [("90m", 5400.0), ("12h", 43_200.0), ("7d", 604_800.0), ("1.5d", 129_600.0)])
def test_times_as_people_write_them(text: str, seconds: float) -> None:
    assert seconds_of(text) == seconds


@pytest.mark.parametrize("text", ["", "7", "7 days", "0m", "30s", "400d", "-1d", "1e3d", "99999999d"])
def test_other_times_are_wrong_use(text: str) -> None:
    with pytest.raises(UsageError, match="90m, 12h or 7d"):
        seconds_of(text)


def test_a_token_is_kept_for_its_owner_only_and_is_all_that_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STOA_BUCKET_ENDPOINT", "http://wrong.example.org")
    monkeypatch.setenv("STOA_TEMPORAL_ADDRESS", "wrong.example.org:1")
    folder = tmp_path / "mac"
    token = token_for()
    keep_invite(folder, f" {token[:50]}\n{token[50:]} ")
    assert stat.S_IMODE((folder / "invite").stat().st_mode) == 0o600
    assert (folder / "invite").read_text() == token + "\n"
    entry = enter(None, folder)
    assert (entry.config.run, entry.config.temporal.address, entry.config.temporal.tls) == ("friends", "macs.example.org:7234", True)
    assert entry.config.bucket.endpoint == "https://bucket.example.org"
    assert entry.credentials == Credentials("read-key", "read-secret")
    assert (entry.host(""), entry.host("attic"), entry.access.is_invited) == ("attic", "attic", True)
    with pytest.raises(InviteError, match="is for attic, not for cellar"):
        entry.host("cellar")
    assert entry.pinned(folder / "runs" / "friends") == SIGNER.public_key
    newer = token_for("cellar")
    keep_invite(folder, newer)
    assert enter(None, folder).host("") == "cellar"
    for secret in ("read-key", "read-secret"):
        assert secret not in repr(entry)


def test_a_configuration_that_is_named_goes_before_an_invitation(tmp_path: Path) -> None:
    keep_invite(tmp_path, token_for())
    entry = enter(PROJECT_ROOT / "configs" / "demo.toml", tmp_path)
    assert (entry.invite, entry.invite_id, entry.host("x"), entry.codec, entry.tickets(tmp_path)) == (None, "", "x", None, None)
    assert enter(None, tmp_path / "elsewhere").invite is None


def test_a_token_of_another_run_of_that_name_is_told(tmp_path: Path) -> None:
    (tmp_path / "runs" / "friends").mkdir(parents=True)
    pin_key(tmp_path / "runs" / "friends", Signer.generate().public_key)
    with pytest.raises(InviteError, match="another run friends than the one this Mac knows"):
        keep_invite(tmp_path, token_for())
    assert not (tmp_path / "invite").exists()
    keep_invite(tmp_path, token_for(run="others"))


def test_a_token_that_is_no_good_here_is_not_kept(tmp_path: Path) -> None:
    for token, error in (
        (token_for(seconds=-1.0), InviteExpiredError),
        (token_for(build="99.0.0"), BuildTooOldError),
        (token_for(address="nowhere"), InviteError),
        (token_for()[:-9], InviteError),
    ):
        with pytest.raises(error):
            keep_invite(tmp_path, token)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("token", "words"),
    [
        ("stoa1.nonsense", "cut off or changed"),
        (token_for()[:-5], "cut off or changed"),
        (token_for(seconds=-1.0), "was good until 2023-11-14"),
        ("stoa9.abc", "made by another version"),
        (token_for(build="99.0.0"), "takes 99.0.0 or newer"),
    ],
)
def test_join_tells_what_is_wrong_with_a_token_and_begins_nothing(token: str, words: str, tmp_path: Path) -> None:
    for arguments, text in ((("join", token), ""), (("join", "--stdin"), token)):
        done = stoa(*arguments, "--state", str(tmp_path / "mac"), text=text)
        assert (done.returncode, words in done.stderr, done.stdout) == (2, True, ""), done.stderr
        assert token not in done.stderr
        assert "hint: " in done.stderr
    assert not (tmp_path / "mac" / "invite").exists()


def test_join_with_neither_a_token_nor_a_file_says_how_tokens_begin(tmp_path: Path) -> None:
    done = stoa("join", "xyz", "--state", str(tmp_path / "mac"))
    assert (done.returncode, done.stderr.splitlines()[0]) == (2, "error: xyz: no such file")
    assert "hint: a token begins with stoa1.; an example of a file is " in done.stderr


def test_a_damaged_invitation_on_disk_is_told(tmp_path: Path) -> None:
    keep_invite(tmp_path, token_for())
    (tmp_path / "invite").write_text("stoa1.torn")
    with pytest.raises(InviteError):
        enter(None, tmp_path)
    with pytest.raises(ConfigError):
        enter(tmp_path / "none.toml", tmp_path)
