"""The trainer on the GPUs of this host: `python -m trainer_gpu.ranks --nproc-per-node N [CONFIG] [--state DIR]`.

It is torchrun, restarts and signals included, with one thing changed: the store at which the processes find each other
listens on loopback, where torchrun's own listens on every interface. Several hosts need torchrun itself and a network
of their own. What a process does is `worker.py`'s.
"""

import argparse
import logging
import socket
import sys
from collections.abc import Sequence
from datetime import timedelta
from typing import Final

from torch.distributed import PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous.api import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.launcher.api import elastic_launch
from torch.distributed.run import config_from_args, parse_args

LOOPBACK: Final = "127.0.0.1"
STORE_SECONDS: Final = 600.0
SHUTDOWN_SECONDS: Final = 300
"""How long processes that a signal asks to end may take: the first finishes its step. After a loss they get torch's 30 s."""


class LoopbackRendezvous(RendezvousHandler):
    """One host's processes meet at a store that only this host can reach."""

    def __init__(self, parameters: RendezvousParameters) -> None:
        self._run_id = parameters.run_id
        self._store: TCPStore | None = None

    @property
    def use_agent_store(self) -> bool:
        """The processes use this store too, as clients."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """There is one host, and it is here. Each start has a store of its own: the last one's addresses are dead."""
        listening = socket.create_server((LOOPBACK, 0))
        port: int = listening.getsockname()[1]
        # torch's default server cannot be given a socket to listen on.
        self._store = TCPStore(
            LOOPBACK,
            port,
            1,
            True,
            timedelta(seconds=STORE_SECONDS),
            wait_for_workers=False,
            master_listen_fd=listening.detach(),
            use_libuv=False,
        )
        return RendezvousInfo(PrefixStore(self._run_id, self._store), 0, 1, RendezvousStoreInfo(LOOPBACK, port))

    def get_backend(self) -> str:
        """Its name."""
        return "loopback"

    def is_closed(self) -> bool:
        """Never."""
        return False

    def set_closed(self) -> None:
        """Nobody else could join."""

    def num_nodes_waiting(self) -> int:
        """No other host can."""
        return 0

    def get_run_id(self) -> str:
        """As it was given."""
        return self._run_id

    def shutdown(self) -> bool:
        """The store ends with this process."""
        return True


def main(arguments: Sequence[str] | None = None) -> int:
    """Start the processes and wait for them; returns the exit code: 0 they ended as asked to, 1 they failed too often."""
    parser = argparse.ArgumentParser(
        prog="python -m trainer_gpu.ranks",
        description="Train a run on several GPUs of this host.",
        epilog="Further arguments go to `python -m trainer_gpu.worker`.",
    )
    parser.add_argument("--nproc-per-node", default="gpu", help="processes: a number, or gpu for one on each (default)")
    parser.add_argument("--max-restarts", type=int, default=100, help="how often all are started again when one is lost")
    asked, passed = parser.parse_known_args(arguments)
    return launch("trainer_gpu.worker", passed, num_processes=asked.nproc_per_node, max_restarts=asked.max_restarts)


def launch(
    module: str, arguments: Sequence[str], *, num_processes: str, max_restarts: int, shutdown_seconds: int = SHUTDOWN_SECONDS
) -> int:
    """Run `python -m module arguments` in several processes of this host; returns the exit code as `main` does."""
    rendezvous_handler_registry.register("loopback", LoopbackRendezvous)
    torchrun = ["--rdzv-backend", "loopback", "--nproc-per-node", num_processes, "--max-restarts", str(max_restarts)]
    torchrun += ["--shutdown-timeout", str(shutdown_seconds), "--module", module, *arguments]
    config, command, command_arguments = config_from_args(parse_args(torchrun))
    try:
        elastic_launch(config, command)(*command_arguments)
    except SignalException:
        return 0
    except ChildFailedError as error:
        logging.getLogger(__name__).error("%s", error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
