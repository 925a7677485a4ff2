"""Everything known of one run, as plain rows: what the live view, metrics.jsonl and the report are made from.

Only shapes: `collect.py` fills them from the bucket and the sessions, `summary.py` and `plots.py` read them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from cli.transcript import EpisodeView
from stoa.config.run import Prices
from stoa.contracts.evaluation_messages import EvaluationResult
from stoa.contracts.fleet_messages import SessionStatus

Held = Literal["", "waits", "ahead"]
"""What a paused run has its Macs do: wait, or play on while the trainer alone is paused. "" for one that is not paused."""


@dataclass(frozen=True, slots=True)
class HostShare:
    """What one host sent to one step."""

    accepted: int = 0
    refused: Mapping[str, int] = field(default_factory=dict)
    """Reason -> groups."""
    quarantined: bool = False
    sampled_tokens: int = 0
    decode_seconds: float = 0.0
    pull_latency_seconds: float = 0.0
    idle_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class StepRow:
    """One optimizer step, from its manifest."""

    step: int
    version: int
    """Version that was the newest when the step began."""
    epoch: int
    key: str
    parent_key: str
    started_at: float
    """Unix seconds at which its groups were there: after the wait."""
    wait_seconds: float
    train_seconds: float
    consumed: tuple[str, ...]
    dropped: Mapping[str, str]
    """Group key -> reason."""
    refused: tuple[tuple[str, str, str], ...]
    """Group key, host, reason."""
    hosts: Mapping[str, HostShare]
    metrics: Mapping[str, float]
    facts: Mapping[str, str] = field(default_factory=dict)
    """What the numbers mean, such as the gate's mode; alarms stand here too."""
    gated: tuple[str, ...] = ()
    """Groups of which it is kept what the gate dropped."""


@dataclass(frozen=True, slots=True)
class VersionRow:
    """One published version, from its manifest."""

    version: int
    step: int
    epoch: int
    key: str
    sha256: str
    parent_version: int
    """-1 for the first version."""
    parent_sha256: str
    state_id: str
    parent_state_id: str
    published_at: float
    delta_bytes: int
    anchor_bytes: int
    anchor_version: int
    changed_fraction: float
    latency_seconds: float
    """From the end of the last optimizer step to the manifest; 0 if that is not known."""
    work_seconds: float = 0.0
    """That scanning, encoding and uploading took, as the manifest says."""

    @property
    def publish_seconds(self) -> float:
        """Of the latency, what was publishing."""
        return min(self.work_seconds, self.latency_seconds)

    @property
    def held_seconds(self) -> float:
        """The rest of the latency: a pause, an outage, a wait for HEAD's turn or for an anchor that had to be there first."""
        return self.latency_seconds - self.publish_seconds


@dataclass(frozen=True, slots=True)
class RunFacts:
    """What was settled before the first step."""

    run: str
    model: str
    environment: str
    seed: int
    created_at: float
    settings: str
    """The resolved configuration, as indented JSON."""
    groups_per_version: int
    groups_per_step: int = 0
    equal_rewards_alarm: float = 1.0
    """Share of groups of equal rewards above which the run's alarm rings."""
    head_poll_seconds: float = 10.0
    prices: Prices = field(default_factory=Prices)
    gpu_usd_an_hour: float = 0.0


@dataclass(frozen=True, slots=True)
class Landing:
    """One group of a sweep: finished by the Mac's clock, there by the bucket's, which tells whole seconds. Unix seconds."""

    finished_at: float
    landed_at: float
    num_bytes: int


@dataclass(frozen=True, slots=True)
class SweepBar:
    """One sweep that brought groups in the publish interval that is looked at. Unix seconds, by the Mac's clock."""

    host: str
    sweep: int
    version: int
    started_at: float
    """0 if nobody read a group of it."""
    pull_latency_seconds: float
    landings: tuple[Landing, ...]

    @property
    def ended_at(self) -> float:
        """When its last group was finished."""
        return max((landing.finished_at for landing in self.landings), default=self.started_at)


@dataclass(frozen=True, slots=True)
class Told:
    """An episode worth reading, and why."""

    title: str
    episode: EpisodeView


@dataclass(frozen=True, slots=True)
class RunRecord:
    """A run up to now."""

    facts: RunFacts
    state: str = "created"
    waiting_for: str = ""
    held: Held = ""
    end_reason: str = ""
    started_at: float = 0.0
    ended_at: float = 0.0
    seconds_before: float = 0.0
    """Time that the run went on before `started_at`, as a resumed one does: without the time between."""
    version: int = -1
    """Of HEAD."""
    max_steps: int = 0
    """At which it ends by itself, 0 for none: the limit in force, which a resumed run may have changed."""
    live_step: int = 0
    """Newest step the workflow tells of: ahead of HEAD between two versions."""
    step: int = 0
    """Of HEAD."""
    steps: tuple[StepRow, ...] = ()
    """Oldest first, the lineage of HEAD."""
    noted_dropped: Mapping[str, str] = field(default_factory=dict)
    """Groups that were dropped and that no step tells of, if the bucket was asked: key -> reason."""
    noted_refused: Mapping[str, str] = field(default_factory=dict)
    """The same of groups that were refused."""
    versions: tuple[VersionRow, ...] = ()
    """Oldest first, the chain of HEAD."""
    evaluations: tuple[EvaluationResult, ...] = ()
    """Oldest version first."""
    sessions: tuple[SessionStatus, ...] = ()
    sessions_early: tuple[SessionStatus, ...] = ()
    """The sessions as they were when start-up was over, if somebody watched."""
    waits: Mapping[str, int] = field(default_factory=dict)
    """What live sessions said they waited for -> times it was heard, if somebody watched."""
    bucket_bytes: Mapping[str, int] = field(default_factory=dict)
    """Kind of object -> bytes in the bucket."""
    bucket_objects: Mapping[str, int] = field(default_factory=dict)
    """Kind of object -> objects in the bucket."""
    heads_seen: tuple[tuple[int, str], ...] = ()
    """Version and manifest sha256 of every HEAD that was read while the run went on."""
    restarts: Mapping[str, int] = field(default_factory=dict)
    """Worker -> times it was started again."""
    gpu_hours: float = 0.0
    interval: int = -1
    """Version whose time as the newest `sweeps` are of; -1: none was looked at."""
    sweeps: tuple[SweepBar, ...] = ()
    transcripts: tuple[Told, ...] = ()
    engines: Mapping[str, str] = field(default_factory=dict)
    """Host -> engine and build that sampled the groups that were looked at."""
    software: Mapping[str, str] = field(default_factory=dict)
    """Package -> version, of the machine that wrote the report."""

    @property
    def seconds(self) -> float:
        """That the run went on, up to its end or the newest fact."""
        return self.seconds_before + max(0.0, self.ended_at - self.started_at)
