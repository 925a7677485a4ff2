"""Which Macs of a fleet are not like the others: their mismatch at equal distance, and what their groups were refused for.

Everything is worked out from step manifests, so that a trainer that takes a run over goes on where the last one ended.
Whether a host is shut out is the run's decision; here one is only suspected, with the reason. Numpy only.

Legend: N groups, H hosts, M measures.
"""

from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, islice
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
LEAST: Final = GroupMismatch(1e-3, 1e-4, 1e-2, 1e-2, 0.0, 0.0)
"""Added to a measure before its logarithm is taken: below it differences are rounding."""
DOUBT: Final = 0.25
"""Share of what a measure is corrected by for distance that may be wrong: the policy does not move equally far with each step."""
_USUAL_SLOPES: Final = (1.0, 2.0, 1.0, 1.5, 0.0, 0.02)
"""Powers of the distance that measures go by where the policy's drift is all there is; what may be wrong where nothing tells."""
_CLIP: Final = 3.0
_LEAST_SCALE: Final = (0.25, 0.25, 0.25, 0.25, 0.01, 0.01)
_NUM_LOGS: Final = 4
"""Measures that are compared by their logarithms; less of them than others have is no fault."""
_NAMES: Final = ("mean |pi - mu|", "k3", "p99 of |pi - mu|", "share of tokens beyond 0.2 nat", "mean pi / mu", "likeliness of tokens")


@dataclass(frozen=True, slots=True)
class Suspicion:
    """A host that should be shut out, and why, in a few words."""

    host: str
    reason: str


class Sample(NamedTuple):
    """One group that was compared with `version` newest, `lag` versions and `distance` optimizer steps after those it was played with."""

    host: str
    version: int
    lag: int
    distance: int
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
        trained = zip(manifest.consumed, manifest.distances, manifest.mismatches, strict=False)
        self._samples.append(tuple(sample_of(key, manifest.version, distance, mismatch) for key, distance, mismatch in trained))
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


def sample_of(key: str, version: int, distance: int, mismatch: GroupMismatch) -> Sample:
    """Of the group under `key`, compared with `version` newest."""
    named = keys.parse_group(key)
    return Sample(named.host, version, version - named.version, distance, mismatch)


def deviations(samples: Sequence[Sample], *, least_hosts: int = MIN_HOSTS, doubted: str = "") -> Mapping[str, Deviation]:
    """For each host that can be judged how its groups differ from all others' of equal version and lag.

    The policy also moves between two versions, so a group's measures (logarithms, where they scale) are first corrected
    for its distance, see `_slopes`. Within a stratum (version, lag) of several hosts they are taken from the stratum's
    median and divided by 1.4826 times the median absolute deviation, pooled over strata of one lag; then clipped, so that
    no group counts more than `_CLIP`. A host's mean of these is compared with that of all other groups by Welch's t, to
    whose variance that between the other hosts is added, also robustly, and what the correction may be wrong by.
    least_hosts: in a stratum, and in all; where it is known which one is in doubt, two tell more than nothing. doubted: that
    one, whose groups say nothing of the correction.
    """
    strata = _strata(samples, least_hosts)
    if not strata:
        return {}
    residuals: list[NDArray[np.float64]] = []
    doubts: list[NDArray[np.float64]] = []
    lags: list[NDArray[np.int64]] = []
    hosts: list[str] = []
    slopes_M, doubts_M = _slopes([[row for row in rows if row.host != doubted] for rows in strata.values()])
    for (_, lag), rows in strata.items():
        places_N = np.array([_place(row) for row in rows])
        places_N1 = (places_N - np.median(places_N))[:, None]
        values_NM = np.array([_scaled(row.mismatch) for row in rows]) - slopes_M * places_N1
        residuals.append(values_NM - np.median(values_NM, axis=0))
        doubts.append(doubts_M * places_N1)
        lags.append(np.full(len(rows), lag))
        hosts += [row.host for row in rows]
    residuals_NM, doubts_NM, lags_N = np.concatenate(residuals), np.concatenate(doubts), np.concatenate(lags)
    for lag in np.unique(lags_N):
        here = lags_N == lag
        scale_M = np.maximum(1.4826 * np.median(np.abs(residuals_NM[here]), axis=0), _LEAST_SCALE)
        residuals_NM[here] = np.clip(residuals_NM[here] / scale_M, -_CLIP, _CLIP)
        doubts_NM[here] /= scale_M
    return _compare(residuals_NM, doubts_NM, np.array(hosts), least_hosts)


def _place(sample: Sample) -> float:
    """Measures are near to a power of the distance, of which one step is within the rounding of int8."""
    return float(np.log1p(sample.distance))


def _slopes(strata: Iterable[Sequence[Sample]]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """How fast each measure moves with `_place`, and how wrong that may be; f64 [M] each.

    It is the weighted median of the slopes between any two steps of a stratum.

    Each step of a stratum counts as the median of its groups, so that few hosts move it; weights are those of least squares.
    """
    slopes: list[NDArray[np.float64]] = []
    weights: list[float] = []
    for rows in strata:
        steps: dict[float, list[list[float]]] = {}
        for row in rows:
            steps.setdefault(_place(row), []).append(_scaled(row.mismatch))
        cells = [(place, np.median(np.array(found), axis=0), len(found)) for place, found in steps.items()]
        for (one, low_M, num), (other, high_M, num_other) in combinations(cells, 2):
            slopes.append((high_M - low_M) / (other - one))
            weights.append(abs(other - one) * num * num_other / (num + num_other))
    if not slopes:
        return np.zeros(len(_NAMES)), np.array(_USUAL_SLOPES)
    slopes_NM, weights_N = np.array(slopes), np.array(weights)
    order_NM = np.argsort(slopes_NM, axis=0)
    before_NM = np.cumsum(weights_N[order_NM], axis=0)
    middle_M = (before_NM < weights_N.sum() / 2).sum(axis=0)
    slopes_M = np.take_along_axis(slopes_NM, order_NM, axis=0)[middle_M, np.arange(len(_NAMES))]
    # A share of tokens beyond a bound keeps at 0 for some steps, and then jumps: it may be wrong though nothing has moved yet.
    return slopes_M, DOUBT * np.maximum(np.abs(slopes_M), _USUAL_SLOPES)


def _compare(
    values_NM: NDArray[np.float64], doubts_NM: NDArray[np.float64], hosts_N: NDArray[np.str_], least_hosts: int
) -> dict[str, Deviation]:
    names, owner_N = np.unique(hosts_N, return_inverse=True)
    count_H = np.bincount(owner_N, minlength=len(names)).astype(np.float64)
    sum_HM = np.zeros((len(names), values_NM.shape[1]))
    square_HM = np.zeros_like(sum_HM)
    np.add.at(sum_HM, owner_N, values_NM)
    np.add.at(square_HM, owner_N, values_NM**2)
    doubt_HM = np.zeros_like(sum_HM)
    np.add.at(doubt_HM, owner_N, doubts_NM)
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
        doubt_M = doubt_HM[place] / num - doubt_HM[others].sum(0) / num_others
        sigmas_M = np.abs(effect_M) / np.sqrt(variance_M * (1.0 / num + 1.0 / num_others) + between_M + doubt_M**2)
        # Better agreement than the others' is no fault; the mean ratio and the likeliness may be off on both sides.
        sigmas_M[:_NUM_LOGS][effect_M[:_NUM_LOGS] < 0] = 0.0
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
    measured = zip(mismatch[:_NUM_LOGS], LEAST[:_NUM_LOGS], strict=True)
    logs = [float(np.log(max(value, 0.0) + least)) for value, least in measured]
    return [*logs, float(np.clip(mismatch.ratio_mean, 0.0, 2.0)), float(np.clip(mismatch.likeliness, -2.0, 2.0))]
