import importlib
import queue
from itertools import pairwise

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

from benchmarks.wired_cases import STOCK
from stoa.contracts.errors import WiredError
from tests.unit.worker_mac.policies import DENSE, TINY
from tests.unit.worker_mac.wired import QueueLink
from worker_mac.cluster.stock import StockStage

SLIDING = STOCK["llama"] | {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 8}
CASES = {
    "llama": (STOCK["llama"], (2,)),
    "sliding": (SLIDING, (1, 3)),
    "qwen3": (STOCK["qwen3"], (1, 3)),
    "olmoe": (STOCK["olmoe"], (3,)),
    "nemotron_h": (STOCK["nemotron_h"], (2, 4)),
    "lfm2_moe": (TINY, (1,)),
    "lfm2": (DENSE, (2,)),
}


def model_of(config: dict, bits: int) -> nn.Module:
    module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    mx.random.seed(0)
    model = module.Model(module.ModelArgs.from_dict(config))
    if bits < 16:
        nn.quantize(model, group_size=32, bits=bits, class_predicate=lambda _, part: hasattr(part, "to_quantized"))
    mx.eval(model.parameters())
    return model


def pieces() -> list[mx.array]:
    """Two sequences: a stretch of prompt, then another, then three tokens one by one."""
    ids = np.random.default_rng(0).integers(0, 96, (2, 24)).astype(np.int32)
    return [mx.array(ids[:, a:b]) for a, b in ((0, 13), (13, 21), (21, 22), (22, 23), (23, 24))]


@pytest.mark.parametrize("bits", [4, 8, 16])
@pytest.mark.parametrize("name", CASES)
def test_a_cut_stock_model_is_bit_equal_to_the_whole(name: str, bits: int) -> None:
    config, cuts = CASES[name]
    whole = model_of(config, bits)
    cache = make_prompt_cache(whole)
    edges = [0, *cuts, len(whole.layers)]
    links = [queue.Queue() for _ in range(len(edges))]
    stages = [
        StockStage(model_of(config, bits), range(first, stop), QueueLink(links[rank], links[rank + 1]))
        for rank, (first, stop) in enumerate(pairwise(edges))
    ]
    for tokens in pieces():
        expected = whole(tokens, cache=cache)
        found = [stage(tokens) for stage in stages]
        assert found[:-1] == [None] * (len(stages) - 1)
        assert np.array_equal(np.array(found[-1]), np.array(expected))
    kept = sum(stage.num_cache_bytes for stage in stages)
    assert max(stage.num_cache_bytes for stage in stages) < kept


def test_a_family_that_is_not_known_is_refused() -> None:
    model = model_of(STOCK["llama"], 16)
    model.model_type = "gpt_bigcode"
    with pytest.raises(WiredError, match="gpt_bigcode cannot be split"):
        StockStage(model, range(2), QueueLink(queue.Queue(), queue.Queue()))
