"""Published weights in stock mlx_lm: the exported folder and the anchor's own parts give the logits of the dequantised weights."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from stoa.contracts.errors import FormatError
from stoa.weights import grid
from stoa.weights.container import anchor_groups, encode_anchor_part
from stoa.weights.export import mlx_config, write_mlx_folder
from stoa.weights.layout import layout_of
from stoa.weights.state import WeightState
from tests.unit.weights.small_run import MODEL_CONFIG, masters
from tests.unit.weights.test_layout import DENSE_CONFIG


def quantised_state(config: dict, dtype: str) -> WeightState:
    """Random masters on a fresh grid."""
    layout = layout_of(config, dtype)
    state = WeightState.empty(layout)
    weights = masters(layout, 3)
    for spec in layout.tensors:
        if spec.kind == "int8":
            for array, values in zip(state.quantised(spec), grid.quantise(weights[spec.name] * 4), strict=True):
                array[...] = values
        else:
            values = 1 + weights[spec.name] if spec.name.endswith("norm.weight") else weights[spec.name]
            state.arrays[spec.name][...] = values if spec.dtype == "float32" else grid.bf16_bits(values.astype(np.float32))
    return state


def model_folder(config: dict, folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"the base weights are not copied")
    return folder


def logits_of_dequantised(config: dict, state: WeightState) -> np.ndarray:
    """float32 logits [4, 12, vocab] of the stock model with plain float32 weights."""
    import importlib

    import mlx.core as mx

    module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    model = module.Model(module.ModelArgs.from_dict(config))
    model.load_weights([(spec.name, mx.array(state.dequantise(spec.name))) for spec in state.layout.tensors])
    return np.array(model(mx.array(tokens())).astype(mx.float32))


def tokens() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 64, (4, 12))


@pytest.mark.parametrize("config", [MODEL_CONFIG, DENSE_CONFIG], ids=["lfm2_moe", "lfm2"])
def test_exported_folder_opens_in_stock_mlx_lm_with_the_logits_of_the_dequantised_weights(config: dict, tmp_path):
    pytest.importorskip("mlx_lm")
    import mlx.core as mx
    from mlx_lm.utils import load_model

    state = quantised_state(config, "float32")
    write_mlx_folder(state, model_folder(config, tmp_path / "base"), tmp_path / "out")
    model, loaded = load_model(tmp_path / "out")
    assert loaded["quantization"]["bits"] == 8
    if config is MODEL_CONFIG:
        block = model.model.layers[1].feed_forward
        assert type(block.switch_mlp.up_proj).__name__ == "QuantizedSwitchLinear"
        assert type(block.gate).__name__ == "Linear"
        assert block.expert_bias.dtype == mx.float32
    expected = logits_of_dequantised(config, state)
    found = np.array(model(mx.array(tokens())))
    assert np.abs(expected).max() > 0.05
    assert np.abs(found - expected).max() <= 2e-5 * np.abs(expected).max()


def test_anchor_parts_as_they_are_in_the_bucket_open_in_stock_mlx_lm(tmp_path):
    pytest.importorskip("mlx_lm")
    import mlx.core as mx
    from mlx_lm.utils import load_model

    state = quantised_state(MODEL_CONFIG, "bfloat16")
    parts = list(anchor_groups(state.layout, 50_000))
    assert len(parts) > 1
    for number, arrays in enumerate(parts):
        (tmp_path / f"model-{number}.safetensors").write_bytes(encode_anchor_part(state, arrays, run="r", version=3))
    (tmp_path / "config.json").write_text(json.dumps(mlx_config(MODEL_CONFIG, state.layout)))
    model, _ = load_model(tmp_path)
    weight = model.model.layers[0].conv.in_proj
    assert (weight.weight.dtype, weight.scales.dtype) == (mx.uint32, mx.bfloat16)
    wide = [array.astype(mx.float32) for array in (weight.scales, weight.biases)]
    dequantised = np.array(mx.dequantize(weight.weight, *wide, group_size=64, bits=8))
    assert dequantised.tobytes() == state.dequantise("model.layers.0.conv.in_proj.weight").tobytes()
    found = np.array(model(mx.array(tokens())).astype(mx.float32))
    expected = logits_of_dequantised(MODEL_CONFIG, state)
    # stock layers compute in bf16 here, where a token may choose another expert; most do not
    assert np.median(np.abs(found - expected)) <= 0.02 * np.abs(expected).max()


def test_mlx_dequantises_the_golden_grid_bit_for_bit():
    mx = pytest.importorskip("mlx.core")
    golden = np.load(Path(__file__).parents[2] / "golden" / "grid.npz")
    scales, biases = (mx.array(golden[name]).view(mx.bfloat16).astype(mx.float32) for name in ("scales", "biases"))
    found = np.array(mx.dequantize(mx.array(golden["codes"].view(np.uint32)), scales, biases, group_size=64, bits=8))
    for row, name in enumerate(golden["names"]):
        assert found[row].tobytes() == golden["dequantised"][row].tobytes(), name


def test_export_copies_small_files_and_no_base_weights(tmp_path):
    state = quantised_state(MODEL_CONFIG, "float32")
    write_mlx_folder(state, model_folder(MODEL_CONFIG, tmp_path / "base"), tmp_path / "out")
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert names == ["config.json", "model-00001-of-00001.safetensors", "model.safetensors.index.json", "tokenizer.json"]
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization"]["model.layers.1.feed_forward.gate"] is False
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] > state.layout.num_codes
    shutil.rmtree(tmp_path / "base")
    with pytest.raises(FormatError, match=r"config\.json"):
        write_mlx_folder(state, tmp_path / "base", tmp_path / "out")
