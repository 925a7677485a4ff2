"""Messages to token ids in the ChatML form of the LFM2 family, and ids back to text.

Special ids are looked up by name in the checkpoint's tokenizer.json and nowhere written down. Text from outside (a
question, a search result) can never become a special id. What has been sampled is never rendered here again: an
episode grows by appending, so each prompt is an exact prefix of the next.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Literal

from tokenizers import Tokenizer

from stoa.contracts.errors import CheckpointError

Role = Literal["system", "user", "assistant", "tool"]

GENERATION_ROLE = "assistant"


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a dialogue. A tool's result has the role `tool`."""

    role: Role
    content: str


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
        return (self.special.startoftext, *self._messages(messages), *self._opening())

    def follow(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Ids to append after a sampled turn that ended with `im_end`: the messages, then a new turn's beginning."""
        return (*self._newline, *self._messages(messages), *self._opening())

    def encode(self, text: str) -> tuple[int, ...]:
        """Ids of plain text; the spelling of a special token inside it stays text."""
        return tuple(self._tokenizer.encode(text, add_special_tokens=False).ids)

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
            # Role and content are one stretch of text between special tokens, so they are encoded as one.
            ids.extend(self.encode(f"{message.role}\n{message.content}"))
            ids.append(self.special.im_end)
            ids.extend(self._newline)
        return tuple(ids)

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


def _load(tokenizer_json: bytes) -> Tokenizer:
    # The library reports bad input with a bare Exception, so what can be told beforehand is told here.
    try:
        document = json.loads(tokenizer_json)
    except ValueError as error:
        raise CheckpointError(f"tokenizer.json is not JSON: {error}", hint="use the tokenizer.json of the checkpoint folder") from error
    if not isinstance(document, dict) or "model" not in document:
        raise CheckpointError("tokenizer.json holds no tokenizer", hint="use the tokenizer.json of the checkpoint folder")
    return Tokenizer.from_str(tokenizer_json.decode("utf-8"))
