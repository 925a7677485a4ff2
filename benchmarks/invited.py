"""What an invited Mac costs: the proxy's delay and how many calls it carries, and the size and work of tickets.

    python -m benchmarks.invited --json

Temporal's dev server, the S3 server, the proxy and its callers share this machine. Direct and proxied calls alternate, so that
whatever else the machine does falls on both.
"""

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from pathlib import Path

import structlog
from temporalio.api.workflowservice.v1 import DescribeNamespaceRequest
from temporalio.client import Client

from activities.codec import seal, unseal
from activities.connection import connect, setup_namespace
from cli.processes import Household
from cli.proxy import Listening, Proxy
from cli.proxying.limits import Rates
from cli.services import Ports, start_services
from stoa.bucket.invite import BucketDoor, TemporalDoor, write_invite
from stoa.bucket.manifest import Signer
from stoa.bucket.revocations import Revoked
from stoa.bucket.store import Store
from stoa.bucket.tickets import Mint, Slots, read_tickets
from stoa.config.load import Credentials
from stoa.config.run import Bucket
from stoa.contracts.access import PLAIN

CREDENTIALS = Credentials("stoa", "stoa-on-loopback")
RUN, NAMESPACE, HOST = "benchmark", "default", "mac-1"
NUM_BLOCKS = 6
CALLS_A_BLOCK = 200
NUM_LOAD_CALLS = 3000
NUM_MINTINGS = 300
SEAL_KEY = bytes(range(32))


async def ask(client: Client) -> float:
    """Seconds of one small call."""
    started = time.perf_counter()
    await client.workflow_service.describe_namespace(DescribeNamespaceRequest(namespace=NAMESPACE))
    return time.perf_counter() - started


async def measure_calls(address: str, store: Store) -> dict[str, float]:
    """Delay of a call directly and through the proxy, and calls a second of 50 callers at once."""
    await setup_namespace(address, NAMESPACE)
    signer = Signer.generate()
    boundless = Rates(calls_per_second=1e6, burst_calls=1e6, open_calls=1000)
    proxy = Proxy(RUN, signer.public_key, Revoked(store, RUN, signer.public_key), Listening("127.0.0.1:0", rates=boundless))
    await proxy.start(address, NAMESPACE, PLAIN)
    door, bucket = TemporalDoor(proxy.address, NAMESPACE), BucketDoor("http://127.0.0.1:1", "b", "auto", "k", "s")
    _, invite = write_invite(signer, RUN, HOST, seconds=3600, temporal=door, bucket=bucket)
    direct, proxied = await connect(address, NAMESPACE), await connect(proxy.address, NAMESPACE, access=invite.access)
    try:
        seconds: dict[str, list[float]] = {"direct": [], "proxied": []}
        for _ in range(NUM_BLOCKS):
            for name, client in (("direct", direct), ("proxied", proxied)):
                seconds[name] += [await ask(client) for _ in range(CALLS_A_BLOCK)]
        room = asyncio.Semaphore(50)

        async def one() -> None:
            async with room:
                await ask(proxied)

        started = time.perf_counter()
        await asyncio.gather(*(one() for _ in range(NUM_LOAD_CALLS)))
        calls_per_second = NUM_LOAD_CALLS / (time.perf_counter() - started)
    finally:
        await proxy.stop()
    return {
        "direct_call_ms_p50": round(1000 * statistics.median(seconds["direct"]), 3),
        "proxied_call_ms_p50": round(1000 * statistics.median(seconds["proxied"]), 3),
        "proxied_call_ms_p95": round(1000 * statistics.quantiles(seconds["proxied"], n=20)[-1], 3),
        "proxied_calls_per_second": round(calls_per_second),
    }


def measure_tickets() -> dict[str, float]:
    """Size and work of the tickets of one grant: 8 groups at 4 versions, and 64 groups at 2."""
    mint = Mint(RUN, CREDENTIALS, "https://0123456789abcdef.r2.cloudflarestorage.com", "stoa", "auto")
    found: dict[str, float] = {}
    for num_groups, num_versions in ((8, 4), (64, 2)):
        slots, text, sealed = [Slots(7, 3, num_versions, num_groups)], "", ""
        started = time.perf_counter()
        for _ in range(NUM_MINTINGS):
            text = mint.make(f"{HOST}.0123abcd", HOST, slots)
        minted = time.perf_counter()
        for _ in range(NUM_MINTINGS):
            sealed = seal(text, lambda _: SEAL_KEY)
            read_tickets(unseal(sealed, lambda _: SEAL_KEY), RUN, HOST)
        ended = time.perf_counter()
        found[f"ticket_bytes_{num_groups}_groups"] = len(sealed)
        found[f"mint_ms_{num_groups}_groups"] = round(1000 * (minted - started) / NUM_MINTINGS, 3)
        found[f"seal_and_open_ms_{num_groups}_groups"] = round(1000 * (ended - minted) / NUM_MINTINGS, 3)
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one line of JSON last")
    options = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(30))
    with tempfile.TemporaryDirectory() as scratch, Household(Path(scratch)) as house:
        services = start_services(house, Path(scratch), Path(scratch) / "logs", CREDENTIALS, Ports())
        store = Store(Bucket(endpoint=services.bucket_endpoint), CREDENTIALS)
        found = {**asyncio.run(measure_calls(services.temporal_address, store)), **measure_tickets()}
    for name, value in found.items():
        print(f"{name:32} {value:g}")
    if options.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
