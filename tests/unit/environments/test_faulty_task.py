"""What a task's own code raises over a policy's text costs the episode, and never the sweep or the trainer."""

import ast
import re
from collections.abc import Callable

import pytest

from environments.base import Environment, Limits, Outcome, Question
from environments.dialogue import DialogueEnvironment, Progress, ToolDialogue
from stoa.chat.render import ChatRenderer, Message
from stoa.chat.tools import ToolCall
from stoa.contracts.errors import InfrastructureFaultError
from tests.unit.chat.conftest import character_tokenizer

TOKENIZER = character_tokenizer()


def turn(text: str) -> list[int]:
    return TOKENIZER.encode(f"{text}<|im_end|>", add_special_tokens=False).ids


def halves(call: ToolCall) -> Message | None:
    return Message("tool", str(int(str(call.arguments["number"])) // 2))


def number_of(question: Question, last: Progress) -> Outcome:
    reward = float(last.answer)
    return Outcome(reward, last.parts | dict.fromkeys(("exact_match", "cover", "strict_cover"), float(reward == 1.0)))


def made(
    *,
    answer_of: Callable[[str], str | None] = str.strip,
    run_tool: Callable[[ToolCall], Message | None] = halves,
    outcome: Callable[[Question, Progress], Outcome] = number_of,
) -> Environment:
    renderer, limits = ChatRenderer(TOKENIZER.to_str().encode()), Limits(3, 200, 2000)
    dialogue = ToolDialogue(renderer, limits, answer_of=answer_of, run_tool=run_tool, max_calls=2)
    questions = [Question("q", "What is it?", ("1",), "train", "q")]
    return DialogueEnvironment("faulty", questions, renderer, limits, dialogue, messages=lambda _: [Message("user", "?")], outcome=outcome)


def call(arguments: str) -> list[int]:
    return turn(f"<|tool_call_start|>[half({arguments})]<|tool_call_end|>")


def test_a_tool_that_works_is_answered() -> None:
    assert not made().reply("q", [call("number=8")]).done


@pytest.mark.parametrize("arguments", ["", "numbr=8", "number='x'", "number=[1]"])
def test_a_call_over_which_a_tool_raises_is_malformed(arguments: str) -> None:
    environment = made()
    assert environment.reply("q", [call(arguments)]).stop_reason == "malformed"
    outcome = environment.score("q", [call(arguments)])  # whose answer is "", and no number
    assert (outcome.reward, outcome.parts["malformed"], outcome.parts["score_failed"]) == (0.0, 1.0, 1.0)


@pytest.mark.parametrize(
    "work",
    [
        lambda text: str(ast.literal_eval(text)),
        lambda text: str(re.search(text, "")),
        lambda text: next(word for word in text.split() if word.isdigit()),
        lambda text: nowhere(text),  # noqa: F821 - a slip in a branch that no test of the task's author took
    ],
)
def test_code_a_pattern_and_a_slip_cost_the_episode_alone(work: Callable[[str], str]) -> None:
    environment = made(run_tool=lambda call: Message("tool", work(str(call.arguments["number"]))), answer_of=work)
    assert environment.reply("q", [call("number='(2 +'")]).stop_reason == "malformed"
    assert environment.reply("q", [turn("(2 +")]).stop_reason == "malformed"
    assert environment.score("q", [turn("(2 +")]).reward == 0.0


def test_a_text_over_which_the_search_for_an_answer_raises_is_malformed() -> None:
    environment = made(answer_of=lambda text: text.split(":")[1])
    assert environment.reply("q", [turn("it is 1")]).stop_reason == "malformed"
    assert environment.reply("q", [turn("it is: 1")]).stop_reason == "answered"


@pytest.mark.parametrize("answer", ["one", "", "nan", "inf", "-inf", "1e999"])
def test_a_score_that_raises_or_is_no_number_is_nought_and_counted(answer: str) -> None:
    outcome = made().score("q", [turn(answer)])
    assert outcome.reward == outcome.parts["strict_cover"] == outcome.parts["exact_match"] == outcome.parts["cover"] == 0.0
    assert outcome.parts["score_failed"] == 1.0
    assert "score_failed" not in made().score("q", [turn("1")]).parts


def test_an_outage_of_a_tool_is_no_fault_of_the_policy() -> None:
    def away(_: ToolCall) -> Message | None:
        raise InfrastructureFaultError("the server is away")

    with pytest.raises(InfrastructureFaultError):
        made(run_tool=away).reply("q", [call("number=8")])
