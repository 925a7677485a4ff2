"""A taskset of the verifiers package runs unchanged: against the package where it is installed, else what stands for it."""

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from environments import registry
from environments.base import Environment, EpisodeOverError, Reply
from environments.verifiers_v1 import CORRECTION
from stoa.contracts.errors import ConfigError, InfrastructureFaultError, MissingExtraError, UnknownNameError
from tests.unit.chat.conftest import SPECIAL, character_tokenizer

HERE = Path(__file__).parent
STAND_IN = HERE.parents[1] / "fakes" / "verifiers_package"
TOKENIZER: Tokenizer = character_tokenizer((*SPECIAL, "<think>", "</think>"))
SETTINGS = {"taskset": "star-sums", "config": '{"count": 4}', "num_held_out": 1, "solved_at": 1.5, "max_episode_tokens": 20_000}


def write(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False).ids


def read(ids: tuple[int, ...]) -> str:
    return TOKENIZER.decode(list(ids), skip_special_tokens=False)


def create(**settings: object) -> Environment:
    return registry.create("verifiers", {**SETTINGS, **settings}, TOKENIZER.to_str().encode())  # pyright: ignore


def calls(text: str) -> list[int]:
    return write(f"<|tool_call_start|>[{text}]<|tool_call_end|><|im_end|>")


@pytest.fixture(scope="module", autouse=True)
def package() -> Iterator[None]:
    real = importlib.util.find_spec("verifiers") is not None
    added = [str(HERE / "brought"), *([] if real else [str(STAND_IN)])]
    sys.path[:0] = added
    importlib.invalidate_caches()
    yield
    for path in added:
        sys.path.remove(path)
    for name in [one for one in sys.modules if one == "star_sums" or (not real and one.split(".")[0] == "verifiers")]:
        del sys.modules[name]


@pytest.fixture(scope="module")
def stars(package: None) -> Environment:
    return create()


def test_tasks_become_questions_and_the_last_are_held_out(stars: Environment) -> None:
    assert stars.question_ids("train") == ["t000000", "t000001", "t000002"]
    assert (stars.question_ids("held_out"), stars.question_ids("transfer")) == (["t000003"], [])
    question = stars.question("t000003")
    assert (question.text, question.split) == ("How far are altair and deneb together?", "held_out")
    with pytest.raises(UnknownNameError):
        stars.prompt_ids("t000004")


def test_prompt_lists_the_tools_under_the_packages_names(stars: Environment) -> None:
    prompt = read(stars.prompt_ids("t000000"))
    assert prompt.startswith("<|startoftext|><|im_start|>system\nBe exact.\nList of tools: [")
    for piece in (
        '{"name": "add", "description": "Add two numbers."',
        '{"name": "distance", "description": "Light years',
        '"required": ["first"]',
    ):
        assert piece in prompt
    assert prompt.endswith("<|im_start|>user\nHow far are altair and deneb together?<|im_end|>\n<|im_start|>assistant\n")


def test_tools_are_called_and_the_tasksets_own_reward_is_paid(stars: Environment) -> None:
    turns = [calls("distance(star='altair'), distance(star='deneb')"), calls("add(first=17, second='1500')"), write("1517<|im_end|>")]
    told = [read(stars.reply("t000000", turns[: k + 1]).ids) for k in range(2)]
    assert "tool\n17<|im_end|>\n<|im_start|>tool\n1500<|im_end|>" in told[0]
    assert 'tool\n{"sum": 1517}<|im_end|>' in told[1]
    assert stars.reply("t000000", turns) == Reply((), True, "answered")
    outcome = stars.score("t000000", turns)
    assert outcome.reward == 1.5
    assert outcome.parts == {
        "vf_right": 1.0, "vf_looked_up": 1.0, "vf_turns": 3.0, "exact_match": 1.0, "cover": 1.0, "strict_cover": 1.0, "searched": 1.0,
        "num_calls": 3.0, "malformed": 0.0, "num_malformed": 0.0, "score_failed": 0.0,
    }  # fmt: skip
    guessed = stars.score("t000000", [write("1517<|im_end|>")])
    assert (guessed.reward, guessed.parts["strict_cover"], guessed.parts["vf_turns"]) == (1.0, 0.0, 1.0)


def test_what_a_tool_refuses_is_said_and_what_it_cannot_reach_is_no_episode(stars: Environment) -> None:
    for text, said in (
        ("distance(star='sun')", "Error: 'sun'"),
        ("add(first='x')", "Error: 1 validation error"),
        ("add()", "Error: 1 val"),
    ):
        assert f"tool\n{said}" in read(stars.reply("t000000", [calls(text)]).ids)
    with pytest.raises(InfrastructureFaultError):
        stars.reply("t000000", [calls("outage()")])


def test_malformed_turn_is_corrected_once_and_is_in_the_trace(stars: Environment) -> None:
    bad = calls("lookup(star='vega')")
    assert CORRECTION.content in read(stars.reply("t000000", [bad]).ids)
    outcome = stars.score("t000000", [bad, write("1517<|im_end|>")])
    assert (outcome.reward, outcome.parts["num_malformed"], outcome.parts["vf_turns"]) == (1.0, 1.0, 2.0)
    assert stars.reply("t000000", [bad, bad]).stop_reason == "malformed"
    assert stars.score("t000000", [bad, bad]).reward == 0.0
    with pytest.raises(EpisodeOverError):
        stars.score("t000000", [bad, bad, bad])


def test_reward_that_fails_pays_nothing_and_is_counted(stars: Environment) -> None:
    outcome = stars.score("t000000", [write("explode<|im_end|>")])
    assert (outcome.reward, outcome.parts["score_failed"]) == (0.0, 1.0)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"taskset": ""}, "no taskset"),
        ({"taskset": "no-such-thing"}, "cannot be loaded"),
        ({"config": "{"}, "cannot be loaded"),
        ({"config": '{"count": "many"}'}, "cannot be loaded"),
        ({"config": '{"count": 0}'}, "has no task"),
        ({"num_held_out": 4}, "are held out"),
        ({"num_tasks": 1}, "are held out"),
    ],
)
def test_taskset_that_cannot_run_is_refused(settings: dict[str, object], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        create(**settings)


@pytest.mark.parametrize(
    ("name", "value", "match"),
    [
        ("NEEDS_CONTAINER", True, "needs a container"),
        ("finalize", lambda self, trace, runtime: None, "needs a set-up"),
        ("looked_up", lambda self, trace: 1.0, "async def"),
    ],
)
def test_taskset_that_needs_more_is_refused_by_name(stars: Environment, name: str, value: object, match: str) -> None:
    task, vf = sys.modules["star_sums"].SumTask, sys.modules["verifiers.v1"]
    changed = vf.reward(value) if name == "looked_up" else value
    brought = type("Changed", (task,), {name: changed, "__module__": "star_sums"})
    kept = sys.modules["star_sums"].SumTask
    sys.modules["star_sums"].SumTask = brought
    try:
        with pytest.raises(ConfigError, match=match):
            create()
    finally:
        sys.modules["star_sums"].SumTask = kept


def test_without_the_package_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "verifiers.v1", None)
    with pytest.raises(MissingExtraError) as caught:
        create()
    assert "pip install verifiers" in caught.value.hint
