"""One rank of what `benchmarks.wired` measures: started by `mlx.launch`, several on one machine, over MLX's real ring.

Rank 0 compares what the set gives with what one process gives, and writes it as JSON to its --out.
"""

import argparse
import importlib
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from benchmarks.wired_cases import DENSE, EIGHT_WAYS, STOCK, TEN_LAYERS, Talk, castings, random_state, write_into
from metal.sizes import PAGE_TOKENS
from stoa.contracts.errors import LinkMismatchError, StoaError, WiredError
from stoa.rollouts.records import Episode
from worker_mac.cluster.follow import Follower
from worker_mac.cluster.lanes import Lane, Lanes
from worker_mac.cluster.lead import Ranks, SetDecoder, WiredSet
from worker_mac.cluster.link import RingLink, Watchdog
from worker_mac.cluster.set_engine import split_model
from worker_mac.cluster.split import Strength, num_bytes_of
from worker_mac.cluster.stock import StockStage
from worker_mac.cluster.wire import Channel
from worker_mac.decoder import Decoder
from worker_mac.ending import leave
from worker_mac.forced import Forced
from worker_mac.memory import SPARE_BYTES
from worker_mac.model import Model
from worker_mac.model_config import read_model_config
from worker_mac.pace import Pace
from worker_mac.pages import Pages, PoolKey
from worker_mac.schedule import Schedule, least_pages
from worker_mac.sweep import Casting, Played, Sweep, cast
from worker_mac.weights import LiveWeights

NUM_PAGES, FEW_PAGES = 14, 9
MOST_SWEPT = 4
"""Ranks of this machine that play whole sweeps of a tensor split; more of them would wait for its cores for many minutes."""
STEP_TOKENS = 96
Found = dict[str, Any]


class Slow(Pace):
    """Steps of at most so many tokens, so that prompts are fed in several."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = STEP_TOKENS

    def saw(self, num_tokens: int, seconds: float) -> None:
        """Nothing is learned from it."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Be one rank; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.wired_rank")
    parser.add_argument("mode", choices=("pipeline", "tensor", "stock", "mismatch"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--control", type=int, default=0)
    asked = parser.parse_args(arguments)
    mx.set_default_device(mx.cpu)
    link = RingLink(mx.distributed.init(strict=True, backend="ring"), Watchdog(partial(_stuck, asked.out)))
    if asked.mode == "pipeline":
        found = pipeline(link, asked.control)
    elif asked.mode == "tensor":
        found = tensor(link, asked.control)
    elif asked.mode == "stock":
        found = stock(link)
    else:
        found = mismatch(link)
    if asked.mode != "mismatch":
        # Whoever ends first would break the ring of those that are not done.
        mx.eval(mx.distributed.all_sum(mx.ones((1,)), group=mx.distributed.init(backend="ring")))
    if found is not None:
        part = asked.out.with_suffix(".part")
        part.write_text(json.dumps(found), "utf-8")
        part.replace(asked.out)
    return 0


def _stuck(out: Path, what: str) -> None:
    sys.stderr.write(f"{out.name}: {what}\n")
    leave(1)


def pipeline(link: RingLink, port: int) -> Found | None:
    """Whole multi-turn sweeps with evictions, twice: on this process alone, and on the set with two halves in flight."""
    ranks = _meet(link, port)
    if ranks is None:
        return None
    found: Found = {}
    for name, config in (("lfm2_moe", TEN_LAYERS), ("lfm2", DENSE)):
        found[name] = _compare(ranks, link, config)
    ranks.close()
    return found


def _meet(link: RingLink, port: int) -> Ranks | None:
    """On rank 0 the others; they follow to the end, and get None."""
    if link.rank:
        connection = _call(port)
        connection.sendall(bytes([link.rank]))
        channel = Channel(connection, "rank 0")
        channel.start_beating()
        Follower(channel, link).run()
        return None
    waiting: dict[int, Channel] = {}
    with socket.create_server(("127.0.0.1", port)) as listener:
        while len(waiting) < link.size - 1:
            connection, _ = listener.accept()
            rank = connection.recv(1)[0]
            waiting[rank] = Channel(connection, f"rank {rank}")
    return Ranks([waiting[rank] for rank in range(1, link.size)], _lost)


def _lost(error: StoaError) -> None:
    sys.stderr.write(f"lost: {error.message}\n")
    leave(1)


def _call(port: int) -> socket.socket:
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port), timeout=5)
        except OSError:
            time.sleep(0.1)


def _compare(ranks: Ranks, link: RingLink, config: Mapping[str, object]) -> Found:
    state, parsed = random_state(config), read_model_config(config)
    environment, who = Talk(), castings()
    least = PoolKey(0, "", PAGE_TOKENS, "float32")
    # Each rank is told that it may give three quarters of the weights: too little for one, enough for two.
    limit = SPARE_BYTES + int(0.75 * state.layout.num_bytes)
    macs = [Strength(limit, 1.0)] * link.size
    try:
        split_model(parsed, state.layout, macs[:1], environment.limits.max_episode_tokens)
        fits_one = True
    except WiredError:
        fits_one = False
    spans = split_model(parsed, state.layout, macs, environment.limits.max_episode_tokens)
    mx.synchronize()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    wired = WiredSet(ranks, link, config, state.layout, spans)
    write_into(wired.weights.state, state)
    peaks = (mx.get_peak_memory() - before, *wired.peaks()[1:])
    sent, told = link.bytes_sent, ranks.bytes_sent
    began = time.perf_counter()
    decoder, on_set, played = _play_set(wired, environment, who)
    seconds = time.perf_counter() - began
    num_steps = sum(one.num_steps for one in played)
    sent, told = link.bytes_sent - sent, ranks.bytes_sent - told
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    live = LiveWeights.of(state)
    whole_peak = mx.get_peak_memory() - before
    model = Model(parsed, live.arrays)
    pages = Pages(NUM_PAGES, least)
    schedule = cast(environment, who, pages, max_rows=len(who))
    alone: dict[int, list[Episode]] = {}
    rows = Decoder(model, pages.num_pages, schedule.num_slots, record_routing=bool(parsed.num_experts))
    played_alone = Sweep(rows, schedule, environment, who, alone.__setitem__, pace=Slow()).play()
    whole_cache = Decoder(model, decoder.num_pages, decoder.num_slots).num_cache_bytes
    return {
        "difference": max(_difference(on_set, alone), _logits_difference(wired, model)),
        "weights_fraction": max(num_bytes_of(state.layout, span, parsed.num_layers) for span in spans) / state.layout.num_bytes,
        # Peaks of a process are those of the first model it held.
        "peak_weights_fraction": max(peaks) / whole_peak if config is TEN_LAYERS else None,
        "kv_fraction": max(decoder.cache_bytes) / whole_cache,
        "layers": [[span.start, span.stop] for span in spans],
        "fits_one_rank": fits_one,
        "runs_on_the_set": all(one.ended for one in played),
        "hidden_bytes_a_step": sent / num_steps,
        "plan_bytes_a_step": told / num_steps,
        "num_steps": num_steps,
        "seconds_set": seconds,
        "seconds_alone": played_alone.seconds,
        "num_episodes": sum(one.num_episodes for one in played),
        "num_turns": sum(len(episode.turns) for episodes in alone.values() for episode in episodes),
        "num_parked": sum(one.num_parked for one in played),
        "num_parked_alone": played_alone.num_parked,
        "tokens": played_alone.num_sampled_tokens,
    }


def _play_set(wired: WiredSet, environment: Talk, who: Sequence[Casting]) -> tuple[SetDecoder, dict[int, list[Episode]], list[Played]]:
    """Two halves in flight, each with half of the pages."""
    each = 1 + (NUM_PAGES - 1) // 2
    halves = [[one for one in who if one.group % 2 == half] for half in (0, 1)]
    key = PoolKey(0, "", PAGE_TOKENS, "float32")
    schedules = [cast(environment, half, Pages(each, key), max_rows=len(half)) for half in halves]
    if each < least_pages(Pages(each, key), environment.limits.max_episode_tokens):
        raise AssertionError("pages for one episode")
    decoder = wired.decoder(2 * each - 1, 1 + sum(one.num_slots - 1 for one in schedules), record_routing=bool(wired.config.num_experts))
    lanes, found, plays, slot = Lanes(decoder), dict[int, list[Episode]](), list[Callable[[], Played]](), 0
    for number, schedule in enumerate(schedules):
        lane = Lane(lanes, number * (each - 1), slot)
        plays.append(Sweep(lane, schedule, environment, halves[number], found.__setitem__, pace=Slow()).play)
        slot += schedule.num_slots - 1
    return decoder, found, lanes.run(plays)


def _difference(one: Mapping[int, list[Episode]], other: Mapping[int, list[Episode]]) -> float:
    """Largest distance of two logprobs; infinite if a token, a group or a chosen expert is another."""
    worst = 0.0
    if one.keys() != other.keys():
        return float("inf")
    for group, episodes in one.items():
        for a, b in zip(episodes, other[group], strict=True):
            if not np.array_equal(a.ids, b.ids) or not np.array_equal(_routes(a), _routes(b)):
                return float("inf")
            worst = max(worst, float(np.abs(a.logprobs - b.logprobs).max(initial=0.0)))
    return worst


def _routes(episode: Episode) -> np.ndarray:
    return np.zeros(0) if episode.routing is None else episode.routing


def _logits_difference(wired: WiredSet, model: Model) -> float:
    """Of prefill and decode, whole distributions."""
    tokens = np.random.default_rng(3).integers(0, model.config.vocab_size, (3, 36)).astype(np.int32)

    def walk(rows: Forced) -> list[np.ndarray]:
        return [rows.feed([row[:33] for row in tokens]), *rows.walk(tokens[:, 33:])]

    return _worst(walk(Forced(model, 3, 64, make=wired.decoder)), walk(Forced(model, 3, 64)))


def _worst(one: Sequence[np.ndarray], other: Sequence[np.ndarray]) -> float:
    return max(float(np.abs(a - b).max()) for a, b in zip(one, other, strict=True))


def tensor(link: RingLink, port: int) -> Found | None:
    """Logits of prefill and decode, and of few ranks whole multi-turn sweeps with evictions: a share of every layer on each."""
    ranks = _meet(link, port)
    if ranks is None:
        return None
    state, parsed = random_state(EIGHT_WAYS), read_model_config(EIGHT_WAYS)
    spans = split_model(parsed, state.layout, [Strength(None, 1.0)] * link.size, Talk.limits.max_episode_tokens, "tensor")
    wired = WiredSet(ranks, link, EIGHT_WAYS, state.layout, spans, split="tensor")
    write_into(wired.weights.state, state)
    model = Model(parsed, LiveWeights.of(state).arrays)
    found: Found = {
        "difference": _logits_difference(wired, model),
        "weights_fraction": max(wired.weights_bytes) / state.layout.num_bytes,
    }
    if link.size <= MOST_SWEPT:
        swept = _sweep_dealt(wired, ranks, link, model)
        found |= swept | {"difference": max(found["difference"], swept["difference"])}
    ranks.close()
    return found


def _sweep_dealt(wired: WiredSet, ranks: Ranks, link: RingLink, model: Model) -> Found:
    """Six episodes on so few pages that one is parked, on the set and on one process."""
    environment, who = Talk(), [one for one in castings() if one.group < 2]

    def schedule() -> Schedule:
        return cast(environment, who, Pages(FEW_PAGES, PoolKey(0, "", PAGE_TOKENS, "float32")), max_rows=len(who))

    planned, on_set, alone = schedule(), dict[int, list[Episode]](), dict[int, list[Episode]]()
    decoder = wired.decoder(FEW_PAGES, planned.num_slots, record_routing=True)
    sent, told, began = link.bytes_sent, ranks.bytes_sent, time.perf_counter()
    played = Sweep(decoder, planned, environment, who, on_set.__setitem__, pace=Slow()).play()
    sent, told, seconds = link.bytes_sent - sent, ranks.bytes_sent - told, time.perf_counter() - began
    rows = Decoder(model, FEW_PAGES, planned.num_slots, record_routing=True)
    Sweep(rows, schedule(), environment, who, alone.__setitem__, pace=Slow()).play()
    return {
        "difference": _difference(on_set, alone),
        "kv_fraction": max(decoder.cache_bytes) / rows.num_cache_bytes,
        "runs_on_the_set": played.ended,
        "bytes_a_step": sent / played.num_steps,
        "plan_bytes_a_step": told / played.num_steps,
        "num_steps": played.num_steps,
        "seconds_set": seconds,
        "num_turns": sum(len(episode.turns) for episodes in on_set.values() for episode in episodes),
        "num_parked": played.num_parked,
    }


def stock(link: RingLink) -> Found | None:
    """Models that only mlx-lm knows, at 4 and 8 bits."""
    found: Found = {}
    for name, config in STOCK.items():
        for bits in (4, 8):
            num_layers = len(_stock(config, bits).layers)
            edges = [round(rank * num_layers / link.size) for rank in range(link.size + 1)]
            span = [range(first, stop) for first, stop in pairwise(edges)][link.rank]
            stage, whole, worst = StockStage(_stock(config, bits), span, link), _stock(config, bits), 0.0
            ids = np.random.default_rng(0).integers(0, 96, (2, 24)).astype(np.int32)
            from mlx_lm.models.cache import make_prompt_cache

            cache = make_prompt_cache(whole)
            for first, stop in ((0, 13), (13, 21), (21, 22), (22, 23), (23, 24)):
                tokens = mx.array(ids[:, first:stop])
                logits = stage(tokens)
                if logits is not None:
                    worst = max(worst, float(np.abs(np.array(logits) - np.array(whole(tokens, cache=cache))).max()))
            told = mx.distributed.all_max(mx.array([worst]), group=mx.distributed.init(backend="ring"))
            found[f"{name}-{bits}"] = float(np.array(told)[0])
    return found if link.rank == 0 else None


def _stock(config: Mapping[str, Any], bits: int) -> Any:
    module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    mx.random.seed(0)
    model = module.Model(module.ModelArgs.from_dict(dict(config)))
    nn.quantize(model, group_size=32, bits=bits, class_predicate=lambda _, part: hasattr(part, "to_quantized"))
    mx.eval(model.parameters())
    return model


def mismatch(link: RingLink) -> Found | None:
    """Sums of unlike shapes on all ranks, then rank 0 sends another type than rank 1 expects: how long until rank 1 knows of each."""
    began, sums = time.perf_counter(), ""
    try:
        link.agree((4 + link.rank, 64), mx.float32, 3)
    except LinkMismatchError as error:
        sums = error.message
    sums_seconds = time.perf_counter() - began
    if link.rank == 0:
        link.send(mx.zeros((4, 64), mx.bfloat16))
        return {"sent": True}
    if link.rank == 1:
        began = time.perf_counter()
        try:
            link.receive((4, 64), mx.float32)
        except LinkMismatchError as error:
            path = Path(sys.argv[sys.argv.index("--out") + 1]).with_suffix(".mismatch")
            told = {"seconds": time.perf_counter() - began, "message": error.message, "sums": sums, "sums_seconds": sums_seconds}
            path.write_text(json.dumps(told), "utf-8")
        # What was sent stays unread: a set ends here, as a whole.
        os._exit(0)
    return None


if __name__ == "__main__":
    leave(main())
