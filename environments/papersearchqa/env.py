"""PaperSearchQA as an environment: a question, up to `max_calls` searches of abstracts, one short answer.

The data come from a folder that `stoa search questions` built and an index on this host or a search server; without
settings they are the small invented set that is shipped. Only the last turn's sampled text can hold the answer.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from environments.base import Environment, Limits, Outcome, Question, Setting, in_range, one_of, read_settings
from environments.dialogue import DialogueEnvironment, Progress, ToolDialogue
from environments.papersearchqa import prompts
from environments.papersearchqa.questions import SMALL, load_questions, small_index
from environments.search.retrieval import MOST_PASSAGES, Retriever, open_retriever
from environments.search.reward import METRICS, match
from stoa.chat.render import ChatRenderer, Message
from stoa.chat.tools import ToolCall

NAME = "papersearchqa"
_SLACK = 1.5
"""Searches have limits of their own; a reply is given up only if one did not keep to its."""


@dataclass(frozen=True, slots=True)
class PaperSearchSettings:
    """Settings of a run's `environment` table.

    `questions` and `index` are places on each host (`~` is its home), or the address of a search server; the ids, which
    `stoa search` prints, make sure that all hosts mean the same. `questions_source`: the data set with its commit,
    OWNER/NAME@COMMIT, that the questions must have been built from.
    """

    questions: str = ""
    questions_id: str = ""
    questions_source: str = ""
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


def create(settings: Mapping[str, Setting], tokenizer_json: bytes) -> Environment:
    """The environment of a run. Raises ConfigError for bad settings or other data, CheckpointError for a foreign tokenizer.

    Its `reply` and `score` raise InfrastructureFaultError if papers cannot be searched.
    """
    asked = read_settings(NAME, PaperSearchSettings, settings)
    asked.check()
    renderer = ChatRenderer(tokenizer_json)
    folder = Path(asked.questions).expanduser() if asked.questions else SMALL
    questions = load_questions(folder, asked.questions_id, asked.questions_source)
    place, index_id = (asked.index, asked.index_id) if asked.index else (str(small_index()), "")
    retriever = open_retriever(place, index_id=index_id, seconds=asked.search_seconds)
    # A turn may hold one call more than are answered. The shipped index is in memory and tiny.
    reply_seconds = _SLACK * (asked.max_calls + 1) * retriever.most_seconds if asked.index else 0.0
    num_turns = asked.max_calls + asked.max_corrections + 1
    limits = Limits(num_turns, asked.max_turn_tokens, asked.max_episode_tokens, reply_seconds)
    dialogue = ToolDialogue(
        renderer,
        limits,
        answer_of=prompts.answer_of,
        max_calls=asked.max_calls,
        run_tool=lambda call: _search(call, retriever, asked),
        nothing=prompts.result_message(()),
        correction=prompts.CORRECTION,
        max_corrections=asked.max_corrections,
    )
    return DialogueEnvironment(
        NAME,
        questions.values(),
        renderer,
        limits,
        dialogue,
        messages=lambda question: prompts.question_messages(question.text, asked.max_calls),
        outcome=lambda question, last: _worth(question, last, asked),
    )


def _search(call: ToolCall, retriever: Retriever, asked: PaperSearchSettings) -> Message | None:
    """The message that answers a call, or None if the call is not one of `search(query=text)`."""
    query = call.arguments.get("query")
    if call.name != prompts.SEARCH or set(call.arguments) != {"query"} or not isinstance(query, str):
        return None
    passages = retriever.search(query, asked.top_k)
    return prompts.result_message([passage.contents[: asked.max_passage_chars] for passage in passages])


def _worth(question: Question, last: Progress, asked: PaperSearchSettings) -> Outcome:
    """The metric that the settings name; all of them, and what else is counted, are in the parts."""
    num_words = len(last.answer.split())
    too_long = num_words > asked.max_answer_words
    found = match("" if too_long else last.answer, question.answers)
    parts = {
        "exact_match": float(found.exact_match),
        "cover": float(found.cover),
        "strict_cover": float(found.strict_cover),
        **last.parts,
        "num_malformed": float(last.num_malformed),
        "truncated": float(last.truncated),
        "too_long": float(too_long),
        "answer_words": float(num_words),
    }
    return Outcome(parts[asked.reward], parts)
