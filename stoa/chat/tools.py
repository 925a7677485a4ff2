"""The grammar of tool calls: the text between the two call markers, read into calls.

Two forms are known. Pythonic, a list of calls with keyword arguments: `[search(query="a", n=3), search(query='b')]`
(the brackets may be left out). JSON: an object with `name` and `arguments`, or a list of such objects. Anything else
is a BadCallError. Nothing is executed and no tool is known here.

    calls   = "[" call { "," call } "]" | call { "," call }
    call    = name "(" [ name "=" value { "," name "=" value } ] ")"
    value   = string | number | True | False | None | "[" values "]" | "{" pairs "}"
    string  = quote characters quote, with Python's escapes. A quote character that is not followed by `, ) ] } :` or
              the end is taken literally, because chat templates write 'Crohn's disease' unescaped.
"""

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias, cast

Value: TypeAlias = "str | int | float | bool | list[Value] | dict[str, Value] | None"

MAX_DEPTH = 16
_SURROGATE = re.compile("[\ud800-\udfff]")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.]*")
_NUMBER = re.compile(r"-?\d{1,18}(\.\d{1,18})?([eE][+-]?\d{1,3})?(?![A-Za-z0-9_.])")
_CLOSING = re.compile(r"\s*(?:[,)\]}:]|\Z)")
"""What follows a quote character that ends its string."""
_WORDS: Mapping[str, Value] = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "0": "\0", "\n": ""}
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}


class BadCallError(ValueError):
    """The text between the markers is no tool call."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool's name and its arguments by keyword."""

    name: str
    arguments: Mapping[str, Value]


def parse_calls(text: str) -> tuple[ToolCall, ...]:
    """Read all calls of one marked stretch, at least one. Raises BadCallError."""
    stripped = text.strip()
    if re.match(r"\[?\s*\{", stripped):
        return _from_json(stripped)
    reader = _Reader(stripped)
    bracketed = reader.take("[")
    calls = [_call(reader)]
    while reader.take(","):
        calls.append(_call(reader))
    if bracketed:
        reader.expect("]")
    reader.expect_end()
    return tuple(calls)


def _from_json(text: str) -> tuple[ToolCall, ...]:
    try:
        document = json.loads(text, parse_constant=_refuse_constant, parse_float=_finite, object_pairs_hook=_distinct)
    except (ValueError, RecursionError) as error:
        raise BadCallError(f"not JSON: {error}") from error
    entries = cast("list[object]", document if isinstance(document, list) else [document])
    if not entries:
        raise BadCallError("expected a call")
    calls: list[ToolCall] = []
    for entry in entries:
        if not isinstance(entry, dict):
            raise BadCallError("a call is not an object")
        fields = cast("dict[str, Value]", entry)
        name, arguments = fields.get("name"), fields.get("arguments", {})
        if not isinstance(name, str) or not isinstance(arguments, dict) or set(fields) - {"name", "arguments"}:
            raise BadCallError("a call needs a name and arguments, and nothing else")
        _check(arguments, 0)
        calls.append(ToolCall(name, arguments))
    return tuple(calls)


def _refuse_constant(name: str) -> Value:
    raise BadCallError(f"{name} is not a value")


def _finite(number: str) -> float:
    value = float(number)
    if not math.isfinite(value):
        raise BadCallError(f"{number} is too large")
    return value


def _distinct(pairs: list[tuple[str, Value]]) -> dict[str, Value]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise BadCallError("a name is given twice")
    return found


def _check(value: Value, depth: int) -> None:
    """Refuse in JSON what the other form cannot say: texts that are not well formed, and values nested too deeply."""
    if depth > MAX_DEPTH:
        raise BadCallError("values are nested too deeply")
    if isinstance(value, str):
        if _SURROGATE.search(value):
            raise BadCallError("an escape that is no character")
    elif isinstance(value, list | dict):
        inside = [*value, *value.values()] if isinstance(value, dict) else value
        for one in inside:
            _check(one, depth + 1)


class _Reader:
    """A position in a text. `take` skips white space before it looks."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0

    def skip_space(self) -> None:
        while self.at < len(self.text) and self.text[self.at].isspace():
            self.at += 1

    def take(self, token: str) -> bool:
        self.skip_space()
        found = self.text.startswith(token, self.at)
        self.at += len(token) if found else 0
        return found

    def expect(self, token: str) -> None:
        if not self.take(token):
            raise BadCallError(f"expected {token} at {self.at}")

    def match(self, pattern: re.Pattern[str]) -> str | None:
        self.skip_space()
        found = pattern.match(self.text, self.at)
        if found is None:
            return None
        self.at = found.end()
        return found.group()

    def expect_end(self) -> None:
        self.skip_space()
        if self.at != len(self.text):
            raise BadCallError(f"something follows the call at {self.at}")


def _call(reader: _Reader) -> ToolCall:
    name = reader.match(_NAME)
    if name is None:
        raise BadCallError(f"expected the name of a tool at {reader.at}")
    reader.expect("(")
    arguments = _pairs(reader, ")", lambda: _keyword(reader), "=", 0)
    return ToolCall(name, arguments)


def _keyword(reader: _Reader) -> str:
    key = reader.match(_NAME)
    if key is None:
        raise BadCallError(f"expected the name of an argument at {reader.at}")
    return key


def _pairs(reader: _Reader, closing: str, key: Callable[[], str], between: str, depth: int) -> dict[str, Value]:
    pairs: dict[str, Value] = {}
    while not reader.take(closing):
        if pairs:
            reader.expect(",")
            if reader.take(closing):
                break
        name = key()
        if name in pairs:
            raise BadCallError(f"{name} is given twice")
        reader.expect(between)
        pairs[name] = _value(reader, depth + 1)
    return pairs


def _value(reader: _Reader, depth: int) -> Value:
    if depth > MAX_DEPTH:
        raise BadCallError("values are nested too deeply")
    reader.skip_space()
    if reader.text.startswith(("'", '"'), reader.at):
        return _string(reader)
    if reader.take("["):
        return _list(reader, depth)
    if reader.take("{"):
        return cast("Value", _pairs(reader, "}", lambda: _string(reader), ":", depth))
    number = reader.match(_NUMBER)
    if number is not None:
        return int(number) if re.fullmatch(r"-?\d+", number) else _finite(number)
    word = reader.match(_NAME)
    if word is None or word not in _WORDS:
        raise BadCallError(f"expected a value at {reader.at}")
    return _WORDS[word]


def _list(reader: _Reader, depth: int) -> list[Value]:
    values: list[Value] = []
    while not reader.take("]"):
        if values:
            reader.expect(",")
            if reader.take("]"):
                break
        values.append(_value(reader, depth + 1))
    return values


def _string(reader: _Reader) -> str:
    reader.skip_space()
    text, at = reader.text, reader.at
    quote = text[at : at + 1]
    if quote not in ("'", '"'):
        raise BadCallError(f"expected a string at {at}")
    out: list[str] = []
    at += 1
    while at < len(text):
        char = text[at]
        if char == "\\":
            piece, at = _escape(text, at + 1)
            out.append(piece)
        elif char == quote and _CLOSING.match(text, at + 1):
            reader.at = at + 1
            return "".join(out)
        else:
            out.append(char)
            at += 1
    raise BadCallError("a string has no end")


def _escape(text: str, at: int) -> tuple[str, int]:
    char = text[at : at + 1]
    if char in _HEX_DIGITS:
        digits = text[at + 1 : at + 1 + _HEX_DIGITS[char]]
        if not re.fullmatch(f"[0-9a-fA-F]{{{_HEX_DIGITS[char]}}}", digits):
            raise BadCallError(f"a broken escape at {at}")
        code = int(digits, 16)
        if code > 0x10FFFF or 0xD800 <= code <= 0xDFFF:
            raise BadCallError(f"an escape that is no character at {at}")
        return chr(code), at + 1 + len(digits)
    if char in _ESCAPES:
        return _ESCAPES[char], at + 1
    if char in ("\\", "'", '"', "/"):
        return char, at + 1
    return "\\" + char, at + 1
