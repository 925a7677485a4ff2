"""Messages to token ids in the ChatML form of the LFM2 family, and ids back to text.

The form is that of LFM2.5's chat template: tools are listed in the system message, calls stand between their markers, and
of an assistant's thoughts only those after the last user message are shown again. Special ids are looked up by name in
the checkpoint's tokenizer.json and nowhere written down. Text from outside (a
question, a search result) can never become a special id. What has been sampled is never rendered here again: an
episode grows by appending, so each prompt is an exact prefix of the next.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal

from tokenizers import Tokenizer

from stoa.chat.tools import ToolCall, Value
from stoa.contracts.errors import CheckpointError

Role = Literal["system", "user", "assistant", "tool"]

GENERATION_ROLE = "assistant"


_THOUGHT_OPEN, _THOUGHT_CLOSE = "<think>", "</think>"


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a dialogue. A tool's result has the role `tool`; thoughts and calls are an assistant's."""

    role: Role
    content: str
    thoughts: str = ""
    calls: tuple[ToolCall, ...] = ()


def system_message(text: str, tools: Sequence[Mapping[str, object]]) -> Message:
    """The system message that lists these tools, each a JSON schema of a function, after the text."""
    listed = ", ".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    break_ = "\n" if text and tools else ""
    return Message("system", f"{text}{break_}List of tools: [{listed}]" if tools else text)


def calls_text(calls: Sequence[ToolCall]) -> str:
    """Calls as the policy writes them between the markers: `[search(query='a', n=3)]`, strings as they are."""
    written = (f"{call.name}({', '.join(f'{key}={_value_text(value)}' for key, value in call.arguments.items())})" for call in calls)
    return f"[{', '.join(written)}]"


def _value_text(value: Value) -> str:
    if isinstance(value, str):
        return f"'{value}'"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, Mapping) else str(value)


@dataclass(frozen=True, slots=True)
class SpecialIds:
    """The ids that structure a dialogue, under the names the LFM2 family gives them."""

    startoftext: int
    im_start: int
    im_end: int
    tool_call_start: int
    tool_call_end: int


class ChatRenderer:
    """The chat format of one checkpoint. Built from the bytes of its tokenizer.json."""

    def __init__(self, tokenizer_json: bytes) -> None:
        """Raises CheckpointError if the bytes are no tokenizer or one of the special tokens is missing."""
        self._tokenizer = _load(tokenizer_json)
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._tokenizer.encode_special_tokens = True
        self.special = SpecialIds(**{field.name: self._id_of(f"<|{field.name}|>") for field in fields(SpecialIds)})
        self.vocabulary_size: int = self._tokenizer.get_vocab_size(with_added_tokens=True)
        added = self._tokenizer.get_added_tokens_decoder()
        self._special_ids = frozenset(index for index, token in added.items() if token.special)
        self._newline = self.encode("\n")

    def prompt(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Ids of a new dialogue, ending where the policy's first turn begins."""
        return (self.special.startoftext, *self._messages(_as_shown(messages)), *self._opening())

    def follow(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Ids to append after a sampled turn that ended with `im_end`: the messages, then a new turn's beginning."""
        return (*self._newline, *self._messages(messages), *self._opening())

    def encode(self, text: str) -> tuple[int, ...]:
        """Ids of plain text; the spelling of a special token inside it stays text."""
        # JSON from a server may hold half a surrogate pair, which is no text: "?" stands for it.
        sound = text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")
        return tuple(self._tokenizer.encode(sound, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, special tokens spelled out."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)

    def is_special(self, token_id: int) -> bool:
        """Whether this id is a special token of the checkpoint rather than a piece of text."""
        return token_id in self._special_ids

    def _messages(self, messages: Sequence[Message]) -> tuple[int, ...]:
        ids: list[int] = []
        for message in messages:
            ids.append(self.special.im_start)
            # What stands between special tokens is one stretch of text, so it is encoded as one.
            pieces: list[str | int] = [f"{message.role}\n"]
            if message.thoughts:
                pieces += [self._mark(_THOUGHT_OPEN), message.thoughts, self._mark(_THOUGHT_CLOSE)]
            pieces.append(message.content)
            if message.calls:
                pieces += [self.special.tool_call_start, calls_text(message.calls), self.special.tool_call_end]
            ids.extend(self._joined(pieces))
            ids.append(self.special.im_end)
            ids.extend(self._newline)
        return tuple(ids)

    def _mark(self, mark: str) -> str | int:
        """A thought's mark: one id where the checkpoint has it as a special token, text where it has not."""
        found = self._tokenizer.token_to_id(mark)
        return found if found in self._special_ids else mark

    def _joined(self, pieces: Sequence[str | int]) -> list[int]:
        ids: list[int] = []
        text = ""
        for piece in pieces:
            if isinstance(piece, str):
                text += piece
                continue
            ids += [*self.encode(text), piece]
            text = ""
        return [*ids, *self.encode(text)]

    def _opening(self) -> tuple[int, ...]:
        return (self.special.im_start, *self.encode(f"{GENERATION_ROLE}\n"))

    def _id_of(self, token: str) -> int:
        found = self._tokenizer.token_to_id(token)
        if found is None:
            raise CheckpointError(
                f"the tokenizer has no token {token}",
                hint="the chat format is that of LFM2 and LFM2.5; use a checkpoint of that family",
            )
        return found


def _as_shown(messages: Sequence[Message]) -> list[Message]:
    """A dialogue as the template shows it: no empty system message, no thoughts before the last user message."""
    told = list(messages[1:] if messages and messages[0] == Message("system", "") else messages)
    last_user = max((index for index, message in enumerate(told) if message.role == "user"), default=-1)
    return [_without_thoughts(message) if index <= last_user else message for index, message in enumerate(told)]


def _without_thoughts(message: Message) -> Message:
    if message.role != "assistant":
        return message
    _, mark, rest = message.content.rpartition(_THOUGHT_CLOSE)
    return replace(message, thoughts="", content=rest.strip() if mark else message.content)


def _load(tokenizer_json: bytes) -> Tokenizer:
    # The library reports bad input with a bare Exception, so what can be told beforehand is told here.
    try:
        document = json.loads(tokenizer_json)
    except ValueError as error:
        raise CheckpointError(f"tokenizer.json is not JSON: {error}", hint="use the tokenizer.json of the checkpoint folder") from error
    if not isinstance(document, dict) or "model" not in document:
        raise CheckpointError("tokenizer.json holds no tokenizer", hint="use the tokenizer.json of the checkpoint folder")
    return Tokenizer.from_str(tokenizer_json.decode("utf-8"))
