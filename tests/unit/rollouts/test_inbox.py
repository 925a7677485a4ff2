"""Arrivals are told once, in order, from one listing of a real bucket."""

import time

from stoa.bucket import keys
from stoa.rollouts.inbox import Inbox

RUN = "inbox"


def put(store, version: int, host: str, sweep: int, index: int = 0) -> str:
    key = keys.group(RUN, version, host, sweep, index)
    store.create(key, key.encode())
    return key


def test_each_group_is_told_once_oldest_version_first(store):
    new = put(store, 4, "mac-a", 2)
    old = put(store, 3, "mac-b", 1)
    inbox = Inbox(store, RUN)
    assert [arrival.key for arrival in inbox.look()] == [old, new]
    assert inbox.look() == ()
    late = put(store, 3, "mac-a", 1)
    (arrival,) = inbox.look()
    assert arrival.key == late
    assert arrival.named == keys.GroupKey(RUN, 3, "mac-a", 1, 0)
    assert arrival.num_bytes == len(late)
    assert arrival.modified_at > 1.7e9


def test_of_one_version_what_arrived_first_comes_first(store):
    first = put(store, 3, "mac-b", 0)
    time.sleep(1.1)  # a bucket's clock may tell whole seconds
    second = put(store, 3, "mac-a", 0)
    assert [arrival.key for arrival in Inbox(store, RUN).look()] == [first, second]


def test_versions_before_the_window_are_not_listed(store):
    put(store, 2, "mac-a", 0)
    inside = [put(store, 3, "mac-a", 1), put(store, 10, "mac-a", 2)]
    assert [arrival.key for arrival in Inbox(store, RUN).look(3)] == inside


def test_settled_groups_and_other_runs_are_left_out(store):
    done = put(store, 1, "mac-a", 0)
    store.create(keys.group("inbox-two", 1, "mac-a", 0, 0), b"x")
    wanted = put(store, 1, "mac-a", 1)
    assert [arrival.key for arrival in Inbox(store, RUN, known=[done]).look()] == [wanted]


def test_a_group_put_back_is_told_again(store):
    key = put(store, 1, "mac-a", 0)
    inbox = Inbox(store, RUN)
    inbox.look()
    inbox.put_back(key)
    assert [arrival.key for arrival in inbox.look()] == [key]


def test_objects_that_are_no_groups_are_counted_and_passed_over(store):
    store.create(f"{keys.groups_prefix(RUN)}v00000001/mac-a/readme.txt", b"hello")
    key = put(store, 1, "mac-a", 0)
    inbox = Inbox(store, RUN)
    assert [arrival.key for arrival in inbox.look()] == [key]
    inbox.look()
    assert inbox.num_junk == 1


def test_what_comes_under_a_barred_key_is_told_each_time_it_comes(store):
    key = put(store, 3, "mac-a", 1)
    inbox = Inbox(store, RUN)
    (first,) = inbox.look()
    assert not inbox.is_barred(key)
    inbox.bar(first)
    assert (inbox.look(), inbox.is_barred(key)) == ((), True)
    store.delete([key])
    assert inbox.look() == ()
    put(store, 3, "mac-a", 1)  # the same bytes, perhaps within the same second of the bucket's clock
    assert [arrival.key for arrival in inbox.look()] == [key]
    store.delete([key])
    store.create(key, b"others, between two looks")
    assert [arrival.key for arrival in inbox.look()] == [key]
    assert inbox.look() == ()
