"""An engine whose Mac is sensed: it pauses, rests and narrows as its owner allows, and loses no finished group."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from environments.base import Reply
from stoa.bucket import keys
from stoa.bucket.store import Store
from stoa.config.host import MacHost
from tests.unit.worker_mac.publishing import Publishing, Quiet, train_request
from tests.unit.worker_mac.tasks import Dialogue
from worker_mac.engine import MacEngine, Waits
from worker_mac.guest import Guest, said_now
from worker_mac.holds import Awake
from worker_mac.panics import Caution
from worker_mac.power import Senses


class Sensed:
    """A Mac in the test's hands."""

    def __init__(self) -> None:
        self.senses = Senses(0.0, on_mains=True, idle_seconds=1e5)

    def read(self) -> Senses:
        return replace(self.senses, now_seconds=time.monotonic())


class Interrupting(Dialogue):
    """Questions 0 and 1 take one turn; once all their episodes have ended, `act` is called."""

    def __init__(self, act: Callable[[], object]) -> None:
        super().__init__()
        self.act, self.num_left, self.num_turns_after = act, 16, -1

    def reply(self, question_id, turns):
        if int(question_id) > 1:
            self.num_turns_after += self.num_left == 0
            return super().reply(question_id, turns)
        self.num_left -= 1
        if self.num_left == 0:
            self.act()
        return Reply((), True, "answered")


Make = Callable[..., MacEngine]


@pytest.fixture
def mac() -> Sensed:
    return Sensed()


@pytest.fixture
def published(store: Store, tmp_path: Path) -> Publishing:
    folder = tmp_path / "base"
    folder.mkdir()
    run = Publishing(store, folder)
    run.publish()
    return run


@pytest.fixture
def make(published: Publishing, tmp_path: Path) -> Iterator[Make]:
    engines: list[MacEngine] = []

    def build(guest: Guest, environment: Dialogue | None = None, *, host: str = "mac-1") -> MacEngine:
        folder = tmp_path / host
        folder.mkdir(exist_ok=True)
        document, waits = published.document, Waits(pause=0.5, version=20.0)
        engine = MacEngine(
            published.store, document, environment or Dialogue(), host=host, folder=folder, model_folder=tmp_path / "base",
            waits=waits, guest=guest,
        )  # fmt: skip
        engines.append(engine)
        return engine

    yield build
    for engine in engines:
        engine.close()


def shipped(store: Store, host: str = "mac-1", sweep: int = 0) -> dict[str, str]:
    return {
        listed.key: store.get(listed.key, max_bytes=1 << 22).etag for listed in store.list(keys.groups_of_sweep("demo", 0, host, sweep))
    }


def test_a_mac_in_use_starts_nothing_says_why_and_plays_when_it_is_left(published: Publishing, make: Make, mac: Sensed) -> None:
    guest = Guest(MacHost(when="idle_only"), mac)
    mac.senses = replace(mac.senses, idle_seconds=1.0)
    guest.look()
    engine, progress = make(guest), Quiet()
    result = engine.sweep(train_request(), progress)
    assert (result.status, result.reason, result.num_groups) == ("paused", "paused: somebody uses the Mac", 0)
    assert "paused: somebody uses the Mac" in progress.details
    assert shipped(published.store) == {}
    mac.senses = replace(mac.senses, idle_seconds=301.0)
    guest.look()
    assert engine.sweep(train_request(), Quiet()).status == "done"


def test_an_owner_who_comes_back_ends_the_sweep_within_a_step_and_finished_groups_stay(
    published: Publishing, make: Make, mac: Sensed
) -> None:
    guest = Guest(MacHost(when="idle_only"), mac)

    def come_back() -> None:
        mac.senses = replace(mac.senses, idle_seconds=0.0)
        guest.look()

    environment = Interrupting(come_back)
    engine = make(guest, environment)
    result = engine.sweep(train_request(), Quiet())
    assert (result.status, result.reason) == ("paused", "paused: somebody uses the Mac")
    assert environment.num_turns_after < 48  # the step in which it happened ends, no further one is begun
    first = shipped(published.store)
    assert 2 <= len(first) == result.num_groups < 8
    mac.senses = replace(mac.senses, idle_seconds=400.0)
    guest.look()
    again = engine.sweep(train_request(), Quiet())
    assert (again.status, again.num_groups) == ("done", 8 - len(first))
    assert first.items() <= shipped(published.store).items()


def test_unplugging_lets_groups_in_hand_finish_for_a_moment(published: Publishing, make: Make, mac: Sensed) -> None:
    guest = Guest(MacHost(), mac)

    def unplug() -> None:
        mac.senses = replace(mac.senses, on_mains=False)
        guest.look()

    result = make(guest, Interrupting(unplug)).sweep(train_request(), Quiet())
    assert (result.status, result.num_groups) == ("done", 8)  # this tiny sweep takes less than the moment
    result = make(guest, host="mac-2").sweep(train_request(host="mac-2"), Quiet())
    assert (result.status, result.reason) == ("paused", "paused: the Mac is on battery")


def test_a_gentle_sweep_gives_the_groups_of_a_full_one(published: Publishing, make: Make, mac: Sensed) -> None:
    guest = Guest(MacHost(), mac)
    engine = make(guest)
    assert engine.sweep(train_request(), Quiet()).status == "done"
    full = shipped(published.store)
    published.store.delete(full)
    mac.senses = replace(mac.senses, idle_seconds=1.0)
    assert guest.look().state == "gentle"
    assert engine.sweep(train_request(), Quiet()).status == "done"
    assert sorted(shipped(published.store)) == sorted(full)


def test_a_hot_mac_rests_goes_on_and_reports_its_heat(published: Publishing, make: Make, mac: Sensed) -> None:
    guest = Guest(MacHost(), mac)
    mac.senses = replace(mac.senses, thermal="serious")
    guest.look()
    result = make(guest).sweep(train_request(), Quiet())
    assert (result.status, result.num_groups, result.heat, guest.decision.duty) == ("done", 8, "serious", 0.5)


def test_a_gentle_guest_rests_as_long_as_it_works(mac: Sensed) -> None:
    guest = Guest(MacHost(), mac)
    began = time.monotonic()
    guest.look()
    guest.rest(10.0)
    assert time.monotonic() - began < 8.0, "nobody is here: no rest"
    mac.senses = replace(mac.senses, idle_seconds=1.0)
    guest.look()
    began = time.monotonic()
    guest.rest(0.2)
    assert 0.2 <= time.monotonic() - began < 5.0


def test_on_a_hotspot_finished_groups_wait_on_disk_and_leave_afterwards(published: Publishing, make: Make, mac: Sensed) -> None:
    guest = Guest(MacHost(), mac)

    def connect_hotspot() -> None:
        mac.senses = replace(mac.senses, on_hotspot=True)
        guest.look()

    engine = make(guest, Interrupting(connect_hotspot))
    result = engine.sweep(train_request(), Quiet())
    assert (result.status, result.reason) == ("paused", "paused: the Mac is on a phone's hotspot")
    assert len(shipped(published.store)) <= 2  # those that were finished before the hotspot
    assert guest.spool_bytes > 0
    guest.decision = replace(guest.decision, kind="none", state="full", reason="", may_transfer=True)
    mac.senses = replace(mac.senses, on_hotspot=False)
    again = engine.sweep(train_request(), Quiet())
    assert (again.status, again.num_groups) == ("done", 0)  # nothing was played twice
    assert len(shipped(published.store)) == 8


def test_no_sweep_begins_while_finished_groups_can_neither_be_kept_nor_sent(published: Publishing, make: Make, mac: Sensed) -> None:
    guest = Guest(MacHost(), mac)
    engine = make(guest)
    engine._uploader._unspooled["runs/r/a"] = b"found no room"
    guest.look()
    result = engine.sweep(train_request(), Quiet())
    assert (result.status, result.reason) == ("paused", "paused: the disk is full: 1 finished groups wait in memory")
    assert shipped(published.store) == {}
    engine._uploader._unspooled.clear()
    guest.look()
    assert engine.sweep(train_request(), Quiet()).status == "done"


def test_a_full_spool_holds_new_groups_and_says_so(published: Publishing, make: Make, mac: Sensed) -> None:
    guest = Guest(MacHost(spool_bytes=1 << 20), mac)
    guest.start()
    engine = make(guest)
    (engine._folder / "spool" / "left").write_bytes(bytes(1 << 20))
    engine._uploader.recover = lambda wanted: 0
    deadline = time.monotonic() + 10
    while guest.decision.starts and time.monotonic() < deadline:
        engine._await_guest(Quiet()) if guest.decision.starts else None
        time.sleep(0.05)
    result = engine.sweep(train_request(), Quiet())
    guest.close()
    assert result.status == "paused"
    assert "disk" in result.reason


def test_the_guest_looks_by_itself_and_ends_when_told(mac: Sensed) -> None:
    before = set(threading.enumerate())
    guest = Guest(MacHost(when="idle_only"), mac, look_seconds=0.02)
    guest.start()
    assert [thread.name for thread in set(threading.enumerate()) - before] == ["guest"]
    assert guest.decision.starts
    mac.senses = replace(mac.senses, idle_seconds=0.0)
    deadline = time.monotonic() + 5
    while guest.decision.starts and time.monotonic() < deadline:
        time.sleep(0.01)
    assert guest.must_leave == "somebody uses the Mac"
    guest.close()
    assert not any(thread.name == "guest" for thread in set(threading.enumerate()) - before)


def test_a_spent_budget_pauses_and_names_itself(mac: Sensed) -> None:
    guest = Guest(MacHost(), mac, spent_budget=lambda: "this day's network budget of 1 GB is spent")
    assert guest.look().reason == "this day's network budget of 1 GB is spent"
    assert not guest.may_transfer


def test_a_process_that_begins_anew_keeps_no_mac_awake_even_if_a_sweep_hangs(mac: Sensed) -> None:
    awake = Awake(("sleep", "77"))
    guest = Guest(MacHost(), mac, awake=awake)
    guest.look()
    with guest.playing():
        assert awake.held
        guest.let_sleep()
        guest.look()
        assert not awake.held


def test_a_mac_on_mains_is_kept_awake_while_groups_are_played_and_only_then(mac: Sensed) -> None:
    awake = Awake(("sleep", "77"))
    guest = Guest(MacHost(on_battery=True), mac, awake=awake)
    guest.look()
    assert not awake.held
    with guest.playing():
        assert awake.held
        mac.senses = replace(mac.senses, on_mains=False, battery_percent=90.0)
        guest.look()
        assert not awake.held  # unplugged in the middle of a sweep
        mac.senses = replace(mac.senses, on_mains=True)
        guest.look()
        assert awake.held
    assert not awake.held
    with pytest.raises(KeyError), guest.playing():
        raise KeyError
    assert not awake.held


def test_before_sleep_the_sweep_ends_within_a_step_and_after_it_a_moment_passes(published: Publishing, make: Make, mac: Sensed) -> None:
    guest, still = Guest(MacHost(), mac), list[bool]()
    sleeper = threading.Thread(target=lambda: still.append(guest.be_still(20.0)))

    def fall_asleep() -> None:
        sleeper.start()
        while not guest.must_leave:
            time.sleep(0.01)

    engine = make(guest, Interrupting(fall_asleep))
    result = engine.sweep(train_request(), Quiet())
    sleeper.join(20)
    assert (result.status, result.reason, still) == ("paused", "paused: the Mac is going to sleep", [True])
    assert 2 <= result.num_groups < 8
    assert not guest.may_transfer
    guest.wake()
    mac.senses = replace(mac.senses, awake_seconds=2.0)
    assert guest.look().reason == "the Mac has just woken up"
    mac.senses = replace(mac.senses, awake_seconds=20.0)
    guest.look()
    assert engine.sweep(train_request(), Quiet()).num_groups == 8 - result.num_groups
    assert len(shipped(published.store)) == 8


def test_a_mac_that_plays_too_long_to_be_still_is_said_so(mac: Sensed) -> None:
    guest = Guest(MacHost(), mac)
    with guest.playing():
        assert not guest.be_still(0.05)
    assert guest.be_still(0.05)


def test_a_loose_plug_counts_its_starts_also_across_processes(mac: Sensed, tmp_path: Path) -> None:
    memory, now = tmp_path / "guest.json", 0.0

    def look(guest: Guest, seconds: float, **change: object) -> bool:
        nonlocal now
        now += seconds
        mac.senses = replace(mac.senses, **change)
        mac.read = lambda: replace(mac.senses, now_seconds=began + now)  # type: ignore[method-assign]
        return guest.look().starts

    began = time.monotonic()
    first = Guest(MacHost(), mac, memory=memory)
    assert not look(first, 1.0, on_mains=False)
    assert not look(first, 5.0, on_mains=True)
    assert look(first, 60.0)
    assert not look(first, 1.0, on_mains=False)
    second = Guest(MacHost(), mac, memory=memory)
    assert not look(second, 1.0)
    assert not look(second, 1.0, on_mains=True)
    assert not look(second, 100.0)  # a minute of mains was enough the first time
    assert look(second, 3600.0)


def test_a_torn_memory_of_starts_is_no_obstacle(mac: Sensed, tmp_path: Path) -> None:
    (tmp_path / "guest.json").write_text("{")
    assert Guest(MacHost(), mac, memory=tmp_path / "guest.json").look().starts


def test_a_disk_that_takes_nothing_does_not_blind_the_guest(mac: Sensed, tmp_path: Path) -> None:
    guest = Guest(MacHost(when="idle_only"), mac, memory=tmp_path / "gone" / "guest.json", look_seconds=0.02)
    guest.start()
    mac.senses = replace(mac.senses, idle_seconds=0.0)
    deadline = time.monotonic() + 5
    while guest.decision.starts and time.monotonic() < deadline:
        time.sleep(0.01)
    guest.close()
    assert not guest.decision.starts


def test_a_crash_waits_in_words_and_then_plays_fewer_groups(mac: Sensed) -> None:
    guest = Guest(MacHost(), mac)
    guest.caution = Caution(until=time.time() + 60.0, share=0.5)
    assert "crashed" in guest.look().reason
    guest.caution = Caution(until=time.time() - 1.0, share=0.5)
    assert (guest.look().state, guest.decision.share) == ("full", 0.5)


def test_after_a_crash_the_pool_is_half_as_large_and_every_group_is_played(published: Publishing, make: Make, mac: Sensed) -> None:
    pages: list[int] = []
    for host, caution in (("mac-1", Caution()), ("mac-2", Caution(share=0.5))):
        guest = Guest(MacHost(), mac)
        guest.caution = caution
        guest.look()
        engine = make(guest, host=host)
        assert engine.sweep(train_request(host=host), Quiet()).num_groups == 8
        pages.append(engine._player._pool[1].num_pages - 1)
    assert pages[1] == pages[0] / 2


def test_what_the_guest_does_is_noted_in_words_for_its_owner(mac: Sensed, tmp_path: Path) -> None:
    path = tmp_path / "guest.json"
    guest, pid = Guest(MacHost(), mac, memory=path), os.getpid()
    assert said_now(path, pid) == ""
    guest.look()
    assert said_now(path, pid) == "waits for groups to play"
    with guest.playing():
        assert said_now(path, pid) == "plays"
        mac.senses = replace(mac.senses, idle_seconds=1.0)
        guest.look()
        assert said_now(path, pid) == "plays gently, since somebody uses the Mac"
    mac.senses = replace(mac.senses, on_mains=False)
    guest.look()
    assert said_now(path, pid).startswith("pauses since ") and said_now(path, pid).endswith(": the Mac is on battery")
    guest.num_refused = lambda: 2
    guest.look()
    assert said_now(path, pid).endswith(": the Mac is on battery; the bucket refused 2 groups, see spool/refused")
    assert said_now(path, pid + 1) == ""  # a note of an earlier process
    noted = path.stat().st_mtime_ns
    guest.look()
    assert path.stat().st_mtime_ns == noted
