"""Step manifests come back as written, follow one another down to step 1, and nonsense is refused."""

import dataclasses
import json

import pytest

from stoa.bucket import keys
from stoa.bucket.head import HEAD_FORMAT, Head
from stoa.bucket.manifest import canonical
from stoa.bucket.steps import (
    STEP_FORMAT,
    Canary,
    Dropped,
    GroupMismatch,
    HostCounts,
    Refused,
    StepManifest,
    lineage,
    read_drop_notes,
    read_noted,
    read_step,
    write_drop_note,
    write_step,
)
from stoa.contracts.errors import FormatError, NonFiniteError, ObjectExistsError, ObjectMissingError

RUN = "steps"


def group(index: int, version: int = 0) -> str:
    return keys.group(RUN, version, "mac-a", 0, index)


def manifest(step: int = 1, *, epoch: int = 1000, parent_key: str = "", **changes: object) -> StepManifest:
    settings: dict = {
        "format": STEP_FORMAT,
        "run": RUN,
        "epoch": epoch,
        "step": step,
        "version": 0,
        "parent_key": parent_key,
        "consumed": (group(2 * step),),
        "dropped": (Dropped(group(2 * step + 1), "all_zero"),),
        "refused": (Refused("anything", "mac-b", "wrong_reward"),),
        "hosts": {"mac-a": HostCounts(accepted=2, refused={"wrong_reward": 1}, decode_seconds=1.5)},
        "metrics": {"reward_mean": 0.5},
        "started_at": 1.7e9,
        "wait_seconds": 0.25,
        "train_seconds": 1.0,
        "facts": {"gate_mode": "tv"},
        "mismatches": (GroupMismatch(0.01, 0.002, 0.07, 0.03, 1.004),),
        "distances": (3,),
        "canaries": (Canary(group(99), 1, 5, GroupMismatch(0.02, 0.003, 0.08, 0.04, 0.998)),),
    }
    return StepManifest(**{**settings, **changes})


def head(step: int, key: str, epoch: int = 5000) -> Head:
    return Head(HEAD_FORMAT, RUN, epoch, "gpu", 1, "n", "running", 3, "m", "s", step, key, "", 0.0)


def chain(store, epochs: list[int]) -> list[str]:
    """Steps 1, 2, ... of these leases, each following the one before."""
    written: list[str] = []
    for number, epoch in enumerate(epochs):
        written.append(write_step(store, manifest(number + 1, epoch=epoch, parent_key=written[-1] if written else "")))
    return written


def put(store, document: dict, key: str) -> str:
    store.create(key, canonical(document))
    return key


def tree(found: StepManifest) -> dict:
    return json.loads(json.dumps(dataclasses.asdict(found)))


def test_a_manifest_from_before_likeliness_was_measured_is_read(store):
    document = tree(manifest(epoch=1))
    document["mismatches"] = [row[:5] for row in document["mismatches"]]
    (found,) = read_step(store, RUN, put(store, document, keys.step_manifest(RUN, 1, 1))).mismatches
    assert found == GroupMismatch(0.01, 0.002, 0.07, 0.03, 1.004, 0.0)


def test_a_manifest_comes_back_as_written(store):
    key = write_step(store, manifest())
    assert key == "runs/steps/steps/e1000/s00000001.json"
    found = read_step(store, RUN, key)
    assert found == manifest()
    assert found.dropped[0].reason == "all_zero"
    assert found.refused[0].host == "mac-b"


def test_dropped_tokens_come_back_and_are_of_groups_that_were_trained_on(store):
    told = manifest(gated={group(2): ((0, 7), ())})
    assert read_step(store, RUN, write_step(store, told)).gated == {group(2): ((0, 7), ())}
    with pytest.raises(FormatError, match="which it did not train on"):
        write_step(store, manifest(2, gated={group(2): ((0,),)}))


def test_the_object_is_canonical_json(store):
    key = write_step(store, manifest())
    text = store.get(key, max_bytes=1 << 20).data.decode()
    assert text == json.dumps(tree(manifest()), sort_keys=True, separators=(",", ":"))


@pytest.mark.parametrize(
    "changes",
    [{"train_seconds": -1.0}, {"distances": (-1,)}, {"hosts": {"mac-a": HostCounts(peak_memory_bytes=-1)}}, {"started_at": "now"}],
    ids=str,
)
def test_step_that_nobody_could_read_is_not_written(store, changes: dict[str, object]) -> None:
    with pytest.raises(FormatError):
        write_step(store, manifest(**changes))
    assert list(store.list(keys.root(RUN))) == []


def test_a_step_is_written_once_a_lease(store):
    write_step(store, manifest())
    write_step(store, manifest())
    with pytest.raises(ObjectExistsError):
        write_step(store, manifest(wait_seconds=0.5))
    write_step(store, manifest(epoch=2000, wait_seconds=0.5))


def test_lineage_walks_back_to_step_one_over_leases(store):
    written = chain(store, [1000, 1000, 2001, 2001, 4000])
    found = list(lineage(store, head(5, written[-1])))
    assert [(one.step, one.epoch) for one in found] == [(5, 4000), (4, 2001), (3, 2001), (2, 1000), (1, 1000)]


def test_steps_lost_in_a_crash_are_not_in_the_lineage(store):
    first, _lost = chain(store, [1000, 1000])
    again = write_step(store, manifest(2, epoch=2000, parent_key=first, consumed=(group(90),)))
    assert [one.consumed for one in lineage(store, head(2, again))] == [(group(90),), (group(2),)]


def test_lineage_stops_at_a_step_that_is_known_already(store):
    written = chain(store, [1000] * 4)
    assert [one.step for one in lineage(store, head(4, written[3]), until_key=written[1])] == [4, 3]
    assert list(lineage(store, head(4, written[3]), until_key=written[3])) == []


def test_a_run_without_steps_has_an_empty_lineage(store):
    assert list(lineage(store, head(0, ""))) == []


def test_a_lineage_that_never_meets_the_known_step_is_refused(store):
    written = chain(store, [1000] * 2)
    with pytest.raises(FormatError, match="before it meets"):
        list(lineage(store, head(2, written[1]), until_key=keys.step_manifest(RUN, 1, 7)))


@pytest.mark.parametrize("step", [1, 3])
def test_a_head_of_another_step_than_its_manifest_is_refused(store, step):
    written = chain(store, [1000] * 2)
    with pytest.raises(FormatError, match="needs step"):
        list(lineage(store, head(step, written[1])))


def test_a_head_of_an_older_lease_than_its_manifest_is_refused(store):
    (only,) = chain(store, [3000])
    with pytest.raises(FormatError, match="lease 3000"):
        list(lineage(store, head(1, only, epoch=2000)))


def test_a_gap_a_circle_and_a_later_lease_end_the_walk(store):
    first = write_step(store, manifest(1))
    for number, (step, parent) in enumerate([(3, first), (1, keys.step_manifest(RUN, 4002, 1)), (2, keys.step_manifest(RUN, 9000, 1))]):
        epoch = 4001 + number
        key = write_step(store, manifest(step, epoch=epoch, parent_key=parent))
        write_step(store, manifest(1, epoch=9000 + number, parent_key=key))
        with pytest.raises(FormatError):
            list(lineage(store, head(step, key)))


def test_a_lineage_that_ends_early_is_refused(store):
    key = write_step(store, manifest(3))
    with pytest.raises(FormatError, match="not at step 1"):
        list(lineage(store, head(3, key)))


def test_a_missing_manifest_is_missing(store):
    key = write_step(store, manifest(2, parent_key=keys.step_manifest(RUN, 1000, 1)))
    with pytest.raises(ObjectMissingError):
        list(lineage(store, head(2, key)))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_metric_that_is_not_finite_is_not_written(store, value):
    with pytest.raises(NonFiniteError, match="reward_mean"):
        write_step(store, manifest(metrics={"reward_mean": value}))
    assert list(store.list(keys.steps_of_epoch(RUN, 1000))) == []


@pytest.mark.parametrize(
    "changes",
    [
        {"consumed": (group(1), group(1))},
        {"consumed": (group(3),)},
        {"consumed": ("runs/other/groups/v00000000/mac-a/00000000/00.safetensors.zst",)},
        {"consumed": ("nonsense",)},
        {"parent_key": "runs/other/steps/e1/s00000001.json"},
        {"format": "stoa-step-0"},
    ],
)
def test_a_manifest_that_contradicts_itself_is_neither_written_nor_read(store, changes):
    with pytest.raises(FormatError):
        write_step(store, manifest(**changes))
    key = put(store, tree(manifest(**changes)), keys.step_manifest(RUN, 1000, 1))
    with pytest.raises(FormatError):
        read_step(store, RUN, key)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("step", 2),
        ("epoch", 7),
        ("run", "other"),
        ("step", "1"),
        ("wait_seconds", -1.0),
        ("metrics", {"a": 10**400}),
        ("hosts", {"a": 3}),
        ("extra", 1),
    ],
)
def test_a_manifest_with_a_wrong_field_is_refused(store, name, value):
    key = put(store, {**tree(manifest()), name: value}, keys.step_manifest(RUN, 1000, 1))
    with pytest.raises(FormatError):
        read_step(store, RUN, key)


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b'{"format": "stoa-step-1"}', b"\xff\xfe"])
def test_bytes_that_are_no_manifest_are_refused(store, data):
    key = keys.step_manifest(RUN, 1000, 1)
    store.create(key, data)
    with pytest.raises(FormatError):
        read_step(store, RUN, key)


def test_drop_notes_tell_of_groups_before_the_step_does(store):
    assert read_drop_notes(store, RUN) == {}
    first = write_drop_note(store, RUN, 1000, 0, [Dropped(group(0), "all_one"), Dropped(group(1), "stale")])
    second = write_drop_note(store, RUN, 2000, 0, [Dropped(group(5), "all_zero")])
    assert read_drop_notes(store, RUN) == {first: (group(0), group(1)), second: (group(5),)}
    assert read_drop_notes(store, RUN, start_after=first) == {second: (group(5),)}
    assert read_drop_notes(store, RUN, epoch=1000) == {first: (group(0), group(1))}
    assert read_drop_notes(store, RUN, epoch=1000, start_after=first) == {}
    assert read_noted(store, RUN) == ((group(0), "all_one"), (group(1), "stale"), (group(5), "all_zero"))


def test_a_drop_note_that_is_damaged_or_copied_tells_nothing_and_hides_no_other(store):
    key = write_drop_note(store, RUN, 1000, 0, [Dropped(group(0), "stale")])
    copied, torn, stray = keys.drop_note(RUN, 1000, 1), keys.drop_note(RUN, 1000, 2), keys.drop_notes_prefix(RUN) + "stray"
    store.create(copied, store.get(key, max_bytes=1 << 20).data)
    store.create(torn, b"{")
    store.create(stray, b"")
    assert read_drop_notes(store, RUN) == {key: (group(0),), copied: (), torn: (), stray: ()}
