"""A search server for Macs that hold no index: `python -m environments.search.serve FOLDER [--host H] [--port P]`.

`POST /retrieve {"queries": [...], "topk": 3, "return_scores": false}` answers as Search-R1's server does; `GET /health`
says which index it is. A request has limits of size and time, and so has the number of them that are answered at once: what
is too much is refused with a status, never left to wait.
"""

import argparse
import json
import math
import sys
import threading
import time
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final, cast

import structlog

from environments.search.retrieval import MOST_PASSAGES, LocalRetriever, Passage
from stoa.contracts.errors import InfrastructureFaultError, StoaError

MOST_BODY_BYTES: Final = 1024 * 1024
MOST_QUERIES: Final = 512
DEFAULT_TOP_K: Final = 3
_log = structlog.get_logger(__name__)


class RefusedError(StoaError):
    """A request that is not answered, with the HTTP status that says why."""

    def __init__(self, status: HTTPStatus, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class Asked:
    """A request for passages."""

    queries: tuple[str, ...]
    top_k: int
    with_scores: bool


def read_request(body: bytes) -> Asked:
    """Read the body of a `/retrieve`. Raises RefusedError for anything that is none."""
    try:
        fields = json.loads(body)
        queries, top_k = fields["queries"], fields.get("topk") or DEFAULT_TOP_K
        with_scores = fields.get("return_scores", False)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise RefusedError(HTTPStatus.BAD_REQUEST, f'the body must be {{"queries": [...], "topk": 3}}: {error}') from error
    if not isinstance(queries, list) or not all(isinstance(query, str) for query in cast("list[object]", queries)):
        raise RefusedError(HTTPStatus.BAD_REQUEST, "queries must be a list of texts")
    if not isinstance(top_k, int) or not 1 <= top_k <= MOST_PASSAGES or len(cast("list[str]", queries)) > MOST_QUERIES:
        raise RefusedError(HTTPStatus.BAD_REQUEST, f"topk must be 1 to {MOST_PASSAGES}, and queries at most {MOST_QUERIES}")
    return Asked(tuple(cast("list[str]", queries)), top_k, bool(with_scores))


def answer_of(passages: tuple[Passage, ...], *, with_scores: bool) -> list[dict[str, object]]:
    """One query's part of the answer, in Search-R1's form."""
    documents: list[dict[str, object]] = [{"id": passage.id, "contents": passage.contents} for passage in passages]
    if not with_scores:
        return documents
    return [{"document": document, "score": passage.score} for document, passage in zip(documents, passages, strict=True)]


class SearchServer(ThreadingHTTPServer):
    """Serves one index. `most_at_once` requests are searched for at a time, each within `seconds`, of which it may wait half."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], retriever: LocalRetriever, *, seconds: float = 10.0, most_at_once: int = 16) -> None:
        super().__init__(address, _Handler)
        self.retriever, self.seconds = retriever, seconds
        self.places = threading.BoundedSemaphore(most_at_once)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no event for a traceback."""
        _log.info("request_broken_off", reason=repr(sys.exc_info()[1]))


class _Handler(BaseHTTPRequestHandler):
    """One connection."""

    server: SearchServer  # pyright: ignore[reportIncompatibleVariableOverride]
    timeout = 30.0

    def do_GET(self) -> None:
        """`/health`: which index, how large, how the cache does."""
        if self.path != "/health":
            self._send(HTTPStatus.NOT_FOUND, {"error": "ask POST /retrieve or GET /health"})
            return
        about, remembered = self.server.retriever.index.about, self.server.retriever.remembered
        self._send(
            HTTPStatus.OK,
            {
                "index_id": about.index_id,
                "num_documents": about.num_documents,
                "cache_hits": remembered.num_hits,
                "cache_misses": remembered.num_misses,
            },
        )

    def do_POST(self) -> None:
        """`/retrieve`."""
        if self.path.rstrip("/") != "/retrieve":
            self._send(HTTPStatus.NOT_FOUND, {"error": "ask POST /retrieve or GET /health"})
            return
        try:
            self._send(HTTPStatus.OK, {"result": self._retrieve(self._body())})
        except RefusedError as error:
            self._send(error.status, {"error": error.message})
        except InfrastructureFaultError as error:
            self._send(HTTPStatus.GATEWAY_TIMEOUT, {"error": error.message})

    def _body(self) -> bytes:
        length = self.headers.get("Content-Length", "")
        if not length.isascii() or not length.isdigit():
            raise RefusedError(HTTPStatus.LENGTH_REQUIRED, "a body with its length is needed")
        if int(length) > MOST_BODY_BYTES:
            self.close_connection = True
            raise RefusedError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"at most {MOST_BODY_BYTES} bytes")
        return self.rfile.read(int(length))

    def _retrieve(self, body: bytes) -> list[list[dict[str, object]]]:
        asked = read_request(body)
        deadline = time.monotonic() + self.server.seconds
        if not self.server.places.acquire(timeout=self.server.seconds / 2):
            raise RefusedError(HTTPStatus.SERVICE_UNAVAILABLE, "too many requests at once; ask again in a moment")
        try:
            return self._search(asked, deadline)
        finally:
            self.server.places.release()

    def _search(self, asked: Asked, deadline: float) -> list[list[dict[str, object]]]:
        found: list[list[dict[str, object]]] = []
        for query in asked.queries:
            if time.monotonic() > deadline:
                raise InfrastructureFaultError("the request ran out of time")
            found.append(answer_of(self.server.retriever.search(query, asked.top_k), with_scores=asked.with_scores))
        return found

    def _send(self, status: HTTPStatus, document: dict[str, object]) -> None:
        content = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Queries are prompt text: nothing of them is logged."""


def main() -> None:
    """Serve until stopped."""
    parser = argparse.ArgumentParser(description="Serve an index of papers to Macs that hold none.")
    parser.add_argument("folder", type=Path, help="the folder of an index, made by `stoa search index`")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at; beyond this machine only if you say so")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--seconds", type=float, default=10.0, help="time limit of one request")
    parser.add_argument("--at-once", type=int, default=16, help="requests searched for at the same time")
    asked = parser.parse_args()
    try:
        retriever = LocalRetriever(asked.folder, seconds=asked.seconds if asked.seconds > 0 else math.inf)
    except StoaError as error:
        sys.stderr.write(f"error: {error.message}\nhint: {error.hint}\n")
        raise SystemExit(1) from error
    with SearchServer((asked.host, asked.port), retriever, seconds=asked.seconds, most_at_once=asked.at_once) as server:
        about = retriever.index.about
        _log.info("search_serving", host=asked.host, port=server.server_address[1], index=about.index_id, documents=about.num_documents)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            _log.info("search_stopped")


if __name__ == "__main__":
    main()
