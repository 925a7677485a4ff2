"""The command `stoa`: the table of commands, and the edge where errors become messages and exit codes.

Each command is one file under `cli/commands`, imported when it is called: `stoa --help` loads none of them.
"""

import contextlib
import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType
from typing import Final, NoReturn

from cyclopts import App, CycloptsError, Group, Parameter

from cli import say
from cli.examples import epilogue
from cli.say import Exit
from stoa.contracts.errors import StoaError

_COMMANDS: Final = {
    "Run": {
        "demo": "Run everything on this machine: servers, trainer, Macs, the small search task.",
        "run": "Start a run, or go on with a stopped one, and follow it.",
        "pause": "Pause a run: Macs finish their group, the trainer waits.",
        "resume": "Undo a pause.",
        "stop": "End a run after its present step, with a last evaluation.",
        "drain": "Let a run use up what is on the way and end, or let one Mac leave.",
        "quarantine": "Train on nothing more of a Mac and let it stop; its owner is told why.",
        "anchors": "Change how often a run publishes full weights.",
    },
    "Look": {
        "status": "How a run is, what it waits for, and each Mac.",
        "live": "Watch a run, its Macs, bandwidth and alarms on the whole terminal; pause it, or drain a Mac, by key.",
        "fleet": "The Macs of a run, the fastest first, and why the slowest is slow.",
        "episode": "Read what a Mac played: turns, tool calls, rewards, which tokens were learned from.",
        "eval": "How good versions, or a checkpoint, are on held-out questions: show, make and compare evaluations.",
        "report": "Write report.json, metrics.jsonl, report.html and plots of a run.",
        "metrics": "Give a run's metrics to standard output, a file, a Prometheus page, trackio or wandb.",
        "export": "Make a folder of a run's weights that other tools open.",
        "weights": "Look at, check, compare and clear the published weights of a run.",
    },
    "Set up": {
        "services": "Start a local Temporal and a local bucket.",
        "join": "Let this Mac generate rollouts for a run: in this window, or at each log-in.",
        "leave": "Stop this Mac's worker and start it at no further log-in; its state stays.",
        "invite": "Print a token that lets a friend's Mac join a run.",
        "revoke": "Let an invited Mac take part no longer.",
        "proxy": "Stand before Temporal for invited Macs.",
        "doctor": "Check this machine and its servers: each check passes, warns or fails, and says how to mend it.",
        "warmstart": "Teach a policy by demonstrations, on one Mac or several, before a run starts from it.",
        "bundle": "Pack logs, versions, settings and the doctor's findings for who helps; secrets are removed.",
        "bench": "Measure tokens a second by width on this Mac and keep the width from which more groups hardly help.",
        "setup": "Make namespaces, search attributes and the bucket; safe to repeat.",
        "config": "Check a configuration file.",
        "plan": "Work out what fits before hiring a machine.",
        "search": "Fetch, clean, index and look at the papers and questions of PaperSearchQA.",
        "canary": "Check, before a long run, that nothing moves at learning rate 0.",
        "completion": "Print or install what makes a shell complete commands and flags.",
    },
}
_WITH_COMMANDS: Final = frozenset(("bench", "config", "episode", "plan", "search", "weights"))
"""Commands under which others stand: each says in its own file how its help ends."""
_WHAT: Final = "RL post-training where Macs generate every rollout and one GPU box learns."


def build() -> App:
    """The application with all commands, none of them imported."""
    app = App(
        name="stoa",
        help=_WHAT,
        help_epilogue=epilogue(""),
        version=_version,
        result_action="return_value",
        help_format="plaintext",  # anything else loads a parser of Markdown, a third of the time that --help takes
        suppress_keyboard_interrupt=False,
        default_parameter=Parameter(negative_bool="", negative_iterable=""),
    )
    for place, (title, commands) in enumerate(_COMMANDS.items()):
        group = Group(title, sort_key=place)
        for name, text in commands.items():
            own = {} if name in _WITH_COMMANDS else {"help_epilogue": epilogue(name)}
            app.command(f"cli.commands.{name}:{name}", name=name, help=text, group=group, **own)
    return app


def main(tokens: Sequence[str] | None = None) -> NoReturn:
    """Run one command and exit with its code."""
    signal.signal(signal.SIGTERM, _interrupt)
    code = run(sys.argv[1:] if tokens is None else tokens)
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.flush()
        sys.stderr.flush()
    # Temporal's runtime has threads that may still call into Python; an interpreter that is being taken down aborts then.
    os._exit(code)


def run(tokens: Sequence[str]) -> Exit:
    """Run one command; every error becomes a message on stderr and a code."""
    try:
        if not {"--help", "-h", "--version"} & set(tokens):
            from stoa.telemetry import log

            log.configure(level="warning", json_lines=False)
        result = build()(tokens, exit_on_error=False, print_error=False)
    except CycloptsError as problem:
        say.error(_usage_text(problem), f"see `{' '.join(('stoa', *(problem.command_chain or ()), '--help'))}`")
        return Exit.WRONG_USE
    except StoaError as problem:
        return say.fault(problem)
    except KeyboardInterrupt:
        say.talk("stopped")
        return Exit.STOPPED
    except BrokenPipeError:
        return Exit.FAILED
    except OSError as problem:
        return say.system_fault(problem)
    except Exception as problem:  # noqa: BLE001 - the edge of the program
        say.error(f"{type(problem).__name__}: {problem}", "this is a fault of the program: the lines below say where")
        import traceback

        traceback.print_exc()
        return Exit.FAILED
    return result if isinstance(result, Exit) else Exit.DONE


def _usage_text(problem: CycloptsError) -> str:
    return " ".join(str(problem).split())


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("stoa")
    except PackageNotFoundError:
        return "not installed"


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    main()
