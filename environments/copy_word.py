"""The smallest environment: say the word you were shown. One turn, no tools, any checkpoint of the chat format."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from environments.base import (
    EpisodeOverError,
    Limits,
    Outcome,
    Question,
    Reply,
    Setting,
    Split,
    read_settings,
    unknown_name,
)
from stoa.chat.render import ChatRenderer, Message
from stoa.chat.turns import read_turn

NAME = "copy_word"
_WORDS: dict[str, Split] = {"liver": "train", "kidney": "train", "lung": "train", "brain": "held_out"}


@dataclass(frozen=True, slots=True)
class CopySettings:
    """Sampled tokens a turn."""

    max_turn_tokens: int = 4


class CopyWord:
    """See `environments.base.Environment`. The id of a question is its word."""

    name = NAME

    def __init__(self, settings: CopySettings, tokenizer_json: bytes) -> None:
        self._renderer = ChatRenderer(tokenizer_json)
        self.limits = Limits(1, settings.max_turn_tokens, 64)
        self.stop_ids = frozenset({self._renderer.special.im_end})

    def question_ids(self, split: Split) -> list[str]:
        """The words of a split."""
        return [word for word, its_split in _WORDS.items() if its_split == split]

    def question(self, question_id: str) -> Question:
        """The word; UnknownNameError for another."""
        if question_id not in _WORDS:
            raise unknown_name("question of environment copy_word", question_id, list(_WORDS))
        return Question(question_id, question_id, (question_id,), _WORDS[question_id], question_id)

    def prompt_ids(self, question_id: str) -> tuple[int, ...]:
        """The word as a user message."""
        return self._renderer.prompt([Message("user", self.question(question_id).text)])

    def reply(self, question_id: str, turns: Sequence[Sequence[int]]) -> Reply:
        """Every episode ends after its one turn."""
        if len(turns) != 1:
            raise EpisodeOverError(f"question {question_id}: {len(turns)} turns", hint="an episode has one turn")
        return Reply((), True, "malformed" if read_turn(self._renderer, turns[0]).fault else "answered")

    def score(self, question_id: str, turns: Sequence[Sequence[int]]) -> Outcome:
        """1 for the word alone."""
        malformed = self.reply(question_id, turns).stop_reason == "malformed"
        right = float(not malformed and read_turn(self._renderer, turns[0]).text == self.question(question_id).text)
        parts = dict.fromkeys(("exact_match", "cover", "strict_cover"), right)
        return Outcome(right, parts | {"searched": 0.0, "num_calls": 0.0, "malformed": float(malformed)})


def create(settings: Mapping[str, Setting], tokenizer_json: bytes) -> CopyWord:
    """See `environments.registry.create`."""
    return CopyWord(read_settings(NAME, CopySettings, settings), tokenizer_json)
