"""The checks against real servers: what the run's own key and a Mac's key may do, a clock that is wrong, a set-up that is not made."""

import http.server
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from email.utils import formatdate
from pathlib import Path
from typing import Any

import pytest

from cli.doctor import bucket, servers
from cli.doctor.finding import Finding
from cli.doctor.scene import Scene
from stoa.bucket.store import Store
from stoa.config.load import PROJECT_ROOT, load_run
from stoa.contracts.errors import AccessDeniedError, ServiceUnavailableError, SetupMissingError
from tests.servers import MAC_CREDENTIALS
from tests.unit.worker_mac.publishing import Publishing


def scene_at(store: Store, folder: Path, role: str = "gpu") -> Scene:
    sets = (f'bucket.endpoint="{store.settings.endpoint}"', f'bucket.name="{store.settings.name}"')
    return Scene(role, load_run(None, sets, environ={}), folder / "state", store)  # type: ignore[arg-type]


def names_of(store: Store) -> list[str]:
    return [listed.key for listed in store.list("probes/")]


def test_the_homes_key_writes_conditionally_and_leaves_nothing_behind(store: Store, tmp_path: Path) -> None:
    found = bucket.check_bucket(scene_at(store, tmp_path))
    assert found.verdict == "pass", found
    assert "create-only and conditional" in found.found
    assert names_of(store) == []


class Careless(Store):
    """A server that ignores what a write depends on."""

    def create(self, key: str, data: Any, *, kind: str = "") -> str:
        self._client.put_object(Bucket=self.settings.name, Key=key, Body=bytes(data))
        return '"x"'


class Forgetful(Store):
    def swap(self, key: str, data: bytes, etag: str | None) -> str:
        return self._client.put_object(Bucket=self.settings.name, Key=key, Body=data)["ETag"]


@pytest.mark.parametrize(("kind", "words"), [(Careless, "overwrites an object"), (Forgetful, "ignores the condition")])
def test_a_bucket_without_conditional_writes_is_a_failure(store: Store, tmp_path: Path, kind: type[Store], words: str) -> None:
    found = bucket.check_bucket(scene_at(kind(store.settings, store._credentials), tmp_path))
    assert (found.verdict, words in found.found) == ("fail", True)
    assert names_of(store) == []


def test_no_bucket_and_no_key_are_told(store: Store, tmp_path: Path) -> None:
    missing = Store(store.settings.model_copy(update={"name": "no-such-bucket-here"}), store._credentials)
    with pytest.raises(SetupMissingError):
        bucket.check_bucket(scene_at(missing, tmp_path))
    found = bucket.check_bucket(replace(scene_at(store, tmp_path), store=None))
    assert (found.verdict, found.fix) == ("fail", "set STOA_BUCKET_KEY and STOA_BUCKET_SECRET")
    assert bucket.check_permissions(replace(scene_at(store, tmp_path), store=None)) is None


@pytest.fixture
def published(store: Store, tmp_path: Path) -> Publishing:
    folder = tmp_path / "base"
    folder.mkdir()
    run = Publishing(store, folder)
    run.publish()
    return run


def macs_store(store: Store) -> Store:
    return Store(store.settings, MAC_CREDENTIALS)


def test_a_macs_key_reads_and_may_do_nothing_else(store: Store, published: Publishing, tmp_path: Path) -> None:
    scene = scene_at(macs_store(store), tmp_path, "mac")
    assert bucket.check_bucket(scene).found.endswith("run demo is there")
    found = bucket.check_permissions(scene)
    assert found is not None and (found.verdict, "neither list nor write nor delete" in found.found) == ("pass", True), found
    down = bucket.check_bandwidth(scene)
    assert down is not None and down.verdict == "pass" and "down " in down.found and "up " not in down.found


def test_a_macs_key_that_may_more_is_a_warning_and_its_probe_is_removed(store: Store, published: Publishing, tmp_path: Path) -> None:
    found = bucket.check_permissions(scene_at(store, tmp_path, "mac"))
    assert found is not None and (found.verdict, found.found) == ("warn", "this Mac's key may also list, write, delete")
    assert names_of(store) == []


def test_a_bucket_that_is_away_or_not_made_is_told_once(store: Store, tmp_path: Path) -> None:
    config = load_run(None, ('bucket.endpoint="http://127.0.0.1:9"',), environ={})
    away = Scene("mac", config, tmp_path, Store(config.bucket, MAC_CREDENTIALS))
    with pytest.raises(ServiceUnavailableError):
        bucket.check_bucket(away)
    assert bucket.check_permissions(away) is None and bucket.check_bandwidth(away) is None


def test_a_key_that_is_no_good_is_told_with_what_to_do(store: Store, tmp_path: Path) -> None:
    wrong = Store(store.settings, replace(MAC_CREDENTIALS, secret="wrong"))
    found = bucket.check_bucket(scene_at(wrong, tmp_path, "mac"))
    assert (found.verdict, found.fix) == ("fail", "ask for a new token")
    with pytest.raises(AccessDeniedError):
        bucket.check_bucket(scene_at(wrong, tmp_path))


class Slow(Store):
    """A line on which a megabyte takes more than half a second."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.sizes: list[int] = []

    def create(self, key: str, data: bytes | bytearray | memoryview, *, kind: str = "") -> str:
        self.sizes.append(len(data))
        time.sleep(0.6)
        return super().create(key, data, kind=kind)


def test_the_way_to_the_bucket_is_measured_both_ways(store: Store, published: Publishing, tmp_path: Path) -> None:
    found = bucket.check_bandwidth(scene_at(store, tmp_path))
    assert found is not None and found.verdict == "pass", found
    assert "down " in found.found and ", up " in found.found and "a first join takes 307.9 kB" in found.found
    assert "most of it" not in found.found, "the anchor is small: where we may write, a larger object of our own is measured by"
    assert names_of(store) == []
    mac = bucket.check_bandwidth(scene_at(macs_store(store), tmp_path, "mac"))
    assert mac is not None and "most of it the time until a server answers; a first join takes 307.9 kB, less than" in mac.found


def test_a_slow_line_gets_no_second_and_larger_probe(store: Store, published: Publishing, tmp_path: Path) -> None:
    slow = Slow(store.settings, store._credentials)
    found = bucket.check_bandwidth(scene_at(slow, tmp_path))
    assert found is not None and found.verdict == "pass", found
    assert slow.sizes == [1 << 20]
    assert names_of(store) == []


def test_a_key_for_all_buckets_is_told_from_a_key_for_one(store: Store, tmp_path: Path) -> None:
    scene = scene_at(store, tmp_path)
    assert bucket._sees_other_buckets(replace(scene, credentials=store._credentials))
    assert not bucket._sees_other_buckets(replace(scene, credentials=MAC_CREDENTIALS))


@contextmanager
def clock(ahead_seconds: float) -> Iterator[str]:
    """An endpoint whose clock is so far ahead."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_response_only(403)
            self.send_header("Date", formatdate(time.time() + ahead_seconds, usegmt=True))
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    ("ahead_seconds", "verdict", "words"),
    [
        (0.0, "pass", "within 1 s"),
        (60.0, "warn", "behind the bucket's"),
        (-60.0, "warn", "ahead of"),
        (3600.0, "fail", "refuse our requests"),
    ],
)
def test_a_wrong_clock_is_told(store: Store, tmp_path: Path, ahead_seconds: float, verdict: str, words: str) -> None:
    with clock(ahead_seconds) as endpoint:
        config = load_run(None, (f'bucket.endpoint="{endpoint}"',), environ={})
        found = servers.check_clock(replace(scene_at(store, tmp_path), config=config))
    assert found is not None and (found.verdict, words in found.found) == (verdict, True), found


def test_the_real_buckets_clock_is_ours(store: Store, tmp_path: Path) -> None:
    found = servers.check_clock(scene_at(store, tmp_path))
    assert found is not None and found.verdict == "pass"


def at_temporal(scene: Scene, address: str, namespace: str = "default") -> Scene:
    changes = {"address": address, "namespace_core": namespace, "namespace_mac": "default"}
    return replace(scene, config=scene.config.model_copy(update={"temporal": scene.config.temporal.model_copy(update=changes)}))


def test_temporal_that_is_set_up_passes_and_what_is_missing_is_named(store: Store, temporal_server: Any, tmp_path: Path) -> None:
    scene = at_temporal(scene_at(store, tmp_path), temporal_server.address)
    found = servers.check_temporal(scene)
    assert found == Finding("temporal", "pass", f"{temporal_server.address} answers: namespace default, 6 search attributes")
    with pytest.raises(SetupMissingError, match="no-such-space"):
        servers.check_temporal(at_temporal(scene, temporal_server.address, "no-such-space"))


def test_the_whole_of_it_passes_on_servers_that_are_set_up_in_less_than_ten_seconds(
    store: Store, published: Publishing, temporal_server: Any, tmp_path: Path
) -> None:
    config = tmp_path / "run.toml"
    config.write_text(
        f'[temporal]\naddress = "{temporal_server.address}"\n[bucket]\nendpoint = "{store.settings.endpoint}"\n'
        f'name = "{store.settings.name}"\n'
    )
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("STOA_", "AWS_"))}
    command = [sys.executable, "-m", "cli.main", "doctor", str(config), "--state", str(tmp_path / "state"), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, cwd=PROJECT_ROOT, env=clean)
    tree = json.loads(done.stdout)
    wrong = [one for one in tree["checks"] if one["verdict"] == "fail"]
    # Whoever else uses MLX on the machine of the test is a warning.
    assert (done.returncode, wrong) == (0, []), done.stderr
    assert {one["name"] for one in tree["checks"]} == {
        "versions", "worker", "model", "disk", "memory", "power", "other programs", "self-test", "kernels", "chat template", "temporal",
        "bucket", "permissions", "clock", "bandwidth", "outbound only",
    }  # fmt: skip
    assert tree["seconds"] < 10.0
