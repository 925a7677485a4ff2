"""One of two ranks that torchrun starts: rank 0 trains a run that is in a bucket, the other follows.

Run as `python -m torch.distributed.run --nproc-per-node 2 -m tests.unit.trainer_gpu.two_ranks SETTINGS OUT`; the groups of
the run are in the bucket already. What rank 0 saw is written to OUT.
"""

import json
import os
import signal
import sys
import traceback
from pathlib import Path

import torch
from safetensors.torch import save_file

from stoa.bucket.manifest import Signer
from stoa.bucket.run_document import read_run
from stoa.bucket.steps import read_step
from stoa.bucket.store import Store
from stoa.config.load import bucket_credentials, signing_seed
from stoa.config.run import Bucket
from stoa.contracts.messages import AcquireRequest, CheckpointRequest, PublishRequest, StepRequest
from stoa.rollouts.shard import decode_group
from tests.unit.trainer_gpu.player import POLICY, search
from tests.unit.trainer_gpu.runs import Reports, await_version, head_of, state_of
from trainer_gpu import crew, host
from trainer_gpu.engine import TrainerEngine
from trainer_gpu.follower import follow
from trainer_gpu.layout import expert_parallel_size
from trainer_gpu.run_handle import RunHandle


def lead(settings: Bucket, out: Path, line: crew.Line) -> None:
    leader = crew.Crew(line)
    store = Store(settings, bucket_credentials(settings), patience_seconds=20.0)
    handle = RunHandle(store, read_run(store, "test"), Signer.from_seed(signing_seed()), search(), POLICY, "ranks", word_seconds=0.0)
    engine = TrainerEngine(handle, lead=leader.lead)
    progress = Reports()
    first = engine.acquire(AcquireRequest("test", 1), 1, progress)
    start_state = state_of(handle, head_of(handle))
    steps = [engine.train_step(StepRequest("test", first.token, 1), progress)]
    trained = [decode_group(store.get(key, max_bytes=1 << 26).data) for key in read_step(store, "test", steps[0].manifest_key).consumed]
    compared = engine.prepare().compare(trained)
    saved = engine.checkpoint(CheckpointRequest("test", first.token, 1), progress)
    steps.append(engine.train_step(StepRequest("test", first.token, 2), progress))
    engine.publish(PublishRequest("test", first.token, 2, anchor=False, checkpoint=True), progress)
    await_version(handle, 1)
    policy = engine._policy
    assert policy is not None
    before = {name: t.clone() for name, t in policy.state().items()}
    second = engine.acquire(AcquireRequest("test", 2), 1, progress)
    same = all(torch.equal(t, before[name]) for name, t in policy.state().items())
    reader = policy.wire_tensors()
    next(reader)
    reader.close()  # a reader that gives up leaves the other rank in step
    save_file({name: t.detach().clone() for name, t in policy.wire_tensors()}, out / "wire.safetensors")
    said = {
        "start_state": start_state,
        "manifests": [step.manifest_key for step in steps],
        "first_checkpoint": saved.key,
        "restored_bit_for_bit": same,
        "resumed_at": second.step,
        "num_ranks": host.num_ranks(),
        "compared": [one.mean for one in compared],
        "expert_parallel": expert_parallel_size(),
        "progress": progress.seen,
    }
    (out / "said.json").write_text(json.dumps(said))
    engine.close()
    leader.end()


def main(settings: Path, out: Path) -> None:
    if "PLANTED" in os.environ:
        crew.SILENCE_SECONDS = 6.0  # pyright: ignore[reportAttributeAccessIssue]
        crew.TICK_SECONDS = 0.5  # pyright: ignore[reportAttributeAccessIssue]
    host.join_processes()
    line = crew.Line()
    if os.environ.get("PLANTED"):
        planted(line, os.environ["PLANTED"])
    if host.rank():
        sys.exit(0 if follow(line) else 1)
    lead(Bucket.model_validate_json(settings.read_text()), out, line)


def planted(line: crew.Line, fault: str) -> None:
    """A rank that dies or freezes while nothing is done; the other must notice, and say so by its exit code."""
    victim, _, number = fault.partition(":")
    if host.rank() == int(victim):
        if host.rank() == 0:
            line.send(crew.Tick())
        else:
            line.receive()
        os.kill(os.getpid(), int(number))
    if host.rank():
        os._exit(7 if not follow(line) else 0)
    leader = crew.Crew(line)
    import threading

    lost = threading.Event()
    leader.on_lost = lost.set
    os._exit(7 if lost.wait(150) and leader.is_lost else 0)


def end_at_once(*seen) -> None:
    """Threads of an engine that failed must not keep the process, and with it the other rank."""
    traceback.print_exception(*seen)
    sys.stderr.flush()
    os._exit(1)


if __name__ == "__main__":
    signal.alarm(230)
    sys.excepthook = end_at_once
    main(Path(sys.argv[1]), Path(sys.argv[2]))
