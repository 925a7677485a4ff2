"""What a run has cost: GPU hours, the bucket's requests and traffic, each by the prices of the run's configuration.

Requests are worked out, not metered: a write for each object that is in the bucket, one for HEAD at each step and version, and a
read for each manifest, delta and group that somebody had to fetch, with every look of every Mac at HEAD. Dollars throughout.
"""

from dataclasses import dataclass
from typing import Final

from cli.report.record import RunRecord

EGRESS_USD_A_GIGABYTE: Final = 0.09
"""What buckets charge for bytes pulled where they charge for it."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Dollars by what they were paid for, and the counts behind them."""

    gpu_hours: float
    gpu_usd: float
    writes: int
    writes_usd_r2: float
    """At the configured price, which is R2's unless somebody set another."""
    reads_estimated: int
    reads_usd: float
    egress_usd_r2: float
    egress_usd_elsewhere: float
    total_usd: float
    usd_a_point: float
    """Dollars for each percentage point of held-out pass@1 that was gained; 0 where nothing was."""


@dataclass(frozen=True, slots=True)
class Spent:
    """Dollars spent up to a moment. GPU time is spread evenly over the run, requests come with steps and versions."""

    minutes: float
    gpu_usd: float
    requests_usd: float
    egress_usd: float


def cost_of(record: RunRecord, pulled: int, gain: float) -> Cost:
    """The whole cost so far. `pulled`: bytes that Macs pulled; `gain`: rise of held-out pass@1, in [0, 1]."""
    prices = record.facts.prices
    writes = num_writes(record)
    reads = num_reads(record)
    gpu = record.gpu_hours * record.facts.gpu_usd_an_hour
    writes_usd, reads_usd = writes * prices.writes_usd_a_million / 1e6, reads * prices.reads_usd_a_million / 1e6
    egress = pulled / 1e9 * prices.egress_usd_a_gb
    total = gpu + writes_usd + reads_usd + egress
    return Cost(
        gpu_hours=record.gpu_hours,
        gpu_usd=gpu,
        writes=writes,
        writes_usd_r2=writes_usd,
        reads_estimated=reads,
        reads_usd=reads_usd,
        egress_usd_r2=egress,
        egress_usd_elsewhere=pulled / 1e9 * EGRESS_USD_A_GIGABYTE,
        total_usd=total,
        usd_a_point=total / (100 * gain) if gain > 0 else 0.0,
    )


def num_writes(record: RunRecord) -> int:
    """Objects in the bucket, or where nobody counted them those that steps and versions tell of; and HEAD's swaps."""
    told = sum(len(row.consumed) + len(row.dropped) + 1 for row in record.steps) + 2 * len(record.versions)
    return (sum(record.bucket_objects.values()) or told) + len(record.versions)


def num_reads(record: RunRecord) -> int:
    """Groups by the trainer, manifest and delta of each version by each Mac, and each Mac's looks at HEAD."""
    groups = sum(len(row.consumed) + len(row.dropped) + len(row.refused) for row in record.steps)
    looks = int(len(record.sessions) * record.seconds / record.facts.head_poll_seconds)
    return groups + 2 * len(record.versions) * len(record.sessions) + looks


def gone_on(record: RunRecord, moment: float) -> float:
    """Seconds that a run had gone on at a moment: of a resumed one without the time between, as far as that is known."""
    if moment >= record.started_at:
        return record.seconds_before + moment - record.started_at
    return min(record.seconds_before, max(0.0, moment - record.facts.created_at))


def cost_curve(record: RunRecord, pulled: int) -> tuple[Spent, ...]:
    """Dollars up to each version's publication and the end."""
    total = cost_of(record, pulled, 0.0)
    moments = sorted({row.published_at for row in record.versions} | {record.ended_at})
    num_done, span = len(record.steps), record.seconds
    found: list[Spent] = []
    for moment in moments:
        seconds = gone_on(record, moment)
        share = min(1.0, seconds / span) if span > 0 else 0.0
        steps = sum(row.started_at + row.train_seconds <= moment for row in record.steps) / num_done if num_done else share
        requests = (total.writes_usd_r2 + total.reads_usd) * steps
        found.append(Spent(seconds / 60, total.gpu_usd * share, requests, total.egress_usd_r2 * steps))
    return tuple(found)
