"""Three hundred bits flipped over every section of every kind of object: all refused while weights are as they were."""

import json
import random
import shutil

import pytest

from stoa.bucket import keys
from stoa.bucket.head import read_head
from stoa.bucket.run_document import read_run
from stoa.contracts.errors import BucketError, StoaError
from stoa.weights.history import layout_of_run, manifest_of
from stoa.weights.sync import Puller
from tests.unit.weights.small_run import SmallRun
from tests.unit.weights.test_sync import flip, overwrite

NUM_FLIPS = 300
pytestmark = [pytest.mark.faults, pytest.mark.timeout(300)]


def sections(data: bytes) -> list[tuple[int, int]]:
    """Byte ranges of an object: length, header and every array of a safetensors file; the whole of a document."""
    if data[:1] == b"{":
        return [(0, len(data))]
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    spans = [entry["data_offsets"] for name, entry in header.items() if name != "__metadata__"]
    return [(0, 8), (8, 8 + size), *((8 + size + start, 8 + size + stop) for start, stop in spans)]


def test_every_flipped_bit_is_refused_before_a_weight_changes(store, tmp_path):
    run = SmallRun(store, tmp_path)
    run.publish_many(1, anchor_every=50)
    name = run.layout.quantised[0].name
    puller = Puller(store, run.document, tmp_path / "mac")
    state = puller.join(run.head)
    before = state.state_id()
    run.publish_many(1, anchor_every=50)
    run.weights[name][0, 3] = 0.5  # a group off its grid, and codes that move far
    run.weights[name][1] += 0.004
    run.publish()
    manifest = manifest_of(store, run.document, run.head)
    rollup = next(ref for ref in manifest.rollups if ref.base == 0)
    store.delete([manifest.delta.key])  # so that nothing leads around the roll-up
    assert rollup.num_regrid
    anchor = [item.key for item in store.list(keys.root("small") + "anchors/")]
    config = run.document.model_files[0].key
    objects = [rollup.key, run.head.manifest_key, keys.head("small"), keys.run_json("small"), config, *anchor]
    places = [(key, span) for key in objects for span in sections(store.get(key, max_bytes=1 << 22).data) if span[1] > span[0]]
    chance = random.Random(7)
    chance.shuffle(places)
    for number in range(NUM_FLIPS):
        key, (start, stop) = places[number % len(places)]
        good = store.get(key, max_bytes=1 << 22).data
        overwrite(store, key, flip(good, chance.randrange(8 * start, 8 * stop)))
        for folder in ("deltas", "anchors"):
            shutil.rmtree(tmp_path / "mac" / folder, ignore_errors=True)
        with pytest.raises(StoaError) as refusal:
            document = read_run(store, "small")
            assert document.public_key == run.document.public_key
            layout_of_run(store, document)
            head, _ = read_head(store, "small", run.document.public_key)
            puller = Puller(store, document, tmp_path / "mac")  # one that was there keeps the manifests that it has read
            staged = puller.stage(head, 0, "other weights" if key in anchor else before)
            puller.apply(staged, state)
        assert isinstance(refusal.value, BucketError), (key, refusal.value)
        assert state.state_id() == before, key
        overwrite(store, key, good)
    puller.apply(puller.stage(run.head, 0, before), state)
    assert state.state_id() == run.publisher.mirror.state_id()
