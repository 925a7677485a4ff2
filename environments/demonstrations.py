"""What a warm start learns from: dialogues in which somebody who can do the task does it, as ids with a weight an id.

A source gives the demonstration of any (step, row) of a warm start by itself, without the ones before it, so that several
Macs can each write their share and a resumed warm start goes on where it ended. Who can teach which environment is
`teachers.py`'s.

A file of demonstrations is JSON lines, one dialogue each:

    {"messages": [{"role": "user", "content": "..."},
                  {"role": "assistant", "content": "", "calls": [{"name": "search", "arguments": {"query": "..."}}]},
                  {"role": "tool", "content": "..."},
                  {"role": "assistant", "content": "Answer: ..."}], "weight": 1.0}
"""

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, cast, get_args

from stoa.chat.render import ChatRenderer, Message, Role, calls_text
from stoa.chat.tools import ToolCall, Value
from stoa.chat.turns import read_turn
from stoa.contracts.errors import FormatError


@dataclass(frozen=True, slots=True)
class Demonstration:
    """One written example: all ids, and the weight of each id as a target (0 where the policy does not speak)."""

    ids: list[int]
    weights: list[float]


class Demonstrations(Protocol):
    """A source of demonstrations; the same (step, row) gives the same one on every machine."""

    def at(self, step: int, row: int) -> Demonstration:
        """The demonstration of one row of one step, both from 0."""
        ...


class Written:
    """Dialogues that somebody wrote down; each pass goes through all of them in another order."""

    def __init__(self, dialogues: Sequence[Demonstration], *, seed: int, batch_rows: int) -> None:
        """Raises FormatError if there is none."""
        if not dialogues:
            raise FormatError("there is no demonstration to learn from", hint="write one dialogue a line; see docs/guides/warm-start.md")
        self._dialogues = dialogues
        self._seed = seed
        self._batch_rows = batch_rows
        self._order: tuple[int, list[int]] = (-1, [])

    def at(self, step: int, row: int) -> Demonstration:
        """See `Demonstrations`."""
        number, place = divmod(step * self._batch_rows + row, len(self._dialogues))
        if self._order[0] != number:
            order = list(range(len(self._dialogues)))
            random.Random(f"pass {self._seed} {number}").shuffle(order)
            self._order = number, order
        return self._dialogues[self._order[1][place]]


def read_dialogues(path: Path, renderer: ChatRenderer) -> Iterator[Demonstration]:
    """The dialogues of a file as ids. Raises FormatError, naming the line, for one that is not what the top of this file says."""
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                yield _dialogue(json.loads(line), renderer)
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                reason = f"lacks {error}" if isinstance(error, KeyError) else str(error)
                raise FormatError(f"{path}:{number}: not a dialogue: {reason}", hint="see docs/guides/warm-start.md for the form") from None


def demonstrate(renderer: ChatRenderer, messages: Sequence[Message], weight: float = 1.0) -> Demonstration:
    """A dialogue as an engine would have recorded it: what the policy says has `weight`, all else 0.

    Raises ValueError if the policy does not have the last word, or says what no engine would take as a turn.
    """
    spoken = [index for index, message in enumerate(messages) if message.role == "assistant"]
    if not spoken or spoken[-1] != len(messages) - 1:
        raise ValueError("the last message must be the assistant's")
    ids = list(renderer.prompt(messages[: spoken[0]]))
    weights = [0.0] * len(ids)
    for place, index in enumerate(spoken):
        said = _said(renderer, messages[index])
        ids += said
        weights += [weight] * len(said)
        if index != spoken[-1]:
            shown = renderer.follow(messages[index + 1 : spoken[place + 1]])
            ids += shown
            weights += [0.0] * len(shown)
    return Demonstration(ids, weights)


def _said(renderer: ChatRenderer, message: Message) -> list[int]:
    """One turn as the policy is to sample it, with the id that ends it."""
    special = renderer.special
    calls: list[int] = []
    if message.calls:
        if special.tool_call_end is None:
            raise ValueError("with this tokenizer calls have no end: it is not of the family that a run's policy is")
        calls = [special.tool_call_start, *renderer.encode(calls_text(message.calls)), special.tool_call_end]
    ids = [*renderer.encode(message.content), *calls, special.im_end]
    if (fault := read_turn(renderer, ids).fault) is not None:
        raise ValueError(f"with this tokenizer a message of the assistant is no well-formed turn ({fault})")
    return ids


def _dialogue(document: Mapping[str, object], renderer: ChatRenderer) -> Demonstration:
    if unknown := sorted(set(document) - {"messages", "weight"}):
        raise ValueError(f"{unknown[0]} is not a field")
    messages = [_message(entry) for entry in cast(Sequence[Mapping[str, object]], document["messages"])]
    weight = document.get("weight", 1.0)
    if not isinstance(weight, int | float) or not 0 < weight < float("inf"):
        raise ValueError(f"weight is {weight!r}, not a number above 0")
    return demonstrate(renderer, messages, float(weight))


def _message(entry: Mapping[str, object]) -> Message:
    if unknown := sorted(set(entry) - {"role", "content", "calls"}):
        raise ValueError(f"{unknown[0]} is not a field of a message")
    role, content = entry["role"], entry.get("content", "")
    if role not in get_args(Role) or not isinstance(content, str):
        raise ValueError(f"a message with role {role!r} and content {content!r}")
    calls = tuple(
        ToolCall(str(call["name"]), dict(cast(Mapping[str, Value], call.get("arguments", {}))))
        for call in cast(Sequence[Mapping[str, object]], entry.get("calls", ()))
    )
    if calls and role != "assistant":
        raise ValueError(f"a call by {role}")
    return Message(cast(Role, role), content, calls=calls)
