"""The policy in this process's memory: model, optimizer, and the ways its state goes in and out.

Built from the base checkpoint; a saved state replaces it whole. Assumes it is the only policy of the process, because
Megatron's parallel state is one a process.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch

from stoa.config.run import Learning
from stoa.contracts.errors import LayoutError
from stoa.weights.layout import Layout, layout_of
from trainer_gpu import host
from trainer_gpu.convert import load_hub, mlx_tensors
from trainer_gpu.model import build_model, read_model_config
from trainer_gpu.parallel import Trainable, build_optimizer


class Policy:
    """Model and optimizer of one run."""

    def __init__(self, folder: Path, learning: Learning, *, seed: int, layout_id: str) -> None:
        """Build the model with the base checkpoint's weights.

        Raises:
            CheckpointError, ConfigError: the folder holds no checkpoint we can train.
            LayoutError: its weights on the wire would not have the run's layout.
        """
        host.setup_process(num_threads=learning.num_threads or torch.get_num_threads(), seed=seed)
        self._folder = folder
        self._learning = learning
        self.config = read_model_config(folder)
        self.architecture = hashlib.sha256(self.config.source.encode()).hexdigest()
        self.layout: Layout = layout_of(json.loads(self.config.source), learning.dtype)
        if self.layout.layout_id != layout_id:
            raise LayoutError(
                f"{folder} has layout {self.layout.layout_id[:16]}, the run was started with {layout_id[:16]}",
                hint="use the base checkpoint and the learning.dtype of the run",
            )
        self.trainable = self._build()
        self._at_base = True

    def load_base(self) -> None:
        """Back to the base checkpoint, with a fresh optimizer."""
        if not self._at_base:
            self.trainable = self._build()
            self._at_base = True

    def restore(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Take a saved state. Raises CheckpointError if it is another architecture's; nothing has changed then."""
        self.trainable.load_state_tensors(dict(tensors))
        self._at_base = False

    def state(self) -> Mapping[str, torch.Tensor]:
        """Everything a later process needs to go on bit for bit, as views."""
        return self.trainable.state_tensors()

    def moved(self) -> None:
        """Note that a step was taken."""
        self._at_base = False

    def wire_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The masters under their names on the wire, fp32, one at a time."""
        return mlx_tensors(self.trainable.model, self.config, self.trainable.masters())

    def _build(self) -> Trainable:
        learning = self._learning
        model = build_model(self.config, getattr(torch, learning.dtype))
        load_hub(model, self.config, self._folder)
        return build_optimizer(
            model,
            lr=learning.learning_rate,
            betas=(learning.beta1, learning.beta2),
            eps=learning.epsilon,
            weight_decay=learning.weight_decay,
            clip_grad=learning.grad_clip,
        )
