import asyncio
import gc
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from activities.connection import connect, make_worker
from stoa.bucket import keys
from stoa.bucket.store import Store
from stoa.config.load import PROJECT_ROOT
from stoa.contracts import names
from stoa.contracts.errors import ConfigError, MissingExtraError, WorkerLockedError
from stoa.rollouts.shard import MAX_GROUP_BYTES, decode_group
from tests.unit.worker_mac.publishing import Publishing
from tests.unit.worker_mac.sessions import Control, events_of, session_of, until, worker_process, write_config
from worker_mac.identity import Identity, lock_holder, note_sweep, pin_key, pinned_key
from worker_mac.worker import _Worker, read_options, require_extra
from workflows.mac_session import MacSessionWorkflow


def test_missing_mlx_names_the_extra_to_install() -> None:
    with pytest.raises(MissingExtraError) as error:
        require_extra(lambda name: None)
    assert "pip install 'stoa[mac]'" in error.value.hint


def test_worker_without_its_extra_exits_2_and_says_what_to_do(tmp_path: Path) -> None:
    # An empty module search path for mlx: the finder below hides it from the worker.
    script = (
        "import sys\n"
        "class Hide:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'mlx' or name.startswith('mlx.'):\n"
        "            raise ModuleNotFoundError(name)\n"
        "import importlib.util\n"
        "real = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, package=None: None if name == 'mlx' else real(name, package)\n"
        "sys.meta_path.insert(0, Hide())\n"
        "from worker_mac.worker import main\n"
        "sys.exit(main(['--state', sys.argv[1]]))\n"
    )
    found = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, timeout=50, cwd=PROJECT_ROOT)
    assert found.returncode == 2
    assert "stoa[mac]" in found.stderr


def test_a_state_folder_belongs_to_one_worker(tmp_path: Path) -> None:
    assert lock_holder(tmp_path) is None
    first = Identity(tmp_path)
    with pytest.raises(WorkerLockedError, match=f"{tmp_path}: process {os.getpid()} is a worker"):
        Identity(tmp_path)
    assert lock_holder(tmp_path) == os.getpid()
    first.close()
    assert lock_holder(tmp_path) is None
    Identity(tmp_path).close()


def test_host_id_is_drawn_once_and_the_nonce_at_each_start(tmp_path: Path) -> None:
    seen = []
    for _ in range(2):
        identity = Identity(tmp_path)
        seen.append((identity.host, identity.nonce))
        identity.close()
    assert seen[0][0] == seen[1][0]
    assert seen[0][1] != seen[1][1]
    named = Identity(tmp_path, "attic-mini")
    assert named.host == "attic-mini"
    named.close()
    assert Identity(tmp_path).host == "attic-mini"


def test_a_host_name_that_cannot_stand_in_a_key_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="My Mac"):
        Identity(tmp_path, "My Mac")


def test_the_key_of_a_run_is_trusted_on_first_use_and_kept(tmp_path: Path) -> None:
    assert pinned_key(tmp_path) is None
    pin_key(tmp_path, "abc=")
    assert pinned_key(tmp_path) == "abc="


@pytest.mark.parametrize("left", [b"", b"\0\0\0\0", b"\n"])
def test_a_key_that_a_loss_of_power_left_empty_is_trusted_anew_and_a_damaged_one_is_not(tmp_path: Path, left: bytes) -> None:
    (tmp_path / "public_key").write_bytes(left)
    assert pinned_key(tmp_path) is None
    (tmp_path / "public_key").write_bytes(b"ab\xff=\n")
    assert pinned_key(tmp_path) not in (None, "abc=")


def test_a_full_disk_costs_no_key_that_is_trusted_already(tmp_path: Path) -> None:
    pin_key(tmp_path, "abc=")
    (tmp_path / "public_key.part").mkdir()  # nothing can be written
    pin_key(tmp_path, "abc=")
    with pytest.raises(OSError, match="public_key"):
        pin_key(tmp_path, "def=")
    assert pinned_key(tmp_path) == "abc="


def test_the_host_id_is_there_as_a_whole_or_not_at_all(tmp_path: Path) -> None:
    first = Identity(tmp_path, "attic-mini")
    first.close()
    (tmp_path / "host.part").mkdir()
    with pytest.raises(OSError, match="host"):
        Identity(tmp_path, "cellar-mini")
    assert (tmp_path / "host").read_text() == "attic-mini\n"
    (tmp_path / "host").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="host name"):
        Identity(tmp_path)


@pytest.mark.parametrize("left", [b"", b"\0\0", b"12x", b"\xff"])
def test_a_damaged_note_of_the_last_sweep_is_no_note(tmp_path: Path, left: bytes) -> None:
    assert (note_sweep(tmp_path, 3), note_sweep(tmp_path, 5), note_sweep(tmp_path, 4), note_sweep(tmp_path, 6)) == (None, 3, 5, 5)
    (tmp_path / "last_sweep").write_bytes(left)
    assert (note_sweep(tmp_path, 7), note_sweep(tmp_path, 8)) == (None, 7)


def test_a_sweep_that_cannot_be_noted_leaves_no_older_note_that_would_be_believed(tmp_path: Path) -> None:
    note_sweep(tmp_path, 3)
    (tmp_path / "last_sweep.part").mkdir()
    assert note_sweep(tmp_path, 4) is None
    (tmp_path / "last_sweep.part").rmdir()
    assert (note_sweep(tmp_path, 4), note_sweep(tmp_path, 4)) == (None, 4)


def test_command_line_names_config_state_host_and_place(tmp_path: Path) -> None:
    options = read_options(["x.toml", "--state", str(tmp_path), "--host", "mac-7", "--place", "Lyon"])
    assert (options.config, options.state, options.host, options.place) == (Path("x.toml"), tmp_path, "mac-7", "Lyon")


def test_wrong_config_is_wrong_use(tmp_path: Path) -> None:
    path = tmp_path / "bad.toml"
    path.write_text("[rollout]\ngroup_sze = 8\n")
    command = [sys.executable, "-m", "worker_mac.worker", str(path), "--state", str(tmp_path / "state")]
    found = subprocess.run(command, capture_output=True, text=True, timeout=50, cwd=PROJECT_ROOT)
    assert found.returncode == 2
    assert "group_size" in found.stderr


@pytest.mark.parametrize(("was_killed", "codes"), [(False, "[2, 2, 0, 0]\n"), (True, "[2, 0, 0, 0]\n")])
def test_a_parking_worker_that_cannot_start_ends_for_good_at_the_third_try(tmp_path: Path, was_killed: bool, codes: str) -> None:
    path = tmp_path / "bad.toml"
    path.write_text("[rollout]\ngroup_sze = 8\n")
    (tmp_path / "state").mkdir()
    if was_killed:
        (tmp_path / "state" / "starting").touch()
    script = "import sys; from worker_mac.worker import main; print([main(sys.argv[1:]) for _ in range(4)])"
    command = [sys.executable, "-c", script, str(path), "--state", str(tmp_path / "state"), "--parks"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=50, cwd=PROJECT_ROOT)
    assert found.stdout == codes
    assert "worker_parked" in found.stderr


def test_a_damaged_head_does_not_end_the_watching_of_a_run(store: Store, tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    published = Publishing(store, tmp_path / "base")
    published.publish()
    worker = _Worker.__new__(_Worker)
    worker._store, worker._run, worker._said = store, published.run, ""
    assert not worker._is_stopped(published.document)
    head = store.get(keys.head(published.run), max_bytes=1 << 20)
    store.swap(keys.head(published.run), b"{}", head.etag)
    assert not worker._is_stopped(published.document)
    store.swap(keys.head(published.run), head.data, store.get(keys.head(published.run), max_bytes=1 << 20).etag)
    published.writer.set_state("stopped", "end")
    assert worker._is_stopped(published.document)


@pytest.mark.loop
@pytest.mark.timeout(240)
async def test_worker_waits_for_the_run_plays_leaves_on_sigterm_and_ends_when_the_run_stops(
    store: Store, temporal_server: object, tmp_path: Path
) -> None:
    run, log = "loop", tmp_path / "mac-a.log"
    config = tmp_path / "run.toml"
    write_config(config, run, temporal_server.address, store)
    with worker_process(config, tmp_path / "a", "mac-a") as process:
        # Started before the run is claimed, then before there is a version, then before anybody serves its session.
        await until(lambda: any("has no run" in event.get("reason", "") for event in events_of(log)))
        base = tmp_path / "base"
        base.mkdir()
        for name in ("config.json", "tokenizer.json"):
            (base / name).write_bytes((PROJECT_ROOT / "environments/search/policy" / name).read_bytes())
        published = Publishing(store, base, run=run, bucket=store.settings)
        await until(lambda: any(event["event"] == "hello_said" for event in events_of(log)))
        published.publish()
        client = await connect(temporal_server.address, temporal_server.namespace)
        from environments import registry

        questions = list(registry.create("search", {}, (base / "tokenizer.json").read_bytes()).question_ids("train"))
        control = Control(questions)
        serving = make_worker(client, names.control_queue(run), workflows=[MacSessionWorkflow], activities=control.activities)
        async with serving:
            listed = await until(lambda: len(found := list(store.list(keys.groups_of_version(run, 0)))) >= 16 and found)
            group = decode_group(store.get(listed[0].key, max_bytes=MAX_GROUP_BYTES).data)
            assert (group.host, group.question_id) == ("mac-a", questions[0])
            status = await session_of(client, run, "mac-a")
            assert (status.state, status.place) == ("live", "here")

            state_id = published.publish()
            await until(lambda: list(store.list(keys.groups_of_version(run, 1))))
            newer = next(store.list(keys.groups_of_version(run, 1)))
            assert decode_group(store.get(newer.key, max_bytes=MAX_GROUP_BYTES).data).state_id == state_id

            process.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(process.wait, 40) == 0
            assert (await session_of(client, run, "mac-a")).state == "away"

            with worker_process(config, tmp_path / "a", "mac-a") as second:
                await until(lambda: any(event["event"] == "delta_applied" or event["event"] == "run_joined" for event in events_of(log)))
                sweep = (await session_of(client, run, "mac-a")).sweep
                while (await session_of(client, run, "mac-a")).sweep <= sweep:
                    await asyncio.sleep(0.2)
                published.writer.set_state("stopped", "end")
                assert await asyncio.to_thread(second.wait, 40) == 0
    gc.collect()  # cancelled handles of the session just served are told of now, not at some later import
    waits = [event["reason"] for event in events_of(log) if event["event"] == "worker_waiting"]
    assert len(waits) == len(set(waits))
    assert [event.event for event in control.events][:2] == ["joined", "left"]
