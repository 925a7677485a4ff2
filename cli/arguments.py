"""Arguments that several commands share, with their words of help."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

AsJson = Annotated[bool, Parameter(name="--json", help="Print JSON on standard output.")]
Sets = Annotated[
    tuple[str, ...],
    Parameter(name="--set", consume_multiple=False, show_default=False, help="A setting to change, as table.key=value; may be repeated."),
]
Servers = Annotated[Path | None, Parameter(name="--config", help="Configuration that names the servers; else STOA_* or loopback.")]
Reason = Annotated[str, Parameter(show_default=False, help="Why; shown in the status and kept in the run's history.")]
RunArgument = Annotated[str, Parameter(help="Name of the run.")]
