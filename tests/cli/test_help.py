"""`stoa --help` is quick and loads nothing heavy; every command answers to --help and says what it is."""

import re
import resource
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from inspect import signature

import pytest
from cyclopts import App

from cli.examples import EXAMPLES
from cli.main import _COMMANDS, build

HEAVY = (
    "pydantic",
    "numpy",
    "textual",
    "jinja2",
    "markdown_it",
    "pygments",
    "temporalio",
    "boto3",
    "matplotlib",
    "torch",
    "mlx",
    "megatron",
    "worker_mac",
    "trainer_gpu",
    "workflows",
)
NAMES = [name for commands in _COMMANDS.values() for name in commands]


def stoa(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "cli.main", *arguments], capture_output=True, text=True, timeout=50)


def children_seconds() -> float:
    """CPU seconds of all processes that this one has waited for: the wall clock is other programs' too."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_help_loads_no_heavy_module() -> None:
    code = (
        "import sys; from cli.main import run; run(['--help']);"
        f"print([m for m in {HEAVY!r} if any(n == m or n.startswith(m + '.') for n in sys.modules)], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50)
    assert done.stderr.strip() == "[]"
    assert all(name in done.stdout for name in NAMES)


def test_help_takes_half_a_second_of_one_core_at_most_best_of_five() -> None:
    times: list[float] = []
    for _ in range(5):
        began = children_seconds()
        assert stoa("--help").returncode == 0
        times.append(children_seconds() - began)
    assert min(times) <= 0.5


@pytest.mark.parametrize("name", NAMES)
def test_each_command_has_help_that_begins_like_its_line_in_the_list(name: str) -> None:
    done = stoa(name, "--help")
    assert done.returncode == 0
    assert "Usage: stoa " + name in done.stdout
    words = next(commands[name] for commands in _COMMANDS.values() if name in commands)
    first = re.split(r"[,.:;]", words)[0].split()[0]
    assert first in done.stdout


@pytest.mark.parametrize(("given", "meant"), [("dmeo", "demo"), ("statsu", "status")])
def test_mistyped_command_is_wrong_use_and_names_the_nearest(given: str, meant: str) -> None:
    done = stoa(given)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert meant in done.stderr.splitlines()[0]


def leaves(app: App, name: str) -> Iterator[tuple[str, Callable[..., object]]]:
    """Every command that does something, with its function: those of a group by their two words."""
    own = [word for word in app if not word.startswith("-")]
    if own:
        for word in own:
            yield from leaves(app[word], f"{name} {word}")
    else:
        assert app.default_command is not None
        yield name, app.default_command


ACTS = {
    "demo": "its report.json says more",
    "run": "follows; `stoa status --json` tells the same at any moment",
    "services": "runs until Ctrl-C",
    "join": "runs until its Mac leaves",
    "leave": "says yes or no by its exit code",
    "proxy": "runs until Ctrl-C",
    "setup": "says yes or no by its exit code",
    "completion": "prints a script",
    "search fetch": "fetches files",
}


def test_every_command_that_reads_prints_json() -> None:
    """A command either takes --json or stands in the list of those that only act, with why."""
    app = build()
    found = {name: "as_json" in signature(do).parameters for word in NAMES for name, do in leaves(app[word], word)}
    assert {name for name, has in found.items() if not has} == set(ACTS)


def test_mistyped_flag_names_the_nearest() -> None:
    done = stoa("demo", "--worker", "2")
    assert done.returncode == 2
    assert "--workers" in done.stderr
    assert done.stderr.endswith("hint: see `stoa demo --help`\n")


def test_hint_after_a_wrong_use_names_the_command_as_far_as_it_was_known() -> None:
    assert stoa("episode", "show").stderr.endswith("hint: see `stoa episode show --help`\n")
    assert stoa("nonsense").stderr.endswith("hint: see `stoa --help`\n")


def test_set_takes_one_value_so_that_a_file_may_follow() -> None:
    _, bound, _ = build()["run"].parse_args(["--set", "a=1", "--set", "b=2", "x.toml"], exit_on_error=False, print_error=False)
    assert [str(value) for value in bound.args] == ["x.toml"]
    assert bound.kwargs["sets"] == ("a=1", "b=2")


def test_groups_stand_in_the_order_of_use_and_examples_at_the_end() -> None:
    text = stoa("--help").stdout
    places = [text.index(word) for word in ("─ Run ─", "─ Look ─", "─ Set up ─", "Examples:", "stoa export demo out --to mlx")]
    assert places == sorted(places)
    own = stoa("weights", "--help").stdout
    assert "stoa weights verify demo" in own and "stoa demo" not in own
    assert "Examples" not in stoa("leave", "--help").stdout, "a command without examples has nobody else's"


@pytest.mark.parametrize("line", [line for lines in EXAMPLES.values() for line in lines])
def test_each_example_is_a_line_that_the_program_takes(line: str) -> None:
    tokens = shlex.split(re.sub(r" [<>] \S+$", "", line))
    assert tokens[0] == "stoa"
    _, bound, _ = build().parse_args(tokens[1:], exit_on_error=False, print_error=False)
    assert bound is not None


def test_each_example_stands_under_its_own_command() -> None:
    assert set(EXAMPLES) - {""} <= set(NAMES)
    assert all(line.split()[1] == name for name, lines in EXAMPLES.items() for line in lines if name)
