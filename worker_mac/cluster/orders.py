"""What the first Mac tells the others to do, as messages: the plan of a step, an update's part; and what they answer.

Only forms: who does what is `lead.py`'s and `follow.py`'s.
"""

from collections.abc import Mapping
from dataclasses import fields
from typing import Final, cast

import numpy as np
from numpy.typing import NDArray

from stoa.contracts.errors import (
    FormatError,
    GpuInterruptedError,
    LinkMismatchError,
    RankLostError,
    StoaError,
    WrongStateError,
)
from stoa.weights.pulse import Change
from worker_mac.cluster.wire import Message
from worker_mac.decoder import Drawn
from worker_mac.plan import Ints, Work
from worker_mac.sampler import Sampling

Numbers = NDArray[np.generic]
_PAIRS: Final = ("page_copies", "slot_copies")
_FAULTS: Final[Mapping[str, type[StoaError]]] = {
    one.__name__: one for one in (FormatError, GpuInterruptedError, LinkMismatchError, RankLostError, WrongStateError)
}


def step_order(op: str, work: Work, uniform: NDArray[np.float32], settings: Mapping[str, object]) -> Message:
    """The plan of a step: rows, tokens, pages, copies, and the number each row is drawn with."""
    arrays: dict[str, Numbers] = {"uniform": uniform}
    for name in (one.name for one in fields(Work)):
        value = getattr(work, name)
        if name in _PAIRS:
            value = np.array(value, np.int32).reshape(-1, 2)
        if value is not None:
            arrays[name] = value
    return Message(op, settings, arrays)


def read_step(message: Message) -> tuple[Work, NDArray[np.float32]]:
    """The plan in a message. Raises FormatError if it lacks something."""
    arrays = message.arrays
    try:
        prompts = cast(Ints, arrays["prompts"]) if "prompts" in arrays else None
        pages, slots = ([(int(a), int(b)) for a, b in arrays[name]] for name in _PAIRS)
        work = Work(
            arrays["sequences"].astype(np.intp), arrays["starts"].astype(np.int32), arrays["counts"].astype(np.int32),
            arrays["samples"].astype(np.bool_), arrays["tokens"].astype(np.int32), arrays["tables"].astype(np.int32),
            arrays["slots"].astype(np.int32), pages, slots, prompts,
        )  # fmt: skip
        return work, arrays["uniform"].astype(np.float32)
    except KeyError as error:
        raise FormatError(f"a plan without {error}") from error


def drawn_answer(drawn: Drawn) -> dict[str, Numbers]:
    """What a step gave on one Mac, as arrays."""
    found: dict[str, Numbers] = {"tokens": drawn.tokens, "logprobs": drawn.logprobs}
    return found if drawn.routes is None else found | {"routes": drawn.routes}


def read_drawn(answers: list[Message | None]) -> Drawn:
    """What a step gave on all Macs, in their order: tokens of the last, experts of every layer. None: this Mac has no experts."""
    last = answers[-1]
    if last is None:
        raise AssertionError("the last Mac gave nothing")
    routes = [one.arrays["routes"] for one in answers if one is not None and "routes" in one.arrays]
    joined = np.concatenate(routes, axis=1).astype(np.uint8) if routes else None
    return Drawn(last.arrays["tokens"].astype(np.int32), last.arrays["logprobs"].astype(np.float32), joined)


def sampling_fields(sampling: Sampling) -> list[float]:
    """As four numbers."""
    return [sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p]


def read_sampling(message: Message) -> Sampling:
    """Of a plan."""
    found = message.fields.get("sampling")
    if not isinstance(found, list) or len(found) != 4:
        raise FormatError("a plan without sampling")
    temperature, top_k, top_p, min_p = (float(one) for one in found)
    return Sampling(temperature, int(top_k), top_p, min_p)


def change_arrays(change: Change) -> dict[str, Numbers]:
    """An update's part."""
    return {one.name: getattr(change, one.name) for one in fields(Change)}


def read_change(message: Message) -> Change:
    """The part in a message. Raises FormatError if it lacks something."""
    arrays = message.arrays
    missing = [one.name for one in fields(Change) if one.name not in arrays]
    if missing:
        raise FormatError(f"an update without {', '.join(missing)}")
    return Change(**{one.name: arrays[one.name] for one in fields(Change)})  # pyright: ignore[reportArgumentType]


def fault_answer(error: Exception, number: int) -> Message:
    """What went wrong, for the first Mac."""
    text = error.message if isinstance(error, StoaError) else str(error)
    hint = error.hint if isinstance(error, StoaError) else ""
    return Message("fault", {"id": number, "kind": type(error).__name__, "text": text, "hint": hint})


def read_fault(message: Message, peer: str) -> StoaError:
    """The error of an answer; one of a kind that is not expected means that the Mac is of no use any more."""
    kind = _FAULTS.get(message.text("kind"), RankLostError)
    return kind(f"{peer}: {message.text('text') or message.text('kind')}", hint=message.text("hint"))
