"""What somebody who helps needs to see of this machine and a run, in one zip file without secrets.

Every part is optional: one that cannot be had is named in `missing.txt`, with why. Prompts and answers are in no part.
"""

import json
import re
import time
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from platform import platform, python_version
from typing import Final

from cli.commands.status import facts
from cli.doctor import checks
from cli.doctor.finding import examine
from cli.doctor.open import installed_role, scene_of
from cli.redact import Redactor
from cli.report.collect import Collector
from cli.report.write import metric_rows
from cli.temporal import Control
from stoa.bucket import keys
from stoa.bucket.run_document import read_run
from stoa.bucket.store import SMALL_BYTES, Store
from stoa.config.load import bucket_credentials, known_secrets, state_base
from stoa.config.run import RunConfig
from stoa.contracts.errors import RunMissingError, ServiceError, StoaError

LOG_BYTES: Final = 1_000_000
"""Of each log, its end."""
MOST_LOGS: Final = 50
"""The newest ones."""
EVENTS: Final = ("events.log", "control-events.log")
"""What a worker keeps in its state folder, whoever started it."""
_OURS: Final = re.compile(r"((control-)?events(\.before)?|temporal|bucket|trainer|mac-\d+|worker)\.log")
"""Names of the logs that this program writes: whose else may lie beside a configuration is not known."""
NO_EVENTS: Final = "logs of a trainer or a Mac: none lies here; name the folder that it was started with as --state by --logs"


@dataclass(frozen=True, slots=True)
class Bundled:
    """What was written: its path, the names of its parts, and what is missing, with why."""

    path: str
    parts: tuple[str, ...]
    missing: tuple[str, ...]


def write_bundle(path: Path, config: RunConfig, run: str, log_folders: Sequence[Path], guessed: Sequence[Path] = ()) -> Bundled:
    """Write the zip file. `run`: "" for none; `guessed`: folders as `logs_in` has them. Raises OSError if it cannot be written."""
    folders = (state_base(), *log_folders)
    clean = Redactor(known_secrets((*folders, *guessed))).clean
    home = str(Path.home())
    makers: list[tuple[str, Callable[[], str]]] = [
        ("versions.json", versions),
        ("config.json", lambda: config.model_dump_json(indent=2)),
        ("doctor.json", lambda: _doctor(config)),
    ]
    if run:
        makers += [
            ("run/run.json", lambda: _object(config, keys.run_json(run))),
            ("run/HEAD.json", lambda: _object(config, keys.head(run))),
            ("run/status.json", lambda: _status(config, run)),
            ("run/metrics.jsonl", lambda: _metrics(config, run)),
        ]
    logs = _named_once(logs_in(folders, guessed))
    makers += [(f"logs/{name}", lambda log=log: tail(log)) for name, log in logs]
    parts: list[str] = []
    missing = [] if any(log.name in EVENTS for _, log in logs) else [NO_EVENTS]
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f"{path.name}.new")
    with zipfile.ZipFile(new, "w", zipfile.ZIP_DEFLATED) as file:
        for name, make in makers:
            try:
                text = make()
            except StoaError as problem:
                missing.append(clean(f"{name}: {problem.message}"))
                continue
            except OSError as problem:
                missing.append(f"{name}: {problem.strerror or problem}")
                continue
            file.writestr(clean(name), clean(text).replace(home, "~"))
            parts.append(name)
        if missing:
            file.writestr("missing.txt", "\n".join(missing).replace(home, "~") + "\n")
    new.replace(path)
    return Bundled(str(path), tuple(parts), tuple(missing))


def versions() -> str:
    """This system, this Python, and every installed package."""
    packages = {str(one.metadata["Name"]): one.version for one in metadata.distributions()}
    tree = {"python": python_version(), "system": platform(), "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
    return json.dumps({**tree, "role": installed_role(), "packages": dict(sorted(packages.items()))}, indent=2)


def beside(config: Path | None) -> tuple[Path, ...]:
    """The folders of logs and state beside a configuration, as a demo has them."""
    return () if config is None else tuple(folder for name in ("logs", "state") if (folder := config.resolve().parent / name).is_dir())


def logs_in(folders: Sequence[Path], guessed: Sequence[Path] = ()) -> list[tuple[str, Path]]:
    """Name in the bundle and path of the newest logs beneath some folders, each once; of `guessed`, which nobody named, only our own."""
    found: dict[Path, str] = {}
    for folder in (*folders, *guessed):
        for log in sorted(folder.rglob("*.log")) if folder.is_dir() else ():
            # Databases keep journals of that ending too, under numbers.
            if log.is_symlink() or not log.is_file() or log.stem.isdecimal():
                continue
            if folder in folders or _OURS.fullmatch(log.name):
                found.setdefault(log.resolve(), f"{folder.resolve().name}/{log.relative_to(folder)}")
    newest = sorted(found, key=lambda log: (-log.stat().st_mtime, str(log)))[:MOST_LOGS]
    return sorted((found[log], log) for log in newest)


def _named_once(logs: list[tuple[str, Path]]) -> list[tuple[str, Path]]:
    """Two folders of one name hold logs of one name: the second gets a number."""
    taken: dict[str, int] = {}
    named: list[tuple[str, Path]] = []
    for name, log in logs:
        taken[name] = taken.get(name, 0) + 1
        named.append((name if taken[name] == 1 else f"{name}.{taken[name]}", log))
    return named


def tail(log: Path) -> str:
    """The end of a log, from the beginning of a line on."""
    with log.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - LOG_BYTES))
        data = file.read()
    if size > LOG_BYTES:
        data = data[data.find(b"\n") + 1 :]
    return data.decode("utf-8", "replace")


def _doctor(config: RunConfig) -> str:
    began = time.monotonic()
    role = installed_role()
    found = examine(checks.ALL, scene_of(config, role), advice=checks.ADVICE)
    return checks.as_json(found, time.monotonic() - began)


def _store(config: RunConfig) -> Store:
    return Store(config.bucket, bucket_credentials(config.bucket))


def _object(config: RunConfig, key: str) -> str:
    return _store(config).get(key, max_bytes=SMALL_BYTES).data.decode("utf-8", "replace")


def _status(config: RunConfig, run: str) -> str:
    """What the run's own process tells, and where that is away what bucket and Temporal do."""
    with Control(config.temporal) as control:
        try:
            status, hosts = control.status(run), tuple(member.host for member in control.fleet(run))
            sessions = [asdict(session) for session in control.sessions(run, hosts)]
            return json.dumps({"status": asdict(status), "sessions": sessions}, indent=2)
        except (ServiceError, RunMissingError):
            store = _store(config)
            return json.dumps(facts(Collector(read_run(store, run), store, control).collect()), indent=2)


def _metrics(config: RunConfig, run: str) -> str:
    store = _store(config)
    record = Collector(read_run(store, run), store, None).collect()
    return "".join(json.dumps(row.tree()) + "\n" for row in metric_rows(record))
