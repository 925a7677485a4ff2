"""The smallest environment: say the word you were shown. One turn, no tools, any checkpoint of the chat format."""

from collections.abc import Mapping
from dataclasses import dataclass

from environments.base import Environment, Limits, Outcome, Question, Setting, Split, read_settings
from environments.dialogue import DialogueEnvironment, Progress, ToolDialogue
from stoa.chat.render import ChatRenderer, Message

NAME = "copy_word"
_WORDS: dict[str, Split] = {"liver": "train", "kidney": "train", "lung": "train", "brain": "held_out"}


@dataclass(frozen=True, slots=True)
class CopySettings:
    """Sampled tokens a turn."""

    max_turn_tokens: int = 4


def create(settings: Mapping[str, Setting], tokenizer_json: bytes) -> Environment:
    """See `environments.registry.create`."""
    limits = Limits(1, read_settings(NAME, CopySettings, settings).max_turn_tokens, 64)
    questions = [Question(word, word, (word,), split, word) for word, split in _WORDS.items()]
    renderer = ChatRenderer(tokenizer_json)
    dialogue = ToolDialogue(renderer, limits, answer_of=str.strip)
    return DialogueEnvironment(NAME, questions, renderer, limits, dialogue, messages=_shown, outcome=_worth)


def _shown(question: Question) -> list[Message]:
    return [Message("user", question.text)]


def _worth(question: Question, last: Progress) -> Outcome:
    right = float(last.answer in question.answers)
    return Outcome(right, last.parts | dict.fromkeys(("exact_match", "cover", "strict_cover"), right))
