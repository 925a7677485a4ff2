"""One process of a warm start: `python -m worker_mac.warmstart SETTINGS [--resume]`, started by `stoa warmstart` or mlx.launch.

SETTINGS is the JSON of `settings.Settings`, or `@FILE` with it. Events are JSON lines on standard output, rank 0's and any
rank's fault; exit codes are those of the command.
"""

import argparse
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import structlog

from stoa.contracts.errors import StoaError, UsageError
from stoa.telemetry import log
from worker_mac.warmstart.ranks import Ranks
from worker_mac.warmstart.run import warm_start
from worker_mac.warmstart.settings import Settings

_GO_ON = "see to the disk and the memory; the same command with --resume goes on from the last saved state"
logger = structlog.get_logger(__name__)
DONE, FAILED, WRONG_USE, STOPPED = 0, 1, 2, 3


def main(arguments: list[str] | None = None) -> int:
    """Run this rank; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m worker_mac.warmstart", description=__doc__)
    parser.add_argument("settings", help="JSON, or @FILE")
    parser.add_argument("--resume", action="store_true", help="go on from the saved state")
    asked = parser.parse_args(arguments)
    log.configure(level="warning", json_lines=False)
    stop, ranks = _stop_signal(), None
    try:
        text = Path(asked.settings[1:]).read_text(encoding="utf-8") if asked.settings.startswith("@") else asked.settings
        settings = Settings.from_json(text)
        ranks = Ranks.join(settings.num_ranks, wait_seconds=settings.wait_seconds)
        result = warm_start(settings, ranks, _say if ranks.rank == 0 else _say_nothing, resume=asked.resume, stop=stop)
    except StoaError as error:
        usage = isinstance(error, UsageError)
        _say("fault", {"message": error.message, "hint": error.hint, "usage": usage, "unmet": ranks is None and not usage})
        return WRONG_USE if usage else FAILED
    except (OSError, RuntimeError) as error:  # MLX says so of a full disk and of memory that it does not get
        logger.exception("warm_start_broke_off")
        _say("fault", {"message": f"{type(error).__name__}: {error}", "hint": _GO_ON, "usage": False, "unmet": False})
        return FAILED
    return STOPPED if result.stopped else DONE


def _say(event: str, facts: dict[str, object]) -> None:
    try:
        sys.stdout.write(json.dumps({"event": event, **facts}) + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        # Whoever started this is gone: save and end, as if it had asked.
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - until the process ends
        signal.raise_signal(signal.SIGTERM)


def _say_nothing(event: str, facts: dict[str, object]) -> None:
    """Rank 0 has said it."""


def _stop_signal() -> Callable[[], bool]:
    """Whether the process was asked to end; it ends after the present step, with its state saved."""
    asked: list[int] = []

    def note(number: int, _frame: FrameType | None) -> None:
        asked.append(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, note)
    return lambda: bool(asked)


if __name__ == "__main__":
    sys.exit(main())
