"""Trainer and Mac choose the same experts, exact ties included: the lower index first."""

import mlx.core as mx
import numpy as np
import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig

from metal.router import RouterRule, route_plain
from trainer_gpu.modules import SigmoidRouter

NUM_ROWS, NUM_EXPERTS, TOP_K = 10_000, 32, 4


def test_ten_thousand_rows_with_ties_are_routed_alike() -> None:
    draw = np.random.default_rng(5)
    logits = draw.integers(-3, 4, (NUM_ROWS, NUM_EXPERTS)).astype(np.float32) / 2
    bias = draw.choice(np.array([0.0, 0.125], np.float32), NUM_EXPERTS)
    config = TransformerConfig(
        num_layers=1,
        hidden_size=NUM_EXPERTS,
        num_attention_heads=1,
        num_moe_experts=NUM_EXPERTS,
        moe_ffn_hidden_size=NUM_EXPERTS,
        moe_router_topk=TOP_K,
        moe_router_score_function="sigmoid",
        moe_router_load_balancing_type="none",
        moe_aux_loss_coeff=0.0,
        moe_router_dtype="fp32",
        cuda_graph_scope=[],
    )
    model_parallel = ProcessGroupCollection.use_mpu_process_groups()
    router = SigmoidRouter(config, model_parallel, use_expert_bias=True, norm_topk_prob=True)
    assert router.expert_bias is not None
    router.expert_bias.copy_(torch.from_numpy(bias))
    weights, chosen = router.routing(torch.from_numpy(logits)[:, None])

    ranked = 1 / (1 + np.exp(-logits.astype(np.float64))) + bias
    best = np.argsort(-np.round(ranked, 9), axis=1, kind="stable")
    tied = np.sort(np.round(ranked, 9), axis=1)[:, ::-1]
    assert np.mean(tied[:, TOP_K - 1] == tied[:, TOP_K]) > 0.3, "the last place is often between equals"
    wanted = np.sort(best[:, :TOP_K], axis=1)
    ours = np.nonzero(chosen.numpy())[1].reshape(NUM_ROWS, TOP_K)
    assert np.array_equal(ours, wanted)

    mac = route_plain(mx.array(logits), mx.eye(NUM_EXPERTS), mx.array(bias), RouterRule(NUM_EXPERTS, TOP_K, normalise=True, scale=1.0))
    assert np.array_equal(np.sort(np.array(mac.experts), axis=1), wanted)
    theirs = np.zeros((NUM_ROWS, NUM_EXPERTS), np.float32)
    np.put_along_axis(theirs, np.array(mac.experts).astype(np.int64), np.array(mac.weights), axis=1)
    assert np.abs(theirs - weights.numpy()).max() < 1e-6
