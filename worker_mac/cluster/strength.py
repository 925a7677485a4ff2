"""What one Mac of a wired set has to give, as it finds it by itself: memory, the speed of that memory, chip and program.

The set asks it of each Mac as it starts, the doctor before: `python -m worker_mac.cluster.strength` prints it as JSON.
"""

import json
import platform
import sys
import time
from dataclasses import asdict
from importlib import metadata
from typing import Final

import mlx.core as mx

from worker_mac.cluster.split import Found, Split
from worker_mac.identity import project_version

_PROBE_BYTES: Final = 64 << 20


def look() -> Found:
    """At the machine this runs on."""
    return Found(recommended_bytes(), int(measured_bandwidth()), chip())


def recommended_bytes() -> int:
    """What macOS recommends for its GPU; 0 elsewhere."""
    return int(mx.device_info()["max_recommended_working_set_size"]) if mx.metal.is_available() else 0


def chip() -> str:
    """The GPU's architecture as MLX names it: Macs of another one round otherwise."""
    return str(mx.device_info().get("architecture", ""))


def measured_bandwidth() -> float:
    """Bytes a second at which memory is read here, to two digits: once through 64 MiB, the best of five."""
    data = mx.zeros((_PROBE_BYTES // 4,), mx.float32)
    mx.eval(data)
    best = float("inf")
    for _ in range(5):
        began = time.perf_counter()
        mx.eval(data.sum())
        best = min(best, time.perf_counter() - began)
    return float(f"{_PROBE_BYTES / best:.1e}")


def program(split: Split) -> dict[str, str]:
    """What must be the same on all Macs. Those that compute the same hidden states must round alike."""
    same = {"mlx": metadata.version("mlx"), "stoa": project_version(), "machine": platform.machine(), "split": split}
    return same | ({"chip": chip()} if split == "tensor" else {})


if __name__ == "__main__":
    sys.stdout.write(json.dumps(asdict(look())) + "\n")
