"""Recorded histories replay with today's code: a workflow that runs somewhere would go on after an update."""

import json
from pathlib import Path

import pytest
from temporalio.client import WorkflowHistory
from temporalio.worker import Replayer

from activities.connection import DATA_CONVERTER
from workflows.evaluation import EvaluationWorkflow
from workflows.mac_session import MacSessionWorkflow
from workflows.run import RunWorkflow

HISTORIES = sorted((Path(__file__).parents[1] / "histories").glob("*.json"))


def read(path: Path) -> WorkflowHistory:
    tree = json.loads(path.read_text())
    return WorkflowHistory.from_json(tree["workflow_id"], tree["history"])


def replayer() -> Replayer:
    return Replayer(workflows=[RunWorkflow, MacSessionWorkflow, EvaluationWorkflow], data_converter=DATA_CONVERTER)


def test_histories_of_all_workflows_are_kept() -> None:
    assert {path.stem.split("_")[0] for path in HISTORIES} == {"run", "session", "evaluation"}


@pytest.mark.parametrize("path", HISTORIES, ids=lambda path: path.stem)
async def test_recorded_history_replays(path: Path) -> None:
    await replayer().replay_workflow(read(path))


async def test_changed_order_of_commands_is_noticed() -> None:
    history = read(next(path for path in HISTORIES if path.stem == "run_first"))
    text = history.to_json().replace("acquire_trainer", "acquire_other")
    with pytest.raises(Exception, match="TMPRL1100"):
        await replayer().replay_workflow(WorkflowHistory.from_json(history.workflow_id, text))
