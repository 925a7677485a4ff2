"""docs/guides/mac-owner.md: each of its commands, one after another, as its reader would give them; its settings and its words."""

import os
import re
import shlex
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stoa.bucket.invite import BucketDoor, TemporalDoor, write_invite
from stoa.bucket.store import Store
from stoa.config.host import MacHost
from stoa.config.load import PROJECT_ROOT, load_mac_host
from tests.servers import MAC_CREDENTIALS
from tests.unit.worker_mac.publishing import Publishing

GUIDE = (PROJECT_ROOT / "docs" / "guides" / "mac-owner.md").read_text()
# What launchctl's verbs do, in a file of what is loaded; nothing is started.
LAUNCHCTL = """#!{python}
import pathlib, sys
loaded = pathlib.Path({folder!r}) / "loaded"
verb, where = sys.argv[1], sys.argv[2]
if verb == "bootstrap":
    loaded.write_text(sys.argv[3])
elif not loaded.exists():
    sys.exit(113)
elif verb == "bootout":
    loaded.unlink()
else:
    print("\\tpid = 4711\\n\\tlast exit code = 0")
"""


def blocks(kind: str) -> list[str]:
    return re.findall(rf"```{kind}\n(.*?)```", GUIDE, re.DOTALL)


class Home:
    """A new user's home and path, and the token that the user was sent."""

    def __init__(self, folder: Path, token: str) -> None:
        self.folder, self.token = folder, token
        tools = folder / "bin"
        tools.mkdir(parents=True)
        (tools / "launchctl").write_text(LAUNCHCTL.format(python=sys.executable, folder=str(folder)))
        (tools / "launchctl").chmod(0o755)
        (tools / "stoa").write_text(f'#!/bin/sh\nexec {sys.executable} -m cli.main "$@"\n')
        (tools / "stoa").chmod(0o755)
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("STOA_", "AWS_"))}
        self.environment = clean | {"HOME": str(folder), "PATH": f"{tools}:{clean['PATH']}", "OMP_NUM_THREADS": "1"}
        self.state = folder / ".local" / "state" / "stoa" / "mac"

    def start(self, line: str) -> "subprocess.Popen[str]":
        words = [os.path.expanduser(word.replace("~", str(self.folder))) for word in shlex.split(line.replace("TOKEN", self.token))]
        return subprocess.Popen(words, env=self.environment, cwd=PROJECT_ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    def run(self, line: str) -> str:
        process = self.start(line)
        out, err = process.communicate(timeout=100)
        assert process.returncode == 0, f"{line}: {process.returncode}\n{out}{err}"
        return out + err


@pytest.fixture
def home(store: Store, temporal_server: Any, tmp_path: Path) -> Iterator[Home]:
    base = tmp_path / "base"
    base.mkdir()
    for name in ("config.json", "tokenizer.json"):
        (base / name).write_bytes((PROJECT_ROOT / "environments/search/policy" / name).read_bytes())
    published = Publishing(store, base, bucket=store.settings)
    published.publish()
    bucket, key = store.settings, MAC_CREDENTIALS
    token, _ = write_invite(
        published.signer, "demo", "mac-7", seconds=3600.0, temporal=TemporalDoor(temporal_server.address, temporal_server.namespace),
        bucket=BucketDoor(bucket.endpoint, bucket.name, bucket.region, key.key, key.secret),
    )  # fmt: skip
    yield Home(tmp_path / "home", token)


def joined_and_gone(home: Home, line: str) -> str:
    """Run the worker in this window until it has told its session that it is here, then press Ctrl-C."""
    process = home.start(line)
    said: list[str] = []
    assert process.stderr is not None
    for text in process.stderr:
        said.append(text)
        if '"hello_said"' in text:
            break
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    said += process.communicate(timeout=30)[1].splitlines(keepends=True)
    assert process.returncode == 0, "".join(said)
    assert time.monotonic() - began <= 10.0
    return "".join(said)


@pytest.mark.loop
@pytest.mark.timeout(280)
def test_each_command_does_what_the_guide_says(home: Home) -> None:
    lines = [line for block in blocks("console") for line in block.splitlines()]
    expected = [
        "stoa join TOKEN",
        "stoa join --at-login",
        "stoa doctor --role mac",
        "stoa bench",
        "stoa leave",
        f"rm -r ~/{'.local/state/stoa/mac'}",
    ]
    assert lines == expected
    join, at_login, doctor, bench, leave, remove = lines

    said = joined_and_gone(home, join)
    assert "invited to run demo as mac-7" in said
    kept = home.state / "invite"
    assert kept.stat().st_mode & 0o077 == 0
    joined_and_gone(home, join.removesuffix(" TOKEN"))

    agent = home.folder / "Library" / "LaunchAgents" / "run.stoa.worker.plist"
    assert "at each log-in" in home.run(at_login)
    assert home.token[6:30] not in agent.read_text() and MAC_CREDENTIALS.secret not in agent.read_text()

    (home.state / "mac.toml").write_text(blocks("toml")[0])
    looked = home.run(doctor)
    assert "fail" not in {line.split(maxsplit=1)[0] for line in looked.splitlines() if line.strip()}
    assert "it reads versions, and may neither list nor write nor delete" in looked

    assert "knee" in home.run(bench)
    assert (home.state / "knee.json").is_file()
    assert "starts no worker at log-in any more" in home.run(leave)
    assert not agent.exists() and not (home.folder / "loaded").exists()
    home.run(remove)
    assert not home.state.exists()


def test_the_table_of_settings_is_the_one_of_the_code() -> None:
    def shown(value: object) -> str:
        if isinstance(value, bool):
            return str(value).lower()
        if isinstance(value, tuple):
            return str(list(value))
        return f'"{value}"' if isinstance(value, str) else (f"{value:_}" if isinstance(value, int) else f"{value:g}")

    rows = dict(re.findall(r"^\| `(\w+)` \| (`[^`]+` \| .*) \|$", GUIDE, re.MULTILINE))
    assert rows == {name: f"`{shown(field.default)}` | {field.description}" for name, field in MacHost.model_fields.items()}


def test_the_example_of_limits_loads_and_changes_what_it_says(tmp_path: Path) -> None:
    (example,) = blocks("toml")
    path = tmp_path / "mac.toml"
    path.write_text(example)
    allowed = load_mac_host(path)
    assert (allowed.when, allowed.minutes_of_day, allowed.month_bytes) == ("idle_only", (1320, 450), 100_000_000_000)
    assert all(MacHost.model_fields[name].default != value for name, value in tomllib.loads(example).items())


@pytest.mark.parametrize(
    ("words", "place"),
    [
        ("uses this state folder", "worker_mac/identity.py"),
        ("fails its self-test", "worker_mac/selftest.py"),
        ("starts in a row failed soon", "worker_mac/service.py"),
        ("times in a day", "worker_mac/panics.py"),
        ("was good until", "stoa/bucket/invite.py"),
    ],
)
def test_messages_in_the_guide_are_those_of_the_code(words: str, place: str) -> None:
    assert words in GUIDE
    assert words in (PROJECT_ROOT / place).read_text()
