"""Dealing the parts of an evaluation."""

from hypothesis import given
from hypothesis import strategies as st

from activities.connection import DATA_CONVERTER
from stoa.contracts.evaluation_messages import EvalPartDone, EvalPlayer
from workflows.parts import Deal, Handed, expire, hand, newest, next_handings, on_answer, players, redeal, trusted


def good(part: int, host: str) -> EvalPartDone:
    return EvalPartDone(part, host, ok=True, keys=(f"{part}-{host}",))


def bad(part: int, host: str) -> EvalPartDone:
    return EvalPartDone(part, host, ok=False, reason="disk full")


def test_each_idle_host_gets_one_part_in_order() -> None:
    deal = Deal(3)
    first = next_handings(deal, ("b", "a"), 0.0)
    assert first == (Handed(0, "a", 0.0), Handed(1, "b", 0.0))
    deal = hand(deal, first)
    assert next_handings(deal, ("a", "b"), 1.0) == ()
    deal = on_answer(deal, good(1, "b"), 2.0)
    assert next_handings(deal, ("a", "b"), 2.0) == (Handed(2, "b", 2.0),)


def test_failed_part_goes_to_another_host_at_once_and_the_failing_one_rests() -> None:
    deal = hand(Deal(1), (Handed(0, "a", 0.0),))
    deal = on_answer(deal, bad(0, "a"), 1.0)
    assert next_handings(deal, ("a", "b"), 1.0) == (Handed(0, "b", 1.0),)
    assert next_handings(deal, ("a",), 1.0) == ()
    assert next_handings(deal, ("a",), 6.0) == (Handed(0, "a", 6.0),)  # 5 s later, when nobody else can


def test_part_that_every_host_failed_last_is_still_given_out() -> None:
    deal = Deal(1)
    for host in ("a", "b"):
        deal = on_answer(hand(deal, (Handed(0, host, 0.0),)), bad(0, host), 1.0)
    assert next_handings(deal, ("a", "b"), 10.0) == (Handed(0, "a", 10.0),)


def test_silent_host_loses_its_part_and_a_late_answer_counts_once() -> None:
    deal = expire(hand(Deal(1), (Handed(0, "a", 0.0),)), 60.0, 59.0)
    assert deal.open_parts() == ()
    deal = expire(deal, 60.0, 60.0)
    assert deal.open_parts() == (0,)
    deal = hand(deal, next_handings(deal, ("a", "b"), 60.0))
    deal = on_answer(deal, good(0, "a"), 61.0)
    deal = on_answer(deal, good(0, "b"), 62.0)
    assert deal.is_done
    assert deal.keys == ("0-a",)


def test_answer_to_a_part_nobody_asked_for_is_ignored() -> None:
    deal = hand(Deal(2), (Handed(0, "a", 0.0),))
    assert on_answer(deal, good(7, "a"), 1.0) == deal
    assert on_answer(deal, bad(0, "z"), 1.0) == deal


@given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from("abc"), st.booleans(), st.integers(0, 40)), max_size=60))
def test_every_part_is_counted_exactly_once_whatever_is_answered(answers: list[tuple[int, str, bool, int]]) -> None:
    deal, now = Deal(5), 0.0
    for part, host, ok, seconds in answers:
        now += seconds
        deal = expire(deal, 60.0, now)
        deal = hand(deal, next_handings(deal, ("a", "b", "c"), now))
        playing = [(one.part, one.host) for one in deal.handed]
        assert len({host for _, host in playing}) == len(playing) == len({part for part, _ in playing})
        deal = on_answer(deal, good(part, host) if ok else bad(part, host), now)
        assert len({one.part for one in deal.done}) == len(deal.done)
        assert not {one.part for one in deal.done} & {one.part for one in deal.handed}
    for _ in range(100):
        now += 61.0
        deal = expire(deal, 60.0, now)
        deal = hand(deal, next_handings(deal, ("a", "b", "c"), now))
        for one in deal.handed:
            deal = on_answer(deal, good(one.part, one.host), now)
    assert deal.is_done
    assert [key.split("-")[0] for key in deal.keys] == ["0", "1", "2", "3", "4"]


def test_players_are_told_with_their_questions_an_hour_and_tokens_a_second() -> None:
    deal = hand(Deal(3), (Handed(0, "slow", 100.0), Handed(1, "fast", 100.0)))
    deal = on_answer(deal, EvalPartDone(1, "fast", True, ("k1",), "", 64, 3000, 10.0), 120.0)
    deal = hand(deal, (Handed(2, "fast", 120.0),))
    deal = on_answer(deal, EvalPartDone(2, "fast", True, ("k2",), "", 56, 3000, 10.0), 160.0)
    deal = on_answer(deal, EvalPartDone(0, "slow", True, ("k0",), "", 64, 3000, 80.0), 196.0)
    # 120 questions in 60 s are 7200 an hour; 64 in 96 s are 2400.
    assert players(deal) == (EvalPlayer("fast", 2, 120, 7200.0, 300.0), EvalPlayer("slow", 1, 64, 2400.0, 37.5))


def test_parts_that_were_no_good_are_dealt_again_to_others() -> None:
    deal = Deal(3)
    for part, host in enumerate(("a", "b", "a")):
        deal = on_answer(hand(deal, (Handed(part, host, float(part)),)), good(part, host), part + 10.0)
    deal = redeal(deal, (0, 2))
    assert (deal.open_parts(), deal.keys, deal.seconds, deal.barred) == ((0, 2), ("1-b",), (10.0,), ("a",))
    assert trusted(("a", "b"), deal.barred) == ("b",)
    assert redeal(on_answer(deal, good(2, "c"), 20.0), (2,)).barred == ("a", "c")
    assert redeal(deal, ()) == deal


def test_deal_of_hundreds_of_parts_fits_a_message() -> None:
    deal = hand(Deal(400), tuple(Handed(part, "h" * 48, 1e9) for part in range(400)))
    for part in range(300):
        deal = on_answer(deal, EvalPartDone(part, "h" * 48, True, ("k" * 110,), "", 64, 10**6, 1234.5), 1e9 + part)
    DATA_CONVERTER.payload_converter.to_payloads([newest(deal)])  # raises above 16 KiB
    assert newest(deal).num_parts == 400


def test_suspects_are_asked_only_where_there_is_nobody_else() -> None:
    assert trusted(("a", "b", "c"), ("b", "z")) == ("a", "c")
    assert trusted(("b",), ("b",)) == ("b",)
    assert trusted((), ("b",)) == ()
