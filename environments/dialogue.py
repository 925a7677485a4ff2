"""The turn loop of an environment, and an environment that is made of it: sampled turns in, the state after the last one out.

A task says how a call is run, what an answer looks like and what it is worth; who may call how often, what follows a
malformed turn and when no more fits is decided here, once for all of them. It may assume the checkpoint's chat format.
"""

import math
import re
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, TypeVar

import structlog

from environments.base import EpisodeOverError, Limits, Outcome, Question, Reply, Split, unknown_name
from stoa.chat.render import ChatRenderer, Message
from stoa.chat.tools import ToolCall
from stoa.chat.turns import Fault, Turn, read_turn

_log = structlog.get_logger(__name__)
_REMEMBERED = 65536
# What a task's own code may raise over what a policy wrote, which may be an expression, a pattern or code. It must cost the episode,
# and not the Mac's sweep or the trainer.
_FAULTS: Final = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    MemoryError,
    NameError,
    NotImplementedError,
    RecursionError,
    StopIteration,
    SyntaxError,
    TypeError,
    ValueError,
    re.error,
)
_Given = TypeVar("_Given")
_Found = TypeVar("_Found")
_MOST_NAMES = 10_000
"""Names that a mistyped one is compared with."""


@dataclass(frozen=True, slots=True)
class Progress:
    """The state after one sampled turn. `answer` is "" unless the turn ended the episode with one."""

    reply: Reply
    num_calls: int
    num_empty: int
    """Of the calls, those that found nothing."""
    num_malformed: int
    truncated: bool
    """The last turn has no end: it ran into a limit."""
    answer: str

    @property
    def answered(self) -> bool:
        """Whether the episode ended with an answer."""
        return self.reply.stop_reason == "answered"

    @property
    def parts(self) -> dict[str, float]:
        """What every task reports of an episode: searched and malformed (0 or 1), num_calls and num_empty."""
        return {
            "searched": float(self.num_calls > 0),
            "num_calls": float(self.num_calls),
            "num_empty": float(self.num_empty),
            "malformed": float(self.reply.stop_reason == "malformed"),
        }


@dataclass(frozen=True, slots=True)
class _Read:
    """What one sampled turn says, by itself. `results` is None if it is malformed."""

    turn: Turn
    results: tuple[Message, ...] | None
    answer: str | None


class ToolDialogue:
    """The rules of one environment. All methods are pure, and safe from any thread, as far as its tools are.

    `run_tool(call)` gives the message that answers a call, or None if it is no call of the environment's tools; `nothing` is
    the message of a call that found nothing, which is counted. `answer_of(text)` gives the answer that a turn without calls
    holds, or None if it holds none. A call or a text over which they raise is malformed, as one of None is. A malformed turn
    ends the episode, unless `correction` is given: then up to `max_corrections` of them are answered with that message. A turn
    without its end cannot be answered.
    """

    def __init__(
        self,
        renderer: ChatRenderer,
        limits: Limits,
        *,
        answer_of: Callable[[str], str | None],
        max_calls: int = 0,
        run_tool: Callable[[ToolCall], Message | None] = lambda call: None,
        nothing: Message | None = None,
        correction: Message | None = None,
        max_corrections: int = 0,
    ) -> None:
        self._renderer, self._limits, self._max_calls = renderer, limits, max_calls
        self._run_tool, self._nothing, self._answer_of = run_tool, nothing, answer_of
        self._correction = None if correction is None else renderer.follow([correction])
        self._max_corrections = max_corrections
        # Trouble of a tool is raised, and what raises is not remembered.
        self._read = lru_cache(maxsize=_REMEMBERED)(self._read_turn)

    def last(self, question_id: str, prompt_tokens: int, turns: Sequence[Sequence[int]]) -> Progress:
        """The state after all of `turns`, of an episode whose prompt has `prompt_tokens` tokens.

        Raises EpisodeOverError if there is no turn, or one follows the turn that ended the episode; what a tool raises.
        """
        states = list(self._play(prompt_tokens, turns))
        if len(states) != len(turns) or not states:
            raise EpisodeOverError(
                f"question {question_id}: {len(turns)} turns were given and {len(states)} can be played",
                hint="an episode has at least one turn, and none after the one that ended it",
            )
        return states[-1]

    def _play(self, num_tokens: int, turns: Sequence[Sequence[int]]) -> Iterator[Progress]:
        num_calls = num_empty = num_malformed = 0
        for ids in turns:
            state = self._step(self._read(tuple(ids)), num_calls, num_empty, num_malformed, num_tokens + len(ids))
            yield state
            if state.reply.done:
                return
            num_tokens += len(ids) + len(state.reply.ids)
            num_calls, num_empty, num_malformed = state.num_calls, state.num_empty, state.num_malformed

    def _step(self, read: _Read, num_calls: int, num_empty: int, num_malformed: int, num_tokens: int) -> Progress:
        truncated = read.turn.fault == Fault.TRUNCATED
        if read.results is None:
            num_malformed += 1
            if self._correction is None or truncated or num_malformed > self._max_corrections:
                return Progress(Reply((), True, "malformed"), num_calls, num_empty, num_malformed, truncated, "")
            ids = self._correction
        elif read.answer is not None:
            return Progress(Reply((), True, "answered"), num_calls, num_empty, num_malformed, False, read.answer)
        elif num_calls + len(read.results) > self._max_calls:
            return Progress(Reply((), True, "call_limit"), num_calls, num_empty, num_malformed, False, "")
        else:
            num_calls += len(read.results)
            num_empty += read.results.count(self._nothing) if self._nothing is not None else 0
            ids = self._renderer.follow(read.results)
        if num_tokens + len(ids) + self._limits.max_turn_tokens > self._limits.max_episode_tokens:
            return Progress(Reply((), True, "token_limit"), num_calls, num_empty, num_malformed, False, "")
        return Progress(Reply(ids, False, ""), num_calls, num_empty, num_malformed, False, "")

    def _read_turn(self, ids: tuple[int, ...]) -> _Read:
        turn = read_turn(self._renderer, ids)
        if turn.fault is not None or len(ids) > self._limits.max_turn_tokens:
            return _Read(turn, None, None)
        if not turn.calls:
            answer = _tried(self._answer_of, turn.text)
            return _Read(turn, None if answer is None else (), answer)
        results: list[Message] = []
        # One more than may be made is enough to tell that they are too many.
        for call in turn.calls[: self._max_calls + 1]:
            result = _tried(self._run_tool, call)
            if result is None:
                return _Read(turn, None, None)
            results.append(result)
        return _Read(turn, tuple(results), None)


def _tried(act: Callable[[_Given], _Found | None], given: _Given) -> _Found | None:
    """What a task's own code says, None where it raises over it. Where it did so is logged, and not the policy's text."""
    try:
        return act(given)
    except _FAULTS as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        _log.warning("environment_raised", error=type(error).__name__, file=frame.filename, line=frame.lineno)
        return None


class DialogueEnvironment:
    """See `environments.base.Environment`: a list of questions, each played by one turn loop.

    `messages(question)` is the dialogue before the first sampled turn; `outcome(question, progress)` what an episode is
    worth, given the state after its last turn.
    """

    def __init__(
        self,
        name: str,
        questions: Iterable[Question],
        renderer: ChatRenderer,
        limits: Limits,
        dialogue: ToolDialogue,
        *,
        messages: Callable[[Question], Sequence[Message]],
        outcome: Callable[[Question, Progress], Outcome],
    ) -> None:
        self.name, self.limits = name, limits
        self.stop_ids = frozenset({renderer.special.im_end})
        self._questions = {question.id: question for question in questions}
        self._renderer, self._dialogue = renderer, dialogue
        self._messages, self._outcome = messages, outcome
        self._prompt = lru_cache(maxsize=_REMEMBERED)(self._render_prompt)

    def question_ids(self, split: Split) -> tuple[str, ...]:
        """In the order they were given."""
        return tuple(question.id for question in self._questions.values() if question.split == split)

    def question(self, question_id: str) -> Question:
        """The question of this id; UnknownNameError if there is none."""
        found = self._questions.get(question_id)
        if found is None:
            raise unknown_name(f"question of environment {self.name}", question_id, list(self._questions)[:_MOST_NAMES])
        return found

    def prompt_ids(self, question_id: str) -> tuple[int, ...]:
        """The dialogue before the first sampled turn."""
        return self._prompt(question_id)

    def reply(self, question_id: str, turns: Sequence[Sequence[int]]) -> Reply:
        """What the turn loop says."""
        return self._last(question_id, turns).reply

    def score(self, question_id: str, turns: Sequence[Sequence[int]]) -> Outcome:
        """What the task says of the state after the last turn; where that raises, or is no number, 0, with the part score_failed."""
        question, last = self.question(question_id), self._last(question_id, turns)
        outcome = _tried(lambda _: self._outcome(question, last), None)
        if outcome is not None and math.isfinite(outcome.reward):
            return outcome
        return Outcome(0.0, last.parts | dict.fromkeys(("exact_match", "cover", "strict_cover"), 0.0) | {"score_failed": 1.0})

    def _last(self, question_id: str, turns: Sequence[Sequence[int]]) -> Progress:
        return self._dialogue.last(question_id, len(self.prompt_ids(question_id)), turns)

    def _render_prompt(self, question_id: str) -> tuple[int, ...]:
        return self._renderer.prompt(self._messages(self.question(question_id)))
