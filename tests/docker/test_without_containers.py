"""What compose.yml starts, started here without containers: the bucket with its two keys, Postgres with backup and restore.

Temporal's server that speaks to Postgres comes as a container image only: the one here keeps its data in SQLite.
"""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from stoa.bucket.store import Store
from stoa.config.load import Credentials
from stoa.config.run import Bucket
from stoa.contracts.errors import StoaError
from tests.servers import free_ports

DOCKER = Path(__file__).parents[2] / "docker"
SERVICES = yaml.safe_load((DOCKER / "compose.yml").read_text())["services"]
PASSWORD = "of the compose file's user"
OWNER, MACS = Credentials("an-owner", "of-all-of-it"), Credentials("a-mac", "may-only-read")


def healthy(service: str, replaced: dict[str, str], environment: dict[str, str]) -> bool:
    """Is it by its own health check? `replaced`: other ports than in a container."""
    kind, *command = SERVICES[service]["healthcheck"]["test"]
    assert kind == "CMD"
    for old, new in replaced.items():
        command = [word.replace(old, new) for word in command]
    if command[0] == "python":
        command[0] = sys.executable
    return subprocess.run(command, env=environment, capture_output=True, timeout=10).returncode == 0


def until(condition: "object", seconds: float, process: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.2)


def test_the_bucket_of_compose_starts_tells_its_health_and_holds_its_keys_apart(tmp_path: Path) -> None:
    port, master, volume, filer, admin = free_ports(5, reserve_offset=10000)
    words = [word.replace("/data", str(tmp_path)).replace("0.0.0.0", "127.0.0.1") for word in SERVICES["bucket"]["command"]]
    words = [word.replace("8333", str(port)) for word in words]
    others = [f"-master.port={master}", f"-volume.port={volume}", f"-filer.port={filer}", f"-admin.port={admin}"]
    environment = {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "HOME": str(tmp_path),
        "STOA_BUCKET_KEY": OWNER.key,
        "STOA_BUCKET_SECRET": OWNER.secret,
        "STOA_MAC_BUCKET_KEY": MACS.key,
        "STOA_MAC_BUCKET_SECRET": MACS.secret,
    }
    with (tmp_path / "log").open("wb") as log:
        command = [sys.executable, str(DOCKER / "bucket.py"), *words, *others]
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, cwd=tmp_path, start_new_session=True)
    try:
        until(lambda: healthy("bucket", {"8333": str(port)}, environment), 40, process)
        settings = Bucket(endpoint=f"http://127.0.0.1:{port}", name="stoa", head_interval_seconds=0.0)
        owner, mac = Store(settings, OWNER, patience_seconds=20.0), Store(settings, MACS)
        owner.create("runs/demo/run.json", b"{}")
        assert mac.get("runs/demo/run.json", max_bytes=100).data == b"{}"
        with pytest.raises(StoaError):
            mac.create("runs/demo/groups/x", b"")
        assert (tmp_path / "keys.json").stat().st_mode & 0o777 == 0o600
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(5)
    assert not healthy("bucket", {"8333": str(port)}, environment)


@pytest.fixture
def postgres() -> Iterator[dict[str, str]]:
    """A Postgres of the system's packages, whose user `temporal` has a password as in compose; yields what finds it."""
    programs = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    found = str(programs[-1]) if programs else shutil.which("initdb")
    if found is None:
        pytest.skip("no Postgres here: `apt-get install postgresql` brings one")
    folder = Path(tempfile.mkdtemp(prefix="stoa-postgres-"))  # pytest's own folders are closed to other users
    user = {}
    if os.geteuid() == 0:  # Postgres refuses to be root
        user = {"user": "postgres", "group": "postgres", "extra_groups": []}
        shutil.chown(folder, "postgres", "postgres")
    port, data, programs_folder = free_ports(1)[0], folder / "data", Path(found).resolve().parent
    environment = {"PATH": f"{programs_folder}:{os.environ['PATH']}", "LC_ALL": "C", "HOME": str(folder)}
    (folder / "password").write_text(PASSWORD)
    (folder / "password").chmod(0o644)
    made = subprocess.run(
        [found, "-D", str(data), "-U", "temporal", "-A", "scram-sha-256", f"--pwfile={folder / 'password'}", "-N", "-E", "UTF8"],
        env=environment,
        capture_output=True,
        text=True,
        **user,
    )
    assert made.returncode == 0, made.stderr
    command = [str(programs_folder / "postgres"), "-D", str(data), "-p", str(port), "-h", "127.0.0.1", "-k", str(folder), "-F"]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=(folder / "log").open("wb"), **user)
    environment |= {"PGHOST": "127.0.0.1", "PGPORT": str(port), "PGUSER": "temporal", "PGPASSWORD": PASSWORD}
    try:
        until(lambda: healthy("postgres", {}, environment), 30, process)
        yield environment
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(20)
        shutil.rmtree(folder, ignore_errors=True)


def sql(environment: dict[str, str], database: str, text: str) -> str:
    command = ["psql", "-q", "-t", "-A", "-v", "ON_ERROR_STOP=1", "-d", database, "-c", text]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=20).stdout.strip()


def script(environment: dict[str, str], line: str) -> subprocess.CompletedProcess[str]:
    name, *rest = shlex.split(line)
    return subprocess.run(["sh", str(DOCKER / name), *rest], env=environment, capture_output=True, text=True, timeout=40)


def test_backup_and_restore_keep_both_databases_and_fail_whole(postgres: dict[str, str], tmp_path: Path) -> None:
    stranger = script({**postgres, "PGPASSWORD": "another"}, f"backup.sh {tmp_path}")
    assert stranger.returncode != 0 and "password authentication failed" in stranger.stderr
    shutil.rmtree(next(tmp_path.iterdir()))
    both = ("temporal", "temporal_visibility")
    sql(postgres, "postgres", "CREATE DATABASE temporal")
    assert script(postgres, f"backup.sh {tmp_path}").returncode != 0, "one of the two is missing"
    assert [path.name for path in tmp_path.iterdir() if not path.name.endswith(".part")] == []

    sql(postgres, "postgres", "CREATE DATABASE temporal_visibility")
    for name in both:
        sql(postgres, name, f"CREATE TABLE kept (of text PRIMARY KEY, bytes bytea); INSERT INTO kept VALUES ('{name}', '\\x00ff')")
    # What the visibility tables of Temporal ask of a server: an extension, a column made from JSON, an index of both.
    sql(postgres, both[1], "CREATE EXTENSION btree_gin")
    made = "attributes jsonb, run text GENERATED ALWAYS AS (attributes->>'RlRun') STORED"
    sql(postgres, both[1], f"CREATE TABLE seen ({made}); CREATE INDEX seen_run ON seen USING gin (run)")
    sql(postgres, both[1], """INSERT INTO seen VALUES ('{"RlRun": "demo"}')""")
    time.sleep(1.1)  # folders are named by the second
    saved = script(postgres, f"backup.sh {tmp_path}")
    assert saved.returncode == 0, saved.stderr
    folder = Path(saved.stdout.strip())
    assert re.fullmatch(r"\d{8}T\d{6}Z", folder.name) and len(list(folder.iterdir())) == 2
    for name in both:
        sql(postgres, name, "DELETE FROM kept; CREATE TABLE later (n int)")

    refused = script(postgres, f"restore.sh {tmp_path / 'nowhere'}")
    assert (refused.returncode, "backup.sh" in refused.stderr) == (2, True)
    assert sql(postgres, "temporal", "SELECT count(*) FROM pg_tables WHERE tablename = 'later'") == "1", "something was dropped"
    restored = script(postgres, f"restore.sh {folder}")
    assert restored.returncode == 0, restored.stderr
    for name in both:
        assert sql(postgres, name, "SELECT of, encode(bytes, 'hex') FROM kept") == f"{name}|00ff"
        assert sql(postgres, name, "SELECT count(*) FROM pg_tables WHERE tablename = 'later'") == "0"
    sql(postgres, both[1], """INSERT INTO seen VALUES ('{"RlRun": "other"}')""")
    assert sql(postgres, both[1], "SELECT run FROM seen ORDER BY run") == "demo\nother"
    assert sql(postgres, both[1], "SELECT indexname FROM pg_indexes WHERE tablename = 'seen'") == "seen_run"
