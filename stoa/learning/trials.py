"""Macs under suspicion that play on without knowing it: what their groups show while nothing is trained on them.

Each of their sweeps is a canary: it looks like any other, its groups are admitted and rescored like all others', and end
there. Enough clean ones, and the Mac is trusted again; a clear fault, and it is shut out for good, with a reason. Pure:
who is suspected at all is `fleet.py`'s, and what follows from a verdict the run's. A trainer that takes a run over goes on
with its trials as step manifests tell of them.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Final, Literal

from stoa.bucket import keys
from stoa.bucket.steps import HostCounts, Refused, StepManifest
from stoa.learning.fleet import MAX_STRIKES, MIN_EFFECT, MIN_GROUPS, SIGMAS, Sample, deviations, sample_of
from stoa.rollouts.admit import Reason

RECALLED_STEPS: Final = 256
"""Steps that a trainer which takes a run over reads at most to go on with a trial."""

Verdict = Literal["", "clean", "failed"]
"""Of a trial that goes on: ""."""


@dataclass(frozen=True, slots=True)
class Standing:
    """How a trial stands. num_clean: sweeps of which at least one group came, and none was refused for what damns."""

    host: str
    num_clean: int
    verdict: Verdict = ""
    reason: str = ""


@dataclass(slots=True)
class _Trial:
    came: set[int] = field(default_factory=set)
    """Sweeps of which a group was admitted."""
    damned: dict[str, str] = field(default_factory=dict)
    """Key of a refused group -> why."""
    samples: dict[str, Sample] = field(default_factory=dict)
    """By the key of the group."""
    before: frozenset[str] = frozenset()
    """Keys of groups that were refused before the trial began."""

    @property
    def num_clean(self) -> int:
        return len(self.came - {keys.parse_group(key).sweep for key in self.damned})


class Trials:
    """The trials of one run. `damning`: reasons of refusal that no honest Mac gives."""

    def __init__(self, num_sweeps: int, damning: Collection[str]) -> None:
        """`num_sweeps`: clean sweeps after which a Mac is trusted again, at least 1."""
        self._num_sweeps = num_sweeps
        self._damning = frozenset(damning)
        self._trials: dict[str, _Trial] = {}
        self._told: dict[str, int] = {}

    def hold(self, hosts: Collection[str], refused: Iterable[Refused] = ()) -> None:
        """These hosts are on trial, and no others: who comes again begins anew. What was `refused` until now is not held against it."""
        before = frozenset(one.key for one in refused)
        self._trials = {host: self._trials.get(host) or _Trial(before=before) for host in hosts}
        self._told = {host: num_clean for host, num_clean in self._told.items() if host in self._trials}

    def saw(self, key: str, sample: Sample | None) -> None:
        """A group on trial was admitted; `sample` is how far it is from the trainer's, where that can be compared."""
        trial = self._trials.get(keys.parse_group(key).host)
        if trial is None:
            return
        trial.came.add(keys.parse_group(key).sweep)
        if sample is not None:
            trial.samples[key] = sample

    def recall(self, manifests: Iterable[StepManifest]) -> None:
        """Take up the trials of the hosts that are held where earlier leases left them; `manifests`: of the newest steps, newest first.

        A trial is as long as its host is shut out without a break. What the first of its steps tells of as refused may be
        from before it. At most RECALLED_STEPS are looked at, and none beyond the last trial's first.
        """
        since: dict[str, list[StepManifest]] = {host: [] for host in self._trials}
        open_trials = set(since)
        for manifest in islice(manifests, RECALLED_STEPS):
            open_trials = {host for host in open_trials if manifest.hosts.get(host, HostCounts()).quarantined}
            if not open_trials:
                break
            for host in open_trials:
                since[host].append(manifest)
        for host, found in since.items():
            for manifest in found:
                for seen in manifest.canaries:
                    self._saw_of(host, seen.key, sample_of(*seen))
                for one in manifest.refused:
                    if one.reason == Reason.CANARY:
                        self._saw_of(host, one.key, None)
            self.charge(one for manifest in found[:-1] for one in manifest.refused if one.host == host)

    def _saw_of(self, host: str, key: str, sample: Sample | None) -> None:
        if keys.parse_group(key).host == host:
            self.saw(key, sample)

    def charge(self, refused: Iterable[Refused]) -> None:
        """Take groups that were refused into account; one that is told again counts once."""
        for one in refused:
            trial = self._trials.get(one.host)
            if trial is not None and one.reason in self._damning and one.key not in trial.before:
                trial.damned[one.key] = one.reason

    def news(self, fleet: Sequence[Sample], most: int = 1000) -> tuple[Standing, ...]:
        """Trials that have a verdict, which is told until its host is held no more, or another count than was told; by host.

        fleet: the newest groups that were trained on; those of Macs on trial are passed over. most: trials to tell of now.
        """
        fleet = [sample for sample in fleet if sample.host not in self._trials]
        found = [self._judged(host, trial, fleet) for host, trial in sorted(self._trials.items())]
        fresh = [one for one in found if one.verdict or one.num_clean != self._told.get(one.host, 0)]
        fresh.sort(key=lambda one: not one.verdict)
        self._told.update((one.host, one.num_clean) for one in fresh[:most])
        return tuple(fresh[:most])

    def _judged(self, host: str, trial: _Trial, fleet: Sequence[Sample]) -> Standing:
        if len(trial.damned) >= MAX_STRIKES:
            reason = next(iter(trial.damned.values()))
            return Standing(host, trial.num_clean, "failed", f"{len(trial.damned)} canary groups refused, one as {reason}")
        # Alone beside those that are trusted: two that cheat alike must not vouch for each other.
        far = deviations([*fleet, *trial.samples.values()], least_hosts=2, doubted=host).get(host)
        if far is not None and far.sigmas > SIGMAS and abs(far.effect) > MIN_EFFECT:
            return Standing(host, trial.num_clean, "failed", f"in canary groups {far.measure} is {far.sigmas:.1f} sigma off")
        # Where nobody is left who is trusted, what was admitted has to do: else no run would come out of it.
        is_compared = far is not None or (not fleet and len(trial.samples) >= MIN_GROUPS)
        is_clean = trial.num_clean >= self._num_sweeps and is_compared
        return Standing(host, trial.num_clean, "clean" if is_clean else "")
