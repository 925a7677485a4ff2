"""When a Mac says hello, and how rarely when that changes nothing."""

import random
from collections.abc import Callable
from itertools import pairwise

from worker_mac.membership import LONGEST_RETRY_SECONDS, LONGEST_SILENCE_SECONDS, Greeter


def hellos(
    greeter: Greeter, seconds: int, *, taken: Callable[[int], bool] = lambda now: True, **how: float | bool
) -> list[tuple[int, str]]:
    """(second, reason) of the hellos of one that looks each second."""
    found: list[tuple[int, str]] = []
    for now in range(seconds):
        given = {"idle_seconds": float(now), **how}
        if reason := greeter.reason(float(now), **given):  # type: ignore[arg-type]
            found.append((now, reason))
            greeter.said(float(now), taken(now))
    return found


def gaps(found: list[tuple[int, str]]) -> list[int]:
    return [after[0] - before[0] for before, after in pairwise(found)]


def test_silence_is_broken_within_a_minute_and_then_ever_more_rarely():
    said = hellos(Greeter(random.Random(1)), 3600)
    assert [reason for _, reason in said[:2]] == ["start", "silence"]
    assert 30 <= said[1][0] <= 61
    assert max(gaps(said)) <= LONGEST_SILENCE_SECONDS + 1
    assert len(said) < 25, "an hour of silence is no hello a minute"


def test_one_that_plays_unasked_says_so_within_ten_seconds_and_then_ever_more_rarely():
    said = hellos(Greeter(random.Random(2)), 600, unasked=True, idle_seconds=0.0)
    assert said[1][1] == "unasked"
    assert said[1][0] <= 11
    assert len(said) <= 9


def test_one_that_was_asked_since_begins_anew():
    greeter = Greeter(random.Random(3))
    assert len(hellos(greeter, 600)) > 3
    assert greeter.reason(601.0, idle_seconds=0.0) == ""
    assert greeter.reason(661.0, idle_seconds=60.0) == "silence", "not after the four minutes it had come to"


def test_what_the_server_does_not_take_is_said_again_not_each_second_and_within_half_a_minute():
    said = hellos(Greeter(random.Random(4)), 600, taken=lambda now: now > 500)
    assert {reason for _, reason in said if _ <= 500} == {"start"}
    assert 17 <= sum(now <= 500 for now, _ in said) <= 45
    assert max(gaps([one for one in said if one[1] == "start"])) <= LONGEST_RETRY_SECONDS + 1


def test_sleep_and_a_sweep_that_was_given_up_are_told_at_once_whatever_failed_before():
    greeter = Greeter(random.Random(5))
    for _ in range(8):
        greeter.said(0.0, False)
    assert greeter.reason(1.0) == ""
    assert greeter.reason(2.0, tick_seconds=3600.0) == "wake"
    greeter.said(2.0, True)
    assert greeter.reason(3.0, lost=True) == "lost"
    greeter.said(3.0, True)
    assert greeter.reason(4.0) == ""


def test_a_thousand_macs_do_not_speak_at_once():
    seconds = [hellos(Greeter(random.Random(seed)), 70)[1][0] for seed in range(1000)]
    assert max(seconds.count(one) for one in set(seconds)) < 100
