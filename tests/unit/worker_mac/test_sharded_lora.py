"""The sharded layers, on a qwen3_moe of mlx_lm split over two real ring processes, at 4 and 8 bits."""

import json
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models import qwen3_moe
from mlx_lm.tuner.utils import linear_to_lora_layers
from mlx_lm.utils import load_model

from cli.warmstart import ring
from stoa.config.load import PROJECT_ROOT, child_environment
from worker_mac.sharded_lora import local_sizes
from worker_mac.warmstart import policy

MOE = {
    "model_type": "qwen3_moe",
    "hidden_size": 128,
    "num_hidden_layers": 1,
    "intermediate_size": 128,
    "moe_intermediate_size": 128,
    "mlp_only_layers": [],
    "decoder_sparse_step": 1,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
    "max_position_embeddings": 512,
    "vocab_size": 128,
    "tie_word_embeddings": True,
}


def write_moe(folder: Path) -> None:
    mx.random.seed(0)
    model = qwen3_moe.Model(qwen3_moe.ModelArgs.from_dict(MOE))
    folder.mkdir()
    weights = dict(tree_flatten(model.parameters()))
    for name in [one for one in weights if ".switch_mlp." in one]:
        stack, block = weights.pop(name), name.replace(".switch_mlp.", ".experts.{}.")
        weights |= {block.format(expert): matrix for expert, matrix in enumerate(stack)}
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    (folder / "config.json").write_text(json.dumps(MOE))


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two ranks made of one policy: 100 steps over 4 bits, 10 over 8."""
    folder = tmp_path_factory.mktemp("split")
    write_moe(folder / "moe")
    line = [sys.executable, "-m", "tests.unit.worker_mac.tensor_ranks", str(folder / "moe"), str(folder)]
    with ring(2) as environments:
        started = [subprocess.Popen(line, env=child_environment(each), cwd=PROJECT_ROOT) for each in environments]
        try:
            assert [process.wait(55) for process in started] == [0, 0]
        finally:
            for process in started:
                process.kill()
    return folder


@pytest.mark.parametrize("bits, num_steps", [(4, 100), (8, 10)])
def test_halves_that_are_whole_stay_equal_at_every_step(bits: int, num_steps: int, learned: Path) -> None:
    told = [json.loads((learned / f"rank-{rank}-{bits}.json").read_text()) for rank in range(2)]
    assert told[0]["digests"] == told[1]["digests"] and len(set(told[0]["digests"])) == num_steps
    assert told[0]["losses"][-1] < 0.9 * told[0]["losses"][0]
    # Seven matrices; one half of each is split, the other whole.
    assert len(told[0]["paths"]) == 7 and len(told[0]["axes"]) == 7 and told[0]["whole"] == 7
    assert sum(".switch_mlp." in path for path in told[0]["paths"]) == 3


@pytest.mark.parametrize("bits", [4, 8])
def test_gathered_adapters_load_in_stock_mlx_lm(bits: int, learned: Path) -> None:
    ranks = [np.load(learned / f"rank-{rank}-{bits}.npz") for rank in range(2)]
    assert all(np.array_equal(ranks[0][name], ranks[1][name]) for name in ranks[0])
    stock, _ = load_model(learned / "moe")
    policy.quantise(stock, bits)
    linear_to_lora_layers(stock, 1, {"rank": 4, "scale": 2.0, "dropout": 0.0})
    stock.load_weights([(name, mx.array(ranks[0][name])) for name in ranks[0] if name != "logits"], strict=False)
    moved = {name for name in ranks[0] if name.endswith("lora_b") and np.abs(ranks[0][name]).max() > 0}
    assert len(moved) == 7
    rows = np.random.default_rng(0).integers(1, 128, 12)
    assert np.array(stock(mx.array(rows[None]))) == pytest.approx(ranks[0]["logits"], abs=2e-4)


@pytest.mark.parametrize("bits, words", [(4, 16), (8, 32)])
def test_sizes_are_read_from_packed_rows(bits: int, words: int) -> None:
    packed = mx.quantize(mx.zeros((96, 128)), 64, bits)[0]
    assert packed.shape == (96, words)
    assert local_sizes(_Packed(packed, bits)) == (96, 128)


class _Packed:
    def __init__(self, weight: mx.array, bits: int) -> None:
        self.weight, self.bits = weight, bits
