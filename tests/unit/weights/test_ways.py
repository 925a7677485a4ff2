"""Every way to a version ends at the weights that were published, bit for bit, whatever the masters did on the way."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stoa.contracts.errors import FormatError
from stoa.weights import grid
from stoa.weights.chain import Plan, plan
from stoa.weights.history import manifest_of, rebuild, walk
from stoa.weights.sync import Puller
from tests.unit.weights.small_run import SmallRun, drift

VERSION = 20
NAMES = (f"ways-{number}" for number in itertools.count())


@settings(max_examples=3, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 2**32),
    size=st.sampled_from([0.0, 2e-5, 3e-4]),
    hysteresis=st.sampled_from([0.0, 0.02]),
    leap=st.integers(1, VERSION),
)
def test_anchor_deltas_and_roll_ups_give_one_state_id(store, tmp_path, seed: int, size: float, hysteresis: float, leap: int):
    """The anchor of version 20, that of 0 and 20 deltas, and that of 0 and roll-ups. At version `leap` some weights leave
    their grid, and go back there two versions later.
    """
    run = SmallRun(store, tmp_path, name=next(NAMES), hysteresis=hysteresis)
    run.publish()
    name = run.layout.quantised[seed % len(run.layout.quantised)].name
    for version in range(1, VERSION + 1):
        run.weights = drift(run.weights, seed + version, size)
        if version in (leap, leap + 2):
            run.weights[name].reshape(-1)[::97] += 0.3 if version == leap else -0.3
        run.publish(anchor=version == VERSION)
    newest = manifest_of(store, run.document, run.head)
    chain = walk(store, run.document, newest, 0)
    plain = [replace(manifest, rollups=()) for manifest in chain]
    ways: dict[str, Plan] = {
        "its own anchor": plan(chain, VERSION, anchors=(VERSION,)),
        "every delta": plan(plain, VERSION, anchors=(0,)),
        "the fewest bytes": plan(chain, VERSION, anchors=(0,)),
    }
    assert [len(way.hops) for way in ways.values()][:2] == [0, VERSION]
    assert len(ways["the fewest bytes"].hops) < VERSION or size == 0.0
    assert run.publisher.mirror is not None
    for what, way in ways.items():
        state = rebuild(way, run.layout, run.document.run, lambda key, _, num_bytes: store.get(key, max_bytes=num_bytes).data)
        assert state.verified_id == state.state_id() == newest.state_id, what
        for array, published in run.publisher.mirror.arrays.items():
            assert state.arrays[array].tobytes() == published.tobytes(), what
    if hysteresis == 0.0:  # what is published is then what the masters round to
        for spec in run.layout.quantised:
            codes, scales, biases = run.publisher.mirror.quantised(spec)
            assert np.array_equal(codes.reshape(-1, 64), grid.codes_of(grid.place(run.weights[spec.name], scales, biases)))
    run.publisher.close()


@pytest.mark.parametrize("lie", [{"state_id": "0" * 64}, {"version": -7}])
def test_parent_that_is_not_what_its_child_names_is_refused(store, tmp_path, lie: dict[str, object]):
    run = SmallRun(store, tmp_path)
    run.publish_many(2, anchor_every=9)
    newest = manifest_of(store, run.document, run.head)
    assert newest.parent is not None
    assert len(walk(store, run.document, newest, 0)) == 2
    with pytest.raises(FormatError, match="not the parent"):
        walk(store, run.document, replace(newest, parent=replace(newest.parent, **lie)), 0)


def test_a_mac_that_follows_reads_one_manifest_a_version(store, tmp_path):
    run = SmallRun(store, tmp_path)
    run.publish_many(3, anchor_every=9)
    mac = Puller(store, run.document, tmp_path / "mac")

    def reads() -> int:
        return store.meters.by_kind()["manifests"].requests_down

    state = mac.join(run.head)
    for _ in range(4):
        held, held_id = run.head.version, state.state_id()
        run.publish_many(1, anchor_every=9)
        before = reads()
        mac.apply(mac.stage(run.head, held, held_id), state)
        assert reads() - before == 1
    before = reads()
    assert mac.manifest_at(run.head, 5).version == 5
    assert reads() == before, "those that were read are not read again"
