"""A rank that is not the first: it holds its share of the policy and does what rank 0 tells it, until told to end.

It talks to no Temporal, holds no lease and signs nothing; of the bucket it reads and writes its own parts of
checkpoints. Asked by a signal to end it goes on, because rank 0 was asked too and tells it when: a step half taken
would leave all the others waiting.
"""

import signal
from typing import assert_never

import structlog

from stoa.bucket.store import Store
from stoa.config.load import bucket_credentials
from stoa.contracts.errors import LostStateError
from trainer_gpu import host
from trainer_gpu.crew import AGREED, Build, Command, Compare, End, Line, LoadBase, Restore, Save, SendWire, TellRng, Tick, Train
from trainer_gpu.hub import check_weight_files, locate_model
from trainer_gpu.policy import Policy
from trainer_gpu.run_handle import PATIENCE_SECONDS, check_model_files

log = structlog.get_logger()


def follow(line: Line) -> bool:
    """Do commands until `End`; False if rank 0 was lost before. Errors that not every rank meets pass through."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    follower = Follower()
    while True:
        try:
            command = line.receive()
        except RuntimeError as error:
            log.error("leader_lost", rank=host.rank(), error=str(error)[:500])
            return False
        if isinstance(command, End):
            log.info("follower_ended", rank=host.rank())
            return True
        try:
            follower.do(command)
        except AGREED as error:
            log.warning("command_failed", rank=host.rank(), command=type(command).__name__, error=error.message)


class Follower:
    """What a follower holds: its share of the policy, and a way to the bucket."""

    def __init__(self) -> None:
        self._built: tuple[Policy, Store, str] | None = None

    def do(self, command: Command) -> None:
        """This rank's part of a command."""
        match command:
            case Build():
                self._build(command)
            case LoadBase():
                self._policy.load_base()
            case Restore(parts, rng):
                self._policy.restore_parts(self._store, parts, rng)
            case Train(groups, version, step, planned_sequences):
                self._policy.train(groups, version=version, step=step, planned_sequences=planned_sequences, on_row=lambda row: None)
            case Compare(groups):
                self._policy.compare(groups)
            case SendWire():
                for _ in self._policy.wire_tensors():
                    pass
            case Save(epoch, step, part_bytes):
                self._policy.save_parts(self._store, self._run, epoch, step, part_bytes=part_bytes)
            case TellRng():
                self._policy.capture_rng()
            case Tick() | End():
                pass
            case _:
                assert_never(command)

    def _build(self, command: Build) -> None:
        document, settings = command.document, command.bucket
        folder = locate_model(document.config)
        check_model_files(document, folder)
        check_weight_files(document, folder)
        store = Store(settings, bucket_credentials(settings), patience_seconds=PATIENCE_SECONDS)
        policy = Policy(folder, document.config.learning, seed=document.config.seed, layout_id=document.layout_id)
        self._built = (policy, store, document.run)
        log.info("follower_ready", rank=host.rank(), num_ranks=host.num_ranks())

    @property
    def _parts(self) -> tuple[Policy, Store, str]:
        if self._built is None:
            raise LostStateError("told to work before it was told what to build")
        return self._built

    @property
    def _policy(self) -> Policy:
        return self._parts[0]

    @property
    def _store(self) -> Store:
        return self._parts[1]

    @property
    def _run(self) -> str:
        return self._parts[2]
