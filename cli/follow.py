"""What the commands about a running run share: find it by name or configuration, and follow it to its end."""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

from cli import say
from cli.launch import open_store
from cli.live.progress import Progress
from cli.report.collect import Collector, Newest
from cli.report.record import RunRecord
from cli.temporal import Control
from stoa.bucket.run_document import RunDocument, read_run
from stoa.bucket.store import Store
from stoa.config.load import load_run
from stoa.config.run import RunConfig, Stop
from stoa.contracts.errors import ServiceError, ServiceUnavailableError

POLL_SECONDS: Final = 2.0
OUTAGE_SECONDS: Final = 900.0
"""A server may be away this long before following ends; the run rides it out by itself."""
GONE_LOOKS: Final = 5
"""So many looks one after another must find no running workflow before a run counts as gone: one that starts is not there at once."""
ENDED: Final = ("stopped", "failed", "gone")
PIPE_COLUMNS: Final = 400
"""In a pipe nothing is cut to the width of a terminal."""
ASKED: Final = "asked on the command line"


@dataclass(frozen=True, slots=True)
class Found:
    """A run that is in the bucket, and the means to ask about it."""

    config: RunConfig
    document: RunDocument
    store: Store
    control: Control
    collector: Collector


@contextmanager
def find_run(run: str, config: Path | None, *, temporal: bool = True, newest: Newest | None = None) -> Iterator[Found]:
    """Open a run by name; servers are those of `config` (default: the demo's) and of the environment. `newest`: see `Collector`.

    Raises RunMissingError if the bucket has no such run.
    """
    settings = load_run(config, (f"run={run}",))
    store = open_store(settings)
    try:
        document = read_run(store, run)
    except ServiceUnavailableError as problem:
        raise ServiceUnavailableError(problem.message, hint=f"{problem.hint}{_demo_hint(config)}") from None
    with Control(settings.temporal) as control:
        yield Found(settings, document, store, control, Collector(document, store, control if temporal else None, newest=newest))


def _demo_hint(config: Path | None) -> str:
    """A demo has servers of its own, which end with it: how to reach them, where one was made here."""
    if config is not None:
        folder = config.parent
        return f"; a demo that is over: `stoa services --demo {folder}` first" if (folder / "state" / "bucket").is_dir() else ""
    demos = sorted(Path("runs").glob("demo-*/config.json"), key=lambda path: path.stat().st_mtime)
    return f"; a demo has its own: add `--config {demos[-1]}`" if demos else ""


def follow(found: Found, max_steps: int, *, on_record: Callable[[RunRecord], None] = lambda _: None, quiet: bool = False) -> RunRecord:
    """Show a run until it has ended, and give every record to `on_record`; returns the last. Ctrl-C ends the following, not the run.

    With `quiet` nothing is shown meanwhile.

    A run whose workflow Temporal runs no more, though it never said that it ended, comes back with the state `gone`.

    Raises ServiceUnavailableError once a server has been away for `OUTAGE_SECONDS`.
    """
    run = found.document.run
    away_since = 0.0
    num_absent = 0
    with Progress(max_steps, quiet=quiet) as progress:
        while True:
            try:
                record = found.collector.collect()
                progress.show(record)
                on_record(record)
                away_since = 0.0
                num_absent = num_absent + 1 if is_absent(found.control, run) else 0
                if num_absent and record.state in ENDED:
                    return record
                if num_absent >= GONE_LOOKS:
                    return gone(record)
            except ServiceUnavailableError as problem:
                if not away_since:
                    away_since = time.monotonic()
                    progress.say(f"waiting: {problem.message}")
                if time.monotonic() - away_since > OUTAGE_SECONDS:
                    raise
            time.sleep(POLL_SECONDS)


def is_absent(control: Control, run: str) -> bool:
    """True if Temporal says that it runs no such workflow; False also while it says nothing."""
    try:
        return not control.is_running(run)
    except ServiceError:
        return False


def gone(record: RunRecord) -> RunRecord:
    """The record of a run that ended without a word: its workflow was terminated, or Temporal has lost it."""
    why = "Temporal runs it no more; `stoa run CONFIG --resume` goes on with it"
    return replace(record, state="gone", waiting_for="", end_reason=why)


def reached(stop: Stop, record: RunRecord) -> bool:
    """True if a run got what it was started for: its steps, versions or target, not merely the end of its time."""
    best = max((e.interval_95[0] for e in record.evaluations if not e.error), default=0.0)
    return bool(
        (stop.max_steps and record.step >= stop.max_steps)
        or (stop.max_versions and record.version >= stop.max_versions)
        or (stop.target_pass_at_1 and best >= stop.target_pass_at_1)
    )


def ask(run: str, update: str, reason: str, config: Path | None, *, as_json: bool, said: str) -> None:
    """Send an update to a run and tell what it does now."""
    tell(run, config, lambda control: control.ask(run, update, reason or ASKED), as_json=as_json, said=said)


def tell(run: str, config: Path | None, do: Callable[[Control], object], *, as_json: bool, said: str) -> None:
    """Do something to a run, then say that it is done; with `as_json` its status instead."""
    with find_run(run, config) as found:
        do(found.control)
        if as_json:
            say.data(json.dumps(asdict(found.control.status(run)), indent=2))
            return
    say.data(f"run {run} {said}")
