"""The two local servers: `temporal server start-dev` and the S3 server `weed mini`, both on loopback only.

Picks ports, starts, waits until real calls work. Which command wants them, and how long, is the command's business.
"""

import json
import os
import random
import shutil
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple
from urllib.parse import urlsplit

import psutil

from cli.processes import FILE_NAME, Child, Household, Identity, listed_in
from cli.temporal import check_namespace
from stoa.bucket.keys import MAC_READS
from stoa.bucket.store import Store
from stoa.config.load import Credentials, child_environment, load_run, mac_credentials
from stoa.config.run import Bucket
from stoa.contracts.errors import MissingExtraError, PortTakenError, ServiceError, ServiceUnavailableError, UsageError

TEMPORAL_PORT: Final = 7233
UI_PORT: Final = 8233
BUCKET_PORT: Final = 8333
WEED_GRPC_OFFSET: Final = 10_000
"""The S3 server also takes each of its ports + this."""
READY_SECONDS: Final = 40.0
_FREE_PORTS: Final = range(11_000, 22_000)
"""With and without the offset below 32768, from where systems take ports for outgoing connections by themselves."""
_ATTEMPTS: Final = 3
_HOST: Final = "127.0.0.1"
_PROBE_KEY: Final = "probe"
_SHOWN: Final = (("temporal", "Temporal ", "--port"), ("temporal", "page http://", "--ui-port"), ("weed", "bucket http://", "-s3.port"))
"""Of each server, what people call an address and the flag that says its port."""


class Ports(NamedTuple):
    """Ports a person sees; the others are picked free. 0 picks these too."""

    temporal: int = 0
    ui: int = 0
    bucket: int = 0


def of_demo(folder: Path) -> tuple[Ports, str]:
    """Where the servers of a demo were, as its config.json tells (Temporal's page had any port), and its run's name.

    Raises UsageError for a folder without a demo's state, ConfigError for a config.json that is none.
    """
    config = folder / "config.json"
    if not config.is_file() or not (folder / "state" / "bucket").is_dir():
        raise UsageError(f"{folder}: no demo's folder: it has no config.json with state/bucket beside it", hint="`stoa demo` makes one")
    settings = load_run(config, environ={})
    temporal, bucket = urlsplit(f"//{settings.temporal.address}").port, urlsplit(settings.bucket.endpoint).port
    return Ports(temporal or 0, 0, bucket or 0), settings.run


def refuse_running(folder: Path) -> None:
    """Raise UsageError, with where they listen, if the servers of `folder` run already. Raises FormatError."""
    path = folder / FILE_NAME
    if not path.is_file():
        return
    owner, children = listed_in(path)
    commands = {child.name: _command_of(child) for child in children if child.alive}
    found = [
        f"{what}{_HOST}:{words[words.index(flag) + 1]}" for name, what, flag in _SHOWN if flag in (words := commands.get(name, []))[:-1]
    ]
    if owner.alive and found:
        raise UsageError(
            f"{folder}: it runs already, in use by process {owner.pid}: {', '.join(found)}",
            hint="use these, or stop that process, or choose another folder",
        )


def _command_of(child: Identity) -> list[str]:
    """Its words, `--flag=value` as two."""
    try:
        return [part for word in psutil.Process(child.pid).cmdline() for part in word.split("=", 1)]
    except psutil.Error:
        return []


@dataclass(frozen=True, slots=True)
class Services:
    """Running servers."""

    temporal_address: str
    ui_url: str
    bucket_endpoint: str
    temporal: Child
    weed: Child


def free_ports(count: int, *, also_offset: int = 0) -> tuple[int, ...]:
    """`count` different free loopback ports, each with port + `also_offset` free as well."""
    found: list[int] = []
    candidates = random.SystemRandom()
    for _ in range(10_000):
        port = candidates.choice(_FREE_PORTS)
        if port not in found and _is_free(port) and (not also_offset or _is_free(port + also_offset)):
            found.append(port)
        if len(found) == count:
            return tuple(found)
    raise PortTakenError(f"no {count} free ports on {_HOST}", hint="end what holds them and try again")


@dataclass(frozen=True, slots=True)
class Keys:
    """Who may use the local bucket: its owner for everything, invited Macs to read what they need."""

    owner: Credentials
    macs: Credentials

    def document(self) -> str:
        """As the S3 server reads it."""
        who = (("owner", self.owner, ["Admin"]), ("macs", self.macs, [f"Read:*/{pattern}" for pattern in MAC_READS]))
        identities = [
            {"name": name, "credentials": [{"accessKey": one.key, "secretKey": one.secret}], "actions": actions}
            for name, one, actions in who
        ]
        return json.dumps({"identities": identities})


def start_services(house: Household, folder: Path, logs: Path, credentials: Credentials, ports: Ports) -> Services:
    """Start both servers with their data under `folder` and wait until both answer.

    The bucket also knows a key for invited Macs, which may only read: `mac_credentials` says which.

    Raises PortTakenError for a port somebody else has, MissingExtraError if a program is not installed,
    ServiceUnavailableError if one ends or does not answer within `READY_SECONDS`.
    """
    for attempt in range(1, _ATTEMPTS + 1):
        before = house.children
        try:
            return _start_both(house, folder, logs, credentials, ports)
        except ServiceUnavailableError:
            # Between choosing a free port and taking it somebody else may have: choose again.
            house.stop([child for child in house.children if child not in before])
            if attempt == _ATTEMPTS:
                raise
    raise AssertionError


def start_bucket(house: Household, folder: Path, logs: Path, credentials: Credentials) -> str:
    """Start the S3 server alone, on free ports, and wait until it answers; returns its endpoint."""
    port, *other = _bucket_ports(Ports())
    weed = _start_weed(house, folder, logs, credentials, port, other)
    endpoint = f"http://{_HOST}:{port}"
    store = Store(Bucket(endpoint=endpoint, head_interval_seconds=0.0), credentials)
    _wait(weed, time.monotonic() + READY_SECONDS, lambda: _writes_work(store))
    return endpoint


def _start_both(house: Household, folder: Path, logs: Path, credentials: Credentials, ports: Ports) -> Services:
    temporal_port, ui_port, *temporal_other = _temporal_ports(ports)
    bucket_port, *bucket_other = _bucket_ports(ports)
    temporal = _start_temporal(house, folder / "temporal", logs, temporal_port, ui_port, temporal_other)
    weed = _start_weed(house, folder / "bucket", logs, credentials, bucket_port, bucket_other)
    services = Services(
        temporal_address=f"{_HOST}:{temporal_port}",
        ui_url=f"http://{_HOST}:{ui_port}",
        bucket_endpoint=f"http://{_HOST}:{bucket_port}",
        temporal=temporal,
        weed=weed,
    )
    deadline = time.monotonic() + READY_SECONDS
    _wait(temporal, deadline, lambda: check_namespace(services.temporal_address, "default"))
    bucket = Bucket(endpoint=services.bucket_endpoint, head_interval_seconds=0.0)
    store = Store(bucket, credentials)
    _wait(weed, deadline, lambda: _writes_work(store))
    return services


def program(name: str) -> str:
    """Path of an installed program: beside this Python first, then on PATH. Raises MissingExtraError."""
    beside = Path(sys.executable).with_name(name)
    found = str(beside) if beside.is_file() else shutil.which(name)
    if found is None:
        raise MissingExtraError(f"the program `{name}` is not installed", hint="run `pip install 'stoa[local]'`")
    return found


def _writes_work(store: Store) -> None:
    # The port answers, and even makes buckets, a moment before objects can be written.
    store.ensure_bucket()
    store.create(_PROBE_KEY, b"ready", kind="probe")
    store.delete([_PROBE_KEY])


def _temporal_ports(ports: Ports) -> tuple[int, int, int, int]:
    http, metrics, temporal, ui = free_ports(4)
    temporal = _given(ports.temporal, temporal, "Temporal", "--temporal-port")
    return temporal, _given(ports.ui, ui, "the Temporal UI", "--ui-port"), http, metrics


def _bucket_ports(ports: Ports) -> tuple[int, ...]:
    bucket, *others = free_ports(5, also_offset=WEED_GRPC_OFFSET)
    bucket = _given(ports.bucket, bucket, "the bucket", "--bucket-port")
    if ports.bucket and not _is_free(bucket + WEED_GRPC_OFFSET):
        raise PortTakenError(
            f"{_HOST}:{bucket + WEED_GRPC_OFFSET}: taken, and the bucket on port {bucket} needs it too",
            hint="choose another --bucket-port, or 0 for a free one",
        )
    return bucket, *others


def _start_temporal(house: Household, folder: Path, logs: Path, port: int, ui_port: int, other: Sequence[int]) -> Child:
    folder.mkdir(parents=True, exist_ok=True)
    command = [
        program("temporal"), "server", "start-dev", "--ip", _HOST, "--port", str(port),
        "--http-port", str(other[0]), "--metrics-port", str(other[1]), "--ui-port", str(ui_port), "--ui-disable-news-fetch",
        "--log-level", "error", "--db-filename", str(folder / "temporal.db"),
        "--sqlite-pragma", "journal_mode=WAL", "--sqlite-pragma", "synchronous=NORMAL",
    ]  # fmt: skip
    env = child_environment({"TEMPORAL_VERSION_CHECK_DISABLED": "1", "GOMAXPROCS": "2"})
    return house.start("temporal", command, env=env, log=logs / "temporal.log")


def _start_weed(house: Household, folder: Path, logs: Path, credentials: Credentials, port: int, other: Sequence[int]) -> Child:
    folder.mkdir(parents=True, exist_ok=True)
    # The server remembers the flags of its last start; ports of then may be taken now.
    (folder / "mini.options").unlink(missing_ok=True)
    master, volume, filer, admin = other
    keys = folder / "keys.json"
    keys.unlink(missing_ok=True)
    with os.fdopen(os.open(keys, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        file.write(Keys(credentials, mac_credentials(Bucket())).document())
    command = [
        program("weed"), "mini", f"-dir={folder}", f"-ip={_HOST}", f"-ip.bind={_HOST}", f"-s3.port={port}",
        f"-master.port={master}", f"-volume.port={volume}", f"-filer.port={filer}", f"-admin.port={admin}",
        "-admin.ui=false", "-webdav=false", "-s3.port.iceberg=0", "-s3.port.lance=0", "-master.telemetry=false",
        f"-s3.config={keys}",
    ]  # fmt: skip
    env = child_environment({"GOMAXPROCS": "2"}, without=("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"))
    return house.start("weed", command, env=env, log=logs / "bucket.log")


def _given(wanted: int, free: int, what: str, flag: str) -> int:
    if not wanted:
        return free
    if not _is_free(wanted):
        raise PortTakenError(
            f"{_HOST}:{wanted}: the port for {what} is taken", hint=f"end what uses it, or choose another {flag} (0: a free one)"
        )
    return wanted


def _is_free(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((_HOST, port))
        except OSError:
            return False
    return True


def _wait(child: Child, deadline: float, call: Callable[[], None]) -> None:
    """Repeat a real call until it works. Raises ServiceUnavailableError with the end of the server's log."""
    while True:
        try:
            return call()
        except ServiceError as problem:
            if child.exit_code is not None:
                raise ServiceUnavailableError(
                    f"{child.name}: ended with code {child.exit_code} before it answered\n{child.last_lines()}",
                    hint=f"its log is {child.log}",
                ) from None
            if time.monotonic() > deadline:
                raise ServiceUnavailableError(
                    f"{child.name}: did not answer within {READY_SECONDS:.0f} s ({problem.message})", hint=f"its log is {child.log}"
                ) from None
            time.sleep(0.1)
