"""A new user's path, from the documents alone: `python -m benchmarks.new_user --json` installs and goes it in an empty environment.

The commands are those of the `console` blocks of docs/start/one-machine.md, in their order, and then those of other guides that
were not given yet. What a person does between them is done here: wait until there is something to see.
Ports are free ones, told in the environment as the servers say it; nothing else is added.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from cli.services import WEED_GRPC_OFFSET, free_ports
from stoa.bucket import keys
from stoa.bucket.store import Store
from stoa.config.load import SHIPPED, bucket_credentials, load_run

ROOT: Final = Path(__file__).resolve().parents[1]
TOUR: Final = "docs/start/one-machine.md"
BESIDE: Final = ("docs/guides/read-a-run.md", "docs/troubleshooting.md", "docs/guides/rent-a-gpu.md")
"""Guides whose commands want nothing but what the tour has left open."""
EXTRAS: Final = "mac,gpu,local"
LONGEST_SECONDS: Final = 240.0
FOUND_FAULT: Final = 4
"""`stoa doctor` may find something on this machine; that is its work."""


def commands(document: str) -> list[str]:
    """The commands of the `console` blocks of a document, in order."""
    blocks = re.findall(r"^```console\n(.*?)^```", (ROOT / document).read_text("utf-8"), re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.splitlines() if line]


@dataclass
class Desk:
    """Where a new user sits: a folder with configs/, the programs of an environment, and the processes left open."""

    folder: Path
    programs: Path
    log: Callable[[str], None] = lambda _: None
    seconds: dict[str, float] = field(default_factory=dict)
    open: dict[str, "subprocess.Popen[bytes]"] = field(default_factory=dict)

    def __post_init__(self) -> None:
        temporal, ui = free_ports(2)
        (bucket,) = free_ports(1, also_offset=WEED_GRPC_OFFSET)
        self._ports = f"--temporal-port {temporal} --ui-port {ui} --bucket-port {bucket}"
        mine = ("STOA_", "AWS_", "PYTHON", "VIRTUAL_ENV")
        self._environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(mine)},
            "STOA_TEMPORAL_ADDRESS": f"127.0.0.1:{temporal}",
            "STOA_BUCKET_ENDPOINT": f"http://127.0.0.1:{bucket}",
            "STOA_STATE": str(self.folder / "state"),
            "OMP_NUM_THREADS": "1",
        }

    def go(self) -> None:
        """All of it. Raises RuntimeError with what a command said if it fails, TimeoutError if what it promises does not come."""
        tour = commands(TOUR)
        for command in tour:
            self._do(command)
            self._see(command)
        for line in dict.fromkeys(line for document in BESIDE for line in commands(document)):
            if not any(told.startswith(line) for told in tour):
                self._do(line)

    def close(self) -> None:
        """End what was left open, the servers last."""
        for process in reversed(self.open.values()):
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
                try:
                    process.wait(20)
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait(10)

    def asked(self, command: str) -> dict[str, Any]:
        """What a command with --json says."""
        return json.loads(self._run(f"{command} --json").stdout or "{}")

    def hosts(self) -> set[str]:
        """Macs whose groups are in the bucket."""
        settings = load_run(self.folder / "configs" / "demo.toml", environ=self._environment)
        listed = Store(settings.bucket, bucket_credentials(settings.bucket, environ={})).list(keys.groups_prefix(settings.run))
        return {parts.host for _, parts in keys.ours((found.key for found in listed), keys.parse_group)}

    def _do(self, command: str) -> None:
        begun = time.monotonic()
        self.log(command)
        if command.startswith(("stoa services", "python -m ", "stoa join")):
            self._leave_open(command)
        else:
            done = self._run(command)
            if done.returncode and not (command.startswith("stoa doctor") and done.returncode == FOUND_FAULT):
                raise RuntimeError(f"{command}: ended with {done.returncode}\n{done.stdout}{done.stderr}")
        self.seconds[command] = round(time.monotonic() - begun, 2)
        self.log(f"    {self.seconds[command]} s")

    def _run(self, command: str) -> "subprocess.CompletedProcess[str]":
        whole = ["bash", "-c", f'PATH="{self.programs}:$PATH"; {command}']
        return subprocess.run(
            whole, cwd=self.folder, env=self._environment, capture_output=True, text=True, timeout=LONGEST_SECONDS, check=False
        )

    def _leave_open(self, command: str) -> None:
        line = f"{command} {self._ports}" if command == "stoa services" else command
        with (self.folder / f"open-{len(self.open)}.log").open("wb") as log:
            self.open[command] = subprocess.Popen(
                ["bash", "-c", f'PATH="{self.programs}:$PATH"; exec {line}'],
                cwd=self.folder,
                env=self._environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _see(self, command: str) -> None:
        """Wait for what a person would wait for after a command."""
        waits: dict[str, Callable[[], object]] = {
            "stoa services": lambda: b"Ctrl-C stops both" in self._said("stoa services"),
            "stoa run configs/demo.toml --set stop.max_steps=960 --detach": lambda: self.asked("stoa status demo").get("version", 0) >= 1,
            "stoa drain demo second": lambda: self._process("stoa join").poll() is not None,
            "stoa stop demo": lambda: self.asked("stoa status demo").get("state") == "stopped",
        }
        if command.startswith("stoa join"):
            waits[command] = lambda: "second" in self.hosts()
        if command not in waits:
            return
        deadline = time.monotonic() + LONGEST_SECONDS
        while not waits[command]():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{command}: what it promises did not come\n" + "\n".join(self._tails()))
            time.sleep(1.0)
        self.log(f"    and {time.monotonic() - deadline + LONGEST_SECONDS:.2f} s until that was to be seen")

    def _process(self, begins: str) -> "subprocess.Popen[bytes]":
        return next(process for command, process in self.open.items() if command.startswith(begins))

    def _said(self, begins: str) -> bytes:
        number = next(number for number, command in enumerate(self.open) if command.startswith(begins))
        return (self.folder / f"open-{number}.log").read_bytes()

    def _tails(self) -> list[str]:
        return [f"{command}: {self._said(command)[-1500:].decode(errors='replace')}" for command in self.open]


def prepare(folder: Path, configs: Path, *, short: bool) -> None:
    """configs/ as it was shipped, and mine.toml, a copy with another name. short: smaller evaluations of the same run."""
    (folder / "configs").mkdir()
    for path in configs.glob("*.toml"):
        text = path.read_text("utf-8")
        if short:
            text = re.sub(r"^(num_questions(?:_final)?) = \d+$", r"\1 = 16", text, flags=re.MULTILINE)
        (folder / "configs" / path.name).write_text(text, "utf-8")
    mine = (folder / "configs" / "demo.toml").read_text("utf-8").replace('run = "demo"', 'run = "mine"')
    (folder / "mine.toml").write_text(mine, "utf-8")


def outcome(folder: Path) -> dict[str, Any]:
    """What the path left behind in its folder, as far as a program can judge it."""
    report = json.loads((folder / "report" / "report.json").read_text("utf-8"))
    return {
        "steps": report["steps"],
        "audit_clean": report["audit"]["clean"],
        "report_bytes": (folder / "report" / "report.html").stat().st_size,
        "snapshot_bytes": (folder / "live.svg").stat().st_size,
        "export_bytes": sum(path.stat().st_size for path in (folder / "exported").iterdir()),
    }


def install(folder: Path, log: Callable[[str], None]) -> tuple[Path, float]:
    """A wheel of this checkout in an empty environment; its programs and the seconds that took."""
    begun, python = time.monotonic(), folder / "env" / "bin" / "python"
    pip = [str(python), "-m", "pip", "--quiet"]
    for command in (
        [sys.executable, "-m", "venv", str(folder / "env")],
        [*pip, "install", "--upgrade", "pip>=25"],
        [*pip, "wheel", "--no-deps", "--wheel-dir", str(folder), str(ROOT)],
    ):
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    (wheel,) = folder.glob("*.whl")
    log(f"pip install stoa[{EXTRAS}]")
    subprocess.run([*pip, "install", "-c", str(ROOT / "constraints.txt"), f"{wheel}[{EXTRAS}]"], check=True, stdout=subprocess.DEVNULL)
    subprocess.run([*pip, "check"], check=True, stdout=subprocess.DEVNULL)
    return python.parent, time.monotonic() - begun


def main(arguments: Sequence[str] | None = None) -> None:
    """Install, go the path, and print how long each command took."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.new_user", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object on standard output")
    parser.add_argument("--here", action="store_true", help="use this environment, install nothing")
    parser.add_argument("--short", action="store_true", help="smaller evaluations")
    options = parser.parse_args(arguments)

    def log(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    with tempfile.TemporaryDirectory() as scratch:
        base = Path(scratch)
        programs, install_seconds = (Path(sys.executable).parent, 0.0) if options.here else install(base, log)
        folder = base / "work"
        folder.mkdir()
        prepare(folder, SHIPPED / "configs" if options.here else programs.parent / "share" / "stoa" / "configs", short=options.short)
        desk, begun = Desk(folder, programs, log), time.monotonic()
        try:
            desk.go()
            hosts = desk.hosts()
        finally:
            desk.close()
        found = {"install_seconds": round(install_seconds, 1), "seconds": round(time.monotonic() - begun, 1), **outcome(folder)}
        found["num_macs"] = len(hosts)
        found["num_commands"] = len(desk.seconds)
        found["command_seconds"] = desk.seconds
    print(json.dumps(found, indent=None if options.json else 2))


if __name__ == "__main__":
    main()
