"""`stoa bench [FILE]`: how fast this Mac samples, by width; `stoa bench kernels`: how fast our Metal kernels are on it."""

from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from cli import say
from cli.arguments import AsJson
from cli.examples import epilogue
from cli.say import Exit

bench = App(name="bench", help="Measure this Mac: tokens a second by width, or the Metal kernels.", help_epilogue=epilogue("bench"))


@bench.default
def widths(
    file: Annotated[Path | None, Parameter(help="Configuration of the run; the demo's when left out.")] = None,
    /,
    *,
    groups: Annotated[int, Parameter(help="Widest batch to try, in groups; what memory allows when left out.")] = 0,
    state: Annotated[Path | None, Parameter(help="Folder of this Mac's state, where the result is kept.")] = None,
    as_json: AsJson = False,
) -> Exit:
    """Measure tokens a second by width on this Mac and keep the width from which more groups hardly help.

    Also what an update of the weights takes, watts where the Mac tells them, and, for the run of FILE or of the invitation
    that is kept, this Mac's line and what it would add. Its worker plays that many groups at once from its next start on, where
    the run leaves the width to each Mac.
    """
    from cli.bench import measure, sentences

    measured = measure(file, groups, state)
    if measured is None:
        return Exit.FAILED
    if as_json:
        say.data(measured.json)
    else:
        for line in sentences(measured):
            say.talk(line)
    return Exit.DONE


@bench.command
def kernels(
    *,
    state: Annotated[Path | None, Parameter(help="Folder of this Mac's state: no worker may be at work in it.")] = None,
    as_json: AsJson = False,
) -> Exit:
    """Time our Metal kernels and MLX's own operations at LFM2.5's sizes, beside what bandwidth and arithmetic of the chip allow.

    Where there is no Metal nothing is timed, and what is printed is worked out.
    """
    from cli.bench import kernel_lines, measure_kernels

    report = measure_kernels(state)
    if report is None:
        return Exit.FAILED
    if as_json:
        say.data(report)
    else:
        for line in kernel_lines(report):
            say.talk(line)
    return Exit.DONE
