"""A real run while its parts are killed, frozen, cut off and lied to; then the audit: nothing lost, nothing twice.

Real: Temporal's dev server with a database file, the S3 server, the workers' own programs as processes, workflows,
leases, grants, groups, admission, steps, deltas, checkpoints, evaluations. Pretended: decoding and the optimizer's
arithmetic, which pass the time instead (`fleet_mac.py`, `fleet_policy.py`). Every worker has a line of its own that can
be cut; a proxy before the bucket answers with 500 and 429. Faults strike as drawn from the seed, several at a time.

The run is asked for a number of steps and must do exactly these. Recovery is measured from the end of a fault (started
again, resumed, mended) to the next step, and for a Mac to its next group in the bucket.
"""

import argparse
import json
import statistics
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from benchmarks.chaos_faults import KINDS, Fault, Strike, dead, draw_faults
from benchmarks.chaos_watch import Watch
from benchmarks.fleet_plant import RUN, Plant, scratch
from benchmarks.fleet_play import Play
from cli.audit import Arrived, audit, uploads, zombie_writes
from cli.processes import Child
from cli.report.collect import Collector
from cli.temporal import Control
from stoa.bucket import keys
from stoa.bucket.head import read_head
from stoa.bucket.steps import read_drop_notes
from stoa.contracts.errors import StoaError
from stoa.telemetry import log as telemetry
from stoa.weights.sync import Puller

NUM_MACS = 4
SWEEP_SECONDS = 18.0
SECONDS_A_STEP = 6.0
"""Wall clock for which a run is asked to do one step: outages included."""
SECONDS_A_FAULT = 12.0
AT_ONCE = 3
START_SECONDS, STALL_SECONDS = 120.0, 180.0
RECOVERY_SECONDS = 120.0
"""A recovery that takes longer counts as this much."""


@dataclass
class Tally:
    """What the faults did."""

    struck: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    recovery: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    outage: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    num_takeovers_while_frozen: int = 0
    unplanned_exits: dict[str, int] = field(default_factory=lambda: defaultdict(int))


class Chaos:
    """One run and its faults."""

    def __init__(self, plant: Plant, faults: list[Fault], seconds: float, steps_asked: int) -> None:
        self._plant, self._faults, self._seconds, self._asked = plant, faults, seconds, steps_asked
        self.tally = Tally()
        self.parts: dict[str, Child] = {}
        self._ended = threading.Event()

    def run(self, watch: Watch) -> None:
        """Start, break, let it end."""
        plant = self._plant
        lines = {name: plant.lines.lay() for name in ("trainer-1", "trainer-2", *(f"mac-{number + 1}" for number in range(NUM_MACS)))}
        for name, line in lines.items():
            if name.startswith("trainer"):
                self.parts[name] = plant.start_trainer(name, line=line, control=name == "trainer-1")
            else:
                self.parts[name] = plant.start_mac(name, Play(SWEEP_SECONDS, jitter=0.3), line=line)
        self.parts |= {"temporal": plant.services.temporal, "s3": plant.services.weed}
        threading.Thread(target=self._listen, name="sessions", daemon=True).start()
        self._until(lambda: watch.num_steps >= 2, START_SECONDS, "the run did not begin")
        strike = Strike(plant, self.parts, lines, lambda: _owner_pid(watch))
        self._strike_all(strike, watch)
        plant.set_pace(0.2)
        self._see_it_end(watch)
        self._ended.set()

    def _strike_all(self, strike: Strike, watch: Watch) -> None:
        began = time.monotonic()
        going: list[threading.Thread] = []
        waiting = list(self._faults)
        while (now := time.monotonic() - began) < self._seconds or any(thread.is_alive() for thread in going):
            self._keep_pace(watch, self._seconds - now)
            going = [thread for thread in going if thread.is_alive()]
            if waiting and waiting[0].at <= now and len(going) < AT_ONCE:
                fault = waiting[0]
                name = strike.pick(fault)
                if name is not None:
                    waiting.pop(0)
                    thread = threading.Thread(target=self._one, args=(strike, fault, name, watch), name=fault.kind, daemon=True)
                    thread.start()
                    going.append(thread)
            self._revive(strike)
            time.sleep(0.2)

    def _one(self, strike: Strike, fault: Fault, name: str, watch: Watch) -> None:
        epoch, began = watch.head.epoch if watch.head else 0, time.monotonic()
        try:
            strike.strike(fault, name)
        finally:
            strike.release(name)
        over = time.monotonic()
        self._write_down(fault, name, over - began)
        self.tally.struck[fault.kind] += 1
        self.tally.outage[fault.kind].append(over - began)
        if fault.kind == "trainer_stop" and watch.head is not None and watch.head.epoch != epoch:
            self.tally.num_takeovers_while_frozen += 1
        threading.Thread(target=self._time_recovery, args=(fault, name, over, watch), daemon=True).start()

    def _listen(self) -> None:
        """Keep what run and sessions say of themselves, for whoever reads the logs."""
        hosts = tuple(name for name in self.parts if name.startswith("mac"))
        control = Control(self._plant.config.temporal)
        while not self._ended.wait(3.0):
            said: dict[str, object] = {"at": time.strftime("%H:%M:%S")}
            try:
                said["run"] = control.status(RUN).waiting_for
                said |= {one.host: f"{one.state} sweep {one.sweep}: {one.reason}" for one in control.sessions(RUN, hosts)}
            except StoaError as error:
                said["error"] = error.message[:100]
            with (self._plant.folder / "logs" / "sessions.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps(said) + "\n")

    def _write_down(self, fault: Fault, name: str, seconds: float) -> None:
        line = json.dumps({"over_at": time.strftime("%H:%M:%S"), "kind": fault.kind, "part": name, "seconds": round(seconds, 1)})
        with (self._plant.folder / "logs" / "faults.jsonl").open("a", encoding="ascii") as file:
            file.write(line + "\n")

    def _time_recovery(self, fault: Fault, name: str, over: float, watch: Watch) -> None:
        seen: float | None = None
        while seen is None and time.monotonic() < over + RECOVERY_SECONDS and not self._ended.is_set():
            time.sleep(0.1)
            seen = watch.group_after(name, over) if fault.part == "mac" else watch.step_after(over)
        if seen is not None or not self._ended.is_set():
            self.tally.recovery[fault.kind].append((seen or over + RECOVERY_SECONDS) - over)

    def _keep_pace(self, watch: Watch, seconds_left: float) -> None:
        """Steps take so long that those asked for last until the faults are over."""
        steps_left = max(1, self._asked - (watch.head.step if watch.head else 0))
        self._plant.set_pace(min(10.0, max(0.2, max(0.0, seconds_left) / steps_left)))

    def _revive(self, strike: Strike) -> None:
        for name in dead(self.parts):
            if strike.claim(name):
                if self.parts[name].exit_code is not None:
                    self.tally.unplanned_exits[name] += 1
                    self.parts[name] = self._plant.again(self.parts[name])
                strike.release(name)

    def _is_running(self) -> bool:
        try:
            return self._plant.control.is_running(RUN)
        except StoaError:
            return True

    def _see_it_end(self, watch: Watch) -> None:
        """Wait for the steps still asked for, however many: a run that is slow is not stuck, one without a step is."""
        while self._is_running():
            seen = watch.num_steps
            self._until(lambda seen=seen: watch.num_steps > seen or not self._is_running(), STALL_SECONDS, "neither a step nor the end")

    def _until(self, done: Callable[[], bool], seconds: float, what: str) -> None:
        deadline = time.monotonic() + seconds
        while not done():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{what} within {seconds:.0f} s; logs and bucket are in {self._plant.folder}")
            time.sleep(0.2)


def _owner_pid(watch: Watch) -> int | None:
    """The process that holds the run: an owner is called HOST-PID."""
    owner = watch.head.owner if watch.head else ""
    pid = owner.rpartition("-")[2]
    return int(pid) if pid.isdecimal() else None


def examine(plant: Plant, watch: Watch) -> dict[str, object]:
    """The audit of a run that has ended, from its bucket, what was seen of HEAD, and what the Macs wrote down."""
    document, store = plant.launched.document, plant.store
    record = Collector(document, store, None).collect()
    record = replace(record, heads_seen=tuple(sorted(watch.manifests)))
    found = audit(record)
    listed = [Arrived(one.key, one.modified_at) for one in store.list(keys.groups_prefix(RUN))]
    acknowledged = plant.acknowledged()
    vanished = sorted(set(acknowledged) - {one.key for one in listed})
    noted = [key for group_keys in read_drop_notes(store, RUN).values() for key in group_keys]
    fate = uploads(record, listed, max_staleness_hard=plant.config.learning.max_staleness_hard, noted=noted)
    zombies = zombie_writes(record, watch.heads)
    head, _ = read_head(store, RUN, document.public_key)
    weights = Puller(store, document, plant.folder / "audit").join(head)
    refusals = Counter(reason for row in record.steps for _, _, reason in row.refused)
    return {
        "lineage_contiguous": found.lineage_contiguous,
        "groups_trained_twice": found.groups_trained_twice,
        "uploaded_groups_lost": len(fate.lost) + len(fate.refused) + len(vanished),
        "chain_forks": found.versions_published_twice + (not found.chain_whole),
        "zombie_writes_accepted": len(zombies),
        "clean": found.clean and not (fate.lost or fate.refused or vanished or zombies),
        "faults_found": [*found.faults, *zombies, *fate.lost, *fate.refused, *vanished],
        "final_weights_verified": bool(weights.verified_id),
        "steps_done": record.step,
        "versions": record.version,
        "leases": len({head.epoch for head in watch.heads}),
        "steps_lost_and_done_again": watch.num_steps - record.step,
        "groups_uploaded": len(listed),
        "groups_trained": sum(len(row.consumed) for row in record.steps),
        "groups_dropped": dict(Counter(reason for row in record.steps for reason in row.dropped.values())),
        "groups_refused": dict(refusals),
        "groups_waiting_at_the_end": len(fate.waiting),
        "groups_too_late": len(fate.too_late),
    }


def measure(minutes: float, seed: int, keep: Path | None) -> dict[str, object]:
    """Run, break, audit."""
    seconds = minutes * 60.0
    asked = max(8, round(seconds / SECONDS_A_STEP))
    faults = draw_faults(seed, max(len(KINDS) if minutes >= 5 else 1, round(seconds / SECONDS_A_FAULT)), seconds)
    started = time.monotonic()
    tables = {"stop": {"max_steps": asked}, "evaluation": {"every_versions": 12}}
    with scratch(keep) as folder, Plant(folder, tables, faults=True) as plant:
        chaos = Chaos(plant, faults, seconds, asked)
        with Watch(plant) as watch:
            chaos.run(watch)
        result = plant.control.result(RUN)
        found = examine(plant, watch)
    tally = chaos.tally
    return {
        **found,
        "steps_asked": asked,
        "num_faults": sum(tally.struck.values()),
        "recovery_seconds": _spreads(tally.recovery),
        "outage_seconds": _spreads(tally.outage),
        "takeovers_while_frozen": tally.num_takeovers_while_frozen,
        "unplanned_exits": dict(tally.unplanned_exits),
        "evaluations": {one.evaluation: one.error or "scored" for one in result.evaluations},
        "end_reason": result.end_reason,
        "seed": seed,
        "minutes": minutes,
        "macs": NUM_MACS,
        "seconds": round(time.monotonic() - started, 1),
    }


def _spreads(times: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    return {
        kind: {"median": round(statistics.median(values), 2), "max": round(max(values), 2), "num": len(values)}
        for kind, values in sorted(times.items())
        if values
    }


def main() -> None:
    """Print the numbers: JSON to standard output, or a few lines. Exits 1 if the audit found anything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--minutes", type=float, default=3.0, help="how long faults strike")
    parser.add_argument("--seed", type=int, default=0, help="of the faults and their moments")
    parser.add_argument("--keep", type=Path, help="folder for logs, servers and bucket; it must not be there yet")
    asked = parser.parse_args()
    telemetry.configure(worker="chaos")
    found = measure(asked.minutes, asked.seed, asked.keep)
    if asked.json:
        print(json.dumps(found))
    else:
        for name, value in found.items():
            print(f"{name:32} {value}")
    sys.exit(0 if found["clean"] and found["steps_done"] == found["steps_asked"] else 1)


if __name__ == "__main__":
    main()
