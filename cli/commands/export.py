"""`stoa export RUN --to mlx DIR`: a folder of a run's weights that other tools open."""

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from cli import say
from cli.arguments import RunArgument, Servers


def export(
    run: RunArgument,
    folder: Annotated[Path, Parameter(help="New folder to write.")],
    /,
    *,
    to: Annotated[Literal["mlx"], Parameter(help="Form of the folder: one that stock mlx_lm loads.")] = "mlx",
    config: Servers = None,
) -> None:
    """Make a folder of a run's newest weights that other tools open."""
    from cli.export import export_mlx
    from cli.follow import find_run

    with find_run(run, config, temporal=False) as found:
        version, num_bytes = export_mlx(found.document, found.store, folder)
    say.talk(f"{folder}: version {version} of run {run}, {say.bytes_text(num_bytes)}, for {to}")
