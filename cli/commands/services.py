"""`stoa services`: a local Temporal and a local bucket, until Ctrl-C; with `--demo` those of a finished demo."""

import time
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from cli import say
from cli.say import Exit


def services(
    *,
    folder: Annotated[Path | None, Parameter(name="--dir")] = None,
    demo: Path | None = None,
    temporal_port: int | None = None,
    ui_port: int | None = None,
    bucket_port: int | None = None,
) -> Exit:
    """Start a local Temporal and a local bucket on the default ports, and keep them until Ctrl-C.

    Parameters
    ----------
    folder
        Folder of their data and logs; kept between starts.
    demo
        Folder of a demo that has ended, like runs/demo-1: its servers with its data, where its config.json says.
    temporal_port
        Port of Temporal, 7233 when left out; 0 picks a free one.
    ui_port
        Port of Temporal's web page, 8233 when left out; 0 picks a free one.
    bucket_port
        Port of the bucket, 8333 when left out; 0 picks a free one.
    """
    from cli.processes import Household, end_leftovers
    from cli.services import BUCKET_PORT, TEMPORAL_PORT, UI_PORT, Ports, of_demo, refuse_running, start_services
    from stoa.config.load import bucket_credentials, state_base
    from stoa.config.run import Bucket
    from stoa.contracts.errors import ServiceUnavailableError, UsageError

    if demo is not None and folder is not None:
        raise UsageError("--demo and --dir: only one of them says where the data is", hint="leave out --dir")
    usual, run = (Ports(TEMPORAL_PORT, UI_PORT, BUCKET_PORT), "") if demo is None else of_demo(demo)
    asked = (temporal_port, ui_port, bucket_port)
    ports = Ports(*(port if port is not None else other for port, other in zip(asked, usual, strict=True)))
    house_folder = demo if demo is not None else folder if folder is not None else state_base() / "services"
    data = house_folder / "state" if demo is not None else house_folder
    refuse_running(house_folder)
    for name in end_leftovers(house_folder):
        say.talk(f"ended {name}, left over from a start that was killed")
    credentials = bucket_credentials(Bucket(endpoint="http://127.0.0.1:8333"))
    with Household(house_folder) as house:
        started = start_services(house, data, house_folder / "logs", credentials, ports)
        say.talk(f"Temporal   {started.temporal_address}   page {started.ui_url}")
        say.talk(f"bucket     {started.bucket_endpoint}")
        say.talk(f"data       {data}")
        if demo is not None:
            say.talk(f"look       `stoa status {run} --config {demo / 'config.json'}`; so do live, report, episode, eval, export")
        if ports.temporal != usual.temporal:
            say.talk(f"tell the others: export STOA_TEMPORAL_ADDRESS={started.temporal_address}")
        if ports.bucket != usual.bucket:
            say.talk(f"tell the others: export STOA_BUCKET_ENDPOINT={started.bucket_endpoint}")
        say.talk("Ctrl-C stops both")
        while all(child.exit_code is None for child in house.children):
            time.sleep(0.5)
        gone = next(child for child in house.children if child.exit_code is not None)
        raise ServiceUnavailableError(f"{gone.name}: ended with code {gone.exit_code}\n{gone.last_lines()}", hint=f"its log is {gone.log}")
