"""Connections, collectives and halves of a wired set when something goes wrong."""

import io
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from stoa.contracts.errors import FormatError, GpuInterruptedError, RankLostError, StoaError, WiredError
from stoa.weights.pulse import Change
from tests.servers import free_ports
from tests.unit.worker_mac.policies import TINY, model_of, random_state
from tests.unit.worker_mac.tasks import Dialogue, play
from tests.unit.worker_mac.test_wired import castings, same
from tests.unit.worker_mac.wired import QueueLink, fill, wired_set
from worker_mac.cluster import admission, ended
from worker_mac.cluster import lead as leading
from worker_mac.cluster import rank as ranks
from worker_mac.cluster.follow import Follower
from worker_mac.cluster.lanes import Lane, Lanes, places_of
from worker_mac.cluster.lead import Ranks, WiredSet
from worker_mac.cluster.link import Watchdog
from worker_mac.cluster.strength import program
from worker_mac.cluster.wire import Channel, Message
from worker_mac.decoder import Drawn
from worker_mac.forced import Forced
from worker_mac.pages import Pages, PoolKey
from worker_mac.plan import Work
from worker_mac.sweep import Sweep, cast


def pair() -> tuple[Channel, Channel, socket.socket]:
    here, there = socket.socketpair()
    return Channel(here, "the other"), Channel(there, "this"), there


def test_a_message_arrives_as_it_was_sent() -> None:
    here, there, _ = pair()
    arrays = {"a": np.arange(6, dtype=np.int32).reshape(2, 3), "none": np.zeros((0, 64), np.uint8), "b": np.array([True, False])}
    here.send(Message("step", {"id": 3, "names": ["x"], "settings": [0.5, 0]}, arrays))
    found = there.receive()
    assert (found.op, found.number("id"), found.texts("names")) == ("step", 3, ("x",))
    assert {name: (array.dtype, array.tolist()) for name, array in found.arrays.items()} == {
        name: (array.dtype, array.tolist()) for name, array in arrays.items()
    }
    with pytest.raises(FormatError, match="settings is"):
        found.number("settings")


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"STW1\xff\xff\xff\xff",
        b"STW1\x02\x00\x00\x00{]",
        b"STW1" + (len(head := json.dumps({"op": "x", "fields": {}, "arrays": [["a", "|O8", [1]]]}).encode())).to_bytes(4, "little") + head,
        b"STW1"
        + (len(big := json.dumps({"op": "x", "fields": {}, "arrays": [["a", "<f4", [1 << 40]]]}).encode())).to_bytes(4, "little")
        + big,
    ],
)
def test_nonsense_is_refused_before_memory_is_taken(data: bytes) -> None:
    here, _, there = pair()
    there.sendall(data)
    with pytest.raises(FormatError):
        here.receive()


@pytest.mark.parametrize(
    "head",
    [
        b"[" * 200_000,
        b'{"op": "x", "fields": {}, "arrays": [["a", "<f4", [Infinity]]]}',
        b'{"op": "x", "fields": {}, "arrays": [["a", "(2,", [1]]]}',
        json.dumps({"op": "x", "fields": {}, "arrays": [["a", "<f4", [1] * 100]]}).encode(),
    ],
)
def test_no_header_is_worse_than_one_that_cannot_be_read(head: bytes) -> None:
    here, _, there = pair()
    sending = threading.Thread(target=there.sendall, args=(b"STW1" + len(head).to_bytes(4, "little") + head + b"\0" * 4,))
    sending.start()
    with pytest.raises(FormatError):
        here.receive()
    sending.join(20)


def test_a_mac_that_lives_and_never_answers_ends_the_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leading, "ORDER_SECONDS", 0.05)
    lost: list[StoaError] = []
    here, there, _ = pair()
    there.start_beating()
    others = Ranks([here], lost.append)
    for order in (
        lambda: others.all(Message("reset")),
        lambda: others.digests(1, ("x",)),
        lambda: leading.answer_of(Future(), others, 0.05),
    ):
        with pytest.raises(RankLostError, match="has not answered"):
            order()
    assert len(lost) == 1 and isinstance(lost[0], RankLostError)
    there.close()
    here.close()


def test_a_peer_that_ends_or_is_silent_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    here, there, _ = pair()
    there.close()
    with pytest.raises(RankLostError, match="the other has ended"):
        here.receive()
    monkeypatch.setattr("worker_mac.cluster.wire.SILENT_SECONDS", 0.1)
    here, _, _ = kept = pair()
    with pytest.raises(RankLostError, match="has said nothing for"):
        here.receive()
    assert kept


def test_the_watchdog_names_what_is_stuck_and_lets_alone_what_ends() -> None:
    said: list[str] = []
    dog = Watchdog(said.append, 0.4)
    with dog.over("a quick one"):
        time.sleep(0.01)
    assert not said
    with dog.over("hidden states for the next Mac"):
        deadline = time.monotonic() + 20
        while not said and time.monotonic() < deadline:
            time.sleep(0.02)
    assert said == ["hidden states for the next Mac has not ended in 0.4 s"]
    # What lies around something that ended well is watched on.
    said.clear()
    dog = Watchdog(said.append, 0.4)
    with dog.over("sums of all Macs"):
        with dog.over("headers of all Macs"):
            pass
        deadline = time.monotonic() + 20
        while not said and time.monotonic() < deadline:
            time.sleep(0.02)
    assert said == ["sums of all Macs has not ended in 0.4 s"]


def options(port: int, folder: Path) -> ranks.Options:
    return ranks.Options(("127.0.0.1", port), "ring", folder / "ended.json", (7, 9), (1, 2), ())


def test_strangers_are_refused_and_a_mac_with_another_program_is_named(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    asked = options(port, tmp_path)
    found: list[object] = []

    def await_them() -> None:
        try:
            found.append(ranks.await_others(asked, "secret", 2))
        except WiredError as error:
            found.append(error)

    waiting = threading.Thread(target=await_them)
    waiting.start()
    stranger = ranks.call_in(asked.control, ranks._hello(asked, "guessed", 1))
    with pytest.raises(RankLostError):
        stranger.receive()
    with socket.create_connection(asked.control) as odd:  # a secret that is no text, before any secret is known
        Channel(odd, "the set").send(Message("hello", {"secret": "\ud800", "rank": 1}))
        assert odd.recv(1) == b""
    friend = ranks.call_in(asked.control, ranks._hello(asked, "secret", 1))
    waiting.join(20)
    channels, macs = found[0]
    assert [(mac.limit_bytes, mac.bandwidth) for mac in macs] == [(7, 1), (9, 2)]
    for one in (stranger, friend, *channels):
        one.close()
    with pytest.raises(WiredError, match="of 2 Macs only 1 came"):
        admission.admit(asked.control, "secret", 2, lambda *_: None, 0.2)
    with socket.create_server(asked.control), pytest.raises(WiredError, match=r"cannot listen at .* \(error: \d+\)"):
        ranks.await_others(asked, "secret", 2)
    other = Message("hello", program("pipeline") | {"mlx": "0.1"})
    with pytest.raises(WiredError, match=r"Mac 1 of the set has mlx 0\.1"):
        ranks._check_program("pipeline", 1, other)
    # Macs that compute the same hidden states must round alike.
    unlike = Message("hello", program("tensor") | {"chip": "applegpu_g15"})
    with pytest.raises(WiredError, match=r"Mac 1 of the set has chip applegpu_g15"):
        ranks._check_program("tensor", 1, unlike)
    ranks._check_program("tensor", 1, Message("hello", program("tensor")))


class Interrupting:
    """A set's decoder whose steps are ended by the system now and then."""

    def __init__(self, decoder: object, when: set[int]) -> None:
        self.decoder, self.when, self.count, self.resets = decoder, when, 0, 0

    def submit(self, work: Work, uniform: np.ndarray) -> object:
        self.count += 1
        flight = self.decoder.submit(work, uniform)
        return Broken(flight) if self.count in self.when else flight

    def reset(self) -> None:
        self.resets += 1
        self.decoder.reset()


class Broken:
    def __init__(self, flight: object) -> None:
        self.flight = flight

    def result(self) -> Drawn:
        self.flight.result()
        raise GpuInterruptedError("Impacting Interactivity")


def test_an_interrupted_step_of_one_half_is_made_good_in_both() -> None:
    state, environment, who = random_state(TINY), Dialogue(), castings(4)
    _, expected = play(model_of(TINY, state), environment, who)
    with wired_set(TINY, state, [range(2), range(2, 3)]) as wired:
        found, halves, first_slot = {}, [], 0
        breaking = Interrupting(wired.decoder(81, 40), {5, 12, 13})
        lanes = Lanes(breaking)
        for half in (0, 1):
            ours = [one for one in who if one.group % 2 == half]
            schedule = cast(environment, ours, Pages(40, PoolKey(0, "", 32, "float32")), max_rows=len(ours))
            halves.append(Sweep(Lane(lanes, 39 * half, first_slot), schedule, environment, ours, found.__setitem__).play)
            first_slot += schedule.num_slots - 1
        assert all(one.ended for one in lanes.run(halves))
    assert 1 <= breaking.resets <= 3
    same(found, expected)


def test_a_half_whose_caches_were_thrown_away_while_it_thought_computes_nothing_on_them() -> None:
    lanes = Lanes(Interrupting(None, set()))
    lane = Lane(lanes, 0, 0)
    lanes.generation += 1
    none = np.zeros(0, np.int32)
    work = Work(none.astype(np.intp), none, none, none.astype(bool), none, none, none, [], [])
    with pytest.raises(GpuInterruptedError, match="of another half"):
        lane.step(work, np.zeros(0, np.float32))
    assert lanes._asked.empty()


def test_halves_in_one_pool_never_use_a_page_or_a_slot_of_each_other() -> None:
    class Seen:
        generation = 0

        def compute(self, work: Work, uniform: np.ndarray) -> Drawn:
            self.work = work
            return Drawn(np.zeros(0, np.int32), np.zeros(0, np.float32), None)

    sizes = [(5, 3), (4, 6), (2, 2)]
    firsts, pool = places_of(sizes)
    assert pool == (1 + 4 + 3 + 1, 1 + 2 + 5 + 1)
    pages, slots = [], []
    for (num_pages, num_slots), first in zip(sizes, firsts, strict=True):
        seen, none = Seen(), np.zeros(0, np.int32)
        tables, own = np.arange(num_pages, dtype=np.int32)[None], np.arange(num_slots, dtype=np.int32)
        copies = [(0, num_pages - 1), (1, num_pages - 1)], [(0, num_slots - 1)]
        Lane(seen, *first).step(Work(none.astype(np.intp), none, none, none.astype(bool), none, tables, own, *copies), none)
        assert seen.work.tables[0, 0] == seen.work.slots[0] == 0, "scrap is everybody's"
        last_page, last_slot = int(seen.work.tables[0, -1]), int(seen.work.slots[-1])
        assert seen.work.page_copies == [(0, last_page), (int(seen.work.tables[0, 1]), last_page)]
        assert seen.work.slot_copies == [(0, last_slot)]
        pages += seen.work.tables[0, 1:].tolist()
        slots += seen.work.slots[1:].tolist()
    assert sorted(pages) == list(range(1, pool[0])) and sorted(slots) == list(range(1, pool[1]))


class Leaving(Channel):
    """Ends at the first order of a kind, before it is done."""

    op = ""

    def receive(self) -> Message:
        found = super().receive()
        if found.op == self.op:
            self.close()
            raise RankLostError("killed")
        return found


PHASES = ("layers", "put", "digests", "apply", "pool")


# A sum that is broken in a step of a tensor split is for a real ring to tell.
@pytest.mark.parametrize(("op", "split"), [*((op, "pipeline") for op in (*PHASES, "step")), *((op, "tensor") for op in (*PHASES, "get"))])
def test_a_mac_that_is_gone_at_any_order_is_told_to_whoever_waits_and_ends_the_set_once(op: str, split: str) -> None:
    config = TINY | {"hidden_size": 128, "intermediate_size": 128, "moe_intermediate_size": 128}
    state, lost, queues = random_state(config), [], [queue.Queue(), queue.Queue()]
    here, there = socket.socketpair()
    leaving = Leaving(there, "the first Mac")
    leaving.op = op

    def follow() -> None:
        with suppress(RankLostError):
            Follower(leaving, QueueLink(queues[0], queues[1], 1)).run()

    following = threading.Thread(target=follow)
    following.start()
    others = Ranks([Channel(here, "Mac 1")], lost.append)
    spans = [range(3)] * 2 if split == "tensor" else [range(2), range(2, 3)]
    with pytest.raises(RankLostError):
        wired = WiredSet(others, QueueLink(queues[1], queues[0]), config, state.layout, spans, split=split)
        fill(wired, state)
        positions = np.arange(0, state.layout.num_codes, 50)
        flat = np.concatenate([state.arrays[spec.name].reshape(-1) for spec in state.layout.quantised])
        wired.weights.state.apply(Change(positions, np.where(flat[positions] > 127, -1, 1).astype(np.int16)))
        wired.weights.state.state_id()
        decoder = wired.decoder(9, 4)
        Forced(model_of(config, state), 1, 32, make=lambda *_: Stepped(decoder)).feed([np.arange(4, dtype=np.int32)])
    following.join(20)
    deadline = time.monotonic() + 20
    while not lost and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(lost) == 1 and isinstance(lost[0], RankLostError) and not following.is_alive()
    with pytest.raises(RankLostError):
        others.all(Message("reset"))


class Stepped:
    """Steps where logits are asked for."""

    def __init__(self, decoder: object) -> None:
        self.decoder = decoder

    def logits(self, work: Work) -> np.ndarray:
        return self.decoder.step(work, np.zeros(len(work.sequences), np.float32)).logprobs


def test_unlike_arrays_on_two_ranks_are_told_in_seconds(tmp_path: Path) -> None:
    first, second = free_ports(2)
    hosts = tmp_path / "ring.json"
    hosts.write_text(json.dumps([[f"127.0.0.1:{first}"], [f"127.0.0.1:{second}"]]))
    out = tmp_path / "found.json"
    line = [sys.executable, "-m", "benchmarks.wired_rank", "mismatch", "--out", str(out)]
    processes = [
        subprocess.Popen(line, env={**os.environ, "MLX_RANK": str(rank), "MLX_HOSTFILE": str(hosts)}, stderr=subprocess.DEVNULL)
        for rank in (0, 1)
    ]
    try:
        processes[1].wait(50)
    finally:
        for process in processes:
            process.send_signal(signal.SIGKILL)
            process.wait()
    told = json.loads(out.with_suffix(".mismatch").read_text())
    assert "Mac 0 would send mlx.core.bfloat16 (4, 64), Mac 1 expects mlx.core.float32 (4, 64)" in told["message"]
    assert told["seconds"] < 10
    # Sums over all Macs, of a tensor split: 4 + 1 rows on rank 1.
    assert "Mac 1 would send mlx.core.float32 (5, 64) 3 times, Mac 0 expects mlx.core.float32 (4, 64) 3 times" in told["sums"]
    assert told["sums_seconds"] < 10


def test_a_rank_ends_when_told_to_and_when_who_started_it_is_gone() -> None:
    ended: list[str] = []
    ranks._watch_input(io.StringIO("something\nend\nmore\n"), lambda: ended.append("told"))
    ranks._watch_input(io.StringIO(""), lambda: ended.append("input closed"))
    gone = subprocess.Popen(["true"])
    ranks._watch_starter(gone.pid, lambda: ended.append("starter is a zombie"))
    gone.wait()
    ranks._watch_starter(gone.pid, lambda: ended.append("starter gone"))
    assert ended == ["told", "input closed", "starter is a zombie", "starter gone"]


def test_what_a_rank_is_told_on_its_command_line_is_read(tmp_path: Path) -> None:
    words = ["--control", "169.254.1.2:3750", "--ended", str(tmp_path / "e"), "--limits", "5,0", "--starter", "9", "--starter-host", "else"]
    found = ranks.read_options([*words, "--", "run.toml", "--state", "/s"])
    assert (found.control, found.limits, found.starter, found.worker) == (("169.254.1.2", 3750), (5, 0), 0, ("run.toml", "--state", "/s"))
    assert ranks.limit_of(found, 0) == 5 and ranks.limit_of(found, 1) is None
    ended.tell(found.ended, ended.Ended(75, "gone"))
    assert json.loads(found.ended.read_text()) == {"code": 75, "lost": "gone"}
