"""LFM2 and LFM2-MoE as Megatron's stock GPTModel with our layers in its spec slots, and forward passes over packed rows.

Reading config.json is in `model_config.py`, the layers in `modules.py`, the vocabulary head in `head.py`. Assumes
`trainer_gpu.host.setup_process` has run.

Shapes: T tokens of a packed row, D hidden, V vocabulary, L layers with experts, K experts a token.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import CoreAttentionBuilder, SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from stoa.contracts.errors import LayoutError
from trainer_gpu import host
from trainer_gpu.experts import GroupedExperts
from trainer_gpu.head import token_logprobs
from trainer_gpu.model_config import Lfm2Config, read_model_config
from trainer_gpu.modules import CausalAttention, RMSNorm, ShortConv, SigmoidRouter
from trainer_gpu.packing import pack_row

__all__ = [
    "Lfm2Config",
    "build_model",
    "forward_packed",
    "hidden_packed",
    "read_model_config",
    "recorded_routing",
    "replayed_routing",
    "token_logprobs_packed",
]


def build_model(config: Lfm2Config, dtype: torch.dtype) -> GPTModel:
    """A model with random weights on `host.device()`. `convert.load_hub` fills it.

    Args:
        dtype: of every parameter, float32 or bfloat16. Router scores and `expert_bias` are fp32 in both.
    """
    model = GPTModel(
        config=transformer_config(config, dtype),
        transformer_layer_spec=cast(ModuleSpec, _block_spec(config)),
        vocab_size=config.vocab_size,
        max_sequence_length=config.max_position_embeddings,
        position_embedding_type="rope",
        rotary_base=cast(int, config.rope_theta),
        share_embeddings_and_output_weights=True,
        parallel_output=False,
    ).to(host.device())
    # Megatron keeps every router it ever built in a process-wide list; we address them through their model.
    RouterReplay.clear_global_router_replay_instances()
    return model


def transformer_config(config: Lfm2Config, dtype: torch.dtype) -> TransformerConfig:
    """Megatron's settings for `config`: no dropout, no fusion that needs TransformerEngine, no auxiliary loss."""
    moe: dict[str, Any] = {}
    if config.num_experts:
        scaling = config.routed_scaling_factor
        moe = {
            "num_moe_experts": config.num_experts,
            "moe_layer_freq": [int(i in config.moe_layers) for i in range(config.num_layers)],
            "moe_ffn_hidden_size": config.moe_ffn_size,
            "moe_router_topk": config.experts_per_token,
            "moe_router_score_function": "sigmoid",
            "moe_router_load_balancing_type": "none",
            "moe_aux_loss_coeff": 0.0,
            "moe_router_topk_scaling_factor": None if scaling == 1 else scaling,
            "moe_router_dtype": "fp32",
            "moe_token_dispatcher_type": "alltoall",
            "moe_enable_routing_replay": True,
            # Not only bookkeeping: without it gradients of different experts are summed over processes.
            "expert_model_parallel_size": parallel_state.get_expert_model_parallel_world_size(),
        }
    return TransformerConfig(
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        ffn_hidden_size=config.dense_ffn_size,
        num_attention_heads=config.num_heads,
        num_query_groups=config.num_kv_heads,
        kv_channels=config.head_size,
        normalization="RMSNorm",
        layernorm_epsilon=config.norm_eps,
        qk_layernorm=True,
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=F.silu,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        calculate_per_token_loss=True,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        use_cpu_initialization=not host.HAS_CUDA,
        cuda_graph_scope=[],  # the default, "full", is out of use and warns
        **moe,
    )


def _block_spec(config: Lfm2Config) -> TransformerBlockSubmodules:
    """One layer spec per layer: attention or convolution, dense or experts."""
    linear = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    dense = ModuleSpec(MLP, params={"ffn_hidden_size": config.dense_ffn_size}, submodules=linear)
    router = partial(SigmoidRouter, use_expert_bias=config.use_expert_bias, norm_topk_prob=config.norm_topk_prob)
    experts = ModuleSpec(MoELayer, submodules=MoESubmodules(router=router, experts=ModuleSpec(GroupedExperts)))
    attention = ModuleSpec(
        SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=ColumnParallelLinear,
            core_attention=cast(CoreAttentionBuilder, CausalAttention),
            linear_proj=RowParallelLinear,
            q_layernorm=RMSNorm,
            k_layernorm=RMSNorm,
        ),
    )
    conv = ModuleSpec(ShortConv, params={"kernel_size": config.conv_kernel})
    layers = [
        ModuleSpec(
            TransformerLayer,
            submodules=TransformerLayerSubmodules(
                input_layernorm=RMSNorm,
                self_attention=attention if i in config.attention_layers else conv,
                self_attn_bda=cast(type, get_bias_dropout_add),
                pre_mlp_layernorm=RMSNorm,
                mlp=experts if i in config.moe_layers else dense,
                mlp_bda=cast(type, get_bias_dropout_add),
            ),
        )
        for i in range(config.num_layers)
    ]
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=ModuleSpec(RMSNorm))


def hidden_packed(model: GPTModel, ids: torch.Tensor, seq_lens: Sequence[int]) -> torch.Tensor:
    """Final hidden states [T, D] of a packed row of token ids [T]; sequences do not see each other."""
    row = pack_row(seq_lens, ids.device)
    if ids.shape != row.positions.shape:
        raise LayoutError(f"{ids.numel()} token ids, but sequence lengths add up to {row.positions.numel()}")
    hidden = model.decoder(
        hidden_states=model.embedding(input_ids=ids.unsqueeze(0), position_ids=row.positions.unsqueeze(0)),
        attention_mask=None,
        rotary_pos_emb=model.rotary_pos_emb(row.max_seqlen_q, packed_seq=True),
        packed_seq_params=row,
    )
    return hidden.squeeze(1)


def forward_packed(model: GPTModel, ids: torch.Tensor, seq_lens: Sequence[int]) -> torch.Tensor:
    """All logits at once, fp32 [T, V]: for tests and small vocabularies. Row t predicts token t + 1."""
    hidden = hidden_packed(model, ids, seq_lens)
    return F.linear(hidden, model.shared_embedding_or_output_weight()).float()


def token_logprobs_packed(
    model: GPTModel, ids: torch.Tensor, seq_lens: Sequence[int], where: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Ln p of every token given the tokens before it in its own sequence.

    Args:
        ids: int64 [T], sequences one after another.
        seq_lens: tokens of each sequence; they add up to T.
        where: bool [T], the tokens wanted (default all); the vocabulary head runs for these only.

    Returns:
        logprobs fp32 [T], differentiable, and the entropy in nats of the distribution each token was drawn from,
        fp32 [T], not differentiable. Both are 0 for the first token of a sequence and outside `where`.
    """
    hidden = hidden_packed(model, ids, seq_lens)
    wanted = pack_row(seq_lens, ids.device).positions > 0
    targets = (wanted if where is None else wanted & where).nonzero().squeeze(1)
    logprob, entropy = token_logprobs(hidden.index_select(0, targets - 1), model.shared_embedding_or_output_weight(), ids[targets])
    blank = torch.zeros(ids.shape[0], dtype=torch.float32, device=ids.device)
    return blank.index_copy(0, targets, logprob), blank.index_copy(0, targets, entropy)


@contextmanager
def replayed_routing(model: GPTModel, indices: torch.Tensor) -> Iterator[None]:
    """Inside the block every token goes to the experts given, whatever the router's own choice.

    The gate still weighs them and still gets its gradient. The backward pass may run outside the block.

    Args:
        indices: int64 [T, L, K], expert numbers for the packed row, layers with experts in order.

    Raises:
        LayoutError: wrong shape, a number out of range, or one expert twice for a token: Megatron would take any of
            these without a word.
    """
    routers = _routers(model)
    num_experts, topk = model.config.num_moe_experts or 0, model.config.moe_router_topk
    if indices.dim() != 3 or indices.shape[1:] != (len(routers), topk):
        raise LayoutError(f"routing has shape {tuple(indices.shape)}, not [tokens, {len(routers)}, {topk}]")
    ordered = indices.sort(dim=-1).values
    if indices.numel() and (ordered.min() < 0 or ordered.max() >= num_experts):
        raise LayoutError(f"routing names experts {int(ordered.min())}..{int(ordered.max())} of {num_experts}")
    if bool((ordered[..., 1:] == ordered[..., :-1]).any()):
        raise LayoutError("routing names one expert twice for a token")
    for layer, router in enumerate(routers):
        router.set_target_indices(indices[:, layer])
        router.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
    try:
        yield
    finally:
        _forget_routing(routers)


@contextmanager
def recorded_routing(model: GPTModel) -> Iterator[list[torch.Tensor]]:
    """Inside the block routers note their choices; at its end the list holds one int64 tensor [T, L, K]."""
    routers = _routers(model)
    recorded: list[torch.Tensor] = []
    for router in routers:
        router.set_router_replay_action(RouterReplayAction.RECORD)
    try:
        yield recorded
        recorded.append(torch.stack([cast(torch.Tensor, router.get_recorded_indices()) for router in routers], dim=1))
    finally:
        _forget_routing(routers)


def _routers(model: GPTModel) -> list[RouterReplay]:
    return [cast(RouterReplay, module.router_replay) for module in model.modules() if isinstance(module, SigmoidRouter)]


def _forget_routing(routers: list[RouterReplay]) -> None:
    for router in routers:
        router.clear_router_replay_action()
        router.clear_indices()
