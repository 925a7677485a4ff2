"""The random generators of a trainer's processes as text, and back: what a checkpoint says of chance.

Saved are those of Python, numpy and torch; where CUDA exists also this device's and the trackers by which Megatron draws
for experts and model parts. Without CUDA the last two are not in the text; a text that has them is read there without
them, and one that lacks them leaves a CUDA process as it was seeded. Nothing is unpickled.

The text is canonical JSON: a list with one object a rank, generator -> state; bytes are base64.
"""

import base64
import binascii
import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import structlog
import torch
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker, get_cuda_rng_tracker

from stoa.contracts.errors import CheckpointError
from trainer_gpu import host

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Generator:
    """One kind of generator. `read` gives its state as JSON holds it, `write` takes such a state."""

    read: Callable[[], object]
    write: Callable[[Any], None]


Generators = Mapping[str, Generator]


def generators(*, cuda: bool = host.HAS_CUDA) -> Generators:
    """Those of this process, by name; `cuda`: also those that only exist with CUDA."""
    found = {
        "python": Generator(_read_python, _write_python),
        "numpy": Generator(_read_numpy, _write_numpy),
        "torch": Generator(lambda: _text(torch.get_rng_state()), lambda state: torch.set_rng_state(_tensor(state))),
    }
    if cuda:
        found["cuda"] = Generator(lambda: _text(torch.cuda.get_rng_state()), lambda state: torch.cuda.set_rng_state(_tensor(state)))
        found["megatron"] = Generator(_read_trackers, _write_trackers)
    return found


def capture(of: Generators | None = None) -> dict[str, object]:
    """The state of every generator of this process."""
    return {name: one.read() for name, one in (generators() if of is None else of).items()}


def as_text(ranks: Sequence[Mapping[str, object]]) -> str:
    """What all ranks captured, in their order."""
    return json.dumps(ranks, sort_keys=True, separators=(",", ":"))


def restore(text: str, rank: int, of: Generators | None = None) -> None:
    """Give the generators of this process, rank `rank`, the state they had. A rank that was not there keeps its own.

    An empty text, of a checkpoint that says nothing of chance, changes none of them; a warning names them.

    Raises CheckpointError if `text` holds no such states; some generators may then have been set.
    """
    mine = generators() if of is None else of
    if not text:
        log.warning("generators_not_restored", rank=rank, generators=sorted(mine), reason="the checkpoint holds no generator states")
        return
    try:
        saved = cast(list[dict[str, object]], json.loads(text))
        states = saved[rank] if rank < len(saved) else {}
        for name, state in states.items():
            if name in mine:
                mine[name].write(state)
    except (binascii.Error, ValueError, TypeError, LookupError, AttributeError, RuntimeError, OverflowError, RecursionError) as error:
        raise CheckpointError(f"the checkpoint's generator states are unusable: {error}") from error


def _read_python() -> object:
    version, words, gauss = random.getstate()
    return [version, list(words), gauss]


def _write_python(state: Any) -> None:
    version, words, gauss = state
    random.setstate((version, tuple(words), gauss))


def _read_numpy() -> object:
    state = cast(dict[str, Any], np.random.get_state(legacy=False))
    inner = state["state"]
    words = base64.b64encode(inner["key"].astype("<u4").tobytes()).decode("ascii")
    return [state["bit_generator"], words, int(inner["pos"]), int(state["has_gauss"]), float(state["gauss"])]


def _write_numpy(state: Any) -> None:
    name, words, pos, has_gauss, gauss = state
    np.random.set_state((name, np.frombuffer(base64.b64decode(words, validate=True), "<u4"), pos, has_gauss, gauss))


def _read_trackers() -> object:
    return {name: _text(state) for name, state in _trackers().get_states().items()}


def _write_trackers(state: Any) -> None:
    _trackers().set_states({name: _tensor(text) for name, text in state.items()})


def _trackers() -> CudaRNGStatesTracker:
    return cast(CudaRNGStatesTracker, get_cuda_rng_tracker())


def _text(state: torch.Tensor) -> str:
    return base64.b64encode(state.cpu().numpy().tobytes()).decode("ascii")


def _tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text, validate=True)), dtype=torch.uint8)
