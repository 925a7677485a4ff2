"""What the owner of a Mac allows: when it may work, on what power, and how much network, disk and memory it may use.

Every number with a default lives here; reading the file is `load.py`'s, deciding by it `worker_mac/power.py`'s. These are
a machine's settings and no run's: they are never put into the bucket.
"""

import re
from typing import Annotated, Literal, Self, cast

from pydantic import AfterValidator, BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from stoa.config.run import Section, not_above

_HOURS = re.compile(r"([01]\d|2[0-3]):([0-5]\d)-([01]\d|2[0-3]):([0-5]\d)")


def _hours(text: str) -> str:
    """`text` if it is "" or two times of day."""
    if text and _HOURS.fullmatch(text) is None:
        raise PydanticCustomError("hours", 'should be like 22:00-07:30, or "" for any time')
    return text


def _frozen(value: object) -> object:
    """A list of TOML as a tuple, which settings hold."""
    return tuple(cast(list[object], value)) if isinstance(value, list) else value


Hours = Annotated[str, AfterValidator(_hours)]
Count = Annotated[int, Field(ge=0, le=1 << 50)]
Percent = Annotated[float, Field(ge=0.0, le=100.0)]
Part = Literal["experts", "head", "attention", "router", "prefix", "conv"]
"""A part of the model that a Metal kernel may compute."""


class MacHost(Section):
    """What one Mac may do for others."""

    when: Literal["idle_only", "gentle", "full"] = "gentle"
    """idle_only: only while nobody uses the Mac; gentle: slower while somebody does; full: as if nobody did."""
    idle_minutes: Annotated[float, Field(ge=0.1, le=1440.0)] = 5.0
    """Without key or pointer for this long, or with the screen locked, the Mac counts as not used."""
    hours: Hours = ""
    """Local times of day between which it may work, for example 22:00-07:30; "" for any time."""
    on_battery: bool = False
    """Work on battery too, above the two thresholds."""
    battery_stop_percent: Percent = 50.0
    """On battery, stop below this charge."""
    battery_restart_percent: Percent = 70.0
    """On battery, start again at this charge."""
    in_low_power_mode: bool = False
    """Work while Low Power Mode is on."""
    on_hotspot: bool = False
    """Work, and transfer, while the Mac is on a phone's hotspot."""
    upload_bytes_per_second: Count = 0
    """Cap of what is sent; 0 for none."""
    download_bytes_per_second: Count = 0
    """Cap of what is received; 0 for none."""
    day_bytes: Count = 0
    """Budget of a day, sent and received together; 0 for none."""
    month_bytes: Count = 0
    """Budget of a calendar month, sent and received together; 0 for none."""
    spool_bytes: Annotated[int, Field(ge=1 << 20, le=1 << 50)] = 2 << 30
    """Finished groups that wait for the network may take this much disk; no new ones are played beyond it."""
    cache_bytes: Annotated[int, Field(ge=0, le=1 << 50)] = 24_000_000_000
    """Weights kept on disk so that joining again downloads little; the newest anchor and what follows it stay in any case."""
    free_disk_bytes: Count = 5_000_000_000
    """While the disk has less than this free, no new groups are played."""
    unload_minutes: Annotated[float, Field(ge=0.0, le=10_080.0)] = 10.0
    """After a pause of this long the weights leave memory; they come back from disk. 0 keeps them."""
    memory_fraction: Annotated[float, Field(gt=0.0, le=1.0)] = 0.9
    """Share of the memory that the system recommends for its GPU which weights and caches may take."""

    plain_ops: Annotated[tuple[Part, ...], BeforeValidator(_frozen), Field(max_length=6)] = ()
    """Parts of the model that MLX's own operations compute even where a kernel of ours agrees with them."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        return not_above(self, "battery_stop_percent", "battery_restart_percent")

    @property
    def minutes_of_day(self) -> tuple[int, int] | None:
        """First minute of the day it may work, and the first it may not again; None for any time."""
        found = _HOURS.fullmatch(self.hours)
        if found is None:
            return None
        first, first_minute, last, last_minute = (int(part) for part in found.groups())
        return first * 60 + first_minute, last * 60 + last_minute
