"""Which Mac of a wired set computes which layers, and what of the weights it therefore holds. Pure.

A step takes as long as its slowest stage, and a stage as long as its weights take to be read once: layers go by each
Mac's bandwidth, within each Mac's memory. The tied embedding stands at both ends.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from stoa.contracts.errors import WiredError
from stoa.weights.layout import ArraySpec, Layout, TensorSpec

Split = Literal["pipeline", "tensor"]
"""What is shared out: runs of layers, or rows and columns of every layer."""
_LAYERS = "model.layers."
_EMBEDDING = "model.embed_tokens."
_LAST = ("model.embedding_norm.", "model.head.")
"""What stands on the last Mac alone."""


@dataclass(frozen=True, slots=True)
class Strength:
    """What one Mac has. `limit_bytes`: what weights and pages may take, None for no limit; `bandwidth`: of its memory, bytes a second."""

    limit_bytes: int | None
    bandwidth: float


@dataclass(frozen=True, slots=True)
class Found:
    """What a Mac finds of itself. `recommended_bytes`: what its system lets a GPU have, 0 if it says nothing; `chip`: as MLX names it."""

    recommended_bytes: int
    bandwidth_bytes: int
    chip: str


def limit_bytes(stated: int, recommended: int, fraction: float) -> int | None:
    """What weights and pages may take of a Mac: as stated, else a fraction of what its system recommends; None for no limit."""
    return stated or int(recommended * fraction) or None


def tensors_of(layout: Layout, layers: range, num_layers: int) -> tuple[TensorSpec, ...]:
    """The tensors that the Mac with these layers holds."""
    is_tied = not any(spec.name.startswith(_LAST[1]) for spec in layout.tensors)

    def held(name: str) -> bool:
        if name.startswith(_LAYERS):
            return int(name.removeprefix(_LAYERS).partition(".")[0]) in layers
        is_last = layers.stop == num_layers
        if name.startswith(_LAST):
            return is_last
        return layers.start == 0 or (is_last and is_tied)

    return tuple(spec for spec in layout.tensors if held(spec.name))


def arrays_of(layout: Layout, layers: range, num_layers: int) -> tuple[ArraySpec, ...]:
    """The stored arrays of `tensors_of`."""
    return tuple(array for spec in tensors_of(layout, layers, num_layers) for array in spec.arrays)


def num_bytes_of(layout: Layout, layers: range, num_layers: int) -> int:
    """Bytes of `arrays_of`."""
    return sum(array.num_bytes for array in arrays_of(layout, layers, num_layers))


def layer_bytes(layout: Layout, num_layers: int) -> tuple[tuple[int, ...], int]:
    """Bytes of each layer's weights, and of the embedding."""
    layers = [0] * num_layers
    for spec in layout.tensors:
        if spec.name.startswith(_LAYERS):
            layers[int(spec.name.removeprefix(_LAYERS).partition(".")[0])] += sum(array.num_bytes for array in spec.arrays)
    embedding = sum(array.num_bytes for spec in layout.tensors if spec.name.startswith(_EMBEDDING) for array in spec.arrays)
    return tuple(layers), embedding


def split_layers(weights: Sequence[int], pools: Sequence[int], end_bytes: int, spare_bytes: int, macs: Sequence[Strength]) -> list[range]:
    """Runs of layers, one a Mac in order, whose slowest is as quick as can be, among those that fit.

    Args:
        weights: bytes of each layer's weights.
        pools: bytes that each layer's keys, values and tails take at least.
        end_bytes: of the embedding: held at both ends, read in each step at the last.
        spare_bytes: what a step takes beside them on any Mac.
        macs: in the order of the ring.

    Raises:
        WiredError: fewer layers than Macs, or no split fits.
    """
    num, last = len(weights), len(macs) - 1
    if num < len(macs):
        raise WiredError(f"{num} layers cannot be split over {len(macs)} Macs", hint="leave some Macs out")

    def seconds(mac: int, start: int, stop: int) -> float:
        held = sum(weights[start:stop])
        need = held + sum(pools[start:stop]) + spare_bytes + end_bytes * (mac in (0, last))
        limit = macs[mac].limit_bytes
        if limit is not None and need > limit:
            return float("inf")
        return (held + end_bytes * (mac == last)) / macs[mac].bandwidth

    # best[stop]: (slowest stage, first layer of the stage before) for the Macs so far and the layers before `stop`.
    best: list[dict[int, tuple[float, int]]] = [{stop: (seconds(0, 0, stop), 0) for stop in range(1, num + 1)}]
    for mac in range(1, len(macs)):
        before = best[-1]
        best.append(
            {
                stop: min((max(before[start][0], seconds(mac, start, stop)), start) for start in range(mac, stop))
                for stop in range(mac + 1, num + 1)
            }
        )
    if best[-1][num][0] == float("inf"):
        raise WiredError(
            f"weights of {sum(weights) + end_bytes} bytes and the least of pages do not fit these {len(macs)} Macs",
            hint="wire one more, or raise memory_fraction",
        )
    found, stop = [], num
    for mac in range(last, -1, -1):
        start = best[mac][stop][1]
        found.append(range(start, stop))
        stop = start
    return found[::-1]
