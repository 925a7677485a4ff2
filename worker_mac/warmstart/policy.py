"""The policy being taught: mlx_lm's own model of a hub checkpoint, what of it is trained, and the gradient of one batch.

Either every weight is trained in fp32, or adapters over frozen weights that may be quantised. Splitting matrices over
ranks is `tensor.py`'s, writing the result `export.py`'s.

Legend: B rows, T tokens, P targets, D hidden size, V vocabulary.
"""

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear
from mlx_lm.tuner.lora import LoRALinear, LoRASwitchLinear
from mlx_lm.utils import load_model

from stoa.contracts.errors import CheckpointError
from worker_mac.warmstart.batches import Batch
from worker_mac.warmstart.settings import Settings

HEAD_ROWS: Final = 1024
"""Targets whose logits are in memory at once."""
GROUP_SIZE: Final = 64
_ROUTERS: Final = ("feed_forward.gate", "mlp.gate", "block_sparse_moe.gate")
_FROZEN: Final = ("expert_bias",)
_LINEAR: Final = (nn.Linear, nn.QuantizedLinear)
_SWITCH: Final = (SwitchLinear, QuantizedSwitchLinear)
Fresh = tuple[str, tuple[mx.array, mx.array]]
"""A matrix's path and the two halves of its adapter."""


class Head(NamedTuple):
    """What turns hidden states [P, D] into logits [P, V], and the path of the module that does."""

    call: Callable[[mx.array], mx.array]
    path: str


def flat(tree: object) -> dict[str, mx.array]:
    """A tree of arrays by flat name, in order."""
    return dict(sorted(cast(list[tuple[str, mx.array]], tree_flatten(tree))))


def number(array: mx.array) -> float:
    """The one number in an array."""
    return float(cast(float, array.item()))


def read_config(folder: Path) -> dict[str, object]:
    """config.json. Raises CheckpointError if it is not there, no JSON, or that of quantised weights."""
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: {error}", hint="name the folder of a hub checkpoint") from error
    if "quantization" in config or "quantization_config" in config:
        raise CheckpointError(
            f"{folder} holds quantised weights, and a run starts from a hub checkpoint",
            hint="name the checkpoint it was made from; --bits quantises it in memory",
        )
    return config


def load(folder: Path, settings: Settings) -> Any:
    """mlx_lm's model of a hub checkpoint, frozen but for what is to be trained in `full` mode, quantised if asked.

    Nothing is read yet: see `settle`.
    """
    try:
        model, _ = load_model(folder, lazy=True)
    except (ValueError, FileNotFoundError, KeyError, TypeError, RuntimeError) as error:
        raise CheckpointError(f"mlx_lm cannot open {folder}: {error}", hint="name the folder of a hub checkpoint") from error
    if settings.mode == "full":
        model.set_dtype(mx.float32)
        model.freeze(keys=list(_FROZEN), strict=False)
    else:
        if settings.bits:
            quantise(model, settings.bits)
        model.freeze()
    model.train()
    return model


def settle(model: Any) -> None:
    """Read, pack and cut the weights, one tensor at a time, so that no second copy of them is ever whole in memory."""
    for array in flat(model.parameters()).values():
        mx.eval(array)


def quantise(model: Any, bits: int) -> None:
    """Matrices whose rows divide into groups become packed ones, as the family says where it says."""
    rule = getattr(model, "quant_predicate", None)

    def wanted(path: str, module: Any) -> bool | dict[str, object]:
        if not hasattr(module, "to_quantized") or module.weight.shape[-1] % GROUP_SIZE:
            return False
        return True if rule is None else rule(path, module)

    nn.quantize(model, group_size=GROUP_SIZE, bits=bits, class_predicate=wanted)


def adapted_paths(model: Any, *, experts: bool) -> list[str]:
    """Paths of the matrices that adapters stand on: all inside the layers but the routers, in order."""
    kinds = (*_LINEAR, *_SWITCH) if experts else _LINEAR
    found = [path for path, module in model.named_modules() if isinstance(module, kinds) and ".layers." in f".{path}"]
    return sorted(path for path in found if not path.endswith(_ROUTERS))


def add_adapters(model: Any, settings: Settings) -> None:
    """Put an adapter on every matrix of `adapted_paths`, drawn from the seed in their order."""
    modules: dict[str, Any] = dict(model.named_modules())
    made: list[tuple[str, nn.Module]] = []
    for path, (lora_a, lora_b) in fresh_adapters(model, settings):
        kind = LoRASwitchLinear if isinstance(modules[path], _SWITCH) else LoRALinear
        adapter = kind.from_base(modules[path], r=settings.rank, scale=settings.scale)
        adapter.lora_a, adapter.lora_b = lora_a, lora_b
        made.append((path, adapter))
    model.update_modules(tree_unflatten(made))


def fresh_adapters(model: Any, settings: Settings) -> Iterator[Fresh]:
    """(path, halves) of new adapters in mlx_lm's shapes, fp32: the first uniform in +-1/sqrt(inputs), the second 0."""
    modules: dict[str, Any] = dict(model.named_modules())
    keys = mx.random.split(mx.random.key(settings.seed), max(1, len(paths := adapted_paths(model, experts=settings.experts))))
    for key, path in zip(keys, paths, strict=True):
        outputs, inputs = matrix_shape(modules[path])
        limit = 1 / math.sqrt(inputs)
        if isinstance(modules[path], _SWITCH):
            num = modules[path].weight.shape[0]
            shape_a, shape_b = (num, settings.rank, inputs), (num, outputs, settings.rank)
        else:
            shape_a, shape_b = (inputs, settings.rank), (settings.rank, outputs)
        yield path, (mx.random.uniform(-limit, limit, shape_a, key=key), mx.zeros(shape_b))


def matrix_shape(module: Any) -> tuple[int, int]:
    """(outputs, inputs) of a matrix, packed or not."""
    outputs, inputs = module.weight.shape[-2:]
    bits = getattr(module, "bits", None)
    return outputs, inputs if bits is None else inputs * 32 // bits


def checkpoint_layers(model: Any) -> None:
    """From now on each layer is computed once more in the backward pass and keeps nothing but its input."""
    made: dict[type[Any], type[Any]] = {}
    for layer in model.layers:
        kind = type(layer)
        if kind not in made:
            made[kind] = type(kind.__name__, (kind,), {"__call__": _checkpointed(kind.__call__)})
        layer.__class__ = made[kind]


def _checkpointed(call: Callable[..., mx.array]) -> Callable[..., mx.array]:
    def computed_twice(layer: Any, x: mx.array, *rest: object, **named: object) -> mx.array:
        def inner(trained: dict[str, object], x: mx.array) -> mx.array:
            layer.update(trained)
            return call(layer, x, *rest, **named)

        return mx.checkpoint(inner)(layer.trainable_parameters(), x)

    return computed_twice


@dataclass(frozen=True, slots=True)
class Gradient:
    """Of one batch: sum of weighted losses (nats), sum of weights, and the gradient of the first by parameter, fp32."""

    loss: float
    weight: float
    arrays: dict[str, mx.array]


class Policy:
    """A model and the gradient of its losses. Parameters go in and out by flat name."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self._head = _head_of(model)
        self._gradient = mx.value_and_grad(self._loss)

    @property
    def trained(self) -> dict[str, mx.array]:
        """What is trained, by name in order."""
        return flat(self.model.trainable_parameters())

    def take(self, arrays: dict[str, mx.array]) -> None:
        """Set parameters by name."""
        self.model.update(tree_unflatten(list(arrays.items())))

    def gradient(self, batch: Batch) -> Gradient:
        """Of the batch's summed loss."""
        before = self.model.trainable_parameters()
        loss, tree = self._gradient(before, batch)
        arrays = {name: array.astype(mx.float32) for name, array in flat(tree).items()}
        mx.eval(loss, arrays)
        self.model.update(before)
        return Gradient(number(loss), float(batch.weights.sum(dtype=np.float64)), arrays)

    def loss(self, batch: Batch) -> float:
        """Mean weighted loss of a batch, nats."""
        return number(self._loss(self.model.trainable_parameters(), batch)) / float(batch.weights.sum())

    def _loss(self, trained: dict[str, object], batch: Batch) -> mx.array:
        """Sum over targets of weight times negative log-likelihood; logits in fp32, of so many targets at once."""
        self.model.update(trained)
        ids_BT = mx.array(batch.ids)
        places_P, targets_P, weights_P = mx.array(batch.places), mx.array(batch.targets), mx.array(batch.weights)
        if self._head is None:
            logits_BTV = self.model(ids_BT)
            return _cross_entropy(logits_BTV.reshape(-1, logits_BTV.shape[-1])[places_P], targets_P, weights_P)
        hidden_BTD = self.model.model(ids_BT)
        hidden_PD = hidden_BTD.reshape(-1, hidden_BTD.shape[-1])[places_P]
        total = mx.zeros((), mx.float32)
        for start in range(0, len(batch.places), HEAD_ROWS):
            part = slice(start, start + HEAD_ROWS)
            total = total + self._part(self._head, hidden_PD[part], targets_P[part], weights_P[part])
        return total

    def _part(self, split: Head, hidden_PD: mx.array, targets_P: mx.array, weights_P: mx.array) -> mx.array:
        head, name = split

        def inner(trained: dict[str, mx.array], hidden_PD: mx.array) -> mx.array:
            self.model.update(tree_unflatten([(f"{name}.{key}", array) for key, array in trained.items()]))
            return _cross_entropy(head(hidden_PD), targets_P, weights_P)

        owner = dict(self.model.named_modules())[name]
        return mx.checkpoint(inner)(flat(owner.trainable_parameters()), hidden_PD)


def _cross_entropy(logits_PV: mx.array, targets_P: mx.array, weights_P: mx.array) -> mx.array:
    return (nn.losses.cross_entropy(logits_PV.astype(mx.float32), targets_P) * weights_P).sum()


def _head_of(model: Any) -> Head | None:
    """What turns the trunk's hidden states into logits and its path; None if the model does more than that between the two."""
    trunk = getattr(model, "model", None)
    if trunk is None or not hasattr(trunk, "embed_tokens"):
        return None
    if hasattr(model, "lm_head"):
        head, name = model.lm_head, "lm_head"
    else:
        head, name = trunk.embed_tokens.as_linear, "model.embed_tokens"
    probe = mx.array([[1, 2, 3]])
    try:
        same = mx.array_equal(head(trunk(probe)), model(probe))
    except (AttributeError, ValueError, TypeError):
        return None
    return Head(head, name) if bool(same.item()) else None
