"""A checkpoint in a real bucket: bit-exact, idempotent, and never loaded where it does not belong."""

import json
from dataclasses import replace

import pytest
import torch

from stoa.bucket import keys
from stoa.bucket.manifest import Signer, canonical
from stoa.bucket.store import Store
from stoa.contracts.errors import CheckpointError, ObjectExistsError
from trainer_gpu.checkpoint import (
    Facts,
    Identity,
    older_checkpoints,
    prune_checkpoints,
    read_document,
    read_tensors,
    save_checkpoint,
    save_parts,
)

IDENTITY = Identity("test", "layout", "architecture")
FACTS = Facts(epoch=1001, step=4, version=1, step_manifest_key="k", settled=("a", "b"), grants_position=16, grants_open=(("mac", 3),))


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    shapes = {"master.w": (64, 64), "exp_avg.w": (64, 64), "buffer.b": (8,), "optimizer.step": ()}
    found = {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}
    found["optimizer.step"] = torch.tensor(4, dtype=torch.int64)
    found["half"] = torch.randn(5, generator=draw).bfloat16()
    return found


@pytest.fixture
def signer() -> Signer:
    return Signer.generate()


def save(store: Store, signer: Signer, tensors: dict[str, torch.Tensor], facts: Facts = FACTS) -> str:
    parts = save_parts(store, IDENTITY.run, facts.epoch, facts.step, tensors, part_bytes=20_000)
    return save_checkpoint(store, signer, IDENTITY, facts, parts).key


def test_state_comes_back_bit_for_bit(store: Store, signer: Signer, tensors: dict[str, torch.Tensor]) -> None:
    key = save(store, signer, tensors)
    assert key == keys.checkpoint("test", 1001, 4, "manifest.json")
    document = read_document(store, key, IDENTITY, signer.public_key)
    assert document.facts == FACTS
    assert len(document.parts) == 2
    found = dict(read_tensors(store, document.parts))
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)


def test_saving_the_same_step_again_is_no_error_even_if_grants_moved_on(store: Store, signer: Signer, tensors: dict) -> None:
    first = save(store, signer, tensors)
    assert save(store, signer, tensors, replace(FACTS, grants_position=24)) == first
    tensors["buffer.b"] += 1
    with pytest.raises(ObjectExistsError):
        save(store, signer, tensors)


def test_manifest_that_lacks_what_it_need_not_say_is_read_with_nothing_in_its_place(store: Store, signer: Signer, tensors: dict) -> None:
    """One without generator states and grants, which a trainer can go on from; without its settled groups it cannot."""
    data = json.loads(store.get(save(store, signer, tensors), max_bytes=1 << 20).data)
    for name in ("rng", "grants_position", "grants_open"):
        del data["facts"][name]
    key = keys.checkpoint("test", 1001, 5, "manifest.json")
    store.create(key, canonical({**data, "sig": signer.sign(data)}))
    document = read_document(store, key, IDENTITY, signer.public_key)
    assert document.facts == replace(FACTS, rng="", grants_position=0, grants_open=())
    assert dict(read_tensors(store, document.parts)).keys() == tensors.keys()
    del data["facts"]["settled"]
    key = keys.checkpoint("test", 1001, 6, "manifest.json")
    store.create(key, canonical({**data, "sig": signer.sign(data)}))
    with pytest.raises(CheckpointError, match="settled"):
        read_document(store, key, IDENTITY, signer.public_key)


@pytest.mark.parametrize(("field", "value"), [("run", "other"), ("layout_id", "x"), ("architecture", "dense")])
def test_foreign_checkpoint_is_refused(store: Store, signer: Signer, tensors: dict, field: str, value: str) -> None:
    key = save(store, signer, tensors)
    with pytest.raises(CheckpointError, match=field):
        read_document(store, key, replace(IDENTITY, **{field: value}), signer.public_key)


def test_manifest_of_another_key_or_torn_is_refused(store: Store, signer: Signer, tensors: dict) -> None:
    key = save(store, signer, tensors)
    with pytest.raises(CheckpointError):
        read_document(store, key, IDENTITY, Signer.generate().public_key)
    data = store.get(key, max_bytes=1 << 20).data
    torn = keys.checkpoint("test", 1001, 5, "manifest.json")
    store.create(torn, data[: len(data) // 2])
    with pytest.raises(CheckpointError):
        read_document(store, torn, IDENTITY, signer.public_key)
    with pytest.raises(CheckpointError):
        read_document(store, keys.checkpoint("test", 1001, 6, "manifest.json"), IDENTITY, signer.public_key)


def test_changed_part_is_refused_before_it_is_decoded(store: Store, signer: Signer, tensors: dict) -> None:
    document = read_document(store, save(store, signer, tensors), IDENTITY, signer.public_key)
    part = document.parts[0]
    data = bytearray(store.get(part.key, max_bytes=1 << 20).data)
    data[-1] ^= 1
    store.delete([part.key])
    store.create(part.key, bytes(data))
    with pytest.raises(CheckpointError, match="sha256"):
        dict(read_tensors(store, document.parts))


def test_newest_and_named_checkpoints_stay(store: Store, signer: Signer, tensors: dict) -> None:
    saved = {
        (epoch, step): save(store, signer, tensors, replace(FACTS, epoch=epoch, step=step))
        for epoch, step in [(1001, 4), (1001, 8), (1001, 12), (2001, 8), (3001, 16)]
    }
    gone = prune_checkpoints(store, "test", epoch=2001, keep=2, named=saved[1001, 4])
    left = {place for place, key in saved.items() if store.exists(key)}
    # The two newest of our own leases, the one HEAD names, and a later trainer's.
    assert left == {(2001, 8), (1001, 12), (1001, 4), (3001, 16)}
    assert gone == 1
    assert not [found for found in store.list(keys.checkpoints_prefix("test")) if "e1001/s00000008" in found.key]


def test_checkpoint_that_was_never_finished_or_is_damaged_takes_no_place_of_one_that_is_kept(
    store: Store, signer: Signer, tensors: dict
) -> None:
    """Of a trainer that was killed while it saved step 12, and of one whose step 16 cannot be loaded."""
    saved = {step: save(store, signer, tensors, replace(FACTS, step=step)) for step in (4, 8, 16)}
    torn = save_parts(store, "test", 1001, 12, tensors, part_bytes=20_000)
    named = save(store, signer, tensors, replace(FACTS, epoch=2001, step=12))
    gone = prune_checkpoints(store, "test", epoch=2001, keep=2, named=named, unusable=[saved[16]])
    assert gone == 1
    assert [step for step, key in saved.items() if store.exists(key)] == [8, 16]
    assert store.exists(named)
    assert all(store.exists(part.key) for part in torn), "it may be on its way: retention removes it, having said so"
    later = save(store, signer, tensors, replace(FACTS, epoch=2001, step=16))
    assert prune_checkpoints(store, "test", epoch=2001, keep=2, named=later, unusable=[saved[16]]) == 3
    assert not [one.key for one in store.list(keys.checkpoints_prefix("test")) if "e1001" in one.key]


def test_older_checkpoints_are_the_finished_ones_before_it_the_newest_first(store: Store, signer: Signer, tensors: dict) -> None:
    places = [(1001, 4), (1001, 8), (1001, 12), (2001, 8), (2001, 10), (3001, 9)]
    saved = {place: save(store, signer, tensors, replace(FACTS, epoch=place[0], step=place[1])) for place in places}
    save_parts(store, "test", 1001, 6, tensors, part_bytes=20_000)
    # Step 12 of the first lease was never in the run: HEAD went on from its step 8.
    assert older_checkpoints(store, saved[2001, 10]) == [saved[2001, 8], saved[1001, 8], saved[1001, 4]]
    assert older_checkpoints(store, saved[1001, 4]) == []


def test_stranger_among_the_checkpoints_stays_and_stops_nothing(store: Store, signer: Signer, tensors: dict) -> None:
    stray = f"{keys.checkpoints_prefix('test')}stray"
    store.create(stray, b"x")
    saved = [save(store, signer, tensors, replace(FACTS, step=step)) for step in (4, 8, 12)]
    assert prune_checkpoints(store, "test", epoch=1001, keep=2, named=saved[2]) == 1
    assert store.exists(stray)
