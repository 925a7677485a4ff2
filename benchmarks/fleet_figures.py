"""What a fleet's run shows, as numbers: how Macs and trainer spent a window, what control cost, how well it was foretold.

Arithmetic over snapshots, step manifests and logs; taking those is `fleet.py`'s and `fleet_measure.py`'s.
"""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.fleet_measure import Growth, Snapshot, admission, growth, run_state_bytes
from benchmarks.fleet_plant import RUN
from cli.report.record import StepRow
from stoa.bucket import keys
from stoa.contracts import names


def away_share(log: Path, start: float, end: float, num_macs: int) -> float:
    """Share of a window that the swarm's Macs were asleep or had left, by its log."""
    away = 0.0
    for line in log.read_text("utf-8").splitlines():
        if '"mac_away"' in line:
            told = json.loads(line)
            away += max(0.0, min(end, told["at"] + told["seconds"]) - max(start, told["at"]))
    return away / ((end - start) * num_macs)


def shares(before: Snapshot, after: Snapshot) -> dict[str, Any]:
    """How the Macs' time went between two snapshots, by what their sessions counted."""
    idle = busy = 0.0
    waits: Counter[str] = Counter()
    sweeps = groups = up = down = 0
    for host, new in after.sessions.items():
        old = before.sessions.get(host)
        if old is None:
            continue
        idle += new.idle_seconds - old.idle_seconds
        busy += sum(getattr(new, name) - getattr(old, name) for name in ("decode_seconds", "pull_seconds", "apply_seconds"))
        sweeps += new.num_sweeps - old.num_sweeps
        groups += new.num_groups - old.num_groups
        up += new.bytes_up - old.bytes_up
        down += new.bytes_down - old.bytes_down
        waits.update({name: seconds - old.waits.get(name, 0.0) for name, seconds in new.waits.items()})
    total, hourly = max(1e-9, idle + busy), 3600.0 / (after.at - before.at)
    asking = sum(seconds for name, seconds in waits.items() if name not in ("version", "run"))
    return {
        "sweeps": sweeps,
        "groups": groups,
        "seconds": total,
        "mac_idle_share": round(idle / total, 4),
        "grant_wait_share": round(asking / total, 4),
        "waits": {name: round(seconds / total, 4) for name, seconds in sorted(waits.items())},
        "bytes_up_per_hour": round(up * hourly),
        "bytes_down_per_hour": round(down * hourly),
    }


def trained(steps: Sequence[StepRow], seconds: float) -> dict[str, Any]:
    """What the trainer did with a window."""
    waits, busy = sum(row.wait_seconds for row in steps), sum(row.train_seconds for row in steps)
    ages: Counter[int] = Counter()
    dropped: Counter[str] = Counter()
    refused: Counter[str] = Counter()
    for row in steps:
        ages.update(row.version - keys.parse_group(key).version for key in row.consumed)
        dropped.update(row.dropped.values())
        refused.update(reason for _, _, reason in row.refused)
    num = ages.total()
    came = num + dropped.total() + refused.total()
    return {
        "steps": len(steps),
        "step_seconds": round(busy / max(1, len(steps)), 3),
        "steps_per_hour": round(len(steps) * 3600 / seconds, 1),
        "groups_trained_per_hour": round(num * 3600 / seconds, 1),
        "trainer_idle_share": round(waits / max(1e-9, waits + busy), 4),
        "staleness": {str(lag): round(count / max(1, num), 4) for lag, count in sorted(ages.items())},
        "staleness_mean": round(sum(lag * count for lag, count in ages.items()) / max(1, num), 3),
        "discarded_fraction": round((dropped["stale"] + refused.total()) / max(1, came), 4),
        "dropped": dict(dropped),
        "refused": dict(refused),
    }


def control_cost(before: Snapshot, after: Snapshot, sweeps: int, hosts: Sequence[str]) -> dict[str, Any]:
    """Events, bytes and processor time."""
    seconds = after.at - before.at
    own = [names.session_workflow_id(RUN, host) for host in hosts]
    sessions, run = growth(before, after, own), growth(before, after, [names.run_workflow_id(RUN)])
    counted = [host for host, one in zip(hosts, own, strict=True) if one in sessions.hosts]
    of_counted = sum(after.sessions[host].num_sweeps - before.sessions[host].num_sweeps for host in counted if host in before.sessions)
    cpu = {name: round((after.cpu[name] - before.cpu.get(name, 0.0)) / max(1, sweeps), 5) for name in after.cpu}
    return {
        "events_per_sweep": round(sessions.events / max(1, of_counted), 2),
        "history_bytes_per_sweep": round(sessions.size / max(1, of_counted), 1),
        "history_per_hour": _history_per_hour(sessions, run, seconds),
        "cpu_seconds_per_sweep": round(cpu["temporal"] + cpu["control"], 5),
        "cpu_seconds_per_sweep_by_process": cpu,
        "sessions_continued_as_new": sessions.num_continued,
    }


def _history_per_hour(sessions: Growth, run: Growth, seconds: float) -> dict[str, float]:
    hourly = 3600.0 / seconds
    per_session = sessions.events / max(1, sessions.num_workflows)
    return {
        "run_events": round(run.events * hourly, 1),
        "run_bytes": round(run.size * hourly),
        "session_events": round(per_session * hourly, 1),
        "session_bytes": round(sessions.size / max(1, sessions.num_workflows) * hourly),
    }


def extrapolated(num: int, cost: dict[str, Any]) -> dict[str, Any]:
    """A fleet of `num` Macs with sweeps of 180 s, by multiplying what was measured: no such fleet was run."""
    sweeps = num * 20
    return {
        "extrapolated": True,
        "macs": num,
        "sweeps_per_hour": sweeps,
        "session_events_per_hour": round(sweeps * cost["events_per_sweep"]),
        "session_history_mb_per_hour": round(sweeps * cost["history_bytes_per_sweep"] / 1e6, 1),
        "control_cores": round(sweeps * cost["cpu_seconds_per_sweep"] / 3600, 2),
        "run_state_bytes": run_state_bytes(min(num, 2000)),
        "admission": {name: round(seconds, 7) for name, seconds in asdict(admission(num)).items()},
    }


def prediction_errors(
    steady: dict[str, Any], macs: dict[str, Any], hungry: dict[str, Any], predicted: list[dict[str, Any]]
) -> dict[str, float]:
    """Predicted minus measured; of rates, as a share of the measured."""
    balanced = predicted[0]
    return {
        "trainer_idle_share_balanced": round(balanced["trainer_idle_share"] - steady["trainer_idle_share"], 4),
        "trainer_idle_share_hungry": round(predicted[1]["trainer_idle_share"] - hungry["trainer_idle_share"], 4),
        "grant_wait_share": round(balanced["grant_wait_share"] - macs["grant_wait_share"], 4),
        "staleness_mean": round(balanced["staleness_mean"] - steady["staleness_mean"], 3),
        "discarded_fraction": round(balanced["discarded_fraction"] - steady["discarded_fraction"], 4),
        "groups_trained_per_hour": round(balanced["groups_trained_per_hour"] / max(1.0, steady["groups_trained_per_hour"]) - 1, 4),
        "bytes_up_per_hour": round(balanced["bytes_up_per_hour"] / max(1.0, macs["bytes_up_per_hour"]) - 1, 4),
        "bytes_down_per_hour": round(balanced["bytes_down_per_hour"] / max(1.0, macs["bytes_down_per_hour"]) - 1, 4),
    }
