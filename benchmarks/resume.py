"""Kills a trainer at random points and compares what it made with one left alone: `python -m benchmarks.resume --json`.

Groups of real sweeps are recorded once and put into two runs of a real bucket. One trainer process works through the
first without a break. On the second, a trainer is killed with SIGKILL at points drawn at random (while it takes the run,
waits, steps, publishes or saves) and started again, until it has been killed often enough and may finish. Then the
lineage that HEAD names is searched for repeats and holes, and both runs' steps and final states are compared bit for bit.
"""

import argparse
import base64
import hashlib
import json
import os
import queue
import random
import re
import secrets
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from benchmarks.servers import bucket_store
from benchmarks.sweeps import HOST, POLICY, Player, demo_layout, first_state
from stoa.bucket import keys
from stoa.bucket.head import Head, read_head
from stoa.bucket.manifest import Signer
from stoa.bucket.run_document import claim_run, new_run, upload_model_files
from stoa.bucket.steps import StepManifest, lineage
from stoa.bucket.store import Store
from stoa.config.run import Bucket, Learning, Publish, RunConfig
from stoa.contracts.errors import ObjectMissingError
from stoa.contracts.messages import AcquireRequest, CheckpointRequest, PublishRequest, StepRequest
from stoa.learning.ledger import GrantRecord
from stoa.learning.replay import flatness
from stoa.rollouts.records import Group
from stoa.rollouts.shard import encode_group
from trainer_gpu.checkpoint import Identity, read_document
from trainer_gpu.engine import TrainerEngine
from trainer_gpu.grant_book import GrantBook
from trainer_gpu.policy import Policy
from trainer_gpu.publish import host_tensors
from trainer_gpu.run_handle import open_run, open_store

STRAIGHT, KILLED = "straight", "killed"
GROUPS_PER_STEP, STEPS_PER_VERSION = 4, 2
ANCHOR_EVERY_STEPS = 16
DEPENDS_ON_WHEN = (
    "staleness",
    "_lag_",
    "pull_latency",
    "publish_latency",
    "queue_seconds",
    "stale_group",
    "dropped",
    "zero_variance",
    "changed_",
    "versions_seen",
    "groups_accepted",
    "groups_waiting",
    "untold",
    "fleet_",
    "batch_occupancy",
    "prefix_hit",
    "peak_memory",
    "trainer_wait",
)
"""Metrics that may differ: a resume publishes one version more, and useless groups are counted as they come in."""
LIFE_SECONDS = 120.0
END = "end"


class Teller:
    """A `Progress` that prints what it is told, a line each."""

    cancelled = False
    stopping = False

    def report(self, detail: str, *, version: int = -1, key: str = "") -> None:
        """Tell the parent, at once."""
        print(detail, flush=True)


def train(run: str, endpoint: str, num_steps: int) -> None:
    """The trainer process: take the run and go on to step `num_steps`."""
    config = _config(run, Bucket(endpoint=endpoint, name="benchmark", head_interval_seconds=0.0))
    engine = TrainerEngine(open_run(config, open_store(config)))
    teller = Teller()
    teller.report("taking the run")
    acquired = engine.acquire(AcquireRequest(run, 1), 1, teller)
    token, step = acquired.token, acquired.step
    while step < num_steps:
        teller.report("stepping")
        result = engine.train_step(StepRequest(run, token, step + 1), teller)
        if result.status != "done":
            raise SystemExit(f"step {step + 1} is {result.status}: {result.reason}")
        step += 1
        teller.report(f"{step} done")
        if step % STEPS_PER_VERSION == 0:
            teller.report("publishing")
            engine.publish(PublishRequest(run, token, step, anchor=step % ANCHOR_EVERY_STEPS == 0, checkpoint=True), teller)
            teller.report("published")
    engine.checkpoint(CheckpointRequest(run, token, step), teller)
    engine.close()
    teller.report(END)


def _config(run: str, bucket: Bucket) -> RunConfig:
    """One version of groups for all steps: the bound on staleness is out of the way, everything else is the demo's."""
    learning = Learning(
        groups_per_step=GROUPS_PER_STEP,
        steps_per_version=STEPS_PER_VERSION,
        max_staleness=1000,
        max_staleness_hard=1000,
        starved_seconds=30.0,
        intake_poll_seconds=0.05,
        num_threads=1,
    )
    return RunConfig(run=run, model=str(POLICY), bucket=bucket, learning=learning, publish=Publish(checkpoint_every_versions=1))


def record(num_usable: int) -> list[Group]:
    """Whole sweeps of the base policy until `num_usable` groups have unequal rewards."""
    layout = demo_layout()
    policy = Policy(POLICY, Learning(), seed=0, layout_id=layout.layout_id)
    state = first_state(layout, host_tensors(policy))
    player = Player(state)
    questions = list(player.environment.question_ids("train"))
    groups: list[Group] = []
    sweep = 0
    while sum(not flatness(group) for group in groups) < num_usable:
        asked = questions[sweep * 8 : sweep * 8 + 8]
        groups += player.play(state, asked, group_size=8, version=0, sweep=sweep, seed=3)
        sweep += 1
    return groups


def open_stream(store: Store, run: str, signer: Signer, groups: Sequence[Group]) -> list[str]:
    """Start a run and put the recorded groups, with their grants, into its bucket in order; returns their keys."""
    config = _config(run, store.settings)
    files = upload_model_files(store, run, POLICY)
    claim_run(store, new_run(config, signer, layout_id=demo_layout().layout_id, model_files=files), signer)
    book = GrantBook(store, run)
    written: list[str] = []
    for sweep in sorted({group.sweep for group in groups}):
        own = [group for group in groups if group.sweep == sweep]
        book.write(GrantRecord(HOST, sweep, sweep * len(own), tuple(group.question_id for group in own), 0.0, 0))
        for group in own:
            key = keys.group(run, group.version, HOST, sweep, group.group)
            store.create(key, encode_group(replace(group, run=run)))
            written.append(key)
    return written


@dataclass
class Life:
    """One trainer process and what it says; `said` is its last line."""

    process: subprocess.Popen[str]
    lines: "queue.Queue[str]" = field(default_factory=queue.Queue)
    said: str = "starting"

    def next_line(self, timeout_seconds: float) -> str | None:
        """The next line; None when the process has ended or is silent for too long."""
        try:
            line = self.lines.get(timeout=max(0.0, timeout_seconds))
        except queue.Empty:
            return None
        self.said = line or self.said
        return line or None


@contextmanager
def living(run: str, store: Store, seed: str, num_steps: int, log: Path) -> Iterator[Life]:
    """A trainer process, killed at the end of the block if it still lives."""
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.resume", "--train", run]
    command += ["--endpoint", store.settings.endpoint, "--steps", str(num_steps)]
    environment = {**os.environ, "STOA_SIGNING_KEY": seed, "OMP_NUM_THREADS": "1"}
    with log.open("a") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment)
    life = Life(process)

    def listen() -> None:
        for line in process.stdout or ():
            life.lines.put(line.strip())
        life.lines.put("")

    thread = threading.Thread(target=listen, daemon=True)
    thread.start()
    try:
        yield life
    finally:
        process.kill()
        process.wait()
        thread.join(timeout=10)


def run_to_end(run: str, store: Store, seed: str, num_steps: int, log: Path) -> None:
    """Let a trainer finish. Raises RuntimeError if it does not."""
    with living(run, store, seed, num_steps, log) as life:
        while life.next_line(LIFE_SECONDS) is not None:
            pass
        if life.said != END:
            raise RuntimeError(f"the trainer of run {run} ended after {life.said!r}: {log.read_text()[-2000:]}")


def kill_at_random(store: Store, seed: str, public_key: str, num_steps: int, num_kills: int, draw: random.Random, log: Path) -> list[str]:
    """Start and kill trainers of the second run; returns what each had said last when it was killed."""
    killed_while: list[str] = []
    done = 0
    while len(killed_while) < num_kills:
        # Of the steps that are left, about as many as the kills that are left allow: the last life must have some too.
        budget = 2 * (num_steps - 1 - done) / (num_kills - len(killed_while) + 1)
        num_lines_before = draw.randrange(12)
        target = done + draw.randint(0, max(0, int(budget)))
        with living(KILLED, store, seed, num_steps, log) as life:
            deadline = time.monotonic() + LIFE_SECONDS
            reached = target == done
            while True:
                if reached and num_lines_before == 0:
                    break
                line = life.next_line(deadline - time.monotonic())
                if line is None or line == END:
                    raise RuntimeError(f"a trainer ended by itself after {life.said!r}: {log.read_text()[-2000:]}")
                if reached:
                    num_lines_before -= 1
                reached = reached or line == f"{target} done"
            time.sleep(draw.random() * 0.1)
            life.process.kill()
            killed_while.append(life.said)
        done = step_of(store, public_key)
    return killed_while


def step_of(store: Store, public_key: str) -> int:
    """The step HEAD of the second run names; 0 before it has one."""
    try:
        return read_head(store, KILLED, public_key)[0].step
    except ObjectMissingError:
        return 0


def faults_of(head: Head, steps: Sequence[StepManifest], stream: Sequence[str]) -> tuple[int, int]:
    """(repeats, holes) of HEAD's lineage: groups consumed twice; groups older than the last consumed that are nowhere."""
    if [manifest.step for manifest in steps] != list(range(head.step, 0, -1)):
        raise AssertionError("the lineage of HEAD does not hold every step once")
    consumed = [key for manifest in steps for key in manifest.consumed]
    settled = {*consumed, *(drop.key for m in steps for drop in m.dropped), *(refused.key for m in steps for refused in m.refused)}
    last = max(stream.index(key) for key in consumed)
    return sum(count - 1 for count in Counter(consumed).values()), sum(key not in settled for key in stream[:last])


def curve(steps: Sequence[StepManifest]) -> list[dict[str, float]]:
    """Metrics of each step, oldest first, without those that depend on versions, arrival and clocks."""
    return [
        {name: value for name, value in manifest.metrics.items() if not any(when in name for when in DEPENDS_ON_WHEN)}
        for manifest in reversed(steps)
    ]


def final_state(store: Store, head: Head, public_key: str) -> list[tuple[str, str]]:
    """Name and sha256 of each part of the checkpoint HEAD names: masters, moments, buffers and the step count."""
    architecture = hashlib.sha256((POLICY / "config.json").read_bytes()).hexdigest()
    identity = Identity(head.run, demo_layout().layout_id, architecture)
    document = read_document(store, head.checkpoint_key, identity, public_key)
    return [(part.name, part.sha256) for part in document.parts]


def measure(num_kills: int, num_steps: int, seed: int) -> dict[str, object]:
    """Both runs, and what became of them."""
    started = time.monotonic()
    secret = secrets.token_bytes(32)
    text, signer = base64.b64encode(secret).decode(), Signer.from_seed(secret)
    groups = record(num_steps * GROUPS_PER_STEP + 8)
    with tempfile.TemporaryDirectory() as place, bucket_store() as store:
        log = Path(place) / "trainer.log"
        stream = {run: open_stream(store, run, signer, groups) for run in (STRAIGHT, KILLED)}
        run_to_end(STRAIGHT, store, text, num_steps, log)
        killed_while = kill_at_random(store, text, signer.public_key, num_steps, num_kills, random.Random(seed), log)
        run_to_end(KILLED, store, text, num_steps, log)
        heads = {run: read_head(store, run, signer.public_key)[0] for run in (STRAIGHT, KILLED)}
        steps = {run: list(lineage(store, head)) for run, head in heads.items()}
        repeats, holes = faults_of(heads[KILLED], steps[KILLED], stream[KILLED])
        curves = {run: curve(manifests) for run, manifests in steps.items()}
        states = {run: final_state(store, head, signer.public_key) for run, head in heads.items()}
        epochs = [lease * 1000 + 1 for lease in range(1, heads[KILLED].epoch // 1000 + 1)]
        num_manifests = sum(1 for epoch in epochs for _ in store.list(keys.steps_of_epoch(KILLED, epoch)))
    differing = [number for number, pair in enumerate(zip(*curves.values(), strict=True), start=1) if pair[0] != pair[1]]
    return {
        "num_kills": len(killed_while),
        "num_repeats": repeats,
        "num_holes": holes,
        "bit_exact": not differing and states[STRAIGHT] == states[KILLED],
        "num_steps": num_steps,
        "num_steps_differing": len(differing),
        "metrics_differing": sorted(
            {
                name
                for number in differing
                for name, value in curves[KILLED][number - 1].items()
                if curves[STRAIGHT][number - 1].get(name) != value
            }
        ),
        "num_steps_done_again": num_manifests - num_steps,
        "num_metrics_compared": len(curves[KILLED][0]),
        "final_state_equal": states[STRAIGHT] == states[KILLED],
        "num_groups": len(groups),
        "num_groups_consumed": sum(len(manifest.consumed) for manifest in steps[KILLED]),
        "num_groups_dropped": sum(len(manifest.dropped) for manifest in steps[KILLED]),
        "loss_last": curves[KILLED][-1].get("loss"),
        "killed_while": dict(Counter(re.sub(r"\d+", "N", re.sub(r".*\] (\w+) .*", r"\1", said)) for said in killed_while)),
        "versions": {run: head.version for run, head in heads.items()},
        "seed": seed,
        "seconds": round(time.monotonic() - started, 1),
    }


def main() -> None:
    """Print the numbers: JSON to standard output, or a few lines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--kills", type=int, default=20, help="how often the trainer is killed")
    parser.add_argument("--steps", type=int, default=48, help="optimizer steps of a run")
    parser.add_argument("--seed", type=int, default=0, help="of the points at which it is killed")
    parser.add_argument("--train", metavar="RUN", help=argparse.SUPPRESS)
    parser.add_argument("--endpoint", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.train:
        train(asked.train, asked.endpoint, asked.steps)
        return
    found = measure(asked.kills, asked.steps, asked.seed)
    if asked.json:
        print(json.dumps(found))
        return
    for name, value in found.items():
        print(f"{name:40} {value}", file=sys.stdout)


if __name__ == "__main__":
    main()
