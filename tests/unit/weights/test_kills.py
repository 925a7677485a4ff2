"""Publishers and pullers killed with SIGKILL at every step, in processes of their own, and publishers that race."""

import subprocess
import sys
from pathlib import Path

import pytest

from stoa.bucket.head import HeadWriter, read_head
from stoa.weights.history import manifest_of, walk
from stoa.weights.sync import Puller
from tests.unit.weights.small_run import SmallRun

pytestmark = [pytest.mark.faults, pytest.mark.timeout(300)]
ROOT = Path(__file__).parents[3]


def command(run: SmallRun, what: str, folder: Path, *rest: str) -> list[str]:
    settings = run.store.settings
    return [sys.executable, "-m", "tests.unit.weights.dying", what, settings.endpoint, settings.name, str(folder), *rest]


def play(run: SmallRun, what: str, folder: Path, *rest: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(run, what, folder, *rest), cwd=ROOT, capture_output=True, text=True, timeout=120)


def take_over(run: SmallRun) -> None:
    """Another trainer takes the run and publishes the next version."""
    run.writer = HeadWriter(run.store, "small", run.signer, owner="survivor", interval_seconds=0.0)
    before, _ = run.writer.read()
    run.head = run.writer.acquire((before.epoch // 1000 + 1) * 1000)
    run.epoch = run.head.epoch
    run.publisher = run.new_publisher()
    run.publisher.load_published(run.head)
    run.publish_many(1, anchor_every=50)


@pytest.mark.parametrize("how", ["inline", "beside"])
def test_publisher_killed_at_every_write_leaves_a_run_that_goes_on(store, tmp_path, how: str):
    run = SmallRun(store, tmp_path)
    run.publish_many(2, anchor_every=50)
    for step in range(1, 20):
        before, _ = read_head(store, "small", run.signer.public_key)
        died = play(run, "publish", tmp_path, str(step), "before" if step % 3 else "after", how)
        if died.returncode == 0:
            break
        assert died.returncode == -9, died.stderr[-2000:]
        take_over(run)
        assert run.head.version - before.version in (1, 2)  # HEAD may have named the dead one's version, never half of it
        state = Puller(store, run.document, tmp_path / f"mac{step}").join(run.head)
        assert run.publisher.mirror is not None
        assert state.state_id() == run.publisher.mirror.state_id()
    assert step > 7  # the lease, a delta, parts of the anchor and its index, the manifest, HEAD
    chain = walk(store, run.document, manifest_of(store, run.document, run.head), 0)
    assert [manifest.version for manifest in chain] == list(range(run.head.version, -1, -1))
    for manifest in chain[::4]:
        assert Puller(store, run.document, tmp_path / "all").build(run.head, manifest.version).state_id() == manifest.state_id


def test_puller_killed_at_every_change_of_its_files_and_while_it_writes_weights(store, tmp_path):
    run = SmallRun(store, tmp_path)
    run.publish_many(3, anchor_every=50)
    num_changes = int(play(run, "pull", tmp_path / "whole", "10000").stdout.split()[-1])
    assert num_changes > 15
    folder = tmp_path / "mac"
    assert run.publisher.mirror is not None
    for step in [*range(1, num_changes, max(1, num_changes // 10)), -1]:
        died = play(run, "pull", folder, str(step))
        assert died.returncode in (-9, 0), died.stderr[-2000:]  # 0: an earlier death had done that much already
        if step % 2:
            assert Puller(store, run.document, folder).join(run.head).state_id() == run.publisher.mirror.state_id()
            for path in folder.rglob("*.safetensors"):
                path.unlink()
    assert died.returncode == -9


def test_two_publishers_that_race_win_each_version_once_and_the_chain_is_whole(store, tmp_path):
    run = SmallRun(store, tmp_path)
    run.publish_many(1, anchor_every=50)
    racers = [
        subprocess.Popen(command(run, "race", tmp_path, str(lease)), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for lease in (1, 2)
    ]
    outputs = [racer.communicate(timeout=200) for racer in racers]
    assert [racer.returncode for racer in racers] == [0, 0], outputs
    won = [dict(pair.split(":") for pair in stdout.splitlines()[-1].split()) for stdout, _ in outputs]
    assert all(won), "one of the two never published: the race did not take place"
    assert not won[0].keys() & won[1].keys()
    head, _ = read_head(store, "small", run.signer.public_key)
    chain = walk(store, run.document, manifest_of(store, run.document, head), 0)
    assert [manifest.version for manifest in chain] == list(range(head.version, -1, -1))
    named = {str(head.version): head.manifest_sha256}
    named |= {str(manifest.parent.version): manifest.parent.manifest_sha256 for manifest in chain if manifest.parent is not None}
    del named["0"]
    assert named == won[0] | won[1]
    Puller(store, run.document, tmp_path / "mac").join(head)
