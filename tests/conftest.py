"""Fixtures every test may use: real servers, started once a session when the first test asks for them."""

import os
import secrets
import signal
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import hypothesis
import pytest
import structlog

ROOT = Path(__file__).parents[1]
WHOLE_RUNS, WAITING_RUNS = "whole runs", "whole runs that mostly wait"
PLAY_WHOLE_RUNS = ("tests/loop/", "tests/faults/", "tests/cli/")
MOSTLY_WAIT = ("tests/faults/", "tests/loop/test_invited", "tests/loop/test_mac_signals")
"""Paced by clocks, not by computing: a fifth to a third of a core."""
LONGEST = (
    "tests/unit/benchmarks/test_shows.py",
    "tests/unit/trainer_gpu/test_ranks.py",
    "tests/unit/trainer_gpu/test_kills.py",
    "tests/unit/trainer_gpu/test_two_ranks.py",
    "tests/workflows/test_outages.py",
    "tests/architecture/test_tools.py",
    "tests/workflows/test_commands.py",
    "tests/workflows/test_clock.py",
    "tests/unit/weights/test_kills.py",
)
"""Files of half a minute and more, the longest first: one that began last would be waited for by all."""

hypothesis.settings.register_profile("project", deadline=None)  # how long one example takes is the machine's affair
hypothesis.settings.load_profile("project")
os.environ.setdefault("OMP_NUM_THREADS", "1")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell's background job is started; what tests start would inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(trylast=True)  # after the order is drawn
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest first: whole runs, which two processes play one after another, then other files of long tests, then the rest.

    Each gets a second chance, which the summary names: most play against real servers and sockets in real time, and a shared machine
    may stand still for longer than any wait. What is wrong fails twice.
    """
    items.sort(key=lambda item: _rank(item.nodeid))
    for item in items:
        item.add_marker(pytest.mark.flaky(reruns=1))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """Share tests out by file, and all whole runs to one process, since each takes both cores; those that do not to another."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return _share_of(nodeid)

    config.option.loadscopereorder = False
    return ByFile(config, log)  # pyright: ignore[reportArgumentType]


@cache
def _has_long_tests(path: str) -> bool:
    text = (ROOT / path).read_text()
    return "pytest.mark.loop" in text or "pytest.mark.faults" in text


def _is_long(nodeid: str) -> bool:
    return _has_long_tests(nodeid.partition("::")[0])


def _share_of(nodeid: str) -> str:
    if nodeid.startswith(PLAY_WHOLE_RUNS) and _is_long(nodeid):
        return WAITING_RUNS if nodeid.startswith(MOSTLY_WAIT) else WHOLE_RUNS
    return nodeid.partition("::")[0]


def _rank(nodeid: str) -> tuple[int, int]:
    share = _share_of(nodeid)
    if share in (WHOLE_RUNS, WAITING_RUNS):
        return int(share == WAITING_RUNS), 0
    return (2, LONGEST.index(share)) if share in LONGEST else (4 - _is_long(nodeid), 0)


@pytest.fixture(autouse=True)
def _log_level_of_its_own() -> Iterator[None]:
    """A test that calls a program's main in this process leaves what is logged as it found it."""
    before = structlog.get_config()
    processors = list(before["processors"])
    yield
    structlog.configure(processors=processors, wrapper_class=before["wrapper_class"])


@pytest.fixture(scope="session")
def bucket_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator["object"]:
    """A real S3 server on loopback: `.endpoint`, `.settings(name)`, `.store(name)`."""
    from tests.servers import bucket_server as start

    with start(tmp_path_factory.mktemp("bucket")) as server:
        yield server


@pytest.fixture
def store(bucket_server: object) -> Iterator["object"]:
    """A `Store` on an empty bucket of this test alone, which is gone afterwards."""
    store = bucket_server.store(f"test-{secrets.token_hex(6)}")  # pyright: ignore[reportAttributeAccessIssue]
    store.ensure_bucket()
    yield store
    store._client.delete_bucket(Bucket=store.settings.name)  # this server deletes what is in it too, and frees its volumes


@pytest.fixture(scope="session")
def temporal_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator["object"]:
    """A real Temporal dev server with search attributes: `.address`, `.namespace`."""
    from tests.servers import temporal_server as start

    with start(tmp_path_factory.mktemp("temporal")) as server:
        yield server


@pytest.hookimpl
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say why a test needed its second chance: where it passed then, nothing else would tell what was wrong."""
    for report in terminalreporter.stats.get("rerun", ()):
        crash = getattr(report.longrepr, "reprcrash", None)
        why = f"{crash.path}:{crash.lineno}: {crash.message}" if crash else str(report.longrepr)
        terminalreporter.write_line(f"FIRST TRY of {report.nodeid}: {why}")
