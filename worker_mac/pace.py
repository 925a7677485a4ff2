"""How many tokens a step may feed, so that none takes longer than the system and the Mac's user put up with.

macOS ends work on the GPU that keeps the display waiting, and a worker that is asked to leave does so between two steps.
Pure: it is told what steps took.
"""

from typing import Final

STEP_SECONDS: Final = 0.25
"""Longest step."""
FIRST_TOKENS: Final = 256
LEAST_TOKENS: Final = 16
MOST_TOKENS: Final = 1024
_SPARE: Final = 0.6
"""A step below this share of the longest one leaves room for more tokens, if it had as many as it might."""
_GROWTH: Final = 1.25
_CAUTION: Final = 0.9


class Pace:
    """The budget of a step, learned from the steps before."""

    def __init__(self, step_seconds: float = STEP_SECONDS) -> None:
        self._step_seconds = step_seconds
        self.tokens = FIRST_TOKENS

    def saw(self, num_tokens: int, seconds: float) -> None:
        """A step with so many tokens took so long."""
        if seconds > self._step_seconds:
            fitting = int(num_tokens * self._step_seconds / seconds * _CAUTION)
            self.tokens = max(LEAST_TOKENS, min(self.tokens, fitting))
        elif seconds < _SPARE * self._step_seconds and num_tokens >= self.tokens:
            self.tokens = min(MOST_TOKENS, int(self.tokens * _GROWTH))

    def interrupted(self, num_tokens: int) -> None:
        """The system ended a step with so many tokens."""
        self.tokens = max(LEAST_TOKENS, min(self.tokens, num_tokens) // 2)
