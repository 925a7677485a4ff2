"""Whether an exported folder says in stock mlx_lm what the engine here says: the last check of an export.

Writing the folder is `stoa.weights.export`'s. Nothing here knows of a run.
"""

import json
from pathlib import Path
from typing import Final

import mlx.core as mx
import numpy as np
from mlx_lm.utils import load_model

from stoa.contracts.errors import WeightsError
from stoa.weights.state import WeightState
from worker_mac.forced import Forced
from worker_mac.model import Model
from worker_mac.model_config import read_model_config
from worker_mac.weights import LiveWeights

MAX_DIFFERENCE: Final = 1e-3
"""In fp32: largest difference of two logits, as a share of the largest."""
MAX_MEAN_DIFFERENCE: Final = 0.25
"""In bf16, where rounding flips experts: mean difference, as a share of the logits' spread. Unrelated logits have 1.1."""
_NUM_ROWS, _NUM_TOKENS = 3, 24


def compare(state: WeightState, folder: Path) -> float:
    """Largest difference between the logits of `state` here and of `folder` in mlx_lm, on random tokens.

    Raises WeightsError if they say different things.
    """
    config: dict[str, object] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    vocab_size = int(str(config["vocab_size"]))
    tokens = np.random.default_rng(0).integers(0, vocab_size, (_NUM_ROWS, _NUM_TOKENS), dtype=np.int32)
    rows = Forced(Model(read_model_config(config), LiveWeights.of(state).arrays), _NUM_ROWS, _NUM_TOKENS)
    ours = rows.feed(list(tokens))
    stock, _ = load_model(folder)
    theirs = np.array(stock(mx.array(tokens))[:, -1].astype(mx.float32))
    far = np.abs(ours - theirs)
    exact = state.layout.raw_dtype == "float32"
    share = far.max() / np.abs(ours).max() if exact else far.mean() / ours.std()
    if not share <= (MAX_DIFFERENCE if exact else MAX_MEAN_DIFFERENCE):
        raise WeightsError(
            f"mlx_lm computes other logits from {folder}: they differ by up to {far.max():.3g}", hint="this is a fault; please report it"
        )
    return float(far.max())
