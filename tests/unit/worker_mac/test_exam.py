"""An examination's result does not depend on who plays which part, and an export of ours is examined by its own codes."""

import json
from pathlib import Path

import numpy as np
import pytest

from environments import registry
from stoa.bucket import keys
from stoa.bucket.exams import ExamTask, answered, read_exam, read_task, write_task
from stoa.bucket.store import Store
from stoa.contracts.errors import CheckpointError
from stoa.rollouts.records import Episode
from stoa.rollouts.shard import decode_group
from stoa.weights.export import write_mlx_folder
from stoa.weights.layout import layout_of
from worker_mac.checkpoint import state_of
from worker_mac.exam import Seat

POLICY = Path(__file__).parents[3] / "environments" / "search" / "policy"
QUESTIONS = registry.create("search", {}, (POLICY / "tokenizer.json").read_bytes()).question_ids("held_out")[:12]


def task(store: Store, exam: str, host: str, questions_a_part: int) -> ExamTask:
    bucket = store.settings.model_dump(mode="json")
    return ExamTask(
        exam, host, str(POLICY), "float32", bucket, "search", {}, tuple(QUESTIONS), 2, questions_a_part, 3, (1.0, 0, 1.0, 0.0), 600.0
    )


def episodes_of(store: Store, exam: str) -> dict[tuple[str, int], Episode]:
    found: dict[tuple[str, int], Episode] = {}
    plan = read_exam(store, exam)
    for _, key in sorted(answered(store, plan).items()):
        for episode in decode_group(store.get(key, max_bytes=1 << 24).data).episodes:
            sample = sum(question == episode.question_id for question, _ in found)
            found[episode.question_id, sample] = episode
    return found


def test_result_is_the_same_however_questions_are_dealt_out(store: Store, tmp_path: Path) -> None:
    alone = Seat(task(store, "alone", "mac-a", 12), store, tmp_path)
    assert alone.sit() == 1
    one = Seat(task(store, "shared", "mac-a", 5), store, tmp_path)
    other = Seat(task(store, "shared", "mac-b", 5), store, tmp_path)
    assert one.sit() == 3
    assert other.sit() == 0, "nothing is left, nothing is played twice"
    first, second = episodes_of(store, "alone"), episodes_of(store, "shared")
    assert first.keys() == second.keys()
    assert len(first) == 24
    for place, episode in first.items():
        np.testing.assert_array_equal(episode.ids, second[place].ids)
        np.testing.assert_array_equal(episode.logprobs, second[place].logprobs)
    assert any(not np.array_equal(first[q, 0].ids, first[q, 1].ids) for q in QUESTIONS), "samples of a question differ"
    assert len(list(store.list(keys.exam_claims_prefix("shared")))) == 3


def test_exported_codes_are_taken_as_they_are(tmp_path: Path) -> None:
    config = json.loads((POLICY / "config.json").read_text())
    layout = layout_of(config, "float32")
    state = state_of(POLICY, layout)
    write_mlx_folder(state, POLICY, tmp_path / "export")
    assert state_of(tmp_path / "export", layout).state_id() == state.state_id()
    told = json.loads((tmp_path / "export" / "config.json").read_text())
    (tmp_path / "export" / "config.json").write_text(json.dumps({**told, "quantization": {"bits": 4, "group_size": 64}}))
    with pytest.raises(CheckpointError, match="4 bits"):
        state_of(tmp_path / "export", layout)


def test_task_comes_back_as_written(store: Store, tmp_path: Path) -> None:
    path = tmp_path / "task.json"
    write_task(task(store, "any", "mac-a", 5), path)
    assert read_task(path) == task(store, "any", "mac-a", 5)
