"""A trainer of two ranks against one of one: same steps, same checkpoints, same weights on the wire; and a rank that is lost."""

import base64
import json
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from stoa.bucket import keys
from stoa.bucket.manifest import Signer
from stoa.bucket.run_document import claim_run, new_run, upload_model_files
from stoa.bucket.steps import read_step
from stoa.bucket.store import Store
from stoa.config.run import RunConfig
from stoa.contracts.messages import AcquireRequest, CheckpointRequest, StepRequest
from stoa.rollouts.shard import decode_group
from stoa.weights.layout import layout_of
from tests.servers import BucketServer, free_ports
from tests.unit.trainer_gpu.pieces import joined
from tests.unit.trainer_gpu.player import POLICY, search
from tests.unit.trainer_gpu.runs import Reports, config_of, head_of, ship_sweep, state_of
from trainer_gpu.checkpoint import Document, Identity, read_document, read_tensors
from trainer_gpu.engine import TrainerEngine
from trainer_gpu.export import fill
from trainer_gpu.model import build_model
from trainer_gpu.policy import Policy
from trainer_gpu.run_handle import RunHandle
from trainer_gpu.weights import local_weights

ROOT = Path(__file__).parents[3]
SEED = bytes(range(32))
MAX_GRADIENT_DIFFERENCE = 1e-6


def start(store: Store, config: RunConfig) -> RunHandle:
    signer = Signer.from_seed(SEED)
    layout_id = layout_of(json.loads((POLICY / "config.json").read_text()), config.learning.dtype).layout_id
    files = upload_model_files(store, config.run, POLICY)
    document = claim_run(store, new_run(config, signer, layout_id=layout_id, model_files=files), signer)
    return RunHandle(store, document, signer, search(), POLICY, "one", word_seconds=0.0)


def launch(arguments: list[str], environment: dict[str, str]) -> subprocess.Popen[str]:
    command = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-addr", "127.0.0.1", "--master-port", str(free_ports(1)[0])]
    command += ["-m", "tests.unit.trainer_gpu.two_ranks", *arguments]
    return subprocess.Popen(
        [sys.executable, *command], cwd=ROOT, env={**os.environ, **environment}, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def document_of(handle: RunHandle, policy: Policy, key: str) -> Document:
    identity = Identity("test", handle.document.layout_id, policy.architecture)
    return read_document(handle.store, key, identity, handle.signer.public_key)


def tensors_of(handle: RunHandle, policy: Policy, key: str) -> dict[str, torch.Tensor]:
    """Whole tensors of a checkpoint, however many ranks wrote it."""
    return joined(dict(read_tensors(handle.store, document_of(handle, policy, key).parts)), dict(policy.state()))


def flat(tensors: dict[str, torch.Tensor], kind: str) -> torch.Tensor:
    return torch.cat([tensors[name].flatten() for name in sorted(tensors) if name.startswith(f"{kind}.")])


@pytest.fixture
def engines() -> Iterator[list[TrainerEngine]]:
    """Those that a test makes; closed also when it fails, or their threads outlive it."""
    made: list[TrainerEngine] = []
    yield made
    for engine in made:
        engine.close()


@pytest.mark.loop
@pytest.mark.timeout(290)
@pytest.mark.parametrize("expert", [1, 2], ids=["data parallel", "expert parallel"])
def test_two_ranks_train_save_restore_and_publish_as_one(
    expert: int, bucket_server: BucketServer, tmp_path: Path, engines: list[TrainerEngine]
) -> None:
    one, two = (bucket_server.store(f"ranks-{who}-{expert}-{secrets.token_hex(4)}") for who in ("one", "two"))
    handles: list[RunHandle] = []
    for store, share in ((one, 1), (two, expert)):
        store.ensure_bucket()
        base = config_of(store, groups_per_step=4, micro_batch_tokens=600, expert_parallel=share, learning_rate=1e-3)
        handles.append(start(store, base))
    alone, ranked = handles
    progress = Reports()
    player, engine = TrainerEngine(alone), TrainerEngine(alone)
    engines += [player, engine]
    player.acquire(AcquireRequest("test", 1), 1, progress)
    assert player._policy is not None
    shipped = ship_sweep(alone, player._policy, list(alone.environment.question_ids("train"))[:24], host="mac", sweep=0, seed=1)
    start_state = state_of(alone, head_of(alone))
    player.close()
    for key in (*shipped, keys.grant("test", "mac", 0)):
        two.create(key, one.get(key, max_bytes=1 << 26).data)

    settings = tmp_path / "settings.json"
    settings.write_text(ranked.store.settings.model_dump_json())
    running = launch([str(settings), str(tmp_path)], {"STOA_SIGNING_KEY": base64.b64encode(SEED).decode()})
    token = engine.acquire(AcquireRequest("test", 2), 1, progress).token
    policy = engine._policy
    assert policy is not None
    before = {name: t.clone() for name, t in policy.state().items()}
    steps = [engine.train_step(StepRequest("test", token, 1), progress)]
    trained = [decode_group(one.get(key, max_bytes=1 << 26).data) for key in read_step(one, "test", steps[0].manifest_key).consumed]
    compared = [mismatch.mean for mismatch in policy.compare(trained)]
    saved = engine.checkpoint(CheckpointRequest("test", token, 1), progress)
    steps.append(engine.train_step(StepRequest("test", token, 2), progress))
    output, _ = running.communicate(timeout=240)
    assert running.returncode == 0, output[-4000:]
    said = json.loads((tmp_path / "said.json").read_text())
    assert (said["num_ranks"], said["expert_parallel"]) == (2, expert)
    assert min(compared) > 0
    assert said["compared"] == pytest.approx(compared, rel=1e-2), "a group is compared alike, whoever has its rows"
    assert said["start_state"] == start_state, "version 0 from two ranks is that from one"

    # Adam's first moment after one step is a fixed share of that step's gradient.
    ours, theirs = tensors_of(alone, policy, saved.key), tensors_of(ranked, policy, said["first_checkpoint"])
    assert ours.keys() == theirs.keys()
    gradient, other = flat(ours, "exp_avg"), flat(theirs, "exp_avg")
    assert float(gradient.norm()) > 0
    assert float((gradient - other).abs().max() / gradient.norm()) < MAX_GRADIENT_DIFFERENCE
    for mine, key in zip(steps, said["manifests"], strict=True):
        a, b = (read_step(h.store, "test", k) for h, k in ((alone, mine.manifest_key), (ranked, key)))
        assert a.consumed == b.consumed
        assert b.metrics["grad_norm"] == pytest.approx(a.metrics["grad_norm"], rel=1e-5)
        assert b.metrics["sampled_tokens"] == a.metrics["sampled_tokens"]
        assert b.metrics["mismatch_mean"] == pytest.approx(a.metrics["mismatch_mean"], rel=1e-4, abs=1e-7)
        assert b.hosts["mac"].mismatch_mean == pytest.approx(a.hosts["mac"].mismatch_mean, rel=1e-4, abs=1e-7)
    assert any("row" in seen for seen in said["progress"])

    # What the two saved: each tensor once, experts by the rank that has them; restored there and here bit for bit.
    assert said["restored_bit_for_bit"]
    assert said["resumed_at"] == 2
    head = head_of(ranked)
    document = document_of(ranked, policy, head.checkpoint_key)
    names = [name for part in document.parts for name in part.tensors]
    assert len(names) == len(set(names))
    assert len(json.loads(document.facts.rng)) == 2, "each rank's generators"
    held = [sum(p.num_bytes for p in document.parts if p.name.startswith("rank-0001") == bool(rank)) for rank in (0, 1)]
    assert max(held) < 0.6 * sum(held), "each rank writes its half of the optimizer's state"
    after = policy.state()
    theirs = tensors_of(ranked, policy, head.checkpoint_key)
    moved = flat(dict(after), "master") - flat(before, "master")
    assert float((flat(dict(after), "master") - flat(theirs, "master")).norm() / moved.norm()) < 1e-3
    policy.restore_parts(ranked.store, document.parts, document.facts.rng)
    exported = build_model(policy.config, torch.float32)
    fill(exported, ranked.store, document.parts)
    masters = policy.trainable.masters()
    assert all(torch.equal(weight, masters[name]) for name, weight in local_weights(exported).items() if name in masters)
    wire = load_file(tmp_path / "wire.safetensors")
    ours_on_wire = dict(policy.wire_tensors())
    assert wire.keys() == ours_on_wire.keys()
    assert all(torch.equal(wire[name], t) for name, t in ours_on_wire.items())


@pytest.mark.loop
@pytest.mark.timeout(240)
@pytest.mark.parametrize(("victim", "number"), [(1, signal.SIGKILL), (0, signal.SIGKILL), (1, signal.SIGSTOP), (0, signal.SIGSTOP)])
def test_lost_rank_ends_the_others(victim: int, number: int) -> None:
    """Dead or frozen, while nothing is done: the other rank ends by itself, with the code planted for that."""
    (port,) = free_ports(1)
    ranks: list[subprocess.Popen[bytes]] = []
    for rank in (0, 1):
        told = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none"}
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "PLANTED": f"{victim}:{int(number)}"}
        command = [sys.executable, "-m", "tests.unit.trainer_gpu.two_ranks", ".", "."]
        ranks.append(subprocess.Popen(command, cwd=ROOT, env={**os.environ, **told, **address}, stderr=subprocess.DEVNULL))
    try:
        assert ranks[1 - victim].wait(200) == 7
    finally:
        for process in ranks:
            process.kill()
            process.wait()
