"""`stoa eval CHECKPOINT`: held-out questions on a checkpoint without a run, by processes here, wired Macs, and Macs that do the same.

Each process or wired set claims parts from a bucket as it gets free (`stoa.bucket.exams`): one that is started for this alone, or with
--name and --config that of the configuration, where other Macs join by the same command. Marks are made here, from ids.
"""

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cli import say
from cli.evaluation.shown import FILE_FORMAT, Exam
from cli.launch import open_store
from cli.processes import Child, Household
from environments import known
from environments.base import Environment
from stoa.bucket.exams import ExamPlan, ExamTask, answered, give_back, read_exam, write_task
from stoa.bucket.store import Store
from stoa.config.load import LOOPBACK_KEY, LOOPBACK_SECRET, Credentials, load_run
from stoa.config.run import Bucket, RunConfig
from stoa.contracts.errors import (
    CheckpointError,
    GroupRefusedError,
    MissingExtraError,
    ObjectMissingError,
    ServiceError,
    StoaError,
    UsageError,
)
from stoa.contracts.evaluation_messages import EvalPlayer
from stoa.rollouts.records import Group
from stoa.rollouts.shard import MAX_GROUP_BYTES, NUM_EPISODES, decode_group

NUM_QUESTIONS: Final = 512
EXPIRES_SECONDS: Final = 600.0
"""A part whose Mac fell silent is taken over after this."""
POLL_SECONDS: Final = 0.5
END_SECONDS: Final = 20.0
"""For processes to end by themselves once all is answered."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What the command line asked. `num_questions` 0: as many as NUM_QUESTIONS."""

    checkpoint: str
    num_questions: int
    num_samples: int
    seed: int
    num_workers: int
    config: Path | None
    sets: tuple[str, ...]
    name: str = ""
    hosts: Path | None = None
    """Of a wired set that plays in place of processes here."""
    look: bool = True
    """Whether the doctor looks at that set first."""


def examine(asked: Asked) -> Exam:
    """Play, mark and return; takes part in the examination `name` where there is one.

    Raises UsageError, CheckpointError for what cannot be examined, RunMismatchError if the examination of this name is another.
    """
    from trainer_gpu.exam import question_order
    from trainer_gpu.hub import locate_model

    _check(asked)
    config = load_run(asked.config, asked.sets).model_copy(update={"model": asked.checkpoint})
    folder = locate_model(config)
    environment = known.create(config.environment.name, config.environment.settings, _tokenizer(folder))
    question_ids = question_order(environment, asked.num_questions or NUM_QUESTIONS, asked.seed)
    name = asked.name or f"exam-{uuid.uuid4().hex[:12]}"
    if asked.hosts is not None:
        from cli.evaluation.wired import make_ready

        make_ready(asked.hosts, config.model_copy(update={"model": str(folder)}), look=asked.look)
    shared = open_store(config) if asked.name else None
    children: list[Child] = []
    try:
        with tempfile.TemporaryDirectory() as scratch, Household(Path(scratch)) as house:
            store = shared or _own_bucket(house, Path(scratch))
            started = time.monotonic()
            children += _seat(house, Path(scratch), config, store.settings, asked, name, folder, question_ids)
            plan = _await(store, name, children, is_kept=shared is not None)
            groups = {part: decode_group(store.get(key, max_bytes=MAX_GROUP_BYTES).data) for part, key in answered(store, plan).items()}
            seconds = time.monotonic() - started
            _await_end(children)
    finally:
        if shared is not None:
            _give_back(shared, name, children)
    return _marked(plan, groups, config, environment, asked, seconds)


def _check(asked: Asked) -> None:
    if not 1 <= asked.num_samples <= 16 or not 1 <= asked.num_workers <= 64 or asked.num_questions < 0:
        raise UsageError("--samples is 1 to 16, --workers 1 to 64, --questions 0 or more")
    if asked.hosts is not None and asked.num_workers > 1:
        raise UsageError("a wired set plays as one", hint="leave out --workers, or --hosts")


def _tokenizer(folder: Path) -> bytes:
    try:
        return (folder / "tokenizer.json").read_bytes()
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise CheckpointError(f"{folder / 'tokenizer.json'}: {reason}", hint="an examination needs it beside config.json") from None


def _give_back(store: Store, name: str, children: Sequence[Child]) -> None:
    """Free what our processes had claimed: they have ended, and who goes on need not wait until their claims are void."""
    with contextlib.suppress(StoaError):
        give_back(store, read_exam(store, name), [child.name for child in children])


def _await_end(children: Sequence[Child]) -> None:
    """Let who plays end by itself: a wired set is told on other Macs, too."""
    deadline = time.monotonic() + END_SECONDS
    for child in children:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.process.wait(max(0.0, deadline - time.monotonic()))


def _seat(
    house: Household, scratch: Path, config: RunConfig, bucket: Bucket, asked: Asked, name: str, folder: Path, question_ids: Sequence[str]
) -> list[Child]:
    """Start the processes that play."""
    sampling = config.evaluation
    host = "".join(char if char.isalnum() else "-" for char in socket.gethostname().lower()).strip("-")[:32] or "mac"
    children: list[Child] = []
    for number in range(asked.num_workers):
        task = ExamTask(
            exam=name,
            host=f"{host}-{os.getpid()}-{number + 1}",
            folder=str(folder.resolve()),
            dtype=config.learning.dtype,
            bucket=bucket.model_dump(mode="json"),
            environment=config.environment.name,
            settings=dict(config.environment.settings),
            question_ids=tuple(question_ids),
            num_samples=asked.num_samples,
            questions_a_part=max(1, min(sampling.questions_a_part, NUM_EPISODES["eval"][1] // asked.num_samples)),
            seed=asked.seed,
            sampling=(sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p),
            expires_seconds=EXPIRES_SECONDS,
        )
        path = scratch / f"task-{number}.json"
        write_task(task, path)
        command = [sys.executable, "-m", "worker_mac.exam", str(path)]
        if asked.hosts is not None:
            say.talk("starting them; what each will hold is told once they have found one another")
            words = (str(asked.hosts.resolve()), str(path.resolve()), "--folder", str(scratch.resolve()))
            command = [sys.executable, "-m", "worker_mac.cluster.sitting", *words]
        # What a process that is ended by force leaves behind goes with the folder.
        env = {**os.environ, "TMPDIR": str(scratch.resolve())}
        children.append(house.start(task.host, command, env=env, log=scratch / f"worker-{number}.log"))
    return children


def _await(store: Store, name: str, children: Sequence[Child], *, is_kept: bool) -> ExamPlan:
    """Until every part is answered. Raises what ended the processes if they all ended before."""
    plan: ExamPlan | None = None
    told, memory = -1, set[str]()
    while True:
        alive = [child for child in children if child.process.poll() is None]
        for line in (line for child in children for line in _lines(child) if line.startswith("memory: ") and line not in memory):
            memory.add(line)
            say.talk(line)
        try:
            plan = plan or read_exam(store, name)
            done = len(answered(store, plan))
            if done != told:
                say.talk(f"{done} of {plan.num_parts} parts are answered")
                told = done
            if done == plan.num_parts:
                return plan
        except ObjectMissingError:
            pass
        if not alive:
            raise _fault(children, _what_is_kept(told, is_kept=is_kept))
        time.sleep(POLL_SECONDS)


def _what_is_kept(num_answered: int, *, is_kept: bool) -> str:
    """What next, once some parts are answered."""
    if num_answered < 1:
        return ""
    if is_kept:
        return "the same command goes on with the parts that are not answered"
    return "with --name, and a --config that names a bucket, the same command goes on where this one ended"


def _lines(child: Child) -> list[str]:
    return child.log.read_text("utf-8", "replace").splitlines() if child.log.is_file() else []


def _fault(children: Sequence[Child], next_step: str) -> StoaError:
    """Why nobody plays any more, in the words of a process that failed, and what next."""
    for child in children:
        lines = _lines(child)
        if any("No module named 'mlx" in line for line in lines):
            return MissingExtraError("a checkpoint is played by the engine of the Macs", hint="run `pip install 'stoa[mac]'`")
        errors = [line for line in lines if line.startswith("error: ")]
        if errors:
            hints = [line.removeprefix("hint: ") for line in lines if line.startswith("hint: ")]
            kind = UsageError if child.process.returncode == 2 else ServiceError
            return kind(errors[-1].removeprefix("error: "), hint="; ".join(one for one in (*hints[-1:], next_step) if one))
    last = _lines(children[-1])[-3:]
    return ServiceError(f"the process that plays ended with {children[-1].process.returncode}: {' | '.join(last)}", hint=next_step)


def _marked(plan: ExamPlan, groups: dict[int, Group], config: RunConfig, environment: Environment, asked: Asked, seconds: float) -> Exam:
    from trainer_gpu.exam import marks_of
    from trainer_gpu.referee import rules_of

    rules = rules_of(config, environment, vocab_size=2**31 - 1, known=lambda version: plan.state_id)
    marks = []
    for part, group in sorted(groups.items()):
        if group.state_id != plan.state_id or {one.question_id for one in group.episodes} - set(plan.part(part)):
            raise GroupRefusedError("wrong_owner", f"part {part} of {plan.exam} is of other weights or questions")
        marks += marks_of(group, f"part {part}", environment=environment, rules=rules, num_samples=plan.num_samples)
    facts = {"task": plan.environment, "seed": str(asked.seed), "state_id": plan.state_id, "sampling": str(plan.sampling)}
    return Exam(FILE_FORMAT, asked.checkpoint, plan.exam, 0, tuple(marks), _players(groups.values()), seconds, facts)


def _players(groups: Iterable[Group]) -> tuple[EvalPlayer, ...]:
    """What each Mac says that it did; hours are those of its parts."""
    of_host: dict[str, list[Group]] = {}
    for group in groups:
        of_host.setdefault(group.host, []).append(group)
    rows: list[EvalPlayer] = []
    for host, played in of_host.items():
        took = max(1e-9, sum(group.timings.decode_seconds for group in played))
        num_episodes = sum(len(group.episodes) for group in played)
        num_tokens = sum(len(episode.logprobs) for group in played for episode in group.episodes)
        rows.append(EvalPlayer(host, len(played), num_episodes, round(num_episodes * 3600 / took, 1), round(num_tokens / took, 1)))
    return tuple(sorted(rows, key=lambda row: (-row.num_questions, row.host)))


def _own_bucket(house: Household, folder: Path) -> Store:
    from cli.services import start_bucket

    credentials = Credentials(LOOPBACK_KEY, LOOPBACK_SECRET)
    endpoint = start_bucket(house, folder / "bucket", folder / "logs", credentials)
    store = Store(Bucket(endpoint=endpoint, name="exams"), credentials, patience_seconds=30.0)
    store.ensure_bucket()
    return store
