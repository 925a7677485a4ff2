"""Demonstrations by an environment's name. To teach a new environment, write its source and name it here.

An environment whose answer alone is a good turn needs no source of its own: its training questions and answers are one.
Any environment can be taught from a file instead (`demonstrations.read_dialogues`).
"""

from dataclasses import replace

from tokenizers import Tokenizer

from environments import copy_word, known
from environments.base import unknown_name
from environments.demonstrations import Demonstration, Demonstrations, Written
from environments.search import env as search
from environments.search.teacher import Lessons, Recipe
from stoa.chat.render import ChatRenderer

_ANSWERED = (copy_word.NAME,)


def names() -> list[str]:
    """The environments that `teach` knows."""
    return sorted((search.NAME, *_ANSWERED))


def teach(name: str, tokenizer_json: bytes, *, num_steps: int, batch_rows: int, seed: int) -> Demonstrations:
    """The demonstrations of an environment for a warm start of this length.

    Raises UnknownNameError, or CheckpointError for a tokenizer without the chat tokens.
    """
    if name == search.NAME:
        ChatRenderer(tokenizer_json)
        return Lessons(replace(Recipe(), num_steps=num_steps, batch_rows=batch_rows), Tokenizer.from_str(tokenizer_json.decode()), seed)
    if name not in _ANSWERED:
        raise unknown_name("environment with demonstrations", name, names())
    return Written(_answers(name, tokenizer_json), seed=seed, batch_rows=batch_rows)


def _answers(name: str, tokenizer_json: bytes) -> list[Demonstration]:
    """Each training question with its first answer as the one turn."""
    environment, renderer = known.create(name, {}, tokenizer_json), ChatRenderer(tokenizer_json)
    found: list[Demonstration] = []
    for question_id in environment.question_ids("train"):
        prompt = list(environment.prompt_ids(question_id))
        said = [*renderer.encode(environment.question(question_id).answers[0]), renderer.special.im_end]
        found.append(Demonstration(prompt + said, [0.0] * len(prompt) + [1.0] * len(said)))
    return found
