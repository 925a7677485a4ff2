"""What stays on disk between joins, on a Mac and at the trainer: taken where it is right, brought anew where it is not."""

from pathlib import Path

import pytest

from benchmarks.proxy import Faults, fault_proxy, reply
from stoa.bucket.store import Store
from stoa.contracts.errors import FormatError, ReplayedError, ServiceUnavailableError
from stoa.weights.state import WeightState
from stoa.weights.sync import Publisher, Puller
from tests.servers import CREDENTIALS
from tests.unit.weights.small_run import SmallRun
from tests.unit.weights.test_sync import flip, published


@pytest.fixture
def run(store, tmp_path) -> SmallRun:
    return SmallRun(store, tmp_path)


def test_rejoin_brings_only_the_damaged_part_of_an_anchor_anew(run: SmallRun, tmp_path):
    run.publish_many(2, anchor_every=20)
    Puller(run.store, run.document, tmp_path / "mac").join(run.head)
    parts = sorted((tmp_path / "mac" / "anchors").rglob("*.safetensors"))
    good = {path: path.read_bytes() for path in parts}
    assert len(parts) > 2
    sizes = range(0, 8 * len(good[parts[1]]), 8 * len(good[parts[1]]) // 12)
    for damaged in [*(flip(good[parts[1]], bit + 3) for bit in sizes), bytes(len(good[parts[1]])), good[parts[1]][:-1]]:
        parts[1].write_bytes(damaged)
        again = Puller(run.store, run.document, tmp_path / "mac")
        assert again.join(run.head).state_id() == published(run).state_id()
        assert again.bytes_downloaded == len(good[parts[1]])
        assert {path: path.read_bytes() for path in parts} == good
    again = Puller(run.store, run.document, tmp_path / "mac")
    assert again.join(run.head).state_id() == published(run).state_id()
    assert again.bytes_downloaded == 0


def test_room_for_the_weights_is_made_while_they_come_and_taken_again_after_a_fault(run: SmallRun, tmp_path):
    run.publish_many(2, anchor_every=20)
    room, asked = WeightState.empty(run.layout), []

    def make() -> WeightState:
        asked.append(len(list((tmp_path / "mac").rglob("index-*.json"))))
        return room

    assert Puller(run.store, run.document, tmp_path / "mac").join(run.head, into=make) is room
    part = next((tmp_path / "mac" / "anchors").rglob("*.safetensors"))
    part.write_bytes(flip(part.read_bytes(), 8 * 3000))
    assert Puller(run.store, run.document, tmp_path / "mac").join(run.head, into=make) is room
    assert asked == [1, 1, 1]  # the way was known each time
    assert room.state_id() == published(run).state_id()


def test_trainer_on_a_link_that_breaks_loads_the_mirror_and_fetches_hardly_a_byte_twice(store, tmp_path):
    run = SmallRun(store, tmp_path, vocab_size=65536)
    run.publish_many(3, anchor_every=20)
    with fault_proxy(store.settings.endpoint, Faults(link_rate=6e6, reset_every_bytes=9e5, seed=3)) as (proxy, endpoint):
        publisher = far_publisher(run, endpoint, None, patience_seconds=30.0)
        publisher.load_published(run.head)
        assert publisher.mirror is not None
        assert publisher.mirror.state_id() == published(run).state_id()
        assert proxy.counts.num_resets >= 2
        assert run.layout.num_bytes < proxy.counts.bytes_down < 1.25 * run.layout.num_bytes


def test_trainer_that_dies_while_it_loads_the_mirror_leaves_what_it_had_to_the_next_one(store, tmp_path):
    run = SmallRun(store, tmp_path, vocab_size=262144)
    run.publish_many(3, anchor_every=20)
    down: list[int] = []
    for limit in (0.4, 9.0, 9.0):
        with fault_proxy(store.settings.endpoint, Faults(link_rate=16e6)) as (proxy, endpoint):
            proxy.answer = lambda seen, proxy=proxy, limit=limit: (
                reply(503, "SlowDown") if proxy.counts.bytes_down > limit * run.layout.num_bytes else None
            )
            publisher = far_publisher(run, endpoint, tmp_path / "trainer", patience_seconds=0.2)
            if limit < 1.0:
                with pytest.raises(ServiceUnavailableError):
                    publisher.load_published(run.head)
                assert publisher.mirror is None
            else:
                publisher.load_published(run.head)
                assert publisher.mirror is not None
                assert publisher.mirror.state_id() == published(run).state_id()
            down.append(proxy.counts.bytes_down)
    assert down[1] < 0.8 * run.layout.num_bytes
    assert down[2] < 0.1 * run.layout.num_bytes  # manifests


def far_publisher(run: SmallRun, endpoint: str, folder: Path | None, *, patience_seconds: float) -> Publisher:
    store = Store(run.store.settings.model_copy(update={"endpoint": endpoint}), CREDENTIALS, patience_seconds=patience_seconds)
    return Publisher(store, run.document, run.signer, hysteresis=0.02, anchor_part_bytes=50_000, folder=folder)


def test_old_head_of_the_same_version_put_back_is_refused_by_its_count_of_writes(store, tmp_path):
    run = SmallRun(store, tmp_path)
    run.publish_many(1, anchor_every=9)
    paused = run.writer.set_state("paused", "n1")
    assert paused.version == run.head.version
    Puller(store, run.document, tmp_path / "mac").join(paused)
    with pytest.raises(ReplayedError):
        Puller(store, run.document, tmp_path / "mac").join(run.head)


@pytest.mark.parametrize("text", ["", "null", "[1, 2]", "[Infinity, 1, 2]", "[" * 100_000])
def test_mark_that_holds_nonsense_is_a_typed_error_that_names_the_file(run: SmallRun, tmp_path, text: str):
    (tmp_path / "mac").mkdir()
    (tmp_path / "mac" / "high_water.json").write_text(text)
    with pytest.raises(FormatError, match=r"high_water\.json"):
        Puller(run.store, run.document, tmp_path / "mac")
