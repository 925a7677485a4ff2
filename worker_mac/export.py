"""Whether an exported folder says in stock mlx_lm what the engine here says: the last check of an export.

Writing the folder is `stoa.weights.export`'s, prompts are the caller's. Nothing here knows of a run.

Legend: P places compared, V vocabulary.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import mlx.core as mx
import numpy as np
from mlx_lm.utils import load_model
from numpy.typing import NDArray

from stoa.contracts.errors import WeightsError
from stoa.weights.export import Compared
from stoa.weights.state import WeightState
from worker_mac.forced import Forced
from worker_mac.model import Model
from worker_mac.model_config import read_model_config
from worker_mac.plan import Ints
from worker_mac.weights import LiveWeights

MAX_DIFFERENCE: Final = 1e-3
"""In fp32: largest difference of two logits, as a share of the largest."""
MAX_MEAN_DIFFERENCE: Final = 0.25
"""In bf16, where rounding flips experts: mean difference, as a share of the logits' spread. Unrelated logits have 1.1."""
NUM_GREEDY: Final = 8
"""Tokens that follow each prompt: the likeliest here, fed to both."""
_BITE_TOKENS: Final = 128


def compare(state: WeightState, folder: Path, prompts: Sequence[Sequence[int]]) -> Compared:
    """The logits of `state` here and of `folder` in mlx_lm, after each prompt and on along what is likeliest here.

    prompts: ids, at least one each. Raises WeightsError if they say different things.
    """
    config: dict[str, object] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    model = Model(read_model_config(config), LiveWeights.of(state).arrays)
    stock, _ = load_model(folder)
    ours, theirs = zip(*(_beside(model, stock, np.array(ids, np.int32)) for ids in prompts), strict=True)
    ours_PV, theirs_PV = np.concatenate(ours), np.concatenate(theirs)
    far = np.abs(ours_PV - theirs_PV)
    exact = state.layout.raw_dtype == "float32"
    share = far.max() / np.abs(ours_PV).max() if exact else far.mean() / ours_PV.std()
    if not share <= (MAX_DIFFERENCE if exact else MAX_MEAN_DIFFERENCE):
        raise WeightsError(
            f"mlx_lm computes other logits from {folder}: they differ by up to {far.max():.3g}", hint="this is a fault; please report it"
        )
    same = ours_PV.argmax(1) == theirs_PV.argmax(1)
    return Compared(float(far.max()), float(same.mean()), len(same))


def _beside(model: Model, stock: Callable[[mx.array], mx.array], prompt: Ints) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Logits here and in mlx_lm after a prompt and after each of NUM_GREEDY tokens that go on from it: float32 [P, V] each."""
    rows = Forced(model, 1, len(prompt) + NUM_GREEDY)
    bites = [rows.feed([prompt[start : start + _BITE_TOKENS]]) for start in range(0, len(prompt), _BITE_TOKENS)]
    found, tokens = bites[-1:], list(prompt)
    for _ in range(NUM_GREEDY):
        tokens.append(np.int32(found[-1].argmax()))
        found.append(rows.feed([np.array(tokens[-1:], np.int32)]))
    theirs = stock(mx.array(np.array(tokens, np.int32)[None]))[0, len(prompt) - 1 :]
    return np.concatenate(found), np.array(theirs.astype(mx.float32))
