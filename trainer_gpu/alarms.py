"""Alarms on a step's metrics: which bounds were crossed, and what the run asked to be done about it."""

from dataclasses import dataclass
from typing import Final

import structlog

from stoa.config.run import Alarm, Alarms

_FIRES_BELOW: Final = frozenset({"ess_fraction"})

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Rung:
    """metrics: `alarm_<name>` = 1 for every alarm that fired. pause: why the trainer should pause, empty if it should not."""

    metrics: dict[str, float]
    pause: str


def ring(alarms: Alarms, metrics: dict[str, float]) -> Rung:
    """Hold every alarm against the metric of its name."""
    fired: dict[str, float] = {}
    pauses: list[str] = []
    for name in Alarms.model_fields:
        alarm: Alarm = getattr(alarms, name)
        below = name in _FIRES_BELOW
        value = metrics[name]
        if value < alarm.threshold if below else value > alarm.threshold:
            log.warning("alarm_fired", name=name, value=value, threshold=alarm.threshold, action=alarm.action)
            fired[f"alarm_{name}"] = 1.0
            if alarm.action == "pause":
                pauses.append(f"{name} is {value:.3g}, {'below' if below else 'above'} {alarm.threshold:.3g}")
    return Rung(fired, "; ".join(pauses))
