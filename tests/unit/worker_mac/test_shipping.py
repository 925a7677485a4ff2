"""When finished groups leave a Mac: at once, one by one, while the others are still played."""

import time
from collections.abc import Sequence
from pathlib import Path

from environments.base import Outcome
from stoa.bucket import keys
from stoa.bucket.store import Store
from tests.unit.worker_mac.publishing import Publishing, Quiet, train_request
from tests.unit.worker_mac.tasks import Dialogue
from worker_mac.engine import MacEngine


class Clocked(Dialogue):
    """Notes when the last episode of each question was scored."""

    def __init__(self) -> None:
        super().__init__()
        self.ended: dict[str, float] = {}

    def score(self, question_id: str, turns: Sequence[Sequence[int]]) -> Outcome:
        self.ended[question_id] = time.monotonic()
        return super().score(question_id, turns)


class Watched(Store):
    """Notes when each object is begun to be sent."""

    begun: dict[str, float]

    def create(self, key: str, data: bytes | bytearray | memoryview, *, kind: str = "") -> str:
        self.begun[key] = time.monotonic()
        return super().create(key, data, kind=kind)


def test_a_group_leaves_within_a_second_of_its_last_episode_also_while_new_weights_are_verified(store: Store, tmp_path: Path) -> None:
    folder = tmp_path / "base"
    folder.mkdir()
    published = Publishing(store, folder)
    watched = Watched(store.settings, store._credentials)
    watched.begun = {}
    published.publish()
    task = Clocked()
    engine = MacEngine(watched, published.document, task, host="mac-1", folder=tmp_path, model_folder=folder)
    try:
        for version in range(2):
            assert engine.sweep(train_request(version, first=8 * version), Quiet()).num_groups == 8
            for group in range(8):
                key = keys.group("demo", version, "mac-1", version, group)
                assert 0.0 <= watched.begun[key] - task.ended[str(8 * version + group)] <= 1.0
            published.publish()
    finally:
        engine.close()
