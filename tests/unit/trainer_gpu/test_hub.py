"""Base checkpoints by name from a hub that is a server on this machine: fetched once, resumed, checked, and refused offline."""

import hashlib
import json
import re
import shutil
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest

from stoa.bucket.manifest import Signer
from stoa.bucket.run_document import new_run
from stoa.config.run import RunConfig
from stoa.contracts.errors import CheckpointError, ConfigError, ModelMissingError, RunMismatchError
from trainer_gpu.hub import MARK, check_weight_files, locate_model, weight_files

REVISION = "0123456789abcdef0123456789abcdef01234567"
MODEL = f"someone/small-model@{REVISION}"


class Hub(ThreadingHTTPServer):
    """The three calls of a model hub that a fetch makes. `cut_after` bytes of the next weights it hangs up, once."""

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder = folder
        self.cut_after = 0
        self.sent: list[tuple[str, int, int]] = []  # file, first byte, bytes

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(send=False)

    def do_GET(self) -> None:
        self._answer(send=True)

    def _answer(self, *, send: bool) -> None:
        path = self.path.split("?")[0]
        files = sorted(p for p in self.server.folder.iterdir() if p.is_file())
        if re.fullmatch(r"/api/models/someone/small-model(/revision/\w+)?", path):
            self._json({"id": "someone/small-model", "sha": REVISION, "siblings": [{"rfilename": p.name} for p in files]}, send=send)
        elif path.startswith(f"/api/models/someone/small-model/tree/{REVISION}"):
            tree = [{"type": "file", "path": p.name, "size": p.stat().st_size, "oid": "0" * 40} for p in files]
            self._json(tree, send=send)
        elif path.startswith(f"/someone/small-model/resolve/{REVISION}/"):
            self._file(self.server.folder / path.rsplit("/", 1)[1], send=send)
        else:
            self.send_response(404)
            self.send_header("Content-Length", "0")
            self.end_headers()

    def _json(self, tree: object, *, send: bool) -> None:
        data = json.dumps(tree).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if send:
            self.wfile.write(data)

    def _file(self, path: Path, *, send: bool) -> None:
        data = path.read_bytes()
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        first = int(asked[1]) if asked else 0
        part = data[first : int(asked[2]) + 1 if asked and asked[2] else None]
        self.send_response(206 if asked else 200)
        self.send_header("ETag", f'"{hashlib.sha256(data).hexdigest()}"')
        self.send_header("X-Repo-Commit", REVISION)
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(len(part)))
        if asked:
            self.send_header("Content-Range", f"bytes {first}-{first + len(part) - 1}/{len(data)}")
        self.end_headers()
        if not send:
            return
        self.server.sent.append((path.name, first, len(part)))
        if self.server.cut_after and path.suffix == ".safetensors":
            part, self.server.cut_after = part[: self.server.cut_after], 0
            self.close_connection = True
        self.wfile.write(part)


@pytest.fixture
def hub(moe_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub with one model; this host's state folder is empty."""
    monkeypatch.setenv("STOA_STATE", str(tmp_path / "state"))
    shutil.copytree(moe_folder, tmp_path / "model")
    server = Hub(tmp_path / "model")
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


def config(model: str = MODEL) -> RunConfig:
    return RunConfig(model=model)


def test_model_is_fetched_once_and_its_weights_are_hashed(hub: Hub, moe_folder: Path) -> None:
    folder = locate_model(config(), endpoint=hub.url)
    assert (folder / "model.safetensors").read_bytes() == (moe_folder / "model.safetensors").read_bytes()
    (found,) = weight_files(folder)
    assert found.sha256 == hashlib.sha256((moe_folder / "model.safetensors").read_bytes()).hexdigest()
    num_sent = len(hub.sent)
    hub.shutdown()
    assert locate_model(config(), endpoint=hub.url) == folder
    assert len(hub.sent) == num_sent


def test_fetch_that_was_cut_short_goes_on_where_it_ended(hub: Hub, moe_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 1 << 14)  # what is kept of a broken request is whole chunks
    hub.cut_after = 100_000
    size = (moe_folder / "model.safetensors").stat().st_size
    assert size > 2 * hub.cut_after
    try:
        folder = locate_model(config(), endpoint=hub.url)
    except ModelMissingError:
        assert not list(Path(hub.folder.parent / "state").rglob(MARK)), "what is not whole does not count"
        folder = locate_model(config(), endpoint=hub.url)
    asked = [(first, num) for name, first, num in hub.sent if name == "model.safetensors"]
    assert len(asked) == 2
    assert asked[1][0] > 0, "the second request begins where the first one ended"
    assert (folder / "model.safetensors").read_bytes() == (moe_folder / "model.safetensors").read_bytes()


def test_without_a_network_the_error_names_the_command_that_fetches_it(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr("huggingface_hub.utils._http.time", SimpleNamespace(sleep=waits.append))  # its pauses are 23 s in all
    hub.shutdown()
    hub.server_close()
    with pytest.raises(ModelMissingError, match="someone/small-model@0123456789ab is not on this host") as caught:
        locate_model(config(), endpoint=hub.url)
    assert f"hf download someone/small-model --revision {REVISION}" in caught.value.hint
    assert len(waits) > 1, "it has tried more than once"


def test_unknown_model_is_missing_too(hub: Hub) -> None:
    with pytest.raises(ModelMissingError):
        locate_model(config(f"someone/another@{REVISION}"), endpoint=hub.url)


def test_model_that_does_not_fit_its_config_does_not_count(hub: Hub) -> None:
    path = hub.folder / "config.json"
    tree = json.loads(path.read_text())
    path.write_text(json.dumps({**tree, "moe_intermediate_size": 128}))
    with pytest.raises(CheckpointError, match=r"config.json makes it \(128, 64\)|config.json makes it \(64, 128\)"):
        locate_model(config(), endpoint=hub.url)
    assert not list(Path(hub.folder.parent / "state").rglob(MARK))


def test_name_without_a_revision_is_refused() -> None:
    with pytest.raises(ConfigError, match="revision pinned") as caught:
        locate_model(config("someone/small-model"))
    assert "someone/small-model@COMMIT" in caught.value.hint
    with pytest.raises(ConfigError, match="no folder"):
        locate_model(config("./nowhere/at/all"))


def test_run_refuses_other_weights_than_it_was_started_with(moe_folder: Path, tmp_path: Path) -> None:
    shutil.copytree(moe_folder, tmp_path / "model")
    signer = Signer.generate()
    document = new_run(config(str(tmp_path)), signer, layout_id="x", model_files=(), weights=weight_files(tmp_path / "model"))
    check_weight_files(document, tmp_path / "model")
    path = tmp_path / "model" / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(RunMismatchError, match="other weights"):
        check_weight_files(document, tmp_path / "model")


TORN = ["", "{", "[]", '{"files": 3}', '{"model": "m", "revision": "r", "files": []}', b"\xff\xfe", '{"files": [{"name": "x"}]}']


@pytest.mark.parametrize("torn", TORN)
def test_torn_mark_is_named_and_mended_without_a_network(torn: str | bytes, hub: Hub) -> None:
    folder = locate_model(config(), endpoint=hub.url)
    noted, num_sent = weight_files(folder), len(hub.sent)
    (folder / MARK).write_bytes(torn if isinstance(torn, bytes) else torn.encode())
    with pytest.raises(CheckpointError, match=rf"{MARK} cannot be used: .+") as error:
        weight_files(folder)
    assert error.value.hint == "delete that file: the model is then looked at anew"
    hub.shutdown()
    assert locate_model(config(), endpoint=hub.url) == folder
    assert weight_files(folder) == noted
    assert len(hub.sent) == num_sent


def test_torn_mark_beside_damaged_weights_is_no_whole_model(hub: Hub) -> None:
    folder = locate_model(config(), endpoint=hub.url)
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: len(data) // 2])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is not there with its"):
        weight_files(folder)
    (folder / MARK).write_text("{")
    hub.shutdown()
    with pytest.raises((ModelMissingError, CheckpointError)):
        locate_model(config(), endpoint=hub.url)
    assert (folder / MARK).read_text() == "{"
