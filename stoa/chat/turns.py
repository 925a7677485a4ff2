"""What one sampled turn says: text, tool calls, or one defined fault.

The markers of a call count only as special ids, never as text that spells them, and never inside a thought. Which
tools exist, and what a turn without a call means, is the environment's business.
"""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from stoa.chat.render import ChatRenderer
from stoa.chat.tools import BadCallError, ToolCall, parse_calls

_THOUGHT_MARKS = re.compile(r"(</?think>)")
_SPELLED_MARKS = ("<|tool_call_start|>", "<|tool_call_end|>")


class Fault(StrEnum):
    """Why a sampled turn is malformed."""

    TRUNCATED = "truncated"
    STRAY_SPECIAL = "stray_special"
    SPELLED_MARKER = "spelled_marker"
    UNBALANCED_CALL = "unbalanced_call"
    UNBALANCED_THOUGHT = "unbalanced_thought"
    BAD_CALL = "bad_call"


@dataclass(frozen=True, slots=True)
class Turn:
    """A turn's text outside of thoughts and calls, its calls, and its fault (None if it is well formed)."""

    text: str
    calls: tuple[ToolCall, ...]
    fault: Fault | None


class _FaultyTurnError(Exception):
    def __init__(self, fault: Fault) -> None:
        super().__init__(fault)
        self.fault = fault


def read_turn(renderer: ChatRenderer, ids: Sequence[int]) -> Turn:
    """Read the sampled ids of one turn, which is complete only if it ends with `im_end`. Never raises."""
    try:
        return _read(renderer, ids)
    except _FaultyTurnError as error:
        return Turn("", (), error.fault)
    except BadCallError:
        return Turn("", (), Fault.BAD_CALL)


def _read(renderer: ChatRenderer, ids: Sequence[int]) -> Turn:
    if not ids or ids[-1] != renderer.special.im_end:
        raise _FaultyTurnError(Fault.TRUNCATED)
    text: list[str] = []
    calls: list[ToolCall] = []
    call: list[str] | None = None
    thinking = False
    for piece in _pieces(renderer, ids[:-1]):
        if renderer.special.tool_call_end is None and piece == renderer.special.tool_call_start:
            # It only says that a call follows.
            continue
        if piece == renderer.special.tool_call_start and not thinking:
            if call is not None:
                raise _FaultyTurnError(Fault.UNBALANCED_CALL)
            call = []
        elif piece == renderer.special.tool_call_end and not thinking:
            if call is None:
                raise _FaultyTurnError(Fault.UNBALANCED_CALL)
            calls.extend(parse_calls("".join(call)))
            call = None
        elif call is not None:
            call.append(str(piece))
        elif piece in ("<think>", "</think>"):
            if thinking == (piece == "<think>"):
                raise _FaultyTurnError(Fault.UNBALANCED_THOUGHT)
            thinking = piece == "<think>"
        elif not thinking:
            text.append(str(piece))
    if call is not None or thinking:
        raise _FaultyTurnError(Fault.UNBALANCED_CALL if call is not None else Fault.UNBALANCED_THOUGHT)
    if any(mark in part for part in text for mark in _SPELLED_MARKS):
        raise _FaultyTurnError(Fault.SPELLED_MARKER)
    said = "".join(text).strip()
    if renderer.family == "llama3" and said.startswith("{"):
        return Turn("", parse_calls(_as_arguments(said)), None)
    return Turn(said, tuple(calls), None)


def _as_arguments(text: str) -> str:
    """The call that is a Llama's whole turn, `{"name": .., "parameters": {..}}`, with the name that `parse_calls` knows."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadCallError(f"not JSON: {error}") from error
    if not isinstance(found, dict) or "arguments" in found:
        raise BadCallError("a call needs a name and parameters, and nothing else")
    return json.dumps({"arguments" if name == "parameters" else name: value for name, value in found.items()})


def _pieces(renderer: ChatRenderer, ids: Sequence[int]) -> Iterator[int | str]:
    """The turn as call markers (ids), thought marks and stretches of text."""
    markers = (renderer.special.tool_call_start, renderer.special.tool_call_end)
    stretch: list[int] = []
    for token_id in (*ids, None):
        if token_id is not None and token_id not in markers:
            if renderer.is_special(token_id) and not _THOUGHT_MARKS.fullmatch(renderer.decode([token_id])):
                raise _FaultyTurnError(Fault.STRAY_SPECIAL)
            stretch.append(token_id)
            continue
        if stretch:
            yield from (part for part in _THOUGHT_MARKS.split(renderer.decode(stretch)) if part)
            stretch = []
        if token_id is not None:
            yield token_id
