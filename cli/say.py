"""How the tool speaks: talk and errors to stderr, data to stdout, a hint after an empty line, and the exit codes.

Knows no command. Imports nothing heavy at the top, so that `--help` stays quick.
"""

import errno
import sys
from enum import IntEnum

from stoa.contracts.errors import StoaError, UsageError


class Exit(IntEnum):
    """What the process ends with."""

    DONE = 0
    FAILED = 1
    WRONG_USE = 2
    STOPPED = 3
    FAULT_FOUND = 4


def talk(line: str = "") -> None:
    """One line for a person."""
    print(line, file=sys.stderr, flush=True)


def data(line: str) -> None:
    """One line for a program."""
    print(line, flush=True)


def error(message: str, hint: str = "") -> None:
    """What happened, to what; then, after an empty line, what to do next. Colour only on a terminal that wants it."""
    from rich.console import Console

    console = Console(stderr=True, highlight=False, soft_wrap=True)
    console.print("[bold red]error[/]:", end=" ")
    console.print(message, markup=False)
    if hint:
        console.print()
        console.print("[bold cyan]hint[/]:", end=" ")
        console.print(hint, markup=False)


def fault(problem: StoaError) -> Exit:
    """Tell an error of ours; returns the exit code it stands for."""
    error(problem.message, problem.hint)
    return Exit.WRONG_USE if isinstance(problem, UsageError) else Exit.FAILED


def system_fault(problem: OSError) -> Exit:
    """Tell that the operating system refused a file or a process: a full disk, a folder that cannot be written."""
    where = f"{problem.filename}: " if problem.filename is not None else ""
    full = problem.errno in (errno.ENOSPC, errno.EDQUOT)
    if isinstance(problem, FileExistsError):
        error(f"{where}a file of that name is there", "name another path")
    else:
        error(f"{where}{problem.strerror or problem}", "make room on the disk" if full else "check the path and who may write there")
    return Exit.FAILED


def bytes_text(num_bytes: float) -> str:
    """A size as people read it: 950 B, 12.3 kB, 4.1 MB, 2.0 GB."""
    if num_bytes < 1000:
        return f"{num_bytes:.0f} B"
    for unit in ("kB", "MB"):
        num_bytes /= 1000
        if num_bytes < 999.95:
            return f"{num_bytes:.1f} {unit}"
    return f"{num_bytes / 1000:.1f} GB"


def counted(number: float, noun: str) -> str:
    """A count with its noun: 1 minute, 8 minutes, 0.5 minutes."""
    return f"{number:g} {noun}" + ("" if number == 1 else "s")


def time_text(seconds: float) -> str:
    """A duration as people read it: 8 s, 2 min 05 s, 3 h 07 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
