"""Every word of this task that the policy reads, outside of questions and abstracts."""

import re
from collections.abc import Sequence

from stoa.chat.render import Message, system_message

SEARCH = "search"
TOOL = {
    "name": SEARCH,
    "description": "Finds abstracts of biomedical papers that share words with the query, the best first.",
    "parameters": {
        "type": "object",
        "properties": {"query": {"type": "string", "description": "Words to look for."}},
        "required": ["query"],
    },
}
_SYSTEM = """You answer questions about biomedical research. Look up what you need with the tool: at most {max_calls} searches. \
When you know the answer, write it on the last line, as a name or a few words, after the word Answer and a colon, like this:
Answer: insulin"""
CORRECTION = Message(
    "tool",
    'That was neither a search nor an answer. Either call search(query="...") or end with a line that begins with Answer and a colon.',
)
NOTHING_FOUND = "No abstract was found."
_ANSWER_LINE = re.compile(r"\W*answer\W*?:\W*?(?P<answer>[^\W_].*)", re.IGNORECASE)


def question_messages(question: str, max_calls: int) -> list[Message]:
    """The dialogue before the policy's first turn."""
    return [system_message(_SYSTEM.format(max_calls=max_calls), [TOOL]), Message("user", question)]


def result_message(abstracts: Sequence[str]) -> Message:
    """What one search returns to the policy."""
    return Message("tool", "\n\n".join(f"[{rank}] {abstract}" for rank, abstract in enumerate(abstracts, 1)) or NOTHING_FOUND)


def answer_of(text: str) -> str | None:
    """The answer on the last line of a turn's text; None if that line is none."""
    lines = text.strip().splitlines()
    said = _ANSWER_LINE.fullmatch(lines[-1].strip()) if lines else None
    return None if said is None else said["answer"].strip(" \t*`_")
