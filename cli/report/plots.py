"""The report's figures, by matplotlib: SVG for the page (colours follow the reader's theme) and PNG files.

What is drawn is `curves.py`'s and `pictures.py`'s: each figure is a function of the run's record that draws on axes.
"""

import io
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import matplotlib as mpl
from matplotlib.figure import Figure

from cli.report.curves import FIGURES
from cli.report.drawing import INK, PAPER, SERIES, Drawn
from cli.report.pictures import PICTURES
from cli.report.record import RunRecord

_VARIABLES: Final = {INK: "currentColor", PAPER: "var(--card)", **{colour: f"var(--series-{i + 1})" for i, colour in enumerate(SERIES)}}
_STYLE: Final = {
    "svg.fonttype": "none",
    "svg.hashsalt": "stoa",
    "font.family": ["DejaVu Sans"],
    "font.size": 9,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.8,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
    "grid.color": INK,
    "grid.alpha": 0.12,
    "grid.linewidth": 0.7,
    "axes.grid": True,
    "axes.axisbelow": True,
}
_ALL: Final[tuple[Drawn, ...]] = (*FIGURES, *PICTURES)


@dataclass(frozen=True, slots=True)
class Plot:
    """One figure: `name` is its file, `section` where it stands on the page, `caption` says what it shows and how."""

    name: str
    section: str
    title: str
    caption: str
    svg: str


def draw_all(record: RunRecord, folder: Path) -> tuple[Plot, ...]:
    """Write `<name>.png` and `<name>.svg` of every figure that has data into `folder`; returns them all as SVG for the page."""
    folder.mkdir(parents=True, exist_ok=True)
    plots: list[Plot] = []
    with mpl.rc_context(_STYLE):  # pyright: ignore[reportArgumentType]
        for one in _ALL:
            if not one.has_data(record):
                continue
            figure = Figure(figsize=one.inches, layout="constrained")
            one.draw(record, figure.subplots())
            figure.savefig(folder / f"{one.name}.png", dpi=150, facecolor="white")
            figure.savefig(folder / f"{one.name}.svg", facecolor="white", metadata={"Date": None, "Creator": None})
            plots.append(Plot(one.name, one.section, one.title, one.caption, _svg(figure, one.name)))
    return tuple(plots)


def _svg(figure: Figure, name: str) -> str:
    stream = io.StringIO()
    figure.savefig(stream, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = stream.getvalue()
    text = text[text.index("<svg") :]
    for colour, variable in _VARIABLES.items():
        text = text.replace(colour, variable)
    # Ids of several figures on one page must differ, and the page decides the size.
    text = re.sub(r'\bid="', f'id="{name}-', text)
    text = re.sub(r'(xlink:href="|url\()#', rf"\g<1>#{name}-", text)
    return re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", text, count=1), count=1)
