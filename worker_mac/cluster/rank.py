"""The process that runs on every Mac of a wired set: `python -m worker_mac.cluster.rank OPTIONS -- WORKER_ARGUMENTS`.

`mlx.launch` starts it on each; `launch.py` writes its command line and, as the first line of its standard input, the
set's secret. The first Mac's is the worker of `worker_mac.worker`, with an engine over the whole set; the others follow
it. Whatever goes wrong on one ends all: who started them starts them again, as one.
"""

import argparse
import contextlib
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final, NoReturn

import mlx.core as mx
import psutil
import structlog

from environments.base import Environment
from stoa.bucket.run_document import RunDocument
from stoa.bucket.store import Store
from stoa.config.host import MacHost
from stoa.contracts.errors import RankLostError, StoaError, WiredError
from stoa.telemetry import log as telemetry
from stoa.weights.layout import layout_of
from worker_mac.cluster.admission import JOIN_SECONDS, admit
from worker_mac.cluster.ended import ANEW, LOST, Ended, tell
from worker_mac.cluster.follow import Follower
from worker_mac.cluster.lead import Ranks, WiredSet
from worker_mac.cluster.link import STUCK_SECONDS, RingLink, Watchdog
from worker_mac.cluster.set_engine import SetPlayer, SetVersions, split_model
from worker_mac.cluster.split import Split, Strength, limit_bytes
from worker_mac.cluster.strength import measured_bandwidth, program, recommended_bytes
from worker_mac.cluster.wire import Channel, Message
from worker_mac.ending import LastCall, leave
from worker_mac.guest import Guest
from worker_mac.model_config import read_model_config

if TYPE_CHECKING:
    from worker_mac.engine import MacEngine

_log = structlog.get_logger(__name__)
USUAL_FRACTION: Final = MacHost().memory_fraction
BYE_SECONDS: Final = 15.0
"""For the first Mac to take its leave (`ending.LEAVE_SECONDS`) and say bye to the others."""
END_LINE: Final = "end"
STARTER_SECONDS: Final = 1.0


@dataclass(frozen=True, slots=True)
class Options:
    """The command line. `limits`: bytes that weights and pages may take, by rank; `bandwidths`: bytes a second, by rank; 0: as found.

    memory_fraction: of what the system recommends for its GPU, where no limit is stated. exam: `worker` is the task of an
    examination.
    """

    control: tuple[str, int]
    backend: str
    ended: Path
    limits: tuple[int, ...]
    bandwidths: tuple[int, ...]
    worker: tuple[str, ...]
    stuck_seconds: float = STUCK_SECONDS
    starter: int = 0
    split: Split = "pipeline"
    memory_fraction: float = USUAL_FRACTION
    quiet: bool = False
    exam: bool = False


def read_options(arguments: Sequence[str] | None) -> Options:
    """Parse the command line; argparse exits with 2 on wrong use."""
    parser = argparse.ArgumentParser(prog="python -m worker_mac.cluster.rank", description="One Mac of a wired set.")
    parser.add_argument("--control", required=True, help="ADDRESS:PORT on which the first Mac awaits the others")
    parser.add_argument("--backend", default="ring", choices=("ring", "jaccl"))
    parser.add_argument("--ended", type=Path, required=True, help="file in which the first Mac says how it ended")
    parser.add_argument("--limits", default="", help="bytes each Mac may give, with commas; 0: what its system recommends")
    parser.add_argument("--bandwidths", default="", help="bytes a second of each Mac's memory, with commas; 0: measure")
    parser.add_argument("--split", default="pipeline", choices=("pipeline", "tensor"), help="what of the model is shared out")
    parser.add_argument("--exam", action="store_true", help="the argument after -- is the task of an examination")
    parser.add_argument("--stuck-seconds", type=float, default=STUCK_SECONDS)
    parser.add_argument("--starter", type=int, default=0, help="process that started the set")
    parser.add_argument("--starter-host", default="", help="name of the machine it runs on")
    parser.add_argument("--memory-fraction", type=float, default=USUAL_FRACTION, help="of what the system recommends for its GPU")
    parser.add_argument("--quiet", action="store_true", help="say only what needs somebody")
    parser.add_argument("worker", nargs="*", help="arguments of worker_mac.worker, after --")
    found = parser.parse_args(arguments)
    address, _, port = str(found.control).rpartition(":")
    return Options(
        (address, int(port)), found.backend, found.ended, _numbers(found.limits), _numbers(found.bandwidths), tuple(found.worker),
        found.stuck_seconds, found.starter if found.starter_host == socket.gethostname() else 0, found.split,
        found.memory_fraction, found.quiet, found.exam,
    )  # fmt: skip


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(one) for one in text.split(",") if one)


def main(arguments: Sequence[str] | None = None) -> int:
    """Be one Mac of the set, to its end; returns the exit code."""
    options, asked = read_options(arguments), Asked()
    telemetry.configure(level="warning" if options.quiet else "info", worker="mac")
    secret = sys.stdin.readline().strip()
    threading.Thread(target=_watch_input, args=(sys.stdin, asked.end), name="input", daemon=True).start()
    if options.starter:
        threading.Thread(target=_watch_starter, args=(options.starter, asked.end), name="starter", daemon=True).start()
    try:
        group = mx.distributed.init(strict=True, backend=options.backend)
        if group.size() < 2:
            raise WiredError("a wired set is two Macs or more", hint="one Mac joins without --hosts")
        rank = group.rank()
        telemetry.bind(rank=rank)
        link = RingLink(group, Watchdog(partial(_stuck, options, rank), options.stuck_seconds))
        if rank == 0:
            return _lead(options, secret, link, asked)
        channel = call_in(options.control, _hello(options, secret, rank))
        asked.await_bye()
        Follower(channel, link, limit_of(options, rank)).run()
    except StoaError as error:
        if asked.to_end:
            _log.info("rank_ended", reason=error.message)
            return 0
        _log.error("rank_ended", kind=type(error).__name__, reason=error.message, hint=error.hint)
        return LOST
    except RuntimeError as error:  # of the collectives' own set-up: an address or port that cannot be used
        _log.error("rank_ended", kind="ring", reason=str(error))
        return LOST
    return 0


class Asked:
    """Whether this process was asked to end, and what it then does: the first Mac takes its leave and then says bye to the others."""

    def __init__(self) -> None:
        self.to_end = False
        self._awaits_bye = False

    def await_bye(self) -> None:
        """From now on a word of the first Mac is awaited; it may still be sending what is finished."""
        self._awaits_bye = True

    def end(self) -> None:
        """For any thread."""
        self.to_end = True
        if self._awaits_bye:
            LastCall(partial(leave, 0), BYE_SECONDS).start()
        else:
            os.kill(os.getpid(), signal.SIGTERM)


def _stuck(options: Options, rank: int, what: str) -> None:
    """A collective makes no progress, and nothing can break into it: this process ends, and with it the set."""
    _log.error("collective_stuck", rank=rank, reason=what)
    if rank == 0:
        tell(options.ended, Ended(LOST, what))
    leave(LOST)


def _watch_input(source: IO[str], end: Callable[[], None]) -> None:
    """End when told to on standard input, and at its end. Whatever is done then: a worker takes its leave on SIGTERM."""
    for line in source:
        if line.strip() == END_LINE:
            break
    end()


def _watch_starter(pid: int, end: Callable[[], None]) -> None:
    """End when who started the set is gone: `mlx.launch` would go on without it."""
    with contextlib.suppress(psutil.NoSuchProcess):
        starter = psutil.Process(pid)
        while starter.is_running() and starter.status() != psutil.STATUS_ZOMBIE:
            time.sleep(STARTER_SECONDS)
    end()


def own_strength(options: Options, rank: int) -> Strength:
    """What this Mac has, as stated or as found here."""
    bandwidth = options.bandwidths[rank] if rank < len(options.bandwidths) else 0
    return Strength(limit_of(options, rank), bandwidth or measured_bandwidth())


def limit_of(options: Options, rank: int) -> int | None:
    """What weights and pages may take of this Mac: as stated, else what the first one's owner lets them have; None for no limit."""
    stated = options.limits[rank] if rank < len(options.limits) else 0
    return limit_bytes(stated, recommended_bytes(), options.memory_fraction)


def _hello(options: Options, secret: str, rank: int) -> Message:
    own = own_strength(options, rank)
    said = {"secret": secret, "rank": rank, "limit": own.limit_bytes or 0, "bandwidth": int(own.bandwidth)}
    return Message("hello", said | program(options.split))


def call_in(control: tuple[str, int], hello: Message) -> Channel:
    """Find the first Mac and say hello at once: callers have little time there. Raises RankLostError if it is not there in time."""
    deadline = time.monotonic() + JOIN_SECONDS
    while True:
        try:
            connection = socket.create_connection(control, timeout=5.0)
            break
        except OSError as error:
            if time.monotonic() > deadline:
                raise RankLostError(f"the first Mac does not answer at {control[0]}:{control[1]}: {error}") from error
            time.sleep(0.2)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    channel = Channel(connection, "the first Mac")
    channel.send(hello)
    channel.start_beating()
    return channel


def await_others(options: Options, secret: str, size: int) -> tuple[list[Channel], list[Strength]]:
    """The other Macs' channels and strengths, by rank. Raises WiredError if one runs another program, or does not come."""
    came = admit(options.control, secret, size, partial(_check_program, options.split))
    hellos = [came[rank][1] for rank in range(1, size)]
    found = [Strength(hello.number("limit") or None, float(hello.number("bandwidth"))) for hello in hellos]
    return [came[rank][0] for rank in range(1, size)], [own_strength(options, 0), *found]


def _check_program(split: Split, rank: int, hello: Message) -> None:
    for name, ours in program(split).items():
        if hello.text(name) != ours:
            hint = "unlike chips round otherwise: split layers instead" if name == "chip" else "install the same version on every Mac"
            raise WiredError(f"Mac {rank} of the set has {name} {hello.text(name)}, this one {ours}", hint=hint)


def _lead(options: Options, secret: str, link: RingLink, asked: Asked) -> int:
    """The first Mac's life."""
    options.ended.unlink(missing_ok=True)
    try:
        channels, macs = await_others(options, secret, link.size)
    except StoaError as error:
        tell(options.ended, Ended(LOST, error.message))
        raise

    def on_lost(error: StoaError) -> None:
        if not asked.to_end:  # else the worker takes its leave, which is bounded
            tell(options.ended, Ended(LOST, error.message))
            leave(LOST)

    def anew() -> NoReturn:
        ranks.close()
        tell(options.ended, Ended(ANEW, "the whole begins anew"))
        leave(ANEW)

    ranks = Ranks(channels, on_lost, is_ending=lambda: asked.to_end)
    if options.exam:
        from worker_mac.cluster.sitting import take_seat  # noqa: PLC0415 - what only the first Mac needs

        code = take_seat(options.worker, ranks, link, macs, options.split)
    else:
        from worker_mac import worker  # noqa: PLC0415

        code = worker.main(options.worker, make_engine=partial(make_engine, ranks, link, macs, options.split), anew=anew)
    ranks.close()
    tell(options.ended, Ended(code))
    return code


def make_engine(
    ranks: Ranks,
    link: RingLink,
    macs: Sequence[Strength],
    split: Split,
    store: Store,
    document: RunDocument,
    environment: Environment,
    *,
    model_folder: Path,
    guest: Guest,
    fingerprint: str = "",
    **options: Any,
) -> "MacEngine":
    """An engine over the set, with the arguments of `MacEngine`. Raises WiredError if the model does not fit it."""
    from worker_mac.engine import MacEngine  # noqa: PLC0415
    from worker_mac.fingerprint import fixed_model  # noqa: PLC0415
    from worker_mac.selftest import require  # noqa: PLC0415
    from worker_mac.selftest import run as run_selftest  # noqa: PLC0415

    verdict = run_selftest(lambda: fixed_model(guest.allowed.plain_ops))
    model_config = json.loads((model_folder / "config.json").read_text("utf-8"))
    layout = layout_of(model_config, document.config.learning.dtype)
    config = read_model_config(model_config)
    spans = split_model(config, layout, macs, environment.limits.max_episode_tokens, split)
    wired = WiredSet(ranks, link, model_config, layout, spans, split=split, plain_ops=guest.allowed.plain_ops)
    layers = [[span.start, span.stop] for span in spans]
    _log.info("set_wired", split=split, layers=layers, bytes=wired.weights_bytes, macs=len(macs))
    return MacEngine(
        store, document, environment, model_folder=model_folder, guest=guest, fingerprint=fingerprint or require(verdict),
        make_versions=partial(SetVersions, wired), make_player=partial(SetPlayer, wired, macs), **options,
    )  # fmt: skip


if __name__ == "__main__":
    leave(main())
