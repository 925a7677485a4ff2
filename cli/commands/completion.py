"""`stoa completion`: what makes a shell complete commands and flags of `stoa`."""

from typing import Annotated, Literal

from cyclopts import Parameter

from cli import say

Shell = Literal["zsh", "bash", "fish"]


def completion(
    shell: Annotated[Shell | None, Parameter(help="The shell; the one this runs in when left out.")] = None,
    /,
    *,
    install: Annotated[bool, Parameter(help="Put it where the shell finds it, instead of printing it.")] = False,
) -> None:
    """Print a script that completes commands and flags in a shell, or install it."""
    from cyclopts.completion.detect import ShellDetectionError

    from cli.main import build
    from stoa.contracts.errors import UsageError

    app = build()
    try:
        if not install:
            say.data(app.generate_completion(shell=shell))
            return
        path = app.install_completion(shell=shell)
    except ShellDetectionError as problem:
        raise UsageError("completion: which shell this is cannot be told", hint="name it: `stoa completion zsh`") from problem
    say.talk(f"completion: written to {path}; it works in the next shell you open")
