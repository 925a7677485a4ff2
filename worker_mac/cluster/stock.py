"""The pipeline over mlx-lm's own models: llama and its like, olmoe, nemotron_h, lfm2, whatever their bits.

A model is cut to a run of its layers, with caches for these only, and fed like the whole one. Runs of this project have
policies of the lfm2 families, which `stage.py` computes; this is for models that only mlx-lm knows.

Legend: B sequences, T tokens, D hidden size, V vocabulary.
"""

from collections.abc import Sequence
from typing import Any, Final

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import create_attention_mask, create_ssm_mask
from mlx_lm.models.cache import make_prompt_cache

from stoa.contracts.errors import WiredError
from worker_mac.cluster.stage import Neighbours

FAMILIES: Final = ("lfm2", "lfm2_moe", "llama", "mistral", "nemotron_h", "olmoe", "qwen2", "qwen3", "qwen3_moe")


class StockStage:
    """Some consecutive layers of an mlx-lm model; `model` loses the others."""

    def __init__(self, model: nn.Module, layers: range, link: Neighbours) -> None:
        """Raises WiredError for a family whose layers are called in a way that is not known here."""
        found: Any = model
        if found.model_type not in FAMILIES:
            raise WiredError(f"layers of {found.model_type} cannot be split here", hint=f"known are {', '.join(FAMILIES)}")
        self._model, self._link = found, link
        self._body: Any = found.backbone if "backbone" in found else found.model
        num_layers = len(self._body.layers)
        self.is_first, self.is_last = layers.start == 0, layers.stop == num_layers
        self._body.layers = self._body.layers[layers.start : layers.stop]
        self._tied = "lm_head" not in found
        self._embed_name = "embeddings" if "embeddings" in self._body else "embed_tokens"
        self.dtype, self.hidden_size = self._dtype(), int(found.args.hidden_size)
        if not self.is_first and not (self.is_last and self._tied):
            del self._body[self._embed_name]
        if not self.is_last:
            for owner, name in ((found, "lm_head"), *((self._body, name) for name in ("norm", "norm_f", "embedding_norm"))):
                if name in owner:
                    del owner[name]
        self.cache: list[Any] = make_prompt_cache(found)

    @property
    def num_bytes(self) -> int:
        """Bytes of the weights that are here."""
        return sum(array.nbytes for array in _leaves(self._model.parameters()))

    @property
    def num_cache_bytes(self) -> int:
        """Bytes of keys, values and states of these layers."""
        return sum(array.nbytes for one in self.cache for array in _leaves(one.state))

    def __call__(self, tokens: mx.array) -> mx.array | None:
        """Feed tokens int32 [B, T]: on the last Mac logits [B, T, V], else None."""
        shape = (*tokens.shape, self.hidden_size)
        x_BTD = self._body[self._embed_name](tokens) if self.is_first else self._link.receive(shape, self.dtype)
        x_BTD = self._run(x_BTD)
        if not self.is_last:
            mx.eval(x_BTD, [one.state for one in self.cache])
            self._link.send(x_BTD)
            return None
        name = next(name for name in ("norm", "norm_f", "embedding_norm") if name in self._body)
        x_BTD = self._body[name](x_BTD)
        logits = self._body[self._embed_name].as_linear(x_BTD) if self._tied else self._model.lm_head(x_BTD)
        mx.eval(logits, [one.state for one in self.cache])
        return logits

    def _run(self, x: mx.array) -> mx.array:
        caches = iter(self.cache)
        pairs = [(layer, next(caches) if _keeps(layer) else None) for layer in self._body.layers]
        # Masks come from layers that are here: the whole model's would look at another Mac's cache.
        window = getattr(self._body, "sliding_window", None)
        masks: dict[str, Any] = {}
        for layer, cache in pairs:
            kind = _kind(layer)
            if kind not in masks and kind != "other":
                if kind == "state":
                    masks[kind] = create_ssm_mask(x, cache)
                else:
                    masks[kind] = (
                        create_attention_mask(x, cache, window_size=window) if kind == "sliding" else create_attention_mask(x, cache)
                    )
        for layer, cache in pairs:
            x = layer(x, masks.get(_kind(layer)), cache)
        return x

    def _dtype(self) -> mx.Dtype:
        """Of activations: that of the norms, which are never quantised."""
        layer = self._body.layers[0]
        name = next(name for name in ("input_layernorm", "operator_norm", "norm") if name in layer)
        return layer[name].weight.dtype


def _kind(layer: Any) -> str:
    """Which mask a layer takes."""
    block = getattr(layer, "block_type", "")
    if block:
        return {"*": "attention", "M": "state"}.get(block, "other")
    if getattr(layer, "is_attention_layer", True) is False:
        return "state"
    return "sliding" if getattr(layer, "use_sliding", False) else "attention"


def _keeps(layer: Any) -> bool:
    """True for a layer that has a cache."""
    return _kind(layer) != "other"


def _leaves(tree: Any) -> list[mx.array]:
    if isinstance(tree, mx.array):
        return [tree]
    parts: Sequence[Any] = list(tree.values()) if isinstance(tree, dict) else list(tree) if isinstance(tree, list | tuple) else []
    return [leaf for part in parts for leaf in _leaves(part)]
