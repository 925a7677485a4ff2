"""Alarms on a step's metrics: what is worked out from the steps before, which bounds were crossed, what is done about it.

A bound and its action are the config's; a pause is the workflow's to make, and Macs go on generating meanwhile. What an
alarm needs of the past is read back from step manifests, so that a resumed trainer judges as one that never stopped.
"""

import math
import statistics
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Final

import structlog

from stoa.bucket.head import Head
from stoa.bucket.steps import lineage
from stoa.bucket.store import Store
from stoa.config.run import Alarm, Alarms
from trainer_gpu.eval_watch import NONE_SEEN

PAST_STEPS: Final = 20
"""Steps that a running mean or median looks back, and steps whose mean a run's beginning is."""
LEAST_PAST: Final = 5
"""Steps before which nothing is compared with the past."""
RISING_STEPS: Final = 5
HACKING_STEPS: Final = 10
"""Steps of either of two stretches whose means tell whether looser and stricter marks part."""
MARKS: Final = ("cover", "reward_mean")
"""Metrics of the loosest and the strictest mark of an answer."""
LEAST_MISMATCH: Final = 0.004
"""Mean |pi - mu| that int8 alone makes; no run's beginning counts as less."""
LEAST_VERSIONS: Final = 3
"""Versions before which the share of changed codes is not compared with the usual one."""

_FIRES_BELOW: Final = frozenset({"ess_fraction"})
_GO_ON: Final = "See the metrics in `stoa report`; `stoa resume RUN` goes on, `stoa stop RUN` ends the run"
_FAR: Final = "`stoa canary --decompose` tells what of it is the engine, int8 and age; less learning rate or staleness lowers it"
_COLLAPSE: Final = "start again from an earlier version with less learning rate if the next steps do not mend it"
_READ: Final = "read some of the newest episodes: a reward may be won without answering"
ADVICE: Final[Mapping[str, str]] = {
    "gate_drop_rate": _FAR,
    "mismatch_mean": _FAR,
    "mismatch_ratio": _FAR,
    "mismatch_climb": _FAR,
    "bad_fraction": _COLLAPSE,
    "ess_fraction": _FAR,
    "ess_fall": _FAR,
    "grad_norm_ratio": "look at the step's groups; a rare one may be let pass",
    "logprob_positive_fall": _COLLAPSE,
    "entropy_shift": _COLLAPSE,
    "cover_gap_rise": _READ,
    "hacking": _READ,
    "answer_words_ratio": _READ,
    "truncated_rate": "answers no longer fit the token limit, or the policy has stopped ending them",
    "malformed_rate": _READ,
    "unanswered_rate": _READ,
    "refused_wrong_state": "a Mac plays on weights that no version has, though it checks them itself: quarantine it and compare its build",
    "zero_variance_fraction": "the policy solves nearly all of its questions or none: use others",
    "staleness_beyond_fraction": "Macs take too long over a sweep: let them play fewer groups at once",
    "infra_fault_rate": "episodes end in faults that are not the policy's: look at the logs of the Macs",
    "quarantined_share": "many at once have one cause: compare their builds in `stoa status`",
    "changed_ratio": "a step was far larger than before it: compare grad_norm and learning_rate",
    "changed_nothing": "steps too small to move a code: raise learning.learning_rate or lower publish.hysteresis",
    "eval_fall": "held-out results can be unlucky once; wait for the next",
    "eval_fall_twice": "the policy got worse than it began: start again from the version that did best",
}
"""What to look at or do when an alarm fires."""

log = structlog.get_logger()
Metrics = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Rung:
    """metrics: what was worked out, and `alarm_<name>`, `warning_<name>` = 1 for what was crossed.

    pause: why the trainer should pause and how to go on, empty if it should not.
    """

    metrics: dict[str, float]
    pause: str


class AlarmBook:
    """The alarms of one lease. One thread."""

    def __init__(self, alarms: Alarms, past: Iterable[Metrics] = ()) -> None:
        """`past`: metrics of the newest steps, oldest first, as they stand in their manifests."""
        self._alarms = alarms
        self._past: deque[Metrics] = deque(past, maxlen=PAST_STEPS)
        self._rung_unstepped = False

    @property
    def eval_seen(self) -> float:
        """Version of the newest held-out result that was judged, NONE_SEEN for none."""
        return self._past[-1].get("eval_seen", NONE_SEEN) if self._past else NONE_SEEN

    @classmethod
    def of_run(cls, alarms: Alarms, store: Store, head: Head) -> "AlarmBook":
        """As if this process had trained the steps that HEAD names."""
        newest = [manifest.metrics for manifest in islice(lineage(store, head), PAST_STEPS)]
        return cls(alarms, reversed(newest))

    def ring(self, metrics: Metrics) -> Rung:
        """Hold every alarm against the metric of its name, and remember the step."""
        found = derived(metrics, list(self._past))
        whole = {**metrics, **found}
        pauses: list[str] = []
        for name in Alarms.model_fields:
            alarm: Alarm = getattr(self._alarms, name)
            if alarm.warn is not None and self._held(name, whole, alarm.warn, alarm.steps):
                found[f"warning_{name}"] = 1.0
                log.info("alarm_near", name=name, value=whole[name], warn=alarm.warn, threshold=alarm.threshold)
            if not self._held(name, whole, alarm.threshold, alarm.steps):
                continue
            found[f"alarm_{name}"] = 1.0
            log.warning("alarm_fired", name=name, value=whole[name], threshold=alarm.threshold, action=alarm.action)
            if alarm.action == "pause":
                pauses.append(_sentence(name, whole[name], alarm))
        self._past.append({**metrics, **found})
        self._rung_unstepped = False
        return Rung(found, f"{'. '.join(pauses)}. {_GO_ON}" if pauses else "")

    def ring_unstepped(self, num_flat: int, num_wanted: int) -> str:
        """The alarm of equal rewards while no step can be made for want of other groups; why to pause, empty if not, once a step.

        Args:
            num_flat: groups of equal rewards that came since the last step.
            num_wanted: groups of a step: what the share would be if they all came now.
        """
        name, alarm = "zero_variance_fraction", self._alarms.zero_variance_fraction
        share = num_flat / (num_flat + num_wanted)
        if self._rung_unstepped or share <= alarm.threshold:
            return ""
        self._rung_unstepped = True
        log.warning("alarm_fired", name=name, value=share, threshold=alarm.threshold, action=alarm.action, groups=num_flat)
        if alarm.action != "pause":
            return ""
        saw = f"{name} is at least {share:.3g}, above {alarm.threshold:.3g}: {num_flat} groups came, and too few others for a step"
        return f"{saw}; {ADVICE[name]}. {_GO_ON}"

    def _held(self, name: str, metrics: Metrics, bound: float, steps: int) -> bool:
        """Whether the metric is beyond its bound now and was so in the steps just before."""
        recent = [*self._past, metrics][-steps:]
        return len(recent) == steps and all(name in one and _beyond(name, one[name], bound) for one in recent)


def derived(metrics: Metrics, past: list[Metrics]) -> dict[str, float]:
    """What only the past tells; arXiv 2602.04879 names the mismatch and sinking good tokens as what comes before a collapse.

    Args:
        metrics: of this step.
        past: of the steps before it, oldest first.
    """
    known = past[-1].get("start_steps", 0.0) if past else 0.0
    gap = metrics["cover"] - metrics["exact_match"]
    starts = {
        "entropy_start": _start(metrics["entropy"], past, "entropy_start", known),
        "cover_gap_start": _start(gap, past, "cover_gap_start", known),
        "answer_words_start": _start(metrics["answer_words_mean"], past, "answer_words_start", known),
        "mismatch_start": _start(metrics["mismatch_mean"], past, "mismatch_start", known),
    }
    enough = len(past) >= LEAST_PAST
    norms = [one["grad_norm"] for one in past]
    good = statistics.fmean(one["logprob_positive_mean"] for one in past) if enough else 0.0
    mismatches = [one["mismatch_mean"] for one in [*past, metrics][-RISING_STEPS - 1 :]]
    rising = len(mismatches) == RISING_STEPS + 1 and all(a < b for a, b in pairwise(mismatches))
    before = past[-RISING_STEPS]["ess_fraction"] if enough else metrics["ess_fraction"]
    return {
        **starts,
        **_of_versions(metrics, past),
        "eval_seen": metrics.get("eval_version", past[-1].get("eval_seen", NONE_SEEN) if past else NONE_SEEN),
        "start_steps": min(known + 1, float(PAST_STEPS)),
        "entropy_shift": _octaves(metrics["entropy"], starts["entropy_start"]),
        "cover_gap": gap,
        "cover_gap_rise": gap - starts["cover_gap_start"],
        "answer_words_ratio": metrics["answer_words_mean"] / max(starts["answer_words_start"], 1.0),
        "hacking": _hacking([*past, metrics]),
        "grad_norm_ratio": metrics["grad_norm"] / max(statistics.median(norms), 1e-30) if enough else 1.0,
        "logprob_positive_fall": max(0.0, (good - metrics["logprob_positive_mean"]) / max(-good, 1e-30)) if enough else 0.0,
        "mismatch_climb": metrics["mismatch_mean"] if rising else 0.0,
        "mismatch_ratio": metrics["mismatch_mean"] / max(starts["mismatch_start"], LEAST_MISMATCH),
        "ess_fall": max(0.0, 1.0 - metrics["ess_fraction"] / max(before, 1e-30)),
    }


def _of_versions(metrics: Metrics, past: list[Metrics]) -> dict[str, float]:
    """The share of codes that a version changed against the running mean of those before it, carried from step to step.

    `changed_fraction` is there in the first step after a version whose weights had moved.
    """
    last = past[-1] if past else {}
    num, usual = last.get("num_versions_seen", 0.0), last.get("changed_usual", 0.0)
    changed = metrics.get("changed_fraction")
    if changed is None:
        return {"num_versions_seen": num, "changed_usual": usual}
    share = 1.0 / min(num + 1, float(PAST_STEPS))
    found = {
        "num_versions_seen": num + 1,
        "changed_usual": usual + share * (changed - usual),
        "changed_nothing": float(changed == 0 and metrics["learning_rate"] > 0),
    }
    return found | ({"changed_ratio": changed / max(usual, 1e-30)} if num >= LEAST_VERSIONS else {})


def _hacking(steps: list[Metrics]) -> float:
    """The smaller of how much the loose mark rose and the strict one fell between two stretches of steps; 0 if either did not."""
    old, new = steps[-2 * HACKING_STEPS : -HACKING_STEPS], steps[-HACKING_STEPS:]
    if len(old) < HACKING_STEPS:
        return 0.0
    rise, fall = (
        statistics.fmean(one[name] for one in new) - statistics.fmean(one[name] for one in old) for name in ("cover", "reward_mean")
    )
    return max(0.0, min(rise, -fall))


def _start(value: float, past: list[Metrics], name: str, num_known: float) -> float:
    """Mean of the run's first PAST_STEPS steps: carried from step to step, and finished once it has all of them."""
    if num_known < 1:
        return value
    before = past[-1][name]
    return before if num_known >= PAST_STEPS else before + (value - before) / (num_known + 1)


def _octaves(value: float, start: float) -> float:
    """How many times a value has doubled or halved since the start."""
    return abs(math.log2(max(value, 1e-12) / max(start, 1e-12)))


def _beyond(name: str, value: float, bound: float) -> bool:
    return value < bound if name in _FIRES_BELOW else value > bound


def _sentence(name: str, value: float, alarm: Alarm) -> str:
    side = "below" if name in _FIRES_BELOW else "above"
    held = f" for {alarm.steps} steps" if alarm.steps > 1 else ""
    return f"{name} is {value:.3g}, {side} {alarm.threshold:.3g}{held}: {ADVICE[name]}"
