"""Which checks there are, in the order they are told, and how they are told."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Final

from rich.console import Console

from cli import say
from cli.doctor import bucket, machine, model, packages, servers
from cli.doctor.finding import Check, Finding, examine
from cli.doctor.open import installed_role, scene_of, scene_of_mac
from cli.doctor.scene import Scene
from stoa.config.run import RunConfig
from stoa.contracts.errors import StoaError
from worker_mac.invited import Entry

ALL: Final[tuple[tuple[str, Check], ...]] = (
    (packages.NAME, packages.check_versions),
    (machine.WORKER, machine.check_worker),
    (model.MODEL, model.check_model),
    (machine.DISK, machine.check_disk),
    (machine.MEMORY, machine.check_memory),
    (machine.POWER, machine.check_power),
    (machine.PROGRAMS, machine.check_programs),
    (model.SELF_TEST, model.check_self_test),
    (model.KERNELS, model.check_kernels),
    (model.TEMPLATE, model.check_template),
    (servers.TEMPORAL, servers.check_temporal),
    (bucket.BUCKET, bucket.check_bucket),
    (bucket.PERMISSIONS, bucket.check_permissions),
    (servers.CLOCK, servers.check_clock),
    (bucket.BANDWIDTH, bucket.check_bandwidth),
    (servers.OUTBOUND, servers.check_outbound),
)
ADVICE: Final = frozenset({machine.POWER, machine.PROGRAMS, bucket.BANDWIDTH})
"""What warns at most."""
BEFORE_RUN: Final = (packages.NAME, machine.DISK, model.TEMPLATE, servers.CLOCK)
"""What `stoa run` does not find out by itself a moment later."""
BEFORE_JOIN: Final = (packages.NAME, machine.WORKER, machine.DISK, machine.MEMORY, machine.POWER, machine.PROGRAMS)
"""A worker waits for servers, and tests MLX itself."""
BEFORE_WIRED: Final = tuple(name for name in BEFORE_JOIN if name != machine.MEMORY)
"""A set has more memory than this Mac."""
SHORT_SECONDS: Final = 4.0
_COLOURS: Final = {"pass": "green", "warn": "yellow", "fail": "red"}


def chosen(names: Sequence[str]) -> tuple[tuple[str, Check], ...]:
    """The checks of these names."""
    return tuple(one for one in ALL if one[0] in names)


def fit_for_run(config: RunConfig) -> bool:
    """The short form before a run: tells what is not as it should be. False if something does not work."""
    role = installed_role()
    return _fit(BEFORE_RUN, scene_of(config, "gpu" if role in ("gpu", "all") else "home"), "stoa run")


def fit_for_join(entry: Entry, state: Path) -> bool:
    """The short form before a Mac's worker is started. Raises ConfigError for a mac.toml that cannot be read."""
    scene = scene_of_mac(entry, state)
    _ = scene.allowed
    return _fit(BEFORE_JOIN, scene, "stoa join")


def _fit(names: Sequence[str], scene: Scene, command: str) -> bool:
    found = [one for one in examine(chosen(names), scene, SHORT_SECONDS, ADVICE) if one.verdict != "pass"]
    tell(found, Console(stderr=True, highlight=False, soft_wrap=True))
    fit = all(one.verdict != "fail" for one in found)
    if not fit:
        say.error("this machine is not fit for it", f"`stoa doctor` looks at everything; `{command} --no-doctor` goes on all the same")
    return fit


def config_finding(problem: StoaError) -> Finding:
    """A configuration that cannot be read."""
    return Finding("config", "fail", problem.message, problem.hint or "correct the file")


def tell(found: Sequence[Finding], console: Console) -> None:
    """One line a finding, and under it what to do."""
    width = max((len(one.name) for one in found), default=0)
    for one in found:
        console.print(f"[{_COLOURS[one.verdict]}]{one.verdict}[/]  {one.name:{width}}  ", end="")
        console.print(one.found, markup=False)
        if one.fix:
            console.print(f"      {'':{width}}  fix: {one.fix}", markup=False)


def as_json(found: Sequence[Finding], seconds: float) -> str:
    """For programs."""
    worst = next((verdict for verdict in ("fail", "warn") if any(one.verdict == verdict for one in found)), "pass")
    return json.dumps({"verdict": worst, "seconds": round(seconds, 2), "checks": [asdict(one) for one in found]}, indent=2)
