"""`stoa services`: a local Temporal and a local bucket, until Ctrl-C."""

import time
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from cli import say
from cli.say import Exit


def services(
    *,
    folder: Annotated[Path | None, Parameter(name="--dir")] = None,
    temporal_port: int = 7233,
    ui_port: int = 8233,
    bucket_port: int = 8333,
) -> Exit:
    """Start a local Temporal and a local bucket on the default ports, and keep them until Ctrl-C.

    Parameters
    ----------
    folder
        Folder of their data and logs; kept between starts.
    temporal_port
        Port of Temporal; 0 picks a free one.
    ui_port
        Port of Temporal's web page; 0 picks a free one.
    bucket_port
        Port of the bucket; 0 picks a free one.
    """
    from cli.processes import Household, end_leftovers
    from cli.services import Ports, start_services
    from stoa.config.load import bucket_credentials, state_base
    from stoa.config.run import Bucket
    from stoa.contracts.errors import ServiceUnavailableError

    folder = folder if folder is not None else state_base() / "services"
    for name in end_leftovers(folder):
        say.talk(f"ended {name}, left over from a start that was killed")
    credentials = bucket_credentials(Bucket(endpoint="http://127.0.0.1:8333"))
    with Household(folder) as house:
        started = start_services(house, folder, folder / "logs", credentials, Ports(temporal_port, ui_port, bucket_port))
        say.talk(f"Temporal   {started.temporal_address}   page {started.ui_url}")
        say.talk(f"bucket     {started.bucket_endpoint}")
        say.talk(f"data       {folder}")
        if temporal_port != 7233:
            say.talk(f"tell the others: export STOA_TEMPORAL_ADDRESS={started.temporal_address}")
        if bucket_port != 8333:
            say.talk(f"tell the others: export STOA_BUCKET_ENDPOINT={started.bucket_endpoint}")
        say.talk("Ctrl-C stops both")
        while all(child.exit_code is None for child in house.children):
            time.sleep(0.5)
        gone = next(child for child in house.children if child.exit_code is not None)
        raise ServiceUnavailableError(f"{gone.name}: ended with code {gone.exit_code}\n{gone.last_lines()}", hint=f"its log is {gone.log}")
