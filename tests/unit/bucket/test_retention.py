"""Retention: whatever a reader may still need stays, over random chains, readers and passes; the rest goes, in the end."""

from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoa.bucket import keys
from stoa.bucket.manifest import AnchorRef, DeltaRef, Manifest, VersionStats
from stoa.bucket.retention import TOO_LARGE, History, Lease, Policy, Verdict, due, judge
from stoa.bucket.store import Listed
from stoa.rollouts.admit import Reason
from stoa.rollouts.shard import MAX_GROUP_BYTES
from stoa.weights.chain import Plan, plan

RUN = "r"
DAY = 86_400.0


def sha(*what: object) -> str:
    return f"{abs(hash(what)):064x}"[-64:]


@dataclass(frozen=True)
class Chain:
    """Versions 0 .. `length`-1 with an anchor every `every`, announced `lag` versions later, and roll-ups at powers of two."""

    length: int
    every: int
    lag: int

    def anchor_at(self, version: int) -> AnchorRef:
        newest = max(a for a in range(0, version + 1, self.every) if a == 0 or a + self.lag <= version)
        return AnchorRef(newest, f"state{newest}", keys.anchor_index(RUN, newest, sha("i", newest)), sha("i", newest), 1100)

    def manifest(self, version: int) -> Manifest:
        rollups = [self.ref(version - 2**j, version) for j in range(1, 5) if version and version % 2**j == 0 and version >= 2**j]
        delta = self.ref(version - 1, version) if version else None
        return Manifest(
            "f", RUN, 1000, version, None, f"state{version}", "l", version, 0.0, delta, tuple(rollups), self.anchor_at(version), {}, STATS
        )

    def ref(self, base: int, version: int) -> DeltaRef:
        digest = sha("d", base, version)
        return DeltaRef(base, f"state{base}", keys.delta(RUN, base, version, digest), digest, 10 + version - base, "pco", 1, 0, 0)

    def manifests(self, newest: int) -> list[Manifest]:
        return [self.manifest(version) for version in range(newest + 1)]

    def objects(self, newest: int) -> list[Listed]:
        """What the bucket holds when HEAD names `newest` and nothing was ever deleted: with what is being uploaded."""
        found = [Listed(keys.run_json(RUN), 9, 0.0), Listed(keys.head(RUN), 9, 0.0)]
        for m in self.manifests(newest + 1):
            found.append(Listed(keys.manifest(RUN, m.version, 1000, sha("m", m.version)), 50, 0.0))
            found += [Listed(ref.key, ref.num_bytes, 0.0) for ref in (*m.rollups, *((m.delta,) if m.delta else ()))]
            if m.version % self.every == 0:
                found.append(Listed(keys.anchor_index(RUN, m.version, sha("i", m.version)), 100, 0.0))
                found += [Listed(keys.anchor_part(RUN, m.version, part, sha("p", m.version, part)), 500, 0.0) for part in range(2)]
        return found

    def history(self, newest: int) -> History:
        manifests = self.manifests(newest)
        return History(
            run=RUN,
            epoch=1000,
            version=newest,
            checkpoint_key="",
            manifest_keys={keys.manifest(RUN, m.version, 1000, sha("m", m.version)) for m in manifests},
            anchors={m.anchor: m.version for m in reversed(manifests)},
            step_keys=(),
            settled_at={},
            notes={},
        )


STATS = VersionStats(0.1, 0, 0.0)
CHAINS = st.builds(Chain, st.integers(2, 40), st.integers(1, 9), st.integers(0, 3))


def used_by(way: Plan) -> set[str]:
    """Keys that a reader of this plan reads."""
    found = {hop.ref.key for hop in way.hops}
    if way.anchor is not None:
        found.add(way.anchor.index_key)
        found |= {keys.anchor_part(RUN, way.anchor.version, part, sha("p", way.anchor.version, part)) for part in range(2)}
    return found


def needed_keys(verdict: Verdict) -> set[str]:
    return {item.key for item in verdict.needed}


@settings(max_examples=40, deadline=None)
@given(CHAINS, st.data())
def test_every_way_of_a_live_reader_stays_whole(chain: Chain, data: st.DataObject):
    newest = chain.length - 1
    bases = data.draw(st.lists(st.integers(0, newest), max_size=4))
    leases = [Lease(f"mac-{n}", base, DAY) for n, base in enumerate(bases)]
    verdict = judge(chain.objects(newest), chain.history(newest), leases, Policy(), 0.0)
    kept, manifests = needed_keys(verdict), chain.manifests(newest)
    # a cold join, by whichever of the kept anchors
    named = sorted({m.anchor.version for m in manifests})
    for anchor in named[-2:]:
        assert used_by(plan(manifests, newest, anchors=(anchor,))) <= kept
    for base in bases:
        # weights at hand at `base`, by any later HEAD up to now, with roll-ups and without
        for target in range(base, newest + 1):
            assert used_by(plan(manifests[: target + 1], target, have={base: f"state{base}"})) <= kept
        plain = [replace(m, rollups=()) for m in manifests]
        assert used_by(plan(plain, newest, have={base: f"state{base}"})) <= kept
        # weights at hand in doubt: built anew at `base`, from the newest anchor that was known then
        assert used_by(plan(manifests[: base + 1], base, anchors=(manifests[base].anchor.version,))) <= kept


@settings(max_examples=40, deadline=None)
@given(CHAINS, st.data())
def test_lease_that_ended_keeps_nothing(chain: Chain, data: st.DataObject):
    newest = chain.length - 1
    lease = Lease("gone", data.draw(st.integers(0, newest)), 99.0)
    bare = judge(chain.objects(newest), chain.history(newest), [], Policy(), 100.0)
    assert judge(chain.objects(newest), chain.history(newest), [lease], Policy(), 100.0) == bare


@settings(max_examples=50, deadline=None)
@given(CHAINS, st.data())
def test_reader_that_nobody_knows_of_finds_its_plan_whole_for_the_grace(chain: Chain, data: st.DataObject):
    """Versions, passes and readers in time: what a reader plans from the newest anchors or the version before is never
    deleted within the grace, although no lease tells of it.
    """
    policy = Policy(grace_seconds=10.0)
    gone: set[str] = set()
    announced: dict[str, float] = {}
    readers: list[tuple[float, set[str]]] = []
    now = 0.0
    for newest in range(chain.length):
        now += data.draw(st.floats(0.1, 6.0))
        manifests = chain.manifests(newest)
        target = manifests[-1]
        readers.append((now, used_by(plan(manifests[target.anchor.version :], newest))))
        if newest:
            readers.append((now, used_by(plan(manifests, newest, have={newest - 1: f"state{newest - 1}"}))))
        if data.draw(st.booleans()):
            objects = [item for item in chain.objects(newest) if item.key not in gone]
            verdict = judge(objects, chain.history(newest), [], policy, now)
            going = {item.key for item in due(verdict, announced, policy, now)}
            announced = {item.key: announced.get(item.key, now) for item in verdict.unneeded if item.key not in going}
            gone |= going
        for began, used in readers:
            if now - began < policy.grace_seconds:
                assert not used & gone


def test_what_is_old_goes_after_the_grace_and_not_before():
    chain = Chain(41, 10, 0)
    objects, history, policy = chain.objects(40), chain.history(40), Policy(grace_seconds=DAY)
    verdict = judge(objects, history, [], policy, 0.0)
    assert verdict.floor == 30
    unneeded = {item.key for item in verdict.unneeded}
    assert {keys.parse_anchor(key).version for key in unneeded if "/anchors/" in key} == {0, 10, 20}
    assert {keys.parse_delta(key).version for key in unneeded if "/deltas/" in key} == set(range(1, 31))
    assert not any("/manifests/" in key for key in unneeded)
    assert due(verdict, {}, policy, 5 * DAY) == ()
    announced = dict.fromkeys(unneeded, 100.0)
    assert due(verdict, announced, policy, DAY + 99) == ()
    assert {item.key for item in due(verdict, announced, policy, DAY + 100)} == unneeded


def test_lease_keeps_the_anchor_before_its_base_and_all_that_follows():
    chain = Chain(41, 10, 0)
    verdict = judge(chain.objects(40), chain.history(40), [Lease("mac-1", 17, DAY)], Policy(), 0.0)
    assert verdict.floor == 10
    assert {keys.parse_anchor(key).version for key in needed_keys(verdict) if "/anchors/" in key} == {10, 30, 40}


def test_anchor_that_lost_a_part_does_not_count_and_one_that_is_uploaded_stays():
    chain = Chain(41, 10, 0)
    lost = keys.anchor_part(RUN, 40, 1, sha("p", 40, 1))
    coming = Listed(keys.anchor_part(RUN, 50, 0, sha("p", 50, 0)), 500, 0.0)
    objects = [item for item in chain.objects(40) if item.key != lost] + [coming]
    verdict = judge(objects, chain.history(40), [], Policy(), 0.0)
    assert {keys.parse_anchor(key).version for key in needed_keys(verdict) if "/anchors/" in key} == {20, 30, 50}
    assert verdict.floor == 20


def test_orphans_of_a_lost_lease_go_and_those_of_the_lease_that_is_on_stay():
    chain = Chain(5, 10, 0)
    history = replace(chain.history(4), epoch=2000, step_keys={keys.step_manifest(RUN, 1000, 1)})
    extra = {
        keys.manifest(RUN, 3, 1000, "f" * 64): False,  # a version that a zombie wrote and nobody names
        keys.manifest(RUN, 5, 2000, "f" * 64): True,  # the next version, before HEAD
        keys.step_manifest(RUN, 1000, 1): True,
        keys.step_manifest(RUN, 1000, 2): False,
        keys.step_manifest(RUN, 2000, 2): True,
        keys.drop_note(RUN, 2000, 0): True,
        f"runs/{RUN}/notes.txt": True,  # a person's
        f"runs/{RUN}/deltas/readme": True,
        keys.eval_summary(RUN, 0, "first"): True,
        keys.retention_notice(RUN, 5): True,
    }
    verdict = judge([*chain.objects(4), *(Listed(key, 1, 0.0) for key in extra)], history, [], Policy(), 0.0)
    assert {key: key in needed_keys(verdict) for key in extra} == extra


def test_groups_stay_until_they_are_settled_before_every_checkpoint_and_out_of_the_window():
    group = {name: keys.group(RUN, version, "m", sweep, 0) for sweep, (name, version) in enumerate(CASES.items())}
    checkpoints = [keys.checkpoint(RUN, 1000, step, name) for step in (40, 44) for name in ("manifest.json", "part-0000.safetensors")]
    settled = {group["old"]: 30, group["free again"]: 42, group["recent"]: 30, group["in the window"]: 30}
    history = replace(Chain(31, 40, 0).history(30), settled_at=settled, checkpoint_key=checkpoints[2])
    objects = [Listed(key, 1, 0.0) for key in (*group.values(), *checkpoints)]
    verdict = judge(objects, history, [], Policy(staleness_versions=8, extra_group_versions=8), 0.0)
    assert {item.key for item in verdict.unneeded} == {group["old"]}


CASES = {"old": 10, "free again": 10, "recent": 15, "in the window": 25, "never settled": 1}


def test_object_that_is_larger_than_any_group_goes_at_once():
    """A ticket cannot bound it, the trainer refuses it by its size, and nobody reads it: no reader is waited for."""
    policy = Policy()
    assert policy.most_group_bytes == MAX_GROUP_BYTES
    flood = (keys.group(RUN, 25, "m", 0, 0), keys.eval_part(RUN, 0, "first", 0, "m"))
    full = keys.group(RUN, 25, "m", 0, 1)
    chain = Chain(31, 40, 0)
    objects = [*(Listed(key, MAX_GROUP_BYTES + 1, 0.0) for key in flood), Listed(full, MAX_GROUP_BYTES, 0.0)]
    verdict = judge([*chain.objects(30), *objects], chain.history(30), [], policy, 0.0)
    assert {item.key for item in due(verdict, {}, policy, 0.0)} == set(flood)
    assert {item.reason for item in verdict.unneeded if item.key in flood} == {"larger than 67108864 bytes"}
    assert full in needed_keys(verdict)


def test_what_comes_again_under_the_key_of_one_that_was_too_large_goes_at_once_whatever_its_size():
    assert TOO_LARGE == Reason.TOO_LARGE
    again, other = keys.group(RUN, 25, "m", 0, 0), keys.group(RUN, 25, "m", 0, 1)
    chain = Chain(31, 40, 0)
    history = replace(chain.history(30), settled_at={again: 39, other: 39}, too_large={again})
    verdict = judge([*chain.objects(30), Listed(again, 900, 0.0), Listed(other, 900, 0.0)], history, [], Policy(), 0.0)
    assert [(item.key, item.reason) for item in due(verdict, {}, Policy(), 0.0)] == [(again, "its key was refused before as too large")]
    assert other in needed_keys(verdict)


def test_checkpoints_that_stay_are_the_newest_whole_ones_the_named_one_and_those_being_written():
    history = replace(Chain(3, 9, 0).history(2), epoch=2000, checkpoint_key=keys.checkpoint(RUN, 1000, 4, "manifest.json"))
    whole = [(1000, 4), (1000, 8), (1000, 12), (2000, 12), (3000, 1)]
    torn = [(1000, 2), (1000, 16), (2000, 16)]
    objects = [Listed(keys.checkpoint(RUN, *place, "part-0000.safetensors"), 1, 0.0) for place in (*whole, *torn)]
    objects += [Listed(keys.checkpoint(RUN, *place, "manifest.json"), 1, 0.0) for place in whole]
    verdict = judge(objects, history, [], Policy(num_checkpoints=2), 0.0)
    kept = {(k.epoch, k.step) for k in (keys.parse_checkpoint(item.key) for item in verdict.needed)}
    assert kept == {(1000, 4), (1000, 12), (2000, 12), (2000, 16), (3000, 1)}


def test_grants_stay_while_their_groups_do_and_the_newest_always():
    grants = [keys.grant(RUN, "m", sweep) for sweep in range(30)]
    objects = [Listed(key, 1, 0.0) for key in (*grants, keys.group(RUN, 2, "m", 3, 0))]
    verdict = judge(objects, Chain(3, 9, 0).history(2), [], Policy(num_grants_a_host=16), 0.0)
    assert {item.key for item in verdict.unneeded} == {key for sweep, key in enumerate(grants) if sweep < 14 and sweep != 3}


@pytest.mark.parametrize("version", [3, 25])
def test_drop_note_of_an_old_lease_stays_while_it_names_a_group_in_the_window(version: int):
    note = keys.drop_note(RUN, 1000, 7)
    history = replace(Chain(31, 40, 0).history(30), epoch=2000, notes={note: (keys.group(RUN, version, "m", 1, 0),)})
    verdict = judge([Listed(note, 1, 0.0)], history, [], Policy(), 0.0)
    assert [item.key for item in verdict.unneeded] == ([note] if version == 3 else [])
