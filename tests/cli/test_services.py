"""`stoa services` and the commands that only need servers, against the real ones."""

import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from cli.processes import Household
from cli.services import Ports, free_ports, start_services
from cli.temporal import check_namespace
from stoa.config.load import Credentials
from stoa.contracts.errors import PortTakenError, ServiceUnavailableError, SetupMissingError

CREDENTIALS = Credentials("stoa", "stoa-on-loopback")


@dataclass(frozen=True)
class Server:
    process: subprocess.Popen[str]
    folder: Path
    env: dict[str, str]
    ui_url: str


def stoa(*arguments: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "cli.main", *arguments], capture_output=True, text=True, timeout=50, env=env)


def clean_environment(**more: str) -> dict[str, str]:
    return {**{k: v for k, v in os.environ.items() if not k.startswith(("STOA_", "AWS_"))}, **more}


@pytest.fixture(scope="module")
def services(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("services")
    temporal, ui = free_ports(2)
    (bucket,) = free_ports(1, also_offset=10_000)
    command = [sys.executable, "-m", "cli.main", "services", "--dir", str(folder), "--temporal-port", str(temporal)]
    command += ["--ui-port", str(ui), "--bucket-port", str(bucket)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=clean_environment())
    assert process.stderr is not None
    lines: list[str] = []
    while not any("Ctrl-C" in line for line in lines):
        line = process.stderr.readline()
        assert line, f"services ended: {''.join(lines)}"
        lines.append(line)
    env = clean_environment(
        STOA_TEMPORAL_ADDRESS=f"127.0.0.1:{temporal}", STOA_BUCKET_ENDPOINT=f"http://127.0.0.1:{bucket}", STOA_STATE=str(folder / "state")
    )
    assert f"export STOA_TEMPORAL_ADDRESS=127.0.0.1:{temporal}" in "".join(lines)
    yield Server(process, folder, env, f"http://127.0.0.1:{ui}")
    process.send_signal(signal.SIGINT)
    assert process.wait(20) == 3
    assert not (folder / "processes.json").exists()


def test_temporals_page_answers(services: Server) -> None:
    with urllib.request.urlopen(services.ui_url, timeout=10) as page:
        assert page.status == 200


def test_setup_is_done_once_and_repeated_without_harm(services: Server) -> None:
    for _ in range(2):
        done = stoa("setup", env=services.env)
        assert done.returncode == 0, done.stderr
        assert "namespace default ready" in done.stdout
        assert done.stderr == ""


def test_second_start_on_the_same_ports_is_a_typed_error(services: Server) -> None:
    port = services.env["STOA_TEMPORAL_ADDRESS"].rpartition(":")[2]
    done = stoa("services", "--dir", str(services.folder / "other"), "--temporal-port", port, env=services.env)
    assert done.returncode == 1
    assert f"127.0.0.1:{port}: the port for Temporal is taken" in done.stderr
    assert "--temporal-port" in done.stderr


def test_folder_of_running_services_is_refused_with_where_they_are(services: Server) -> None:
    done = stoa("services", "--dir", str(services.folder), "--temporal-port", "0", "--ui-port", "0", "--bucket-port", "0", env=services.env)
    assert done.returncode == 2
    temporal, bucket = services.env["STOA_TEMPORAL_ADDRESS"], services.env["STOA_BUCKET_ENDPOINT"]
    assert "it runs already, in use by process" in done.stderr
    assert f": Temporal {temporal}, page {services.ui_url}, bucket {bucket}\n" in done.stderr


@pytest.mark.parametrize(
    "command", [("status", "nosuch"), ("pause", "nosuch"), ("report", "nosuch"), ("run", "--resume", "--set", "run=nosuch")]
)
def test_run_that_is_not_there_is_named(services: Server, command: tuple[str, ...]) -> None:
    stoa("setup", env=services.env)
    done = stoa(*command, env=services.env)
    assert done.returncode == 2, done.stderr
    assert "nosuch" in done.stderr.splitlines()[0]
    assert "hint: " in done.stderr


def test_used_run_name_is_refused_and_resume_is_named(services: Server, tmp_path: Path) -> None:
    first = stoa("run", "--detach", "--set", "run=twice", env=services.env)
    assert first.returncode == 0, first.stderr
    for part in ("ends at   96 steps", "stoa stop twice", "an anchor, ", "trainer_gpu.worker"):
        assert part in first.stderr
    second = stoa("run", "--detach", "--set", "run=twice", env=services.env)
    assert second.returncode == 2
    assert "has a run 'twice' already" in second.stderr.splitlines()[0]
    assert "--resume" in second.stderr
    third = stoa("run", "--detach", "--resume", "--set", "run=twice", env=services.env)
    assert "has not stopped" in third.stderr
    assert "hint: its trainer is away: start `python -m trainer_gpu.worker`, which ends" in third.stderr
    fourth = stoa(
        "run", "--detach", "--resume", "--set", "run=twice", "--set", "rollout.groups=4", "--set", "stop.max_steps=8", env=services.env
    )
    assert "rollout.groups: 8 -> 4" in fourth.stderr
    assert "stop.max_steps" not in fourth.stderr.partition("hint")[0]


def test_wrong_secret_is_told_as_access_denied(services: Server) -> None:
    done = stoa("setup", env={**services.env, "STOA_BUCKET_KEY": "stoa", "STOA_BUCKET_SECRET": "wrong-secret"})
    assert done.returncode == 1
    assert "STOA_BUCKET_SECRET" in done.stderr
    assert "wrong-secret" not in done.stderr


def test_no_temporal_is_told_with_how_to_start_one(services: Server) -> None:
    (port,) = free_ports(1)
    done = stoa("run", "--detach", "--set", "run=lonely", env={**services.env, "STOA_TEMPORAL_ADDRESS": f"127.0.0.1:{port}"})
    assert done.returncode == 1
    assert f"127.0.0.1:{port}" in done.stderr
    assert "stoa services" in done.stderr


def test_namespace_that_is_missing_points_to_setup(services: Server) -> None:
    with pytest.raises(SetupMissingError, match="no namespace nosuch"):
        check_namespace(services.env["STOA_TEMPORAL_ADDRESS"], "nosuch")


def test_data_survives_a_restart_on_other_ports(tmp_path: Path) -> None:
    from stoa.bucket.store import Store
    from stoa.config.run import Bucket

    for expected in (None, b"kept"):
        with Household(tmp_path) as house:
            started = start_services(house, tmp_path, tmp_path / "logs", CREDENTIALS, Ports())
            store = Store(Bucket(endpoint=started.bucket_endpoint), CREDENTIALS)
            if expected is None:
                store.create("a", b"kept")
            else:
                assert store.get("a", max_bytes=10).data == expected


def test_server_that_dies_at_once_is_told_with_its_log(tmp_path: Path) -> None:
    (tmp_path / "temporal").mkdir()
    (tmp_path / "temporal" / "temporal.db").write_bytes(b"this is no database" * 100)
    began = time.monotonic()
    with pytest.raises(ServiceUnavailableError) as caught, Household(tmp_path) as house:
        start_services(house, tmp_path, tmp_path / "logs", CREDENTIALS, Ports())
    assert time.monotonic() - began < 30
    assert "temporal: ended with code" in caught.value.message
    assert str(tmp_path / "logs" / "temporal.log") in caught.value.hint


def test_grpc_twin_of_the_bucket_port_is_checked_too(tmp_path: Path) -> None:
    import socket

    (port,) = free_ports(1, also_offset=10_000)
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", port + 10_000))
        holder.listen()
        with pytest.raises(PortTakenError, match=str(port + 10_000)), Household(tmp_path) as house:
            start_services(house, tmp_path, tmp_path / "logs", CREDENTIALS, Ports(bucket=port))
