"""What an export is compared on: questions of the run's own task where they are here, plain sentences elsewhere."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cli.export import MAX_PROMPT_TOKENS, NUM_PROMPTS, prompts_for
from environments import registry
from stoa.config.load import PROJECT_ROOT
from stoa.config.run import Environment, RunConfig

POLICY = PROJECT_ROOT / "environments/search/policy"


def run_of(name: str, **settings: Any) -> Any:
    return SimpleNamespace(config=RunConfig(environment=Environment(name=name, settings=settings)))


def test_ten_held_out_questions_of_the_runs_task() -> None:
    of, rows = prompts_for(run_of("search"), POLICY)
    environment = registry.create("search", {}, (POLICY / "tokenizer.json").read_bytes())
    held_out = [list(environment.prompt_ids(one)) for one in environment.question_ids("held_out")]
    assert of == "search" and len(rows) == NUM_PROMPTS == 10
    assert len({tuple(row) for row in rows}) == 10 and all(row in held_out for row in rows)
    assert rows[0] == held_out[0] and rows[5] == held_out[len(held_out) // 2]


@pytest.mark.parametrize("name", ["nobody-has-it", "papersearchqa"])
def test_plain_sentences_where_the_task_cannot_be_made_here(name: str, tmp_path: Path) -> None:
    settings = {"index": str(tmp_path / "none")} if name == "papersearchqa" else {}
    of, rows = prompts_for(run_of(name, **settings), POLICY)
    assert of == "plain sentences" and len(rows) == 10
    assert all(0 < len(row) <= MAX_PROMPT_TOKENS for row in rows) and len({tuple(row) for row in rows}) == 10
