"""A wired set whose every layer is dealt out: its weights, its engine, and whole sweeps by real ring processes."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import Future
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from stoa.bucket.store import Store
from stoa.contracts.errors import FormatError, LinkMismatchError, RankLostError, WiredError
from stoa.weights.pulse import Change
from stoa.weights.state import WeightState
from tests.servers import free_ports
from tests.unit.worker_mac.policies import TINY, model_of, random_state
from tests.unit.worker_mac.publishing import Publishing, Quiet, train_request
from tests.unit.worker_mac.tasks import Dialogue, play
from tests.unit.worker_mac.test_engine import groups_of
from tests.unit.worker_mac.test_wired_tensor import BIG_DENSE
from tests.unit.worker_mac.wired import wired_set
from worker_mac.cluster.dealt import DealtState
from worker_mac.cluster.parts import PartState
from worker_mac.cluster.set_engine import SetPlayer, SetVersions, split_model
from worker_mac.cluster.split import Strength
from worker_mac.cluster.tensor import share_layout
from worker_mac.decoder import Drawn
from worker_mac.engine import MacEngine, Waits
from worker_mac.memory import SPARE_BYTES
from worker_mac.model_config import read_model_config
from worker_mac.sampler import seed_of
from worker_mac.sweep import Casting

WIDE_TINY = TINY | {"moe_intermediate_size": 128, "hidden_size": 128, "intermediate_size": 128}
TWO = [Strength(None, 1.0)] * 2


class Others:
    """The other Macs of a set, in this process."""

    def __init__(self, layout: object, ranks: int) -> None:
        shares = share_layout(layout, ranks)
        self.states = [PartState(shares, WeightState.empty(shares).arrays) for _ in range(ranks)]

    def put(self, rank: int, name: str, at: int, data: memoryview) -> None:
        self.states[rank].put(name, at, bytes(data))

    def apply(self, rank: int, change: Change) -> None:
        self.states[rank].apply(change)

    def digests(self, rank: int, names: tuple[str, ...]) -> dict[str, str]:
        return self.states[rank].digests_of(names)

    def get(self, rank: int, name: str, at: int, count: int) -> Future:
        found: Future = Future()
        found.set_result(self.states[rank].get(name, at, count))
        return found


def dealt_of(state: WeightState, ranks: int) -> tuple[DealtState, Others]:
    others = Others(state.layout, ranks)
    dealt = DealtState(state.layout, others.states[0].arrays, ranks, others)
    digests = {}
    for spec in state.layout.arrays:
        data, at = np.ascontiguousarray(state.arrays[spec.name]).reshape(-1).view(np.uint8).tobytes(), 0

        def read(buffer: memoryview, data: bytes = data) -> int:
            nonlocal at
            # Less than was asked for, as a file may give.
            count = min(len(buffer), len(data) - at, 1 + len(data) // 3)
            buffer[:count] = data[at : at + count]
            at += count
            return count

        digests[spec.name] = dealt.fill(spec.name, read, spec.name)
    dealt.accept(digests, state.state_id(), "the test's weights")
    return dealt, others


def some_change(state: WeightState) -> Change:
    numbers = np.random.default_rng(5)
    groups = np.sort(numbers.choice(state.layout.num_codes // 64, 60, replace=False))
    positions = np.sort(numbers.choice(state.layout.num_codes, 5000, replace=False))
    positions = positions[~np.isin(positions // 64, groups)]
    flat = np.concatenate([state.arrays[spec.name].reshape(-1) for spec in state.layout.quantised])
    raws = np.sort(numbers.choice(state.layout.num_raw, 50, replace=False))
    return Change(
        positions, np.where(flat[positions] > 127, -3, 3).astype(np.int16), raws, numbers.integers(0, 1 << 30, 50).astype(np.uint32),
        groups, numbers.integers(0, 1 << 14, 60).astype(np.uint16), numbers.integers(0, 1 << 14, 60).astype(np.uint16),
        numbers.integers(0, 255, (60, 64)).astype(np.uint8),
    )  # fmt: skip


@pytest.mark.parametrize(("config", "ranks"), [(WIDE_TINY, 2), (BIG_DENSE, 2)])
def test_weights_are_dealt_out_changed_and_named_as_the_whole(config: dict, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # So small that arrays take many blocks, and blocks begin in the middle of a leading index.
    monkeypatch.setattr("worker_mac.cluster.dealt.READ_BYTES", 5000)
    state = random_state(config)
    dealt, others = dealt_of(state, ranks)
    change = some_change(state)
    dealt.apply(change)
    state.apply(change)
    assert dealt.state_id() == state.state_id()
    for rank in range(ranks):
        for spec in state.layout.tensors:
            name, held = spec.name, others.states[rank].arrays
            if re.search(r"(self_attn\.[qkv]_proj|gate_proj|up_proj|w[13])\.weight$", name):
                expected = np.split(state.arrays[name], ranks, -2)[rank]
            elif re.search(r"(self_attn\.out_proj|down_proj|w2)\.weight$", name):
                expected = np.split(state.arrays[name], ranks, -1)[rank]
            else:
                expected = state.arrays[name]
            assert np.array_equal(held[name], expected), name
    others.states[1].put(next(one for one in state.arrays if "self_attn.q_proj.weight" in one), 7, b"\1\2\3")
    assert dealt.state_id() != state.state_id()


def test_a_part_that_did_not_arrive_as_it_was_sent_has_no_digest() -> None:
    state = random_state(WIDE_TINY)
    others = Others(state.layout, 2)
    dealt = DealtState(state.layout, others.states[0].arrays, 2, others)
    others.put = lambda *_: None
    name = "model.layers.1.self_attn.q_proj.weight"
    data = [state.arrays[name].tobytes()]

    def read(buffer: memoryview) -> int:
        count = min(len(buffer), len(data[0]))
        buffer[:count], data[0] = data[0][:count], data[0][count:]
        return count

    assert dealt.fill(name, read, name) == ""
    with pytest.raises(FormatError, match="is torn"):
        dealt.fill(name, lambda _: 0, name)
    with pytest.raises(FormatError, match="were asked for"):
        others.states[1].get(name, -1, 4)


def close(one: dict, other: dict) -> None:
    """The same tokens and experts; logprobs within 1e-5."""
    assert sorted(one) == sorted(other)
    for group in one:
        for a, b in zip(one[group], other[group], strict=True):
            assert a.ids.tolist() == b.ids.tolist()
            assert float(np.abs(a.logprobs - b.logprobs).max(initial=0.0)) <= 1e-5


def test_an_engine_whose_layers_are_dealt_out_follows_updates_as_one_machine(store: Store, tmp_path: Path) -> None:
    config, base = WIDE_TINY, tmp_path / "base"
    base.mkdir()
    (base / "config.json").write_text(json.dumps(config))
    (base / "tokenizer.json").write_text("{}")
    published = Publishing(store, base)
    published.publish()
    with wired_set(config, None, [range(3)] * 2, split="tensor") as wired:
        engine = MacEngine(
            published.store, published.document, Dialogue(), host="set-1", folder=tmp_path / "set-1", model_folder=tmp_path / "base",
            waits=Waits(20.0, 20.0), make_versions=partial(SetVersions, wired), make_player=partial(SetPlayer, wired, TWO),
        )  # fmt: skip
        try:
            for sweep, versions in enumerate((0, 2)):
                for _ in range(versions):
                    published.publish()
                found = engine.sweep(train_request(sweep, host="set-1"), Quiet())
                assert (found.status, found.version, found.num_groups) == ("done", versions, 8)
                groups = groups_of(published.store, versions, sweep, "set-1")
                who = [Casting(index, one.question_id, seed_of(one.seed, n)) for index, one in groups.items() for n in range(8)]
                _, expected = play(model_of(config, published.publisher.mirror), Dialogue(), who)
                close({index: group.episodes for index, group in groups.items()}, expected)
        finally:
            engine.close()


def test_what_cannot_be_dealt_out_or_does_not_fit_is_refused_before_anything_is_loaded() -> None:
    state, parsed = random_state(WIDE_TINY), read_model_config(WIDE_TINY)
    with pytest.raises(WiredError, match="4 query and 2 key heads cannot be dealt out to 3 Macs"):
        split_model(parsed, state.layout, [Strength(None, 1.0)] * 3, 128, "tensor")
    share = sum(array.num_bytes for array in share_layout(state.layout, 2).arrays)
    with pytest.raises(WiredError, match=f"takes \\d+ bytes with the least of pages, Mac 1 may give {SPARE_BYTES + share}"):
        split_model(parsed, state.layout, [Strength(None, 1.0), Strength(SPARE_BYTES + share, 1.0)], 128, "tensor")
    assert split_model(parsed, state.layout, TWO, 128, "tensor") == [range(3), range(3)]


def test_a_mac_that_draws_something_else_ends_the_set() -> None:
    from worker_mac.cluster.lead import Agreeing
    from worker_mac.cluster.orders import drawn_answer
    from worker_mac.cluster.wire import Message

    class Lost:
        def lose(self, error: RankLostError) -> None:
            self.error = error

    own = Drawn(np.array([3], np.int32), np.array([-0.5], np.float32))
    for theirs in (Drawn(np.array([4], np.int32), own.logprobs), Drawn(own.tokens, own.logprobs + np.float32(1e-6))):
        answer: Future = Future()
        answer.set_result(Message("done", {}, drawn_answer(theirs)))
        lost = Lost()
        with pytest.raises(LinkMismatchError, match="Mac 1 drew other tokens"):
            Agreeing(own, [answer], lost).result()
        assert lost.error


def test_a_sweep_by_two_ring_processes_samples_what_one_does(tmp_path: Path) -> None:
    ports = free_ports(3)
    hosts = tmp_path / "ring.json"
    hosts.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in ports[:2]]))
    line = [sys.executable, "-m", "benchmarks.wired_rank", "tensor", "--out", str(tmp_path / "found.json"), "--control", str(ports[2])]
    processes = [subprocess.Popen(line, env={**os.environ, "MLX_RANK": str(rank), "MLX_HOSTFILE": str(hosts)}) for rank in (0, 1)]
    out, deadline = tmp_path / "found.json", time.monotonic() + 55
    try:
        while not out.is_file() and processes[0].poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
    finally:
        for process in processes:
            process.send_signal(signal.SIGKILL)
            process.wait()
    found = json.loads(out.read_text())
    assert 0 < found["difference"] <= 1e-5
    assert found["num_parked"] > 0 and found["num_turns"] == 18 and found["weights_fraction"] <= 0.75
