"""Where metric rows go: a JSON Lines file always, and by extras a Prometheus page, trackio or wandb.

A sink takes rows and knows nothing of a run's bucket; who follows a run feeds it. What a metric means stands in `metrics.py`.
"""

import importlib
import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Final, Literal, Protocol

from stoa.contracts.errors import MissingExtraError, PortTakenError
from stoa.telemetry.metrics import find

Kind = Literal["step", "version", "evaluation"]
SINKS: Final = ("jsonl", "prometheus", "trackio", "wandb")
_NAME: Final = re.compile(r"[^a-zA-Z0-9_]")


@dataclass(frozen=True, slots=True)
class MetricRow:
    """What one step, version or evaluation measured. `time`: Unix seconds."""

    time: float
    kind: Kind
    step: int
    version: int
    metrics: Mapping[str, float]

    @property
    def key(self) -> tuple[str, int, int]:
        """What makes it the same row again."""
        return (self.kind, self.step, self.version)

    def tree(self) -> dict[str, object]:
        """For JSON; numbers that JSON has no word for are left out."""
        return {**asdict(self), "metrics": {name: value for name, value in self.metrics.items() if math.isfinite(value)}}


class Sink(Protocol):
    """Takes rows, each once, in order of time as far as it is known."""

    def write(self, rows: Iterable[MetricRow]) -> None:
        """Take some rows."""
        ...

    def close(self) -> None:
        """No more will come."""
        ...


class JsonLines:
    """One JSON object a line, added at the file's end."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", encoding="utf-8")

    def write(self, rows: Iterable[MetricRow]) -> None:
        """Each line is there once this returns."""
        for row in rows:
            self._file.write(json.dumps(row.tree()) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class Prometheus:
    """The newest value of every metric on `http://host:port/metrics`, as `stoa_<kind>_<metric>{run="..."}`."""

    def __init__(self, run: str, *, port: int, host: str = "127.0.0.1") -> None:
        """Port 0 picks a free one. Raises MissingExtraError, PortTakenError."""
        self._client: Any = _load("prometheus_client", "prometheus")
        self._registry = self._client.CollectorRegistry()
        self._run = run
        self._gauges: dict[str, Any] = {}
        try:
            self._server, self._thread = self._client.start_http_server(port, addr=host, registry=self._registry)
        except OSError as problem:
            raise PortTakenError(f"port {port} of {host} cannot be used: {problem.strerror}", hint="name another with --port") from None
        self.url = f"http://{host}:{self._server.server_port}/metrics"

    def write(self, rows: Iterable[MetricRow]) -> None:
        """Set the gauges; of several rows the last one stands."""
        for row in rows:
            for name, value in (*row.metrics.items(), ("step", row.step), ("version", row.version)):
                self._gauge(f"stoa_{row.kind}_{_NAME.sub('_', name)}", name).labels(run=self._run).set(value)

    def close(self) -> None:
        """End the page."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _gauge(self, name: str, metric: str) -> Any:
        if name not in self._gauges:
            known = find(metric)
            what = f"{known.what}{f', in {known.unit}' if known.unit else ''}" if known is not None else metric
            self._gauges[name] = self._client.Gauge(name, what, ["run"], registry=self._registry)
        return self._gauges[name]


class Trackio:
    """A run of the local trackio store, which needs no account; `trackio show` opens it."""

    def __init__(self, run: str, settings: Mapping[str, object]) -> None:
        """Raises MissingExtraError."""
        self._trackio: Any = _load("trackio", "trackio")
        self._run: Any = self._trackio.init(project="stoa", name=run, config=dict(settings), embed=False)

    def write(self, rows: Iterable[MetricRow]) -> None:
        """Each row is one entry at its step."""
        for row in rows:
            self._trackio.log(_flat(row), step=row.step)

    def close(self) -> None:
        """Wait until everything is stored."""
        self._trackio.finish()


class Wandb:
    """A wandb run; WANDB_MODE=offline keeps it on this machine."""

    def __init__(self, run: str, settings: Mapping[str, object]) -> None:
        """Raises MissingExtraError."""
        wandb: Any = _load("wandb", "wandb")
        self._run: Any = wandb.init(project="stoa", name=run, config=dict(settings))
        for kind in ("step", "version", "evaluation"):
            self._run.define_metric(f"{kind}/*", step_metric="step")

    def write(self, rows: Iterable[MetricRow]) -> None:
        """Each row is one entry; its step is a value beside the others, since an evaluation comes later than its version."""
        for row in rows:
            self._run.log({**_flat(row), "step": row.step})

    def close(self) -> None:
        """Wait until everything is stored."""
        self._run.finish()


def _flat(row: MetricRow) -> dict[str, float]:
    return {f"{row.kind}/{name}": value for name, value in row.metrics.items() if math.isfinite(value)} | {"version": row.version}


def _load(module: str, extra: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ImportError:
        raise MissingExtraError(f"{extra} is not installed", hint=f"run `pip install 'stoa[{extra}]'`") from None
