"""`stoa weights`: tells what is in the bucket, finds every damaged object, says what changed, clears only after the grace."""

import json
import time

import numpy as np
import pytest

from cli.main import run as stoa
from cli.say import Exit
from stoa.bucket import keys
from tests.servers import CREDENTIALS
from tests.unit.weights.small_run import SmallRun


@pytest.fixture
def small(store, tmp_path, monkeypatch) -> SmallRun:
    monkeypatch.setenv("STOA_BUCKET_ENDPOINT", store.settings.endpoint)
    monkeypatch.setenv("STOA_BUCKET_NAME", store.settings.name)
    monkeypatch.setenv("STOA_BUCKET_KEY", CREDENTIALS.key)
    monkeypatch.setenv("STOA_BUCKET_SECRET", CREDENTIALS.secret)
    monkeypatch.setenv("STOA_TEMPORAL_ADDRESS", "127.0.0.1:1")
    made = SmallRun(store, tmp_path)
    made.publish_many(6, anchor_every=4)
    return made


def told(capsys, *tokens: str) -> dict:
    capsys.readouterr()
    assert stoa([*tokens, "--json"]) == Exit.DONE
    return json.loads(capsys.readouterr().out)


def test_ls_tells_each_version_and_what_was_deleted(small: SmallRun, capsys):
    versions = told(capsys, "weights", "ls", "small")["versions"]
    assert [v["version"] for v in versions] == [0, 1, 2, 3, 4, 5]
    assert [v["version"] for v in versions if v["anchor_bytes"]] == [0, 4]
    assert [v["rollups_from"] for v in versions] == [[], [], [0], [], [0, 2], []]
    assert versions[0]["delta_bytes"] == 0
    assert all(v["delta_bytes"] > 0 and 0 < v["changed_fraction"] < 1 for v in versions[1:])
    gone = next(item.key for item in small.store.list(keys.root("small") + "deltas/00000002-00000003"))
    small.store.delete([gone])
    assert [v["here"] for v in told(capsys, "weights", "ls", "small")["versions"]] == [True, True, True, False, True, True]
    assert stoa(["weights", "ls", "small"]) == Exit.DONE
    assert "deleted" in capsys.readouterr().out


def test_verify_builds_the_weights_by_every_way(small: SmallRun, capsys):
    result = told(capsys, "weights", "verify", "small")
    assert (result["version"], result["faults"]) == (5, [])
    assert result["state_id"] == small.publisher.mirror.state_id()
    assert result["ways"] == ["anchor 0 and every delta", "anchor 4 and every delta", "anchor 0 and roll-ups"]
    assert told(capsys, "weights", "verify", "small", "--version", "3")["version"] == 3
    assert stoa(["weights", "verify", "small", "--version", "9"]) == Exit.WRONG_USE


def test_verify_names_the_object_that_is_damaged_and_the_one_that_is_gone(small: SmallRun, capsys):
    listed = [item.key for item in small.store.list(keys.root("small") + "deltas/")]
    damaged, gone, longer = listed[0], listed[-1], listed[1]
    more = small.store.get(longer, max_bytes=1 << 20).data + b"and more"
    small.store.delete([longer])
    small.store.create(longer, more)
    data = bytearray(small.store.get(damaged, max_bytes=1 << 20).data)
    data[len(data) // 2] ^= 1
    small.store.delete([damaged, gone])
    small.store.create(damaged, bytes(data))
    capsys.readouterr()
    assert stoa(["weights", "verify", "small", "--json"]) == Exit.FAULT_FOUND
    where = {fault["where"] for fault in json.loads(capsys.readouterr().out)["faults"]}
    assert {damaged, gone, longer} <= where


def test_diff_counts_what_differs_between_the_weights_themselves(small: SmallRun, capsys, tmp_path):
    from stoa.weights.sync import Puller

    result = told(capsys, "weights", "diff", "small", "1", "5")
    old = Puller(small.store, small.document, tmp_path / "a").build(small.head, 1)
    new = Puller(small.store, small.document, tmp_path / "b").build(small.head, 5)
    expected = {}
    for spec in small.layout.quantised:
        steps = np.abs(new.quantised(spec)[0].astype(int) - old.quantised(spec)[0])
        expected[spec.name] = (int(np.count_nonzero(steps)), int(steps.max()))
    found = {t["name"]: (t["num_changed"], t["largest_steps"]) for t in result["tensors"] if t["name"] in expected}
    assert found == expected
    assert result["num_changed"] == sum(count for count, _ in expected.values())
    for tokens in (("5", "1"), ("2", "2"), ("0", "9")):
        assert stoa(["weights", "diff", "small", *tokens]) == Exit.WRONG_USE
    assert stoa(["weights", "diff", "small", "0", "5"]) == Exit.DONE


def test_gc_dry_run_changes_nothing_and_needs_no_temporal(small: SmallRun, capsys):
    small.publish_many(8, anchor_every=4)
    before = [item.key for item in small.store.list("")]
    result = told(capsys, "weights", "gc", "small", "--dry-run")
    assert result["deleted"] == []
    assert {item["key"].split("/")[2] for item in result["announced"]} == {"anchors", "deltas"}
    assert result["floor"] == 4  # version 13 less the staleness window of 8 is built from anchor 4
    assert [item.key for item in small.store.list("")] == before
    assert stoa(["weights", "gc", "small", "--dry-run"]) == Exit.DONE
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if line[0].isdigit()]
    assert sorted(row[1] for row in rows) == ["anchors", "deltas"], "a row for each kind and reason, not for each object"
    assert sum(int(row[0]) for row in rows) == len(result["announced"])
    assert stoa(["weights", "gc", "small", "--grace-hours", "-1"]) == Exit.WRONG_USE


def test_gc_without_knowing_the_macs_is_refused(small: SmallRun, capsys):
    before = [item.key for item in small.store.list("")]
    assert stoa(["weights", "gc", "small"]) == Exit.FAILED
    assert "127.0.0.1:1" in capsys.readouterr().err
    assert [item.key for item in small.store.list("")] == before


def test_run_that_is_not_there_or_has_no_version_is_told(small: SmallRun, store, tmp_path, capsys):
    assert stoa(["weights", "ls", "nobody"]) == Exit.WRONG_USE
    SmallRun(store, tmp_path / "empty", name="empty")
    for command in ("ls", "verify"):
        assert stoa(["weights", command, "empty"]) == Exit.FAILED
        assert "no version yet" in capsys.readouterr().err


def test_gc_takes_the_grace_that_the_run_was_started_with(small: SmallRun):
    from dataclasses import replace

    from cli.weights import collect
    from stoa.config.run import Retention

    small.publish_many(8, anchor_every=4)
    passes = []
    for hours in (1.0, 0.0, 0.0):
        config = small.document.config.model_copy(update={"retention": Retention(grace_hours=hours)})
        passes.append(collect(small.store, replace(small.document, config=config), [], grace_seconds=None, dry_run=len(passes) == 1))
        time.sleep(1.1)  # notices are named by the second
    announced = {item.key for item in passes[0].verdict.unneeded}
    assert announced
    assert [len(found.due) for found in passes] == [0, len(announced), len(announced)]
    assert not announced & {item.key for item in small.store.list("")}


def test_gc_keeps_what_a_live_mac_goes_on_from_and_not_what_one_that_left_did(small: SmallRun):
    from cli.weights import collect
    from stoa.contracts.fleet_messages import SessionStatus

    small.publish_many(8, anchor_every=4)
    live, ended = SessionStatus("mac-1", "away", 3, 2), SessionStatus("mac-2", "ended", 3, 2)
    joining = SessionStatus("mac-3", "live", 0, -1)
    for sessions, floor in (([live], 0), ([ended, joining], 4)):
        result = collect(small.store, small.document, sessions, grace_seconds=0.0, dry_run=True)
        assert result.verdict.floor == floor
