"""The shape of the small policy that a demo run starts from, and the files beside its weights.

Both warm starts write such a folder: `trainer_gpu.warmstart` with torch, `worker_mac.warmstart` with MLX. 284,512
parameters; every dimension that gets quantised is a multiple of 64.
"""

import json
from pathlib import Path
from typing import Final

from tokenizers import Tokenizer

from environments.search.vocabulary import PAD, STOP, UNKNOWN

START: Final = "<|startoftext|>"
INITIAL_DEVIATION: Final = 0.05
"""Standard deviation of fresh weights."""
LONGEST_TOKENS: Final = 4096
CHAT_TEMPLATE: Final = (
    "{{- bos_token -}}"
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"
)


def shape(tokenizer: Tokenizer) -> dict[str, object]:
    """The settings of config.json that say the architecture."""
    return {
        "vocab_size": tokenizer.get_vocab_size(),
        "hidden_size": 64,
        "intermediate_size": 128,
        "moe_intermediate_size": 64,
        "num_hidden_layers": 3,
        "layer_types": ["conv", "full_attention", "conv"],
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_dense_layers": 1,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "use_expert_bias": True,
        "routed_scaling_factor": 1.0,
        "conv_L_cache": 3,
        "max_position_embeddings": LONGEST_TOKENS,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "initializer_range": INITIAL_DEVIATION,
        "tie_word_embeddings": True,
        "pad_token_id": tokenizer.token_to_id(PAD),
        "bos_token_id": tokenizer.token_to_id(START),
        "eos_token_id": tokenizer.token_to_id(STOP),
        "dtype": "float32",
    }


def write_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """tokenizer.json and tokenizer_config.json, as transformers and mlx_lm read them."""
    (folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=True) + "\n", encoding="utf-8")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": PAD,
        "bos_token": START,
        "eos_token": STOP,
        "unk_token": UNKNOWN,
        "clean_up_tokenization_spaces": False,
        "model_max_length": LONGEST_TOKENS,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
