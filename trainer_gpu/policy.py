"""The policy in this process's memory: model, optimizer, and the ways its state goes in and out.

Built from the base checkpoint; a saved state replaces it whole. With several ranks each holds its share; rank 0's
methods tell the others (`lead`), and all do the same work at the same moment. Assumes it is the only policy of the
process, because Megatron's parallel state is one a process.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch

from stoa.bucket.steps import GroupMismatch
from stoa.bucket.store import Store
from stoa.config.run import Learning
from stoa.contracts.errors import BucketError, CheckpointError, LayoutError, NonFiniteError, ServiceError, StoaError
from stoa.rollouts.records import Group
from stoa.weights.layout import Layout, layout_of
from trainer_gpu import host, layout, rng
from trainer_gpu.checkpoint import Part, read_tensors, save_parts
from trainer_gpu.convert import load_hub, mlx_tensors
from trainer_gpu.crew import Compare, Lead, LoadBase, Restore, Save, SendWire, TellRng, Train, agree, alone
from trainer_gpu.fault import blame, broken
from trainer_gpu.model import Lfm2Config, build_model, read_model_config
from trainer_gpu.parallel import Trainable, build_optimizer
from trainer_gpu.step import StepOutcome, compare_groups, optimizer_step


def architecture_of(config: Lfm2Config) -> str:
    """What a checkpoint's architecture is called: the sha256 of config.json."""
    return hashlib.sha256(config.source.encode()).hexdigest()


class Policy:
    """Model and optimizer of one run."""

    def __init__(self, folder: Path, learning: Learning, *, seed: int, layout_id: str, lead: Lead = alone) -> None:
        """Build the model with the base checkpoint's weights.

        Raises:
            CheckpointError, ConfigError: the folder holds no checkpoint we can train.
            LayoutError: its weights on the wire would not have the run's layout, or the experts cannot be shared so.
            GpuMemoryError: model and optimizer do not fit the GPU.
        """
        self._folder = folder
        self._learning = learning
        self._lead = lead
        self.config = read_model_config(folder)
        self.architecture = architecture_of(self.config)
        self.layout: Layout = layout_of(json.loads(self.config.source), learning.dtype)
        if self.layout.layout_id != layout_id:
            raise LayoutError(
                f"{folder} has layout {self.layout.layout_id[:16]}, the run was started with {layout_id[:16]}",
                hint="use the base checkpoint and the learning.dtype of the run",
            )
        host.join_processes()
        experts = layout.expert_share(learning.expert_parallel, self.config.num_experts, host.num_ranks())
        num_threads = learning.num_threads or torch.get_num_threads()
        host.setup_process(num_threads=num_threads, seed=seed, layout=layout.Layout(expert=experts))
        with host.within_memory("the model with its optimizer"):
            self.trainable = self._build()
        self._at_base = True

    @property
    def routing(self) -> tuple[int, int, int] | None:
        """Layers with experts, experts a token, experts; None for a dense model."""
        config = self.config
        return (len(config.moe_layers), config.experts_per_token, config.num_experts) if config.num_experts else None

    def load_base(self) -> None:
        """Back to the base checkpoint, with a fresh optimizer."""
        if self._at_base:
            return
        with self._lead(LoadBase()):
            load_hub(self.trainable.model, self.config, self._folder)
            self.trainable.forget()
            self._at_base = True

    def restore_parts(
        self, store: Store, parts: Sequence[Part], chance: str, *, on_part: Callable[[str], None] = lambda name: None
    ) -> None:
        """Take a checkpoint's state on every rank, each from the parts that hold something of its own; `chance`: `Facts.rng`.

        Raises CheckpointError: it is another architecture's, and nothing has changed; or a part cannot be used, and the
        policy is half filled: it must be restored or brought back to base. ServiceUnavailableError: the same.
        """
        with self._lead(Restore(tuple(parts), chance)):
            state = self.trainable.state
            fault: StoaError | None = None
            try:
                state.check_names([name for part in parts for name in part.tensors])
                self._at_base = False
                mine = tuple(part for part in parts if any(state.wants(name) for name in part.tensors))
                state.load(read_tensors(store, mine, on_part=on_part))
                rng.restore(chance, host.rank())
                if names := broken((name, tensor) for name, tensor in self.state().items() if name.startswith("master.")):
                    raise CheckpointError(f"weights of the checkpoint are NaN or infinite, the first {names[0]}")
            except (CheckpointError, ServiceError) as error:
                fault = error
            agree(fault)
            self.trainable.share_weights()

    def state(self) -> Mapping[str, torch.Tensor]:
        """Everything a later process needs to go on bit for bit, as far as this rank holds it; views where possible."""
        return self.trainable.state.tensors()

    def capture_rng(self) -> str:
        """States of the random generators of every rank, for `Facts.rng`; on rank 0."""
        with self._lead(TellRng()):
            return rng.as_text(host.collect(rng.capture()))

    def save_parts(
        self, store: Store, run: str, epoch: int, step: int, *, part_bytes: int, on_part: Callable[[str], None] = lambda name: None
    ) -> tuple[Part, ...]:
        """Write the state as parts of a checkpoint, each rank what it alone holds; returns all ranks' parts on rank 0.

        on_part: told of each part before it is written.
        """
        with self._lead(Save(epoch, step, part_bytes)):
            fault: StoaError | None = None
            parts: tuple[Part, ...] = ()
            try:
                tensors = self.trainable.state.tensors(own=True)
                parts = save_parts(store, run, epoch, step, tensors, rank=host.rank(), part_bytes=part_bytes, on_part=on_part)
            except (BucketError, ServiceError) as error:
                fault = error
            agree(fault)
            return tuple(part for each in host.collect(parts) for part in each)

    def train(
        self, groups: Sequence[Group], *, version: int, step: int, planned_sequences: int, on_row: Callable[[str], None]
    ) -> StepOutcome:
        """One optimizer step; see `step.optimizer_step`.

        Raises NonFiniteError: nothing has changed, on any rank; FaultyGroupsError where that is for single groups.
        GpuMemoryError: the policy must be restored.
        """
        with self._lead(Train(tuple(groups), version, step, planned_sequences)), host.within_memory(f"step {step}"):
            try:
                outcome = optimizer_step(
                    self.trainable,
                    groups,
                    self._learning,
                    version=version,
                    step=step,
                    planned_sequences=planned_sequences,
                    on_row=on_row,
                )
            except NonFiniteError as error:
                raise blame(self.trainable, groups, self._learning, planned_sequences=planned_sequences, on_group=on_row) from error
            self._at_base = False
            return outcome

    def compare(self, groups: Sequence[Group]) -> tuple[GroupMismatch, ...]:
        """How far the sampler's numbers of each group are from this policy's as it is, on rank 0; nothing changes."""
        with self._lead(Compare(tuple(groups))), host.within_memory("comparing canary groups"):
            return compare_groups(self.trainable, groups, self._learning)

    def wire_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The masters under their names on the wire, fp32, one at a time."""
        with self._lead(SendWire()):
            tensors = mlx_tensors(self.trainable.model, self.config, self.trainable.masters())
            try:
                for item in tensors:  # noqa: UP028 - `yield from` would close `tensors` before it is drained
                    yield item
            finally:
                # A reader that gives up must not leave the ranks that send their pieces waiting.
                if host.num_ranks() > 1:
                    for _ in tensors:
                        pass

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
            moment_dtype=getattr(torch, learning.moment_dtype),
            on_host=learning.optimizer_on_host,
        )
