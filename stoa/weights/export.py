"""Weights as a folder that stock mlx_lm opens: safetensors in MLX's packing and a config.json that says so.

Nothing is quantised again: the codes are the published ones. It assumes the base checkpoint's small files at hand.
"""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from stoa.contracts.errors import FormatError
from stoa.weights import grid
from stoa.weights.container import anchor_groups, as_stored, write_table
from stoa.weights.layout import BITS, GROUP_SIZE, Layout
from stoa.weights.state import WeightState

PART_BYTES: Final = 1 << 30


@dataclass(frozen=True, slots=True)
class Compared:
    """What another library computes from an exported folder, beside what the weights' own engine does."""

    max_logit_difference: float
    greedy_agreement: float
    """Share of the places compared at which both find the same token likeliest."""
    num_places: int


def mlx_config(model_config: dict[str, Any], layout: Layout) -> dict[str, Any]:
    """config.json of the quantised model: the base's, plus what mlx_lm needs to know which modules are int8.

    Modules with a weight matrix that is not int8 (router gates) are named with `false`, so that no loader quantises them.
    """
    quantization: dict[str, Any] = {"group_size": GROUP_SIZE, "bits": BITS, "mode": "affine"}
    for spec in layout.raw:
        if len(spec.shape) == 2:
            quantization[spec.module] = False
    return {**model_config, "quantization": quantization, "quantization_config": quantization}


def write_mlx_folder(state: WeightState, model_files: Path, folder: Path) -> None:
    """Write `state` as a model folder that `mlx_lm.load` opens.

    Args:
        state: the weights.
        model_files: folder with the base checkpoint's config.json, tokenizer.json and so on; all its small files are copied.
        folder: made if it is not there; files of the same names are replaced.

    Scales and biases are written in the type of the raw tensors (their bf16 values are exact in float32), because stock
    layers compute embeddings in the type of the scales.

    Raises:
        FormatError: no usable config.json among the model files.
    """
    try:
        model_config = json.loads((model_files / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise FormatError(f"{model_files / 'config.json'} cannot be used: {error}") from error
    folder.mkdir(parents=True, exist_ok=True)
    for path in sorted(model_files.iterdir()):
        if path.is_file() and path.suffix != ".safetensors" and path.name != "model.safetensors.index.json":
            shutil.copyfile(path, folder / path.name)
    text = json.dumps(mlx_config(model_config, state.layout), indent=2, sort_keys=True)
    (folder / "config.json").write_text(text + "\n", encoding="utf-8")
    groups = list(anchor_groups(state.layout, PART_BYTES))
    places: dict[str, str] = {}
    total = 0
    for number, arrays in enumerate(groups, start=1):
        name = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        entries: dict[str, tuple[str, Any]] = {}
        for spec in arrays:
            dtype, array = as_stored(spec, state.arrays[spec.name])
            if dtype == "BF16" and state.layout.raw_dtype == "float32":
                dtype, array = "F32", grid.bf16_values(array.view(np.uint16))
            entries[spec.name] = (dtype, array)
            places[spec.name] = name
            total += array.nbytes
        (folder / name).write_bytes(write_table(entries, {"format": "mlx"}))
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
