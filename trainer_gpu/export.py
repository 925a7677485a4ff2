"""A run's newest checkpoint as a folder that transformers opens, compared with the model it came from before it counts.

The weights are the fp32 masters in the run's dtype, not the int8 ones that Macs serve. Joining the bucket and the words a
person reads are the caller's.
"""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from megatron.core.models.gpt import GPTModel

from stoa.bucket.head import read_head
from stoa.bucket.run_document import RunDocument, fetch_model_files
from stoa.bucket.store import Store
from stoa.contracts.errors import CheckpointError, ObjectMissingError
from stoa.telemetry.arriving import Arrival
from stoa.weights.export import Compared
from trainer_gpu import host
from trainer_gpu.checkpoint import Identity, Part, read_document, read_tensors
from trainer_gpu.convert import save_hub
from trainer_gpu.model import build_model, forward_packed, read_model_config
from trainer_gpu.model_config import Lfm2Config
from trainer_gpu.policy import architecture_of
from trainer_gpu.state import BUFFER, MASTER, Named
from trainer_gpu.weights import local_weights, saved_buffers

MAX_DIFFERENCE: Final = 1e-3
"""Largest difference of two logits in fp32, as a share of their largest size; rounding alone makes about 1e-5."""
NUM_COMPARED: Final = 32
"""Places at the end of each prompt; of every place the logits of 8.47e9 weights would take gigabytes."""
OnArrival = Callable[[Arrival], None]


@dataclass(frozen=True, slots=True)
class ExportedHub:
    """An export that was reloaded and compared."""

    step: int
    compared: Compared


def export_hub(
    document: RunDocument, store: Store, files: Path, out: Path, prompts: Callable[[], Sequence[Sequence[int]]], on_arrival: OnArrival
) -> ExportedHub:
    """Write the checkpoint that HEAD names as the hub folder `out`, reload it with transformers and compare logits.

    Neither folder is there yet; `files` comes to hold the run's model files, which `prompts` may read. Until this returns,
    `out` is not to be trusted. Needs memory for the model in fp32 and once more in the run's dtype. on_arrival: told how
    much of the checkpoint has come.

    Raises:
        ObjectMissingError: no trainer has taken the run yet. CheckpointError: the checkpoint cannot be read, or the folder
            computes something else than what was saved.
    """
    head, _ = read_head(store, document.run, document.public_key)
    if not head.checkpoint_key:
        raise ObjectMissingError(f"run {document.run} has no checkpoint yet", hint="wait for its first one")
    host.setup_process(num_threads=torch.get_num_threads())
    fetch_model_files(store, document.model_files, files)
    config = read_model_config(files)
    identity = Identity(document.run, document.layout_id, architecture_of(config))
    saved = read_document(store, head.checkpoint_key, identity, document.public_key)
    model = build_model(config, getattr(torch, document.config.learning.dtype))
    fill(model, store, saved.parts, on_arrival)
    save_hub(model, config, out)
    for path in files.iterdir():
        shutil.copyfile(path, out / path.name)
    return ExportedHub(saved.facts.step, compare(model, config, out, prompts()))


@torch.no_grad()
def fill(model: GPTModel, store: Store, parts: tuple[Part, ...], on_arrival: OnArrival = lambda _: None) -> None:
    """Masters and buffers of a checkpoint into a model of one process, cast to its type. Raises CheckpointError if any is missing."""
    targets = {**dict(model.named_parameters()), **saved_buffers(model)}
    missing = {name: target.numel() for name, target in targets.items()}
    wanted = (f"{MASTER}.", f"{BUFFER}.")
    needed = tuple(part for part in parts if any(name.startswith(wanted) for name in part.tensors))
    total = sum(part.num_bytes for part in needed)
    before = {part.name: sum(one.num_bytes for one in needed[:number]) for number, part in enumerate(needed)}
    for full_name, tensor in read_tensors(store, needed, on_part=lambda name: on_arrival(Arrival(before[name], total))):
        if full_name.startswith(wanted):
            named = Named.of(full_name)
            targets[named.weight].view(-1)[named.start : named.stop].copy_(tensor.flatten())
            missing[named.weight] -= tensor.numel()
    if left := sorted(name for name, size in missing.items() if size):
        raise CheckpointError(f"the checkpoint lacks {len(left)} weights: {', '.join(left[:3])}")


@torch.no_grad()
def compare(model: GPTModel, config: Lfm2Config, folder: Path, prompts: Sequence[Sequence[int]]) -> Compared:
    """Logits, in fp32, of `model` and of what transformers makes of `folder`, at the ends of these prompts.

    Raises CheckpointError if they differ by more than MAX_DIFFERENCE of the largest logit.
    """
    from transformers import AutoModelForCausalLM  # noqa: PLC0415 - seconds of import, for an export only
    from transformers.utils import logging as talk  # noqa: PLC0415

    talk.set_verbosity_error()
    talk.disable_progress_bar()

    exact = build_model(config, torch.float32)
    sources = local_weights(model)
    for name, target in local_weights(exact).items():
        target.copy_(sources[name])
    rows = [torch.tensor(prompt) for prompt in prompts]
    ours = torch.cat([forward_packed(exact, ids.to(host.device()), [len(ids)])[-NUM_COMPARED:].cpu() for ids in rows])
    del exact
    reread = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    theirs = torch.cat([reread(input_ids=ids[None]).logits[0, -NUM_COMPARED:].float() for ids in rows])
    difference = float((ours - theirs).abs().max())
    if not difference <= MAX_DIFFERENCE * float(ours.abs().max()):
        raise CheckpointError(
            f"transformers computes other logits from the export: they differ by {difference:.3g}", hint="this is a fault; please report it"
        )
    same = ours.argmax(1) == theirs.argmax(1)
    return Compared(difference, float(same.float().mean()), len(same))
