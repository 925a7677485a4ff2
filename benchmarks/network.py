"""The same run on loopback and over home internet lines: what the line costs, and what it would cost without deltas.

Three runs of four pretended Macs on real servers (see `fleet_plant.py`): lines without limits; lines of 100 / 20 Mbit/s and
150 ms that stall and drop; the same lines with whole weights pulled at every version, as systems without deltas do. The Macs
are the bottleneck: the trainer takes a quarter more than they bring, so that what a line costs a Mac is not hidden in its
wait for a grant. Time is compressed, sweeps last 20 s in place of 180, and bandwidth is scaled so that the small weights
take the share of that time which 8.82 GB take of the real one; the 150 ms are not compressed, nine times worse than real.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.fleet_plant import RUN, Plant, scratch
from benchmarks.fleet_play import Play, make_model_folder
from benchmarks.network_link import Line, Quality
from cli.report.collect import Collector
from stoa.bucket import keys
from stoa.contracts.errors import StoaError
from stoa.telemetry import log as telemetry
from stoa.weights.layout import layout_of

NUM_MACS: Final = 4
SWEEP_SECONDS, REAL_SWEEP_SECONDS = 20.0, 180.0
GROUPS, GROUP_SIZE, GROUPS_PER_STEP, STEPS_PER_VERSION = 4, 4, 4, 4
REAL_FULL_BYTES, REAL_DOWN, REAL_UP = 8.82e9, 100e6 / 8, 20e6 / 8
ROUND_TRIP_SECONDS: Final = 0.15
APPETITE: Final = 1.25
"""What the trainer takes, over what the Macs bring."""
FLAT: Final = 2 * 0.5**GROUP_SIZE
WIDTH, LAYERS = 512, 8
START_SECONDS: Final = 240.0


@dataclass(frozen=True, slots=True)
class Found:
    """One run's window. Bytes are of one Mac in an hour of it."""

    groups_per_hour: float
    steps: int
    trainer_idle_share: float
    staleness_mean: float
    bytes_up: int
    bytes_down: int
    pull_seconds_mean: float
    pull_latency_seconds_median: float
    mac_idle_seconds_mean: float
    drops: int
    stalls: int
    versions: int


def home_line(full_bytes: int, seed: int) -> Quality:
    """100 / 20 Mbit/s for weights of this size in compressed time; a stall of 2 s a minute, a drop of everything each two."""
    compression = REAL_SWEEP_SECONDS / SWEEP_SECONDS
    scale = full_bytes / REAL_FULL_BYTES * compression
    return Quality(REAL_DOWN * scale, REAL_UP * scale, ROUND_TRIP_SECONDS, 60.0, 2.0, 120.0, seed)


def full_bytes() -> int:
    """Size of the weights of the benchmark's model."""
    with tempfile.TemporaryDirectory() as folder:
        model = make_model_folder(Path(folder) / "model", width=WIDTH, layers=LAYERS)
        return layout_of(json.loads((model / "config.json").read_text("utf-8")), "float32").num_bytes


def play(qualities: Sequence[Quality], *, full_sync: bool, warm_seconds: float, seconds: float, keep: Path | None) -> Found:
    """One run; the window begins `warm_seconds` after the first step."""
    tables: dict[str, dict[str, Any]] = {
        "rollout": {"groups": GROUPS, "group_size": GROUP_SIZE},
        "learning": {"groups_per_step": GROUPS_PER_STEP, "steps_per_version": STEPS_PER_VERSION, "starved_seconds": 300.0},
        "publish": {"anchor_every_versions": 1 if full_sync else 20, "checkpoint_every_versions": 1000},
        "timeouts": {"heartbeat_seconds": 10.0, "head_poll_seconds": 1.0, "sweep_seconds": 600.0},
    }
    with scratch(keep) as folder, Plant(folder, tables, width=WIDTH, layers=LAYERS) as plant:
        rate = NUM_MACS * GROUPS / SWEEP_SECONDS * (1 - FLAT)
        plant.set_pace(GROUPS_PER_STEP / (rate * APPETITE))
        plant.start_trainer("trainer")
        lines = [plant.lines.lay(quality) for quality in qualities]
        for number, line in enumerate(lines):
            plant.start_mac(f"mac-{number + 1}", Play(SWEEP_SECONDS, jitter=0.05, full_sync=full_sync), line=line)
        _await_step(plant)
        time.sleep(warm_seconds)
        began, carried = time.time(), [asdict(line.carried) for line in lines]
        time.sleep(seconds)
        return _read(plant, lines, carried, began, time.time())


def _await_step(plant: Plant) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        try:
            if plant.control.status(RUN).step >= 1:
                return
        except StoaError:
            pass
        time.sleep(0.5)
    raise TimeoutError(f"no step within {START_SECONDS:.0f} s; logs are in {plant.folder}")


def _read(plant: Plant, lines: Sequence[Line], carried: Sequence[dict[str, int]], began: float, ended: float) -> Found:
    record = Collector(plant.launched.document, plant.store, None).collect()
    steps = [row for row in record.steps if began <= row.started_at < ended]
    waits, busy = sum(row.wait_seconds for row in steps), sum(row.train_seconds for row in steps)
    ages = [row.version - keys.parse_group(key).version for row in steps for key in row.consumed]
    hourly = 3600.0 / (ended - began)
    diaries = [[line for line in one if began <= line["ended_at"] < ended] for one in _diaries(plant)]
    sweeps = [line for one in diaries for line in one]
    now = [asdict(line.carried) for line in lines]

    def grown(name: str) -> int:
        return sum(new[name] - old[name] for new, old in zip(now, carried, strict=True))

    latencies = [line["pull_latency_seconds"] for line in sweeps if line["pull_latency_seconds"] > 0]
    return Found(
        round(sum(map(groups_per_hour, diaries)), 1),
        len(steps),
        round(waits / max(1e-9, waits + busy), 4),
        round(statistics.fmean(ages), 3) if ages else -1.0,
        round(grown("bytes_up") / len(lines) * hourly),
        round(grown("bytes_down") / len(lines) * hourly),
        round(statistics.fmean(line["pull_seconds"] for line in sweeps), 3) if sweeps else -1.0,
        round(statistics.median(latencies), 3) if latencies else -1.0,
        round(statistics.fmean(line["idle_seconds"] for line in sweeps), 3) if sweeps else -1.0,
        grown("num_drops"),
        grown("num_stalls"),
        len({row.version for row in steps}),
    )


def groups_per_hour(sweeps: Sequence[dict[str, Any]]) -> float:
    """Of one Mac: groups of all its sweeps but the first, over the time between the ends of first and last."""
    if len(sweeps) < 2:
        return 0.0
    first, *rest = sorted(sweeps, key=lambda line: line["ended_at"])
    return 3600.0 * sum(line["groups"] for line in rest) / (rest[-1]["ended_at"] - first["ended_at"])


def _diaries(plant: Plant) -> list[list[dict[str, Any]]]:
    paths = sorted(plant.folder.glob(f"state/*/runs/{RUN}/sweeps.jsonl"))
    return [[json.loads(line) for line in path.read_text("ascii").splitlines()] for path in paths]


def measure(minutes: float, seed: int, keep: Path | None) -> dict[str, Any]:
    """All three runs, one after the other."""
    size = full_bytes()
    homes = [home_line(size, seed * 100 + number) for number in range(NUM_MACS)]
    # A first join takes 8.82 GB / 100 Mbit/s = 706 s, here a ninth of that.
    cold_seconds = size / homes[0].down_rate
    runs = {
        "loopback": play([Quality()] * NUM_MACS, full_sync=False, warm_seconds=40.0, seconds=minutes * 60, keep=_under(keep, "loopback")),
        "line": play(homes, full_sync=False, warm_seconds=cold_seconds, seconds=minutes * 60, keep=_under(keep, "line")),
        "full_sync": play(homes, full_sync=True, warm_seconds=cold_seconds, seconds=minutes * 60, keep=_under(keep, "full-sync")),
    }
    loopback, line, whole = runs["loopback"], runs["line"], runs["full_sync"]
    return {
        "groups_per_hour_ratio": round(line.groups_per_hour / max(1.0, loopback.groups_per_hour), 4),
        "groups_per_hour_ratio_full_sync": round(whole.groups_per_hour / max(1.0, loopback.groups_per_hour), 4),
        "trainer_idle_share": line.trainer_idle_share,
        "trainer_idle_share_loopback": loopback.trainer_idle_share,
        "trainer_idle_share_full_sync": whole.trainer_idle_share,
        "staleness_mean": line.staleness_mean,
        "bytes_up": line.bytes_up,
        "bytes_down": line.bytes_down,
        "bytes_down_full_sync": whole.bytes_down,
        "runs": {name: asdict(found) for name, found in runs.items()},
        "line": {**asdict(homes[0]), "stands_for": "100 / 20 Mbit/s, 150 ms", "cold_join_seconds": round(cold_seconds, 1)},
        "weights_bytes": size,
        "time_compressed": REAL_SWEEP_SECONDS / SWEEP_SECONDS,
        "trainer_appetite": APPETITE,
        "macs": NUM_MACS,
        "minutes": minutes,
        "seed": seed,
        "load": os.getloadavg(),
    }


def _under(keep: Path | None, name: str) -> Path | None:
    return keep / name if keep else None


def main() -> None:
    """Print the numbers: JSON to standard output, or a few lines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--minutes", type=float, default=3.0, help="of each run's window")
    parser.add_argument("--seed", type=int, default=0, help="of stalls and drops")
    parser.add_argument("--keep", type=Path, help="folder for logs, servers and buckets; it must not be there yet")
    asked = parser.parse_args()
    telemetry.configure(worker="network")
    found = measure(asked.minutes, asked.seed, asked.keep)
    if asked.json:
        print(json.dumps(found))
        return
    for name, value in found.items():
        print(f"{name:40} {value}", file=sys.stdout)


if __name__ == "__main__":
    main()
