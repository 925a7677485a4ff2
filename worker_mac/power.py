"""When a guest may work on somebody's Mac: a pure table from what is sensed and allowed to what is done, with its reason.

Every row of the table that applies objects at one level; the strictest wins. Getting stricter is immediate; getting
milder waits where the input is known to flap (power, heat, network), so that no worker starts and stops every few
seconds. Nothing here reads a clock or a sensor: `senses.py` does.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Final, Literal

from stoa.config.host import MacHost

State = Literal["full", "gentle", "hold", "finish", "pause"]
Kind = Literal["none", "user", "hours", "power", "heat", "memory", "network", "budget", "disk", "sleep", "crash"]
Thermal = Literal["nominal", "fair", "serious", "critical"]
Pressure = Literal["normal", "warn", "critical"]

_STRICTNESS: Final[dict[State, int]] = {"full": 0, "gentle": 1, "hold": 2, "finish": 3, "pause": 4}
_FLAPPING: Final[frozenset[Kind]] = frozenset(("power", "heat", "memory", "network"))
_STILL: Final[frozenset[Kind]] = frozenset(("network", "budget", "sleep"))
"""Objections to any use of the network."""
_HOURLY: Final = _FLAPPING - {"memory"}
"""Other programs' needs of memory come and go all day."""
_SETTLING: Final = "waiting until this stays over: "
SETTLE_SECONDS: Final = 60.0
"""What flaps must be quiet for this long before anything gets milder."""
RESTART_SECONDS: Final = 3600.0
"""Between two starts after a stop for power, heat or the network."""
FINISH_SECONDS: Final = 5.0
"""How long groups in hand may go on in the state `finish`."""
AWAKE_SECONDS: Final = 15.0
"""After sleep, before anything starts again: networks and clocks come back meanwhile."""
GENTLE_DUTY: Final = 0.5
GENTLE_WIDTH: Final = 0.5


@dataclass(frozen=True, slots=True)
class Senses:
    """What is known of the Mac now; None: not known, and no reason to stop."""

    now_seconds: float
    """Of a clock that never goes back."""
    minute_of_day: int | None = None
    """Local time, 0 to 1439."""
    on_mains: bool | None = None
    battery_percent: float | None = None
    low_power_mode: bool | None = None
    idle_seconds: float | None = None
    """Since the last key or pointer event."""
    screen_locked: bool | None = None
    thermal: Thermal | None = None
    pressure: Pressure | None = None
    """Of memory."""
    on_hotspot: bool | None = None
    awake_seconds: float | None = None
    """Since the last sleep ended."""
    spent_budget: str = ""
    """Which budget of the network is spent, in words; "" for none."""
    spool_bytes: int = 0
    """Disk that finished groups take while they wait for the network."""
    shipping: str = ""
    """Why no further group can be kept or sent, in words; "" while they can."""
    free_disk_bytes: int | None = None
    going_to_sleep: bool = False
    """The system waits for us to be still."""
    crash: str = ""
    """Why to wait after a crash of the whole Mac, in words; "" for no reason."""
    share: float = 1.0
    """Of the usual groups: less for a while after a crash."""


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do, and why.

    full: play at full width without rests. gentle: play with rests and fewer groups. hold: play on, start no new group.
    finish: start no new group, those in hand have FINISH_SECONDS. pause: stop within one step.
    """

    state: State = "full"
    reason: str = ""
    kind: Kind = "none"
    since_seconds: float = 0.0
    """When this state began, by the clock of `Senses`."""
    share: float = 1.0
    """Of the usual groups that memory is planned for: less for a while after a crash of the whole Mac."""
    may_transfer: bool = True
    """False while the network is not ours to use, whatever else is the reason of the state."""
    milder_since_seconds: float | None = field(default=None, repr=False)
    restarted_at_seconds: float | None = field(default=None, repr=False)
    battery_low: bool = field(default=False, repr=False)

    @property
    def duty(self) -> float:
        """Share of time to compute in."""
        return GENTLE_DUTY if self.state == "gentle" else 1.0

    @property
    def width(self) -> float:
        """Share of the groups to play in one batch."""
        return GENTLE_WIDTH if self.state == "gentle" else 1.0

    @property
    def starts(self) -> bool:
        """True if new groups may be started."""
        return self.state in ("full", "gentle")

    def leaves(self, now_seconds: float) -> bool:
        """True if groups in hand must be let go of now."""
        return self.state == "pause" or (self.state == "finish" and now_seconds - self.since_seconds >= FINISH_SECONDS)


PLAY: Final = Decision()


@dataclass(frozen=True, slots=True)
class _Objection:
    state: State
    kind: Kind
    reason: str


def decide(senses: Senses, allowed: MacHost, before: Decision = PLAY) -> Decision:
    """What to do now, given what was done before. The same inputs give the same decision."""
    battery_low = _battery_low(senses, allowed, before.battery_low)
    objections = tuple(_objections(senses, allowed, battery_low))
    worst = max(objections, key=lambda one: _STRICTNESS[one.state], default=_Objection("full", "none", ""))
    found = _follow(worst, senses.now_seconds, replace(before, battery_low=battery_low))
    still = found.kind in _STILL or any(one.kind in _STILL for one in objections)
    return replace(found, share=senses.share, may_transfer=not still)


def _follow(worst: _Objection, now: float, before: Decision) -> Decision:
    """From what was done before to what the worst objection asks for, at once or once it has settled."""
    if _STRICTNESS[worst.state] >= _STRICTNESS[before.state]:
        since = before.since_seconds if worst.state == before.state else now
        return _changed(before, worst, since)
    if before.kind not in _FLAPPING:
        return _changed(before, worst, now)
    milder_since = now if before.milder_since_seconds is None else before.milder_since_seconds
    hourly = not before.starts and worst.state in ("full", "gentle") and before.kind in _HOURLY
    recent = hourly and before.restarted_at_seconds is not None and now - before.restarted_at_seconds < RESTART_SECONDS
    if recent or now - milder_since < SETTLE_SECONDS:
        return replace(before, reason=_SETTLING + before.reason.removeprefix(_SETTLING), milder_since_seconds=milder_since)
    return replace(_changed(before, worst, now), restarted_at_seconds=now if hourly else before.restarted_at_seconds)


def _changed(before: Decision, worst: _Objection, since_seconds: float) -> Decision:
    return replace(before, state=worst.state, reason=worst.reason, kind=worst.kind, since_seconds=since_seconds, milder_since_seconds=None)


def _battery_low(senses: Senses, allowed: MacHost, before: bool) -> bool:
    """Between the two thresholds it is what it was."""
    if senses.battery_percent is None or senses.on_mains is not False:
        return False if senses.on_mains else before
    below = allowed.battery_restart_percent if before else allowed.battery_stop_percent
    return senses.battery_percent < below


def _objections(senses: Senses, allowed: MacHost, battery_low: bool) -> Iterator[_Objection]:
    if senses.going_to_sleep:
        yield _Objection("pause", "sleep", "the Mac is going to sleep")
    if senses.crash:
        yield _Objection("pause", "crash", senses.crash)
    if senses.awake_seconds is not None and senses.awake_seconds < AWAKE_SECONDS:
        yield _Objection("pause", "sleep", "the Mac has just woken up")
    yield from _body(senses)
    yield from _power(senses, allowed, battery_low)
    yield from _user(senses, allowed)
    hours = allowed.minutes_of_day
    if hours is not None and senses.minute_of_day is not None and not _within(senses.minute_of_day, *hours):
        yield _Objection("finish", "hours", f"it may work from {allowed.hours.replace('-', ' to ')} only")
    if senses.on_hotspot and not allowed.on_hotspot:
        yield _Objection("finish", "network", "the Mac is on a phone's hotspot")
    if senses.spent_budget:
        yield _Objection("finish", "budget", senses.spent_budget)
    if senses.spool_bytes >= allowed.spool_bytes:
        yield _Objection("hold", "disk", "finished groups wait for the network and fill the disk space they may take")
    if senses.shipping:
        yield _Objection("hold", "disk", senses.shipping)
    if senses.free_disk_bytes is not None and senses.free_disk_bytes < allowed.free_disk_bytes:
        yield _Objection("hold", "disk", "the disk is almost full")


def _body(senses: Senses) -> Iterator[_Objection]:
    if senses.pressure == "critical":
        yield _Objection("pause", "memory", "the Mac is out of memory")
    if senses.pressure == "warn":
        yield _Objection("hold", "memory", "the Mac is short of memory")
    if senses.thermal == "critical":
        yield _Objection("pause", "heat", "the Mac is too hot")
    if senses.thermal == "serious":
        yield _Objection("gentle", "heat", "the Mac is hot")


def _power(senses: Senses, allowed: MacHost, battery_low: bool) -> Iterator[_Objection]:
    if senses.low_power_mode and not allowed.in_low_power_mode:
        yield _Objection("finish", "power", "Low Power Mode is on")
    if senses.on_mains is False and not allowed.on_battery:
        yield _Objection("finish", "power", "the Mac is on battery")
    elif senses.on_mains is False and battery_low:
        yield _Objection("finish", "power", f"the battery is low: it starts again at {allowed.battery_restart_percent:g} %")


def _user(senses: Senses, allowed: MacHost) -> Iterator[_Objection]:
    if allowed.when == "full" or senses.idle_seconds is None or senses.screen_locked:
        return
    if senses.idle_seconds < allowed.idle_minutes * 60.0:
        yield _Objection("pause" if allowed.when == "idle_only" else "gentle", "user", "somebody uses the Mac")


def _within(minute: int, first: int, last: int) -> bool:
    """True if `minute` is in [first, last), which may go over midnight; equal ends are the whole day."""
    return first <= minute < last if first < last else minute >= first or minute < last
