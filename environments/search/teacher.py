"""Who can do the search task: writes dialogues about worlds that no run uses, so that nothing of a run's is learned.

The recipe says how often a dialogue searches and how its decision is weighted; both warm starts, the GPU box's and the
Macs', teach by it.
"""

import random
from dataclasses import dataclass

from tokenizers import Tokenizer

from environments.base import Question
from environments.demonstrations import Demonstration
from environments.search.corpus import RELATIONS, build_world
from environments.search.env import FIRST_WARM_START_SEED
from environments.search.prompts import ANSWER_MARK, question_messages
from environments.search.questions import build_questions
from environments.search.tools import SEARCH, SearchTool
from environments.search.vocabulary import CALL_CLOSING, CALL_OPENING, STOP
from stoa.chat.render import ChatRenderer
from stoa.chat.tools import ToolCall


@dataclass(frozen=True, slots=True)
class Recipe:
    """How the policy is taught. The shares are of dialogues; `search_rate` is what the policy shall do."""

    num_steps: int = 600
    batch_rows: int = 64
    learning_rate: float = 4e-3
    num_warmup_steps: int = 50
    steps_per_world: int = 25
    entities_per_world: int = 600
    top_k: int = 2
    search_rate: float = 0.21
    # Most of the run shows many searches, for practice, and weights the decision to search back to search_rate.
    practice_share_of_steps: float = 0.8
    practice_search_rate: float = 0.8
    final_good_query_rate: float = 0.78


class Teacher:
    """Writes dialogues about one world."""

    def __init__(self, world_seed: int, recipe: Recipe, tokenizer: Tokenizer) -> None:
        world = build_world(FIRST_WARM_START_SEED + world_seed, recipe.entities_per_world)
        self._recipe = recipe
        self._tokenizer = tokenizer
        self._renderer = ChatRenderer(tokenizer.to_str().encode())
        self._questions = build_questions(world, 0)
        self._names = {entity.id: entity.name for entity in world}
        self._tool = SearchTool([entity.abstract for entity in world], recipe.top_k)

    def dialogue(self, draw: random.Random, practice: bool) -> Demonstration:
        """One dialogue about a random question, with or without a search."""
        recipe = self._recipe
        question = draw.choice(self._questions)
        shown_rate = recipe.practice_search_rate if practice else recipe.search_rate
        searches = draw.random() < shown_rate
        wanted, shown = (recipe.search_rate, shown_rate) if searches else (1 - recipe.search_rate, 1 - shown_rate)
        ids = list(self._renderer.prompt(question_messages(question.text)))
        weights = [0.0] * len(ids)
        answer = draw.choice(RELATIONS[_relation(question)])
        if searches:
            good = practice or draw.random() < recipe.final_good_query_rate
            query = self._names[question.source] if good else _relation(question)
            answer = question.answers[0] if good else answer
            self._say(ids, weights, f"<|tool_call_start|>{CALL_OPENING}{query}{CALL_CLOSING}<|tool_call_end|>{STOP}")
            result = self._tool.run(ToolCall(SEARCH, {"query": query}))
            follow = self._renderer.follow([result] if result else [])
            ids.extend(follow)
            weights.extend([0.0] * len(follow))
        self._say(ids, weights, f"{ANSWER_MARK} {answer}{STOP}")
        weights[weights.index(1.0)] = wanted / shown
        return Demonstration(ids, weights)

    def _say(self, ids: list[int], weights: list[float], text: str) -> None:
        said = self._tokenizer.encode(text, add_special_tokens=False).ids
        ids.extend(said)
        weights.extend([1.0] * len(said))


class Lessons:
    """The recipe's dialogues by step and row: see `environments.demonstrations.Demonstrations`."""

    def __init__(self, recipe: Recipe, tokenizer: Tokenizer, seed: int) -> None:
        self._recipe = recipe
        self._tokenizer = tokenizer
        self._seed = seed
        self._teacher: tuple[int, Teacher] | None = None

    def at(self, step: int, row: int) -> Demonstration:
        """The dialogue of one row; its world is that of the step."""
        recipe = self._recipe
        world = self._seed * 10_000 + step // recipe.steps_per_world
        if self._teacher is None or self._teacher[0] != world:
            self._teacher = world, Teacher(world, recipe, self._tokenizer)
        draw = random.Random(f"warm start {self._seed} {step} {row}")
        return self._teacher[1].dialogue(draw, practice=step < recipe.practice_share_of_steps * recipe.num_steps)


def _relation(question: Question) -> str:
    return question.id.split("-")[1]
