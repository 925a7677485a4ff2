"""The search environment: a question, up to `max_calls` searches, one short answer.

It is the fold of sampled turns over the tool and the reward. An answer without its mark, a broken call, or a turn
without its end is malformed: it ends the episode with reward 0.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from environments.base import (
    EpisodeOverError,
    Limits,
    Outcome,
    Question,
    Reply,
    Setting,
    Split,
    in_range,
    read_settings,
    unknown_name,
)
from environments.search.corpus import MAX_ENTITIES, build_world
from environments.search.prompts import ANSWER_MARK, question_messages
from environments.search.questions import build_questions
from environments.search.reward import match
from environments.search.tools import SearchTool
from stoa.chat.render import ChatRenderer, Message
from stoa.chat.turns import Turn, read_turn

NAME = "search"
# Warm-start worlds have seeds from here on; a run's world never does, so its facts cannot have been learned before.
FIRST_WARM_START_SEED = 1_000_000
_ANSWER = re.compile(r"\s*:\s*".join(map(re.escape, ANSWER_MARK.split(":"))) + r"(?P<answer>.*)", re.DOTALL)
_REMEMBERED_TURNS = 65536


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

    def check(self) -> None:
        """Raise ConfigError for a value out of range."""
        in_range(NAME, "world_seed", self.world_seed, 0, FIRST_WARM_START_SEED - 1)
        in_range(NAME, "num_entities", self.num_entities, 2, MAX_ENTITIES)
        in_range(NAME, "num_held_out", self.num_held_out, 1, self.num_entities - 1)
        in_range(NAME, "max_calls", self.max_calls, 1, 16)
        in_range(NAME, "top_k", self.top_k, 1, 16)
        in_range(NAME, "max_turn_tokens", self.max_turn_tokens, 4, 4096)
        in_range(NAME, "max_episode_tokens", self.max_episode_tokens, 64, 65536)


@dataclass(frozen=True, slots=True)
class _Step:
    """The state after one sampled turn."""

    reply: Reply
    num_calls: int
    answer: str


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
        self._tool = SearchTool([entity.abstract for entity in world], settings.top_k)
        self._read = lru_cache(maxsize=_REMEMBERED_TURNS)(self._read_turn)
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
        return self._last_step(question_id, turns).reply

    def score(self, question_id: str, turns: Sequence[Sequence[int]]) -> Outcome:
        """Strict cover is the reward; the other metrics are in the parts, with the answer's length in words."""
        step = self._last_step(question_id, turns)
        answered = step.reply.stop_reason == "answered"
        found = match(step.answer if answered else "", self.question(question_id).answers)
        parts = {
            "exact_match": float(found.exact_match),
            "cover": float(found.cover),
            "strict_cover": float(found.strict_cover),
            "searched": float(step.num_calls > 0),
            "num_calls": float(step.num_calls),
            "malformed": float(step.reply.stop_reason == "malformed"),
            "answer_words": float(len(step.answer.split())),
        }
        return Outcome(float(found.strict_cover), parts)

    def _last_step(self, question_id: str, turns: Sequence[Sequence[int]]) -> _Step:
        steps = list(self._play(question_id, turns))
        if len(steps) != len(turns) or not steps:
            raise EpisodeOverError(
                f"question {question_id}: {len(turns)} turns were given and {len(steps)} can be played",
                hint="an episode has at least one turn, and none after the one that ended it",
            )
        return steps[-1]

    def _play(self, question_id: str, turns: Sequence[Sequence[int]]) -> Iterator[_Step]:
        num_tokens = len(self.prompt_ids(question_id))
        num_calls = 0
        for ids in turns:
            turn, results = self._read(tuple(ids))
            step = self._step(turn, results, num_calls, num_tokens + len(ids))
            yield step
            if step.reply.done:
                return
            num_tokens += len(ids) + len(step.reply.ids)
            num_calls = step.num_calls

    def _step(self, turn: Turn, results: tuple[Message, ...] | None, num_calls: int, num_tokens: int) -> _Step:
        if turn.fault is not None or results is None:
            return _Step(Reply((), True, "malformed"), num_calls, "")
        if not turn.calls:
            said = _ANSWER.fullmatch(turn.text)
            if said is None:
                return _Step(Reply((), True, "malformed"), num_calls, "")
            return _Step(Reply((), True, "answered"), num_calls, said["answer"].strip())
        if num_calls + len(results) > self._settings.max_calls:
            return _Step(Reply((), True, "call_limit"), num_calls, "")
        num_calls += len(results)
        ids = self._renderer.follow(results)
        if num_tokens + len(ids) + self.limits.max_turn_tokens > self.limits.max_episode_tokens:
            return _Step(Reply((), True, "token_limit"), num_calls, "")
        return _Step(Reply(ids, False, ""), num_calls, "")

    def _read_turn(self, ids: tuple[int, ...]) -> tuple[Turn, tuple[Message, ...] | None]:
        """A turn and the results of its calls; None in their place if it is too long or one is no call of the tool."""
        turn = read_turn(self._renderer, ids)
        if len(ids) > self.limits.max_turn_tokens:
            return turn, None
        results: list[Message] = []
        for call in turn.calls[: self._settings.max_calls + 1]:
            result = self._tool.run(call)
            if result is None:
                return turn, None
            results.append(result)
        return turn, tuple(results)


def create(settings: Mapping[str, Setting], tokenizer_json: bytes) -> SearchEnvironment:
    """The environment of a run. Raises ConfigError for bad settings, CheckpointError for a foreign tokenizer."""
    return SearchEnvironment(read_settings(NAME, SearchSettings, settings), tokenizer_json)
