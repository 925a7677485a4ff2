"""Frozen dataclasses that cross Temporal: what an evaluation, its parts and the run say to each other.

The rules of `messages.py` hold here too: standard-library types, small fields, new ones with defaults.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class EvaluationPlan:
    """Held-out evaluation: every `every_versions` on `num_questions`, and at start and end on `num_questions_final`."""

    every_versions: int = 4
    num_questions: int = 128
    num_questions_final: int = 512
    """0: no evaluation at start and end."""
    questions_a_part: int = 64
    part_timeout_seconds: float = 600.0
    timeout_seconds: float = 1800.0
    """Longest evaluation; also how long the end of a run waits for its last one."""
    sample_seed: int = 0
    num_samples_final: int = 1
    """Samples of a question at start and end."""


@dataclass(frozen=True)
class EvaluationInput:
    """Input of EvaluationWorkflow: `num_questions` held-out questions from the fixed seeded order, `num_samples` of each."""

    run: str
    evaluation: str
    version: int
    num_questions: int
    questions_a_part: int = 64
    part_timeout_seconds: float = 600.0
    sample_seed: int = 0
    timeout_seconds: float = 1800.0
    num_samples: int = 1
    suspects: tuple[str, ...] = ()
    """Macs that are not to be asked while there are others."""


@dataclass(frozen=True)
class EvalAsk:
    """Argument of the update evaluate: a person wants a version examined. version -1: the newest; 0 questions: as at the end."""

    name: str
    version: int = -1
    num_questions: int = 0
    num_samples: int = 1


@dataclass(frozen=True)
class EvaluationStart:
    """Ask the control process to start an evaluation in the Macs' namespace."""

    input: EvaluationInput


@dataclass(frozen=True)
class EvalPart:
    """One part of an evaluation, for one Mac."""

    run: str
    evaluation: str
    version: int
    part: int
    question_ids: tuple[str, ...]
    num_samples: int = 1


@dataclass(frozen=True)
class EvalPartDone:
    """A session's answer to an `EvalPart`; `ok` False means give it to another Mac."""

    part: int
    host: str
    ok: bool
    keys: tuple[str, ...] = ()
    reason: str = ""
    num_episodes: int = 0
    num_sampled_tokens: int = 0
    decode_seconds: float = 0.0


@dataclass(frozen=True)
class EvalPlayer:
    """What one Mac did for an evaluation. Its hours are those from being handed a part to its answer."""

    host: str
    num_parts: int
    num_questions: int
    questions_an_hour: float
    tokens_per_second: float
    """While decoding."""


@dataclass(frozen=True)
class EvalPlayers:
    """Answer of EvaluationWorkflow's players query: the Macs that did most come first, at most fifty."""

    players: tuple[EvalPlayer, ...] = ()


@dataclass(frozen=True)
class HeldOutRequest:
    """Ask for one part of the fixed seeded choice of `num_questions` held-out questions."""

    run: str
    num_questions: int
    seed: int
    start: int
    limit: int


@dataclass(frozen=True)
class HeldOutPart:
    """Question ids `start` to `start + limit` of the choice; `num_questions` is what the task has, at most what was asked."""

    question_ids: tuple[str, ...]
    num_questions: int


@dataclass(frozen=True)
class ListMacsRequest:
    """Which Macs have a live session in this run: the page after `after_host`, by name."""

    run: str
    after_host: str = ""
    limit: int = 200


@dataclass(frozen=True)
class MacList:
    """Hosts of live sessions, one page; `next_host` is the `after_host` of the next, empty on the last."""

    hosts: tuple[str, ...] = ()
    next_host: str = ""


@dataclass(frozen=True)
class SummariseRequest:
    """Score the parts of an evaluation from their ids and write its summary."""

    run: str
    evaluation: str
    version: int
    keys: tuple[str, ...]
    num_questions: int
    num_samples: int = 1
    sample_seed: int = 0
    questions_a_part: int = 0
    """With it, questions that no part has are told as `redeal` and nothing is written; 0: the summary is final."""


@dataclass(frozen=True)
class EvaluationResult:
    """Held-out result of one version. Rates are in [0, 1].

    The interval is of pass@1, 95 %: Wilson's for one sample a question, else that of the bootstrap over questions.
    """

    run: str
    evaluation: str
    version: int
    num_questions: int
    pass_at_1: float
    interval_95: tuple[float, float]
    search_rate: float
    cover: float = 0.0
    exact_match: float = 0.0
    mean_tokens: float = 0.0
    key: str = ""
    error: str = ""
    num_samples: int = 1
    pass_at_k: float = -1.0
    """That one of `num_samples` samples is right; -1: there is one sample."""
    mean_turns: float = 0.0
    mean_answer_words: float = 0.0
    truncated_rate: float = 0.0
    malformed_rate: float = 0.0
    redeal: tuple[int, ...] = ()
    """Parts that are to be played again, by other Macs; of a result that stands, none."""
