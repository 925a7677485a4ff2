"""How families of checkpoints write a dialogue: the tokens around a message, where tools are listed, how calls look.

A checkpoint's family is told by the special tokens of its tokenizer. LFM2's form is the one that policies of a run have;
the others are for checkpoints that are only examined. The forms are those of the families' own chat templates: Qwen 3's (an
older Qwen's adds a system message of its own, which is left out here) and Llama 3.1's with the template's date.

A message comes out as a role and pieces: text, and ids of special tokens between it.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Final, Literal

from stoa.chat.tools import ToolCall, Value
from stoa.contracts.errors import CheckpointError

Role = Literal["system", "user", "assistant", "tool"]
Family = Literal["lfm2", "qwen", "llama3"]
Piece = str | int
THOUGHT_OPEN, THOUGHT_CLOSE = "<think>", "</think>"
NAMES: Final[Mapping[Family, Mapping[str, str]]] = {
    "lfm2": {
        "startoftext": "<|startoftext|>",
        "im_start": "<|im_start|>",
        "im_end": "<|im_end|>",
        "tool_call_start": "<|tool_call_start|>",
        "tool_call_end": "<|tool_call_end|>",
    },
    "qwen": {"im_start": "<|im_start|>", "im_end": "<|im_end|>", "tool_call_start": "<tool_call>", "tool_call_end": "</tool_call>"},
    "llama3": {
        "startoftext": "<|begin_of_text|>",
        "im_start": "<|start_header_id|>",
        "role_end": "<|end_header_id|>",
        "im_end": "<|eot_id|>",
        "tool_call_start": "<|python_tag|>",
    },
}
"""What each family calls the tokens that structure a dialogue; of those that are left out it has none."""
_QWEN_TOOLS: Final = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>{tools}\n</tools>\n\n"
    "For each function call, return a json object with function name and arguments within ",
    "",
    " XML tags:\n",
)
"""Before, between and after an empty call's marks; then a call follows."""
_QWEN_CALL: Final = '\n{{"name": {name}, "arguments": {body}}}\n'
_LLAMA_SYSTEM: Final = "Cutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\n"
_LLAMA_TOOLS: Final = (
    "Given the following functions, please respond with a JSON for a function call "
    "with its proper arguments that best answers the given prompt.\n\n"
    'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.'
    "Do not use variables.\n\n"
)


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a dialogue. A tool's result has the role `tool`; thoughts and calls are an assistant's.

    tools: JSON of each tool that a system message lists.
    """

    role: Role
    content: str
    thoughts: str = ""
    calls: tuple[ToolCall, ...] = ()
    tools: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SpecialIds:
    """The ids that structure a dialogue, under the names the LFM2 family gives them. None: the family has no such token."""

    startoftext: int | None
    im_start: int
    im_end: int
    tool_call_start: int
    tool_call_end: int | None
    role_end: int | None = None
    """Stands between the role and the text."""


def family_of(id_of: Callable[[str], int | None]) -> tuple[Family, SpecialIds]:
    """The family whose tokens a tokenizer has. Raises CheckpointError that names what the likeliest one lacks."""
    missing = {family: [token for token in names.values() if id_of(token) is None] for family, names in NAMES.items()}
    likeliest = min(NAMES, key=lambda family: len(missing[family]))
    if missing[likeliest]:
        raise CheckpointError(
            f"the tokenizer has no token {', '.join(missing[likeliest])}",
            hint="the chat formats known here are those of LFM2 and LFM2.5, Qwen 2.5 and 3, and Llama 3.1; "
            "a run's policy has LFM2's, others can be examined",
        )
    found = {name: id_of(token) for name, token in NAMES[likeliest].items()}
    return likeliest, SpecialIds(
        found.get("startoftext"), _id(found["im_start"]), _id(found["im_end"]), _id(found["tool_call_start"]),
        found.get("tool_call_end"), found.get("role_end"),
    )  # fmt: skip


def is_mark(family: Family, token: str) -> bool:
    """Whether a token that a tokenizer has added is a mark, which text from outside must not become.

    All of another family's are. Of an LFM2's only those that structure a dialogue: a tokenizer may have words among the added
    ones, and text is to have the ids that the template's would have.
    """
    return family != "lfm2" or token in {THOUGHT_OPEN, THOUGHT_CLOSE, *NAMES["lfm2"].values()}


def _id(found: int | None) -> int:
    if found is None:
        raise AssertionError("a token that was found is gone")
    return found


def framed(
    family: Family, messages: Sequence[Message], special: SpecialIds, mark: Callable[[str], Piece]
) -> Iterator[tuple[str, list[Piece]]]:
    """Each message's role and pieces, as the family writes them. mark: a mark of a thought or a result, as text or as an id."""
    if family == "lfm2":
        for message in messages:
            yield message.role, _lfm2(message, special, mark)
    elif family == "qwen":
        for is_tool, run in groupby(messages, key=lambda message: message.role == "tool"):
            if is_tool:
                yield "user", _qwen_results(run, mark)
                continue
            for message in run:
                yield message.role, _qwen(message, special, mark)
    else:
        yield from _llama3(messages)


def opened(family: Family, messages: Sequence[Message]) -> Sequence[Message]:
    """What a new dialogue begins with, as the family's template makes it of the messages."""
    if family != "llama3":
        return messages
    first = messages[0] if messages and messages[0].role == "system" else Message("system", "")
    rest = list(messages[1:] if messages and messages[0] is first else messages)
    text = ("Environment: ipython\n" if first.tools else "") + _LLAMA_SYSTEM + first.content.strip()
    if first.tools:
        asked = next((index for index, message in enumerate(rest) if message.role == "user"), None)
        if asked is None:
            raise CheckpointError("a Llama lists tools in the first message of the user, and there is none")
        listed = "".join(json.dumps(json.loads(tool), ensure_ascii=False, indent=4) + "\n\n" for tool in first.tools)
        rest[asked] = replace(rest[asked], content=_LLAMA_TOOLS + listed + rest[asked].content.strip())
    return [Message("system", text), *rest]


def calls_text(calls: Sequence[ToolCall]) -> str:
    """Calls as an LFM2 writes them between the markers: `[search(query='a', n=3)]`, strings as they are."""
    written = (f"{call.name}({', '.join(f'{key}={_value_text(value)}' for key, value in call.arguments.items())})" for call in calls)
    return f"[{', '.join(written)}]"


def _value_text(value: Value) -> str:
    if isinstance(value, str):
        return f"'{value}'"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, Mapping) else str(value)


def _lfm2(message: Message, special: SpecialIds, mark: Callable[[str], Piece]) -> list[Piece]:
    pieces: list[Piece] = []
    if message.thoughts:
        pieces += [mark(THOUGHT_OPEN), message.thoughts, mark(THOUGHT_CLOSE)]
    listed = f"List of tools: [{', '.join(message.tools)}]" if message.tools else ""
    pieces.append(message.content + ("\n" if message.content and listed else "") + listed)
    if message.calls and special.tool_call_end is not None:
        pieces += [special.tool_call_start, calls_text(message.calls), special.tool_call_end]
    return pieces


def _qwen(message: Message, special: SpecialIds, mark: Callable[[str], Piece]) -> list[Piece]:
    pieces: list[Piece] = []
    if message.thoughts:
        pieces += [mark(THOUGHT_OPEN), f"\n{message.thoughts}\n", mark(THOUGHT_CLOSE), "\n\n"]
    pieces.append(message.content)
    if message.tools:
        tools = "".join(f"\n{tool}" for tool in message.tools)
        before, between, after = _QWEN_TOOLS
        pieces += ["\n\n" if message.content else "", before.format(tools=tools)]
        pieces += [*_call(special, between), after, *_call(special, _QWEN_CALL.format(name="<function-name>", body="<args-json-object>"))]
    for number, call in enumerate(message.calls):
        body = json.dumps(dict(call.arguments), ensure_ascii=False)
        pieces += ["\n" if message.content or number else "", *_call(special, _QWEN_CALL.format(name=json.dumps(call.name), body=body))]
    return pieces


def _qwen_results(messages: Iterable[Message], mark: Callable[[str], Piece]) -> list[Piece]:
    pieces: list[Piece] = []
    for message in messages:
        pieces += ["\n" if pieces else "", mark("<tool_response>"), f"\n{message.content}\n", mark("</tool_response>")]
    return pieces


def _call(special: SpecialIds, text: str) -> list[Piece]:
    """Text between the marks of a call."""
    return [special.tool_call_start, text, *(() if special.tool_call_end is None else (special.tool_call_end,))]


def _llama3(messages: Sequence[Message]) -> Iterator[tuple[str, list[Piece]]]:
    for message in messages:
        if message.role == "tool":
            yield "ipython", [json.dumps(message.content, ensure_ascii=False)]
        elif message.calls:
            call = message.calls[0]
            body = json.dumps(dict(call.arguments), ensure_ascii=False)
            yield "assistant", [f'{{"name": "{call.name}", "parameters": {body}}}']
        else:
            is_made = message.role == "system" or message.content.startswith(_LLAMA_TOOLS)  # by `opened`, to the last blank
            yield message.role, [message.content if is_made else message.content.strip()]
