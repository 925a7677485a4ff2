"""An invited Mac's engine at a real bucket: a key that only reads, tickets for what it writes, and renewals of them."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from stoa.bucket import keys, presign
from stoa.bucket.store import Store
from stoa.bucket.tickets import Mint, Slots, TicketBook
from stoa.contracts.errors import InviteError, TicketError
from stoa.contracts.fleet_messages import SweepRequest
from tests.servers import CREDENTIALS, MAC_CREDENTIALS, BucketServer
from tests.unit.worker_mac.publishing import Publishing, Quiet, train_request
from tests.unit.worker_mac.tasks import Dialogue
from worker_mac.engine import MacEngine, Waits
from worker_mac.invited import INVITE_FILE, enter
from worker_mac.uploader import Spool, Uploader

INVITE = "mac-1.0123abcd"
Make = Callable[[], MacEngine]


@pytest.fixture
def published(store: Store, tmp_path: Path) -> Publishing:
    folder = tmp_path / "base"
    folder.mkdir()
    run = Publishing(store, folder)
    run.publish()
    return run


@pytest.fixture
def mint(store: Store) -> Mint:
    return Mint("demo", CREDENTIALS, store.settings.endpoint, store.settings.name, store.settings.region)


@pytest.fixture
def make(published: Publishing, bucket_server: BucketServer, tmp_path: Path) -> Iterator[Make]:
    """Starts a worker process's engine in the same state folder, again and again."""
    engines: list[MacEngine] = []

    def build() -> MacEngine:
        for engine in engines:
            engine.close()
        folder = tmp_path / "mac-1"
        folder.mkdir(exist_ok=True)
        engines.append(
            MacEngine(
                bucket_server.store(published.store.settings.name, credentials=MAC_CREDENTIALS),
                published.document,
                Dialogue(),
                host="mac-1",
                folder=folder,
                model_folder=tmp_path / "base",
                waits=Waits(pause=20.0, version=20.0),
                tickets=TicketBook("demo", "mac-1", folder / "tickets"),
            )
        )
        return engines[-1]

    yield build
    engines[-1].close()


def shipped(store: Store, version: int, sweep: int) -> set[int]:
    found = (listed.key for listed in store.list(keys.groups_of_sweep("demo", version, "mac-1", sweep)))
    return {parts.group for _, parts in keys.ours(found, keys.parse_group)}


def with_tickets(request: SweepRequest, mint: Mint, first: int = 0, num: int = 4, whole: tuple[str, ...] = ()) -> SweepRequest:
    slots = [Slots(request.sweep, first, num, len(request.question_ids))] if num else []
    return replace(request, tickets=mint.make(INVITE, request.host, slots, whole))


def test_a_sweep_ships_with_tickets_and_a_key_that_only_reads(published: Publishing, make: Make, mint: Mint) -> None:
    result = make().sweep(with_tickets(train_request(), mint), Quiet())
    assert (result.status, result.num_groups, result.unsent) == ("done", 8, ())
    assert shipped(published.store, 0, 0) == set(range(8))
    assert result.bytes_up == sum(listed.num_bytes for listed in published.store.list(keys.groups_prefix("demo")))


def test_what_the_grant_says_is_there_is_not_played_again(published: Publishing, make: Make, mint: Mint) -> None:
    request = replace(with_tickets(train_request(), mint), shipped=(0, 1, 2, 6))
    assert make().sweep(request, Quiet()).num_groups == 4
    assert shipped(published.store, 0, 0) == {3, 4, 5, 7}
    assert make().sweep(replace(request, shipped=(0, 1, 2, 3, 4, 5, 6, 7)), Quiet()).num_groups == 0


def test_groups_without_a_ticket_wait_and_go_out_with_the_next_grant(published: Publishing, make: Make, mint: Mint) -> None:
    """The version came on faster than the grant foresaw; then the worker is started again, and then tickets come."""
    published.publish()
    result = make().sweep(with_tickets(train_request(), mint, first=0, num=1), Quiet())
    waiting = tuple(keys.group("demo", 1, "mac-1", 0, index) for index in range(8))
    assert (result.status, result.num_groups, set(result.unsent)) == ("done", 8, set(waiting))
    assert shipped(published.store, 1, 0) == set()
    again = make().sweep(with_tickets(train_request(1), mint, first=1), Quiet())
    assert (again.num_groups, set(again.unsent), shipped(published.store, 1, 1)) == (8, set(waiting), set(range(8)))
    last = make().sweep(with_tickets(train_request(2), mint, first=1, whole=again.unsent), Quiet())
    assert (last.unsent, shipped(published.store, 1, 0)) == ((), set(range(8)))


def test_a_redone_sweep_does_not_play_what_waits_for_a_ticket(published: Publishing, make: Make, mint: Mint) -> None:
    published.publish()
    engine = make()
    engine.sweep(with_tickets(train_request(), mint, first=0, num=1), Quiet())
    redone = engine.sweep(with_tickets(train_request(), mint, first=1), Quiet())
    assert (redone.num_groups, redone.unsent, shipped(published.store, 1, 0)) == (0, (), set(range(8)))


@pytest.mark.parametrize("text", ["", "sealed1:mac-1.0123abcd:AAAA", "nonsense"])
def test_tickets_that_cannot_be_opened_cost_no_sweep(published: Publishing, make: Make, text: str) -> None:
    result = make().sweep(replace(train_request(), tickets=text), Quiet())
    assert (result.status, result.num_groups, len(result.unsent)) == ("done", 8, 8)
    assert shipped(published.store, 0, 0) == set()


def test_tickets_signed_for_another_endpoint_are_renewed_until_they_fit(published: Publishing, make: Make, mint: Mint) -> None:
    settings = published.store.settings
    elsewhere = Mint("demo", CREDENTIALS, "http://bucket.example.org", settings.name, settings.region)
    engine = make()
    result = engine.sweep(with_tickets(train_request(), elsewhere), Quiet())
    assert len(result.unsent) == 8
    assert engine.sweep(with_tickets(train_request(1), mint, whole=result.unsent), Quiet()).unsent == ()
    assert shipped(published.store, 0, 0) == shipped(published.store, 0, 1) == set(range(8))


def test_a_part_of_an_evaluation_ships_with_its_ticket_and_fails_without(published: Publishing, make: Make, mint: Mint) -> None:
    part = SweepRequest("demo", "mac-1", 0, "eval", tuple(str(n) for n in range(8)), 1, version=0, evaluation="first", part=2)
    key = keys.eval_part("demo", 0, "first", 2, "mac-1")
    engine = make()
    with pytest.raises(TicketError, match="part 2 of evaluation first"):
        engine.sweep(part, Quiet())
    result = engine.sweep(with_tickets(part, mint, num=0, whole=(key,)), Quiet())
    assert (result.keys, published.store.exists(key)) == ((key,), True)


def test_no_ticket_is_written_where_others_may_read_it(published: Publishing, make: Make, mint: Mint, tmp_path: Path) -> None:
    request = with_tickets(train_request(), mint)
    make().sweep(request, Quiet())
    holding = [path for path in tmp_path.rglob("*") if path.is_file() and b"put1:" in path.read_bytes()]
    assert [path.name for path in holding] == ["tickets"]
    assert holding[0].stat().st_mode & 0o077 == 0


class Sometimes:
    """A target that has tickets for some keys."""

    def __init__(self) -> None:
        self.tickets: set[str] = set()
        self.sent: list[str] = []

    def create(self, key: str, data: bytes, *, kind: str = "") -> str:
        if key not in self.tickets:
            raise TicketError(f"{key}: no ticket")
        self.sent.append(key)
        return "etag"


def test_objects_without_a_ticket_hold_nobody_up_and_none_is_lost(tmp_path: Path) -> None:
    target, spool = Sometimes(), Spool(tmp_path)
    target.tickets = {"b", "d"}
    uploader = Uploader(target, spool)
    for key in "abcd":
        uploader.put(key, key.encode())
    assert uploader.wait(10)
    assert (target.sent, uploader.unsent(), sorted(uploader.pending()), spool.held()) == (["b", "d"], ["a", "c"], ["a", "c"], ["a", "c"])
    uploader.put("a", b"a")  # said twice, waits once
    target.tickets.add("c")
    uploader.retry(target.tickets.__contains__)
    assert uploader.wait(10)
    assert (target.sent, uploader.unsent()) == (["b", "d", "c"], ["a"])
    stop = threading.Event()

    def hurry() -> None:
        while not stop.is_set():
            uploader.retry(lambda key: True)

    threads = [threading.Thread(target=hurry) for _ in range(3)]
    for thread in threads:
        thread.start()
    target.tickets.add("a")
    for _ in range(200):
        uploader.retry(lambda key: True)
    stop.set()
    for thread in threads:
        thread.join()
    assert uploader.wait(10)
    uploader.close()
    assert (set(target.sent), uploader.unsent(), spool.held()) == (set("abcd"), [], [])


def test_seven_days_is_what_a_ticket_is_good_for(mint: Mint) -> None:
    from stoa.bucket.tickets import read_tickets

    assert (
        read_tickets(mint.make(INVITE, "mac-1", [Slots(0, 0, 1, 1)]), "demo", "mac-1").scope.seconds == presign.MAX_SECONDS == 7 * 24 * 3600
    )


@pytest.mark.parametrize("left", [b"", b"\0\0", b"stoa1.\xff\xfe"])
def test_a_damaged_invitation_is_refused_in_words(tmp_path: Path, left: bytes) -> None:
    (tmp_path / INVITE_FILE).write_bytes(left)
    with pytest.raises(InviteError, match="join token"):
        enter(None, tmp_path)
