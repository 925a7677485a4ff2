"""The command line as a person meets it: how soon it helps, whether it ends cleanly, whether it names what is wrong in a file.

    python -m benchmarks.cli --json

Keys: `help_seconds`, the best of five calls of `stoa --help`, each a process of its own, beside `python_seconds`, the same of
an interpreter that does nothing, and `help_cpu_seconds`, the processor's time of one of the five, which other work on the machine
hardly touches; `num_clean_exits`, of `num_status_calls` calls of `stoa status` on a live run (a real
Temporal, a real bucket, the run's control process; no trainer and no Mac) those that ended with 0 and without a word on standard
error; `config_faults_named`, of `config_faults_planted` faults of one file those that `stoa config check` names by line and key
in one answer, with what was meant where that can be told.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from cli.processes import Household
from cli.services import Ports, start_services
from stoa.config.load import Credentials, child_environment
from stoa.contracts.errors import ServiceUnavailableError

RUN = "cli-benchmark"
READY_SECONDS = 60.0
HELP_CALLS = 5
SECRETS = ("STOA_SIGNING_KEY", "STOA_TEMPORAL_API_KEY", "STOA_TEMPORAL_CA", "STOA_TEMPORAL_CERT", "STOA_TEMPORAL_KEY")


@dataclass(frozen=True, slots=True)
class Planted:
    """A line of a file that is wrong, the key by which it must be named, and the setting that was meant ("" where nobody knows)."""

    line: str
    key: str
    meant: str = ""


FILE: Sequence[str | Planted] = (
    'run = "faulty"',
    Planted("sed = 1", "sed", "seed"),
    Planted("model = 7", "model"),
    "[rollout]",
    Planted("group_sze = 8", "rollout.group_sze", "rollout.group_size"),
    Planted("groups = 999", "rollout.groups"),
    "[learning]",
    Planted("lr = 1e-4", "learning.lr", "learning.learning_rate"),
    Planted("beta1 = 2.0", "learning.beta1"),
    Planted('dtype = "float16"', "learning.dtype", "bfloat16"),
    "[learning.gate]",
    Planted('mode = "tvv"', "learning.gate.mode", "tv"),
    "[publish]",
    Planted("hysteresis = 0.9", "publish.hysteresis"),
    Planted("anchors_every_versions = 3", "publish.anchors_every_versions", "publish.anchor_every_versions"),
    "[bucket]",
    Planted('endpoint = "not a url"', "bucket.endpoint"),
    "[stop]",
    Planted("max_step = 8", "stop.max_step", "stop.max_steps"),
    Planted("max_minutes = -1.0", "stop.max_minutes"),
    "[timeouts]",
    Planted('heartbeat_seconds = "long"', "timeouts.heartbeat_seconds"),
)


def stoa(*arguments: str, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """One call, as a process of its own."""
    command = [sys.executable, "-m", "cli.main", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=None if env is None else dict(env))


def best_seconds(command: Sequence[str], times: int) -> float:
    """The shortest of so many processes; each must end with 0."""
    found: list[float] = []
    for _ in range(times):
        began = time.perf_counter()
        subprocess.run(command, capture_output=True, timeout=60, check=True)
        found.append(time.perf_counter() - began)
    return min(found)


def faults_named(folder: Path) -> tuple[int, int]:
    """Planted faults that one answer names, and how many were planted."""
    path = folder / "faulty.toml"
    path.write_text("\n".join(one if isinstance(one, str) else one.line for one in FILE) + "\n")
    done = stoa("config", "check", str(path))
    if done.returncode != 2:
        return 0, sum(isinstance(one, Planted) for one in FILE)
    lines = done.stderr.splitlines()
    planted = [(number, one) for number, one in enumerate(FILE, 1) if isinstance(one, Planted)]
    return sum(any(names(line, path, number, one) for line in lines) for number, one in planted), len(planted)


def names(said: str, path: Path, number: int, planted: Planted) -> bool:
    """True if a line of the answer names the file, the line, the key, and what was meant."""
    key = f"{path}:{number}: {planted.key} "
    return key in said and (not planted.meant or f"did you mean {planted.meant}?" in said)


@contextmanager
def live_run(folder: Path) -> Iterator[dict[str, str]]:
    """The environment in which `stoa status RUN` finds a run whose workflow answers."""
    with Household(folder) as house:
        started = start_services(house, folder, folder / "logs", Credentials("stoa", "stoa-on-loopback"), Ports())
        endpoints = {"STOA_TEMPORAL_ADDRESS": started.temporal_address, "STOA_BUCKET_ENDPOINT": started.bucket_endpoint}
        env = child_environment({**endpoints, "STOA_STATE": str(folder / "state"), "OMP_NUM_THREADS": "1"}, without=SECRETS)
        env = {name: value for name, value in env.items() if not name.startswith("AWS_")}
        file = folder / "run.toml"
        file.write_text(f'run = "{RUN}"\n')
        done = stoa("run", str(file), "--detach", "--no-doctor", env=env)
        if done.returncode != 0:
            raise ServiceUnavailableError(f"the run did not start: {done.stderr}")
        with (folder / "control.log").open("wb") as log:
            control = subprocess.Popen(
                [sys.executable, "-m", "trainer_gpu.control", str(file)], stdin=subprocess.PIPE, stdout=log, stderr=log, env=env
            )
        try:
            wait_for_an_answer(env)
            yield env
        finally:
            if control.stdin is not None:
                control.stdin.close()
            try:
                control.wait(30)
            except subprocess.TimeoutExpired:
                control.kill()
                control.wait()


def wait_for_an_answer(env: Mapping[str, str]) -> None:
    """Until the run's workflow says what it waits for."""
    deadline = time.monotonic() + READY_SECONDS
    while True:
        done = stoa("status", RUN, "--json", env=env)
        if done.returncode == 0 and "trainer on queue" in json.loads(done.stdout)["waiting_for"]:
            return
        if time.monotonic() > deadline:
            raise ServiceUnavailableError(f"the run's workflow does not answer: {done.stdout}{done.stderr}")
        time.sleep(0.5)


def clean_exits(env: Mapping[str, str], times: int) -> tuple[int, list[float]]:
    """Calls of `stoa status` that ended with 0, an answer, and nothing on standard error; and the seconds of each call."""
    clean, seconds = 0, list[float]()
    for _ in range(times):
        began = time.perf_counter()
        done = stoa("status", RUN, env=env)
        seconds.append(time.perf_counter() - began)
        clean += done.returncode == 0 and done.stderr == "" and f"gpu-{RUN}" in done.stdout
    return clean, seconds


def measure(times: int) -> dict[str, object]:
    """Everything, in a folder of its own that is gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="stoa-cli-") as scratch:
        folder = Path(scratch)
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        help_seconds = best_seconds([sys.executable, "-m", "cli.main", "--help"], HELP_CALLS)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        python_seconds = best_seconds([sys.executable, "-c", ""], HELP_CALLS)
        named, planted = faults_named(folder)
        with live_run(folder) as env:
            clean, seconds = clean_exits(env, times)
    return {
        "help_seconds": round(help_seconds, 3),
        "help_cpu_seconds": round(used / HELP_CALLS, 3),
        "python_seconds": round(python_seconds, 3),
        "num_clean_exits": clean,
        "num_status_calls": times,
        "status_seconds_median": round(sorted(seconds)[len(seconds) // 2], 3),
        "config_faults_named": named,
        "config_faults_planted": planted,
        "load_average": round(os.getloadavg()[0], 2),
        "num_cores": os.cpu_count(),
    }


def main() -> None:
    """Print the numbers; the last line is one JSON object."""
    parser = argparse.ArgumentParser(description="The command line as a person meets it.")
    parser.add_argument("--json", action="store_true", help="only the JSON object")
    parser.add_argument("--calls", type=int, default=50, help="calls of `stoa status`")
    given = parser.parse_args()
    found = measure(given.calls)
    if not given.json:
        for name, value in found.items():
            print(f"{name:24} {value}")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
