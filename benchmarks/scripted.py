"""Episodes that are written down beforehand: what two engines are made to play alike, whatever their weights would say.

An episode is its question's prompt and its turns; a turn ends with CALL, to which the environment replies, or with END.
Prompts, turns and replies are random ids, with the numbers of tokens that a shape gives.

Legend: V vocabulary.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from environments.base import Limits, Outcome, Question, Reply

CALL: Final = 4
END: Final = 5
_FIRST_ID: Final = 8


@dataclass(frozen=True, slots=True)
class Shape:
    """Fewest and most tokens of each part; `turns`: fewest and most turns, all equally likely."""

    prompt: tuple[int, int]
    turn: tuple[int, int]
    reply: tuple[int, int]
    turns: tuple[int, int]


class Script:
    """The written episodes of `num_groups` x `group_size`. An `environments.base.Environment` for the task they are of."""

    name = "scripted"
    stop_ids = frozenset({CALL, END})

    def __init__(self, shape: Shape, vocab_size: int, num_groups: int, group_size: int, *, seed: int = 0) -> None:
        self._shape, self._vocab_size = shape, vocab_size
        numbers = random.Random(f"script {seed}")
        self.prompts = [self._ids(numbers, shape.prompt) for _ in range(num_groups)]
        self.group_size = group_size
        self.turns: list[list[tuple[int, ...]]] = []
        """Of each episode, group by group."""
        for _ in range(num_groups * group_size):
            num_turns = numbers.randint(*shape.turns)
            ends = [CALL] * (num_turns - 1) + [END]
            self.turns.append([(*self._ids(numbers, (shape.turn[0] - 1, shape.turn[1] - 1)), end) for end in ends])
        longest = shape.prompt[1] + shape.turns[1] * (shape.turn[1] + shape.reply[1])
        self.limits = Limits(shape.turns[1], shape.turn[1], longest)

    @cached_property
    def forced(self) -> list[dict[int, int]]:
        """Of each episode: the token at each position that is sampled."""
        found: list[dict[int, int]] = []
        for episode, turns in enumerate(self.turns):
            place, at = len(self.prompts[episode // self.group_size]), {}
            for number, turn in enumerate(turns):
                at |= {place + index: token for index, token in enumerate(turn)}
                place += len(turn) + len(self.reply("", turns[: number + 1]).ids)
            found.append(at)
        return found

    @property
    def mean_tokens(self) -> float:
        """Mean length of an episode."""
        return sum(max(forced) + 1 for forced in self.forced) / len(self.forced)

    @property
    def num_sampled_tokens(self) -> int:
        """Of all episodes."""
        return sum(len(turn) for turns in self.turns for turn in turns)

    def question_ids(self, split: str) -> Sequence[str]:
        """One question a group."""
        return [str(group) for group in range(len(self.prompts))] if split == "train" else []

    def question(self, question_id: str) -> Question:
        """A question of no words."""
        return Question(question_id, "", (), "train", "")

    def prompt_ids(self, question_id: str) -> tuple[int, ...]:
        """The group's prompt."""
        return self.prompts[int(question_id)]

    def reply(self, question_id: str, turns: Sequence[Sequence[int]]) -> Reply:
        """Ids made from the last turn, or the end."""
        if turns[-1][-1] != CALL:
            return Reply((), True, "answered")
        return Reply(self._ids(random.Random(f"reply {list(turns[-1])}"), self._shape.reply), False, "")

    def reply_of(self, episode: int, num_turns: int) -> tuple[int, ...] | None:
        """What follows an episode's first turns; None if it ends there."""
        reply = self.reply("", self.turns[episode][:num_turns])
        return None if reply.done else reply.ids

    def score(self, question_id: str, turns: Sequence[Sequence[int]]) -> Outcome:
        """Nothing is right or wrong here."""
        return Outcome(0.0, {})

    def _ids(self, numbers: random.Random, tokens: tuple[int, int]) -> tuple[int, ...]:
        return tuple(numbers.randrange(_FIRST_ID, self._vocab_size) for _ in range(numbers.randint(*tokens)))
