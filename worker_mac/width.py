"""How many groups this Mac asks for at once: the least of what memory holds, what pays, and what staleness allows.

A sweep of more groups decodes more tokens a second up to a knee, which `stoa bench` measures, and takes longer; one that
takes so long that its groups are too old when they come is no use, so the Mac asks for fewer. What was learned is kept
in files: the knee by Mac, lengths and the last reduction by run.
"""

import json
import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

import structlog

from worker_mac.memory import USUAL_GROUPS

_log = structlog.get_logger(__name__)

KNEE_FILE: Final = "knee.json"
"""In the state folder; what is in it is told where it is written, in `bench.py`."""
KNEE_FORMAT: Final = 1
LEARNED_FILE: Final = "width.json"
CALM_SWEEPS: Final = 4
"""Sweeps in a row, each at most half as long as it might be, after which one more group is asked for."""


@dataclass(frozen=True, slots=True)
class Learned:
    """What sweeps of a run have shown on this Mac. `mean_tokens`: mean length of an episode; 0 and `most_groups` 0: not yet."""

    mean_tokens: float = 0.0
    most_groups: int = 0
    num_calm: int = 0


def learn(before: Learned, *, groups: int, mean_tokens: float, lag: int, most_lag: int, memory_groups: int) -> Learned:
    """What a sweep of `groups` groups teaches.

    Args:
        before: what was known.
        groups: of the sweep.
        mean_tokens: mean length of its episodes; 0: there were none.
        lag: versions that were published while it was played.
        most_lag: versions of lag that the run plans for.
        memory_groups: what memory holds.
    """
    mean = (before.mean_tokens + mean_tokens) / 2 if before.mean_tokens and mean_tokens else mean_tokens or before.mean_tokens
    after = replace(before, mean_tokens=mean)
    if lag > max(1, most_lag):
        return replace(after, most_groups=max(1, math.floor(groups * max(1, most_lag) / lag)), num_calm=0)
    if not before.most_groups or groups < before.most_groups or 2 * lag > most_lag:
        return replace(after, num_calm=0)
    if before.num_calm + 1 < CALM_SWEEPS:
        return replace(after, num_calm=before.num_calm + 1)
    more = before.most_groups + 1
    return replace(after, most_groups=0 if more >= memory_groups else more, num_calm=0)


def choose_groups(asked: int | None, *, memory_groups: int, knee: int, learned: Learned) -> tuple[int, str]:
    """Groups to ask for, and in words why they are not more. `asked`: the run's setting, None for auto; `knee` 0: not measured.

    An explicit number is asked for as it is: what memory does not hold at once is played as pages become free.
    """
    if asked is not None:
        return asked, "" if memory_groups >= asked else f"memory holds {memory_groups} of {asked} groups at once"
    limits = [(knee or USUAL_GROUPS, "more would not be faster" if knee else ""), (memory_groups, "memory holds no more")]
    if learned.most_groups:
        limits.append((learned.most_groups, "a wider sweep would take longer than staleness allows"))
    groups, reason = min(limits, key=lambda limit: limit[0])
    return max(1, groups), reason


def read_knee(folder: Path, model: str) -> int:
    """The knee that `bench` measured on this Mac for the layout `model`, from its state folder; 0 if there is none."""
    found = _read(folder / KNEE_FILE)
    groups = found.get("knee_groups") if found.get("format") == KNEE_FORMAT and found.get("model") == model else None
    return groups if isinstance(groups, int) and groups > 0 else 0


def read_learned(folder: Path) -> Learned:
    """What was learned in a run, from its folder; nothing if there is none or it is damaged."""
    found = _read(folder / LEARNED_FILE)
    try:
        mean, most, calm = float(found["mean_tokens"]), int(found["most_groups"]), int(found["num_calm"])
    except (KeyError, TypeError, ValueError, OverflowError):
        return Learned()
    return Learned(mean, most, calm) if 0.0 <= mean < math.inf and most >= 0 else Learned()


def write_learned(folder: Path, learned: Learned) -> None:
    """Keep what was learned."""
    _write(folder / LEARNED_FILE, asdict(learned))


def _read(path: Path) -> dict[str, int | float | str]:
    try:
        found = json.loads(path.read_text("ascii"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _write(path: Path, values: dict[str, int | float]) -> None:
    """All or nothing; a disk that takes nothing costs what was learned and no more."""
    part = path.with_suffix(".part")
    try:
        part.write_text(json.dumps(values), "ascii")
        part.replace(path)
    except OSError as error:
        _log.warning("width_not_kept", reason=str(error))
