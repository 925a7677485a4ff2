"""What was taught, as a hub checkpoint that a run starts from: the base's files with the trained tensors changed.

Adapters are added to the base's own weights, not to the quantised ones they were trained over. One file of the base is in
memory at a time. Names: mlx_lm stacks experts and renames a few tensors of a family; `hub_names` undoes that.
"""

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple, cast

import mlx.core as mx
import numpy as np
from mlx_lm.utils import load_model

from stoa.contracts.errors import CheckpointError
from worker_mac.warmstart.adam import Arrays
from worker_mac.warmstart.settings import Settings

MAX_DIFFERENCE: Final = 1e-3
"""Of logits in fp32 between the policy that was taught and its reloaded export, as a share of the largest."""
MAX_MEAN_DIFFERENCE: Final = 0.25
"""In 16 bits, where rounding flips experts: mean difference, as a share of the logits' spread."""
_LFM2_MOE: Final = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


class Source(NamedTuple):
    """Where a hub tensor comes from: mlx_lm's module path, and which of its experts (-1: it has none)."""

    path: str
    expert: int


def hub_names(family: str, path: str, num_experts: int) -> list[tuple[str, Source]]:
    """The hub tensors that mlx_lm's parameter `path` (without ".weight") is made of."""
    stem, _, last = path.rpartition(".")
    renamed = _LFM2_MOE.get(last, last) if family == "lfm2_moe" and ".feed_forward" in path else last
    if stem.endswith(".switch_mlp"):
        block = stem.removesuffix(".switch_mlp")
        return [(f"{block}.experts.{expert}.{renamed}.weight", Source(path, expert)) for expert in range(num_experts)]
    return [(f"{stem}.{renamed}.weight" if stem else f"{renamed}.weight", Source(path, -1))]


class Changes:
    """New values of hub tensors from what was trained."""

    def __init__(self, family: str, settings: Settings, trained: Arrays) -> None:
        """trained: whole parameters by mlx_lm's names, adapters or weights."""
        self._trained = trained
        self._scale = settings.scale
        self._sources: dict[str, Source] = {}
        if settings.mode == "lora":
            for name, array in trained.items():
                if name.endswith(".lora_a"):
                    self._sources |= dict(hub_names(family, name.removesuffix(".lora_a"), array.shape[0] if array.ndim == 3 else 0))
            self._new: Callable[[Source, mx.array], mx.array] = self._adapted
        else:
            for name, array in trained.items():
                self._sources |= dict(hub_names(family, name.removesuffix(".weight"), array.shape[0] if array.ndim == 3 else 0))
            self._new = self._replaced

    def check(self, names: Sequence[str]) -> None:
        """Raise CheckpointError unless the base has every tensor that changes."""
        if missing := sorted(set(self._sources) - set(names)):
            raise CheckpointError(
                f"the base checkpoint lacks {missing[0]} and {len(missing) - 1} more that would be taught",
                hint="this family's names are not known here; please report it",
            )

    def apply(self, name: str, base: mx.array) -> mx.array:
        """A hub tensor after the warm start, in the type it had."""
        source = self._sources.get(name)
        return base if source is None else self._new(source, base).astype(base.dtype)

    def _adapted(self, source: Source, base: mx.array) -> mx.array:
        a, b = self._trained[f"{source.path}.lora_a"], self._trained[f"{source.path}.lora_b"]
        product = b.T @ a.T if source.expert < 0 else b[source.expert] @ a[source.expert]
        return base.astype(mx.float32) + self._scale * product

    def _replaced(self, source: Source, base: mx.array) -> mx.array:
        new = self._trained[f"{source.path}.weight"]
        new = new if source.expert < 0 else new[source.expert]
        # Kernels of convolutions: taps in the middle here, at the end on the hub.
        return new if new.shape == base.shape else new.transpose(0, 2, 1)


def write_checkpoint(base: Path, out: Path, changes: Changes, check: Callable[[Path], None] = lambda _: None) -> int:
    """Write the hub checkpoint; it appears under `out` only when it is whole. Returns its bytes.

    check: looks at what was written before it appears, and raises what is to be raised instead.

    Raises CheckpointError, before anything is written, if the base has no place for something.
    """
    files = sorted(base.glob("model*.safetensors"))
    changes.check([name for path in files for name in cast(Mapping[str, mx.array], mx.load(str(path)))])
    part = out.with_name(f".{out.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    try:
        part.mkdir(parents=True)
        for path in files:
            tensors = cast(dict[str, mx.array], mx.load(str(path)))
            new = {name: changes.apply(name, array) for name, array in tensors.items()}
            mx.save_safetensors(str(part / path.name), new, metadata={"format": "pt"})
        for path in base.iterdir():
            if path.is_file() and path.suffix in (".json", ".jinja", ".txt", ".model"):
                shutil.copyfile(path, part / path.name)
        check(part)
        if out.exists():
            out.rmdir()  # it is empty: the caller checked
        part.rename(out)
    finally:  # a disk that is full is not left fuller
        shutil.rmtree(part, ignore_errors=True)
    return sum(path.stat().st_size for path in out.iterdir())


def write_adapters(folder: Path, settings: Settings, trained: Arrays, num_layers: int) -> None:
    """The adapters as stock mlx_lm loads them beside the base: `mlx_lm.load(base, adapter_path=folder)`."""
    folder.mkdir(parents=True, exist_ok=True)
    keys = sorted({name.removesuffix(".lora_a").split(".layers.", 1)[1].split(".", 1)[1] for name in trained if name.endswith(".lora_a")})
    parameters = {"rank": settings.rank, "scale": settings.scale, "dropout": 0.0, "keys": keys}
    document = {"fine_tune_type": "lora", "num_layers": num_layers, "lora_parameters": parameters}
    (folder / "adapter_config.json").write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    mx.save_safetensors(str(folder / "adapters.safetensors"), trained)


def compare(folder: Path, logits: mx.array, ids: mx.array, *, exact: bool) -> float:
    """Largest difference of `logits` [B, T, V] to what mlx_lm makes of the checkpoint; raises CheckpointError if too large.

    exact: the checkpoint is in fp32, so that nothing was rounded when it was written.
    """
    reread, _ = load_model(folder)
    if logits.dtype == mx.float32:
        reread.set_dtype(mx.float32)
    theirs = np.array(reread(ids).astype(mx.float32))
    ours = np.array(logits.astype(mx.float32))
    far = np.abs(ours - theirs)
    share = far.max() / np.abs(ours).max() if exact else far.mean() / ours.std()
    if not share <= (MAX_DIFFERENCE if exact else MAX_MEAN_DIFFERENCE):
        raise CheckpointError(
            f"what was written to {folder} computes other logits than what was taught: they differ by up to {far.max():.3g}",
            hint="this is a fault; please report it",
        )
    return float(far.max())
