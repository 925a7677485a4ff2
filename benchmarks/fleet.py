"""A fleet of pretended Macs on the real control plane: what it costs, what waits for what, and how well it was predicted.

Real: Temporal's dev server with a database file, the S3 server, workflows, grants, groups, admission, steps, deltas; the
trainer's own loop with a step that passes the time. Macs are drawn from a stated distribution: sweeps of 5 to 20 s in place
of minutes, lines, sleeps, leaves and returns; most live in one process, a few in their own, which are killed to see how soon
that is noticed. First a trainer that waits for the Macs shows what they can bring; then two windows are measured: one with
a trainer that takes just that, one with a trainer that takes 80 % of it. The same fleet is simulated (`cli/plan/fleet.py`),
and predicted and measured stand side by side.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from benchmarks.fleet_figures import away_share, control_cost, extrapolated, prediction_errors, shares, trained
from benchmarks.fleet_forecast import Cast, Facts, forecast, macs_to_saturate
from benchmarks.fleet_measure import Observer, Snapshot, run_state_bytes
from benchmarks.fleet_plant import RUN, Plant, scratch
from benchmarks.fleet_play import Play
from cli.plan.fleet_model import Absences, Mac, Rules
from cli.plan.fleet_spec import rules_of
from cli.processes import Child
from cli.report.collect import Collector
from cli.report.record import RunRecord, StepRow
from stoa.bucket import keys
from stoa.bucket.steps import StepManifest, read_step
from stoa.contracts.errors import StoaError
from stoa.telemetry import log as telemetry

EAGER, BALANCED, HUNGRY = 1.5, 1.0, 0.80
"""Share of what the fleet can bring that the trainer could take: while that is measured, and in the two windows."""
NUM_VICTIMS: Final = 2
"""Macs in processes of their own."""
KILL_EVERY_SECONDS: Final = 45.0
PACE_SECONDS: Final = 15.0
"""Between two looks at whether the trainer's steps come at the pace that was asked for."""
STEPS_PER_VERSION, CHECKPOINT_EVERY = 4, 4
SHOWN: Final = ("events_per_sweep", "history_per_hour", "cpu_seconds_per_sweep", "cpu_seconds_per_sweep_by_process")
START_SECONDS: Final = 180.0
JOIN_SECONDS: Final = 0.5
"""The first two steps come within these, for each Mac, and four sweeps."""
P_RIGHT: Final = 0.5
WAITS: Final = ("room", "turn", "version", "run")
"""What a Mac waits for that is not the control plane's own time."""


@dataclass(frozen=True, slots=True)
class Absent:
    """Rates an hour and mean seconds of a Mac's absences, for sweeps of 12 s."""

    sleeps_per_hour: float = 12.0
    sleep_seconds: float = 15.0
    leaves_per_hour: float = 6.0
    leave_seconds: float = 15.0

    def stretched(self, times: float) -> "Absent":
        """So many times rarer and longer, as the sweeps are."""
        return Absent(self.sleeps_per_hour / times, self.sleep_seconds * times, self.leaves_per_hour / times, self.leave_seconds * times)


@dataclass(frozen=True, slots=True)
class Options:
    """The size and pace of a run."""

    macs: int
    warm_minutes: float
    minutes: float
    hungry_minutes: float
    sweep_seconds: float
    groups: int
    heartbeat_seconds: float
    seed: int

    @property
    def group_size(self) -> int:
        """Episodes of a group."""
        return 4

    @property
    def groups_per_step(self) -> int:
        """So that the room of all versions is 1.14 times what the Macs play at once: 14 Macs, 8 groups, 32 a version."""
        return max(1, round(self.macs * self.groups * 128 / 112 / 4 / STEPS_PER_VERSION))

    @property
    def absent(self) -> Absent:
        """How Macs come and go."""
        return Absent().stretched(self.sweep_seconds / 12.0)

    @property
    def flat_fraction(self) -> float:
        """Share of groups whose episodes are all right or all wrong."""
        return 2 * P_RIGHT**self.group_size


def draw_members(options: Options) -> list[dict[str, Any]]:
    """The Macs: time of a sweep lognormal (sigma 0.35, cut at 5/12 and 20/12 of the middle), lines lognormal (sigma 0.5)."""
    members: list[dict[str, Any]] = []
    for index in range(options.macs):
        chance = random.Random(f"{options.seed} {index}")
        factor = min(20 / 12, max(5 / 12, chance.lognormvariate(0.0, 0.35)))
        line = chance.lognormvariate(0.0, 0.5)
        play = Play(options.sweep_seconds * factor, jitter=0.1, p_right=P_RIGHT)
        absent = asdict(options.absent) if index >= NUM_VICTIMS else {}
        rates = {"down_rate": 200e3 * line, "up_rate": 40e3 * line, "round_trip_seconds": 0.05}
        members.append({"host": f"mac-{index + 1:04d}", "play": asdict(play), **(rates if index >= NUM_VICTIMS else {}), **absent})
    return members


def mac_of(member: dict[str, Any]) -> Mac:
    """As the simulation wants it."""
    return Mac(
        member["play"]["sweep_seconds"], member.get("down_rate", 0.0), member.get("up_rate", 0.0), member.get("round_trip_seconds", 0.0)
    )


def cast_of(members: Sequence[dict[str, Any]], rules: Rules, absent: Absent) -> Cast:
    """The fleet as the simulation wants it: Macs in processes of their own never go, so the others' rates are spread over all."""
    share = 1.0 - NUM_VICTIMS / max(1, len(members))
    absences = Absences(
        absent.sleeps_per_hour * share, absent.sleep_seconds, 0.0, 1.0, absent.leaves_per_hour * share, absent.leave_seconds
    )
    return Cast(tuple(map(mac_of, members)), absences, rules)


class Run:
    """One fleet on one plant."""

    def __init__(self, plant: Plant, options: Options, observer: Observer) -> None:
        self._plant, self._options, self._observer = plant, options, observer
        self.members = draw_members(options)
        self.hosts = [member["host"] for member in self.members]
        self._processes: dict[str, Child] = {}
        self.facts = Facts(0.15, 0.3, 0.2)
        self.detection: list[float] = []
        self.step_seconds = 1.0
        self._cycle_seconds = 1.0
        self._last_step = ""

    async def start(self) -> None:
        """Trainer, swarm, victims; returns after the first steps."""
        plant = self._plant
        self._processes = {"trainer": plant.start_trainer("trainer"), "temporal": plant.services.temporal, "s3": plant.services.weed}
        self.set_pace(EAGER)
        swarm = plant.folder / "swarm.json"
        swarm.write_text(json.dumps(self.members[NUM_VICTIMS:]), "utf-8")
        config = plant.folder / "swarm-config.json"
        config.write_text(plant.aimed(None).model_dump_json(), "utf-8")
        arguments = (str(swarm), str(config), "--state", str(plant.folder / "state"))
        self._processes["macs"] = plant.start("swarm", "benchmarks.fleet_swarm", *arguments)
        for member in self.members[:NUM_VICTIMS]:
            self._processes[member["host"]] = plant.start_mac(member["host"], Play(**member["play"]))
        longest = START_SECONDS + 4 * self._options.sweep_seconds + JOIN_SECONDS * self._options.macs
        deadline = time.monotonic() + longest
        while (await self._step()) < 2:
            if time.monotonic() > deadline:
                raise TimeoutError(f"no step within {longest:.0f} s; logs are in {plant.folder}")
            await asyncio.sleep(0.5)

    async def _step(self) -> int:
        try:
            return (await asyncio.to_thread(self._plant.control.status, RUN)).step
        except StoaError:
            return 0

    def set_pace(self, share: float, rate: float = 0.0) -> None:
        """Let the trainer take this share of `rate` usable groups a second, or of what the Macs should bring by their numbers."""
        self._cycle_seconds = self._options.groups_per_step / ((rate or self._usable_rate()) * share)
        self._set_step(self.facts.step_overhead_seconds + self.facts.hold_seconds / STEPS_PER_VERSION)

    def _set_step(self, overhead_seconds: float) -> None:
        """A step that with its share of everything between steps takes what was asked for."""
        self.step_seconds = max(0.05, self._cycle_seconds - overhead_seconds)
        self._plant.set_pace(self.step_seconds)

    async def keep_pace(self) -> None:
        """For ever: where the machine makes what is between the steps longer or shorter, the pretended step makes up for it."""
        while True:
            await asyncio.sleep(PACE_SECONDS)
            steps = await asyncio.to_thread(self._new_steps)
            gaps = [row.started_at - row.wait_seconds - last.started_at - last.train_seconds for last, row in pairwise(steps)]
            if len(gaps) >= 2 * STEPS_PER_VERSION:
                self._set_step(statistics.fmean(gaps))

    def _new_steps(self) -> list[StepManifest]:
        """Manifests of the steps since the last call."""
        store, found = self._plant.store, []
        for key, _ in keys.ours((one.key for one in store.list(f"{keys.root(RUN)}steps/", self._last_step)), keys.parse_step):
            found.append(read_step(store, RUN, key))
            self._last_step = key
        return found

    def _usable_rate(self) -> float:
        """What Macs can bring a second that are there, wait for nothing and are as slow as this machine makes them."""
        options, facts = self._options, self.facts
        how = options.absent
        absent = how.sleeps_per_hour * how.sleep_seconds + how.leaves_per_hour * how.leave_seconds
        rate = 0.0
        for index, member in enumerate(self.members):
            present = 1.0 if index < NUM_VICTIMS else 3600.0 / (3600.0 + absent)
            turn = facts.turn_seconds + 3 * member.get("round_trip_seconds", 0.0)
            rate += present * options.groups / (member["play"]["sweep_seconds"] * facts.stretch + turn)
        return rate * (1 - options.flat_fraction)

    async def snapshot(self) -> Snapshot:
        """Now. Of large fleets only some sessions are asked."""
        pids = {name: [child.identity.pid] for name, child in self._processes.items() if name not in self.hosts}
        pids["control"] = [one.pid for one in _children(self._processes["trainer"].identity.pid)]
        return await self._observer.snapshot(time.time(), self.hosts, pids)

    async def kill_victims(self, seconds: float) -> None:
        """For so long, kill a Mac in the middle of a sweep now and then, and start it again."""
        until, turn = time.monotonic() + seconds, 0
        while time.monotonic() + KILL_EVERY_SECONDS < until:
            host = self.hosts[turn % NUM_VICTIMS]
            turn += 1
            began = time.monotonic()
            while not await self._observer.is_sweeping(host) and time.monotonic() < began + 20:
                await asyncio.sleep(0.2)
            killed_at = time.time()
            os.kill(self._processes[host].identity.pid, signal.SIGKILL)
            lost_at = None
            while lost_at is None and time.time() < killed_at + 3 * self._options.heartbeat_seconds:
                await asyncio.sleep(0.5)
                lost_at = await self._observer.lost_at(host, killed_at)
            if lost_at is not None:
                self.detection.append(lost_at - killed_at)
            self._processes[host] = await asyncio.to_thread(self._plant.again, self._processes[host])
            await asyncio.sleep(max(0.0, began + KILL_EVERY_SECONDS - time.monotonic()))
        await asyncio.sleep(max(0.0, until - time.monotonic()))


def _children(pid: int) -> Sequence[Any]:
    import psutil

    return psutil.Process(pid).children()


def record_of(plant: Plant) -> RunRecord:
    """The run's record up to now."""
    return Collector(plant.launched.document, plant.store, None).collect()


def window_steps(record: RunRecord, start: float, end: float) -> list[StepRow]:
    """Steps that took their groups in a window."""
    return [row for row in record.steps if start <= row.started_at < end]


def facts_of(plant: Plant, members: Sequence[dict[str, Any]], before: Snapshot, after: Snapshot) -> Facts:
    """What the simulation must be told of these machines, measured in a window.

    Pauses of trainer and control plane, and how much longer than asked a sweep takes. A Mac's turn is its time between
    sweeps beside waits for room, for other Macs' turn and for a version.
    """
    record = record_of(plant)
    plain: list[float] = []
    publishing: list[float] = []
    for last, row in pairwise(window_steps(record, before.at, after.at)):
        gap = row.started_at - row.wait_seconds - last.started_at - last.train_seconds
        (plain if row.version == last.version else publishing).append(gap)
    overhead = statistics.fmean(plain) if plain else 0.15
    hold = statistics.fmean(publishing) - overhead if publishing else 0.3
    macs = shares(before, after)
    turn = macs["mac_idle_share"] - sum(macs["waits"].get(name, 0.0) for name in WAITS)
    return Facts(
        overhead,
        max(0.0, hold),
        max(0.0, turn) * macs["seconds"] / max(1, macs["sweeps"]),
        stretch(plant, members, before, after),
        intake_seconds=plant.config.learning.intake_poll_seconds / 2,
        full_bytes=_mean_bytes(plant, keys.anchors_prefix(RUN)) * 2.0,  # its index beside its one part
        delta_bytes=sum(_mean_bytes(plant, f"{keys.root(RUN)}{name}") for name in ("deltas/", "manifests/", "HEAD.json")),
        group_bytes=_mean_bytes(plant, keys.groups_prefix(RUN)),
    )


def _mean_bytes(plant: Plant, prefix: str) -> float:
    """Of the objects under a prefix."""
    sizes = [found.num_bytes for found in plant.store.list(prefix)]
    return statistics.fmean(sizes) if sizes else 0.0


def stretch(plant: Plant, members: Sequence[dict[str, Any]], before: Snapshot, after: Snapshot) -> float:
    """Median time of a window's whole sweeps over what was asked for: above 1 where the machine is short of time."""
    ratios: list[float] = []
    for member in members:
        path = plant.folder / "state" / member["host"] / "runs" / RUN / "sweeps.jsonl"
        lines = [json.loads(line) for line in path.read_text("ascii").splitlines()] if path.is_file() else []
        whole = [line for line in lines if before.at <= line["ended_at"] < after.at and line["groups"] == plant.config.rollout.usual_groups]
        ratios += [line["decode_seconds"] / member["play"]["sweep_seconds"] for line in whole]
    return statistics.median(ratios) if ratios else 1.0


async def measure(options: Options, plant: Plant) -> dict[str, Any]:
    """See what the fleet brings, measure both windows, stop, and compare with the simulation."""
    observer = await Observer.at(plant.services.temporal_address)
    run = Run(plant, options, observer)
    await run.start()
    capacity = await _capacity(run, options, plant)
    run.set_pace(BALANCED, capacity)
    keeping = asyncio.ensure_future(run.keep_pace())
    await asyncio.sleep(options.warm_minutes * 15)
    before = await run.snapshot()
    await run.kill_victims(options.minutes * 60)
    after = await run.snapshot()
    seconds, load = after.at - before.at, os.getloadavg()
    steady = trained(window_steps(record_of(plant), before.at, after.at), seconds)
    facts = facts_of(plant, run.members, before, after)
    run.set_pace(HUNGRY, max(capacity, steady["groups_trained_per_hour"] / 3600.0))
    await asyncio.sleep(options.hungry_minutes * 30)
    hungry_from = time.time()
    await asyncio.sleep(options.hungry_minutes * 60)
    hungry_to = time.time()
    keeping.cancel()
    largest, where = await observer.largest_message(run.hosts[:20])
    macs = shares(before, after)
    hungry = trained(window_steps(record_of(plant), hungry_from, hungry_to), max(1.0, hungry_to - hungry_from))
    cost = control_cost(before, after, macs["sweeps"], run.hosts)
    rules = rules_of(plant.config, options.flat_fraction)
    cast = cast_of(run.members, rules, options.absent)
    paces = [replace(facts, step_seconds=one["step_seconds"]) for one in (steady, hungry)]
    predicted = [forecast(cast, pace) for pace in paces]
    return {
        "macs": options.macs,
        **{name: cost[name] for name in SHOWN},
        "detection_seconds_max": round(max(run.detection, default=-1.0), 2),
        "detection_seconds": [round(one, 2) for one in run.detection],
        "heartbeat_timeout_seconds": options.heartbeat_seconds,
        "discarded_fraction": steady["discarded_fraction"],
        "trainer_idle_share": hungry["trainer_idle_share"],
        "trainer_idle_share_balanced": steady["trainer_idle_share"],
        "macs_to_saturate": macs_to_saturate(cast, paces[0]),
        "grant_wait_share": macs["grant_wait_share"],
        "mac_idle_share": macs["mac_idle_share"],
        "mac_away_share": round(away_share(plant.folder / "logs" / "swarm.log", before.at, after.at, options.macs), 4),
        "mac_waits": macs["waits"],
        "bytes_per_hour": {"up": macs["bytes_up_per_hour"], "down": macs["bytes_down_per_hour"]},
        "capacity_groups_per_hour": round(capacity * 3600.0, 1),
        "largest_message_bytes": largest,
        "largest_message": where,
        "run_state_bytes_1000_macs": run_state_bytes(1000),
        "run_state_bytes_1000_macs_longest_names": run_state_bytes(1000, host_characters=48, place_characters=40),
        "sweeps_per_hour": round(macs["sweeps"] * 3600 / seconds),
        "balanced": {"measured": steady, "predicted": predicted[0]},
        "hungry": {"measured": hungry, "predicted": predicted[1]},
        "prediction_error": prediction_errors(steady, macs, hungry, predicted),
        "facts_given_to_the_simulation": asdict(facts),
        "rules": asdict(rules),
        "extrapolated_1000": extrapolated(1000, cost),
        "extrapolated_10000": extrapolated(10_000, cost),
        "conditions": {**asdict(options), "absences": asdict(options.absent), "groups_per_step": options.groups_per_step, "load": load},
    }


async def _capacity(run: Run, options: Options, plant: Plant) -> float:
    """Usable groups a second that the fleet brings to a trainer that waits for them, after a quarter of the warm-up."""
    await asyncio.sleep(options.warm_minutes * 15)
    before = await run.snapshot()
    await asyncio.sleep(options.warm_minutes * 45)
    after = await run.snapshot()
    run.facts = facts_of(plant, run.members, before, after)
    seconds = after.at - before.at
    num = trained(window_steps(record_of(plant), before.at, after.at), seconds)["groups_trained_per_hour"]
    if not num:
        raise TimeoutError(f"no step in {seconds:.0f} s; logs are in {plant.folder}")
    return float(num) / 3600.0


def main() -> None:
    """Print the numbers: JSON to standard output, or a few lines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--macs", type=int, default=14)
    parser.add_argument("--warm-minutes", type=float, default=2.0)
    parser.add_argument("--minutes", type=float, default=5.0, help="of the balanced window")
    parser.add_argument("--hungry-minutes", type=float, default=2.0, help="of the window with a slower trainer, after half as much")
    parser.add_argument("--sweep-seconds", type=float, default=12.0, help="the middle of the Macs' sweeps")
    parser.add_argument("--groups", type=int, default=4, help="groups of a sweep")
    parser.add_argument("--heartbeat-seconds", type=float, default=6.0)
    parser.add_argument("--head-poll-seconds", type=float, default=2.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="folder for logs, servers and bucket; it must not be there yet")
    asked = parser.parse_args()
    telemetry.configure(worker="fleet")
    options = Options(
        asked.macs,
        asked.warm_minutes,
        asked.minutes,
        asked.hungry_minutes,
        asked.sweep_seconds,
        asked.groups,
        asked.heartbeat_seconds,
        asked.seed,
    )
    tables: dict[str, dict[str, Any]] = {
        "rollout": {"groups": options.groups, "group_size": options.group_size},
        "learning": {"groups_per_step": options.groups_per_step, "steps_per_version": STEPS_PER_VERSION, "starved_seconds": 120.0},
        "publish": {"checkpoint_every_versions": CHECKPOINT_EVERY, "anchor_every_versions": 20},
        "timeouts": {
            "heartbeat_seconds": options.heartbeat_seconds,
            "head_poll_seconds": asked.head_poll_seconds,
            "sweep_seconds": max(300.0, 4 * options.sweep_seconds),
        },
    }
    with scratch(asked.keep) as folder, Plant(folder, tables) as plant:
        found = asyncio.run(measure(options, plant))
    if asked.json:
        print(json.dumps(found))
        return
    for name, value in found.items():
        print(f"{name:40} {value}", file=sys.stdout)


if __name__ == "__main__":
    main()
