"""What all figures share: colours that follow the reader's theme, the legend's place, whole numbers on an axis."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator

from cli.report.record import RunRecord
from cli.say import bytes_text

# Colours that the page replaces by its own variables; a PNG shows them as they are.
INK: Final = "#2b2b2e"
PAPER: Final = "#fefefe"
SERIES: Final = ("#2f6fde", "#c2570c", "#0f8a7a", "#7a4fd0")
Where = Literal["learning", "fleet", "bytes"]


@dataclass(frozen=True, slots=True)
class Drawn:
    """One figure: `section` of the page it stands in, whether a record has data for it, and how it is drawn."""

    name: str
    section: Where
    title: str
    caption: str
    has_data: Callable[[RunRecord], bool]
    draw: Callable[[RunRecord, Axes], None]
    inches: tuple[float, float] = (5.0, 3.0)


def legend(axes: Axes) -> None:
    """Above the axes, from the left."""
    axes.legend(loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=3, borderaxespad=0.2, handlelength=1.4, columnspacing=1.4)


def whole_numbers(axes: Axes) -> None:
    """Versions and steps have no fractions."""
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def as_bytes() -> FuncFormatter:
    """Labels like 12.3 kB."""
    return FuncFormatter(lambda value, _: bytes_text(value))
