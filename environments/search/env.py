"""The search environment: a question, up to `max_calls` searches, one short answer.

An answer without its mark, a broken call, or a turn
without its end is malformed: it ends the episode with reward 0.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from environments.base import (
    Limits,
    Outcome,
    Question,
    Reply,
    Setting,
    Split,
    in_range,
    one_of,
    read_settings,
    unknown_name,
)
from environments.dialogue import Progress, ToolDialogue
from environments.search.corpus import MAX_ENTITIES, build_world
from environments.search.prompts import ANSWER_MARK, question_messages
from environments.search.questions import build_questions
from environments.search.reward import METRICS, match
from environments.search.tools import SearchTool
from stoa.chat.render import ChatRenderer

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
        in_range(NAME, "num_held_out", self.num_held_out, 1, self.num_entities - 1)
        in_range(NAME, "max_calls", self.max_calls, 1, 16)
        in_range(NAME, "top_k", self.top_k, 1, 16)
        in_range(NAME, "max_turn_tokens", self.max_turn_tokens, 4, 4096)
        in_range(NAME, "max_episode_tokens", self.max_episode_tokens, 64, 65536)
        one_of(NAME, "reward", self.reward, METRICS)


class SearchEnvironment:
    """See `environments.base.Environment`."""

    name = NAME

    def __init__(self, settings: SearchSettings, tokenizer_json: bytes) -> None:
        settings.check()
        self._settings = settings
        self._renderer = ChatRenderer(tokenizer_json)
        self.limits = Limits(settings.max_calls + 1, settings.max_turn_tokens, settings.max_episode_tokens)
        self.stop_ids = frozenset({self._renderer.special.im_end})
        world = build_world(settings.world_seed, settings.num_entities)
        self._questions = {question.id: question for question in build_questions(world, settings.num_held_out)}
        tool = SearchTool([entity.abstract for entity in world], settings.top_k)
        self._dialogue = ToolDialogue(self._renderer, self.limits, max_calls=settings.max_calls, run_tool=tool.run, answer_of=_answer_of)
        self._prompt = lru_cache(maxsize=len(self._questions))(self._render_prompt)

    def question_ids(self, split: Split) -> tuple[str, ...]:
        """Entity by entity; those of the demo's world number 2,400 and 1,200."""
        return tuple(question.id for question in self._questions.values() if question.split == split)

    def question(self, question_id: str) -> Question:
        """The question of this id; UnknownNameError if there is none."""
        found = self._questions.get(question_id)
        if found is None:
            raise unknown_name("question of environment search", question_id, list(self._questions))
        return found

    def prompt_ids(self, question_id: str) -> tuple[int, ...]:
        """The question as a user message."""
        return self._prompt(question_id)

    def _render_prompt(self, question_id: str) -> tuple[int, ...]:
        return self._renderer.prompt(question_messages(self.question(question_id).text))

    def reply(self, question_id: str, turns: Sequence[Sequence[int]]) -> Reply:
        """The search results, each a tool message, or the end of the episode."""
        return self._last(question_id, turns).reply

    def score(self, question_id: str, turns: Sequence[Sequence[int]]) -> Outcome:
        """One of the three metrics is the reward; all are in the parts, with the answer's length in words."""
        last = self._last(question_id, turns)
        found = match(last.answer if last.answered else "", self.question(question_id).answers)
        parts = {
            "exact_match": float(found.exact_match),
            "cover": float(found.cover),
            "strict_cover": float(found.strict_cover),
            "searched": float(last.num_calls > 0),
            "num_calls": float(last.num_calls),
            "malformed": float(last.reply.stop_reason == "malformed"),
            "answer_words": float(len(last.answer.split())),
        }
        return Outcome(parts[self._settings.reward], parts)

    def _last(self, question_id: str, turns: Sequence[Sequence[int]]) -> Progress:
        return self._dialogue.last(question_id, len(self.prompt_ids(question_id)), turns)


def _answer_of(text: str) -> str | None:
    said = _ANSWER.fullmatch(text)
    return None if said is None else said["answer"].strip()


def create(settings: Mapping[str, Setting], tokenizer_json: bytes) -> SearchEnvironment:
    """The environment of a run. Raises ConfigError for bad settings, CheckpointError for a foreign tokenizer."""
    return SearchEnvironment(read_settings(NAME, SearchSettings, settings), tokenizer_json)
