"""The grammar of tool calls, on the cases that regular expressions get wrong."""

import contextlib
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoa.chat.tools import BadCallError, ToolCall, parse_calls


def search(query: str) -> ToolCall:
    return ToolCall("search", {"query": query})


@pytest.mark.parametrize(
    ("text", "query"),
    [
        (r"[search(query='Crohn\'s disease')]", "Crohn's disease"),
        ("[search(query='Crohn's disease')]", "Crohn's disease"),
        ("[search(query='Doe, Jane')]", "Doe, Jane"),
        ('[search(query="a (b) [c] = d")]', "a (b) [c] = d"),
        (r'[search(query="say \"no\" \\ \n \x41\u0042")]', 'say "no" \\ \n AB'),
        ("search(query = 'brackets left out' ,)", "brackets left out"),
        ('  [ search ( query = " spaces " ) ]  ', " spaces "),
        ("[search(query='')]", ""),
        ("""[search(query="it's")]""", "it's"),
        (r"[search(query='\d+')]", r"\d+"),
    ],
)
def test_pythonic_call_keeps_its_argument_whole(text: str, query: str) -> None:
    assert parse_calls(text) == (search(query),)


@pytest.mark.parametrize(
    "text",
    ["[search(query='a'), search(query='b')]", 'search(query="a"), search(query="b")'],
)
def test_two_calls_come_in_order(text: str) -> None:
    assert parse_calls(text) == (search("a"), search("b"))


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "search", "arguments": {"query": "Crohn\'s, x"}}',
        '[{"name": "search", "arguments": {"query": "Crohn\'s, x"}}]',
    ],
)
def test_json_form_reads_the_same(text: str) -> None:
    assert parse_calls(text) == (search("Crohn's, x"),)


def test_every_kind_of_value_is_read() -> None:
    (call,) = parse_calls("[f(a=1, b=-2.5e1, c=True, d=None, e=[1, 'x', []], g={'k': {'l': false}})]")
    assert call.arguments == {"a": 1, "b": -25.0, "c": True, "d": None, "e": [1, "x", []], "g": {"k": {"l": False}}}
    assert parse_calls("[now()]") == (ToolCall("now", {}),)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "search",
        "[search(query='cut off",
        "[search(query='a'",
        "[search(query='a')",
        "[search(query='a')] and more",
        "[search('positional')]",
        "[search(query=unquoted words)]",
        "[search(query='a', query='b')]",
        "[search(query='a' n=2)]",
        "[search(query=1.2.3)]",
        r"[search(query='\xZZ')]",
        r"[search(query='\ud800')]",
        "[]",
        '[{"name": "search"',
        '[{"name": "search", "arguments": "a"}]',
        '[{"name": "search", "arguments": {"n": NaN}}]',
        '[{"name": "search", "arguments": {"n": 1e999}}]',
        "[search(n=1e999)]",
        '[{"name": "search", "arguments": {"query": "\\ud800"}}]',
        '[{"name": "search", "arguments": {"query": "a", "query": "b"}}]',
        '[{"name": "search", "arguments": {"a": ' + "[" * 17 + "]" * 17 + "}}]",
        "[search(a=" + "[" * 17 + "]" * 17 + ")]",
        "[{}]",
        '[{"arguments": {}}]',
        '[{"name": "search", "arguments": {}, "extra": 1}]',
        "[f(a=" + "[" * 50_000,
        '[{"name":' * 50_000,
        "[f(a=" + "9" * 50_000 + ")]",
        '[{"name": "f", "arguments": {"n": ' + "9" * 50_000 + "}}]",
    ],
)
def test_anything_else_is_one_defined_error(text: str) -> None:
    with pytest.raises(BadCallError):
        parse_calls(text)


@given(st.text(max_size=60))
def test_no_text_causes_another_error(text: str) -> None:
    for candidate in (text, f"[search(query='{text}')]", f"[{{{text}"):
        try:
            parse_calls(candidate)
        except BadCallError:
            continue


@given(st.text(st.characters(exclude_categories=("Cs",)), max_size=40))
def test_pythons_own_spelling_of_a_string_reads_back(text: str) -> None:
    assert parse_calls(f"[search(query={text!r})]") == (search(text),)


@pytest.mark.parametrize(
    "piece", ["'", "' ", "\\", "\\'", "[", "{", "f(", "f(a='", "a=1,", '"a":[', " ", "1", "-1.5e", "f(),", "\\u0041", '{"name":"f"},']
)
@pytest.mark.parametrize("opening", ["", "[f(a='", "[f(", '[{"name":"f","arguments":{"a":"'])
def test_reading_takes_time_in_proportion_to_the_text(opening: str, piece: str) -> None:
    """Whatever a policy writes holds up a Mac and the trainer no longer than as many tokens must."""

    def seconds(num: int) -> float:
        text, took = opening + piece * num, []
        for _ in range(3):
            begun = time.thread_time()
            with contextlib.suppress(BadCallError):
                parse_calls(text)
            took.append(time.thread_time() - begun)
        return min(took)

    assert seconds(16_000) < 40 * seconds(1_000) + 0.01  # 16 times the text; in proportion to its square it would be 256
