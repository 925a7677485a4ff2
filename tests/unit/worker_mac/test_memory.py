import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoa.weights.layout import layout_of
from tests.unit.worker_mac.policies import TINY
from worker_mac.memory import ModelBytes, Play, model_bytes, most_episodes, plan_memory
from worker_mac.model_config import read_model_config

# LFM2.5-8B-A1B as its public description has it.
FULL: dict[str, object] = TINY | {
    "vocab_size": 128_000,
    "hidden_size": 2048,
    "intermediate_size": 7168,
    "moe_intermediate_size": 1792,
    "num_hidden_layers": 24,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "num_dense_layers": 2,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "layer_types": ["full_attention" if layer in (2, 6, 10, 14, 18, 21) else "conv" for layer in range(24)],
}
GIB = 1 << 30
LIMIT_16GB = 11_453 * 1_000_000
"""What Metal recommends on a Mac of 16 GB."""


@pytest.fixture(scope="module")
def full() -> ModelBytes:
    return model_bytes(read_model_config(FULL), layout_of(FULL, "bfloat16"), item_bytes=2, activation_bytes=2)


def test_full_size_numbers_are_those_worked_out_by_hand(full: ModelBytes) -> None:
    # 6 attention layers x (keys and values) x 8 heads x 32 tokens x 64 x 2 bytes.
    assert full.page_bytes == 6 * 2 * 8 * 32 * 64 * 2 == 393_216
    # 18 convolutions x 2 taps x 2048 x 2 bytes.
    assert full.slot_bytes == 147_456
    assert full.weights_bytes == 8_998_650_112


def test_a_16_gb_mac_holds_fewer_groups_than_a_24_gb_one_until_lengths_are_known(full: ModelBytes) -> None:
    unknown, known = Play(8, 4096, prompt_tokens=400), Play(8, 4096, prompt_tokens=400, mean_tokens=1500)
    at_16 = plan_memory(full, unknown, most_groups=8, memory_bytes=LIMIT_16GB)
    at_24 = plan_memory(full, unknown, most_groups=8, memory_bytes=16 * GIB)
    assert (at_16.groups, at_24.groups) == (5, 8)
    assert plan_memory(full, known, most_groups=8, memory_bytes=LIMIT_16GB).groups == 8
    for plan, limit in ((at_16, LIMIT_16GB), (at_24, 16 * GIB)):
        assert plan.total_bytes <= limit
        assert plan.max_rows == 8 * plan.groups


def test_pages_of_a_group_are_its_prompt_once_and_its_episodes_own() -> None:
    # 401 prompt tokens: 400 are shared, 12 whole pages and one begun. 4096 tokens are 128 pages.
    assert Play(8, 4096, prompt_tokens=401).group_pages == 12 + 1 + 8 * (128 - 12)
    assert Play(8, 4096).group_pages == 1 + 8 * 128
    # 1500 tokens are 47 pages, and one more because lengths differ.
    assert Play(8, 4096, prompt_tokens=401, mean_tokens=1500).group_pages == 12 + 1 + 8 * (48 - 12)


def test_one_group_that_does_not_fit_is_played_in_the_pages_there_are(full: ModelBytes) -> None:
    play = Play(8, 32_768)
    plan = plan_memory(full, play, most_groups=8, memory_bytes=LIMIT_16GB)
    assert plan.groups == 1
    assert play.least_pages <= plan.num_pages < play.group_pages
    assert plan.total_bytes <= LIMIT_16GB
    starved = plan_memory(full, play, most_groups=8, memory_bytes=GIB)
    assert (starved.groups, starved.num_pages) == (1, play.least_pages)


@given(st.integers(1, 16), st.integers(64, 8192), st.integers(1, 2000), st.integers(0, 9000), st.integers(9, 40))
def test_plans_keep_within_memory_and_grow_with_it(most: int, longest: int, prompt: int, mean: int, gib: int) -> None:
    model = ModelBytes(8 * GIB, 393_216, 147_456, 50_000, 1_700_000, 16_384)
    play = Play(8, longest, min(prompt, longest - 1), mean)
    plan = plan_memory(model, play, most_groups=most, memory_bytes=gib * GIB)
    more = plan_memory(model, play, most_groups=most, memory_bytes=(gib + 4) * GIB)
    free = plan_memory(model, play, most_groups=most, memory_bytes=None)
    assert 1 <= plan.groups <= more.groups <= free.groups == most
    assert plan.num_pages >= play.least_pages
    if plan.groups > 1 or plan.num_pages > play.least_pages:
        assert plan.total_bytes <= gib * GIB
    if plan.groups < most and more.groups == plan.groups:
        wider = plan_memory(model, play, most_groups=plan.groups + 1, memory_bytes=None)
        assert wider.total_bytes > (gib + 4) * GIB


def test_pages_hold_twice_the_episodes_of_a_dense_cache_and_more(full: ModelBytes) -> None:
    play = Play(8, 4096, prompt_tokens=400, mean_tokens=1800)
    for limit in (LIMIT_16GB, 16 * GIB):
        paged, dense = (most_episodes(full, play, limit, paged=kind) for kind in (True, False))
        assert paged > 2 * dense
        # Dense by hand: 128 pages a row, 18 convolutions' tails, what a step takes of the head, and 192 MiB beside it.
        assert dense == (limit - full.weights_bytes - (192 << 20)) // (128 * 393_216 + 147_456 + 128_000 * 13)
