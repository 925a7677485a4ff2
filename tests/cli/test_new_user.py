"""A new user's path, by the commands of the documents: a run on one machine, looked at, joined by token, ended, exported."""

import sys
from pathlib import Path

import pytest

from benchmarks.new_user import BESIDE, TOUR, Desk, commands, outcome, prepare
from stoa.config.load import SHIPPED


@pytest.mark.loop
@pytest.mark.timeout(300)
def test_the_commands_of_the_documents_work_in_their_order(tmp_path: Path) -> None:
    prepare(tmp_path, SHIPPED / "configs", short=True)
    desk = Desk(tmp_path, Path(sys.executable).parent)
    try:
        desk.go()
        assert len(desk.hosts()) == 2 and "second" in desk.hosts()
    finally:
        desk.close()
    assert set(commands(TOUR)) < set(desk.seconds) <= {line for document in (TOUR, *BESIDE) for line in commands(document)}
    assert any(line.startswith("stoa setup mine.toml") for line in desk.seconds)
    assert (tmp_path / "token.txt").stat().st_mode & 0o777 == 0o600
    found = outcome(tmp_path)
    assert found["audit_clean"] and found["steps"] >= 4
    assert found["export_bytes"] > 300_000 and found["snapshot_bytes"] > 10_000 and found["report_bytes"] > 10_000
    assert all(process.poll() is not None for process in desk.open.values())
