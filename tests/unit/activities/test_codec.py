"""The payload codec: tickets are hidden, everything else is as it was, and no payload makes it fail."""

import base64
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from temporalio.api.common.v1 import Payload

from activities.codec import TicketCodec, seal, unseal
from activities.connection import DATA_CONVERTER
from stoa.contracts.fleet_messages import Grant, SweepResult
from stoa.contracts.messages import StepResult
from stoa.contracts.sealed import host_of, is_invite

INVITE, OTHER = "mac-1.0123abcd", "mac-2.0123abcd"
KEYS = {INVITE: bytes(range(32)), OTHER: bytes(32)}
TICKETS = f"put1:{INVITE}:{base64.urlsafe_b64encode(b'signature' * 9).decode()}"
SEALS = TicketCodec(KEYS.get, opens=False)
OPENS = TicketCodec(KEYS.get, opens=True)


async def test_a_grant_crosses_readable_but_for_its_tickets_and_its_mac_opens_them() -> None:
    grant = Grant("demo", "mac-1", 7, ("q1", "q2"), 3, tickets=TICKETS, shipped=(1,))
    clear = DATA_CONVERTER.payload_converter.to_payloads([grant])
    (crossed,) = await SEALS.encode(clear)
    shown = json.loads(crossed.data)
    assert shown.pop("tickets").startswith(f"sealed1:{INVITE}:")
    assert (shown["question_ids"], shown["min_version"], shown["shipped"], shown["host"]) == (["q1", "q2"], 3, [1], "mac-1")
    assert base64.urlsafe_b64encode(b"signature" * 9) not in crossed.data
    (kept,) = await SEALS.decode([crossed])  # what a workflow sees, and hands on
    assert kept == crossed
    (again,) = await SEALS.encode([kept])
    assert again == crossed
    (opened,) = await OPENS.decode([again])
    assert DATA_CONVERTER.payload_converter.from_payloads([opened], [Grant]) == [grant]


async def test_a_step_and_a_sweeps_result_cross_as_they_are() -> None:
    messages = [
        StepResult("done", 7, "runs/demo/steps/e1001/s00000007.json", 8, 0.5),
        SweepResult("done", 7, num_groups=8, reason="all well"),
    ]
    clear = DATA_CONVERTER.payload_converter.to_payloads(messages)
    assert await SEALS.encode(clear) == clear == await OPENS.decode(clear)


async def test_another_mac_and_a_tampered_text_stay_sealed() -> None:
    sealed = seal(TICKETS, KEYS.get)
    assert unseal(sealed, {INVITE: bytes(32)}.get) == sealed
    assert unseal(sealed, {}.get) == sealed
    moved = sealed.replace(INVITE, OTHER)
    assert unseal(moved, {OTHER: KEYS[INVITE]}.get) == moved
    changed = sealed[:-4] + ("AAAA" if sealed[-4:] != "AAAA" else "BBBB")
    assert unseal(changed, KEYS.get) == changed
    assert unseal(sealed, KEYS.get) == TICKETS


def test_same_tickets_are_sealed_differently_each_time() -> None:
    assert seal(TICKETS, KEYS.get) != seal(TICKETS, KEYS.get)


def test_tickets_without_a_key_are_struck_out() -> None:
    assert seal(TICKETS, {}.get) == f"sealed1:{INVITE}:"


@pytest.mark.parametrize(
    "text", ["put1:", "put1:x:y", f"put1:{INVITE}:a", f"put1:{INVITE}:%%%%", "put1::", f"put1:{INVITE}", "sealed1:::::"]
)
async def test_what_only_looks_like_a_ticket_stays_as_it_is(text: str) -> None:
    payload = Payload(metadata={"encoding": b"json/plain"}, data=json.dumps({"reason": text}).encode())
    for codec in (SEALS, OPENS):
        for work in (codec.encode, codec.decode):
            (found,) = await work([payload])
            assert json.loads(found.data) == {"reason": text}


@given(st.binary(max_size=60), st.sampled_from([b'"put1:', b'"sealed1:', b""]), st.binary(max_size=60))
async def test_no_payload_makes_the_codec_fail(before: bytes, mark: bytes, after: bytes) -> None:
    payload = Payload(metadata={"encoding": b"json/plain"}, data=before + mark + after)
    assert len(await OPENS.decode(await SEALS.encode([payload]))) == 1


async def test_a_payload_of_deep_brackets_or_half_a_character_passes() -> None:
    for data in (b'["put1:x"' + b"[" * 100_000, b'["put1:x", "\\ud800"]', b'["put1:x", NaN]'):
        (found,) = await SEALS.encode([Payload(data=data)])
        assert found.data.startswith(b'["put1:x"')


@pytest.mark.parametrize(
    ("text", "expected"),
    [(INVITE, True), ("a.00000000", True), ("mac-1", False), ("mac-1.0123ABCD", False), ("mac-1.0123abcd\n", False), (".0123abcd", False)],
)
def test_form_of_an_invite(text: str, expected: bool) -> None:
    assert is_invite(text) is expected


def test_an_invite_names_its_host() -> None:
    assert host_of("mac-1.0123abcd") == "mac-1"
