"""Real sweeps for benchmarks, in this process: weights on the int8 grid, MLX's decoder, the demo task, no bucket.

The parts are the workers' own; what is missing here is everything between two machines. Groups come out as a Mac would
have shipped them.
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from environments import registry
from environments.base import Environment
from metal.sizes import PAGE_TOKENS
from stoa.rollouts.records import Episode, Fingerprint, Group
from stoa.weights import grid
from stoa.weights.layout import Layout, layout_of
from stoa.weights.state import WeightState
from worker_mac.decoder import Decoder
from worker_mac.model import Model
from worker_mac.model_config import read_model_config
from worker_mac.pages import Pages, PoolKey
from worker_mac.sampler import seed_of
from worker_mac.sweep import Casting, OnGroup, Played, Sweep, cast
from worker_mac.weights import LiveWeights

POLICY = Path(__file__).parents[1] / "environments" / "search" / "policy"
RUN, HOST = "benchmark", "mac-1"
Tensors = Iterable[tuple[str, NDArray[np.float32]]]


def demo_layout() -> Layout:
    """The demo policy's weights on the wire."""
    return layout_of(json.loads((POLICY / "config.json").read_text("utf-8")), "float32")


def demo_environment() -> Environment:
    """The demo's search task."""
    return registry.create("search", {}, (POLICY / "tokenizer.json").read_bytes())


def first_state(layout: Layout, tensors: Tensors) -> WeightState:
    """The first version of these fp32 masters: their grid is made here."""
    state = WeightState.empty(layout)
    by_name = layout.by_name
    for name, values in tensors:
        spec = by_name[name]
        if spec.kind == "int8":
            for array, found in zip(state.quantised(spec), grid.quantise(values), strict=True):
                array[...] = found.reshape(array.shape)
        else:
            state.bits(spec)[...] = values.reshape(-1).view(np.uint32)
    return state


def move_state(state: WeightState, tensors: Tensors, hysteresis: float) -> float:
    """Bring a state to later masters in place, as a publisher does; returns the share of codes that changed."""
    num_changed = 0
    by_name = state.layout.by_name
    for name, values in tensors:
        spec = by_name[name]
        if spec.kind != "int8":
            state.bits(spec)[...] = values.reshape(-1).view(np.uint32)
            continue
        codes, scales, biases = state.quantised(spec)
        found = grid.scan(values, codes, scales, biases, hysteresis)
        codes.reshape(-1)[found.positions] = found.codes
        scales.reshape(-1)[found.groups], biases.reshape(-1)[found.groups] = found.scales, found.biases
        codes.reshape(-1, 64)[found.groups] = found.group_codes
        num_changed += len(found.positions) + found.group_codes.size
    return num_changed / state.layout.num_codes


def play(model: Model, environment: Environment, castings: Sequence[Casting], on_group: OnGroup) -> Played:
    """One sweep on a pool in which every episode may become as long as any."""
    longest = -(-environment.limits.max_episode_tokens // PAGE_TOKENS)
    pages = Pages(2 + (len(castings) + len({casting.question_id for casting in castings})) * longest, PoolKey(0, "", PAGE_TOKENS, ""))
    schedule = cast(environment, castings, pages, max_rows=len(castings))
    rows = Decoder(model, pages.num_pages, schedule.num_slots)
    return Sweep(rows, schedule, environment, castings, on_group).play()


class Player:
    """Plays sweeps on int8 weights that are given anew for each."""

    def __init__(self, state: WeightState) -> None:
        mx.set_default_device(mx.cpu)
        mx.set_cache_limit(64 << 20)
        self._live = LiveWeights.of(state)
        self._model = Model(read_model_config(json.loads((POLICY / "config.json").read_text("utf-8"))), self._live.arrays)
        self.environment = demo_environment()

    def play(self, state: WeightState, question_ids: Sequence[str], *, group_size: int, version: int, sweep: int, seed: int) -> list[Group]:
        """One group a question, all in one batch, with these weights."""
        self._live.settle()
        self._live.state.copy_from(state)
        state_id = state.state_id()
        castings = [
            Casting(index, question, seed_of(seed, version, sweep, index, episode))
            for index, question in enumerate(question_ids)
            for episode in range(group_size)
        ]
        ended: dict[int, list[Episode]] = {}
        play(self._model, self.environment, castings, ended.__setitem__)
        return [
            Group(
                RUN, HOST, sweep, index, "train", question_ids[index], version, state_id, 1.0, 0, tuple(ended[index]),
                Fingerprint("mlx", "benchmark"),
            )
            for index in sorted(ended)
        ]  # fmt: skip
