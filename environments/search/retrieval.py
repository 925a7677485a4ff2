"""Searching papers as an environment does it: a query in, passages out, from an index on this host or a server.

A server's trouble is nobody's wrong answer: whatever it does raises InfrastructureFaultError, which makes no episode. Only
a cleaned query leaves this file, so nothing that a policy writes can be what breaks a server.
"""

import contextlib
import http.client
import json
import math
import socket
import threading
import time
import urllib.parse
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Final, Protocol, cast

from environments.search.paper_index import PaperIndex
from environments.search.terms import cleaned_query
from stoa.contracts.errors import ConfigError, FormatError, InfrastructureFaultError

MOST_PASSAGES: Final = 100
MOST_CONTENT_CHARS: Final = 65_536
_MOST_ANSWER_BYTES: Final = 64 * 1024 * 1024
_PART_BYTES: Final = 1024 * 1024
_REMEMBERED: Final = 65_536
# A server that cannot be reached, and every way in which what it says is no answer.
_TROUBLE: Final = (OSError, http.client.HTTPException, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)


@dataclass(frozen=True, slots=True)
class Passage:
    """One found paper. `id` is "" if the server names none."""

    id: str
    contents: str
    score: float


class Retriever(Protocol):
    """Finds passages. The same query gives the same passages. Safe from several threads."""

    @property
    def most_seconds(self) -> float:
        """Longest that one search may take, outages included."""
        ...

    def search(self, query: str, top_k: int) -> tuple[Passage, ...]:
        """At most `top_k` passages, best first. Raises InfrastructureFaultError if it cannot be told."""
        ...


class Remembered:
    """Results by the hash of a query and its top_k; the oldest used is forgotten. Safe from several threads.

    What several ask for at once, as the episodes of a group do, is looked for once.
    """

    def __init__(self, capacity: int = _REMEMBERED) -> None:
        self._capacity = capacity
        self._kept: OrderedDict[bytes, tuple[Passage, ...]] = OrderedDict()
        self._sought: dict[bytes, Future[tuple[Passage, ...]]] = {}
        self._lock = threading.Lock()
        self.num_hits = self.num_misses = 0

    def get(self, query: str, top_k: int, find: Callable[[], tuple[Passage, ...]]) -> tuple[Passage, ...]:
        """What is remembered, or else what `find` gives; what `find` raises is not remembered."""
        key = blake2b(f"{top_k}|{query}".encode(), digest_size=16).digest()
        with self._lock:
            known, sought = self._kept.get(key), self._sought.get(key)
            if known is not None:
                self._kept.move_to_end(key)
                self.num_hits += 1
                return known
            self.num_hits += sought is not None
            self.num_misses += sought is None
            ours: Future[tuple[Passage, ...]] = self._sought.setdefault(key, Future())
        if sought is not None:
            return sought.result()
        try:
            found = find()
        except BaseException as error:
            with self._lock:
                del self._sought[key]
            ours.set_exception(error)
            raise
        with self._lock:
            del self._sought[key]
            self._kept[key] = found
            while len(self._kept) > self._capacity:
                self._kept.popitem(last=False)
        ours.set_result(found)
        return found


class LocalRetriever:
    """An index folder of this host."""

    def __init__(self, folder: Path, *, index_id: str = "", seconds: float = math.inf) -> None:
        """`seconds`: limit of one search. Raises FormatError, or ConfigError if the index is not that of `index_id`."""
        self.index = PaperIndex(folder)
        self._seconds = seconds
        self.remembered = Remembered()
        _check_id(str(folder), self.index.about.index_id, index_id)

    @property
    def most_seconds(self) -> float:
        """See `Retriever`."""
        return self._seconds

    def search(self, query: str, top_k: int) -> tuple[Passage, ...]:
        """See `Retriever`."""
        cleaned = cleaned_query(query)
        return self.remembered.get(cleaned, top_k, lambda: self._find(cleaned, top_k))

    def _find(self, query: str, top_k: int) -> tuple[Passage, ...]:
        try:
            hits = self.index.search(query, top_k, deadline=time.monotonic() + self._seconds)
            documents = [(self.index.document(hit.number), hit.score) for hit in hits]
        except FormatError as error:  # damaged since it was opened: no episode's doing
            raise InfrastructureFaultError(error.message, hint=error.hint) from error
        return tuple(Passage(document.id, document.contents, score) for document, score in documents)


class SearchClient:
    """A server that answers `POST /retrieve` as Search-R1's does: ours (`environments.search.serve`) or another."""

    def __init__(self, url: str, *, index_id: str = "", seconds: float = 10.0, attempts: int = 3, pause_seconds: float = 0.5) -> None:
        """`seconds`: limit of one request; `attempts`: requests before giving up, with a growing pause between them.

        With an `index_id`, a server of another index is refused at its first answer.
        """
        parsed = urllib.parse.urlsplit(url)
        if parsed.scheme not in ("http", "https") or not parsed.hostname:
            raise ConfigError(f"retriever = {url!r} is no address", hint="give http://HOST:PORT, or the folder of an index")
        self._parsed, self._url = parsed, url
        self._wanted = index_id
        self._seconds, self._attempts, self._pause_seconds = seconds, attempts, pause_seconds
        self.remembered = Remembered()

    @property
    def most_seconds(self) -> float:
        """See `Retriever`: all attempts in vain, and the pauses between them."""
        return self._attempts * self._seconds + self._pause_seconds * (2 ** (self._attempts - 1) - 1)

    def search(self, query: str, top_k: int) -> tuple[Passage, ...]:
        """See `Retriever`."""
        cleaned = cleaned_query(query)
        return self.remembered.get(cleaned, top_k, lambda: self._ask(cleaned, top_k))

    def _ask(self, query: str, top_k: int) -> tuple[Passage, ...]:
        fault = ""
        for attempt in range(self._attempts):
            if attempt:
                time.sleep(self._pause_seconds * 2 ** (attempt - 1))
            try:
                answer = self._request("POST", "/retrieve", {"queries": [query], "topk": top_k, "return_scores": True})
                return _passages(answer, top_k)
            except _TROUBLE as error:
                fault = f"{type(error).__name__}: {error}"
        raise InfrastructureFaultError(
            f"the search server {self._url} did not answer {self._attempts} times: {fault}",
            hint="start it again: python -m environments.search.serve FOLDER",
        )

    def check(self) -> None:
        """Raise ConfigError if the server is not of the wanted index, InfrastructureFaultError if it cannot be asked."""
        if not self._wanted:
            return
        try:
            about = cast("dict[str, object]", self._request("GET", "/health", None))
            found = str(about["index_id"])
        except _TROUBLE as error:
            raise InfrastructureFaultError(f"the search server {self._url} does not say what it searches: {error}") from error
        _check_id(self._url, found, self._wanted)

    def _request(self, method: str, path: str, body: dict[str, object] | None) -> object:
        kind = http.client.HTTPSConnection if self._parsed.scheme == "https" else http.client.HTTPConnection
        deadline = time.monotonic() + self._seconds
        connection = kind(self._parsed.hostname or "", self._parsed.port, timeout=self._seconds)
        # A socket's own limit begins anew with each byte that comes: a server that drips its headers would hold us for ever.
        held: list[socket.socket] = []
        guard = threading.Timer(self._seconds, _cut, (connection, held))
        guard.daemon = True
        guard.start()
        try:
            connection.connect()
            held.append(connection.sock)  # which the connection forgets when the answer's headers have come
            if time.monotonic() >= deadline:  # looking up a name has no limit of ours, and the guard may have been here
                raise TimeoutError("no connection in time")
            content = None if body is None else json.dumps(body).encode()
            connection.request(method, self._parsed.path.rstrip("/") + path, content, {"Content-Type": "application/json"})
            response = connection.getresponse()
            answer = _read(response)
            if response.status != http.HTTPStatus.OK:
                raise ValueError(f"status {response.status}: {answer[:200].decode('utf-8', 'replace')}")
            if len(answer) > _MOST_ANSWER_BYTES:
                raise ValueError("the answer is too large")
            return json.loads(answer)
        except _TROUBLE as error:
            if time.monotonic() < deadline:
                raise
            raise TimeoutError("the answer did not come to its end in time") from error
        finally:
            guard.cancel()
            connection.close()


def _cut(connection: http.client.HTTPConnection, held: Sequence[socket.socket]) -> None:
    """End a request from another thread: whoever reads from its socket finds the end."""
    for one in (connection.sock, *held):
        with contextlib.suppress(OSError, AttributeError):  # it is not there yet, or has gone by itself
            one.shutdown(socket.SHUT_RDWR)


def _read(response: http.client.HTTPResponse) -> bytes:
    """The body, as far as it may be long."""
    parts: list[bytes] = []
    num_bytes = 0
    while num_bytes <= _MOST_ANSWER_BYTES and (part := response.read1(_PART_BYTES)):
        parts.append(part)
        num_bytes += len(part)
    return b"".join(parts)


def open_retriever(place: str, *, index_id: str = "", seconds: float = 10.0) -> Retriever:
    """The retriever at an address (http or https) or in the folder of an index; `~` is this host's home.

    Raises ConfigError if it is another index than `index_id`, FormatError if a folder holds none.
    """
    if "://" in place:
        client = SearchClient(place, index_id=index_id, seconds=seconds)
        client.check()
        return client
    return LocalRetriever(Path(place).expanduser(), index_id=index_id, seconds=seconds)


def _check_id(where: str, found: str, wanted: str) -> None:
    if wanted and found != wanted:
        raise ConfigError(f"{where}: index {found}, but the run was set up for {wanted}", hint="use a copy of the run's index")


def _passages(answer: object, top_k: int) -> tuple[Passage, ...]:
    """The passages of one query's answer, in either of Search-R1's two forms. Raises one of _TROUBLE."""
    (entries,) = cast("dict[str, list[list[dict[str, object]]]]", answer)["result"]
    passages: list[Passage] = []
    for entry in entries[:top_k]:
        document = cast("dict[str, object]", entry.get("document", entry))
        contents = document["contents"]
        if not isinstance(contents, str):
            raise TypeError("a document without contents")
        score = float(cast("float", entry.get("score", 0.0)))
        passages.append(Passage(_whole(str(document.get("id", ""))), _whole(contents[:MOST_CONTENT_CHARS]), score))
    return tuple(passages)


def _whole(text: str) -> str:
    """JSON can say half a character, which no tokenizer takes."""
    return text.encode("utf-8", "replace").decode("utf-8")
