"""Engines for fault tests that keep their truth in a folder, as the real ones keep it in a bucket.

They hold the same promises: create-only objects, one compare-and-swapped HEAD with a fencing token, steps that name their
parent and what they consumed. No learning happens. Any process may be killed at any line.
"""

import fcntl
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from stoa.contracts.errors import FencedError, LostStateError
from stoa.contracts.evaluation_messages import EvaluationResult, SummariseRequest
from stoa.contracts.fleet_messages import Grant, GrantRequest, SweepRequest, SweepResult
from stoa.contracts.messages import (
    Acquired,
    AcquireRequest,
    Checkpointed,
    CheckpointRequest,
    HeadStateRequest,
    HeadStateResult,
    LeaseFound,
    LeaseQuestion,
    Published,
    PublishRequest,
    StepRequest,
    StepResult,
)
from stoa.contracts.names import lease_queue
from stoa.contracts.ports import Progress

GROUPS_A_STEP = 2
MAX_WAITING = 12
MAX_AHEAD = 6
STEP_SECONDS = 0.15
GROUP_SECONDS = 0.25
EMPTY_HEAD = {"epoch": 0, "version": -1, "step": 0, "step_key": "", "state": "running", "nonce": ""}


class Folder:
    """A bucket of JSON objects."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def create(self, key: str, value: object) -> bool:
        """Write a new object whole; False if there is one."""
        path = self.root / key
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.parent / f".{path.name}.{os.getpid()}.{time.monotonic_ns()}"
        part.write_text(json.dumps(value))
        try:
            os.link(part, path)
        except FileExistsError:
            return False
        finally:
            part.unlink()
        return True

    def read(self, key: str) -> Any:
        return json.loads((self.root / key).read_text())

    def keys(self, prefix: str) -> list[str]:
        folder = self.root / prefix
        return sorted(f"{prefix}/{path.name}" for path in folder.iterdir() if path.name[0] != ".") if folder.is_dir() else []

    def read_head(self) -> dict[str, Any]:
        path = self.root / "HEAD.json"
        return json.loads(path.read_text()) if path.exists() else dict(EMPTY_HEAD)

    @contextmanager
    def swap(self, token: int | None = None) -> Iterator[dict[str, Any]]:
        """Change HEAD under a lock; with `token` only while that lease holds it."""
        with (self.root / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            head = self.read_head()
            if token is not None and head["epoch"] != token:
                raise FencedError(f"HEAD is held by {head['epoch']}, not {token}")
            yield head
            part = self.root / f".HEAD.{os.getpid()}"
            part.write_text(json.dumps(head))
            part.replace(self.root / "HEAD.json")

    def lineage(self) -> list[dict[str, Any]]:
        """Step manifests from the one HEAD names back to the first."""
        found: list[dict[str, Any]] = []
        key = self.read_head()["step_key"]
        while key:
            found.append(self.read(key))
            key = found[-1]["parent"]
        return found


class FolderTrainer:
    """Implements `PolicyTrainer`."""

    def __init__(self, folder: Folder, owner: str) -> None:
        self.folder, self.owner = folder, owner
        self.token = 0
        self.step = 0
        self.version = -1
        self.step_key = ""
        self.consumed: set[str] = set()
        self.on_lease: Any = lambda lease: None

    def acquire(self, request: AcquireRequest, attempt: int, progress: Progress) -> Acquired:
        progress.report("taking the run")
        with self.folder.swap() as head:
            token = request.lease_number * 1000 + attempt
            if token <= head["epoch"]:
                raise FencedError(f"lease {token} is from before {head['epoch']}")
            head |= {"epoch": token, "version": head["version"] + 1}
            self.folder.create(f"versions/v{head['version']:04d}", {"epoch": token, "step": head["step"]})
            if head["state"] == "stopped":
                head["state"] = "running"
        self.token, self.step, self.step_key, self.version = token, head["step"], head["step_key"], head["version"]
        self.consumed = {group for manifest in self.folder.lineage() for group in manifest["consumed"]}
        acquired = Acquired(token, self.owner, lease_queue(request.run, token), self.step, self.version, head["state"])
        self.on_lease(acquired)
        return acquired

    def train_step(self, request: StepRequest, progress: Progress) -> StepResult:
        self._check(request.token, request.step - 1)
        fresh: list[str] = []
        while len(fresh) < GROUPS_A_STEP:
            if progress.cancelled or progress.stopping:
                return StepResult("stopped", request.step, reason="asked to end")
            progress.report(f"{len(fresh)} groups", key=self.step_key)
            fresh = [key for key in self.folder.keys("groups") if key not in self.consumed][:GROUPS_A_STEP]
            time.sleep(0.05)
        time.sleep(STEP_SECONDS)
        key = f"steps/e{self.token}-s{request.step:05d}"
        self.folder.create(key, {"step": request.step, "epoch": self.token, "parent": self.step_key, "consumed": fresh})
        self.step, self.step_key = request.step, key
        self.consumed |= set(fresh)
        return StepResult("done", request.step, key, len(fresh), reward_mean=0.5)

    def publish(self, request: PublishRequest, progress: Progress) -> Published:
        self._check(request.token, request.step)
        with self.folder.swap(self.token) as head:
            head |= {"version": self.version + 1, "step": self.step, "step_key": self.step_key}
            if not self.folder.create(f"versions/v{head['version']:04d}", {"epoch": self.token, "step": self.step}):
                raise LostStateError(f"version {head['version']} is published already")
        self.version += 1
        return Published(self.version, self.step, f"versions/v{self.version:04d}")

    def checkpoint(self, request: CheckpointRequest, progress: Progress) -> Checkpointed:
        return Checkpointed(self.step, self.step_key)

    def _check(self, token: int, step: int) -> None:
        if (token, step) != (self.token, self.step):
            raise LostStateError(f"this trainer is at step {self.step} of lease {self.token}, not {step} of {token}")


class FolderMac:
    """Implements `RolloutEngine`."""

    def __init__(self, folder: Folder, host: str) -> None:
        self.folder, self.host = folder, host

    def sweep(self, request: SweepRequest, progress: Progress) -> SweepResult:
        head = self.folder.read_head()
        if head["state"] == "stopped":
            return SweepResult("stopped", request.sweep, request.purpose)
        if request.purpose == "eval":
            return self._examine(request, progress)
        made = 0
        for index, question in enumerate(request.question_ids):
            key = f"groups/{self.host}-{request.sweep:05d}-{index}"
            if not (self.folder.root / key).exists():
                self._play(progress)
                if progress.cancelled:
                    return SweepResult("partial", request.sweep)
                made += self.folder.create(key, {"question": question, "version": head["version"]})
            progress.report(f"group {index}", version=head["version"], key=key)
        return SweepResult("done", request.sweep, version=head["version"], num_groups=made, decode_seconds=made * GROUP_SECONDS)

    def _play(self, progress: Progress) -> None:
        """A group takes its time; with a file `slow` in the folder ten times that."""
        seconds = GROUP_SECONDS * (10 if (self.folder.root / "slow").exists() else 1)
        ends_at = time.monotonic() + seconds
        while time.monotonic() < ends_at and not progress.cancelled:
            time.sleep(0.05)

    def _examine(self, request: SweepRequest, progress: Progress) -> SweepResult:
        progress.report(f"evaluation {request.evaluation} part {request.part}")
        time.sleep(GROUP_SECONDS)
        key = f"evals/{request.evaluation}-{request.part}-{self.host}"
        self.folder.create(key, {"ids": request.question_ids, "version": request.version})
        return SweepResult("done", request.sweep, "eval", request.version, keys=(key,))


class FolderGranter:
    """Implements `Granter`."""

    def __init__(self, folder: Folder) -> None:
        self.folder = folder

    def grant(self, request: GrantRequest, progress: Progress) -> Grant:
        state = self.folder.read_head()["state"]
        newest = max((int(key.rsplit("-", 1)[1]) for key in self._granted(request.host)), default=-1)
        if request.sweep < newest - MAX_AHEAD:
            return Grant(request.run, request.host, request.sweep, (), reason="over", newest_sweep=newest)
        if state != "running":
            return Grant(request.run, request.host, request.sweep, (), reason=state, run_state=state, waits_for="run")
        if sum(self.on_the_way()) >= MAX_WAITING:
            return Grant(request.run, request.host, request.sweep, (), reason="no room", waits_for="room")
        ids = tuple(f"q{request.sweep}-{index}" for index in range(request.num_groups))
        self.folder.create(f"grants/{request.host}-{request.sweep:05d}", ids)
        return Grant(request.run, request.host, request.sweep, ids)

    def on_the_way(self) -> tuple[int, int]:
        used = sum(len(manifest["consumed"]) for manifest in self.folder.lineage())
        return 0, len(self.folder.keys("groups")) - used

    def _granted(self, host: str) -> list[str]:
        return [key for key in self.folder.keys("grants") if key.startswith(f"grants/{host}-")]

    def host_left(self, host: str) -> None:
        self.folder.create(f"left/{host}-{time.time_ns()}", {})


class FolderKeeper:
    """Implements `HeadKeeper`."""

    def __init__(self, folder: Folder) -> None:
        self.folder = folder

    def find_lease(self, request: LeaseQuestion, progress: Progress) -> LeaseFound:
        return LeaseFound(self.folder.read_head()["epoch"])

    def set_state(self, request: HeadStateRequest, progress: Progress) -> HeadStateResult:
        with self.folder.swap() as head:
            head |= {"state": request.state, "nonce": request.nonce}
        return HeadStateResult(request.state, head["version"], head["step"], head["epoch"])


class FolderExaminer:
    """Implements `Evaluator`."""

    def __init__(self, folder: Folder) -> None:
        self.folder = folder

    def held_out(self, run: str, num_questions: int, seed: int) -> tuple[str, ...]:
        return tuple(f"held-{i}" for i in range(num_questions))

    def summarise(self, request: SummariseRequest, progress: Progress) -> EvaluationResult:
        ids = [one for key in request.keys for one in self.folder.read(key)["ids"]]
        assert len(ids) == len(set(ids)) == request.num_questions
        self.folder.create(f"summaries/{request.evaluation}", {"ids": ids})
        return EvaluationResult(request.run, request.evaluation, request.version, len(ids), 0.5, (0.4, 0.6), 0.5)
