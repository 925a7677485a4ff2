"""What a Mac sends: turns, episodes and groups, as plain frozen records of numpy arrays.

Bytes of a group are `shard.py`'s, distrust of it is `admit.py`'s. Token ids are the only truth: an episode is one
sequence in which sampled tokens are marked and each has one logprob.

Legend: T tokens of an episode, S sampled tokens of an episode (S = sum of mask), K turns.
"""

import re
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from stoa.contracts.fleet_messages import Purpose

_NUMERIC = re.compile(r"[0-9A-Za-z.+]+-[0-9a-f]{12}")
StopReason = Literal["answered", "malformed", "turn_limit", "token_limit", "call_limit"]
"""Why an episode ended; all are the policy's own doing. Infrastructure faults make no episode."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One sampled message: tokens [start, end) of the episode, end exclusive, its stop id included when it was sampled."""

    start: int
    end: int
    stopped: bool
    """True if the turn ended with a stop id, False if it ran into a token limit."""


@dataclass(frozen=True, slots=True)
class Episode:
    """One play of a question.

    ids: int32 [T]; mask: uint8 [T], 1 where the token was sampled; logprobs: float32 [S], natural log of the
    probability under the distribution sampled from (temperature 1, no filters).
    """

    question_id: str
    ids: NDArray[np.int32]
    mask: NDArray[np.uint8]
    logprobs: NDArray[np.float32]
    turns: tuple[Turn, ...]
    reward: float
    reward_parts: dict[str, float]
    stop_reason: StopReason
    seconds: float = 0.0
    routing: NDArray[np.uint8] | None = None
    """Optional uint8 [T, moe_layers, top_k]: experts chosen by the sampler."""


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds and counts of the sweep a group came from, for reports; untrusted."""

    sweep_started_at: float = 0.0
    """Unix seconds."""
    decode_seconds: float = 0.0
    """From the start of the sweep to the end of this group's last episode."""
    pull_latency_seconds: float = 0.0
    idle_seconds: float = 0.0
    num_sampled_tokens: int = 0
    batch_occupancy: float = 0.0
    """Mean episodes of a step of this sweep so far, over the most that could run at once; 0 where the Mac did not say."""
    prefix_hit_share: float = 0.0
    """Share of the prompt tokens of episodes begun so far that were in the cache already."""
    peak_memory_bytes: int = 0
    """Most that the engine has held since it began; 0 where the Mac did not say."""


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What produced the numbers: an engine that changes shows here."""

    engine: str
    """For example "mlx 0.32.4 cpu x86_64 plain 0.32.4-328339b4b247"."""
    build: str
    """Version of this project."""

    @property
    def numeric(self) -> str:
        """Name of what the engine makes of a fixed model, the last word of `engine`; "" where it did not say."""
        last = self.engine.rpartition(" ")[2]
        return last if _NUMERIC.fullmatch(last) else ""


@dataclass(frozen=True, slots=True)
class Group:
    """The episodes of one question that share a baseline; in an evaluation, one part's episodes of many questions."""

    run: str
    host: str
    sweep: int
    group: int
    purpose: Purpose
    question_id: str
    """Empty in an evaluation."""
    version: int
    state_id: str
    """Of the weights that were in the engine, computed from its memory."""
    temperature: float
    seed: int
    episodes: tuple[Episode, ...]
    fingerprint: Fingerprint
    timings: Timings = field(default_factory=Timings)

    @property
    def num_tokens(self) -> int:
        """Tokens of all episodes, prompts and tool results included."""
        return sum(len(e.ids) for e in self.episodes)

    @property
    def rewards(self) -> NDArray[np.float64]:
        """float64 [num_episodes], as the Mac claims them."""
        return np.array([e.reward for e in self.episodes], dtype=np.float64)
