"""Tickets: what one lets through at a real bucket, and what it does not; how a Mac keeps them."""

import base64
import hashlib
import stat
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoa.bucket import keys, presign
from stoa.bucket.store import Store
from stoa.bucket.tickets import KEPT, MAX_SIGNATURES, Mint, Slots, TicketBook, read_tickets
from stoa.bucket.uploads import TicketTarget
from stoa.config.load import Credentials
from stoa.contracts.errors import FormatError, ObjectExistsError, ServiceUnavailableError, TicketError
from stoa.contracts.sealed import TICKET
from tests.servers import CREDENTIALS, free_ports

INVITE = "mac-1.0123abcd"
AT = 1_800_000_000


def mint_of(store: Store, *, credentials: Credentials = CREDENTIALS) -> Mint:
    settings = store.settings
    return Mint("demo", credentials, settings.endpoint, settings.name, settings.region)


def book_with(folder: Path, *texts: str, host: str = "mac-1", clock: float | None = None) -> TicketBook:
    book = TicketBook("demo", host, folder / "tickets", **({} if clock is None else {"clock": lambda: clock}))
    for text in texts:
        book.accept(text)
    return book


def group(version: int = 3, sweep: int = 7, index: int = 0, host: str = "mac-1") -> str:
    return keys.group("demo", version, host, sweep, index)


@pytest.fixture
def target(store: Store, tmp_path: Path) -> TicketTarget:
    """A Mac with tickets for groups 0 and 1 of sweep 7 at versions 3 and 4."""
    return TicketTarget(store, book_with(tmp_path, mint_of(store).make(INVITE, "mac-1", [Slots(7, 3, 2, 2)])))


def test_a_ticket_creates_its_object_once(store: Store, target: TicketTarget) -> None:
    assert target.create(group(), b"first") == f'"{hashlib.md5(b"first").hexdigest()}"'
    assert store.get(group(), max_bytes=100).data == b"first"
    with pytest.raises(ObjectExistsError):
        target.create(group(), b"second")
    assert store.get(group(), max_bytes=100).data == b"first"
    assert (store.meters.by_kind()["groups"].bytes_up, store.meters.by_kind()["groups"].requests_up) == (11, 2)


def test_tickets_are_for_the_granted_slots_at_the_granted_versions_only(store: Store, target: TicketTarget) -> None:
    for version in (3, 4):
        for index in (0, 1):
            target.create(group(version, index=index), b"x")
    for other in (group(2), group(5), group(index=2), group(sweep=8), group(host="mac-2"), keys.head("demo"), keys.run_json("demo")):
        with pytest.raises(TicketError, match="no ticket"):
            target.create(other, b"x")
    assert len(list(store.list("runs/"))) == 4


def test_a_forged_ticket_is_refused_by_the_bucket(store: Store, tmp_path: Path) -> None:
    wrong = mint_of(store, credentials=Credentials(CREDENTIALS.key, "guessed")).make(INVITE, "mac-1", [Slots(7, 3, 1, 1)])
    with pytest.raises(TicketError, match="SignatureDoesNotMatch") as caught:
        TicketTarget(store, book_with(tmp_path, wrong)).create(group(), b"x")
    assert "Signature=" not in f"{caught.value.message}{caught.value.hint}"
    assert list(store.list("runs/")) == []


def test_the_url_of_a_ticket_can_do_nothing_else(store: Store, tmp_path: Path) -> None:
    book = book_with(tmp_path, mint_of(store).make(INVITE, "mac-1", [Slots(7, 3, 1, 1)]))
    url = book.url(group(), store.settings.endpoint, store.settings.name)

    def status(method: str, to: str = url, body: bytes | None = None, **headers: str) -> int:
        request = urllib.request.Request(to, data=body, method=method, headers={k.replace("_", "-"): v for k, v in headers.items()})
        try:
            return urllib.request.urlopen(request).status
        except urllib.error.HTTPError as error:
            return error.code

    wrong_md5 = base64.b64encode(hashlib.md5(b"y").digest()).decode()
    tries = {
        "without the condition": status("PUT", body=b"x"),
        "another condition": status("PUT", body=b"x", If_None_Match='"abc"'),
        "another key": status("PUT", url.replace("00.safetensors", "01.safetensors"), b"x", If_None_Match="*"),
        "HEAD.json": status("PUT", url.replace(group(), keys.head("demo")), b"x", If_None_Match="*"),
        "another end": status("PUT", url.replace("Expires=604800", "Expires=604801"), b"x", If_None_Match="*"),
        "metadata of its own": status("PUT", body=b"x", If_None_Match="*", x_amz_meta_sha256="00"),
        "a copy": status("PUT", body=b"", If_None_Match="*", x_amz_copy_source=f"/{store.settings.name}/{keys.head('demo')}"),
        "read": status("GET", If_None_Match="*"),
        "delete": status("DELETE", If_None_Match="*"),
        "post": status("POST", body=b"x", If_None_Match="*"),
    }
    assert {what: code for what, code in tries.items() if code not in (400, 403, 405)} == {}
    assert status("PUT", body=b"x", If_None_Match="*", Content_MD5=wrong_md5) == 400
    assert list(store.list("runs/")) == []
    assert status("PUT", body=b"x", If_None_Match="*") == 200
    assert status("DELETE", If_None_Match="*") == 403
    assert store.get(group(), max_bytes=10).data == b"x"


def test_an_expired_ticket_is_no_ticket_and_the_bucket_agrees(store: Store, tmp_path: Path) -> None:
    import time

    old = mint_of(store).make(INVITE, "mac-1", [Slots(7, 3, 1, 1)], now=time.time() - presign.MAX_SECONDS - 5)
    with pytest.raises(TicketError, match="expired"):
        TicketTarget(store, book_with(tmp_path, old)).create(group(), b"x")
    believed = book_with(tmp_path, old, clock=time.time() - presign.MAX_SECONDS)
    assert believed.has(group())
    with pytest.raises(TicketError, match="does not take our ticket"):
        TicketTarget(store, believed).create(group(), b"x")
    fresh = mint_of(store).make(INVITE, "mac-1", whole=[group()])
    TicketTarget(store, book_with(tmp_path, old, fresh)).create(group(), b"x")


def test_a_silent_bucket_is_worth_another_try_and_its_error_shows_no_url(store: Store, tmp_path: Path) -> None:
    nowhere = Store(store.settings.model_copy(update={"endpoint": f"http://127.0.0.1:{free_ports(1)[0]}"}), CREDENTIALS)
    target = TicketTarget(nowhere, book_with(tmp_path, mint_of(nowhere).make(INVITE, "mac-1", [Slots(7, 3, 1, 1)])))
    with pytest.raises(ServiceUnavailableError) as caught:
        target.create(group(), b"x")
    assert "X-Amz" not in f"{caught.value} {caught.value.hint} {caught.value.__cause__}"
    assert caught.value.__suppress_context__


def test_tickets_survive_the_process_for_their_owner_only(tmp_path: Path) -> None:
    mint = Mint("demo", CREDENTIALS, "http://127.0.0.1:1", "stoa", "auto")
    first, second = (mint.make(INVITE, "mac-1", [Slots(sweep, 3, 1, 1)], now=AT) for sweep in (7, 8))
    book_with(tmp_path, first, second, clock=AT)
    again = book_with(tmp_path, clock=AT)
    assert again.has(group(sweep=7)) and again.has(group(sweep=8))
    assert stat.S_IMODE((tmp_path / "tickets").stat().st_mode) == 0o600
    assert not book_with(tmp_path, clock=AT + presign.MAX_SECONDS - 30).has(group(sweep=7))


def test_old_tickets_are_forgotten_and_a_torn_file_costs_only_them(tmp_path: Path) -> None:
    mint = Mint("demo", CREDENTIALS, "http://127.0.0.1:1", "stoa", "auto")
    book = book_with(tmp_path, *(mint.make(INVITE, "mac-1", [Slots(sweep, 3, 1, 1)], now=AT) for sweep in range(KEPT + 3)), clock=AT)
    assert [book.has(group(sweep=sweep)) for sweep in (2, 3, KEPT + 2)] == [False, True, True]
    path = tmp_path / "tickets"
    path.write_text(path.read_text()[:-40])
    assert [book_with(tmp_path, clock=AT).has(group(sweep=sweep)) for sweep in (KEPT + 1, KEPT + 2)] == [True, False]


def test_a_minting_is_bounded() -> None:
    mint = Mint("demo", CREDENTIALS, "http://127.0.0.1:1", "stoa", "auto")
    text = mint.make(INVITE, "mac-1", [Slots(7, 3, 2, 64)])
    assert len(text) < 6000
    assert len(read_tickets(text, "demo", "mac-1").signatures) == MAX_SIGNATURES
    with pytest.raises(FormatError):
        mint.make(INVITE, "mac-1", [Slots(7, 3, 3, 64)])


@given(st.one_of(st.text(max_size=80), st.binary(max_size=200).map(lambda b: f"{TICKET}{INVITE}:{base64.urlsafe_b64encode(b).decode()}")))
def test_nonsense_is_no_minting(text: str) -> None:
    with pytest.raises(FormatError):
        read_tickets(text, "demo", "mac-1")


def test_a_header_that_asks_for_too_much_is_no_minting() -> None:
    for put in ("[1,0,1000000000000,0]", "[1,0,99999999,0]", "[1,-1,1,1]", "[1,0,1,1,1]", "7"):
        head = f'{{"access":"a","at":1,"puts":[{put}],"region":"auto","seconds":1}}'.encode()
        with pytest.raises(FormatError):
            read_tickets(f"{TICKET}{INVITE}:{base64.urlsafe_b64encode(head + b'%c' % 10).decode()}", "demo", "mac-1")
