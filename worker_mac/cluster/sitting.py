"""Plays an examination of a checkpoint on a wired set: `python -m worker_mac.cluster.sitting HOSTS TASK --folder DIR`.

The ranks are those of `stoa join --hosts`, launched by the same command line; the first one takes the seat of
`worker_mac.exam`, with an engine over the set. It alone needs the checkpoint: each tensor is put on the grid there and
handed to whoever holds it. A set that is lost ends here: what it answered is in the bucket.
"""

import argparse
import signal
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from types import FrameType

import structlog

from environments.base import Environment
from stoa.config.load import state_base
from stoa.config.run import Rollout
from stoa.contracts.errors import StoaError
from stoa.telemetry import log as telemetry
from stoa.weights.layout import Layout
from worker_mac import exam
from worker_mac.cluster.agent import fraction_of
from worker_mac.cluster.hosts import read_hosts, read_split
from worker_mac.cluster.launch import Supervisor
from worker_mac.cluster.lead import Ranks, WiredSet
from worker_mac.cluster.link import backends
from worker_mac.cluster.probe import SshProbe
from worker_mac.cluster.set_engine import SetPlayer, bytes_of, split_model
from worker_mac.cluster.split import Split, Strength
from worker_mac.cluster.tensor import Wire
from worker_mac.exam import Means, tell_memory, told_of
from worker_mac.families import engine_config
from worker_mac.forced import check_batching
from worker_mac.guest import Guest
from worker_mac.model_config import ModelConfig

_log = structlog.get_logger(__name__)


def spread(
    ranks: Ranks,
    link: Wire,
    macs: Sequence[Strength],
    split: Split,
    layout: Layout,
    model_config: Mapping[str, object],
    environment: Environment,
    scratch: Path,
) -> Means:
    """What a wired set plays an examination with; see `worker_mac.exam.Make`. Raises WiredError if the model does not fit it."""
    config = engine_config(model_config)
    spans = split_model(config, layout, macs, environment.limits.max_episode_tokens, split)
    tell_memory(_told(config, layout, spans, macs, split))
    wired = WiredSet(ranks, link, model_config, layout, spans, split=split)
    player = SetPlayer(wired, macs, environment, Rollout(), layout, config, Guest(), folder=scratch, state_folder=scratch)
    return Means(wired.weights, wired.model, player, lambda: check_batching(wired.model, wired.decoder))


def _told(config: ModelConfig, layout: Layout, spans: Sequence[range], macs: Sequence[Strength], split: Split) -> list[str]:
    lines: list[str] = []
    for rank, (span, mac) in enumerate(zip(spans, macs, strict=True)):
        ranks = len(spans) if split == "tensor" else 1
        layers = f"layers {span.start} to {span.stop - 1}" if len(span) > 1 else f"layer {span.start}"
        what = f"1/{ranks} of each layer" if ranks > 1 else layers
        held = bytes_of(config, layout, span, 4 if layout.raw_dtype == "float32" else 2, ranks).weights_bytes
        lines.append(told_of(f"Mac {rank}, {what}", held, mac.limit_bytes))
    return lines


def take_seat(arguments: Sequence[str], ranks: Ranks, link: Wire, macs: Sequence[Strength], split: Split) -> int:
    """The first Mac's life in an examination, whose task the arguments name; the exit code."""
    return exam.main(arguments, make=partial(spread, ranks, link, macs, split))


def supervisor_of(hosts: Path, task: Path, folder: Path) -> Supervisor:
    """What launches the ranks, with what this Mac's owner allows of memory. Raises WiredError, and ConfigError for a mac.toml."""
    return Supervisor(
        read_hosts(hosts), SshProbe(), (str(task.resolve()),), folder.resolve(), available=backends(), say=_say, split=read_split(hosts),
        memory_fraction=fraction_of(state_base() / "mac"), exam=True,
    )  # fmt: skip


def sit(hosts: Path, task: Path, folder: Path) -> int:
    """Launch the ranks and wait for them; the first one's exit code. Raises WiredError, RankLostError, ConfigError."""
    supervisor = supervisor_of(hosts, task, folder)

    def end(_number: int, _frame: FrameType | None) -> None:
        supervisor.end()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    return supervisor.run()


def main(arguments: Sequence[str] | None = None) -> int:
    """As `stoa eval --hosts` starts it; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m worker_mac.cluster.sitting", description="Plays an examination on a wired set.")
    parser.add_argument("hosts", type=Path, help="hosts.json")
    parser.add_argument("task", type=Path, help="what is asked")
    parser.add_argument("--folder", type=Path, required=True, help="for what the launch needs")
    found = parser.parse_args(arguments)
    try:
        return sit(found.hosts, found.task, found.folder)
    except StoaError as error:
        sys.stderr.write(f"error: {error.message}\n" + (f"hint: {error.hint}\n" if error.hint else ""))
        return 1


def _say(text: str) -> None:
    _log.info("set_says", text=text)


if __name__ == "__main__":
    telemetry.configure(worker="mac")
    sys.exit(main())
