"""Starts a run: checks it, sets the servers up, claims its name in the bucket, starts its workflow; or goes on with one.

The order matters: nothing is written before the configuration, the model and the environment are known to fit, and
the workflow starts only after run.json is there.
"""

import asyncio
import json
import math
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from activities.connection import setup_namespace
from cli.temporal import Control
from environments import known
from stoa.bucket import keys
from stoa.bucket.head import Head, read_head
from stoa.bucket.manifest import Signer
from stoa.bucket.run_document import RunDocument, claim_run, new_run, read_run, upload_model_files
from stoa.bucket.store import Store
from stoa.config.faults import Fault, Origin, fault_at
from stoa.config.load import bucket_credentials, find_model_folder, signing_seed, temporal_access
from stoa.config.run import RunConfig, Stop
from stoa.contracts.errors import (
    CheckpointError,
    ConfigError,
    ObjectMissingError,
    RunExistsError,
    RunMismatchError,
    ServiceUnavailableError,
    SignatureError,
    StoaError,
    UnknownNameError,
    UsageError,
)
from stoa.contracts.evaluation_messages import EvaluationPlan
from stoa.contracts.messages import RunInput, StopConditions
from stoa.weights.layout import Layout, layout_of

_PATIENCE_SECONDS: Final = 5.0
"""A server that a person started in another window a moment ago may not answer yet."""
_FREE_TO_CHANGE: Final = ("stop.", "prices.", "temporal.", "bucket.endpoint", "macs.")
"""Settings that may differ when a run goes on: when it ends, what it costs, and where its servers are."""


@dataclass(frozen=True, slots=True)
class Launched:
    """A run whose workflow was started."""

    document: RunDocument
    layout: Layout
    resumed: bool


def open_store(config: RunConfig) -> Store:
    """The bucket of a configuration, with the credentials of the environment."""
    return Store(config.bucket, bucket_credentials(config.bucket), patience_seconds=_PATIENCE_SECONDS)


def set_up(config: RunConfig) -> Store:
    """Make the namespaces, their search attributes and the bucket where they are missing; safe to repeat."""
    store = open_store(config)
    store.ensure_bucket()
    access = temporal_access(config.temporal)
    for namespace in dict.fromkeys((config.temporal.namespace_core, config.temporal.namespace_mac)):
        asyncio.run(setup_namespace(config.temporal.address, namespace, access=access, patience_seconds=_PATIENCE_SECONDS))
    return store


def launch(config: RunConfig, control: Control, *, resume: bool = False, state: Path | None = None) -> Launched:
    """Start the run of `config`, or with `resume` go on with the stopped one of that name.

    The key that signs the run is this host's, or with `state` the one in that folder.

    Raises ConfigError, CheckpointError or LayoutError for a run that cannot be; RunExistsError for a used name,
    RunMissingError and RunMismatchError when there is nothing to go on with or it differs.
    """
    layout = check(config)
    store = set_up(config)
    document = _go_on(config, store, control, state) if resume else _claim(config, store, layout, state)
    if document.layout_id != layout.layout_id:
        raise CheckpointError(f"{config.model}: not the architecture run {config.run} was started with")
    start = run_input(config)
    control.start_run(control.carried_over(start) if resume else start)
    return Launched(document, layout, resume)


def check(config: RunConfig) -> Layout:
    """Fit the model folder, its layout and the environment together, without a server. Returns the layout."""
    from trainer_gpu.hub import locate_model

    folder = locate_model(config)
    try:
        model_config: object = json.loads((folder / "config.json").read_text("utf-8"))
        tokenizer = (folder / "tokenizer.json").read_bytes()
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder}: not a checkpoint folder ({error})", hint="it needs config.json and tokenizer.json") from None
    if not isinstance(model_config, dict):
        raise CheckpointError(f"{folder}/config.json: not a table")
    layout = layout_of({str(name): value for name, value in model_config.items()}, config.learning.dtype)
    _check_weights(folder, layout)
    known.create(config.environment.name, config.environment.settings, tokenizer)
    return layout


def environment_faults(config: RunConfig, origin: Origin) -> list[Fault]:
    """What the environment says against its name and settings; nothing where the model, and so its tokenizer, is not here."""
    folder = find_model_folder(config)
    tokenizer = folder / "tokenizer.json" if folder is not None else None
    if tokenizer is None or not tokenizer.is_file():
        return []
    rest, found = dict(config.environment.settings), list[Fault]()
    while True:
        try:
            known.create(config.environment.name, rest, tokenizer.read_bytes())
        except (ConfigError, UnknownNameError) as error:
            key = next((key for key in rest if f" {key} " in error.message), "")
            if not found or (key and not _names_one(error.message, config.environment.settings.keys() - rest.keys())):
                where = f"environment.settings.{key}" if key else "environment.name"
                found.append(fault_at(where, error.message, error.hint, origin))
            if not key:
                return found
            del rest[key]  # what the rest says can then be looked at, too
        except StoaError:
            return found  # no fault of the file; whoever starts the run is told
        else:
            return found


def _names_one(said: str, gone: Iterable[str]) -> bool:
    """True where a sentence is of a setting that was taken out: its default stands there now."""
    return any(f" {key} " in said for key in gone)


def _check_weights(folder: Path, layout: Layout) -> None:
    """Compare how many numbers the folder's safetensors hold with what config.json describes, by their headers alone."""
    found = 0
    paths = sorted(folder.glob("*.safetensors"))
    for path in paths:
        try:
            with path.open("rb") as file:
                header: object = json.loads(file.read(int.from_bytes(file.read(8), "little")))
            if not isinstance(header, dict):
                raise ValueError("its header is no table")
            tied = ("__metadata__", "lm_head.weight")
            found += sum(math.prod(entry["shape"]) for name, entry in header.items() if name not in tied)
        except (OSError, OverflowError, MemoryError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{path}: not a file of weights ({error})", hint="fetch the checkpoint again") from None
    described = sum(math.prod(spec.shape) for spec in layout.tensors)
    if paths and found != described:
        raise CheckpointError(
            f"{folder}: holds {found:,} numbers, its config.json describes {described:,}", hint="config.json and weights are of two models"
        )


def run_input(config: RunConfig) -> RunInput:
    """What RunWorkflow is told of a configuration."""
    stop, evaluation = config.stop, config.evaluation
    return RunInput(
        run=config.run,
        stop=StopConditions(
            stop.max_steps,
            stop.max_versions,
            stop.max_minutes * 60.0,
            stop.target_pass_at_1,
            stop.max_gpu_hours,
            stop.max_dollars,
            stop.dollars_per_gpu_hour,
            stop.on_alarm,
        ),
        evaluation=EvaluationPlan(
            every_versions=evaluation.every_versions,
            num_questions=evaluation.num_questions,
            num_questions_final=evaluation.num_questions_final,
            num_samples_final=evaluation.num_samples_final,
            questions_a_part=evaluation.questions_a_part,
            part_timeout_seconds=config.timeouts.sweep_seconds,
            timeout_seconds=2 * config.timeouts.sweep_seconds,
            sample_seed=config.seed,
        ),
        steps_per_version=config.learning.steps_per_version,
        anchor_every_versions=config.publish.anchor_every_versions,
        checkpoint_every_versions=config.publish.checkpoint_every_versions,
        step_timeout_seconds=config.timeouts.step_seconds,
        heartbeat_seconds=config.timeouts.heartbeat_seconds,
        mac_namespace=config.temporal.namespace_mac,
        max_staleness=config.learning.max_staleness_hard,
        groups_per_step=config.learning.groups_per_step,
        starved_seconds=config.learning.starved_seconds,
        anchor_by_join_cost=config.publish.anchor_by_join_cost,
        canary_sweeps=config.rollout.canary_sweeps,
    )


def differences(before: RunConfig, now: RunConfig) -> tuple[str, ...]:
    """`key: before -> now` of every setting that differs and may not."""
    old, new = _flat(before.model_dump()), _flat(now.model_dump())
    return tuple(
        f"{key}: {old.get(key, 'not set')!r} -> {new.get(key, 'not set')!r}"
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key) and not key.startswith(_FREE_TO_CHANGE)
    )


def _claim(config: RunConfig, store: Store, layout: Layout, state: Path | None) -> RunDocument:
    if store.exists(keys.run_json(config.run)):
        raise RunExistsError(
            f"{store.name} has a run {config.run!r} already",
            hint="go on with it: add `--resume`; or start another: name it with `run` in a file of its own",
        )
    signer = Signer.from_seed(signing_seed(create=True, base=state))
    from trainer_gpu.hub import locate_model, weight_files

    folder = locate_model(config)
    files = upload_model_files(store, config.run, folder)
    return claim_run(store, new_run(config, signer, layout_id=layout.layout_id, model_files=files, weights=weight_files(folder)), signer)


def _go_on(config: RunConfig, store: Store, control: Control, state: Path | None) -> RunDocument:
    document = read_run(store, config.run)
    if found := differences(document.config, config):
        raise RunMismatchError(
            "\n  ".join([f"run {config.run} was started with other settings", *found]),
            hint="only [stop] may change: undo the rest, or start another run, with a name and a file of its own",
        )
    if document.public_key != Signer.from_seed(signing_seed(base=state)).public_key:
        raise SignatureError(f"run {config.run} was signed with another key than this host's", hint="set STOA_SIGNING_KEY to the run's key")
    if control.is_running(config.run):
        raise RunExistsError(f"run {config.run} has not stopped", hint=_how_to_go_on(config.run, control))
    with suppress(ObjectMissingError):  # stopped before its first version
        refuse_spent_limits(config.stop, read_head(store, config.run, document.public_key)[0])
    return document


def _how_to_go_on(run: str, control: Control) -> str:
    """What to do with a run that has not stopped."""
    try:
        control.status(run)
    except ServiceUnavailableError:
        return "its trainer is away: start `python -m trainer_gpu.worker`, which ends a run that was told to, and goes on with any other"
    except StoaError:
        pass  # `stoa status` tells it
    return f"see `stoa status {run}`; `stoa resume {run}` undoes a pause"


def refuse_spent_limits(stop: Stop, head: Head) -> None:
    """Raises UsageError if a stopped run would end at once because it is at a limit of steps or versions, or past it."""
    if head.state != "stopped":
        return
    for name, limit, done in (("max_steps", stop.max_steps, head.step), ("max_versions", stop.max_versions, head.version)):
        if 0 < limit <= done:
            raise UsageError(
                f"run {head.run} has done {done} {name[4:]} and would end at once: stop.{name} is {limit}",
                hint=f"set a higher limit, for example `--set stop.{name}={done + limit}`, or 0 for none",
            )


def _flat(tree: dict[str, object], prefix: str = "") -> dict[str, object]:
    flat: dict[str, object] = {}
    for name, value in tree.items():
        if isinstance(value, dict):
            flat.update(_flat({str(key): inner for key, inner in value.items()}, f"{prefix}{name}."))
        else:
            flat[f"{prefix}{name}"] = value
    return flat
