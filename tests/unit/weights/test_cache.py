"""The disk cache: what stays within the cap, what goes first, and who is blamed for what cannot be had."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoa.bucket import keys
from stoa.bucket.transfer import part_of
from stoa.contracts.errors import DigestError, ObjectMissingError
from stoa.weights.cache import KEPT_ANCHORS, Cache, floor_of
from stoa.weights.sync import Puller
from tests.unit.weights.small_run import SmallRun

ANCHORS = st.dictionaries(st.integers(0, 60), st.integers(1, 100), max_size=5)
DELTAS = st.lists(st.tuples(st.integers(1, 60), st.integers(1, 30)), max_size=30)


@settings(deadline=None)
@given(ANCHORS, DELTAS, st.integers(0, 60), st.integers(0, 400))
def test_floor_keeps_the_newest_anchor_whatever_it_takes_and_more_only_within_the_cap(anchors, deltas, newest, cap):
    floor = floor_of(anchors, deltas, newest, cap)
    kept = [version for version in anchors if version >= floor]
    assert floor <= newest
    assert floor <= max(anchors, default=floor)
    if len([version for version in kept if version <= newest]) > 1 and floor in anchors:
        used = sum(anchors[v] for v in kept) + sum(size for to, size in deltas if to > floor)
        assert used <= cap
        assert len(kept) <= KEPT_ANCHORS


@pytest.mark.parametrize(("cap", "floor"), [(1000, 20), (225, 20), (224, 40), (0, 40)])
def test_older_anchor_goes_when_it_does_not_fit(cap: int, floor: int):
    # anchors of 100 at 20 and 40; deltas of 5 to 21, 30, 41, 50 and 51: 25 after 20, 15 after 40
    assert floor_of({0: 100, 20: 100, 40: 100}, [(to, 5) for to in (5, 21, 30, 41, 50, 51)], 40, cap) == floor


def names(folder) -> set[str]:
    return {path.name for path in folder.iterdir()} if folder.exists() else set()


def test_puller_keeps_two_anchors_and_with_a_small_cap_one(store, tmp_path):
    run = SmallRun(store, tmp_path)
    puller = Puller(store, run.document, tmp_path / "mac")
    for _ in range(4):
        run.publish_many(3, anchor_every=3)
        puller.join(run.head)
    # an in-place way from anchor 0 costs nothing to download anew, so newer anchors are taken only when deltas cost more
    cache = Cache(store, "small", tmp_path / "mac", run.layout, max_bytes=10)
    _, whole = cache.keys()
    assert 1 <= len(whole) <= KEPT_ANCHORS
    (tmp_path / "mac" / "deltas" / ("00000000-00000001-" + 16 * "0" + ".safetensors.part")).write_bytes(b"left behind")
    cache.trim(9)
    _, left = cache.keys()
    assert left == {max(whole)}
    assert all(int(name[9:17]) > max(whole) for name in names(tmp_path / "mac" / "deltas"))
    assert Puller(store, run.document, tmp_path / "mac").join(run.head).state_id() == run.publisher.mirror.state_id()


def test_cap_of_the_owner_is_kept_after_each_join_and_the_newest_way_in_any_case(store, tmp_path):
    run = SmallRun(store, tmp_path)
    run.publish_many(5, anchor_every=3)
    kept = {1 << 40: {0, 3}, 0: {3}}
    pullers = {cap: Puller(store, run.document, tmp_path / f"mac-{cap}", cache_bytes=cap) for cap in kept}
    for puller in pullers.values():
        puller.build(run.head, 0)
    store.delete([item.key for item in store.list(f"{keys.root('small')}deltas/") if keys.parse_delta(item.key).base < 3])
    onto_the_anchor = tmp_path / "mac-0" / "deltas" / ("00000002-00000003-" + 16 * "0" + ".safetensors.part")
    onto_the_anchor.parent.mkdir()
    onto_the_anchor.write_bytes(b"left behind")
    for cap, puller in pullers.items():
        assert puller.join(run.head).state_id() == run.publisher.mirror.state_id()
        assert {int(path.name) for path in (tmp_path / f"mac-{cap}" / "anchors").iterdir()} == kept[cap]
    assert not onto_the_anchor.exists()


def test_files_that_somebody_else_left_in_the_cache_are_passed_over(store, tmp_path):
    run = SmallRun(store, tmp_path)
    run.publish_many(2, anchor_every=9)
    Puller(store, run.document, tmp_path / "mac").join(run.head)
    strange = [tmp_path / "mac" / folder / ".DS_Store" for folder in ("", "anchors", "deltas")]
    strange.append(tmp_path / "mac" / "anchors" / "old copy" / "index-0.json")
    for path in strange:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"left behind")
    run.publish_many(1, anchor_every=9)
    puller = Puller(store, run.document, tmp_path / "mac")
    assert puller.join(run.head).state_id() == run.publisher.mirror.state_id()
    puller.stage(run.head, 2, "0" * 64)
    Cache(store, "small", tmp_path / "mac", run.layout).trim(9)
    assert all(path.exists() for path in strange)


def test_object_that_cannot_be_had_is_blamed_and_the_others_come(store, tmp_path):
    run = SmallRun(store, tmp_path)
    run.publish_many(3, anchor_every=9)
    cache = Cache(store, "small", tmp_path / "mac", run.layout)
    objects = {}
    for number in range(4):
        data = random.Random(number).randbytes(3_000_000)
        objects[keys.delta("small", number, number + 1, f"{number:064x}")] = data
    import hashlib

    needed = [(key, hashlib.sha256(data).hexdigest(), len(data)) for key, data in objects.items()]
    missing, damaged = needed[0][0], needed[2][0]
    for key, data in objects.items():
        if key != missing:
            store.create(key, data if key != damaged else bytes(len(data)))
    with cache.coming(needed):
        with pytest.raises(ObjectMissingError):
            cache.read(*needed[0])
        assert cache.read(*needed[1]) == objects[needed[1][0]]
        with pytest.raises(DigestError):
            cache.read(*needed[2])
        assert cache.read(*needed[3]) == objects[needed[3][0]]
    assert not part_of(cache.path(missing)).exists()
    assert not part_of(cache.path(damaged)).exists()
    assert cache.bytes_downloaded >= 6_000_000


def test_what_is_not_needed_makes_room_on_a_full_disk(store, tmp_path, monkeypatch):
    run = SmallRun(store, tmp_path)
    run.publish_many(2, anchor_every=9)
    cache = Cache(store, "small", tmp_path / "mac", run.layout)
    old = tmp_path / "mac" / "deltas" / ("00000000-00000001-" + 16 * "0" + ".safetensors")
    old.parent.mkdir(parents=True)
    old.write_bytes(bytes(5_000_000))
    import shutil

    real = shutil.disk_usage
    monkeypatch.setattr(shutil, "disk_usage", lambda path: real(path)._replace(free=0) if old.exists() else real(path))
    data = b"a small delta"
    key = keys.delta("small", 1, 2, "1" * 64)
    store.create(key, data)
    import hashlib

    needed = (key, hashlib.sha256(data).hexdigest(), len(data))
    with cache.coming([needed]):
        assert cache.read(*needed) == data
    assert not old.exists()
