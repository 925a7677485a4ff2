"""The planner: golden joins, ties, weights at hand, and optimality against an exhaustive search."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoa.bucket.manifest import AnchorRef, DeltaRef, Manifest, Parent, VersionStats
from stoa.contracts.errors import ObjectMissingError
from stoa.weights.chain import plan

ANCHOR_BYTES = 9000


def ref(base: int, version: int, num_bytes: int) -> DeltaRef:
    return DeltaRef(base, f"state{base}", f"d{base}-{version}", "", num_bytes, "pco-8", 0, 0, 0)


def history(newest: int, *, anchor_every: int, delta_bytes: int = 50, rollups: dict[tuple[int, int], int] | None = None) -> list[Manifest]:
    """Versions 0 to `newest`; rollups: (base, version) -> bytes."""
    made: list[Manifest] = []
    for version in range(newest + 1):
        at = version - version % anchor_every
        made.append(
            Manifest(
                "stoa-manifest-1",
                "run",
                1000,
                version,
                Parent(version - 1, f"m{version - 1}", "", f"state{version - 1}") if version else None,
                f"state{version}",
                "layout",
                4 * version,
                0.0,
                ref(version - 1, version, delta_bytes) if version else None,
                tuple(ref(base, to, size) for (base, to), size in (rollups or {}).items() if to == version),
                AnchorRef(at, f"state{at}", f"a{at}", "", ANCHOR_BYTES),
                {},
                VersionStats(0.0, 0, 0.0),
            )
        )
    return made


def hops(found) -> list[tuple[int, int]]:
    return [(hop.ref.base, hop.version) for hop in found.hops]


def test_join_at_27_with_anchors_every_20_takes_anchor_20_and_the_deltas_after_it():
    found = plan(history(27, anchor_every=20), 27)
    assert found.anchor is not None
    assert found.anchor.version == 20
    assert hops(found) == [(v, v + 1) for v in range(20, 27)]
    assert found.num_bytes == ANCHOR_BYTES + 7 * 50


def test_join_takes_roll_ups_where_they_are_smaller():
    rollups = {(20, 24): 120, (24, 26): 90, (16, 24): 10, (0, 24): 1}
    found = plan(history(27, anchor_every=20, rollups=rollups), 27)
    assert found.anchor is not None
    # from anchor 0 by one roll-up of 1 byte would be cheaper in bytes: 9000 + 1 + 90 + 50
    assert (found.anchor.version, hops(found)) == (0, [(0, 24), (24, 26), (26, 27)])
    del rollups[0, 24]
    found = plan(history(27, anchor_every=20, rollups=rollups), 27)
    assert found.anchor is not None
    assert (found.anchor.version, hops(found)) == (20, [(20, 24), (24, 26), (26, 27)])


def test_weights_at_hand_need_only_what_follows_them():
    found = plan(history(27, anchor_every=20), 27, have={25: "state25"})
    assert (found.anchor, found.base, hops(found), found.num_bytes) == (None, 25, [(25, 26), (26, 27)], 100)


def test_weights_at_hand_win_over_an_anchor_on_disk():
    found = plan(history(28, anchor_every=4), 28, have={27: "state27"}, on_disk={"a28"})
    assert (found.anchor, found.base) == (None, 27)


def test_weights_at_hand_of_another_state_are_no_start():
    found = plan(history(27, anchor_every=20), 27, have={25: "garbled"})
    assert found.anchor is not None


def test_weights_too_far_behind_give_way_to_an_anchor():
    found = plan(history(27, anchor_every=20, delta_bytes=4000), 27, have={1: "state1"})
    assert found.anchor is not None
    assert found.anchor.version == 20


def test_anchor_on_disk_costs_nothing():
    found = plan(history(45, anchor_every=20), 45, on_disk={"a20"})
    assert found.anchor is not None
    assert (found.anchor.version, found.num_bytes) == (20, 25 * 50)


def test_version_at_hand_needs_nothing():
    found = plan(history(5, anchor_every=20), 5, have={5: "state5"})
    assert (found.anchor, found.hops, found.num_bytes) == (None, (), 0)


def test_version_without_manifest_or_way_is_missing():
    with pytest.raises(ObjectMissingError):
        plan(history(5, anchor_every=20), 6)
    with pytest.raises(ObjectMissingError):
        plan(history(5, anchor_every=20)[3:], 5)


@given(
    newest=st.integers(0, 9),
    anchor_every=st.integers(1, 6),
    sizes=st.dictionaries(st.tuples(st.integers(0, 8), st.integers(1, 9)).filter(lambda p: p[0] < p[1]), st.integers(1, 9000)),
    disk=st.sets(st.sampled_from([f"a{v}" for v in range(10)] + [f"d{v}-{v + 1}" for v in range(9)])),
)
@settings(max_examples=150, deadline=None)
def test_no_join_is_cheaper_than_the_planned_one(newest: int, anchor_every: int, sizes: dict, disk: set[str]):
    manifests = history(newest, anchor_every=anchor_every, rollups={pair: size for pair, size in sizes.items() if pair[1] <= newest})
    found = plan(manifests, newest, on_disk=disk)
    edges = [(ref, m.version) for m in manifests for ref in (*m.rollups, *((m.delta,) if m.delta else ()))]

    def cost(version: int) -> float:
        """Cheapest bytes to `version`, by trying every way."""
        anchors = [0 if a.index_key in disk else a.num_bytes for a in {m.anchor for m in manifests} if a.version == version]
        steps = [cost(r.base) + (0 if r.key in disk else r.num_bytes) for r, to in edges if to == version]
        return min(itertools.chain(anchors, steps), default=float("inf"))

    assert found.num_bytes == cost(newest)
    ways = [(hop.ref.base, hop.version) for hop in found.hops]
    assert [to for _, to in ways] == [base for base, _ in ways[1:]] + ([newest] if ways else [])
    assert (ways[0][0] if ways else newest) == found.base
