"""Groups that notes tell of and no step does: what the bucket knows of a run whose next step could not be made.

A note names groups that were dropped or refused while a step waited. A step that is done tells of the same groups with
the same reasons, so only the others are added here.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Final, get_args

from cli.report.record import RunRecord
from stoa.bucket.steps import read_noted
from stoa.bucket.store import Store
from stoa.learning.replay import DropReason

EQUAL_REWARDS: Final[Mapping[str, str]] = {"all_zero": "0", "all_one": "1", "all_equal": "alike"}
"""Reason of a drop that only says that a group teaches nothing -> what all its rewards are."""
_DROPS: Final = frozenset(get_args(DropReason))


def with_noted(store: Store, record: RunRecord) -> RunRecord:
    """The record with the groups that only notes tell of."""
    told: set[str] = set()
    for row in record.steps:
        told |= {*row.consumed, *row.dropped, *(key for key, _, _ in row.refused)}
    noted = {drop.key: drop.reason for drop in read_noted(store, record.facts.run) if drop.key not in told}
    return replace(
        record,
        noted_dropped={key: reason for key, reason in noted.items() if reason in _DROPS},
        noted_refused={key: reason for key, reason in noted.items() if reason not in _DROPS},
    )
