"""The demo: servers, trainer and Macs as processes of this machine, one run, watched to its end and then reported.

Nothing of the run happens here: this file starts, watches, starts again what died, and ends everything. The same
programs, started by hand with another configuration, are a run over the internet.
"""

import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cli.follow import reached
from cli.inviting import write_token
from cli.launch import Launched, check, launch, open_store
from cli.live.progress import Progress
from cli.processes import Child, Household, end_leftovers, ignored_signals
from cli.report.collect import Collector, with_end
from cli.report.record import RunRecord
from cli.report.summary import Summary
from cli.report.write import MetricsFile, write_report
from cli.say import Exit, bytes_text, counted
from cli.services import Ports, Services, start_services
from cli.temporal import Control
from stoa.bucket.manifest import Signer
from stoa.config.load import TEMPORAL_SECRETS, bucket_credentials, child_environment, load_run, mac_credentials, signing_seed
from stoa.config.run import Bucket, RunConfig
from stoa.contracts.errors import FormatError, MissingExtraError, ServiceError, ServiceUnavailableError, UsageError

MAX_RESTARTS: Final = 3
"""Times a dead worker is started again."""
POLL_SECONDS: Final = 1.0
INVITE_SECONDS: Final = 7 * 86_400.0
GRACE_MINUTES: Final = 3.0
"""Time a run that reached its limit has for its last evaluation before the demo stops it."""
_ENDED: Final = ("stopped", "failed")
_ONE_THREAD: Final = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "VECLIB_MAXIMUM_THREADS": "1",
    "NUMEXPR_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONUNBUFFERED": "1",
}


@dataclass(frozen=True, slots=True)
class Options:
    """What a person asked of the demo."""

    workers: int
    seed: int
    out: Path
    minutes: float
    config: Path | None = None
    sets: tuple[str, ...] = ()
    quiet: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """How the demo ended. `complete`: by its steps or target, not by its limit or a person."""

    summary: Summary
    complete: bool


class _Worker:
    """A worker process and how often it was started."""

    def __init__(self, name: str, command: tuple[str, ...]) -> None:
        self.name = name
        self.command = command
        self.child: Child | None = None
        self.restarts = 0


def run_demo(options: Options) -> Outcome:
    """Do all of it. Whatever happens, every process that was started is ended before this returns or raises."""
    check(load_run(options.config, options.sets, environ={}))  # what cannot be is told before a folder is made
    claim_folder(options.out)
    with Household(options.out) as house:
        services = start_services(house, options.out / "state", options.out / "logs", bucket_credentials(Bucket()), Ports())
        config = resolve(options, services)
        (options.out / "config.json").write_text(config.model_dump_json(indent=2) + "\n", "utf-8")
        env = worker_environment(options.out)
        workers = _workers(options)
        invite_macs(options, config)
        try:
            for worker in workers:
                _start(house, worker, options.out, env)
            with Control(config.temporal) as control:
                launched = launch(config, control, state=options.out / "state")
                return _Watch(house, workers, options, config, control, launched, env, services.ui_url).follow()
        finally:
            # Workers first: one that is told to end while its servers are gone waits for them in vain.
            with ignored_signals():
                house.stop([worker.child for worker in workers if worker.child is not None])


def claim_folder(out: Path) -> None:
    """Take an empty folder for a demo, and end what killed demos beside it left running. Raises UsageError if it is used."""
    for folder in (out, *(sorted(out.parent.glob("demo-*")) if out.parent.is_dir() else ())):
        try:
            end_leftovers(folder)
        except (UsageError, FormatError):
            if folder == out:
                raise
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"{out}: not an empty folder; a demo overwrites nothing", hint="leave out --out, or name a new folder")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise UsageError(f"{out}: cannot be made: {problem.strerror}", hint="name a folder that you may write, with --out") from None


def next_folder(base: Path = Path("runs")) -> Path:
    """`runs/demo-<n>`, with the first n that is not there."""
    number = 1
    while (base / f"demo-{number}").exists():
        number += 1
    return base / f"demo-{number}"


def resolve(options: Options, services: Services) -> RunConfig:
    """The demo's configuration with this demo's endpoints, seed and limit."""
    config = load_run(
        options.config,
        (
            f"seed={options.seed}",
            f"stop.max_minutes={options.minutes}",
            *options.sets,
            f'temporal.address="{services.temporal_address}"',
            f'bucket.endpoint="{services.bucket_endpoint}"',
        ),
        environ={},
    )
    if config.environment.name == "search" and not any(item.startswith("environment.settings.world_seed") for item in options.sets):
        settings = {**config.environment.settings, "world_seed": options.seed}
        config = config.model_copy(update={"environment": config.environment.model_copy(update={"settings": settings})})
    return config


def worker_environment(out: Path) -> dict[str, str]:
    """What the workers are given: one thread each and the demo's own state folder; endpoints stand in its configuration."""
    return child_environment(
        {
            **_ONE_THREAD,
            "STOA_STATE": str(out.resolve() / "state"),
        },
        without=("STOA_TEMPORAL_ADDRESS", "STOA_BUCKET_ENDPOINT", "STOA_BUCKET_NAME", "STOA_SIGNING_KEY", *TEMPORAL_SECRETS),
    )


def _workers(options: Options) -> tuple[_Worker, ...]:
    config, state = str((options.out / "config.json").resolve()), options.out.resolve() / "state"
    trainer = _Worker("trainer", (sys.executable, "-m", "trainer_gpu.worker", config, "--state", str(state / "trainer")))
    mac = (sys.executable, "-m", "worker_mac.worker", "--always")
    return (trainer, *(_Worker(host, (*mac, "--state", str(state / host))) for host in _hosts(options)))


def _hosts(options: Options) -> list[str]:
    return [f"mac-{number}" for number in range(1, options.workers + 1)]


def invite_macs(options: Options, config: RunConfig) -> None:
    """Put an invitation into the state folder of each Mac: it joins as a friend's does, with a key that only reads."""
    from worker_mac.invited import keep_invite

    state = options.out / "state"
    signer, credentials = Signer.from_seed(signing_seed(create=True, base=state)), mac_credentials(config.bucket)
    for host in _hosts(options):
        keep_invite(state / host, write_token(config, signer, credentials, host, seconds=INVITE_SECONDS)[0])


def _start(house: Household, worker: _Worker, out: Path, env: Mapping[str, str]) -> None:
    if worker.name != "trainer":
        env = {name: value for name, value in env.items() if not name.startswith(("STOA_BUCKET_", "AWS_"))}
    worker.child = house.start(worker.name, worker.command, env=env, log=out / "logs" / f"{worker.name}.log")


class _Watch:
    """Follows the run of a demo to its end."""

    def __init__(
        self,
        house: Household,
        workers: tuple[_Worker, ...],
        options: Options,
        config: RunConfig,
        control: Control,
        launched: Launched,
        env: Mapping[str, str],
        ui_url: str,
    ) -> None:
        self._house = house
        self._workers = workers
        self._options = options
        self._config = config
        self._control = control
        self._env = env
        self._ui_url = ui_url
        self._collector = Collector(launched.document, open_store(config), control)
        self._layout_bytes = launched.layout.num_bytes
        self._record: RunRecord | None = None
        self._end_reason = ""

    def follow(self) -> Outcome:
        """Watch, restart, and report. A run that is cut short is reported as well, as far as it came."""
        try:
            with Progress(self._config.stop.max_steps, self._ui_url, quiet=self._options.quiet) as progress:
                self._first_screen(progress)
                self._until_end(progress)
        except BaseException:
            self._report_what_there_is()
            raise
        record = self._collector.collect(everything=True)
        return self._report(record)

    def _first_screen(self, progress: Progress) -> None:
        out = self._options.out
        config = self._config
        progress.say(f"run {config.run}: {config.model} on {config.environment.name}, seed {config.seed}")
        progress.say(f"parts: Temporal, bucket, trainer, {counted(self._options.workers, 'Mac')}, all on this machine")
        full = bytes_text(self._layout_bytes)
        progress.say(f"weights are {full} in int8; an anchor holds them all, and headers; each version after the first is a delta")
        progress.say(f"ends after {config.stop.max_steps} steps, or {counted(self._options.minutes, 'minute')}")
        progress.say(f"Temporal page: {self._ui_url}")
        progress.say(f"logs: {out / 'logs'}   report: {out / 'report.html'}   Ctrl-C stops everything")

    def _until_end(self, progress: Progress) -> None:
        deadline = time.monotonic() + (self._options.minutes + GRACE_MINUTES) * 60.0
        metrics = MetricsFile(self._options.out / "metrics.jsonl")
        while True:
            # Looked at before HEAD is: a Mac that ended because HEAD says stopped is then known to be done.
            dead = [worker for worker in self._workers if worker.child is not None and worker.child.exit_code is not None]
            try:
                record = self._collector.collect()
                ended = record.state in _ENDED and not self._control.is_running(self._config.run)
            except ServiceError as problem:
                self._fail_if_server_died(problem)
                continue
            self._record = record
            self._restart(dead, progress)
            progress.show(record)
            metrics.keep(record)
            if ended:
                self._end_reason = self._control.result(self._config.run).end_reason
                return
            if time.monotonic() > deadline:
                self._end_reason = f"the demo's limit of {counted(self._options.minutes, 'minute')} is long over"
                return
            time.sleep(POLL_SECONDS)

    def _restart(self, dead: list[_Worker], progress: Progress) -> None:
        if self._record is not None and self._record.state in _ENDED:
            return
        for worker in dead:
            child = worker.child
            if child is None or (worker.name != "trainer" and child.exit_code == Exit.DONE and self._collector.head_stopped):
                continue
            if child.exit_code == Exit.WRONG_USE:
                raise MissingExtraError(f"{worker.name} cannot start\n{child.last_lines()}", hint=f"its log is {child.log}")
            # What the dead one started goes with it: a second control process would be no harm, but no use.
            self._house.stop([child], grace_seconds=2.0)
            if worker.restarts >= MAX_RESTARTS:
                raise ServiceUnavailableError(
                    f"{worker.name} died {MAX_RESTARTS + 1} times, the last time with code {child.exit_code}\n{child.last_lines()}",
                    hint=f"its log is {child.log}",
                )
            worker.restarts += 1
            progress.say(f"{worker.name} ended with code {child.exit_code}; started again ({worker.restarts} of {MAX_RESTARTS})")
            _start(self._house, worker, self._options.out, self._env)

    def _fail_if_server_died(self, problem: ServiceError) -> None:
        for child in self._house.children:
            if child.name in ("temporal", "weed") and child.exit_code is not None:
                raise ServiceUnavailableError(
                    f"{child.name} ended with code {child.exit_code}\n{child.last_lines()}", hint=f"its log is {child.log}"
                ) from problem
        time.sleep(POLL_SECONDS)

    def _report(self, record: RunRecord) -> Outcome:
        restarts = {worker.name: worker.restarts for worker in self._workers if worker.restarts}
        whole = with_end(record, restarts=restarts, end_reason=self._end_reason)
        summary = write_report(whole, self._options.out)
        return Outcome(summary, complete=reached(self._config.stop, record))

    def _report_what_there_is(self) -> None:
        if self._record is not None and self._record.steps:
            self._end_reason = self._end_reason or "cut short"
            self._report(self._record)
