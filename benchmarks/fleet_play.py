"""How a pretended Mac plays, and the small model that pretended runs have: what needs no engine to be said."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

from stoa.config.load import PROJECT_ROOT

_POLICY = PROJECT_ROOT / "environments" / "search" / "policy"


@dataclass(frozen=True, slots=True)
class Play:
    """How a Mac plays. A sweep of all its groups takes `sweep_seconds`, give or take `jitter` (of a lognormal).

    first_group: share of that time after which the first group has ended; the others follow evenly up to its end.
    """

    sweep_seconds: float = 10.0
    jitter: float = 0.1
    first_group: float = 0.4
    p_right: float = 0.5
    full_sync: bool = False
    """Bring every new version in as whole weights, as systems without deltas do."""


def make_model_folder(folder: Path, *, width: int = 64, layers: int = 1) -> Path:
    """A checkpoint folder without weights: the demo's tokenizer and a small config.json of its family."""
    folder.mkdir(parents=True)
    config = json.loads((_POLICY / "config.json").read_text("utf-8"))
    config |= {"hidden_size": width, "intermediate_size": 4 * width, "num_hidden_layers": layers, "num_dense_layers": layers}
    config |= {"layer_types": ["conv"] * layers, "num_attention_heads": 1, "num_key_value_heads": 1}
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(_POLICY / name, folder / name)
    return folder
