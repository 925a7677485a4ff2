"""A task on bare ids for the Mac worker's tests, and rows that need no model.

Question "N" has a prompt of 6 + N ids. A turn ends with a stop id; after each of the first `num_turns - 1` turns the
environment appends three ids made from the turn; the reward is 1 if the last turn's first id is even.
"""

from collections.abc import Callable, Sequence

import numpy as np

from environments.base import Limits, Outcome, Question, Reply
from stoa.contracts.errors import InfrastructureFaultError

STOPS = frozenset(range(24))


class Dialogue:
    name = "dialogue"

    def __init__(self, *, num_turns: int = 3, max_turn_tokens: int = 12, stop_ids: frozenset[int] = STOPS) -> None:
        self.num_turns = num_turns
        self.limits = Limits(4, max_turn_tokens, 128)
        self.stop_ids = stop_ids
        self.faults: set[str] = set()

    def question_ids(self, split: str) -> list[str]:
        return [str(number) for number in (range(40) if split == "train" else range(40, 60))]

    def question(self, question_id: str) -> Question:
        return Question(question_id, question_id, (), "train", "")

    def prompt_ids(self, question_id: str) -> tuple[int, ...]:
        return tuple(30 + (7 * int(question_id) + place) % 200 for place in range(6 + int(question_id)))

    def reply(self, question_id: str, turns: Sequence[Sequence[int]]) -> Reply:
        if question_id in self.faults:
            raise InfrastructureFaultError("the tool's server is away")
        if turns[-1][-1] not in self.stop_ids:
            return Reply((), True, "malformed")
        if len(turns) < self.num_turns:
            return Reply((100, 30 + turns[-1][0] % 50, 101), False, "")
        return Reply((), True, "answered")

    def score(self, question_id: str, turns: Sequence[Sequence[int]]) -> Outcome:
        return Outcome(float(turns[-1][0] % 2 == 0), {"turns": float(len(turns))})


class ScriptedRows:
    """Rows whose next token is a function of what they were fed: (ids so far) -> next id. Checks how it is used."""

    def __init__(self, next_id: Callable[[list[int]], int]) -> None:
        self.next_id = next_id
        self.fed: list[list[int]] = []
        self.steps: list[int] = []

    def begin(self, prompts: Sequence[np.ndarray], rows: np.ndarray) -> int:
        self.fed = [[int(i) for i in prompts[row][:-1]] for row in rows]
        return sum(len(prompt) - 1 for prompt in prompts)

    def feed(self, rows: np.ndarray, tokens: Sequence[np.ndarray]) -> None:
        for row, ids in zip(rows, tokens, strict=True):
            self.fed[row] += [int(i) for i in ids]

    def step(self, tokens: np.ndarray, uniform: np.ndarray, active: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        assert len(tokens) == len(uniform) == len(active) == len(self.fed)
        self.steps.append(int(active.sum()))
        out = np.zeros(len(tokens), np.int32)
        for row in np.flatnonzero(active):
            self.fed[row].append(int(tokens[row]))
            out[row] = self.next_id(self.fed[row])
        return out, np.where(active, -uniform, np.nan).astype(np.float32)

    def keep(self, rows: np.ndarray) -> None:
        self.fed = [self.fed[row] for row in rows]

    def routing(self, row: int, num_tokens: int) -> None:
        return None
