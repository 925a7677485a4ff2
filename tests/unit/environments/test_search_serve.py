"""The search server and its client over a real socket: Search-R1's form, limits, and trouble that is nobody's wrong answer."""

import contextlib
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from environments.search.building import build_index
from environments.search.retrieval import LocalRetriever, Passage, Remembered, SearchClient, open_retriever
from environments.search.serve import MOST_BODY_BYTES, SearchServer
from stoa.contracts.errors import ConfigError, FormatError, InfrastructureFaultError
from tests.unit.environments.papers import texts, write_corpus

TEXTS = texts(120)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("served")
    build_index(write_corpus(base / "corpus.jsonl", TEXTS), base / "index", documents_a_shard=50)
    return base / "index"


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[SearchServer]:
    with SearchServer(("127.0.0.1", 0), LocalRetriever(folder), seconds=30.0, most_at_once=4) as serving:
        thread = threading.Thread(target=serving.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield serving
        serving.shutdown()
        thread.join()


@pytest.fixture
def url(server: SearchServer) -> str:
    return f"http://127.0.0.1:{server.server_address[1]}"


def post(server: SearchServer, body: bytes, path: str = "/retrieve", headers: dict[str, str] | None = None) -> tuple[int, object]:
    connection = HTTPConnection("127.0.0.1", server.server_address[1], timeout=30)
    connection.request("POST", path, body, headers or {})
    response = connection.getresponse()
    answer = json.loads(response.read())
    connection.close()
    return response.status, answer


def test_answers_have_search_r1s_two_forms(server: SearchServer, folder: Path) -> None:
    best = LocalRetriever(folder).search("w1 w7", 2)
    asked = {"queries": ["w1 w7", "nothing"], "topk": 2, "return_scores": True}
    status, answer = post(server, json.dumps(asked).encode())
    documents = [{"id": passage.id, "contents": passage.contents} for passage in best]
    scored = [{"document": document, "score": passage.score} for document, passage in zip(documents, best, strict=True)]
    assert (status, answer) == (200, {"result": [scored, []]})
    assert len(best) == 2 and best[0].contents == TEXTS[int(best[0].id[1:])]
    assert post(server, json.dumps({**asked, "return_scores": False}).encode()) == (200, {"result": [documents, []]})
    _, three = post(server, b'{"queries": ["w1"]}')
    assert len(three["result"][0]) == 3  # pyright: ignore


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 400),
        (b"{", 400),
        (b"[]", 400),
        (b'{"queries": "liver"}', 400),
        (b'{"queries": [1]}', 400),
        (b'{"queries": ["a"], "topk": 0.5}', 400),
        (b'{"queries": ["a"], "topk": 101}', 400),
        (b'{"queries": ["a"], "topk": -1}', 400),
        (json.dumps({"queries": ["a"] * 513}).encode(), 400),
        (b"[" * 100_000, 400),
        (b'{"queries": ["\\ud800 \\u0000", ""]}', 200),
    ],
)
def test_request_that_is_none_is_refused_with_a_status(server: SearchServer, body: bytes, status: int) -> None:
    assert post(server, body)[0] == status


def test_server_refuses_what_is_too_much(server: SearchServer, folder: Path) -> None:
    assert post(server, b"", headers={"Content-Length": str(MOST_BODY_BYTES + 1)})[0] == 413
    assert post(server, b"", headers={"Content-Length": "many"})[0] == 411
    assert post(server, b"{}", path="/other")[0] == 404
    taken = [server.places.acquire(blocking=False) for _ in range(4)]
    assert all(taken)
    server.seconds, kept = 0.1, server.seconds
    try:
        assert post(server, b'{"queries": ["w1"]}')[0] == 503
    finally:
        server.places.release(4)
        server.seconds = kept
    assert post(server, b'{"queries": ["w1"]}')[0] == 200
    server.seconds = 0.0
    try:
        assert post(server, b'{"queries": ["w1"]}')[0] == 504
    finally:
        server.seconds = kept


def test_client_finds_what_the_index_finds_and_remembers_it(url: str, folder: Path, server: SearchServer) -> None:
    client, local = SearchClient(url), LocalRetriever(folder)
    for query in ("w1 w2", "w3", "w1   w2", "nothing", "\ud800 w5"):
        assert client.search(query, 3) == local.search(query, 3)
    assert (client.remembered.num_hits, client.remembered.num_misses) == (1, 4)
    before = server.retriever.remembered.num_hits
    SearchClient(url).search("w1 w2", 3)
    assert server.retriever.remembered.num_hits == before + 1


class _Broken(BaseHTTPRequestHandler):
    """Answers with what its server holds, one after the other."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        status, content = self.server.answers.pop(0)  # pyright: ignore
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None: ...


@pytest.fixture
def broken() -> Iterator[ThreadingHTTPServer]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Broken) as serving:
        thread = threading.Thread(target=serving.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield serving
        serving.shutdown()
        thread.join()


GOOD = b'{"result": [[{"document": {"contents": "found"}, "score": 2}]]}'


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"not json",
        b"[]",
        b"{}",
        b'{"result": []}',
        b'{"result": [[1]]}',
        b'{"result": [[{"contents": 5}]]}',
        b'{"result": [[], []]}',
        b"[" * 99_999,
        b'{"result": [[{"document": {"contents": "x"}, "score": 1' + b"0" * 400 + b"}]]}",
        b'{"result": [{"contents": "x"}]}',
        b'{"result": "x"}',
        b'{"result": [[{"document": "x"}]]}',
        b"\xff\xfe\x00",
    ],
)
def test_server_that_answers_nonsense_is_an_infrastructure_fault(broken: ThreadingHTTPServer, content: bytes) -> None:
    broken.answers = [(200, content)] * 2  # pyright: ignore
    client = SearchClient(f"http://127.0.0.1:{broken.server_address[1]}", attempts=2, pause_seconds=0.0)
    with pytest.raises(InfrastructureFaultError, match="2 times"):
        client.search("liver", 3)
    assert not broken.answers  # pyright: ignore


def test_answer_beyond_64_mib_is_trouble_and_one_of_64_mib_is_read(broken: ThreadingHTTPServer) -> None:
    whole = GOOD + b" " * (64 * 1024 * 1024 - len(GOOD))
    broken.answers = [(200, whole + b" "), (200, whole)]  # pyright: ignore
    client = SearchClient(f"http://127.0.0.1:{broken.server_address[1]}", attempts=1, pause_seconds=0.0)
    with pytest.raises(InfrastructureFaultError, match="too large"):
        client.search("liver", 3)
    assert client.search("liver", 3) == (Passage("", "found", 2.0),)


def test_client_asks_again_and_forgets_failures(broken: ThreadingHTTPServer) -> None:
    broken.answers = [(503, b"{}"), (500, b""), (200, GOOD), (200, GOOD)]  # pyright: ignore
    client = SearchClient(f"http://127.0.0.1:{broken.server_address[1]}", attempts=2, pause_seconds=0.0)
    with pytest.raises(InfrastructureFaultError, match="status 500"):
        client.search("liver", 3)
    assert client.search("liver", 3) == (Passage("", "found", 2.0),)
    assert client.search("liver", 3) == (Passage("", "found", 2.0),)
    assert len(broken.answers) == 1  # pyright: ignore


class _Dripping(_Broken):
    """Sends its body a byte at a time, each well within the limit of a request."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Length", str(len(GOOD)))
        self.end_headers()
        for byte in GOOD:
            if self.server.told_off.wait(0.05):  # pyright: ignore
                return
            self.wfile.write(bytes([byte]))


def test_server_that_drips_is_given_up_in_time() -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Dripping) as serving:
        serving.told_off = threading.Event()  # pyright: ignore
        thread = threading.Thread(target=serving.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        client = SearchClient(f"http://127.0.0.1:{serving.server_address[1]}", attempts=1, seconds=0.3)
        began = time.monotonic()
        with pytest.raises(InfrastructureFaultError, match="in time"):
            client.search("liver", 3)
        assert time.monotonic() - began < 0.05 * len(GOOD)
        serving.told_off.set()  # pyright: ignore
        serving.shutdown()
        thread.join()


@pytest.mark.parametrize("said", [b"HTTP/1.1 200 OK\r\nX: y", b"HTTP/1.1 100 Continue\r\n\r\n"])
def test_server_that_never_ends_its_headers_is_given_up_in_time(said: bytes) -> None:
    """A byte at a time, or one interim answer after the other: each read ends soon, all of them never."""
    told_off = threading.Event()

    def drip(listening: socket.socket) -> None:
        connection, _ = listening.accept()
        with connection, contextlib.suppress(OSError):
            while not told_off.is_set():
                for byte in said:
                    connection.send(bytes([byte]))
                told_off.wait(0.02)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=drip, args=(listening,))
        thread.start()
        client = SearchClient(f"http://127.0.0.1:{listening.getsockname()[1]}", attempts=1, seconds=0.3)
        try:
            with pytest.raises(InfrastructureFaultError, match="in time"):
                client.search("liver", 3)
        finally:
            told_off.set()
            thread.join()


def test_a_name_that_is_looked_up_for_too_long_leaves_no_time_to_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    """The guard has come and gone by then, and a server that drips would hold us for ever."""
    find = socket.getaddrinfo

    def slow(*arguments: Any, **options: Any) -> Any:
        time.sleep(0.15)
        return find(*arguments, **options)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        monkeypatch.setattr(socket, "getaddrinfo", slow)
        client = SearchClient(f"http://127.0.0.1:{listening.getsockname()[1]}", attempts=1, seconds=0.1)
        with pytest.raises(InfrastructureFaultError, match="in time"):
            client.search("liver", 3)
        connection, _ = listening.accept()
        with connection:
            assert connection.recv(1) == b"", "nothing was asked"


def test_half_a_character_in_an_answer_is_replaced(broken: ThreadingHTTPServer) -> None:
    """No tokenizer takes one, and what it raised would not be an infrastructure fault."""
    broken.answers = [(200, rb'{"result": [[{"document": {"id": "\ud800", "contents": "a \udfff b"}, "score": 2}]]}')]  # pyright: ignore
    client = SearchClient(f"http://127.0.0.1:{broken.server_address[1]}", attempts=1)
    assert client.search("liver", 3) == (Passage("?", "a ? b", 2.0),)


def test_what_is_remembered_is_of_as_many_passages_as_were_asked_for(folder: Path) -> None:
    local = LocalRetriever(folder)
    three = local.search("w1 w2", 3)
    assert len(three) == 3
    assert (local.search("w1 w2", 1), local.search("w1 w2", 3)) == (three[:1], three)


def test_what_several_ask_for_at_once_is_looked_for_once_and_an_outage_is_everybodys() -> None:
    remembered, begun, found = Remembered(), threading.Event(), (Passage("1", "liver", 1.0),)
    outcomes: list[object] = [InfrastructureFaultError("away"), found]

    def find() -> tuple[Passage, ...]:
        begun.set()
        outcome = outcomes.pop(0)
        # Until the other three wait: each counts as a hit as it finds the search under way.
        deadline = time.monotonic() + 20.0
        while remembered.num_hits % 3 or not remembered.num_hits:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        if isinstance(outcome, InfrastructureFaultError):
            raise outcome
        return outcome  # pyright: ignore

    for wanted in (InfrastructureFaultError, None):
        remembered.num_hits = 0
        with ThreadPoolExecutor(4) as pool:
            asking = [pool.submit(remembered.get, "liver", 3, find) for _ in range(4)]
            for one in asking:
                if wanted is None:
                    assert one.result() == found
                else:
                    with pytest.raises(wanted):
                        one.result()
    assert not outcomes


def test_server_that_is_away_is_an_infrastructure_fault() -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
    client = SearchClient(f"http://127.0.0.1:{port}", attempts=2, pause_seconds=0.0, seconds=5.0)
    with pytest.raises(InfrastructureFaultError, match="did not answer"):
        client.search("liver", 3)


def test_another_index_is_refused(url: str, folder: Path, server: SearchServer, tmp_path: Path) -> None:
    index_id = server.retriever.index.about.index_id
    for place in (url, str(folder)):
        assert open_retriever(place, index_id=index_id).search("w1", 1)
        with pytest.raises(ConfigError, match="set up for other"):
            open_retriever(place, index_id="other")
    with pytest.raises(FormatError):
        open_retriever(str(tmp_path))
    for bad in ("ftp://host", "http://"):
        with pytest.raises(ConfigError, match="no address"):
            open_retriever(bad)


def test_server_is_a_program_that_says_what_is_wrong(folder: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "environments.search.serve"]
    refused = subprocess.run([*command, str(tmp_path)], capture_output=True, text=True, timeout=60, check=False)
    assert refused.returncode == 1
    assert "no complete index" in refused.stderr and "stoa search index" in refused.stderr
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
    process = subprocess.Popen([*command, str(folder), "--port", str(port)], stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        client = SearchClient(f"http://127.0.0.1:{port}", attempts=11, pause_seconds=0.02, seconds=30.0)
        assert client.search("w1 w7", 2) == LocalRetriever(folder).search("w1 w7", 2)
    finally:
        process.send_signal(signal.SIGINT)
        output = process.communicate(timeout=30)
    assert process.returncode == 0
    assert "w7" not in "".join(output), "a query is prompt text"
