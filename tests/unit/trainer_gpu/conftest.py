"""One Megatron process a session, and small hub checkpoints with random weights made by the reference library."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import Lfm2Config as HubDenseConfig
from transformers import Lfm2ForCausalLM, Lfm2MoeConfig, Lfm2MoeForCausalLM

from tests.unit.trainer_gpu.checkpoints import SEQ_LENS, VOCAB, randomise
from trainer_gpu import host


@pytest.fixture(scope="session", autouse=True)
def megatron_process() -> Iterator[None]:
    host.setup_process(num_threads=1, seed=0)
    yield
    host.teardown_process()


@pytest.fixture(scope="session")
def moe_hub() -> Lfm2MoeForCausalLM:
    """Six layers: convolution, convolution, attention, convolution, attention, convolution; the first is dense."""
    config = Lfm2MoeConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=64,
        num_hidden_layers=6,
        layer_types=["conv", "conv", "full_attention", "conv", "full_attention", "conv"],
        num_attention_heads=4,
        num_key_value_heads=2,
        num_dense_layers=1,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        use_expert_bias=True,
        max_position_embeddings=512,
        pad_token_id=None,  # else the reference gives the row of token 0 no gradient
        rope_parameters={"rope_theta": 5e4, "rope_type": "default"},
    )
    model = Lfm2MoeForCausalLM(config)
    randomise(model, 1)
    return model.eval()


@pytest.fixture(scope="session")
def dense_hub() -> Lfm2ForCausalLM:
    config = HubDenseConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=192,
        block_multiple_of=32,
        num_hidden_layers=3,
        layer_types=["conv", "full_attention", "conv"],
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        pad_token_id=None,  # else the reference gives the row of token 0 no gradient
        rope_parameters={"rope_theta": 5e4, "rope_type": "default"},
    )
    model = Lfm2ForCausalLM(config)
    randomise(model, 2)
    return model.eval()


@pytest.fixture(scope="session")
def moe_folder(moe_hub: Lfm2MoeForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("moe")
    moe_hub.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def dense_folder(dense_hub: Lfm2ForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dense")
    dense_hub.save_pretrained(folder)
    return folder


@pytest.fixture
def ids() -> torch.Tensor:
    """A packed row of SEQ_LENS; token 0 included."""
    return torch.randint(0, VOCAB, (sum(SEQ_LENS),), generator=torch.Generator().manual_seed(3))
