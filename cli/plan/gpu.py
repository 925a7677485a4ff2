"""Will it fit? Memory of the trainer by GPU count and layout, from config.json alone: arithmetic, no GPU, no torch.

Weights, gradients and optimizer state are exact counts of the layout's numbers. Activations are counted tensor by
tensor for this model family without recomputation, tokens spread evenly over the experts; what a GPU keeps for itself is a
stated reserve. 1 GB is 1e9 bytes.

Bytes a parameter: weight bf16 2, gradient fp32 4, master fp32 4, Adam's two moments 4 + 4, or 2 + 2 in bf16. Weights and
gradients are on every GPU that holds the parameter, masters and moments are spread over those GPUs. Each way is one that
the trainer has, with the settings that choose it.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from stoa.contracts.errors import CheckpointError, UsageError
from stoa.weights.layout import layout_of

WEIGHT, GRADIENT, MASTER, MOMENT, MOMENT_BF16 = 2, 4, 4, 4, 2
RESERVE_BYTES: Final = 4_000_000_000
"""Of one GPU: CUDA's context, communication buffers, kernels' workspaces."""
MOST_GIGABYTES: Final = 1e6
MOST_GPUS: Final = 65_536
MOST_TOKENS: Final = 1_000_000_000
MOST_LAYERS: Final = 1_024
MOST_WIDE: Final = 1 << 24
"""Largest of a model's other sizes; beyond these a number is a slip of the hand, and the answer would be none."""
FRAGMENTATION: Final = 0.05
"""Share of memory an allocator loses."""
HEAD_BYTES: Final = 201_326_592
"""Chunks of logits, as measured on 128,000 x 8,192 (benchmarks.trainer); independent of the tokens."""
STANDARD: Final = (
    (1, 192.0),
    (1, 141.0),
    (2, 141.0),
    (4, 141.0),
    (8, 141.0),
    (2, 192.0),
    (4, 192.0),
    (8, 192.0),
    (2, 80.0),
    (4, 80.0),
    (8, 80.0),
)
LFM2_5_8B_A1B: Final[Mapping[str, object]] = {
    "model_type": "lfm2_moe",
    "vocab_size": 128_000,
    "hidden_size": 2048,
    "intermediate_size": 7168,
    "moe_intermediate_size": 1792,
    "num_hidden_layers": 24,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "conv_L_cache": 3,
    "layer_types": ["full_attention" if layer in (2, 6, 10, 14, 18, 21) else "conv" for layer in range(24)],
    "num_dense_layers": 2,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "use_expert_bias": True,
}


@dataclass(frozen=True, slots=True)
class Model:
    """Numbers of a checkpoint: parameters by part, what one token keeps for the backward pass, int8 bytes on the wire."""

    name: str
    num_expert: int
    num_other: int
    num_experts: int
    activation_bytes_per_token: int
    wire_bytes: int
    embedding_bytes: int
    """fp32 gradient of the tied embedding while the head's backward pass runs."""
    block_bytes: int
    """bf16 gradient of a layer's experts while their backward pass runs, before it is added to the fp32 one."""

    @property
    def num_parameters(self) -> int:
        """All of them."""
        return self.num_expert + self.num_other


@dataclass(frozen=True, slots=True)
class Way:
    """One way to hold the trainer's state, and the `[learning]` settings that choose it, beside dtype = "bfloat16"."""

    name: str
    settings: Mapping[str, str | int | bool]
    note: str

    @property
    def shares_experts(self) -> bool:
        """Whether each expert is on as few GPUs as can be."""
        return self.settings.get("expert_parallel", 0) != 1

    @property
    def state_bytes(self) -> int:
        """Of a parameter's master and moments."""
        return MASTER + 2 * (MOMENT_BF16 if self.settings.get("moment_dtype") == "bfloat16" else MOMENT)

    @property
    def on_host(self) -> bool:
        """Whether they are in the host's memory."""
        return bool(self.settings.get("optimizer_on_host", False))


WAYS: Final = (
    Way("Adam in fp32", {}, "the default: experts shared by all GPUs, the optimizer spread over who holds a weight"),
    Way("experts on every GPU", {"expert_parallel": 1}, "no tokens between GPUs, the optimizer spread over all"),
    Way("moments in bf16", {"moment_dtype": "bfloat16"}, "masters in fp32; needs beta2 <= 0.99"),
    Way("optimizer on the host", {"optimizer_on_host": True}, "a step moves 6 bytes a parameter over the bus, and the processor updates"),
    Way(
        "optimizer on the host, moments in bf16",
        {"optimizer_on_host": True, "moment_dtype": "bfloat16"},
        "as above with a third less host memory",
    ),
)


@dataclass(frozen=True, slots=True)
class Line:
    """One way on one machine. Bytes are of the fullest GPU; `micro_batch_tokens` is what is left room for, 0: none."""

    num_gpus: int
    gpu_bytes: int
    way: Way
    state_bytes: int
    micro_batch_tokens: int
    fits: bool
    host_bytes: int


def read_model(folder: Path | None) -> Model:
    """The model of a checkpoint folder, or LFM2.5-8B-A1B. Raises CheckpointError, LayoutError; also for sizes that no model has."""
    if folder is None:
        return model_of("LFM2.5-8B-A1B", LFM2_5_8B_A1B)
    try:
        config: object = json.loads((folder / "config.json").read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{folder}: no config.json to plan from ({error})", hint="name a checkpoint's folder") from None
    if not isinstance(config, dict):
        raise CheckpointError(f"{folder}/config.json: not a table")
    named = {str(name): value for name, value in config.items()}
    _check_sizes(folder, named)
    return model_of(folder.name, named)


def _check_sizes(folder: Path, config: Mapping[str, object]) -> None:
    """Raise CheckpointError for a whole number that no model of this kind has; what is missing or no number is for `layout_of`."""
    sizes = {name: value for name in LFM2_5_8B_A1B if type(value := config.get(name)) is int}
    bounds = {"num_hidden_layers": MOST_LAYERS, "num_dense_layers": sizes.get("num_hidden_layers", MOST_LAYERS)}
    bounds["num_experts_per_tok"] = sizes.get("num_experts", MOST_WIDE)
    for name, value in sizes.items():
        least, most = (0 if name == "num_dense_layers" else 1), bounds.get(name, MOST_WIDE)
        if not least <= value <= most:
            raise CheckpointError(f"{folder}/config.json: {name} is {_short(value)}, not {least} to {most}", hint="correct the file")


def _short(value: int) -> str:
    return f"{value}" if abs(value) < 10**12 else f"{value:.0e}" if abs(value) < 10**300 else "beyond all numbers"


def model_of(name: str, config: Mapping[str, object]) -> Model:
    """Counts from a parsed config.json. Raises LayoutError for another family."""
    layout = layout_of(config, "bfloat16")
    num_expert = sum(spec.num_elements for spec in layout.tensors if ".switch_mlp." in spec.name)
    num_all = sum(spec.num_elements for spec in layout.tensors if not spec.frozen)
    embedding = next(spec for spec in layout.tensors if spec.name.startswith("model.embed_tokens"))
    experts = {spec.shape[0] for spec in layout.tensors if ".switch_mlp." in spec.name}
    return Model(
        name,
        num_expert,
        num_all - num_expert,
        max(experts, default=0),
        _activation_bytes(config, {spec.name: spec.shape for spec in layout.tensors}),
        layout.num_bytes,
        4 * embedding.num_elements,
        2 * 2 * max((spec.num_elements for spec in layout.tensors if ".switch_mlp.gate_proj" in spec.name), default=0),
    )


def _activation_bytes(config: Mapping[str, object], shapes: Mapping[str, tuple[int, ...]]) -> int:
    """What one token's forward pass keeps for the backward pass, in bf16, flash attention, nothing recomputed.

    A linear layer keeps its input; a product keeps both factors; a norm its input. Experts count once a chosen one, and
    what a norm puts out is the input of what follows it. Counted against torch's saved tensors by a test.
    """
    topk, kernel = config.get("num_experts_per_tok"), config.get("conv_L_cache")
    chosen = topk if isinstance(topk, int) else 1
    num_taps = kernel if isinstance(kernel, int) else 3
    kept = 0
    for name, shape in shapes.items():
        rows, columns = (0, *shape)[-2:]
        if ".switch_mlp.down_proj" in name:
            kept += chosen * (rows + 5 * columns)  # routed input, gate and up, silu, silu x up, its weighted twin
        elif name.endswith("feed_forward.gate.weight"):
            kept += 2 * columns + 8 * rows  # an fp32 copy of the router's input; its scores
        elif name.endswith(("feed_forward.down_proj.weight", "feed_forward.w2.weight")):
            kept += 4 * columns  # gate and up, silu, silu x up
        elif name.endswith("conv.in_proj.weight"):
            kept += rows + (2 + num_taps) * columns  # b, c and x; the gated product at each tap, their sum, its product with c
        elif name.endswith(("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight")):
            kept += 2 * rows  # before and after norm and rotation
        elif name.endswith("self_attn.out_proj.weight"):
            kept += columns  # attention's output
        elif name.endswith(("operator_norm.weight", "ffn_norm.weight")):
            kept += 2 * columns  # input and output
    return 2 * kept


def plan(model: Model, num_gpus: int, gpu_gigabytes: float, *, overhead: float = FRAGMENTATION) -> list[Line]:
    """Every way on one machine, in the order of `WAYS`. Raises UsageError for a machine that cannot be."""
    if not 1 <= num_gpus <= MOST_GPUS or not 0 < gpu_gigabytes <= MOST_GIGABYTES:
        raise UsageError(
            f"{_short(num_gpus)} GPUs of {gpu_gigabytes:g} GB: not a machine",
            hint=f"1 to {MOST_GPUS:,} GPUs of up to {MOST_GIGABYTES:,.0f} GB",
        )
    lines: list[Line] = []
    for way in WAYS:
        share = math.gcd(model.num_experts, num_gpus) if way.shares_experts and model.num_experts else 1
        if not way.shares_experts and (num_gpus == 1 or not model.num_experts):
            continue
        kept, spread = WEIGHT + GRADIENT, 0 if way.on_host else way.state_bytes
        local = model.num_expert // share
        state = local * kept + local * spread // (num_gpus // share)
        state += model.num_other * kept + model.num_other * spread // num_gpus
        gpu_bytes = int(gpu_gigabytes * 1e9)
        passing = HEAD_BYTES + model.embedding_bytes + model.block_bytes // share
        room = int(gpu_bytes * (1 - overhead)) - RESERVE_BYTES - passing - state
        tokens = max(0, room // model.activation_bytes_per_token) // 256 * 256
        host = model.num_parameters * (way.state_bytes if way.on_host else 0) + 2 * model.wire_bytes
        lines.append(Line(num_gpus, gpu_bytes, way, state, tokens, tokens > 0, host))
    return lines


def advice(lines: Sequence[Line], needed_tokens: int) -> str:
    """The first way that leaves room for a micro-batch, or else what comes nearest."""
    for line in lines:
        if line.micro_batch_tokens >= needed_tokens:
            return line.way.name
    best = max(lines, key=lambda line: line.micro_batch_tokens)
    return f"nothing with {needed_tokens} tokens; {best.micro_batch_tokens} with {best.way.name}" if best.fits else "nothing fits"
