"""One of two ranks that are started again when one is lost: rank 0 trains a run in a bucket to its last step.

Run under `trainer_gpu.ranks.launch` as `-m tests.unit.trainer_gpu.lost_rank SETTINGS OUT`. In the middle of a step for which
OUT/fault-STEP holds "RANK SIGNAL", rank 0 sends that signal to that rank, once.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from stoa.bucket.head import read_head
from stoa.bucket.manifest import Signer
from stoa.bucket.run_document import read_run
from stoa.bucket.store import Store
from stoa.config.load import bucket_credentials, signing_seed
from stoa.config.run import Bucket
from stoa.contracts.messages import AcquireRequest, PublishRequest, StepRequest
from tests.unit.trainer_gpu.player import POLICY, search
from tests.unit.trainer_gpu.two_ranks import end_at_once
from trainer_gpu import crew, host
from trainer_gpu.engine import TrainerEngine
from trainer_gpu.follower import follow
from trainer_gpu.run_handle import RunHandle

NUM_STEPS = 3


class Planter:
    """A `Progress` that plants a fault when the first row of a step is done, before the ranks have met.

    HEAD names the step before by then: its checkpoint goes out beside this one, and a fault that overtakes it costs both.
    """

    cancelled = False
    stopping = False

    def __init__(self, out: Path, pids: list[int], named_step: Callable[[], int]) -> None:
        self._out = out
        self._named_step = named_step
        self._pids = pids

    def report(self, detail: str, **_facts: object) -> None:
        step, _, row = detail.removeprefix("step ").partition(": row 1 ")
        fault = self._out / f"fault-{step}"
        if row and fault.exists():
            victim, number = fault.read_text().split()
            fault.unlink()
            deadline = time.monotonic() + 60.0
            while self._named_step() < int(step) - 1 and time.monotonic() < deadline:
                time.sleep(0.05)
            os.kill(self._pids[int(victim)], int(number))


def lead(settings: Bucket, out: Path, line: crew.Line, pids: list[int]) -> None:
    leader = crew.Crew(line)
    leader.on_lost = lambda: os._exit(7)
    store = Store(settings, bucket_credentials(settings), patience_seconds=20.0)
    handle = RunHandle(store, read_run(store, "test"), Signer.from_seed(signing_seed()), search(), POLICY, "ranks", word_seconds=0.0)
    engine = TrainerEngine(handle, lead=leader.lead)
    progress = Planter(out, pids, lambda: read_head(store, "test", handle.signer.public_key)[0].step)
    acquired = engine.acquire(AcquireRequest("test", 1), 1, progress)
    with (out / "starts").open("a") as starts:
        starts.write(f"{acquired.step}\n")
    for step in range(acquired.step + 1, NUM_STEPS + 1):
        result = engine.train_step(StepRequest("test", acquired.token, step), progress)
        assert result.status == "done", result
        engine.publish(PublishRequest("test", acquired.token, step, anchor=False, checkpoint=True), progress)
    (out / "done").write_text(json.dumps({"num_ranks": host.num_ranks()}))
    engine.close()
    leader.end()


def main(settings: Path, out: Path) -> None:
    crew.SILENCE_SECONDS = 12.0  # pyright: ignore[reportAttributeAccessIssue]
    crew.TICK_SECONDS = 0.5  # pyright: ignore[reportAttributeAccessIssue]
    host.COLLECTIVE_SECONDS = 12.0  # pyright: ignore[reportAttributeAccessIssue]
    host.join_processes()
    pids: list[int] = [0, 0]
    dist.all_gather_object(pids, os.getpid())
    line = crew.Line()
    if host.rank():
        sys.exit(0 if follow(line) else 1)
    lead(Bucket.model_validate_json(settings.read_text()), out, line, pids)


if __name__ == "__main__":
    signal.alarm(290)
    sys.excepthook = end_at_once
    main(Path(sys.argv[1]), Path(sys.argv[2]))
