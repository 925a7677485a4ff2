"""What a step's manifest says: its groups, its hosts, its metrics. Written once a step, read by whoever follows the run."""

from dataclasses import replace

from stoa.bucket import keys
from stoa.bucket.steps import STEP_FORMAT, HostCounts, StepManifest
from stoa.config.run import Learning
from trainer_gpu.intake import Taken
from trainer_gpu.lease import Lease
from trainer_gpu.metrics import host_metrics
from trainer_gpu.step import StepOutcome


def manifest_of(
    lease: Lease, run: str, step: int, taken: Taken, outcome: StepOutcome, learning: Learning, *, started: float, train_seconds: float
) -> StepManifest:
    """The manifest of `step`, which `lease` has just taken on `taken`. `started` is Unix seconds."""
    hosts = dict(taken.hosts)
    for name, tokens in outcome.tokens_of_host.items():
        hosts[name] = replace(hosts.get(name, HostCounts()), **host_metrics(tokens, learning.gate))
    facts = {"gate_mode": learning.gate.mode, "anchor_source": "sampler", "dtype": learning.dtype}
    return StepManifest(
        STEP_FORMAT,
        run,
        lease.token,
        step,
        lease.version,
        lease.step_manifest_key,
        taken.keys,
        taken.dropped,
        taken.refused,
        hosts,
        outcome.metrics,
        started,
        taken.wait_seconds,
        train_seconds,
        facts,
        {taken.keys[number]: places for number, places in outcome.gated.items()},
        outcome.mismatches,
        tuple(lease.distance_of(keys.parse_group(key).version) for key in taken.keys),
        tuple(lease.canaries),
    )
