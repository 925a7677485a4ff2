"""The commands in the documents, and where each is run: in a test, or not here, with what it needs.

In a `console` block stands what a test runs; in `sh` what needs an account, a Mac, a GPU or a container engine, or sets a
machine up. RULES says so command by command; one that no rule knows is a fault of the document.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).parents[2]
SHELLS = ("console", "sh", "bash", "shell", "zsh", "")
PROGRAMS = ("stoa", "python", "python3", "make", "pip", "pipx", "uv", "docker", "temporal", "mlx_lm.", "torchrun", "curl", "brew", "git")
OTHERS_SAY = ("docs/decisions/", "docs/reference/", "docs/log.md", "CHANGELOG.md")
"""Records and generated pages: nobody is told there to type something."""

Need = Literal["test", "account", "mac", "gpu", "engine", "machine"]
"""test: run by one. account: with somebody. engine: of containers. machine: sets one up, and CI is that machine's test."""


@dataclass(frozen=True)
class Command:
    """One command of a document; continued lines are joined."""

    document: str
    block: str
    text: str


@dataclass(frozen=True)
class Rule:
    """What is true of the commands of `document` (a regular expression) that begin like `begins` (another one).

    where: the test that runs it, and a text that this test's file must hold; or in words why it cannot be run here.
    """

    document: str
    begins: str
    need: Need
    where: str
    witness: str = ""


RULES = (
    # Guides whose `console` blocks a test reads and plays from the first to the last line.
    Rule(r"docs/guides/invite-macs\.md:console", "", "test", "tests/loop/invited.py", '"invite-macs.md"'),
    Rule(r"docs/guides/mac-owner\.md:console", "", "test", "tests/cli/test_mac_owner.py", '"mac-owner.md"'),
    Rule(r"docs/guides/temporal-ui\.md:console", "", "test", "tests/workflows/test_commands.py", '"temporal-ui.md"'),
    Rule(r"docs/start/one-machine\.md:console", "", "test", "tests/cli/test_new_user.py", "new_user"),
    Rule(r"docs/guides/rent-a-gpu\.md:console", r"stoa plan fleet$", "test", "tests/packaging/test_wheel.py", '"plan", "fleet"'),
    Rule(r"docs/guides/(read-a-run|rent-a-gpu)\.md:console", "", "test", "tests/cli/test_new_user.py", "new_user"),
    Rule(r"docs/troubleshooting\.md:console", "", "test", "tests/cli/test_new_user.py", "new_user"),
    Rule(
        r"docs/guides/search-papers\.md:console",
        r"stoa config check ",
        "test",
        "tests/unit/environments/test_guides.py",
        "stoa config check",
    ),
    Rule(
        r"docs/guides/search-papers\.md:console",
        r"stoa search (index|ask)",
        "test",
        "tests/unit/environments/test_guides.py",
        "search-papers.md",
    ),
    Rule(r"docs/guides/search-papers\.md:console", r"stoa search ", "test", "tests/unit/cli/test_search.py", '"fetch"'),
    Rule(
        r"docs/guides/search-papers\.md:console",
        r"python -m environments\.papersearchqa",
        "test",
        "tests/unit/cli/test_search.py",
        "invented",
    ),
    Rule(
        r"docs/guides/search-papers\.md:console",
        r"python -m environments\.search\.serve",
        "test",
        "tests/unit/environments/test_search_serve.py",
        "serve",
    ),
    Rule(r"docs/guides/wired-macs\.md:console", r"stoa doctor", "test", "tests/unit/cli/test_doctor_wired.py", "hosts"),
    Rule(r"docs/guides/wired-macs\.md:console", r"stoa join", "test", "tests/loop/test_wired.py", '"--hosts"'),
    Rule(r"docs/guides/warm-start\.md:console", "", "test", "tests/loop/test_warmstart.py", '"warm-start.md"'),
    Rule(r"docs/guides/warm-start\.md:sh", r"stoa warmstart", "mac", "some minutes, a file of one's own, or Macs that are wired"),
    Rule(r"docs/guides/(evaluate|wired-macs)\.md:console", r"stoa eval .* --hosts", "test", "tests/cli/test_eval.py", '"--hosts"'),
    Rule(r"docs/guides/evaluate\.md:console", r"stoa eval environments", "test", "tests/cli/test_eval.py", '"eval", POLICY'),
    Rule(r"docs/guides/evaluate\.md:console", r"stoa eval demo", "test", "tests/cli/test_by_hand.py", '"eval", "demo"'),
    # Everywhere.
    Rule(".*", r"make (install|test)$", "test", ".ci/run", "make test"),
    Rule(".*", r"make demo", "test", "tests/cli/test_demo.py", '"demo"'),
    Rule(".*", r"export [A-Z_]+=\.\.\.", "account", "keys of a bucket and of Temporal"),
    Rule(".*", r"pip install 'stoa\[papers\]'", "test", "tests/packaging/test_wheel.py", "EXTRAS"),
    Rule(".*", r"pip install verifiers", "machine", "with somebody else's package; its form is played by tests/unit/environments"),
    Rule(".*", r"export PATH=", "machine", "of one's shell"),
    Rule(".*", r"pip install 'stoa\[mac\]'|uv tool install 'stoa\[mac\]", "test", "tests/packaging/test_wheel.py", "UV_TOOL_DIR"),
    Rule(".*", r"stoa join TOKEN$", "test", "tests/loop/test_invited.py", "join"),
    # The servers by hand.
    Rule(r"README\.md", r"stoa services", "test", "tests/cli/test_services.py", '"services"'),
    Rule(r"README\.md", r"python -m (trainer_gpu|worker_mac)\.worker", "test", "tests/loop/test_by_hand.py", ".worker"),
    Rule(r"README\.md", r"stoa run configs/demo\.toml", "test", "tests/loop/test_by_hand.py", '"run"'),
    # What wants hardware.
    Rule(r"docs/guides/several-gpus\.md", r"python -m trainer_gpu\.ranks", "test", "tests/unit/trainer_gpu/test_ranks.py", "ranks"),
    Rule(r"docs/guides/rent-a-gpu\.md", r"pip install -c constraints\.txt '\.\[gpu\]'", "test", ".ci/run", "make test"),
    Rule(r"docs/guides/rent-a-gpu\.md", r"python -m pytest tests/gpu", "gpu", "skipped in CI, where there is none"),
    Rule(
        r"docs/guides/rent-a-gpu\.md",
        r"stoa (doctor|canary) mine\.toml",
        "gpu",
        "run on the CPU by tests/unit/cli and tests/cli/test_canary.py",
    ),
    Rule(r"docs/guides/rent-a-gpu\.md", r"python -m trainer_gpu\.worker", "gpu", "run on the CPU by tests/loop/test_by_hand.py"),
    # Containers: their own commands are run by tests/docker/test_without_containers.py.
    Rule(r"docs/guides/deploy\.md:sh", r"docker compose ", "engine", "the file is checked, and what it starts, by tests/docker"),
    Rule(r"docs/guides/deploy\.md:sh", r"printf .*docker/\.env|chmod 600 docker/\.env", "engine", "secrets for the compose file"),
)


def documents() -> list[Path]:
    """README and every page that tells somebody to type something."""
    found = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "environments").rglob("*.md"))]
    return [path for path in found if not str(path.relative_to(ROOT)).startswith(OTHERS_SAY)]


def commands_in(text: str, document: str) -> list[Command]:
    """Those of all blocks that are for a shell; in a block without a language, of the lines that begin with a known program."""
    found: list[Command] = []
    for _, block, body in re.findall(r"^( *)```([a-z]*) *\n(.*?)^\1```", text, re.MULTILINE | re.DOTALL):
        if block not in SHELLS:
            continue
        for line in re.sub(r"\\\n\s*", "", body).splitlines():
            line = re.sub(r"\s+# .*$", "", line).strip().removeprefix("$ ")
            if line and not line.startswith("#") and (block or line.startswith(PROGRAMS)):
                found.append(Command(document, block, line))
    return found


def all_commands() -> list[Command]:
    return [one for path in documents() for one in commands_in(path.read_text("utf-8"), str(path.relative_to(ROOT)))]


def rule_of(command: Command) -> Rule | None:
    """The first rule that knows it."""
    where = f"{command.document}:{command.block}"
    return next((rule for rule in RULES if re.match(rule.document, where) and re.match(rule.begins, command.text)), None)
