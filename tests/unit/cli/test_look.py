"""A report reads some groups whole: the sweeps of one publish interval, and episodes worth telling."""

import time
from dataclasses import replace

from cli.report.collect import Collector
from cli.report.look import interval_bounds, look_at, middle_version, sweeps_of
from cli.report.record import StepRow
from cli.transcript import Reader
from stoa.bucket import keys
from stoa.bucket.run_document import RunDocument
from stoa.bucket.steps import write_step
from stoa.bucket.store import Store
from stoa.rollouts.records import Timings
from stoa.rollouts.shard import encode_group
from tests.unit.cli.records import record, step, version
from tests.unit.cli.test_transcript import KEY, document, episode, group, manifest  # noqa: F401 - a fixture


def test_interval_lasts_until_the_next_version_and_the_last_until_the_end() -> None:
    """Versions at 100.5, 104.5 and 108.5; the run ends at 112."""
    assert interval_bounds(record(), 1) == (104.5, 108.5)
    assert interval_bounds(record(), 2) == (108.5, 112.0)
    assert interval_bounds(record(), 7) == (0.0, 0.0)
    assert middle_version(record()) == 1
    assert middle_version(record(versions=(version(0),))) == -1


def test_sweeps_of_an_interval_are_read_with_their_times(store: Store, document: RunDocument) -> None:  # noqa: F811
    now = time.time()
    timings = Timings(sweep_started_at=now - 3, decode_seconds=2.0, pull_latency_seconds=0.5)
    other = keys.group("tale", 3, "mac-2", 1, 0)
    store.create(KEY, encode_group(group(timings=timings)))
    store.create(other, b"garbled")
    store.create(f"{keys.groups_of_version('tale', 3)}stranger", b"x")
    during = record(
        versions=(version(3, published_at=now - 5), version(4, published_at=now + 60)), facts=replace(record().facts, run="tale")
    )
    bars, engines = sweeps_of(store, "tale", during, 3, Reader(store, document))
    assert [(bar.host, bar.sweep, bar.version, bar.started_at, bar.ended_at) for bar in bars if bar.started_at] == [
        ("mac-1", 12, 3, now - 3, now - 1)
    ]
    assert [bar.host for bar in bars if not bar.started_at] == ["mac-2"], "it landed, though nobody can read it"
    assert engines == {"mac-1": "e; stoa b"}
    assert sweeps_of(store, "tale", during, 4, None) == ((), {}), "nothing came after the next version"


def row_of(store: Store, number: int, parent: str, gated: dict[str, tuple[tuple[int, ...], ...]]) -> StepRow:
    key = write_step(store, manifest(number, parent, consumed=tuple(gated), gated=gated))
    return step(number, key=key, parent_key=parent, consumed=tuple(gated), gated=tuple(gated), metrics={"gate_drop_rate": 0.1 * number})


def test_episodes_worth_telling_are_best_worst_first_and_most_dropped(store: Store, document: RunDocument) -> None:  # noqa: F811
    first, last = KEY, keys.group("tale", 5, "mac-1", 13, 0)
    good, bad = episode(), replace(episode(), reward=0.0, reward_parts={"cover": 0.0})
    store.create(first, encode_group(group(episodes=(bad,) * 4)))
    store.create(last, encode_group(group(sweep=13, group=0, version=5, episodes=(bad, good, good, bad))))
    one = row_of(store, 1, "", {first: ((), (), (), ())})
    steps = [one]
    for number in range(2, 9):
        gone = keys.group("tale", 4, "mac-9", number, 0)
        steps.append(row_of(store, number, steps[-1].key, {gone: ((),) * 4}))
    steps.append(row_of(store, 9, steps[-1].key, {last: ((), (), (2, 3), (0,))}))
    told = look_at(store, document, record(steps=tuple(steps), versions=(), facts=replace(record().facts, run="tale"))).transcripts
    assert [(one.title, one.episode.id, one.episode.num_dropped) for one in told] == [
        ("Best of the last steps", "v5/mac-1/13/0/1", 0),
        ("Worst of the last steps", "v5/mac-1/13/0/3", 1),
        ("Worst of the first step", "v3/mac-1/12/4/3", 0),
        ("Most tokens dropped by the gate", "v5/mac-1/13/0/2", 2),
    ]


def test_garbage_where_a_held_out_result_should_be_costs_the_report_nothing(store: Store, document: RunDocument) -> None:  # noqa: F811
    from stoa.bucket.head import HeadWriter
    from stoa.bucket.manifest import Signer

    HeadWriter(store, "tale", Signer.from_seed(bytes(range(32))), owner="t", interval_seconds=0.0).acquire(1000)
    store.create(keys.eval_summary("tale", 3, "e1"), b'{"format":"nonsense"}')
    found = Collector(document, store, None).collect(everything=True)
    assert found.evaluations == () and found.bucket_objects["evals"] == 1
