"""Every word of this task that the policy reads, outside of questions and abstracts."""

from collections.abc import Sequence

from stoa.chat.render import Message

NOTHING_FOUND = "nothing"
ANSWER_MARK = "Answer:"


def question_messages(question: str) -> list[Message]:
    """The dialogue before the policy's first turn."""
    return [Message("user", question)]


def result_message(abstracts: Sequence[str]) -> Message:
    """What one search returns to the policy."""
    return Message("tool", "\n".join(abstracts) if abstracts else NOTHING_FOUND)
