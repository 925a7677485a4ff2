"""What every Mac of a wired set but the first does: it holds its layers, does as it is told, and answers.

It knows no bucket, no Temporal and no environment, and keeps nothing on disk. It ends when the first Mac says so or is
gone. All but digests is done in the order of the orders, on the one thread that touches MLX.
"""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import mlx.core as mx
import numpy as np
import structlog
from numpy.typing import NDArray

from stoa.contracts.errors import FormatError, GpuInterruptedError, StoaError, WrongStateError
from stoa.weights.layout import RawType
from worker_mac.cluster.orders import drawn_answer, fault_answer, read_change, read_sampling, read_step
from worker_mac.cluster.parts import PartState, PartWeights
from worker_mac.cluster.split import arrays_of
from worker_mac.cluster.stage import StageModel, step_stage
from worker_mac.cluster.tensor import TensorModel, Wire, check_shares, share_layout, together
from worker_mac.cluster.wire import Channel, Message
from worker_mac.decoder import Decoder
from worker_mac.families import engine_config, engine_layout
from worker_mac.holds import Awake, wired_bytes
from worker_mac.memory import SPARE_BYTES
from worker_mac.player import bound_memory

_log = structlog.get_logger(__name__)
Numbers = Mapping[str, NDArray[np.generic]]


class Follower:
    """One Mac's layers, under orders."""

    def __init__(self, channel: Channel, link: Wire, limit_bytes: int | None = None) -> None:
        """limit_bytes: what weights and pages may take of this Mac; None for no limit."""
        self._channel, self._link, self._limit_bytes = channel, link, limit_bytes
        self._awake = Awake()
        self._weights: PartWeights | None = None
        self._model: StageModel | TensorModel | None = None
        self._decoder: Decoder | None = None
        self._revision = 0
        """Writes to the weights so far: a plan is for weights of one revision."""
        self._digests = ThreadPoolExecutor(1, thread_name_prefix="digests")

    def run(self) -> None:
        """Do as told until told to end. Raises RankLostError if the first Mac is gone, and what makes this one useless."""
        bound_memory(self._limit_bytes)
        try:
            self._obey()
        finally:
            self._let_go()
            self._channel.close()

    def _obey(self) -> None:
        while True:
            order = self._channel.receive()
            if order.op == "bye":
                self._digests.shutdown()
                return
            if order.op == "beat":
                continue
            number = order.number("id")
            try:
                if order.op in ("digests", "get"):
                    self._digests.submit(self._tell_bytes, number, order)
                    continue
                fields, arrays = self._do(order)
            except StoaError as error:
                _log.warning("order_failed", op=order.op, reason=error.message)
                self._channel.send(fault_answer(error, number))
                if order.op in ("step", "logits") and not isinstance(error, GpuInterruptedError):
                    # Others may wait for this step in a collective, or have sent what would be taken for the next one's.
                    raise
                continue
            self._channel.send(Message("done", {"id": number, **fields}, arrays))

    def _do(self, order: Message) -> tuple[dict[str, object], Numbers]:
        match order.op:
            case "layers":
                return self._take_layers(order), {}
            case "put":
                self._write().put(order.text("name"), order.number("at"), order.arrays["data"].tobytes())
            case "apply":
                self._write().apply(read_change(order))
            case "pool":
                self._decoder = None
                mx.clear_cache()
                self._decoder = Decoder(self._ready(), order.number("num_pages"), order.number("num_slots"))
                self._hold(self._decoder.num_cache_bytes)
                return {"num_bytes": self._decoder.num_cache_bytes}, {}
            case "reset":
                self._pool().reset()
            case "drop":
                self._decoder = None
                mx.clear_cache()
                self._let_go()
            case "step" | "logits":
                return {}, self._step(order)
            case "peak":
                return {"peak_bytes": mx.get_peak_memory(), "weights_bytes": self._held().num_bytes}, {}
            case _:
                raise FormatError(f"an order {order.op!r} that is not known here")
        return {}, {}

    def _hold(self, cache_bytes: int) -> None:
        """While there are pages, this Mac stays awake and its weights stay in memory."""
        self._awake.hold()
        if mx.metal.is_available():
            mx.set_wired_limit(wired_bytes(self._held().num_bytes + cache_bytes + SPARE_BYTES, self._limit_bytes))

    def _let_go(self) -> None:
        self._awake.release()
        if mx.metal.is_available():
            mx.set_wired_limit(0)

    def _take_layers(self, order: Message) -> dict[str, object]:
        model_config = order.fields["model_config"]
        if not isinstance(model_config, dict):
            raise FormatError("an order without a model's config")
        layout = engine_layout(model_config, _raw_type(order.text("raw_dtype")))  # pyright: ignore[reportUnknownArgumentType]
        if layout.layout_id != order.text("layout_id"):
            raise FormatError(
                "this program makes another layout of the model's config",
            )
        config = engine_config(model_config)  # pyright: ignore[reportUnknownArgumentType]
        layers, plain_ops = range(order.number("first"), order.number("stop")), order.texts("plain_ops")
        if order.text("split") == "tensor":
            ranks = order.number("ranks")
            check_shares(layout, config, ranks)
            held, specs = share_layout(layout, ranks), share_layout(layout, ranks).arrays
        else:
            ranks, held, specs = 1, layout, arrays_of(layout, layers, config.num_layers)
        weights = PartWeights(specs, lambda views: PartState(held, views))
        self._weights, self._decoder = weights, None
        if ranks > 1:
            self._model = TensorModel(config, weights.arrays, ranks, self._link, without_kernels=plain_ops)
        else:
            self._model = StageModel(config, weights.arrays, layers, self._link, without_kernels=plain_ops)
        _log.info("layers_taken", first=layers.start, stop=layers.stop, share=f"1/{ranks}", bytes=weights.num_bytes)
        return {"num_bytes": weights.num_bytes, "ops": self._model.ops}

    def _write(self) -> PartState:
        held = self._held()
        held.settle()
        self._revision += 1
        return held.part

    def _step(self, order: Message) -> Numbers:
        work, uniform = read_step(order)
        if order.number("revision") != self._revision:
            raise WrongStateError(
                f"weights here are of revision {self._revision}, the plan is for {order.number('revision')}",
                hint="an update is missing on one Mac: the weights are rebuilt",
            )
        decoder, model = self._pool(), self._ready()
        decoder.record_routing, decoder.sampling = bool(order.fields.get("record_routing")), read_sampling(order)
        if isinstance(model, TensorModel):
            if order.op == "logits":
                together(self._link, lambda: decoder.logits(work))
                return {}
            return drawn_answer(together(self._link, lambda: decoder.step(work, uniform)))
        if order.op == "logits" and model.is_last:
            return {"logits": decoder.logits(work)}
        return drawn_answer(step_stage(decoder, work, uniform, is_last=model.is_last))

    def _tell_bytes(self, number: int, order: Message) -> None:
        """Digests of arrays, or bytes of one."""
        try:
            part = self._held().part
            if order.op == "digests":
                self._channel.send(Message("done", {"id": number, "digests": part.digests_of(order.texts("names"))}))
                return
            data = part.get(order.text("name"), order.number("at"), order.number("count"))
            self._channel.send(Message("done", {"id": number}, {"data": data}))
        except KeyError as error:
            self._channel.send(fault_answer(FormatError(f"no array {error} here"), number))
        except StoaError as error:
            _log.warning("bytes_not_told", reason=error.message)

    def _held(self) -> PartWeights:
        if self._weights is None:
            raise FormatError("an order about weights before any layers")
        return self._weights

    def _ready(self) -> StageModel | TensorModel:
        if self._model is None:
            raise FormatError("an order to compute before any layers")
        return self._model

    def _pool(self) -> Decoder:
        if self._decoder is None:
            raise FormatError("an order to compute before any pages")
        return self._decoder


def _raw_type(name: str) -> RawType:
    if name == "float32" or name == "bfloat16":
        return name
    raise FormatError(f"an order for raw tensors of type {name!r}")
