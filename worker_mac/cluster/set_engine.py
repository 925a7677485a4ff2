"""A Mac's engine whose weights and pages are spread over a wired set: what of `versions.py` and `player.py` is different.

The engine itself, and all it says to the run, is that of one Mac.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

from metal.sizes import PAGE_TOKENS
from stoa.contracts.errors import WiredError
from stoa.weights.layout import Layout
from worker_mac.cluster.lanes import NUM_LANES, Lane, Lanes, places_of
from worker_mac.cluster.lead import SetDecoder, WiredSet
from worker_mac.cluster.split import Split, Strength, layer_bytes, num_bytes_of, split_layers
from worker_mac.cluster.tensor import check_shares, share_layout
from worker_mac.forced import check_batching
from worker_mac.memory import SPARE_BYTES, MemoryPlan, ModelBytes, Play, model_bytes, plan_memory
from worker_mac.model import Model
from worker_mac.model_config import ModelConfig
from worker_mac.pace import MOST_TOKENS
from worker_mac.pages import Pages, PoolKey
from worker_mac.player import Player
from worker_mac.sampler import NEUTRAL, Sampling
from worker_mac.schedule import Schedule
from worker_mac.sweep import Casting, OnGroup, Played, Sweep, cast
from worker_mac.versions import Served, Versions
from worker_mac.weights import LiveWeights

_WIDEST: Final = 64
"""Groups that memory is asked for at most."""


def split_model(
    config: ModelConfig, layout: Layout, macs: Sequence[Strength], longest_tokens: int, split: Split = "pipeline"
) -> list[range]:
    """Which layers go where, by memory and bandwidth; with a tensor split all go everywhere. Raises WiredError if no split fits."""
    if split == "tensor":
        _check_room(config, layout, macs, longest_tokens)
        return [range(config.num_layers)] * len(macs)
    weights, end = layer_bytes(layout, config.num_layers)
    item = 4 if layout.raw_dtype == "float32" else 2
    pools = []
    for layer in range(config.num_layers):
        part = bytes_of(config, layout, range(layer, layer + 1), item)
        pools.append(Play(1, longest_tokens).least_pages * part.page_bytes + 3 * part.slot_bytes)
    return split_layers(weights, pools, end, SPARE_BYTES, macs)


def _check_room(config: ModelConfig, layout: Layout, macs: Sequence[Strength], longest_tokens: int) -> None:
    """Raises WiredError unless an equal share of every layer fits each Mac."""
    check_shares(layout, config, len(macs))
    part = bytes_of(config, layout, range(config.num_layers), 4 if layout.raw_dtype == "float32" else 2, len(macs))
    need = part.weights_bytes + Play(1, longest_tokens).least_pages * part.page_bytes + 3 * part.slot_bytes + SPARE_BYTES
    for number, mac in enumerate(macs):
        if mac.limit_bytes is not None and need > mac.limit_bytes:
            raise WiredError(
                f"a share of every layer takes {need} bytes with the least of pages, Mac {number} may give {mac.limit_bytes}",
                hint='wire more Macs, raise memory_fraction, or leave "split" out of hosts.json: a small Mac takes fewer layers',
            )


def bytes_of(config: ModelConfig, layout: Layout, layers: range, item_bytes: int, ranks: int = 1) -> ModelBytes:
    """As `model_bytes`, of the Mac with these layers, or with a share of them that is dealt out to `ranks` Macs."""
    whole = model_bytes(config, layout, item_bytes=item_bytes, activation_bytes=item_bytes)
    attention = sum(layer in layers for layer in config.attention_layers)
    conv = len(layers) - attention
    held = sum(array.num_bytes for array in share_layout(layout, ranks).arrays)
    slot_bytes = conv * (config.conv_kernel - 1) * config.hidden_size * item_bytes
    return replace(
        whole,
        weights_bytes=held if ranks > 1 else num_bytes_of(layout, layers, config.num_layers),
        page_bytes=max(1, 2 * attention * whole.page_elements * item_bytes // ranks),
        slot_bytes=slot_bytes,
        row_bytes=whole.row_bytes if layers.stop == config.num_layers else 0,
    )


class SetVersions(Versions):
    """Weights of one run on a wired set."""

    def __init__(self, wired: WiredSet, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._set = wired

    def _new_memory(self) -> tuple[LiveWeights, Model]:
        """There is one."""
        return self._set.weights, self._set.model

    def _check(self, model: Model) -> None:
        check_batching(model, self._set.decoder)


class SetPlayer(Player):
    """Plays castings on a wired set, in two halves that are in flight at once."""

    def __init__(self, wired: WiredSet, macs: Sequence[Strength], *arguments: Any, **options: Any) -> None:
        self._set, self._macs = wired, macs
        item = 4 if wired.layout.raw_dtype == "float32" else 2
        ranks = len(wired.spans) if wired.split == "tensor" else 1
        self._bytes = [bytes_of(wired.config, wired.layout, span, item, ranks) for span in wired.spans]
        self._made: SetDecoder | None = None
        super().__init__(*arguments, **options)

    @property
    def holds_two(self) -> bool:
        """Never: a set is there because one set of weights is large."""
        return False

    def drop_pool(self) -> None:
        """Give the memory of the pages back, on all Macs."""
        if self._made is not None:
            self._made.close()
        self._made = None
        super().drop_pool()

    def play(
        self,
        served: Served,
        castings: Sequence[Casting],
        on_group: OnGroup,
        *,
        should_stop: Callable[[], bool],
        on_step: Callable[[int, int], None],
        record_routing: bool = False,
        sampling: Sampling = NEUTRAL,
    ) -> Played:
        """See `Player.play`."""
        plan = self._plan(castings)
        halves = self._halves(castings, plan)
        pages_each = 1 + (plan.num_pages - 1) // len(halves)
        key = PoolKey(served.version, served.state_id, PAGE_TOKENS, str(served.model.cache_shape.dtype))
        rows = max(1, plan.max_rows // len(halves))
        schedules = [
            cast(
                self._environment, half, Pages(pages_each, key), max_rows=min(rows, len(half)), expected_tokens=self._mean_tokens(castings)
            )
            for half in halves
        ]
        firsts, pool = places_of([(pages_each, schedule.num_slots) for schedule in schedules])
        decoder = self._set_decoder(*pool)
        decoder.record_routing, decoder.sampling = record_routing, sampling
        lanes, done = Lanes(decoder), [(0, 0)] * len(halves)

        def playing(number: int, schedule: Schedule, lane: Lane) -> Callable[[], Played]:
            def on_own_step(num_done: int, num_tokens: int) -> None:
                done[number] = num_done, num_tokens
                on_step(sum(one for one, _ in done), sum(tokens for _, tokens in done))

            sweep = Sweep(lane, schedule, self._environment, halves[number], on_group, pace=self._pace, apart=lane.apart)
            return lambda: sweep.play(should_stop, on_own_step, lambda: self._rows_allowed(rows))

        places = enumerate(zip(schedules, firsts, strict=True))
        return joined(lanes.run([playing(number, schedule, Lane(lanes, *first)) for number, (schedule, first) in places]))

    def _halves(self, castings: Sequence[Casting], plan: MemoryPlan) -> list[list[Casting]]:
        """Castings dealt out, a group to one half, of an examination a question; one half where there is one or no room for two pools.

        Layers that are dealt out keep all Macs busy with one.
        """
        least = 1 + (plan.num_pages - 1) // NUM_LANES
        if self._set.split == "tensor" or plan.max_rows < NUM_LANES or least < self._play_of("").least_pages:
            return [list(castings)]
        owners = [casting.group for casting in castings]
        if len(set(owners)) < NUM_LANES:
            owners = [casting.question_id for casting in castings]
        place = {owner: number % NUM_LANES for number, owner in enumerate(dict.fromkeys(owners))}
        halves = [
            [casting for casting, owner in zip(castings, owners, strict=True) if place[owner] == number] for number in range(NUM_LANES)
        ]
        return [half for half in halves if half]

    def _set_decoder(self, num_pages: int, num_slots: int) -> SetDecoder:
        made = self._made
        if made is None or (made.num_pages, made.num_slots) != (num_pages, num_slots):
            self.drop_pool()
            made = self._made = self._set.decoder(num_pages, num_slots)
        return made

    def _plan(self, castings: Sequence[Casting]) -> MemoryPlan:
        groups = max(1, round(-(-len(castings) // self._rollout.group_size) * self._guest.decision.share))
        return self._narrowest(self._play_of(castings[0].question_id if self._shared(castings) else ""), groups)

    def _memory_groups(self) -> int:
        return self._narrowest(self._play_of(self._environment.question_ids("train")[0]), _WIDEST).groups

    def _narrowest(self, play: Play, groups: int) -> MemoryPlan:
        """The plan that fits every Mac: that of the Mac with least room."""
        plans = [
            plan_memory(part, play, most_groups=groups, memory_bytes=mac.limit_bytes, step_tokens=MOST_TOKENS)
            for part, mac in zip(self._bytes, self._macs, strict=True)
        ]
        return min(plans, key=lambda plan: (plan.groups, plan.num_pages))

    def _memory_bytes(self) -> int | None:
        return self._macs[0].limit_bytes


def joined(halves: Sequence[Played]) -> Played:
    """What the halves of a sweep did together."""
    tokens = sum(one.mean_tokens * one.num_episodes for one in halves)
    return Played(
        ended=all(one.ended for one in halves),
        num_episodes=sum(one.num_episodes for one in halves),
        num_lost=sum(one.num_lost for one in halves),
        num_sampled_tokens=sum(one.num_sampled_tokens for one in halves),
        num_prompt_tokens=sum(one.num_prompt_tokens for one in halves),
        reward_sum=sum(one.reward_sum for one in halves),
        num_steps=sum(one.num_steps for one in halves),
        seconds=max(one.seconds for one in halves),
        num_parked=sum(one.num_parked for one in halves),
        most_pages=sum(one.most_pages for one in halves),
        mean_tokens=tokens / max(1, sum(one.num_episodes for one in halves)),
    )
