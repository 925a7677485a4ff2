"""What the first Mac of a wired set does with the others: gives them layers, hands weights on, has steps computed by all.

To the engine the set is one decoder on one set of weights. A fault of the link, or a Mac that is gone, ends the whole:
`on_lost` is called, and everything that waits is told.
"""

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Final, TypeVar

import mlx.core as mx
import numpy as np
import structlog
from numpy.typing import NDArray

from stoa.contracts.errors import FormatError, GpuInterruptedError, LinkMismatchError, RankLostError, StoaError, WrongStateError
from stoa.weights.layout import Layout
from stoa.weights.pulse import Change
from worker_mac.cluster.dealt import DealtState
from worker_mac.cluster.orders import change_arrays, drawn_answer, read_drawn, read_fault, sampling_fields, step_order
from worker_mac.cluster.parts import PartWeights, SpreadState
from worker_mac.cluster.split import Split, arrays_of, tensors_of
from worker_mac.cluster.stage import StageModel, step_stage
from worker_mac.cluster.tensor import Summing, TensorModel, Wire, check_shares, share_layout, together
from worker_mac.cluster.wire import Channel, Message
from worker_mac.decoder import Decoder, Drawn
from worker_mac.families import engine_config
from worker_mac.model import Model
from worker_mac.plan import Work
from worker_mac.sampler import NEUTRAL, Sampling

_log = structlog.get_logger(__name__)
ORDER_SECONDS: Final = 120.0
"""Longest wait for one order that is not a step."""
STEP_SECONDS: Final = 120.0
CLOSE_SECONDS: Final = 3.0
"""For the others to end once they were told to."""
_HARMLESS: Final = (FormatError, WrongStateError, GpuInterruptedError)
"""Faults after which the set goes on as it is."""
_Answer = TypeVar("_Answer")


class Ranks:
    """The other Macs, by rank from 1 on. Implements `parts.Elsewhere`."""

    def __init__(
        self, channels: Sequence[Channel], on_lost: Callable[[StoaError], None], *, is_ending: Callable[[], bool] = lambda: False
    ) -> None:
        """is_ending: this process was asked to end: a Mac that goes is then no loss."""
        self._channels, self._on_lost, self._is_ending = list(channels), on_lost, is_ending
        self._numbers = itertools.count()
        self._waiting: dict[int, tuple[int, Future[Message]]] = {}
        self._lock = threading.Lock()
        self._fault: StoaError | None = None
        self._closing = False
        self.revision = [0] * (len(self._channels) + 1)
        """Writes to each Mac's weights so far."""
        self._puts: list[list[Future[Message]]] = [[] for _ in self.revision]
        self._readers: list[threading.Thread] = []
        for rank, channel in enumerate(self._channels, 1):
            channel.start_beating()
            self._readers.append(threading.Thread(target=self._read, args=(rank, channel), name=f"mac-{rank}", daemon=True))
            self._readers[-1].start()

    @property
    def size(self) -> int:
        """Macs of the set, this one included."""
        return len(self._channels) + 1

    @property
    def bytes_sent(self) -> int:
        """Of orders, to all."""
        return sum(channel.bytes_sent for channel in self._channels)

    def ask(self, rank: int, order: Message) -> "Future[Message]":
        """Give an order; its answer, or its fault, is to come."""
        future: Future[Message] = Future()
        number = next(self._numbers)
        with self._lock:
            if self._fault is not None:
                raise self._fault
            self._waiting[number] = rank, future
        try:
            self._channels[rank - 1].send(Message(order.op, {**order.fields, "id": number}, order.arrays))
        except RankLostError as error:
            self.lose(error)
            raise
        return future

    def all(self, order: Message) -> list[Message]:
        """Give every other Mac one order, and wait for all answers."""
        return [answer_of(answer, self, ORDER_SECONDS) for answer in [self.ask(rank, order) for rank in range(1, self.size)]]

    def put(self, rank: int, name: str, at: int, data: memoryview) -> None:
        """See `parts.Elsewhere`. It is on its way when this returns; `digests` waits for it."""
        with self._lock:
            self.revision[rank] += 1
        order = Message("put", {"name": name, "at": at}, {"data": np.frombuffer(data, np.uint8)})
        answer = self.ask(rank, order)
        with self._lock:
            self._puts[rank].append(answer)

    def apply(self, rank: int, change: Change) -> None:
        """See `parts.Elsewhere`."""
        with self._lock:
            self.revision[rank] += 1
        answer_of(self.ask(rank, Message("apply", {}, change_arrays(change))), self, ORDER_SECONDS)

    def get(self, rank: int, name: str, at: int, count: int) -> "Future[NDArray[np.uint8]]":
        """See `dealt.ElsewhereToo`."""
        found: Future[NDArray[np.uint8]] = Future()

        def give(answer: "Future[Message]") -> None:
            fault = answer.exception()
            if fault is None:
                found.set_result(answer.result().arrays["data"].view(np.uint8))
            else:
                found.set_exception(fault)

        self.ask(rank, Message("get", {"name": name, "at": at, "count": count})).add_done_callback(give)
        return found

    def digests(self, rank: int, names: Sequence[str]) -> dict[str, str]:
        """See `parts.Elsewhere`."""
        with self._lock:
            puts, self._puts[rank] = self._puts[rank], []
        for put in puts:
            answer_of(put, self, ORDER_SECONDS)
        found = answer_of(self.ask(rank, Message("digests", {"names": list(names)})), self, ORDER_SECONDS).fields["digests"]
        return {str(name): str(digest) for name, digest in found.items()} if isinstance(found, dict) else {}

    def close(self) -> None:
        """Tell all to end, and give them a moment to: this side's end would else overtake the word."""
        self._closing = True
        for channel in self._channels:
            with contextlib.suppress(RankLostError):
                channel.send(Message("bye"))
        deadline = time.monotonic() + CLOSE_SECONDS
        for reader in self._readers:
            if reader is not threading.current_thread():
                reader.join(max(0.0, deadline - time.monotonic()))

    def lose(self, error: StoaError) -> None:
        """A Mac is of no use any more: everything that waits is told, once."""
        with self._lock:
            if self._fault is not None or self._closing:
                return
            self._fault = error
            waiting, self._waiting = list(self._waiting.values()), {}
        if self._is_ending():
            _log.info("wired_set_ended", reason=error.message)
        else:
            _log.error("wired_set_lost", kind=type(error).__name__, reason=error.message)
        for _, future in waiting:
            future.set_exception(error)
        self._on_lost(error)

    def _read(self, rank: int, channel: Channel) -> None:
        try:
            while True:
                answer = channel.receive()
                if answer.op == "beat":
                    continue
                number = answer.number("id")
                with self._lock:
                    found = self._waiting.pop(number, None)
                if found is None:
                    continue
                if answer.op == "done":
                    found[1].set_result(answer)
                    continue
                fault = read_fault(answer, f"Mac {rank}")
                found[1].set_exception(fault)
                if not isinstance(fault, _HARMLESS):
                    self.lose(fault)
        except StoaError as error:
            self.lose(error)


def answer_of(answer: "Future[Message]", ranks: Ranks, seconds: float) -> Message:
    """Wait for an answer. Raises what happened there; RankLostError, and ends the set, if nothing comes: that Mac beats, but hangs."""
    try:
        return answer.result(seconds)
    except TimeoutError as error:
        lost = RankLostError(f"a Mac of the set lives, and has not answered an order in {seconds:g} s")
        ranks.lose(lost)
        raise lost from error


@dataclass(slots=True)
class Stepping:
    """A step that other Macs still compute."""

    own: Drawn
    answers: "list[Future[Message]]"
    ranks: Ranks

    def result(self) -> Drawn:
        """Wait for it. Raises what happened on any of the Macs."""
        found = [answer_of(answer, self.ranks, STEP_SECONDS) for answer in self.answers]
        return read_drawn([Message("done", {}, drawn_answer(self.own)), *found])


class SetDecoder:
    """As `decoder.Decoder`, computed by all Macs of the set. `submit` and `result` let several steps be in flight."""

    def __init__(self, ranks: Ranks, model: Model, num_pages: int, num_slots: int) -> None:
        self._ranks = ranks
        self.record_routing, self.sampling = False, NEUTRAL
        self.num_pages, self.num_slots = num_pages, num_slots
        told = ranks.all(Message("pool", {"num_pages": num_pages, "num_slots": num_slots}))
        self._decoder = Decoder(model, num_pages, num_slots)
        self.cache_bytes = (self._decoder.num_cache_bytes, *(one.number("num_bytes") for one in told))
        """Of pages and slots, by rank."""

    def submit(self, work: Work, uniform: NDArray[np.float32]) -> "Stepping | Agreeing":
        """Tell all Macs the plan, compute this one's layers and hand them on. Raises GpuInterruptedError, RankLostError."""
        answers = self._tell("step", work, uniform)
        self._decoder.record_routing = self.record_routing
        return Stepping(self._own(work, uniform), answers, self._ranks)

    def step(self, work: Work, uniform: NDArray[np.float32]) -> Drawn:
        """One step, to its end."""
        return self.submit(work, uniform).result()

    def logits(self, work: Work) -> NDArray[np.float32]:
        """As `Decoder.logits`."""
        uniform = np.zeros(len(work.sequences), np.float32)
        answers = self._tell("logits", work, uniform)
        self._own(work, uniform)
        return answer_of(answers[-1], self._ranks, STEP_SECONDS).arrays["logits"].astype(np.float32)

    def reset(self) -> None:
        """New caches on all Macs."""
        self._ranks.all(Message("reset"))
        self._decoder.reset()

    def close(self) -> None:
        """Give the memory of pages and slots back on the other Macs."""
        self._ranks.all(Message("drop"))

    def _own(self, work: Work, uniform: NDArray[np.float32]) -> Drawn:
        try:
            return step_stage(self._decoder, work, uniform, is_last=False)
        except RankLostError as error:
            self._ranks.lose(error)
            raise

    def _tell(self, op: str, work: Work, uniform: NDArray[np.float32]) -> "list[Future[Message]]":
        settings = {"record_routing": self.record_routing, "sampling": sampling_fields(self.sampling)}
        order = step_order(op, work, uniform, settings)
        return [
            self._ranks.ask(rank, replace(order, fields={**settings, "revision": self._ranks.revision[rank]}))
            for rank in range(1, self._ranks.size)
        ]


@dataclass(slots=True)
class Agreeing:
    """A step that all Macs computed alike."""

    own: Drawn
    answers: "list[Future[Message]]"
    ranks: Ranks

    def result(self) -> Drawn:
        """Wait for the others. Raises LinkMismatchError, and ends the set, if one of them drew something else."""
        for rank, answer in enumerate(self.answers, 1):
            theirs = read_drawn([answer_of(answer, self.ranks, STEP_SECONDS)])
            if not _same(self.own, theirs):
                error = LinkMismatchError(
                    f"Mac {rank} drew other tokens from the same sums", hint="its chip rounds otherwise: split layers instead"
                )
                self.ranks.lose(error)
                raise error
        return self.own


class DealtDecoder(SetDecoder):
    """As `SetDecoder`, for layers that are dealt out: all Macs compute each step together, one step at a time."""

    def __init__(self, ranks: Ranks, model: TensorModel, link: Summing, num_pages: int, num_slots: int) -> None:
        super().__init__(ranks, model, num_pages, num_slots)
        self._link = link

    def submit(self, work: Work, uniform: NDArray[np.float32]) -> Agreeing:
        """Tell all Macs the plan and compute with them. Raises RankLostError, also where this Mac's part was interrupted."""
        answers = self._tell("step", work, uniform)
        self._decoder.record_routing, self._decoder.sampling = self.record_routing, self.sampling
        return Agreeing(self._together(lambda: self._decoder.step(work, uniform)), answers, self._ranks)

    def step(self, work: Work, uniform: NDArray[np.float32]) -> Drawn:
        """One step, to its end."""
        return self.submit(work, uniform).result()

    def logits(self, work: Work) -> NDArray[np.float32]:
        """As `Decoder.logits`."""
        answers = self._tell("logits", work, np.zeros(len(work.sequences), np.float32))
        found = self._together(lambda: self._decoder.logits(work))
        for answer in answers:
            answer_of(answer, self._ranks, STEP_SECONDS)
        return found

    def _together(self, compute: Callable[[], _Answer]) -> _Answer:
        try:
            return together(self._link, compute)
        except RankLostError as error:
            self._ranks.lose(error)
            raise


def _same(one: Drawn, other: Drawn) -> bool:
    routes = one.routes is other.routes if one.routes is None or other.routes is None else np.array_equal(one.routes, other.routes)
    return routes and np.array_equal(one.tokens, other.tokens) and one.logprobs.tobytes() == other.logprobs.tobytes()


class WiredSet:
    """The weights of one run on all Macs, and the decoder over them."""

    def __init__(
        self,
        ranks: Ranks,
        link: Wire,
        model_config: Mapping[str, object],
        layout: Layout,
        spans: Sequence[range],
        *,
        split: Split = "pipeline",
        plain_ops: Sequence[str] = (),
    ) -> None:
        """spans: the layers of each Mac, this one's first; with a tensor split of all Macs all layers.

        Raises WiredError for layers that cannot be dealt out to so many Macs.
        """
        self.ranks, self.spans, self.split, self._link = ranks, tuple(spans), split, link
        self.layout, self.config = layout, engine_config(model_config)
        if split == "tensor":
            check_shares(layout, self.config, ranks.size)
        told = {
            "model_config": dict(model_config), "raw_dtype": layout.raw_dtype, "layout_id": layout.layout_id,
            "plain_ops": list(plain_ops), "split": split, "ranks": ranks.size,
        }  # fmt: skip
        waiting = [
            ranks.ask(rank, Message("layers", {**told, "first": span.start, "stop": span.stop})) for rank, span in enumerate(spans) if rank
        ]
        self.weights = self._own_weights()
        arrays = self.weights.arrays
        self.model: Model = (
            TensorModel(self.config, arrays, ranks.size, link, without_kernels=plain_ops)
            if split == "tensor"
            else StageModel(self.config, arrays, spans[0], link, without_kernels=plain_ops)
        )
        answers = [answer_of(one, ranks, ORDER_SECONDS) for one in waiting]
        self.weights_bytes = (self.weights.num_bytes, *(answer.number("num_bytes") for answer in answers))
        """By rank."""
        _log.info("set_computes", ops=[self.model.ops, *(answer.text("ops") for answer in answers)])

    def decoder(self, num_pages: int, num_slots: int, *, record_routing: bool = False, sampling: Sampling = NEUTRAL) -> SetDecoder:
        """A decoder over new pages; the one before is of no use any more."""
        if isinstance(self.model, TensorModel):
            made: SetDecoder = DealtDecoder(self.ranks, self.model, self._link, num_pages, num_slots)
        else:
            made = SetDecoder(self.ranks, self.model, num_pages, num_slots)
        made.record_routing, made.sampling = record_routing, sampling
        return made

    def _own_weights(self) -> PartWeights:
        """This Mac's, and through their state the others'."""
        layout, num_layers, ranks = self.layout, self.config.num_layers, self.ranks
        if self.split == "tensor":
            return PartWeights(share_layout(layout, ranks.size).arrays, lambda views: DealtState(layout, views, ranks.size, ranks))
        holders = [frozenset(spec.name for spec in tensors_of(layout, span, num_layers)) for span in self.spans]
        return PartWeights(arrays_of(layout, self.spans[0], num_layers), lambda views: SpreadState(layout, views, holders, ranks))

    def peaks(self) -> tuple[int, ...]:
        """The most bytes MLX has had on each Mac."""
        return (mx.get_peak_memory(), *(one.number("peak_bytes") for one in self.ranks.all(Message("peak"))))
