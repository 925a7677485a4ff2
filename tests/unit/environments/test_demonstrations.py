"""Demonstrations: each by itself, the same everywhere, and refused by line when a file holds nonsense."""

import json
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from environments.demonstrations import Written, demonstrate, read_dialogues
from environments.registry import create
from environments.search.vocabulary import build_tokenizer
from environments.teachers import names, teach
from stoa.chat.render import ChatRenderer, Message
from stoa.chat.tools import ToolCall
from stoa.chat.turns import read_turn
from stoa.contracts.errors import FormatError, UnknownNameError

TOKENIZER = build_tokenizer().to_str().encode()


SPECIAL = ["<|startoftext|>", "<|im_start|>", "<|im_end|>", "<|tool_call_start|>", "<|tool_call_end|>"]


@pytest.fixture(scope="module")
def renderer() -> ChatRenderer:
    """Of a tokenizer that spells anything, byte by byte."""
    spelled = Tokenizer(models.BPE({letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
    spelled.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    spelled.decoder = decoders.ByteLevel()
    spelled.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    return ChatRenderer(spelled.to_str().encode())


def test_a_demonstration_does_not_depend_on_what_was_asked_before() -> None:
    one, other = (teach("search", TOKENIZER, num_steps=600, batch_rows=64, seed=2) for _ in range(2))
    wanted = {(step, row): one.at(step, row) for step, row in [(0, 0), (0, 63), (24, 1), (25, 1), (599, 5)]}
    assert {at: other.at(*at) for at in reversed(wanted)} == wanted
    assert len({tuple(found.ids) for found in wanted.values()}) > 1


def test_practice_ends_at_four_fifths_of_the_steps() -> None:
    lessons = teach("search", TOKENIZER, num_steps=10, batch_rows=100, seed=0)

    def searching(step: int) -> float:
        rows = [lessons.at(step, row) for row in range(100)]
        return sum(len({i for i, w in enumerate(found.weights) if w and not found.weights[i - 1]}) == 2 for found in rows) / 100

    # 0.8 and 0.21, four standard deviations of 100 draws.
    assert searching(7) == pytest.approx(0.8, abs=0.16)
    assert searching(8) == pytest.approx(0.21, abs=0.163)


def test_an_answer_alone_is_a_demonstration_where_the_environment_is_answered_at_once() -> None:
    environment = create("copy_word", {}, TOKENIZER)
    lessons = teach("copy_word", TOKENIZER, num_steps=5, batch_rows=3, seed=0)
    prompts = {tuple(environment.prompt_ids(question_id)) for question_id in environment.question_ids("train")}
    for row in range(3):
        found = lessons.at(0, row)
        start = found.weights.index(1.0)
        assert tuple(found.ids[:start]) in prompts and set(found.weights[start:]) == {1.0}
        assert found.ids[-1] in environment.stop_ids


def test_an_environment_that_nobody_can_teach_is_named() -> None:
    with pytest.raises(UnknownNameError, match="serch"):
        teach("serch", TOKENIZER, num_steps=1, batch_rows=1, seed=0)
    assert names() == ["copy_word", "search"]


def test_every_pass_shows_each_dialogue_once_in_another_order(renderer: ChatRenderer) -> None:
    dialogues = [demonstrate(renderer, [Message("user", word), Message("assistant", word)]) for word in ("inhibits", "treats", "causes")]
    source = Written(dialogues, seed=1, batch_rows=3)
    passes = [[tuple(source.at(step, row).ids) for row in range(3)] for step in range(8)]
    assert all(sorted(shown) == sorted(passes[0]) for shown in passes) and len({tuple(shown) for shown in passes}) > 1


def test_a_written_dialogue_weighs_what_the_policy_says_and_nothing_else(renderer: ChatRenderer, tmp_path: Path) -> None:
    line = {
        "messages": [
            {"role": "user", "content": "which"},
            {"role": "assistant", "content": "", "calls": [{"name": "search", "arguments": {"query": "inhibits"}}]},
            {"role": "tool", "content": "nothing"},
            {"role": "assistant", "content": "Answer: treats"},
        ],
        "weight": 0.5,
    }
    path = tmp_path / "dialogues.jsonl"
    path.write_text(json.dumps(line) + "\n\n" + json.dumps(line | {"weight": 2}) + "\n")
    first, second = read_dialogues(path, renderer)
    assert first.ids == second.ids
    assert {weight for weight in first.weights if weight} == {0.5} and {weight for weight in second.weights if weight} == {2.0}
    starts = [i for i, w in enumerate(first.weights) if w and not first.weights[i - 1]]
    assert len(starts) == 2
    end = next(i for i in range(starts[0], len(first.ids)) if not first.weights[i])
    call = read_turn(renderer, first.ids[starts[0] : end])
    assert call.fault is None and call.calls == (ToolCall("search", {"query": "inhibits"}),)
    assert read_turn(renderer, first.ids[starts[1] :]).fault is None
    # The dialogue's ids are those of an engine: prompt, sampled turn, what follows, sampled turn.
    shown = list(renderer.prompt([Message("user", "which")]))
    follow = list(renderer.follow([Message("tool", "nothing")]))
    assert first.ids == shown + first.ids[starts[0] : end] + follow + first.ids[starts[1] :]


@pytest.mark.parametrize(
    "line, reason",
    [
        ("{", "not a dialogue"),
        ("[]", "not a dialogue"),
        ('{"messages": []}', "last message"),
        ('{"messages": [{"role": "user", "content": "a"}]}', "last message"),
        ('{"messages": [{"role": "assistant", "content": "a"}, {"role": "user", "content": "a"}]}', "last message"),
        ('{"messages": [{"role": "robot", "content": "a"}]}', "robot"),
        ('{"messages": [{"role": "assistant", "content": 3}]}', "3"),
        ('{"messages": [{"role": "user", "content": "a", "calls": [{"name": "f"}]}]}', "call by user"),
        ('{"messages": [{"role": "assistant", "calls": [{"arguments": {}}]}]}', "lacks 'name'"),
        ('{"messages": [{"role": "assistant", "content": "a"}], "weight": 0}', "weight"),
        ('{"messages": [{"role": "assistant", "content": "a"}], "weight": NaN}', "weight"),
        ('{"message": []}', "message is not a field"),
        ('{"weight": 1}', "lacks 'messages'"),
    ],
)
def test_a_line_that_is_no_dialogue_is_named(line: str, reason: str, renderer: ChatRenderer, tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "a"}]}\n' + line + "\n")
    with pytest.raises(FormatError, match=reason) as caught:
        list(read_dialogues(path, renderer))
    assert f"{path}:2" in caught.value.message


def test_an_empty_file_teaches_nothing() -> None:
    with pytest.raises(FormatError, match="no demonstration"):
        Written([], seed=0, batch_rows=1)


def test_words_the_tokenizer_cannot_spell_are_not_taught(tmp_path: Path) -> None:
    path = tmp_path / "foreign.jsonl"
    path.write_text('{"messages": [{"role": "user", "content": "which"}, {"role": "assistant", "content": "a \'quoted\' word"}]}\n')
    with pytest.raises(FormatError, match="no well-formed turn"):
        list(read_dialogues(path, ChatRenderer(TOKENIZER)))
