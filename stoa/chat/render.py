"""Messages to token ids in a checkpoint's chat form, and ids back to text.

How a family writes a message is `forms.py`'s; that of LFM2.5's chat template is the one of a run's policies: tools are listed
in the system message, calls stand between their markers, and of an assistant's thoughts only those after the last user
message are shown again. Special ids are looked up by name in the checkpoint's tokenizer.json and nowhere written down. Text
from outside (a question, a search result) can never become a special id, nor the id of a mark that a tokenizer has added
without calling it special, as Qwen's `<tool_call>`. What has been sampled is never rendered here again: an episode grows by
appending, so each prompt is an exact prefix of the next.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace

from tokenizers import AddedToken, Tokenizer

from stoa.chat.forms import THOUGHT_CLOSE, Family, Message, Piece, Role, SpecialIds, calls_text, family_of, framed, is_mark, opened
from stoa.contracts.errors import CheckpointError

__all__ = ["ChatRenderer", "Message", "Role", "SpecialIds", "calls_text", "system_message"]

GENERATION_ROLE = "assistant"


def system_message(text: str, tools: Sequence[Mapping[str, object]]) -> Message:
    """The system message that lists these tools, each a JSON schema of a function, beside the text."""
    return Message("system", text, tools=tuple(json.dumps(tool, ensure_ascii=False) for tool in tools))


class ChatRenderer:
    """The chat format of one checkpoint. Built from the bytes of its tokenizer.json."""

    def __init__(self, tokenizer_json: bytes) -> None:
        """Raises CheckpointError if the bytes are no tokenizer or one of the special tokens is missing."""
        self._tokenizer = _load(tokenizer_json)
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._tokenizer.encode_special_tokens = True
        self.family: Family
        self.special: SpecialIds
        self.family, self.special = family_of(self._tokenizer.token_to_id)
        self.vocabulary_size: int = self._tokenizer.get_vocab_size(with_added_tokens=True)
        added = self._tokenizer.get_added_tokens_decoder()
        self._special_ids = frozenset(index for index, token in added.items() if token.special)
        marks = [token for token in added.values() if token.special or is_mark(self.family, token.content)]
        self._mark_ids = {token.content: index for index, token in added.items() if token in marks}
        # To the tokenizer these are special from here on: their spelling in a text stays text.
        self._tokenizer.add_special_tokens([AddedToken(token.content, normalized=token.normalized, special=True) for token in marks])
        # What stands between the messages of a dialogue, and between a role and its text.
        self._between = () if self.family == "llama3" else self.encode("\n")
        self._break = "\n\n" if self.family == "llama3" else "\n"

    def prompt(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Ids of a new dialogue, ending where the policy's first turn begins."""
        start = () if self.special.startoftext is None else (self.special.startoftext,)
        return (*start, *self._messages(opened(self.family, _as_shown(messages))), *self._opening())

    def follow(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Ids to append after a sampled turn that ended with `im_end`: the messages, then a new turn's beginning."""
        return (*self._between, *self._messages(messages), *self._opening())

    def encode(self, text: str) -> tuple[int, ...]:
        """Ids of plain text; the spelling of a special token or another mark inside it stays text."""
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
        for role, pieces in framed(self.family, messages, self.special, self._mark):
            # What stands between special tokens is one stretch of text, so it is encoded as one.
            ids += [self.special.im_start, *self._joined([*self._head(role), *pieces]), self.special.im_end, *self._between]
        return tuple(ids)

    def _head(self, role: str) -> list[Piece]:
        """What stands before a message's text."""
        return [f"{role}{self._break}"] if self.special.role_end is None else [role, self.special.role_end, self._break]

    def _mark(self, mark: str) -> Piece:
        """A mark of a thought or a result: one id where the checkpoint has it as a token of its own, text where it has not."""
        return self._mark_ids.get(mark, mark)

    def _joined(self, pieces: Sequence[Piece]) -> list[int]:
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
        return (self.special.im_start, *self._joined(self._head(GENERATION_ROLE)))


def _as_shown(messages: Sequence[Message]) -> list[Message]:
    """A dialogue as the template shows it: no empty system message, no thoughts before the last user message."""
    told = list(messages[1:] if messages and messages[0] == Message("system", "") else messages)
    last_user = max((index for index, message in enumerate(told) if message.role == "user"), default=-1)
    return [_without_thoughts(message) if index <= last_user else message for index, message in enumerate(told)]


def _without_thoughts(message: Message) -> Message:
    if message.role != "assistant":
        return message
    _, mark, rest = message.content.rpartition(THOUGHT_CLOSE)
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
