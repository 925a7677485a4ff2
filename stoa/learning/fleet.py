"""Which Macs of a fleet are not like the others: their mismatch at equal lag, and what their groups were refused for.

Everything is worked out from step manifests, so that a trainer that takes a run over goes on where the last one ended.
Whether a host is shut out is the run's decision; here one is only suspected, with the reason. Numpy only.

Legend: N groups, H hosts, M measures.
"""

from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stoa.bucket import keys
from stoa.bucket.head import Head
from stoa.bucket.steps import GroupMismatch, Refused, StepManifest, lineage
from stoa.bucket.store import Store

SIGMAS: Final = 6.0
"""A host whose groups lie so many robust standard errors from the others' is suspected: all are judged after every step."""
MIN_EFFECT: Final = 0.5
"""Nor is it if they lie less than so many standard deviations of one group away: engines differ a little, and many groups show it."""
MIN_GROUPS: Final = 6
"""Groups of a host, trained on, before it is judged."""
MIN_HOSTS: Final = 4
"""Hosts that must have been trained on at one version and lag: of fewer nobody can tell which one is wrong."""
MIN_OF_STRATUM: Final = 6
"""Groups the same."""
WINDOW_STEPS: Final = 32
"""Steps that are looked back on."""
MAX_SAMPLES: Final = 4096
"""Newest groups of them that are compared."""
MAX_STRIKES: Final = 3
"""Groups of a host, refused for what no honest Mac sends, that make it suspect."""
STRIKE_GROUPS: Final = 32
"""Newest groups of a host that its strikes are counted in."""
LEAST: Final = GroupMismatch(1e-3, 1e-4, 1e-2, 1e-2, 0.0)
"""Added to a measure before its logarithm is taken: below it differences are rounding."""
_CLIP: Final = 3.0
_LEAST_SCALE: Final = (0.25, 0.25, 0.25, 0.25, 0.01)
_NAMES: Final = ("mean |pi - mu|", "k3", "p99 of |pi - mu|", "share of tokens beyond 0.2 nat", "mean pi / mu")


@dataclass(frozen=True, slots=True)
class Suspicion:
    """A host that should be shut out, and why, in a few words."""

    host: str
    reason: str


class Sample(NamedTuple):
    """One group that was trained on with `version` newest, `lag` versions after it was played."""

    host: str
    version: int
    lag: int
    mismatch: GroupMismatch


class Deviation(NamedTuple):
    """How far a host's groups lie from the others' in the measure that shows most, in standard errors and in deviations of one group."""

    sigmas: float
    effect: float
    measure: str
    num_groups: int


class FleetBook:
    """The evidence of the newest steps of one run. `damning`: reasons of refusal that no honest Mac gives."""

    def __init__(self, damning: Collection[str]) -> None:
        self._damning = frozenset(damning)
        self._samples: deque[tuple[Sample, ...]] = deque(maxlen=WINDOW_STEPS)
        self._verdicts: dict[str, deque[str]] = {}
        """What each host's newest groups were refused for, "" for nothing that counts."""

    @classmethod
    def of_run(cls, store: Store, head: Head, damning: Collection[str]) -> "FleetBook":
        """As if this process had trained the steps that HEAD names."""
        book = cls(damning)
        for manifest in reversed(list(islice(lineage(store, head), WINDOW_STEPS))):
            book.note(manifest)
        return book

    def note(self, manifest: StepManifest) -> None:
        """Take a step into account. What a host did before it was shut out no longer counts."""
        trained = zip((keys.parse_group(key) for key in manifest.consumed), manifest.mismatches, strict=False)
        newest = manifest.version
        self._samples.append(tuple(Sample(named.host, newest, newest - named.version, mismatch) for named, mismatch in trained))
        for host, counts in manifest.hosts.items():
            _of(self._verdicts, host).extend([""] * min(counts.accepted, STRIKE_GROUPS))
        self._charge(manifest.refused, self._verdicts)
        self.forget(host for host, counts in manifest.hosts.items() if counts.quarantined)

    def forget(self, hosts: Iterable[str]) -> None:
        """These hosts begin anew."""
        gone = set(hosts)
        if not gone:
            return
        for host in gone:
            self._verdicts.pop(host, None)
        kept = [tuple(sample for sample in samples if sample.host not in gone) for samples in self._samples]
        self._samples = deque(kept, maxlen=WINDOW_STEPS)

    @property
    def newest(self) -> list[Sample]:
        """The newest groups that were trained on, of hosts that are not shut out."""
        return [sample for samples in self._samples for sample in samples][-MAX_SAMPLES:]

    def suspects(self, *, shut_out: Collection[str] = (), pending: Sequence[Refused] = ()) -> tuple[Suspicion, ...]:
        """Hosts to be shut out, by name; `shut_out` are already.

        pending: groups refused since the last step, for a run in which no step can be taken.
        """
        self.forget(shut_out)
        verdicts = {host: deque(found, STRIKE_GROUPS) for host, found in self._verdicts.items()}
        self._charge(pending, verdicts)
        found: dict[str, str] = {}
        for host, reasons in verdicts.items():
            strikes = Counter(reason for reason in reasons if reason)
            if strikes.total() >= MAX_STRIKES:
                found[host] = f"{strikes.total()} groups refused, most as {strikes.most_common(1)[0][0]}"
        for host, far in deviations(self.newest).items():
            if far.sigmas > SIGMAS and abs(far.effect) > MIN_EFFECT:
                found.setdefault(host, f"{far.measure} is {far.sigmas:.1f} sigma off")
        return tuple(Suspicion(host, found[host]) for host in sorted(found) if host not in shut_out)

    def _charge(self, refused: Sequence[Refused], verdicts: dict[str, deque[str]]) -> None:
        for one in refused:
            if one.reason in self._damning:
                _of(verdicts, one.host).append(one.reason)


def _of(verdicts: dict[str, deque[str]], host: str) -> deque[str]:
    return verdicts.setdefault(host, deque(maxlen=STRIKE_GROUPS))


def deviations(samples: Sequence[Sample], *, least_hosts: int = MIN_HOSTS) -> Mapping[str, Deviation]:
    """For each host that can be judged how its groups differ from all others' of equal version and lag.

    Within a stratum (version, lag) of several hosts, a group's measures (logarithms, where they scale) are taken from
    the stratum's median and divided by 1.4826 times the median absolute deviation, pooled over strata of one lag; then
    clipped, so that no group counts more than `_CLIP`. A host's mean of these is compared with that of all other groups
    by Welch's t, to whose variance that between the other hosts is added, also robustly. least_hosts: in a stratum, and
    in all; where it is known which one is in doubt, two tell more than nothing.
    """
    strata = _strata(samples, least_hosts)
    if not strata:
        return {}
    residuals: list[NDArray[np.float64]] = []
    lags: list[NDArray[np.int64]] = []
    hosts: list[str] = []
    for (_, lag), rows in strata.items():
        values_NM = np.array([_scaled(row.mismatch) for row in rows])
        residuals.append(values_NM - np.median(values_NM, axis=0))
        lags.append(np.full(len(rows), lag))
        hosts += [row.host for row in rows]
    residuals_NM, lags_N, hosts_N = np.concatenate(residuals), np.concatenate(lags), np.array(hosts)
    for lag in np.unique(lags_N):
        here = lags_N == lag
        scale_M = np.maximum(1.4826 * np.median(np.abs(residuals_NM[here]), axis=0), _LEAST_SCALE)
        residuals_NM[here] = np.clip(residuals_NM[here] / scale_M, -_CLIP, _CLIP)
    return _compare(residuals_NM, hosts_N, least_hosts)


def _compare(values_NM: NDArray[np.float64], hosts_N: NDArray[np.str_], least_hosts: int) -> dict[str, Deviation]:
    names, owner_N = np.unique(hosts_N, return_inverse=True)
    count_H = np.bincount(owner_N, minlength=len(names)).astype(np.float64)
    sum_HM = np.zeros((len(names), values_NM.shape[1]))
    square_HM = np.zeros_like(sum_HM)
    np.add.at(sum_HM, owner_N, values_NM)
    np.add.at(square_HM, owner_N, values_NM**2)
    mean_HM = sum_HM / count_H[:, None]
    found: dict[str, Deviation] = {}
    for place, name in enumerate(names):
        others = np.arange(len(names)) != place
        num, num_others = count_H[place], count_H[others].sum()
        if num < MIN_GROUPS or others.sum() < least_hosts - 1:
            continue
        theirs_M = sum_HM[others].sum(0) / num_others
        variance_M = np.maximum(square_HM[others].sum(0) / num_others - theirs_M**2, 0.25)
        spread_M = 1.4826 * np.median(np.abs(mean_HM[others] - np.median(mean_HM[others], axis=0)), axis=0)
        # A few hosts' spread is itself uncertain: what sampling alone may well give does not count.
        between_M = np.maximum(spread_M**2 - 2.0 * variance_M * np.median(1.0 / count_H[others]), 0.0)
        effect_M = mean_HM[place] - theirs_M
        sigmas_M = np.abs(effect_M) / np.sqrt(variance_M * (1.0 / num + 1.0 / num_others) + between_M)
        # Better agreement than the others' is no fault; only the mean ratio may be off on both sides.
        sigmas_M[:-1][effect_M[:-1] < 0] = 0.0
        worst = int(sigmas_M.argmax())
        found[str(name)] = Deviation(float(sigmas_M[worst]), float(effect_M[worst]), _NAMES[worst], int(num))
    return found


def _strata(samples: Sequence[Sample], least_hosts: int) -> dict[tuple[int, int], list[Sample]]:
    """Groups by (version, lag), where there are enough of several hosts."""
    found: dict[tuple[int, int], list[Sample]] = {}
    for sample in samples:
        found.setdefault((sample.version, sample.lag), []).append(sample)
    return {place: rows for place, rows in found.items() if len(rows) >= MIN_OF_STRATUM and len({row.host for row in rows}) >= least_hosts}


def _scaled(mismatch: GroupMismatch) -> list[float]:
    logs = [float(np.log(max(value, 0.0) + least)) for value, least in zip(mismatch[:-1], LEAST[:-1], strict=True)]
    return [*logs, float(np.clip(mismatch.ratio_mean, 0.0, 2.0))]
