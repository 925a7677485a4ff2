"""A real run of real processes whose parts are killed, frozen and cut off: what it did is audited to the last group."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.chaos import measure
from benchmarks.fleet_plant import RUN, Plant
from benchmarks.fleet_play import Play
from stoa.contracts.errors import StoaError
from stoa.contracts.messages import RunStatus

pytestmark = [pytest.mark.faults, pytest.mark.timeout(300)]


def test_run_outlives_its_parts_and_loses_nothing(tmp_path: Path) -> None:
    # This seed freezes the trainer that holds the run for 18 s, and kills bucket, Temporal, control process and a Mac.
    found = measure(1.5, 5269, tmp_path / "run")
    assert found["faults_found"] == []
    assert found["lineage_contiguous"] is True
    assert [found[name] for name in ("groups_trained_twice", "uploaded_groups_lost", "chain_forks", "zombie_writes_accepted")] == [0] * 4
    assert found["final_weights_verified"] is True
    assert found["steps_done"] == found["steps_asked"] == 15
    assert found["num_faults"] == 8
    assert found["unplanned_exits"] == {}
    assert found["leases"] >= 2
    assert found["groups_trained"] == 60  # 15 steps of 4 groups


def until(plant: Plant, wanted: Callable[[RunStatus], bool], seconds: float) -> RunStatus:
    deadline = time.monotonic() + seconds
    while True:
        status = None
        try:
            status = plant.control.status(RUN)
            if wanted(status):
                return status
        except StoaError:
            pass
        assert time.monotonic() < deadline, status
        time.sleep(0.2)


def test_four_seconds_without_a_bucket_do_not_cost_the_trainer_its_lease(tmp_path: Path) -> None:
    with Plant(tmp_path / "run") as plant:
        plant.set_pace(0.5)
        plant.start_trainer("trainer")
        plant.start_mac("mac-1", Play(2.0))
        before = until(plant, lambda status: status.step >= 3, 120)
        os.kill(plant.services.weed.identity.pid, signal.SIGKILL)
        time.sleep(4.0)
        plant.again(plant.services.weed)
        after = until(plant, lambda status: status.step >= before.step + 4 and status.version > before.version + 1, 90)
        assert (after.token, after.lease) == (before.token, before.lease)
