"""Answers of environments beside a sweep: bounded, in time, and what went wrong is raised where it is taken."""

import threading
import time
from collections.abc import Callable

import pytest

from stoa.contracts.errors import InfrastructureFaultError
from worker_mac.replies import Replies


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20.0
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def drained(replies: Replies[int], num: int) -> dict[int, Callable[[], int]]:
    found: dict[int, Callable[[], int]] = {}
    deadline = time.monotonic() + 20.0
    while len(found) < num:
        assert time.monotonic() < deadline
        replies.wait(0.05)
        found |= dict(replies.take())
    return found


def test_no_more_answers_are_worked_out_at_once_than_there_are_threads() -> None:
    lock, running, most = threading.Lock(), [0], [0]

    def work(number: int) -> int:
        with lock:
            running[0] += 1
            most[0] = max(most[0], running[0])
        time.sleep(0.002)
        with lock:
            running[0] -= 1
        return 10 * number

    replies: Replies[int] = Replies(20.0, num_threads=3)
    for episode in range(30):
        replies.ask(episode, lambda episode=episode: work(episode))
    found = drained(replies, 30)
    assert {episode: answer() for episode, answer in found.items()} == {episode: 10 * episode for episode in range(30)}
    assert most == [3]
    assert len(replies) == 0
    replies.close()


def test_what_a_tool_raises_is_raised_where_its_answer_is_taken() -> None:
    def outage() -> int:
        raise InfrastructureFaultError("away")

    def bug() -> int:
        raise ZeroDivisionError

    replies: Replies[int] = Replies(20.0)
    replies.ask(1, outage)
    replies.ask(2, bug)
    found = drained(replies, 2)
    with pytest.raises(InfrastructureFaultError, match="away"):
        found[1]()
    with pytest.raises(ZeroDivisionError):
        found[2]()
    replies.close()


def test_a_tool_that_hangs_costs_its_own_episode_and_those_behind_it_only_if_nothing_moves() -> None:
    release = threading.Event()
    replies: Replies[int] = Replies(0.5, num_threads=2)
    replies.ask(0, lambda: int(release.wait(20.0)))
    for episode in range(1, 8):  # each well within the limit, together beyond it: the second thread works through them
        replies.ask(episode, lambda: time.sleep(0.12) or 7)
    found = drained(replies, 8)
    with pytest.raises(InfrastructureFaultError, match="no answer in"):
        found[0]()
    assert [found[episode]() for episode in range(1, 8)] == [7] * 7
    replies.ask(8, lambda: int(release.wait(20.0)))
    replies.ask(9, lambda: 9)  # no thread is left for it
    stuck = drained(replies, 2)
    for episode in (8, 9):
        with pytest.raises(InfrastructureFaultError):
            stuck[episode]()
    release.set()
    replies.close()
