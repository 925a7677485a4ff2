"""What one warm start is: everything that decides its result, and what may differ from Mac to Mac.

The command writes it as JSON for the processes it starts; a saved state keeps the part that decides the result, and only
the same part goes on from it.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Final, Literal, NamedTuple, cast

from environments.search.teacher import Recipe
from stoa.contracts.errors import ConfigError

Mode = Literal["lora", "full"]
Split = Literal["data", "tensor"]
FRESH: Final = "new"
"""As a model: the demo's small policy with random weights."""
_SEEDS: Final = 1 << 32
_NOT_DECIDING: Final = ("out", "state", "save_every", "memory_bytes", "shares", "num_ranks", "wait_seconds")


@dataclass(frozen=True, slots=True)
class Settings:
    """One warm start."""

    model: str
    """Folder of a hub checkpoint; FRESH for random weights."""
    out: str
    """Folder to write the hub checkpoint to."""
    state: str
    """Folder of what a stopped warm start goes on from."""
    environment: str = "search"
    """Whose demonstrations."""
    dialogues: str = ""
    """File of demonstrations, instead of the environment's own."""
    mode: Mode = "lora"
    """Train low-rank adapters, or every weight."""
    bits: int = 4
    """Of the frozen weights under adapters: 4, 8, or 0 for as they are."""
    rank: int = 8
    """Inner size of an adapter."""
    scale: float = 20.0
    """An adapter's product counts this many times."""
    experts: bool = True
    """Adapters on experts too."""
    split: Split = "data"
    """What several Macs share out: the rows of a step, or the model's matrices."""
    num_ranks: int = 1
    """Processes that train together."""
    num_steps: int = 200
    """Optimizer steps."""
    batch_rows: int = 32
    """Demonstrations a step, over all Macs."""
    learning_rate: float = 1e-4
    """At its height."""
    num_warmup_steps: int = 10
    """Steps in which the learning rate rises."""
    clip_grad: float = 1.0
    """Longest gradient that is taken as it is."""
    seed: int = 0
    """Of adapters, random weights and the order of demonstrations."""
    max_tokens: int = 0
    """Longest demonstration that is taught; 0: the longest that fits."""
    grad_checkpoint: bool = False
    """Compute each layer twice instead of keeping what lies inside it."""
    save_every: int = 50
    """Steps from one saved state to the next."""
    memory_bytes: int = 0
    """Memory a process may use; 0: what the machine grants."""
    shares: tuple[float, ...] = ()
    """Speed of each rank in any unit; none: measured before the first step."""
    wait_seconds: float = 300.0
    """Longest wait for the other ranks before this one gives up."""

    def check(self) -> None:
        """Raise ConfigError for what cannot be."""
        lowest = {"rank": 1, "num_ranks": 1, "num_steps": 1, "batch_rows": 1, "num_warmup_steps": 0, "save_every": 1}
        lowest |= {"max_tokens": 0, "memory_bytes": 0, "seed": 0}
        for name, least in lowest.items():
            if getattr(self, name) < least:
                raise ConfigError(f"warm start: {name} = {getattr(self, name)}", hint=f"at least {least}")
        if self.seed >= _SEEDS:
            raise ConfigError(f"warm start: seed = {self.seed}", hint=f"below {_SEEDS}")
        if odd := [name for name in ("learning_rate", "scale", "clip_grad", "wait_seconds") if not math.isfinite(getattr(self, name))]:
            raise ConfigError(f"warm start: {odd[0]} = {getattr(self, odd[0])}", hint="a number that ends")
        if self.bits not in (0, 4, 8):
            raise ConfigError(f"warm start: bits = {self.bits}", hint="4 or 8, or 0 for weights as they are")
        if not (self.learning_rate > 0 and self.clip_grad > 0 and self.wait_seconds > 0):
            raise ConfigError("warm start: learning rate, clipping and the longest wait must be above 0")
        if self.shares and (len(self.shares) != self.num_ranks or not all(0 < share < math.inf for share in self.shares)):
            raise ConfigError(
                f"warm start: {len(self.shares)} shares for {self.num_ranks} processes", hint="one number above 0 for each process"
            )
        if self.mode == "full" and self.split == "tensor":
            raise ConfigError("warm start: every weight is trained with the rows shared out, not the matrices", hint="use adapters")
        if self.model == FRESH and (self.mode != "full" or self.environment != "search" or self.dialogues):
            raise ConfigError("warm start: random weights learn the demo's task, all of them", hint="use `--full` and environment search")

    @property
    def deciding(self) -> dict[str, object]:
        """The part that decides the result, for a saved state and for ranks to agree on."""
        return {name: value for name, value in asdict(self).items() if name not in _NOT_DECIDING}

    def to_json(self) -> str:
        """For the processes that train."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Settings":
        """The reverse. Raises ConfigError for other fields."""
        found = cast(Mapping[str, object], json.loads(text))
        if set(found) != {field.name for field in fields(cls)}:
            raise ConfigError("settings of a warm start by another build", hint="install the same version on every Mac")
        return cls(**{name: tuple(value) if isinstance(value, list) else value for name, value in found.items()})  # pyright: ignore[reportArgumentType]

    @property
    def out_folder(self) -> Path:
        """Where the checkpoint goes."""
        return Path(self.out)

    @property
    def state_folder(self) -> Path:
        """Where saved states go."""
        return Path(self.state)


class Defaults(NamedTuple):
    """What somebody ran: steps, rows a step, the height of the learning rate, and the steps of its rise."""

    num_steps: int
    batch_rows: int
    learning_rate: float
    num_warmup_steps: int


def defaults(model: str) -> Defaults:
    """For a checkpoint that speaks already; for FRESH weights, the recipe of the demo's policy."""
    if model != FRESH:
        return Defaults(200, 32, 1e-4, 10)
    recipe = Recipe()
    return Defaults(recipe.num_steps, recipe.batch_rows, recipe.learning_rate, recipe.num_warmup_steps)
