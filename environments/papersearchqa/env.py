"""PaperSearchQA as an environment: a question, up to `max_calls` searches of abstracts, one short answer.

The data come from a folder that `stoa search questions` built and an index on this host or a search server; without
settings they are the small invented set that is shipped. Only the last turn's sampled text can hold the answer.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from environments.base import Limits, Outcome, Question, Reply, Setting, Split, in_range, one_of, read_settings, unknown_name
from environments.dialogue import Progress, ToolDialogue
from environments.papersearchqa import prompts
from environments.papersearchqa.questions import SMALL, load_questions, small_index
from environments.search.retrieval import MOST_PASSAGES, Retriever, open_retriever
from environments.search.reward import METRICS, match
from stoa.chat.render import ChatRenderer, Message
from stoa.chat.tools import ToolCall

NAME = "papersearchqa"


@dataclass(frozen=True, slots=True)
class PaperSearchSettings:
    """Settings of a run's `environment` table.

    `questions` and `index` are places on each host (`~` is its home), or the address of a search server; the ids, which
    `stoa search` prints, make sure that all hosts mean the same.
    """

    questions: str = ""
    questions_id: str = ""
    index: str = ""
    index_id: str = ""
    search_seconds: float = 10.0
    top_k: int = 3
    max_calls: int = 4
    max_corrections: int = 1
    max_passage_chars: int = 2000
    max_answer_words: int = 16
    max_turn_tokens: int = 1024
    max_episode_tokens: int = 8192
    reward: str = "strict_cover"

    def check(self) -> None:
        """Raise ConfigError for a value out of range."""
        in_range(NAME, "search_seconds", self.search_seconds, 0.1, 600.0)
        in_range(NAME, "top_k", self.top_k, 1, MOST_PASSAGES)
        in_range(NAME, "max_calls", self.max_calls, 1, 64)
        in_range(NAME, "max_corrections", self.max_corrections, 0, 16)
        in_range(NAME, "max_passage_chars", self.max_passage_chars, 16, 65536)
        in_range(NAME, "max_answer_words", self.max_answer_words, 1, 256)
        in_range(NAME, "max_turn_tokens", self.max_turn_tokens, 4, 65536)
        in_range(NAME, "max_episode_tokens", self.max_episode_tokens, 64, 1 << 20)
        one_of(NAME, "reward", self.reward, METRICS)


class PaperSearchQA:
    """See `environments.base.Environment`."""

    name = NAME

    def __init__(self, settings: PaperSearchSettings, tokenizer_json: bytes) -> None:
        settings.check()
        self._settings = settings
        self._renderer = ChatRenderer(tokenizer_json)
        max_turns = settings.max_calls + settings.max_corrections + 1
        self.limits = Limits(max_turns, settings.max_turn_tokens, settings.max_episode_tokens)
        self.stop_ids = frozenset({self._renderer.special.im_end})
        folder = Path(settings.questions).expanduser() if settings.questions else SMALL
        self._questions = load_questions(folder, settings.questions_id)
        place, index_id = (settings.index, settings.index_id) if settings.index else (str(small_index()), "")
        self._retriever: Retriever = open_retriever(place, index_id=index_id, seconds=settings.search_seconds)
        self._dialogue = ToolDialogue(
            self._renderer,
            self.limits,
            max_calls=settings.max_calls,
            run_tool=self._run,
            answer_of=prompts.answer_of,
            correction=prompts.CORRECTION,
            max_corrections=settings.max_corrections,
        )
        self._prompt = lru_cache(maxsize=65536)(self._render_prompt)

    def question_ids(self, split: Split) -> tuple[str, ...]:
        """In the order of the data set. `transfer` is the other benchmark's questions, which no run trains on."""
        return tuple(question.id for question in self._questions.values() if question.split == split)

    def question(self, question_id: str) -> Question:
        """The question of this id; UnknownNameError if there is none."""
        found = self._questions.get(question_id)
        if found is None:
            raise unknown_name(f"question of environment {NAME}", question_id, list(self._questions)[:1000])
        return found

    def prompt_ids(self, question_id: str) -> tuple[int, ...]:
        """The task, its tool, and the question."""
        return self._prompt(question_id)

    def reply(self, question_id: str, turns: Sequence[Sequence[int]]) -> Reply:
        """The found abstracts, a correction, or the end. Raises InfrastructureFaultError if papers cannot be searched."""
        return self._last(question_id, turns).reply

    def score(self, question_id: str, turns: Sequence[Sequence[int]]) -> Outcome:
        """The metric that the settings name; all of them, and what else is counted, are in the parts."""
        last = self._last(question_id, turns)
        num_words = len(last.answer.split())
        too_long = num_words > self._settings.max_answer_words
        found = match("" if too_long else last.answer, self.question(question_id).answers)
        parts = {
            "exact_match": float(found.exact_match),
            "cover": float(found.cover),
            "strict_cover": float(found.strict_cover),
            "searched": float(last.num_calls > 0),
            "num_calls": float(last.num_calls),
            "malformed": float(last.reply.stop_reason == "malformed"),
            "num_malformed": float(last.num_malformed),
            "truncated": float(last.truncated),
            "too_long": float(too_long),
            "answer_words": float(num_words),
        }
        return Outcome(parts[self._settings.reward], parts)

    def _last(self, question_id: str, turns: Sequence[Sequence[int]]) -> Progress:
        return self._dialogue.last(question_id, len(self.prompt_ids(question_id)), turns)

    def _render_prompt(self, question_id: str) -> tuple[int, ...]:
        return self._renderer.prompt(prompts.question_messages(self.question(question_id).text, self._settings.max_calls))

    def _run(self, call: ToolCall) -> Message | None:
        query = call.arguments.get("query")
        if call.name != prompts.SEARCH or set(call.arguments) != {"query"} or not isinstance(query, str):
            return None
        passages = self._retriever.search(query, self._settings.top_k)
        return prompts.result_message([passage.contents[: self._settings.max_passage_chars] for passage in passages])


def create(settings: Mapping[str, Setting], tokenizer_json: bytes) -> PaperSearchQA:
    """The environment of a run. Raises ConfigError for bad settings or other data, CheckpointError for a foreign tokenizer."""
    return PaperSearchQA(read_settings(NAME, PaperSearchSettings, settings), tokenizer_json)
