"""What can happen to a run, beside the messages that say so themselves: the events that `apply` makes memory of.

Import the classes from here by name, never the module: a workflow's sandbox would load it a second time, and no class of
the one is a class of the other.
"""

from dataclasses import dataclass

from stoa.contracts.evaluation_messages import EvaluationResult, MacList
from stoa.contracts.fleet_messages import Census, FleetEvent, Released, StandingState
from stoa.contracts.messages import Acquired, AnchorCadence, Checkpointed, HeadStateResult, LeaseFound, Published, StepResult
from workflows.state import Evaluation


@dataclass(frozen=True)
class TrainerFailed:
    """A trainer activity failed for good: by an error of type `kind` (`timeout` for a lost one)."""

    command: str
    kind: str
    message: str
    hopeless: bool
    """Trying again cannot help."""


@dataclass(frozen=True)
class Interrupted:
    """A trainer activity was cancelled and gave up, with nothing done."""


@dataclass(frozen=True)
class DeskFailed:
    """A control activity failed after all its attempts."""

    command: str
    message: str


@dataclass(frozen=True)
class EvaluationOpened:
    """An evaluation runs now."""

    evaluation: Evaluation


@dataclass(frozen=True)
class EvaluationLost:
    """An evaluation will bring no result."""

    evaluation: Evaluation
    reason: str


@dataclass(frozen=True)
class VersionPublished:
    """The trainer published; `checkpoint` tells whether it saved itself with it."""

    published: Published
    checkpoint: bool


@dataclass(frozen=True)
class Asked:
    """A person asks."""

    what: str
    """pause, resume, drain or stop."""
    reason: str


@dataclass(frozen=True)
class CensusTaken:
    """One page of the fleet, asked for at `asked_at` from `after_host` on."""

    after_host: str
    asked_at: float
    census: Census


@dataclass(frozen=True)
class Told:
    """A session was told how its Mac stands."""

    host: str


@dataclass(frozen=True)
class Decided:
    """A person, or the trainer, decided about a Mac."""

    host: str
    state: StandingState
    reason: str
    on_trial: bool = False
    """The Mac is not told."""


Event = (
    Acquired
    | LeaseFound
    | StepResult
    | VersionPublished
    | Checkpointed
    | TrainerFailed
    | Interrupted
    | HeadStateResult
    | MacList
    | FleetEvent
    | Evaluation
    | EvaluationOpened
    | EvaluationLost
    | EvaluationResult
    | Released
    | DeskFailed
    | Asked
    | AnchorCadence
    | CensusTaken
    | Decided
    | Told
)
