"""What an invited Mac is granted beside its questions: tickets, which of its groups are there, or a reason for nothing."""

import time
from dataclasses import replace
from pathlib import Path

import pytest

from stoa.bucket import keys
from stoa.bucket.head import HeadWriter
from stoa.bucket.keys import GroupKey
from stoa.bucket.revocations import Revoked, revoke
from stoa.bucket.steps import Refused
from stoa.bucket.store import Store
from stoa.bucket.tickets import MAX_KEYS, MAX_SIGNATURES, Mint, TicketBook, read_tickets
from stoa.bucket.uploads import TicketTarget
from stoa.contracts.errors import TicketError
from stoa.contracts.fleet_messages import Grant, GrantRequest
from stoa.learning.fleet import FleetBook
from stoa.rollouts.admit import DAMNING, Reason
from stoa.rollouts.shard import MAX_GROUP_BYTES
from tests.servers import CREDENTIALS, MAC_CREDENTIALS, BucketServer
from tests.unit.trainer_gpu.runs import Reports, config_of, start_run
from trainer_gpu.grants import GrantKeeper
from trainer_gpu.run_handle import RunHandle
from trainer_gpu.tickets import MAX_VERSIONS, MIN_VERSIONS, TicketCounter

INVITE = "mac-1.0123abcd"
QUESTIONS = [f"q{i:03d}" for i in range(400)]


@pytest.fixture
def handle(store: Store) -> RunHandle:
    return start_run(store, config_of(store, groups_per_step=8, steps_per_version=4, max_staleness=3, max_staleness_hard=4))


def mint_of(store: Store) -> Mint:
    return Mint("test", CREDENTIALS, store.settings.endpoint, store.settings.name, store.settings.region)


def keeper(handle: RunHandle) -> GrantKeeper:
    key = handle.signer.public_key
    revoked = Revoked(handle.store, "test", key, look_seconds=0.0)
    return GrantKeeper(handle.store, handle.config, key, QUESTIONS, tickets=(mint_of(handle.store), revoked), refresh_seconds=0.0)


def head(handle: RunHandle, version: int) -> HeadWriter:
    writer = HeadWriter(handle.store, handle.run, handle.signer, owner="gpu", interval_seconds=0.0)
    writer.acquire(1001)
    writer.swap(1001, version=version, manifest_key="m", manifest_sha256="s")
    return writer


def request(sweep: int = 0, *, host: str = "mac-1", invite: str = INVITE, num: int = 8, **more: object) -> GrantRequest:
    return replace(GrantRequest("test", host, sweep, num, invite=invite), **more)


def covered(grant: Grant) -> set[str]:
    return set(read_tickets(grant.tickets, "test", grant.host).signatures)


def group(version: int, sweep: int, index: int, host: str = "mac-1") -> str:
    return keys.group("test", version, host, sweep, index)


def test_a_granted_mac_can_ship_what_it_was_granted_and_nothing_else(
    handle: RunHandle, bucket_server: BucketServer, tmp_path: Path
) -> None:
    head(handle, 5)
    grant = keeper(handle).grant(request(), Reports())
    assert len(grant.question_ids) == 8
    assert covered(grant) == {group(version, 0, index) for version in range(5, 5 + MIN_VERSIONS) for index in range(8)}
    book = TicketBook("test", "mac-1", tmp_path / "tickets")
    book.accept(grant.tickets)
    target = TicketTarget(bucket_server.store(handle.store.settings.name, credentials=MAC_CREDENTIALS), book)
    for index in range(8):
        target.create(group(6, 0, index), b"x")
    for other in (group(4, 0, 0), group(6, 0, 8), group(6, 1, 0), group(6, 0, 0, "mac-2"), keys.head("test")):
        with pytest.raises(TicketError):
            target.create(other, b"x")


def test_an_owners_mac_gets_no_tickets(handle: RunHandle) -> None:
    head(handle, 0)
    grant = keeper(handle).grant(request(invite=""), Reports())
    assert (len(grant.question_ids), grant.tickets) == (8, "")


def test_a_repeated_grant_says_what_is_there_already(handle: RunHandle) -> None:
    head(handle, 0)
    desk = keeper(handle)
    first = desk.grant(request(), Reports())
    assert first.shipped == ()
    for version, index in ((0, 2), (1, 5)):
        handle.store.create(group(version, 0, index), b"x")
    handle.store.create(group(0, 1, 3), b"x")
    handle.store.create(group(0, 0, 4, "mac-2"), b"x")
    again = desk.grant(request(), Reports())
    assert (again.question_ids, again.shipped) == (first.question_ids, (2, 5))
    assert desk.grant(request(invite=""), Reports()).shipped == (2, 5)


def test_a_revoked_mac_is_granted_nothing_and_what_it_owed_is_free(handle: RunHandle) -> None:
    head(handle, 0)
    desk = keeper(handle)
    for sweep in range(16):
        assert desk.grant(request(sweep, ended_before=sweep), Reports()).tickets
    assert desk.grant(request(0, host="mac-2", invite="mac-2.00000000"), Reports()).question_ids
    revoke(handle.store, handle.signer, "test", INVITE, "sold")
    answer = desk.grant(request(16), Reports())
    assert (answer.question_ids, answer.tickets, answer.run_state, answer.refused) == ((), "", "stopped", True)
    assert "sold" in answer.reason
    assert desk.grant(request(16, ended_before=16, invite="mac-1.ffffffff"), Reports()).question_ids  # another invitation of the same host
    revoke(handle.store, handle.signer, "test", "mac-1")
    for invite in ("mac-1.ffffffff", ""):
        assert desk.grant(request(17, invite=invite), Reports()).run_state == "stopped"
    assert desk.on_the_way()[0] == 8  # mac-2's alone


@pytest.mark.parametrize("invite", ["mac-2.0123abcd", "mac-1", "mac-1.0123ABCD", "nonsense"])
def test_an_invitation_of_another_host_is_none(handle: RunHandle, invite: str) -> None:
    head(handle, 0)
    answer = keeper(handle).grant(request(invite=invite), Reports())
    assert (answer.question_ids, answer.run_state) == ((), "stopped")


def test_a_mac_that_sends_too_large_an_object_gets_no_more_tickets(handle: RunHandle) -> None:
    head(handle, 0)
    desk = keeper(handle)
    assert desk.grant(request(), Reports()).tickets
    handle.store.create(group(0, 0, 0), bytes(MAX_GROUP_BYTES + 1))
    desk.on_the_way()  # it looks at the bucket
    assert "is the most" in desk.grant(request(1), Reports()).reason
    assert desk.grant(request(0, host="mac-2", invite="mac-2.00000000"), Reports()).tickets


def test_a_mac_whose_groups_are_too_large_is_suspected_after_the_third() -> None:
    assert Reason.TOO_LARGE in DAMNING
    book = FleetBook(DAMNING)
    sent = [Refused(group(0, 0, slot), "mac-1", Reason.TOO_LARGE) for slot in range(3)]
    assert book.suspects(pending=sent[:2]) == ()
    assert [(one.host, one.reason) for one in book.suspects(pending=sent)] == [("mac-1", "3 groups refused, most as too_large")]


def test_a_mac_without_a_ticket_for_what_it_has_gets_one(handle: RunHandle, store: Store) -> None:
    head(handle, 5)
    desk = keeper(handle)
    desk.grant(request(), Reports())
    lost, granted = group(3, 0, 1), group(9, 0, 1)
    unsent = (lost, granted, group(0, 0, 1), group(5, 9, 0), group(5, 0, 60), group(5, 0, 1, "mac-2"), keys.head("test"), "x")
    renewed = desk.grant(request(1, ended_before=1, unsent=unsent), Reports())
    assert lost in covered(renewed)  # granted, and of a version that still counts
    assert covered(renewed) & set(unsent) == {lost}
    old = replace(renewed, tickets="")
    assert old.question_ids


def test_a_part_of_an_evaluation_has_a_ticket_also_again(handle: RunHandle) -> None:
    head(handle, 5)
    desk = keeper(handle)
    part = keys.eval_part("test", 4, "final", 3, "mac-1")
    other = keys.eval_part("test", 4, "final", 9, "mac-1")
    assert desk.grant(request(1, unsent=(part,)), Reports()).tickets
    assert part not in covered(desk.grant(request(1, unsent=(part,)), Reports()))  # never dealt
    grant = desk.grant(request(2, num=0, evaluation="final", version=4, part=3), Reports())
    assert (grant.question_ids, covered(grant)) == ((), {part})
    assert covered(desk.grant(request(3, unsent=(part, other)), Reports())) & {part, other} == {part}
    assert desk.grant(request(3, host="mac-2", invite="mac-2.00000000", unsent=(part,)), Reports()).tickets


class Granted:
    def __call__(self, slot: GroupKey) -> bool:
        return slot.group < 8


def counter() -> TicketCounter:
    class NobodyRevoked:
        def reason(self, host: str, invite: str) -> None:
            return None

    return TicketCounter("test", Mint("test", CREDENTIALS, "http://b:1", "b", "auto"), NobodyRevoked(), Granted(), max_staleness_hard=8)


def versions(desk: TicketCounter, sweep: int, version: int, *, num: int = 8, ended_before: int | None = None) -> set[int]:
    grant = Grant("test", "mac-1", sweep, tuple(QUESTIONS[:num]))
    asked = request(sweep, num=num, ended_before=sweep if ended_before is None else ended_before)
    return {keys.parse_group(key).version for key in covered(desk.with_tickets(asked, grant, version, ()))}


def test_tickets_reach_as_far_as_versions_come_fast() -> None:
    desk = counter()
    assert versions(desk, 0, 10) == set(range(10, 10 + MIN_VERSIONS))
    assert versions(desk, 1, 11) == set(range(11, 11 + MIN_VERSIONS))
    assert versions(desk, 2, 14) == set(range(14, 22))  # three versions a sweep: two sweeps' worth, and two more
    assert versions(desk, 6, 16, ended_before=3) == set(range(16, 16 + MAX_VERSIONS))  # two a sweep, three sweeps ahead
    assert versions(desk, 7, 17, num=64) == {17, 18}
    assert versions(desk, 8, 17, num=100) == {17}


def test_a_grant_with_all_it_may_hold_fits_a_message() -> None:
    from activities.connection import DATA_CONVERTER

    desk = counter()
    grant = Grant("test", "mac-1", 3, tuple(f"question-{i:040d}" for i in range(64)))
    unsent = tuple(group(3, 1, index % 8) for index in range(99))
    full = desk.with_tickets(request(3, num=64, unsent=unsent), grant, 9, ())
    assert MAX_SIGNATURES - 64 < len(covered(full)) <= MAX_SIGNATURES
    DATA_CONVERTER.payload_converter.to_payloads([full])
    assert len(desk._may_send(request(unsent=tuple(group(v, 1, i) for v in range(1, 9) for i in range(8))), 9)) == MAX_KEYS


@pytest.mark.parametrize("ahead", [600.0, -600.0])
def test_clocks_that_are_ten_minutes_apart_cost_no_upload(store: Store, bucket_server: BucketServer, tmp_path: Path, ahead: float) -> None:
    """The control process is ahead of the bucket, the Mac as far behind it, and the other way round."""
    mint, book = mint_of(store), TicketBook("test", "mac-1", tmp_path / "tickets", clock=lambda: time.time() - ahead)
    book.accept(mint.make(INVITE, "mac-1", whole=[group(0, 0, 0)], now=time.time() + ahead))
    target = TicketTarget(bucket_server.store(store.settings.name, credentials=MAC_CREDENTIALS), book)
    target.create(group(0, 0, 0), b"x")
    assert store.exists(group(0, 0, 0))
