"""`stoa status` where nobody but the bucket tells of a run."""

from pathlib import Path

import pytest

from cli.commands.status import status
from cli.say import Exit
from stoa.bucket.store import Store
from tests.unit.weights.small_run import SmallRun


def test_status_says_that_temporal_is_away_and_fails(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = SmallRun(store, tmp_path)
    monkeypatch.setenv("STOA_TEMPORAL_ADDRESS", "127.0.0.1:1")
    monkeypatch.setenv("STOA_BUCKET_ENDPOINT", store.settings.endpoint)
    monkeypatch.setenv("STOA_BUCKET_NAME", store.settings.name)
    assert status("small") is Exit.FAILED
    told = capsys.readouterr()
    assert "Temporal at 127.0.0.1:1" in told.err
    assert "Temporal at 127.0.0.1:1" in told.out
    assert "control process to start" not in told.out
    assert "of the first start" in told.out, "time and limits may be others since"
    run.writer.swap(1000, state="stopped")
    assert status("small") is None, "how it is stands in the bucket"
    told = capsys.readouterr()
    assert "error" not in told.err
    assert "of the first start" in told.out, "who resumed it is told by Temporal alone"
