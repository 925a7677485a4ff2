"""The shipped policy folder is an ordinary checkpoint that stock libraries open."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from stoa.chat.render import ChatRenderer, Message

POLICY = Path(__file__).parents[3] / "environments/search/policy"
DIALOGUE = [("user", "which enzyme does balbex inhibit ?")]


@pytest.fixture(scope="module")
def renderer() -> ChatRenderer:
    return ChatRenderer((POLICY / "tokenizer.json").read_bytes())


def test_config_names_the_tokenizers_special_ids(renderer: ChatRenderer) -> None:
    for name in ("config.json", "generation_config.json"):
        config = json.loads((POLICY / name).read_text())
        assert config["eos_token_id"] == renderer.special.im_end
        assert config["bos_token_id"] == renderer.special.startoftext
        assert renderer.decode([config["pad_token_id"]]) == "<|pad|>"
    assert json.loads((POLICY / "config.json").read_text())["vocab_size"] == renderer.vocabulary_size == 256


def test_sampling_defaults_are_those_of_training() -> None:
    config = json.loads((POLICY / "generation_config.json").read_text())
    assert config["do_sample"] is True and config["temperature"] == 1.0
    assert not {"top_k", "top_p", "min_p", "repetition_penalty"} & {key for key, value in config.items() if value}


def test_weights_are_fp32_with_dimensions_the_grid_can_hold() -> None:
    with safe_open(POLICY / "model.safetensors", framework="np") as weights:
        tensors = {name: weights.get_tensor(name) for name in weights.keys()}  # noqa: SIM118
    assert {tensor.dtype for tensor in tensors.values()} == {np.dtype("float32")}
    assert all(np.isfinite(tensor).all() for tensor in tensors.values())
    assert all(tensor.shape[-1] % 64 == 0 for tensor in tensors.values() if tensor.ndim == 2)
    assert sum(tensor.size for name, tensor in tensors.items() if "expert_bias" not in name) == 284_512
    assert np.abs(tensors["model.embed_tokens.weight"]).max(axis=1).min() > 0.01


def test_chat_template_writes_what_the_renderer_writes(renderer: ChatRenderer) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(POLICY)
    messages = [{"role": role, "content": content} for role, content in DIALOGUE]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert text == f"<|startoftext|><|im_start|>user\n{DIALOGUE[0][1]}<|im_end|>\n<|im_start|>assistant\n"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tuple(ids) == renderer.prompt([Message("user", DIALOGUE[0][1])])


def test_mlx_lm_and_transformers_agree_on_it(renderer: ChatRenderer) -> None:
    mlx_lm, transformers, torch = map(pytest.importorskip, ("mlx_lm", "transformers", "torch"))
    import mlx.core as mx

    ids = [list(renderer.prompt([Message("user", DIALOGUE[0][1])]))]
    model, tokenizer = mlx_lm.load(str(POLICY))
    reference = transformers.AutoModelForCausalLM.from_pretrained(POLICY)
    theirs = reference(torch.tensor(ids)).logits.detach().numpy()
    np.testing.assert_allclose(np.array(model(mx.array(ids))), theirs, atol=2e-5)
    assert tokenizer.eos_token_ids == {renderer.special.im_end}
