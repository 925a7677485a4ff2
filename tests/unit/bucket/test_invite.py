"""Join tokens and passes: what is in one, and every way in which one can be wrong; revocations at a real bucket."""

import base64
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoa.bucket import keys
from stoa.bucket.invite import (
    PREFIX,
    BucketDoor,
    Invite,
    TemporalDoor,
    read_invite,
    read_pass,
    require_build,
    seal_key,
    write_invite,
)
from stoa.bucket.manifest import Signer, canonical
from stoa.bucket.revocations import Revoked, revoke
from stoa.bucket.store import Store
from stoa.config.load import Credentials
from stoa.contracts.errors import AccessDeniedError, BuildTooOldError, InviteError, InviteExpiredError, ServiceUnavailableError, UsageError
from tests.servers import free_ports

SEED = bytes(range(32))
SIGNER = Signer.from_seed(SEED)
NOW = 1_800_000_000
DAY = 86_400


def invited(host: str = "mac-1", *, signer: Signer = SIGNER, run: str = "demo", seconds: float = 7 * DAY) -> tuple[str, Invite]:
    return write_invite(
        signer,
        run,
        host,
        seconds=seconds,
        temporal=TemporalDoor("macs.example.org:7234", "mac", tls=True, ca="-----BEGIN CERTIFICATE-----"),
        bucket=BucketDoor("https://bucket.example.org", "stoa", "auto", "read-key", "read-secret", "read-session"),
        min_build="0.1.0",
        now=NOW,
    )


TOKEN, INVITE = invited()


def test_a_token_carries_all_that_a_mac_needs() -> None:
    found = read_invite(TOKEN, now=NOW + 7 * DAY - 1)
    assert found == INVITE
    assert (found.run, found.host, found.public_key, found.min_build) == ("demo", "mac-1", SIGNER.public_key, "0.1.0")
    assert found.credentials == Credentials("read-key", "read-secret", "read-session")
    assert (found.access.tls, found.access.ca, found.access.api_key) == (True, b"-----BEGIN CERTIFICATE-----", found.proof)
    assert found.bucket_settings.endpoint == "https://bucket.example.org"
    assert found.seal_bytes == seal_key(SEED, "demo", found.invite)
    assert found.invite.startswith("mac-1.") and found.invite != invited()[1].invite


def test_the_token_is_one_printable_line_of_signed_canonical_json() -> None:
    assert TOKEN.isascii() and TOKEN.isprintable() and " " not in TOKEN and len(TOKEN) < 3000
    text = TOKEN.removeprefix(PREFIX)
    tree = json.loads(base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)))
    assert base64.urlsafe_b64encode(canonical(tree)).decode().rstrip("=") == text
    assert {"private", "seed"} & set(tree) == set()


def test_no_secret_is_printed_with_an_invite() -> None:
    shown = f"{INVITE!r} {INVITE.access!r} {INVITE.credentials!r}"
    for secret in ("read-key", "read-secret", "read-session", INVITE.seal_key, INVITE.proof, INVITE.sig):
        assert secret not in shown


def test_white_space_from_a_mail_program_is_passed_over() -> None:
    assert read_invite(f"  {TOKEN[:70]}\n {TOKEN[70:]}\r\n", now=NOW) == INVITE


@pytest.mark.parametrize("text", ["", "hello", "stoa join", TOKEN.removeprefix(PREFIX), "https://example.org/" + TOKEN])
def test_what_is_no_token_is_told_so(text: str) -> None:
    with pytest.raises(InviteError, match="no join token") as caught:
        read_invite(text, now=NOW)
    assert isinstance(caught.value, UsageError)
    assert "copy the whole line" in caught.value.hint


def test_a_token_of_another_version_is_told_apart() -> None:
    with pytest.raises(InviteError, match="another version"):
        read_invite("stoa2." + TOKEN.removeprefix(PREFIX), now=NOW)


@given(st.integers(len(PREFIX), len(TOKEN) - 1), st.sampled_from("ABCdef019-_%=."))
def test_any_changed_character_is_noticed(at: int, put: str) -> None:
    changed = TOKEN[:at] + put + TOKEN[at + 1 :]
    if changed != TOKEN:
        with pytest.raises(InviteError):
            read_invite(changed, now=NOW)


@given(st.integers(0, len(TOKEN) - 1))
def test_a_token_cut_off_anywhere_is_noticed(length: int) -> None:
    with pytest.raises(InviteError):
        read_invite(TOKEN[:length], now=NOW)


@given(
    st.text(max_size=200).map(lambda text: PREFIX + text)
    | st.binary(max_size=300).map(lambda b: PREFIX + base64.urlsafe_b64encode(b).decode())
)
def test_nonsense_after_the_prefix_is_a_typed_error(text: str) -> None:
    with pytest.raises(InviteError):
        read_invite(text, now=NOW)


def test_a_huge_token_is_refused_before_it_is_decoded() -> None:
    with pytest.raises(InviteError, match="longer than any"):
        read_invite(PREFIX + "A" * 10_000_000, now=NOW)


def test_an_expired_token_says_since_when() -> None:
    with pytest.raises(InviteExpiredError, match="2027-01-22 08:00 UTC") as caught:
        read_invite(TOKEN, now=NOW + 7 * DAY)
    assert "stoa invite" in caught.value.hint
    read_invite(TOKEN, now=NOW - 3600)  # a Mac whose clock is behind may join


def test_a_pass_proves_one_host_of_one_run_for_a_time() -> None:
    found = read_pass(INVITE.proof, SIGNER.public_key, "demo", now=NOW)
    assert (found.host, found.invite, found.expires_at) == ("mac-1", INVITE.invite, NOW + 7 * DAY)
    other = Signer.generate()
    for text, key, run in (
        (INVITE.proof, other.public_key, "demo"),
        (INVITE.proof, SIGNER.public_key, "other"),
        (INVITE.proof[:-2] + "AA", SIGNER.public_key, "demo"),
        (TOKEN.removeprefix(PREFIX), SIGNER.public_key, "demo"),  # a document signed by the right key, but no pass
        (invited(signer=other)[1].proof, SIGNER.public_key, "demo"),
        ("", SIGNER.public_key, "demo"),
        ("A" * 5000, SIGNER.public_key, "demo"),
    ):
        with pytest.raises(InviteError):
            read_pass(text, key, run, now=NOW)
    with pytest.raises(InviteExpiredError):
        read_pass(INVITE.proof, SIGNER.public_key, "demo", now=NOW + 7 * DAY)


def test_the_pass_holds_no_key() -> None:
    tree = json.loads(base64.urlsafe_b64decode(INVITE.proof + "=" * (-len(INVITE.proof) % 4)))
    assert set(tree) == {"format", "run", "host", "invite", "issued_at", "expires_at", "sig"}


def test_seal_keys_differ_by_run_and_invite() -> None:
    assert len({seal_key(SEED, "a", "m.00000000"), seal_key(SEED, "b", "m.00000000"), seal_key(SEED, "a", "m.00000001")}) == 3


@pytest.mark.parametrize("host", ["", "My Mac", "a" * 49, "mac.1"])
def test_a_host_that_cannot_stand_in_a_key_is_refused(host: str) -> None:
    with pytest.raises(InviteError):
        invited(host)


@pytest.mark.parametrize(
    ("minimum", "build", "fits"),
    [
        ("0.1.0", "0.1.0", True),
        ("0.1.0", "0.2", True),
        ("0.10.0", "0.9.9", False),
        ("1.0", "0.99.1", False),
        ("", "0.0.1", True),
        ("0.1.0", "source", True),
    ],
)
def test_an_old_build_is_told_what_to_install(minimum: str, build: str, fits: bool) -> None:
    if fits:
        require_build(minimum, build)
        return
    with pytest.raises(BuildTooOldError, match=f"takes {minimum} or newer") as caught:
        require_build(minimum, build)
    assert f"stoa[mac]>={minimum}" in caught.value.hint


def revoked_of(store: Store) -> Revoked:
    return Revoked(store, "demo", SIGNER.public_key, look_seconds=0.0)


def test_a_revoked_host_or_invite_is_known_to_all_who_look(store: Store) -> None:
    seen = revoked_of(store)
    assert seen.reason("mac-1", INVITE.invite) is None
    assert revoke(store, SIGNER, "demo", INVITE.invite, "sold")
    assert seen.reason("mac-1", INVITE.invite) == f"{INVITE.invite} was revoked: sold"
    assert seen.reason("mac-1", invited()[1].invite) is None  # another invite of the same host
    assert revoke(store, SIGNER, "demo", "mac-1")
    assert not revoke(store, SIGNER, "demo", "mac-1", "twice")
    for looker in (seen, revoked_of(store)):
        assert looker.reason("mac-1", invited()[1].invite) == "mac-1 was revoked"
        assert looker.reason("mac-1", "") == "mac-1 was revoked"
        assert looker.reason("mac-10", "") is None
    with pytest.raises(InviteError, match="neither"):
        revoke(store, SIGNER, "demo", "../HEAD")


def test_a_notice_by_somebody_else_counts_for_nothing(store: Store) -> None:
    revoke(store, Signer.generate(), "demo", "mac-1")
    revoke(store, SIGNER, "demo", "mac-2")
    moved = store.get(keys.revocation("demo", "mac-2"), max_bytes=10_000).data
    store.create(keys.revocation("demo", "mac-3"), moved)
    store.create(keys.revoked_prefix("demo") + "junk", b"\xff")
    seen = revoked_of(store)
    assert [seen.reason(host, "") for host in ("mac-1", "mac-2", "mac-3")] == [None, "mac-2 was revoked", None]


def test_an_outage_is_ridden_out_on_what_is_known_but_not_begun_on(store: Store) -> None:
    revoke(store, SIGNER, "demo", "mac-1")
    nowhere = Store(store.settings.model_copy(update={"endpoint": f"http://127.0.0.1:{free_ports(1)[0]}"}), Credentials("a", "b"))
    with pytest.raises(ServiceUnavailableError):
        revoked_of(nowhere).reason("mac-1", "")
    seen = revoked_of(store)
    assert seen.reason("mac-1", "") is not None
    seen._store = nowhere
    assert seen.reason("mac-1", "") is not None


def test_a_key_that_may_not_list_is_told(bucket_server: object, store: Store) -> None:
    with pytest.raises(AccessDeniedError):
        revoked_of(bucket_server.store(store.settings.name, credentials=Credentials("nobody", "x"))).reason("a", "")
