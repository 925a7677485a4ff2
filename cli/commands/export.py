"""`stoa export RUN --to hf|mlx DIR`: a folder of a run's weights that other tools open."""

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from cli import say
from cli.arguments import AsJson, RunArgument, Servers
from cli.say import Exit


def export(
    run: RunArgument,
    folder: Annotated[Path, Parameter(help="New folder to write.")],
    /,
    *,
    to: Annotated[
        Literal["mlx", "hf"], Parameter(help="mlx: the newest version, int8, for stock mlx_lm; hf: the newest checkpoint for transformers.")
    ] = "mlx",
    config: Servers = None,
    quiet: Annotated[bool, Parameter(help="No progress; say only what needs you.")] = False,
    as_json: AsJson = False,
) -> Exit:
    """Make a folder of a run's newest weights that other tools open, and compare what it computes before saying done."""
    import json
    from dataclasses import asdict

    from cli.export import export_hf, export_mlx
    from cli.follow import find_run

    with find_run(run, config, temporal=False) as found:
        done = (export_hf if to == "hf" else export_mlx)(found.document, found.store, folder, quiet=quiet)
    if as_json:
        say.data(json.dumps({"run": run, "folder": str(folder), "to": to, **asdict(done)}, indent=2))
    if done.max_logit_difference is None or done.greedy_agreement is None:
        say.error(f"{folder} was written and not compared: mlx_lm is not installed here", "run `pip install 'stoa[mac]'` and export again")
        return Exit.FAILED
    if not quiet:
        say.talk(f"{folder}: {done.what} of run {run}, {say.bytes_text(done.num_bytes)}, for {to}")
        say.talk(
            f"reloaded and compared on {done.num_prompts} prompts of {done.prompts_of}: logits differ by at most "
            f"{done.max_logit_difference:.2g}, the likeliest token is the same at {done.greedy_agreement:.1%} of places"
        )
    return Exit.DONE
