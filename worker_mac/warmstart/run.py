"""A warm start from its settings to its checkpoint: what every rank does, in the same order.

Rank 0 speaks, saves and exports; the others compute. Every fact about one Mac that the others must know is exchanged once,
before the first step.
"""

import atexit
import hashlib
import json
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Final

import mlx.core as mx
import psutil

from environments.demonstrations import Demonstration, Demonstrations, Written, read_dialogues
from environments.teachers import teach
from stoa.chat.render import ChatRenderer
from stoa.contracts.errors import CheckpointError, UsageError
from worker_mac.sharded_lora import join_slices, take_slice
from worker_mac.warmstart import memory, policy, tensor
from worker_mac.warmstart.adam import Arrays
from worker_mac.warmstart.batches import Batch, Host, padded
from worker_mac.warmstart.export import Changes, compare, write_adapters, write_checkpoint
from worker_mac.warmstart.fresh import write_fresh
from worker_mac.warmstart.learner import Learner
from worker_mac.warmstart.ranks import Ranks
from worker_mac.warmstart.saves import Saved, has_saves, load_saved, save
from worker_mac.warmstart.settings import FRESH, Settings

CACHE_BYTES: Final = 32 << 20
"""Buffers kept for reuse; part of the plan's margin."""
_LOOK_STEPS: Final = 2
"""Steps whose demonstrations are looked at for their lengths before anything is loaded."""
_PROBE_ROWS: Final = 8
_SAMPLES: Final = 64
_SAMPLE_BYTES: Final = 4096
_MOST_TOKENS: Final = 1 << 16

Tell = Callable[[str, dict[str, object]], None]
"""Takes an event's name and its facts; called on rank 0 only."""


@dataclass(frozen=True, slots=True)
class Result:
    """How it ended. `num_steps`: optimizer steps in all; fewer than asked if it was stopped."""

    num_steps: int
    stopped: bool
    last_loss: float


def warm_start(settings: Settings, ranks: Ranks, tell: Tell, *, resume: bool = False, stop: Callable[[], bool] = lambda: False) -> Result:
    """Teach the policy and export it.

    Raises:
        UsageError: it does not fit, ranks differ, or a state is there and `resume` is not said, or the reverse.
        CheckpointError: the base or the state cannot be used. FormatError: the file of demonstrations cannot.
        NonFiniteError: a step went wrong; the last state is as it was. RankLostError: another rank is gone.
    """
    settings.check()
    _check_folders(settings, ranks, resume)
    base = _base(settings, ranks)
    config, tensors = policy.read_config(base), memory.read_tensors(base)
    source = demonstrations(settings, base)
    ranks.agree("the build, the settings or the base checkpoint", _identity(settings, base, tensors))
    plan = memory.plan(config, tensors, settings, _limit(settings, ranks))
    hosts = _check_memory(plan, settings, ranks, source, tell)
    mx.set_cache_limit(CACHE_BYTES)
    taught, axes = _load(base, settings, ranks)
    saved = load_saved(settings.state_folder, settings) if ranks.rank == 0 and resume else None
    first_step, shares = _begin(ranks, saved, settings)
    learner = Learner(
        taught, settings, ranks, hosts=hosts, rows_at=lambda length: min(settings.batch_rows, plan.rows_at(length)), split_axes=axes
    )
    _restore(learner, ranks, saved, first_step)
    learner.hosts = tuple(replace(host, share=share) for host, share in zip(hosts, shares or _speeds(learner, ranks, source), strict=True))
    tell("started", {"first_step": first_step, "num_steps": settings.num_steps, "shares": [round(host.share, 4) for host in learner.hosts]})
    result = _teach(learner, ranks, source, tell, first_step, stop)
    if not result.stopped:
        _finish(learner, ranks, base, tell)
    return result


def demonstrations(settings: Settings, base: Path) -> Demonstrations:
    """What is taught. Raises CheckpointError without a tokenizer, FormatError or UnknownNameError as its makers do."""
    path = base / "tokenizer.json"
    if not path.is_file():
        raise CheckpointError(f"{base} has no tokenizer.json", hint="name the folder of a hub checkpoint")
    tokenizer = path.read_bytes()
    if settings.dialogues:
        read = list(read_dialogues(Path(settings.dialogues), ChatRenderer(tokenizer)))
        return Written(read, seed=settings.seed, batch_rows=settings.batch_rows)
    return teach(settings.environment, tokenizer, num_steps=settings.num_steps, batch_rows=settings.batch_rows, seed=settings.seed)


def _check_folders(settings: Settings, ranks: Ranks, resume: bool) -> None:
    """Rank 0's folders alone count: on other Macs they need not be."""
    if ranks.rank:
        return
    out = settings.out_folder
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"{out}: not an empty folder; a warm start overwrites nothing", hint="name a new folder")
    begun = has_saves(settings.state_folder)
    if begun and not resume:
        raise UsageError(
            f"{settings.state_folder} holds a warm start that was begun", hint="go on with it by --resume, or delete the folder"
        )
    if resume and not begun:
        raise UsageError(f"{settings.state_folder} holds nothing to go on from", hint="leave --resume out")


def _base(settings: Settings, ranks: Ranks) -> Path:
    if settings.model != FRESH:
        return Path(settings.model)
    folder = settings.state_folder / "base"
    if ranks.rank:
        folder = Path(tempfile.mkdtemp(prefix="stoa-warmstart-"))
        atexit.register(shutil.rmtree, folder, True)
    write_fresh(folder, settings.seed)
    return folder


def _identity(settings: Settings, base: Path, tensors: Sequence[memory.Tensor]) -> str:
    """What must be the same on every Mac, in a line whose beginning people can read."""
    deciding = {name: value for name, value in settings.deciding.items() if name not in ("model", "dialogues")}
    files = {path.name: path.stat().st_size for path in sorted(base.glob("model*.safetensors"))}
    # Rows are divided by their lengths, and every rank reads them itself: one that reads others would teach some twice, some never.
    read = [base / "config.json", base / "tokenizer.json", *([Path(settings.dialogues)] if settings.dialogues else [])]
    rest = [deciding, files, [asdict(each) for each in tensors], [hashlib.sha256(path.read_bytes()).hexdigest() for path in read]]
    rest.append([_sample(path) for path in sorted(base.glob("model*.safetensors"))])
    digest = hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()
    return f"mlx {version('mlx')}, mlx_lm {version('mlx-lm')}, stoa {version('stoa')}, {digest[:16]}"


def _sample(path: Path) -> str:
    """sha256 over pieces from all over a file: two trainings of one shape differ everywhere, and all of it takes minutes to read."""
    digest, size = hashlib.sha256(), path.stat().st_size
    with path.open("rb") as file:
        for number in range(_SAMPLES):
            file.seek(number * max(0, size - _SAMPLE_BYTES) // (_SAMPLES - 1))
            digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def _limit(settings: Settings, ranks: Ranks) -> int:
    """Bytes this process may use; with matrices split all ranks plan by the least, since they take the same rows."""
    if settings.memory_bytes:
        own = settings.memory_bytes
    elif mx.metal.is_available():
        own = int(mx.device_info()["max_recommended_working_set_size"])
    else:
        own = int(psutil.virtual_memory().available)
    if settings.split == "data":
        return own
    return int(min(numbers[0] for numbers in ranks.gather([own / (1 << 20)]))) << 20


def _check_memory(plan: memory.Plan, settings: Settings, ranks: Ranks, source: Demonstrations, tell: Tell) -> list[Host]:
    """State what it takes; every rank's longest row. Raises UsageError where the demonstrations do not fit."""
    steps = min(_LOOK_STEPS, settings.num_steps)
    seen = [len(source.at(step, row).ids) for step in range(steps) for row in range(settings.batch_rows)]
    most = settings.max_tokens or _MOST_TOKENS
    if min(seen) > most:
        raise UsageError(f"no demonstration has {most} tokens or less; the shortest seen has {min(seen)}", hint="raise --max-tokens")
    longest = min(max(seen), most)
    at_once = max(1, min(settings.batch_rows, plan.rows_at(padded(longest))))
    tell(
        "memory",
        {
            "limit_bytes": plan.limit_bytes,
            "weights_bytes": plan.weights_bytes,
            "trained_bytes": plan.trained_bytes,
            "planned_bytes": plan.total_bytes(at_once, padded(longest)),
            "num_trained": plan.num_trained,
            "longest_tokens": longest,
            "rows_at_once": at_once,
            "grad_checkpoint": plan.grad_checkpoint,
        },
    )
    memory.refuse_unless_fits(plan, longest, "the warm start")
    fits = plan.longest(most)
    return [Host(1.0, int(numbers[0])) for numbers in ranks.gather([float(fits)])]


def _load(base: Path, settings: Settings, ranks: Ranks) -> tuple[policy.Policy, dict[str, int]]:
    """The policy with what is to be trained, and the axis of each parameter that is a slice."""
    model = policy.load(base, settings)
    axes: dict[str, int] = {}
    if settings.split == "tensor" and ranks.group is not None:
        fresh = list(policy.fresh_adapters(model, settings))
        tensor.shard(model, ranks.group)
        model.freeze()  # layers that were made by the split are not frozen yet
        axes = tensor.add_adapters(model, fresh, settings, ranks.group)
    elif settings.mode == "lora":
        policy.add_adapters(model, settings)
    policy.settle(model)
    if settings.grad_checkpoint:
        policy.checkpoint_layers(model)
    return policy.Policy(model), axes


def _begin(ranks: Ranks, saved: Saved | None, settings: Settings) -> tuple[int, tuple[float, ...]]:
    """The first step and the shares to keep (none: measure), as rank 0 has them."""
    known = settings.shares or (saved.shares if saved else ())
    told = [float(saved.step if saved else 0), *(known if len(known) == ranks.size else [0.0] * ranks.size)]
    heard = ranks.gather(told)[0]
    shares = (1.0,) if ranks.size == 1 or settings.split == "tensor" else tuple(heard[1:])
    return int(heard[0]), tuple([1.0] * ranks.size) if settings.split == "tensor" else (shares if all(shares) else ())


def _restore(learner: Learner, ranks: Ranks, saved: Saved | None, first_step: int) -> None:
    """Bring rank 0's state to every rank, each its own slices."""
    if not first_step:
        return
    trained, adam = learner.policy.trained, learner.adam
    whole = (saved.trained, saved.first, saved.second) if saved else ({}, {}, {})
    for held, target in zip(whole, (trained, adam.first, adam.second), strict=True):
        for name, array in target.items():
            axis = learner.split_axes.get(name)
            shape = list(array.shape)
            if axis is not None:
                shape[axis] *= ranks.size
            full = ranks.from_first(held[name] if saved else mx.zeros(shape, array.dtype))
            target[name] = full if axis is None or ranks.group is None else take_slice(full, axis, ranks.group)
            mx.eval(target[name])
    learner.policy.take(trained)
    adam.num_steps = first_step


def _speeds(learner: Learner, ranks: Ranks, source: Demonstrations) -> tuple[float, ...]:
    """Tokens a second of every rank, measured on the same rows at the same time."""
    rows = [source.at(0, row) for row in range(min(_PROBE_ROWS, learner.settings.batch_rows))]
    batch = Batch.of([row for row in rows if len(row.ids) <= min(host.max_tokens for host in learner.hosts)] or rows[:1])
    learner.policy.gradient(batch)
    began = time.perf_counter()
    learner.policy.gradient(batch)
    return tuple(numbers[0] for numbers in ranks.gather([batch.ids.size / (time.perf_counter() - began)]))


def _teach(learner: Learner, ranks: Ranks, source: Demonstrations, tell: Tell, first_step: int, stop: Callable[[], bool]) -> Result:
    settings, loss, left_out = learner.settings, float("nan"), 0
    for step in range(first_step, settings.num_steps):
        began = time.perf_counter()
        rows: list[Demonstration] = [source.at(step, row) for row in range(settings.batch_rows)]
        done = learner.step(step, rows)
        loss, left_out = done.loss, left_out + done.rows_left_out
        facts: dict[str, object] = {
            **asdict(done),
            "seconds": time.perf_counter() - began,
            "peak_bytes": mx.get_peak_memory(),
            "rows_left_out_in_all": left_out,
        }
        tell("step", facts | {"bytes_summed": ranks.bytes_summed})
        stopped = any(numbers[0] for numbers in ranks.gather([float(stop())]))
        if stopped or (step + 1) % settings.save_every == 0 or step + 1 == settings.num_steps:
            _save(learner, ranks, step + 1)
            tell("saved", {"step": step + 1})
        if stopped and step + 1 < settings.num_steps:
            return Result(step + 1, True, loss)
    return Result(settings.num_steps, False, loss)


def _save(learner: Learner, ranks: Ranks, step: int) -> None:
    """Rank 0 writes; the others give their slices."""
    whole = [_whole(arrays, learner, ranks) for arrays in (learner.policy.trained, learner.adam.first, learner.adam.second)]
    if ranks.rank == 0:
        save(learner.settings.state_folder, learner.settings, Saved(step, tuple(host.share for host in learner.hosts), *whole))


def _whole(arrays: Arrays, learner: Learner, ranks: Ranks) -> Arrays:
    found: Arrays = {}
    for name, array in arrays.items():
        axis = learner.split_axes.get(name)
        found[name] = array if axis is None or ranks.group is None else join_slices(array, axis, ranks.group)
        mx.eval(found[name])
    return found


def _finish(learner: Learner, ranks: Ranks, base: Path, tell: Tell) -> None:
    """Write the checkpoint and, of adapters, mlx_lm's folder; reload the checkpoint and compare where both fit."""
    settings = learner.settings
    trained = _whole(learner.policy.trained, learner, ranks)
    probe = mx.arange(24, dtype=mx.int32)[None] + 1
    logits = learner.policy.model(probe)
    mx.eval(logits)
    if ranks.rank:
        return
    family = str(policy.read_config(base)["model_type"])
    if settings.mode == "lora":
        write_adapters(settings.state_folder / "adapters", settings, trained, len(learner.policy.model.layers))
    found: list[float] = []

    def check(part: Path) -> None:
        # Over quantised weights the taught policy is another one; reloading it whole might not fit beside them either.
        if not (settings.bits and settings.mode == "lora"):
            exact = all(tensor.item_bytes == 4 for tensor in memory.read_tensors(base))
            found.append(compare(part, logits, probe, exact=exact))

    # The last thing: where the folder is there, all is.
    num_bytes = write_checkpoint(base, settings.out_folder, Changes(family, settings, trained), check)
    tell("exported", {"folder": settings.out, "num_bytes": num_bytes, "max_logit_difference": found[0] if found else None})
