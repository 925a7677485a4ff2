"""Publishing and pulling over a real bucket: the same weights by every way, and every fault refused with nothing changed."""

import dataclasses
import hashlib
import random
import shutil

import numpy as np
import pytest

from stoa.bucket import keys
from stoa.bucket.head import HeadWriter, read_head
from stoa.bucket.manifest import Signer
from stoa.bucket.run_document import claim_run, new_run
from stoa.bucket.store import Store
from stoa.config.run import Learning, RunConfig
from stoa.contracts.errors import (
    BucketError,
    DigestError,
    FencedError,
    FormatError,
    LayoutError,
    NonFiniteError,
    ObjectMissingError,
    ReplayedError,
    ServiceUnavailableError,
    SignatureError,
    StoaError,
    WeightsError,
    WrongBaseError,
    WrongStateError,
)
from stoa.weights import grid
from stoa.weights.history import manifest_of, walk
from stoa.weights.state import WeightState
from stoa.weights.sync import Puller
from tests.servers import CREDENTIALS
from tests.unit.weights.small_run import SmallRun, drift


def overwrite(store: Store, key: str, data: bytes) -> None:
    """Put other bytes under a key, as a damaged disk or a hostile writer would."""
    store.delete([key])
    store.create(key, data)


def flip(data: bytes, bit: int) -> bytes:
    damaged = bytearray(data)
    damaged[bit // 8] ^= 1 << bit % 8
    return bytes(damaged)


@pytest.fixture
def run(store, tmp_path) -> SmallRun:
    return SmallRun(store, tmp_path)


def published(run: SmallRun) -> WeightState:
    assert run.publisher.mirror is not None
    return run.publisher.mirror


def test_first_version_is_an_anchor_of_the_quantised_masters(run: SmallRun, tmp_path):
    prepared = run.publish()
    assert (prepared.version, prepared.delta_bytes) == (0, 0)
    state = Puller(run.store, run.document, tmp_path / "mac").join(run.head)
    for spec in run.layout.tensors:
        if spec.kind == "int8":
            for found, expected in zip(state.quantised(spec), grid.quantise(run.weights[spec.name]), strict=True):
                assert found.tobytes() == expected.tobytes()
        else:
            assert state.arrays[spec.name].tobytes() == run.weights[spec.name].tobytes()


def test_every_way_to_a_version_gives_the_published_mirror_bit_for_bit(run: SmallRun, tmp_path):
    puller = Puller(run.store, run.document, tmp_path / "follower")
    run.publish_many(1, anchor_every=4)
    state = puller.join(run.head)
    versions = {0: state.state_id()}
    heads = [run.head]
    for _ in range(8):
        run.publish_many(1, anchor_every=4)
        staged = puller.stage(run.head, heads[-1].version, versions[heads[-1].version])
        assert staged.way is None
        puller.apply(staged, state)
        versions[run.head.version] = state.state_id()
        heads.append(run.head)
        assert state.state_id() == published(run).state_id() == staged.state_id
    for version in (8, 7, 5, 3):
        other = Puller(run.store, run.document, tmp_path / f"cold{version}")
        assert other.build(run.head, version).state_id() == versions[version]
    jump = Puller(run.store, run.document, tmp_path / "jump")
    late = jump.build(run.head, 2)
    jump.apply(jump.stage(run.head, 2, versions[2]), late)
    assert late.state_id() == versions[8]


def test_join_uses_roll_ups_and_gives_the_same_weights_without_them(run: SmallRun, tmp_path):
    run.publish_many(9, anchor_every=20)
    manifest = manifest_of(run.store, run.document, run.head)
    assert [ref.base for ref in manifest.rollups] == [6, 4, 0]
    puller = Puller(run.store, run.document, tmp_path / "mac")
    assert puller.join(run.head).state_id() == published(run).state_id()
    taken = sorted(path.name[:17] for path in (tmp_path / "mac" / "deltas").iterdir())
    assert taken == ["00000000-00000008"]
    run.store.delete([ref.key for ref in manifest.rollups])
    other = Puller(run.store, run.document, tmp_path / "other")
    assert other.join(run.head).state_id() == published(run).state_id()


def test_rejoin_downloads_only_what_is_not_on_disk(run: SmallRun, tmp_path):
    run.publish_many(3, anchor_every=20)
    first = Puller(run.store, run.document, tmp_path / "mac")
    first.join(run.head)
    run.publish_many(1, anchor_every=20)
    again = Puller(run.store, run.document, tmp_path / "mac")
    assert again.join(run.head).state_id() == published(run).state_id()
    assert 0 < again.bytes_downloaded < first.bytes_downloaded / 4


def test_damaged_file_on_disk_is_fetched_again(run: SmallRun, tmp_path):
    run.publish_many(2, anchor_every=20)
    Puller(run.store, run.document, tmp_path / "mac").join(run.head)
    for path in (tmp_path / "mac").rglob("*.safetensors"):
        path.write_bytes(flip(path.read_bytes(), 8 * 200))
    for path in (tmp_path / "mac").rglob("index-*.json"):
        path.write_bytes(b"{")
    assert Puller(run.store, run.document, tmp_path / "mac").join(run.head).state_id() == published(run).state_id()


def test_join_after_a_kill_in_the_middle_of_a_download(run: SmallRun, tmp_path):
    run.publish_many(2, anchor_every=20)
    Puller(run.store, run.document, tmp_path / "mac").join(run.head)
    parts = sorted((tmp_path / "mac" / "anchors").rglob("*.safetensors"))
    parts[0].unlink()
    parts[1].with_name(parts[1].name + ".part").write_bytes(b"half")
    puller = Puller(run.store, run.document, tmp_path / "mac")
    assert puller.join(run.head).state_id() == published(run).state_id()


def test_with_hysteresis_0_every_anchor_equals_quantising_the_masters_on_the_first_grid(store, tmp_path):
    run = SmallRun(store, tmp_path, hysteresis=0.0)
    run.publish()
    grids = {spec.name: tuple(a.copy() for a in published(run).quantised(spec)) for spec in run.layout.quantised}
    for seed in range(3):
        run.weights = drift(run.weights, seed, 1e-4)
        run.publish(anchor=True)
        state = Puller(store, run.document, tmp_path / f"mac{seed}").join(run.head)
        for spec in run.layout.quantised:
            _, scales, biases = grids[spec.name]
            if (state.quantised(spec)[1] == scales).all() and (state.quantised(spec)[2] == biases).all():
                expected = grid.codes_of(grid.place(run.weights[spec.name], scales, biases))
                assert state.quantised(spec)[0].tobytes() == expected.tobytes()


def test_masters_that_leave_the_grid_are_regridded_and_travel(run: SmallRun, tmp_path):
    run.publish()
    puller = Puller(run.store, run.document, tmp_path / "mac")
    state = puller.join(run.head)
    before = (run.head.version, state.state_id())
    name = run.layout.quantised[0].name
    run.weights[name] = run.weights[name].copy()
    run.weights[name][0, 3] = 0.5
    run.publish()
    manifest = manifest_of(run.store, run.document, run.head)
    assert manifest.delta is not None
    assert manifest.delta.num_regrid == 1
    puller.apply(puller.stage(run.head, *before), state)
    assert abs(float(state.dequantise(name)[0, 3]) - 0.5) < 0.002


def test_bf16_layout_travels_too(store, tmp_path):
    run = SmallRun(store, tmp_path, dtype="bfloat16")
    run.publish()
    puller = Puller(store, run.document, tmp_path / "mac")
    state = puller.join(run.head)
    before = state.state_id()
    run.weights = drift(run.weights, 1, 1e-3)
    run.publish()
    puller.apply(puller.stage(run.head, 0, before), state)
    assert state.state_id() == published(run).state_id()
    norm = "model.embedding_norm.weight"
    assert state.arrays[norm].dtype == np.uint16
    assert state.dequantise(norm) == pytest.approx(run.weights[norm], rel=2**-8)


def test_published_mirror_is_loaded_from_the_bucket_and_goes_on(run: SmallRun, tmp_path):
    run.publish_many(3, anchor_every=20)
    restarted = run.new_publisher()
    restarted.load_published(run.head)
    assert restarted.mirror is not None
    assert restarted.mirror.state_id() == published(run).state_id()
    run.publisher = restarted
    run.publish_many(2, anchor_every=20)
    assert Puller(run.store, run.document, tmp_path / "mac").join(run.head).state_id() == published(run).state_id()


def test_rollback_leaves_the_mirror_at_what_is_published(run: SmallRun, tmp_path):
    run.publish_many(2, anchor_every=20)
    before = published(run).state_id()
    run.weights = drift(run.weights, 77)
    run.publisher.prepare(run.weights.items(), step=9, epoch=1000, version=2, anchor=False)
    with pytest.raises(WeightsError):
        run.publisher.prepare(run.weights.items(), step=9, epoch=1000, version=2, anchor=False)
    run.publisher.rollback()
    assert published(run).state_id() == before
    run.publish_many(1, anchor_every=20)
    assert Puller(run.store, run.document, tmp_path / "mac").join(run.head).state_id() == published(run).state_id()


def test_masters_that_cannot_be_published_change_nothing(run: SmallRun):
    run.publish_many(2, anchor_every=20)
    before = published(run).state_id()
    name = run.layout.quantised[1].name
    norm, bias = "model.embedding_norm.weight", next(s.name for s in run.layout.tensors if s.frozen)
    broken = {
        NonFiniteError: [{name: np.full_like(run.weights[name], np.nan)}, {norm: np.full_like(run.weights[norm], np.inf)}],
        LayoutError: [{name: run.weights[name].T.copy()}, {bias: run.weights[bias] + 1}, {"extra": run.weights[name]}],
    }
    for error, cases in broken.items():
        for case in cases:
            with pytest.raises(error):
                run.publisher.prepare({**run.weights, **case}.items(), step=9, epoch=1000, version=2, anchor=False)
            assert published(run).state_id() == before
    short = {key: value for key, value in run.weights.items() if key != name}
    with pytest.raises(LayoutError, match="missing"):
        run.publisher.prepare(short.items(), step=9, epoch=1000, version=2, anchor=False)
    with pytest.raises(WrongBaseError):
        run.publisher.prepare(run.weights.items(), step=9, epoch=1000, version=4, anchor=False)
    run.publish_many(1, anchor_every=20)


def test_quantiser_that_disagrees_with_its_own_delta_is_found_before_anything_is_written(run: SmallRun):
    run.publish_many(1, anchor_every=20)
    before, objects = published(run).state_id(), [item.key for item in run.store.list("")]

    def lying(weights, codes, scales, biases, hysteresis):
        found = grid.scan(weights, codes, scales, biases, hysteresis)
        half = len(found.positions) // 2
        return dataclasses.replace(
            found,
            positions=np.concatenate([found.positions[:half], found.positions[:half]]),
            codes=np.concatenate([found.codes[:half]] * 2),
        )

    with pytest.raises(StoaError):
        run.publisher.prepare(drift(run.weights, 1, 1e-3).items(), step=4, epoch=1000, version=1, anchor=False, quantise=lying)
    assert published(run).state_id() == before
    assert [item.key for item in run.store.list("")] == objects


def test_flipped_bits_anywhere_are_refused_and_weights_stay_as_they_are(run: SmallRun, tmp_path):
    run.publish()
    puller = Puller(run.store, run.document, tmp_path / "mac")
    state = puller.join(run.head)
    before = state.state_id()
    run.weights = drift(run.weights, 1)
    run.publish()
    manifest = manifest_of(run.store, run.document, run.head)
    assert manifest.delta is not None
    chance = random.Random(5)
    for key in (manifest.delta.key, run.head.manifest_key, keys.head("small")):
        good = run.store.get(key, max_bytes=1 << 20).data
        damaged = [flip(good, chance.randrange(8 * len(good))) for _ in range(12)] + [good[: len(good) // 2], b"", b"{}"]
        for data in damaged:
            overwrite(run.store, key, data)
            shutil.rmtree(tmp_path / "mac" / "deltas", ignore_errors=True)
            with pytest.raises(BucketError):
                head, _ = read_head(run.store, "small", run.document.public_key)
                puller = Puller(run.store, run.document, tmp_path / "mac")  # one that was there keeps the manifests that it has read
                puller.apply(puller.stage(head, 0, before), state)
            assert state.state_id() == before
        overwrite(run.store, key, good)
    puller.apply(puller.stage(run.head, 0, before), state)
    assert state.state_id() == published(run).state_id()


def test_update_applied_twice_or_to_other_weights_is_refused_and_changes_nothing(run: SmallRun, tmp_path):
    run.publish()
    puller = Puller(run.store, run.document, tmp_path / "mac")
    state = puller.join(run.head)
    before = state.state_id()
    run.weights = drift(run.weights, 1)
    run.publish()
    staged = puller.stage(run.head, 0, before)
    puller.apply(staged, state)
    after = state.state_id()
    with pytest.raises(WrongBaseError):
        puller.apply(staged, state)
    assert state.state_id() == after
    other = WeightState.empty(run.layout)
    with pytest.raises(WrongBaseError):
        puller.apply(staged, other)
    assert other.state_id() == WeightState.empty(run.layout).state_id()


def test_bit_that_flips_in_memory_is_found_by_the_rescan(run: SmallRun, tmp_path):
    run.publish()
    puller = Puller(run.store, run.document, tmp_path / "mac")
    state = puller.join(run.head)
    before = state.state_id()
    run.weights = drift(run.weights, 1)
    run.publish()
    staged = puller.stage(run.head, 0, before)
    state.arrays[run.layout.quantised[0].name].reshape(-1)[17] ^= 4
    puller.apply(staged, state)
    with pytest.raises(WrongStateError):
        puller.verify(staged, state)
    assert puller.join(run.head).state_id() == published(run).state_id()


def test_manifest_that_is_unsigned_or_signed_by_another_key_is_refused(run: SmallRun, tmp_path):
    run.publish()
    good = run.store.get(run.head.manifest_key, max_bytes=1 << 20).data
    import json

    from stoa.bucket.manifest import canonical

    tree = json.loads(good)
    unsigned = canonical({name: value for name, value in tree.items() if name != "sig"})
    foreign = canonical({**tree, "sig": Signer.generate().sign(tree)})
    for data in (unsigned, foreign):
        sha256 = hashlib.sha256(data).hexdigest()
        key = keys.manifest("small", 0, 1000, sha256)
        run.store.create(key, data)
        head = dataclasses.replace(run.head, manifest_key=key, manifest_sha256=sha256)
        with pytest.raises(SignatureError):
            Puller(run.store, run.document, tmp_path / "mac").join(head)


def test_manifest_and_delta_of_another_run_are_refused(run: SmallRun, tmp_path):
    run.publish()
    other = SmallRun(run.store, tmp_path / "other", name="other")
    other.publish()
    crossed = dataclasses.replace(run.head, manifest_key=other.head.manifest_key, manifest_sha256=other.head.manifest_sha256)
    with pytest.raises(FormatError, match="run other"):
        Puller(run.store, run.document, tmp_path / "mac").join(crossed)


def test_old_head_put_back_is_refused_also_after_a_restart(run: SmallRun, tmp_path):
    run.publish_many(2, anchor_every=20)
    old = run.head
    run.publish_many(1, anchor_every=20)
    Puller(run.store, run.document, tmp_path / "mac").join(run.head)
    restarted = Puller(run.store, run.document, tmp_path / "mac")
    with pytest.raises(ReplayedError):
        restarted.join(old)
    with pytest.raises(ReplayedError):
        restarted.stage(old, 2, published(run).state_id())
    assert restarted.join(run.head).state_id() == published(run).state_id()


def test_old_head_put_back_in_the_bucket_is_seen_by_the_next_poll(run: SmallRun, tmp_path):
    run.publish_many(1, anchor_every=20)
    puller = Puller(run.store, run.document, tmp_path / "mac")
    first = puller.poll_head("")
    assert first is not None
    old = run.store.get(keys.head("small"), max_bytes=1 << 20).data
    assert puller.poll_head(first[1]) is None
    run.publish_many(1, anchor_every=20)
    second = puller.poll_head(first[1])
    assert second is not None
    assert second[0].version == 1
    overwrite(run.store, keys.head("small"), old)
    with pytest.raises(ReplayedError):
        puller.poll_head(second[1])
    # a caller that still works on the HEAD before the newest one is no replay
    assert puller.join(first[0]).state_id() == puller.build(second[0], 0).state_id()


def test_missing_delta_without_another_way_is_a_typed_error(run: SmallRun, tmp_path):
    run.publish_many(2, anchor_every=20)
    manifest = manifest_of(run.store, run.document, run.head)
    assert manifest.delta is not None
    run.store.delete([manifest.delta.key])
    with pytest.raises(ObjectMissingError):
        Puller(run.store, run.document, tmp_path / "mac").join(run.head)


def test_update_goes_by_way_of_an_anchor_where_a_delta_is_gone(run: SmallRun, tmp_path):
    run.publish_many(6, anchor_every=4)
    puller = Puller(run.store, run.document, tmp_path / "mac")
    state = puller.build(run.head, 2)
    newest = manifest_of(run.store, run.document, run.head)
    later = walk(run.store, run.document, newest, 3)
    between = [ref.key for manifest in later for ref in (manifest.delta, *manifest.rollups) if ref is not None and ref.base < 4]
    run.store.delete(between)
    staged = puller.stage(run.head, 2, state.state_id())
    puller.apply(staged, state)
    assert state.state_id() == newest.state_id


@pytest.mark.parametrize("name", ["index", "0000"])
def test_join_and_new_trainer_go_back_to_an_older_anchor_where_the_newest_is_damaged(run: SmallRun, tmp_path, name: str):
    run.publish_many(7, anchor_every=3)
    newest = next(found.key for found in run.store.list(f"{keys.root('small')}anchors/00000006/") if f"/{name}-" in found.key)
    overwrite(run.store, newest, flip(run.store.get(newest, max_bytes=1 << 20).data, 99))
    wanted = manifest_of(run.store, run.document, run.head).state_id
    assert Puller(run.store, run.document, tmp_path / "mac").join(run.head).state_id() == wanted
    publisher = run.new_publisher()
    publisher.load_published(run.head)
    assert publisher.mirror is not None
    assert publisher.mirror.state_id() == wanted


def test_damaged_anchor_part_is_refused(run: SmallRun, tmp_path):
    run.publish()
    key = next(item.key for item in run.store.list(keys.root("small") + "anchors/") if item.key.endswith("safetensors"))
    overwrite(run.store, key, flip(run.store.get(key, max_bytes=1 << 20).data, 999))
    with pytest.raises(DigestError):
        Puller(run.store, run.document, tmp_path / "mac").join(run.head)


def test_version_that_does_not_exist_is_missing(run: SmallRun, tmp_path):
    puller = Puller(run.store, run.document, tmp_path / "mac")
    with pytest.raises(ObjectMissingError, match="no version"):
        puller.join(run.head)
    run.publish_many(2, anchor_every=20)
    with pytest.raises(ObjectMissingError):
        puller.build(run.head, 5)


def test_run_whose_layout_this_program_does_not_make_is_refused(run: SmallRun, tmp_path):
    config = RunConfig(run="strange", learning=Learning(dtype="bfloat16"))
    document = new_run(config, run.signer, layout_id=run.layout.layout_id, model_files=run.document.model_files)
    with pytest.raises(LayoutError):
        Puller(run.store, claim_run(run.store, document, run.signer), tmp_path / "mac")


def test_two_publishers_of_one_version_cannot_fork_the_chain(run: SmallRun, tmp_path):
    run.publish_many(2, anchor_every=20)
    zombie, zombie_weights = run.publisher, drift(run.weights, 50)
    zombie.prepare(zombie_weights.items(), step=8, epoch=1000, version=2, anchor=False)
    # another trainer takes the run and publishes the same version number
    writer = HeadWriter(run.store, "small", run.signer, owner="second", interval_seconds=0.0)
    run.head = writer.acquire(2000)
    second = run.new_publisher()
    second.load_published(run.head)
    prepared = second.prepare(drift(run.weights, 51).items(), step=8, epoch=2000, version=2, anchor=False)
    run.head = writer.swap(2000, version=2, manifest_key=prepared.manifest_key, manifest_sha256=prepared.manifest_sha256)
    second.commit(prepared)
    with pytest.raises(FencedError):
        run.writer.swap(1000, version=2, manifest_key="zombie", manifest_sha256="")
    zombie.rollback()
    state = Puller(run.store, run.document, tmp_path / "mac").join(run.head)
    assert second.mirror is not None
    assert state.state_id() == second.mirror.state_id()
    chain = walk(run.store, run.document, manifest_of(run.store, run.document, run.head), 0)
    assert [manifest.version for manifest in chain] == [2, 1, 0]


@pytest.mark.parametrize("writes_before_death", range(6))
def test_publisher_that_dies_at_any_write_leaves_a_run_that_goes_on(run: SmallRun, tmp_path, writes_before_death: int):
    run.publish_many(2, anchor_every=20)
    puller = Puller(run.store, run.document, tmp_path / "mac")
    state = puller.join(run.head)
    before = published(run).state_id()
    left = [writes_before_death]

    class Dying(Store):
        def create(self, key: str, data: bytes | bytearray | memoryview, *, kind: str = "") -> str:
            if left[0] == 0:
                raise ServiceUnavailableError("the process ends here")
            left[0] -= 1
            return super().create(key, data, kind=kind)

    run.publisher._store = run.publisher.background.store = Dying(run.store.settings, CREDENTIALS)
    with pytest.raises(ServiceUnavailableError):
        run.publisher.prepare(drift(run.weights, 9).items(), step=8, epoch=1000, version=2, anchor=True, inline=True)
    # the same process may try again, and so may another one that takes the run
    assert published(run).state_id() == before
    run.head = HeadWriter(run.store, "small", run.signer, owner="second", interval_seconds=0.0).acquire(2000)
    assert run.head.version == 1
    assert puller.join(run.head).state_id() == before
    run.writer = HeadWriter(run.store, "small", run.signer, owner="second", interval_seconds=0.0)
    run.publisher = run.new_publisher()
    run.publisher.load_published(run.head)
    run.epoch = 2000
    run.publish_many(1, anchor_every=20)
    puller.apply(puller.stage(run.head, 1, before), state)
    assert run.head.version == 2
    assert state.state_id() == published(run).state_id()


def test_weights_torn_in_the_middle_of_an_update_are_rebuilt_from_disk_alone(run: SmallRun, tmp_path):
    run.publish_many(2, anchor_every=20)
    puller = Puller(run.store, run.document, tmp_path / "mac")
    puller.join(run.head)
    run.publish_many(1, anchor_every=20)
    puller.stage(run.head, 1, manifest_of(run.store, run.document, run.head).delta.base_state_id)
    # the process is killed while it writes: memory is gone, the files stay
    again = Puller(run.store, run.document, tmp_path / "mac")
    assert again.join(run.head).state_id() == published(run).state_id()
    assert again.bytes_downloaded == 0
