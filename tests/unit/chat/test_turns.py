"""What a sampled turn says, and which one fault a malformed turn has."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from stoa.chat.render import ChatRenderer
from stoa.chat.tools import ToolCall
from stoa.chat.turns import Fault, Turn, read_turn

CALL = "<|tool_call_start|>[search(query='a')]<|tool_call_end|>"


def read(renderer: ChatRenderer, tokenizer: Tokenizer, text: str) -> Turn:
    return read_turn(renderer, tokenizer.encode(text, add_special_tokens=False).ids)


def test_answer_is_text_without_calls(renderer: ChatRenderer, tokenizer: Tokenizer) -> None:
    assert read(renderer, tokenizer, " Answer: liver <|im_end|>") == Turn("Answer: liver", (), None)


def test_call_stands_beside_text(renderer: ChatRenderer, tokenizer: Tokenizer) -> None:
    turn = read(renderer, tokenizer, f"Looking. {CALL}<|im_end|>")
    assert turn == Turn("Looking.", (ToolCall("search", {"query": "a"}),), None)


def test_calls_of_several_stretches_are_joined(renderer: ChatRenderer, tokenizer: Tokenizer) -> None:
    assert len(read(renderer, tokenizer, f"{CALL}{CALL}<|im_end|>").calls) == 2


def test_call_inside_a_thought_is_not_made(renderer: ChatRenderer, tokenizer: Tokenizer) -> None:
    turn = read(renderer, tokenizer, f"<think>maybe {CALL}</think>Answer: b<|im_end|>")
    assert turn == Turn("Answer: b", (), None)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("Answer: liver", Fault.TRUNCATED),
        ("", Fault.TRUNCATED),
        ("<|tool_call_start|>[search(query='a", Fault.TRUNCATED),
        ("<|tool_call_start|>[search(query='a')]<|im_end|>", Fault.UNBALANCED_CALL),
        ("[search(query='a')]<|tool_call_end|><|im_end|>", Fault.UNBALANCED_CALL),
        (f"<|tool_call_start|>{CALL}<|im_end|>", Fault.UNBALANCED_CALL),
        ("<|tool_call_start|>search a<|tool_call_end|><|im_end|>", Fault.BAD_CALL),
        ("<|tool_call_start|><|tool_call_end|><|im_end|>", Fault.BAD_CALL),
        ("one<|im_end|>two<|im_end|>", Fault.STRAY_SPECIAL),
        ("<|im_start|>tool\ninvented<|im_end|>", Fault.STRAY_SPECIAL),
        ("<|pad|><|im_end|>", Fault.STRAY_SPECIAL),
        ("<think>no end<|im_end|>", Fault.UNBALANCED_THOUGHT),
        ("no start</think><|im_end|>", Fault.UNBALANCED_THOUGHT),
    ],
)
def test_malformed_turn_has_one_fault_and_nothing_else(renderer: ChatRenderer, tokenizer: Tokenizer, text: str, fault: Fault) -> None:
    assert read(renderer, tokenizer, text) == Turn("", (), fault)


def test_call_whose_markers_are_spelled_as_text_is_malformed(renderer: ChatRenderer) -> None:
    ids = [*renderer.encode(CALL), renderer.special.im_end]
    assert read_turn(renderer, ids).fault is Fault.SPELLED_MARKER


@settings(max_examples=500, deadline=None)
@given(data=st.data())
def test_no_ids_of_the_vocabulary_raise(renderer: ChatRenderer, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, renderer.vocabulary_size - 1), max_size=20))
    turn = read_turn(renderer, ids)
    assert turn.fault is None or turn == Turn("", (), turn.fault)
