"""The processes of one trainer: rank 0 leads, every other rank does what rank 0 tells it, at the same moment.

A command goes out over a gloo group of its own before rank 0 begins the work itself; what a command does is `policy.py`'s
and `follower.py`'s. While there is nothing to do rank 0 sends a tick now and then, so that a silence is a fault: a rank
that is gone or stuck ends all the others, and whoever started them (torchrun) starts them again.

Commands travel pickled, between processes that one program started on hosts of one owner.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, cast

import structlog
import torch
import torch.distributed as dist

from stoa.bucket.run_document import RunDocument
from stoa.config.run import Bucket
from stoa.contracts.errors import CheckpointError, NonFiniteError, RankLostError, ServiceUnavailableError, StoaError
from stoa.rollouts.records import Group
from trainer_gpu import host
from trainer_gpu.checkpoint import Part

SILENCE_SECONDS: Final = 120.0
"""Longest that a follower waits for a command or a tick, and rank 0 for a follower to take one."""
TICK_SECONDS: Final = 3.0

AGREED: Final = (NonFiniteError, CheckpointError, ServiceUnavailableError)
"""Errors that every rank meets in the same command, or none: after them all ranks are in step."""

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Build:
    """Make the policy of a run, with the base checkpoint's weights."""

    document: RunDocument
    bucket: Bucket


@dataclass(frozen=True, slots=True)
class LoadBase:
    """Back to the base checkpoint."""


@dataclass(frozen=True, slots=True)
class Restore:
    """Take the state that these parts hold."""

    parts: tuple[Part, ...]
    rng: str


@dataclass(frozen=True, slots=True)
class Train:
    """One optimizer step on these groups; each rank takes its share of their rows."""

    groups: tuple[Group, ...]
    version: int
    step: int
    planned_sequences: int


@dataclass(frozen=True, slots=True)
class Compare:
    """How far the sampler's numbers of these groups are from the policy's as it is; each rank takes its share of their rows."""

    groups: tuple[Group, ...]


@dataclass(frozen=True, slots=True)
class SendWire:
    """Hand over experts and pieces of masters while rank 0 reads the weights as they go on the wire."""


@dataclass(frozen=True, slots=True)
class Save:
    """Write this rank's own tensors as parts of a checkpoint."""

    epoch: int
    step: int
    part_bytes: int


@dataclass(frozen=True, slots=True)
class TellRng:
    """Tell rank 0 the states of this rank's random generators."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Nothing to do; rank 0 is there."""


@dataclass(frozen=True, slots=True)
class End:
    """There will be no other command."""


Command = Build | LoadBase | Restore | Train | Compare | SendWire | Save | TellRng | Tick | End
Lead = Callable[[Command], AbstractContextManager[None]]
"""Tells the other ranks a command; the work of rank 0 stands inside the block."""


def alone(_command: Command) -> AbstractContextManager[None]:
    """A `Lead` without followers: of a trainer of one process, and of a follower itself."""
    return nullcontext()


class Line:
    """The group that commands go over. All ranks make it at the same moment, after `host.join_processes`."""

    def __init__(self) -> None:
        limit = timedelta(seconds=SILENCE_SECONDS)
        self._group = cast(dist.ProcessGroup, dist.new_group(backend="gloo", timeout=limit))

    def send(self, command: Command) -> None:
        """From rank 0 to all. Raises RuntimeError if a rank is gone or does not listen."""
        dist.broadcast_object_list([command], src=0, group=self._group)
        self._meet()

    def receive(self) -> Command:
        """The next command. Raises RuntimeError if rank 0 is gone or silent."""
        box: list[Any] = [None]
        dist.broadcast_object_list(box, src=0, group=self._group)
        self._meet()
        return cast(Command, box[0])

    def _meet(self) -> None:
        """Everybody has the command: a message to a frozen process is sent as well as one to a live one."""
        dist.all_reduce(torch.ones(1), group=self._group)


class Crew:
    """Rank 0's side. `lead` is for one thread at a time; ticks go out from a thread of their own."""

    def __init__(self, line: Line) -> None:
        """Begin to tick."""
        self._line = line
        self.on_lost: Callable[[], object] = lambda: None
        """Called once, from any thread, when a rank is gone: this process must end too."""
        self._lock = threading.RLock()
        self._ended = threading.Event()
        self.is_lost = False
        threading.Thread(target=self._tick, name="crew", daemon=True).start()

    @contextmanager
    def lead(self, command: Command) -> Iterator[None]:
        """Tell all ranks `command`, then do rank 0's part inside the block.

        An error that not every rank meets leaves them out of step: then the crew is lost. Raises RankLostError if it is.
        """
        with self._lock:
            if self.is_lost:
                raise RankLostError("a process of this trainer is gone", hint="start all of them again")
            in_step = False
            try:
                self._line.send(command)
                yield
                in_step = True
            except (*AGREED, GeneratorExit):
                in_step = True
                raise
            except RuntimeError as error:
                raise RankLostError(f"rank 0 is out of step with the others: {error}", hint="start all of them again") from error
            finally:
                if not in_step:
                    self._lose(f"{type(command).__name__} was left in the middle")

    def end(self) -> None:
        """Tell all ranks to end, if they can still be told."""
        with self._lock:
            if self._ended.is_set() or self.is_lost:
                return
            self._ended.set()
            try:
                self._line.send(End())
            except RuntimeError as error:
                self.is_lost = True
                log.error("rank_lost", error=str(error)[:500])

    def _tick(self) -> None:
        while not self._ended.wait(TICK_SECONDS):
            with self._lock:
                if self._ended.is_set() or self.is_lost:
                    return
                try:
                    self._line.send(Tick())
                except RuntimeError as error:
                    self._lose(str(error))

    def _lose(self, error: str) -> None:
        self.is_lost = True
        log.error("rank_lost", error=error[:500])
        self.on_lost()


def agree(error: StoaError | None) -> None:
    """Raise on every rank if any rank brings an error, its own or the first one; all ranks must call."""
    found = [said for said in host.exchange((error.retryable, error.message, error.hint) if error else None) if said]
    if error is not None:
        raise error if isinstance(error, AGREED) else CheckpointError(error.message, hint=error.hint) from error
    for retryable, message, hint in found:
        raise (ServiceUnavailableError if retryable else CheckpointError)(message, hint=hint)
