"""What every environment is to the rest of the project: questions, ids in, ids out, a score.

The engine that samples and the trainer that checks a stranger's group use the same object, so all methods are pure
functions of their arguments. An environment sees token ids only; it never sees a model, a file or a server.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import Literal, Protocol, TypeVar

from stoa.contracts.errors import ConfigError, StoaError, UnknownNameError
from stoa.rollouts.records import StopReason

Split = Literal["train", "held_out", "transfer"]
"""What a question is for: training, examination on the same kind of questions, examination on another benchmark's."""
Setting = str | int | float | bool
SettingsT = TypeVar("SettingsT")
_ALIKE = 0.7
"""How like a key must be to be offered in another's place; as with the other keys of a configuration."""


class EpisodeOverError(StoaError):
    """Turns were given that follow a turn which ended the episode; no honest engine produces them."""


@dataclass(frozen=True, slots=True)
class Question:
    """One problem of the task. `source` names the document that holds the answer."""

    id: str
    text: str
    answers: tuple[str, ...]
    split: Split
    source: str


@dataclass(frozen=True, slots=True)
class Limits:
    """Sampled turns an episode, sampled tokens a turn, and all tokens (prompt included) an episode.

    `reply_seconds`: longest that `reply` and `score` of a turn may take together where a tool waits for a disk, a server
    or much arithmetic: both are then called from several threads at once, and too long is an infrastructure fault. 0:
    they are instantaneous.
    """

    max_turns: int
    max_turn_tokens: int
    max_episode_tokens: int
    reply_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Reply:
    """What follows the last sampled turn: ids to append while going on, or why the episode is done.

    `stop_reason` is "" while going on.
    """

    ids: tuple[int, ...]
    done: bool
    stop_reason: StopReason | Literal[""]


@dataclass(frozen=True, slots=True)
class Outcome:
    """The score of one whole episode.

    `parts` holds at least exact_match, cover, strict_cover, searched and malformed (each 0 or 1) and num_calls; where calls
    can find nothing, also num_empty, how many did.
    """

    reward: float
    parts: dict[str, float]


class Environment(Protocol):
    """A task. Every method is deterministic and keeps no state between calls."""

    name: str
    limits: Limits
    stop_ids: frozenset[int]

    def question_ids(self, split: Split) -> Sequence[str]:
        """Ids of all questions of a split, in a fixed order."""
        ...

    def question(self, question_id: str) -> Question:
        """The question of this id; UnknownNameError if there is none."""
        ...

    def prompt_ids(self, question_id: str) -> tuple[int, ...]:
        """The ids an episode starts with, up to where the first sampled turn begins."""
        ...

    def reply(self, question_id: str, turns: Sequence[Sequence[int]]) -> Reply:
        """What comes after all sampled turns so far (at least one, each with its stop id if it has one).

        Raises EpisodeOverError if a turn before the last one had already ended the episode.
        """
        ...

    def score(self, question_id: str, turns: Sequence[Sequence[int]]) -> Outcome:
        """The outcome of all sampled turns, from sampled ids only. An unfinished episode scores 0.

        Raises EpisodeOverError as `reply` does.
        """
        ...


def read_settings(environment: str, kind: type[SettingsT], settings: Mapping[str, Setting]) -> SettingsT:
    """Turn the settings of a run into the frozen dataclass `kind`, whose defaults give each setting its type.

    Raises ConfigError for a key that `kind` lacks (naming one that is like it, else all there are) or a value of another type.
    """
    defaults = {field.name: field.default for field in fields(kind)}  # pyright: ignore[reportArgumentType]
    for key, value in settings.items():
        if key not in defaults:
            raise ConfigError(f"environment {environment}: {key} is not a setting", hint=_meant(key, list(defaults)))
        wanted = type(defaults[key])
        if type(value) is not wanted and not (wanted is float and type(value) is int):
            raise ConfigError(
                f"environment {environment}: {key} = {value!r} is not of type {wanted.__name__}",
                hint=f"the default is {defaults[key]!r}",
            )
    return kind(**settings)


def in_range(environment: str, key: str, value: float, low: float, high: float) -> None:
    """Raise ConfigError unless low <= value <= high."""
    if not low <= value <= high:
        raise ConfigError(
            f"environment {environment}: {key} = {value} is out of range",
            hint=f"use a value from {low} to {high}",
        )


def one_of(environment: str, key: str, value: str, allowed: Sequence[str]) -> None:
    """Raise ConfigError unless the value is one of those allowed."""
    if value not in allowed:
        raise ConfigError(f"environment {environment}: {key} = {value!r} is not one of {', '.join(allowed)}", hint=_nearest(value, allowed))


def unknown_name(kind: str, name: str, known: Sequence[str]) -> UnknownNameError:
    """The error for a name that nothing answers to, with the nearest one that something does."""
    return UnknownNameError(f"no {kind} is called {name!r}", hint=_nearest(name, known))


def _meant(key: str, known: Sequence[str]) -> str:
    close = get_close_matches(key, known, n=1, cutoff=_ALIKE)
    return f"did you mean {close[0]}?" if close else f"environment.settings has: {', '.join(known)}"


def _nearest(name: str, known: Sequence[str]) -> str:
    close = get_close_matches(name, known, n=1, cutoff=0.0)
    return f"did you mean {close[0]}?" if close else ""
