"""A whole run on this machine without a model: real servers, a real run, real worker processes, engines that pretend.

Starts, restarts and ends things; what is done to them, and what is measured, is a benchmark's. Each worker may stand
behind a line of its own (`network_link.py`), and all requests to the bucket may pass a proxy that answers with faults.
"""

import json
import shutil
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from benchmarks.fleet_play import Play, make_model_folder
from benchmarks.network_link import Line, Lines
from benchmarks.proxy import FaultProxy
from cli.demo import worker_environment
from cli.launch import Launched, launch
from cli.processes import Child, Household
from cli.services import Ports, Services, start_services
from cli.temporal import Control
from stoa.bucket.store import Store
from stoa.config.load import bucket_credentials
from stoa.config.run import Bucket, RunConfig, Temporal

RUN: Final = "rehearsal"
Tables = Mapping[str, Mapping[str, Any]]
NO_TABLES: Final[Tables] = {}
ENVIRONMENT: Final = {"name": "search", "settings": {"num_entities": 60, "num_held_out": 10}}


def run_config(model: Path, tables: Tables) -> RunConfig:
    """Settings of a run of this kind: small sweeps and steps; `tables` change them table by table."""
    base: dict[str, dict[str, Any]] = {
        "rollout": {"groups": 4, "group_size": 4},
        "learning": {"groups_per_step": 4, "steps_per_version": 2, "starved_seconds": 30.0, "intake_poll_seconds": 0.5},
        "publish": {"anchor_every_versions": 8},
        "evaluation": {"every_versions": 0, "num_questions": 8, "num_questions_final": 8, "questions_a_part": 4},
        "stop": {"max_steps": 0},
        "timeouts": {
            "heartbeat_seconds": 6.0,
            "sweep_seconds": 120.0,
            "step_seconds": 300.0,
            "away_minutes": 5.0,
            "head_poll_seconds": 1.0,
        },
    }
    tree = {name: {**base.get(name, {}), **tables.get(name, {})} for name in {*base, *tables}}
    return RunConfig.model_validate({"run": RUN, "model": str(model), "environment": ENVIRONMENT, **tree})


class Plant:
    """Use as a context; what it started has ended when the block is left."""

    def __init__(self, folder: Path, tables: Tables = NO_TABLES, *, width: int = 64, layers: int = 1, faults: bool = False) -> None:
        """`faults`: put a proxy before the bucket that can answer in its place. `tables`: see `run_config`."""
        self.folder = folder
        self._config = run_config(make_model_folder(folder / "model", width=width, layers=layers), tables)
        self._house = Household(folder)
        self._starting = threading.Lock()
        self.lines = Lines()
        self._with_proxy = faults
        self.proxy: FaultProxy | None = None
        self.pace = folder / "pace"

    def __enter__(self) -> Self:
        self._house.__enter__()
        self.lines.__enter__()
        try:
            self._open()
        except BaseException:
            self.__exit__(*sys.exc_info())
            raise
        return self

    def _open(self) -> None:
        credentials = bucket_credentials(Bucket())
        self.services: Services = start_services(self._house, self.folder / "state", self.folder / "logs", credentials, Ports())
        endpoint = self.services.bucket_endpoint
        if self._with_proxy:
            self.proxy = FaultProxy(endpoint)
            endpoint = self.proxy.start()
        self.config = self._aimed(self.services.temporal_address, self.services.bucket_endpoint)
        self._bucket_address = endpoint.removeprefix("http://")
        self.control = Control(self.config.temporal)
        self.launched: Launched = launch(self.config, self.control, state=self.folder / "state")
        self.store = Store(self.config.bucket, credentials, patience_seconds=30.0)
        self._env = worker_environment(self.folder)
        self.set_pace(1.0)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        servers = [self.services.temporal, self.services.weed] if hasattr(self, "services") else []
        names = {child.name for child in servers}
        self._house.stop([child for child in self._house.children if child.name not in names])
        self._house.__exit__(kind, error, trace)
        if self.proxy is not None:
            self.proxy.stop()
        self.lines.__exit__(kind, error, trace)

    def _aimed(self, temporal: str, endpoint: str) -> RunConfig:
        bucket = self._config.bucket.model_copy(update={"endpoint": endpoint})
        return self._config.model_copy(update={"temporal": Temporal(address=temporal), "bucket": bucket})

    def set_pace(self, step_seconds: float) -> None:
        """How long an optimizer step takes from now on."""
        part = self.pace.with_suffix(".part")
        part.write_text(f"{step_seconds:.3f}\n", "ascii")
        part.replace(self.pace)

    def endpoints(self, line: Line | None) -> tuple[str, str]:
        """Addresses (Temporal, URL of the bucket) as a machine on this line sees them."""
        if line is None:
            return self.services.temporal_address, f"http://{self._bucket_address}"
        return self.lines.lead(line, self.services.temporal_address), f"http://{self.lines.lead(line, self._bucket_address)}"

    def aimed(self, line: Line | None) -> RunConfig:
        """The run's settings with the endpoints of a machine on this line."""
        return self._aimed(*self.endpoints(line))

    def start_trainer(self, name: str, *, line: Line | None = None, control: bool = True) -> Child:
        """A candidate for the run, with or without the control process as its child."""
        command = ("benchmarks.fleet_policy", str(self.pace), self._write_config(name, line), "--state", str(self.folder / "state" / name))
        return self._start(name, *command, *(() if control else ("--no-control",)))

    def start_mac(self, name: str, play: Play, *, line: Line | None = None) -> Child:
        """A Mac."""
        (self.folder / f"{name}.play").write_text(json.dumps(asdict(play)), "utf-8")
        command = ("benchmarks.fleet_mac", str(self.folder / f"{name}.play"), self._write_config(name, line))
        return self._start(name, *command, "--state", str(self.folder / "state" / name), "--host", name)

    def start(self, name: str, module: str, *arguments: str) -> Child:
        """Any other process of a benchmark."""
        return self._start(name, module, *arguments)

    def again(self, child: Child) -> Child:
        """End what is left of a process and start it anew. From any thread."""
        with self._starting:
            return self._house.again(child)

    def acknowledged(self) -> tuple[str, ...]:
        """Keys of all groups that a Mac's process saw the bucket take."""
        files = sorted(self.folder.glob(f"state/*/runs/{RUN}/acknowledged"))
        return tuple(line for file in files for line in file.read_text("ascii").split() if "/groups/" in line)

    def _write_config(self, name: str, line: Line | None) -> str:
        path = self.folder / f"{name}.json"
        path.write_text(self.aimed(line).model_dump_json(), "utf-8")
        return str(path)

    def _start(self, name: str, module: str, *arguments: str) -> Child:
        command = (sys.executable, "-W", "ignore", "-m", module, *arguments)
        return self._house.start(name, command, env=self._env, log=self.folder / "logs" / f"{name}.log")


@contextmanager
def scratch(keep: Path | None = None) -> Iterator[Path]:
    """A folder for a plant: `keep`, or one that is removed if the block ends well."""
    if keep is not None:
        keep.mkdir(parents=True)
        yield keep
        return
    folder = Path(tempfile.mkdtemp(prefix="stoa-"))
    try:
        yield folder
    except BaseException:
        print(f"what is left is in {folder}", file=sys.stderr)
        raise
    shutil.rmtree(folder, ignore_errors=True)
