"""The audit finds each thing that must never happen, and nothing in a run where it did not."""

from dataclasses import replace

from cli.audit import audit
from tests.unit.cli.records import record, step, version


def test_a_whole_run_is_clean() -> None:
    found = audit(record())
    assert found.clean
    assert (found.num_steps, found.num_versions) == (4, 3)


def test_a_run_that_has_not_begun_is_clean() -> None:
    assert audit(record(steps=(), versions=(), version=-1, step=0)).clean


def test_group_in_two_steps_is_named_with_both() -> None:
    steps = (step(1, consumed=("x", "y")), step(2, consumed=("z",)), step(3, consumed=("y",)), step(4))
    found = audit(record(steps=steps))
    assert found.groups_trained_twice == 1
    assert found.faults == ("group y was trained on in steps 1, 3",)


def test_group_twice_in_one_step_counts() -> None:
    assert audit(record(steps=(step(1, consumed=("x", "x")), step(2), step(3), step(4)))).groups_trained_twice == 1


def test_gap_in_the_lineage_is_found() -> None:
    found = audit(record(steps=(step(1), step(2), step(4))))
    assert not found.lineage_contiguous
    assert found.faults[0] == "step 4 follows step 2"


def test_step_of_another_parent_is_found() -> None:
    assert not audit(record(steps=(step(1), step(2, parent_key="elsewhere"), step(3), step(4)))).lineage_contiguous


def test_lineage_that_begins_in_the_middle_is_found() -> None:
    assert audit(record(steps=(step(3), step(4)))).faults == ("the lineage begins at step 3, not at 1",)


def test_lease_that_falls_is_found() -> None:
    steps = (step(1, epoch=2000), step(2, epoch=1001), step(3, epoch=2000), step(4, epoch=2000))
    assert audit(record(steps=steps)).faults == ("step 2 is of lease 1001, after lease 2000",)


def test_version_of_other_weights_is_found() -> None:
    versions = (version(0), version(1, state_id="other"), version(2))
    found = audit(record(versions=versions))
    assert not found.chain_whole
    assert found.faults == ("version 2 was made from weights other than version 1's",)


def test_missing_version_is_found() -> None:
    assert audit(record(versions=(version(0), version(2)))).faults == ("version 2 (parent 1) follows version 0",)


def test_chain_without_an_anchor_is_found() -> None:
    versions = (version(0, anchor_version=-1), version(1), version(2))
    assert audit(record(versions=versions)).faults == ("version 0 has no anchor, and no version before it",)


def test_version_that_heads_named_twice_is_found_even_if_the_chain_holds_it_once() -> None:
    found = audit(record(heads_seen=((0, "sha0"), (1, "another"), (1, "sha1"), (2, "sha2"))))
    assert found.versions_published_twice == 1
    assert found.faults == ("version 1 was published twice",)
    assert not found.clean


def test_heads_that_were_seen_as_the_chain_holds_them_are_no_fault() -> None:
    assert audit(record(heads_seen=((0, "sha0"), (2, "sha2")))).clean


def test_head_that_names_what_its_chain_lacks_is_found() -> None:
    assert len(audit(replace(record(), version=3, step=5)).faults) == 2
