"""Does this MLX compute rightly on this machine? Asked before a run is joined, and by `stoa doctor` in a process of its own.

Faults of all these kinds have shipped in public versions: rows of a batch that disturb each other, arrays that are
copied where they should be shared, wrong arithmetic. Nothing here needs a run, weights or a network.

    python -m worker_mac.selftest      prints a `Verdict` as JSON, exits 1 if this MLX computes wrongly
"""

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Final

import mlx.core as mx

from metal.check import Verdict as KernelVerdict
from stoa.contracts.errors import WeightsError
from stoa.telemetry import log as telemetry
from worker_mac import fingerprint
from worker_mac.ending import leave
from worker_mac.forced import check_appends, check_batching
from worker_mac.model import Model

MAX_DIFFERENCE: Final = 1e-3
"""In nats, of a logprob from exact arithmetic: far above fp32's rounding, far below any wrong result."""
_HINT: Final = "install the MLX that the extra `mac` names"


@dataclass(frozen=True, slots=True)
class Finding:
    """One test: its name, and what is wrong; "" for nothing."""

    name: str
    fault: str = ""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What was found. `fingerprint`: of this MLX on this machine. `memory_bytes`: what the system recommends for its GPU."""

    findings: tuple[Finding, ...]
    fingerprint: str = ""
    difference: float = 0.0
    """Largest distance of a logprob of the fixed model from exact arithmetic, in nats."""
    device: str = ""
    memory_bytes: int = 0
    kernels: tuple[KernelVerdict, ...] = ()
    """What became of each Metal kernel; one that disagrees is no fault, plain operations take its place."""

    @property
    def fault(self) -> str:
        """All that is wrong; "" for nothing."""
        return "; ".join(f"{finding.name}: {finding.fault}" for finding in self.findings if finding.fault)


def run(make: Callable[[], Model] = fingerprint.fixed_model) -> Verdict:
    """Test this machine. `make` gives the fixed model."""
    try:
        model = make()
    except WeightsError as fault:
        return Verdict((Finding("weights in place", fault.message),))
    values = fingerprint.logprobs(model)
    far = fingerprint.difference(values)
    wrong = "" if far <= MAX_DIFFERENCE else f"a logprob is {far:.3g} nats from exact arithmetic"
    device, memory_bytes = _device()
    return Verdict(
        (
            Finding("weights in place"),
            Finding("rows of a batch", _fault_of(lambda: check_batching(model))),
            Finding("pages in place", _fault_of(lambda: check_appends(model))),
            Finding("arithmetic", wrong),
        ),
        fingerprint.name_of(values),
        far,
        device,
        memory_bytes,
        model.verdicts,
    )


def require(verdict: Verdict) -> str:
    """The fingerprint of a machine that computes rightly. Raises WeightsError with all that is wrong."""
    if verdict.fault:
        raise WeightsError(f"this MLX fails its self-test and may not join: {verdict.fault}", hint=_HINT)
    return verdict.fingerprint


def _fault_of(check: Callable[[], None]) -> str:
    try:
        check()
    except WeightsError as fault:
        return fault.message
    return ""


def _device() -> tuple[str, int]:
    if not mx.metal.is_available():
        return "cpu", 0
    info = mx.device_info()
    return str(info.get("device_name", "gpu")), int(info["max_recommended_working_set_size"])


def main() -> int:
    """Print the verdict, log to stderr; returns the exit code."""
    telemetry.configure()
    verdict = run()
    sys.stdout.write(json.dumps(asdict(verdict) | {"fault": verdict.fault}) + "\n")
    return 1 if verdict.fault else 0


if __name__ == "__main__":
    leave(main())
