import threading

import mlx.core as mx
import numpy as np
import pytest

from stoa.contracts.errors import WiredError
from tests.unit.worker_mac.policies import DENSE, TINY, model_of, random_state
from worker_mac.cluster.tensor import TensorModel, check_shares, share_arrays
from worker_mac.forced import Forced
from worker_mac.model_config import read_model_config

EIGHT = TINY | {
    "hidden_size": 512,
    "intermediate_size": 512,
    "moe_intermediate_size": 512,
    "num_experts": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
}
BIG_DENSE = DENSE | {"hidden_size": 128, "block_dim": 128, "block_ff_dim": 384}


class ThreadSums:
    """Sums over threads, in the order of ranks."""

    def __init__(self, ranks: int) -> None:
        self.barrier = threading.Barrier(ranks, timeout=30)
        self.parts: dict[int, np.ndarray] = {}
        self.numbers = threading.local()
        self.agreed: list[tuple] = []

    def agree(self, shape: tuple[int, ...], dtype: mx.Dtype, num_sums: int) -> None:
        self.agreed.append((shape, dtype, num_sums))

    def total(self, x: mx.array) -> mx.array:
        self.parts[self.numbers.rank] = np.array(x)
        self.barrier.wait()
        total = sum(self.parts[rank] for rank in sorted(self.parts))
        self.barrier.wait()
        self.numbers.count += 1
        return mx.array(total)


@pytest.mark.parametrize(("config", "ranks"), [(EIGHT, 2), (EIGHT, 4), (EIGHT, 8), (BIG_DENSE, 2)])
def test_shares_of_every_layer_sum_up_to_the_whole(config: dict, ranks: int) -> None:
    state, tokens = random_state(config, spread=0.05), np.random.default_rng(1).integers(0, 128, (2, 9)).astype(np.int32)

    def feed(rows: Forced) -> list[np.ndarray]:
        return [rows.feed([row[:6] for row in tokens]), *rows.walk(tokens[:, 6:])]

    expected, found = feed(Forced(model_of(config, state), 2, 32)), {}
    sums, parsed = ThreadSums(ranks), read_model_config(config)

    def play(rank: int) -> None:
        sums.numbers.rank, sums.numbers.count = rank, 0
        model = TensorModel(parsed, share_arrays(state, parsed, rank, ranks), ranks, sums)
        found[rank] = feed(Forced(model, 2, 32))
        assert sums.numbers.count == 4 * model._num_sums

    threads = [threading.Thread(target=play, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(50)
    assert sorted(found) == list(range(ranks))
    largest = max(float(np.abs(row).max()) for row in expected)
    for rank in range(ranks):
        for ours, whole in zip(found[rank], expected, strict=True):
            assert float(np.abs(ours - whole).max()) <= 1e-5 * max(1.0, largest)
            assert np.array_equal(ours, found[0][[id(one) for one in found[rank]].index(id(ours))])
    assert len(set(sums.agreed)) == 2


def test_a_share_holds_its_part_of_the_weights_and_convolutions_whole() -> None:
    state, parsed = random_state(EIGHT), read_model_config(EIGHT)
    parts = [share_arrays(state, parsed, rank, 4) for rank in range(4)]
    dealt = "model.layers.1.feed_forward.switch_mlp.down_proj.weight"
    assert [part[dealt].shape for part in parts] == [(4, 512, 32)] * 4
    again = np.concatenate([np.array(part[dealt]).view(np.uint8) for part in parts], axis=-1)
    assert np.array_equal(again, state.arrays[dealt])
    conv = "model.layers.0.conv.in_proj.weight"
    assert all(np.array_equal(np.array(part[conv]).view(np.uint8), state.arrays[conv]) for part in parts)


def test_heads_that_cannot_be_dealt_out_are_refused() -> None:
    with pytest.raises(WiredError, match="4 query and 2 key heads cannot be dealt out to 4"):
        check_shares(random_state(TINY).layout, read_model_config(TINY), 4)
    with pytest.raises(WiredError, match="columns cannot be dealt out to 2"):
        check_shares(random_state(TINY).layout, read_model_config(TINY), 2)
