"""The search environment: a question, up to `max_calls` searches, one short answer.

An answer without its mark, a broken call, or a turn
without its end is malformed: it ends the episode with reward 0.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from environments.base import Environment, Limits, Outcome, Question, Setting, in_range, one_of, read_settings
from environments.dialogue import DialogueEnvironment, Progress, ToolDialogue
from environments.search.corpus import MAX_ENTITIES, build_world
from environments.search.prompts import ANSWER_MARK, question_messages, result_message
from environments.search.questions import build_questions
from environments.search.reward import METRICS, match
from environments.search.tools import SearchTool
from stoa.chat.render import ChatRenderer
from stoa.contracts.errors import ConfigError

NAME = "search"
# Warm-start worlds have seeds from here on; a run's world never does, so its facts cannot have been learned before.
FIRST_WARM_START_SEED = 1_000_000
_ANSWER = re.compile(r"\s*:\s*".join(map(re.escape, ANSWER_MARK.split(":"))) + r"(?P<answer>.*)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class SearchSettings:
    """Settings of a run's `environment` table, with the values the demo uses."""

    world_seed: int = 0
    num_entities: int = 600
    num_held_out: int = 200
    max_calls: int = 3
    top_k: int = 2
    max_turn_tokens: int = 12
    max_episode_tokens: int = 192
    reward: str = "strict_cover"

    def check(self) -> None:
        """Raise ConfigError for a value out of range."""
        in_range(NAME, "world_seed", self.world_seed, 0, FIRST_WARM_START_SEED - 1)
        in_range(NAME, "num_entities", self.num_entities, 2, MAX_ENTITIES)
        in_range(NAME, "num_held_out", self.num_held_out, 1, MAX_ENTITIES - 1)
        in_range(NAME, "max_calls", self.max_calls, 1, 16)
        in_range(NAME, "top_k", self.top_k, 1, 16)
        in_range(NAME, "max_turn_tokens", self.max_turn_tokens, 4, 4096)
        in_range(NAME, "max_episode_tokens", self.max_episode_tokens, 64, 65536)
        one_of(NAME, "reward", self.reward, METRICS)
        if self.num_held_out >= self.num_entities:
            raise ConfigError(
                f"environment {NAME}: num_held_out = {self.num_held_out} is not below num_entities = {self.num_entities}",
                hint=f"use a value from 1 to {self.num_entities - 1}",
            )


def _answer_of(text: str) -> str | None:
    said = _ANSWER.fullmatch(text)
    return None if said is None else said["answer"].strip()


def _worth(question: Question, last: Progress, metric: str) -> Outcome:
    """One of the three metrics is the reward; all are in the parts, with the answer's length in words."""
    found = match(last.answer if last.answered else "", question.answers)
    parts = {
        "exact_match": float(found.exact_match),
        "cover": float(found.cover),
        "strict_cover": float(found.strict_cover),
        **last.parts,
        "answer_words": float(len(last.answer.split())),
    }
    return Outcome(parts[metric], parts)


def create(settings: Mapping[str, Setting], tokenizer_json: bytes) -> Environment:
    """The environment of a run. Raises ConfigError for bad settings, CheckpointError for a foreign tokenizer."""
    asked = read_settings(NAME, SearchSettings, settings)
    asked.check()
    renderer = ChatRenderer(tokenizer_json)
    limits = Limits(asked.max_calls + 1, asked.max_turn_tokens, asked.max_episode_tokens)
    world = build_world(asked.world_seed, asked.num_entities)
    tool = SearchTool([entity.abstract for entity in world], asked.top_k)
    nothing = result_message(())
    dialogue = ToolDialogue(renderer, limits, answer_of=_answer_of, max_calls=asked.max_calls, run_tool=tool.run, nothing=nothing)
    return DialogueEnvironment(
        NAME,
        build_questions(world, asked.num_held_out),
        renderer,
        limits,
        dialogue,
        messages=lambda question: question_messages(question.text),
        outcome=lambda question, last: _worth(question, last, asked.reward),
    )
