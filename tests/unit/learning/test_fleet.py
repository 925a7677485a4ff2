"""Macs that differ from the fleet are suspected with a reason, alike ones are not, and what was forgiven is forgotten."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from stoa.bucket import keys
from stoa.bucket.head import HEAD_FORMAT, Head
from stoa.bucket.steps import STEP_FORMAT, GroupMismatch, HostCounts, Refused, StepManifest, write_step
from stoa.bucket.store import Store
from stoa.learning.fleet import SIGMAS, FleetBook, Sample, deviations

DAMNING = {"wrong_reward"}
HOSTS = [f"mac-{number}" for number in range(7)]


def mismatch(chance: np.random.Generator, level: float = 0.01, factor: float = 1.0, ratio: float = 1.0) -> GroupMismatch:
    """An honest group has log-normal measures around `level`; `factor` moves all but the ratio."""
    mean = level * factor * float(np.exp(0.5 * chance.standard_normal()))
    return GroupMismatch(mean, mean / 5, 6 * mean, min(1.0, 2 * mean), ratio + 0.02 * float(chance.standard_normal()))


def manifest(
    step: int, groups: Sequence[tuple[str, int, GroupMismatch]], *, refused: Sequence[Refused] = (), **changes: object
) -> StepManifest:
    """A step whose groups are (host, lag, mismatch); the version goes up every four steps."""
    version = 3 + step // 4
    taken = [keys.group("toy", version - lag, host, step, number) for number, (host, lag, _) in enumerate(groups)]
    hosts = {host: HostCounts(accepted=sum(one[0] == host for one in groups)) for host in {one[0] for one in groups}}
    fields: dict = {"format": STEP_FORMAT, "run": "toy", "epoch": 1001, "step": step + 1, "version": version, "parent_key": ""}
    fields |= {"consumed": tuple(taken), "dropped": (), "refused": tuple(refused), "hosts": hosts, "metrics": {}}
    fields |= {"started_at": 0.0, "wait_seconds": 0.0, "train_seconds": 0.0, "mismatches": tuple(one[2] for one in groups)}
    fields |= {"distances": tuple(4 * lag + step % 4 for _, lag, _ in groups)}
    return StepManifest(**{**fields, **changes})


def played(book: FleetBook, num_steps: int, of: Callable[[str, int], GroupMismatch], *, hosts: Sequence[str] = HOSTS) -> None:
    """Steps of 14 groups; lags come in turn."""
    for step in range(num_steps):
        book.note(manifest(step, [(hosts[i % len(hosts)], lag := (i // 7 + step) % 2, of(hosts[i % len(hosts)], lag)) for i in range(14)]))


@pytest.mark.parametrize("seed", range(8))
def test_a_fleet_of_honest_macs_is_above_suspicion_at_every_step(seed: int) -> None:
    chance = np.random.default_rng(seed)
    book = FleetBook(DAMNING)
    for step in range(24):
        book.note(manifest(step, [(HOSTS[i % 7], (i + step) % 3, mismatch(chance, 0.01 * (1 + (i + step) % 3))) for i in range(14)]))
        assert book.suspects() == ()


def host_by_host(
    book: FleetBook, step: int, chance: np.random.Generator, *, hosts: Sequence[str], cheat: str = "", **changes: float
) -> None:
    """A step of eight groups of one host, whose |pi - mu| grows in proportion to the steps since they were played."""
    host, places = hosts[step % len(hosts)], [(lag, 4 * lag + step % 4) for lag in [0, 1] * 4]
    own = changes if host == cheat else {}
    book.note(manifest(step, [(host, lag, mismatch(chance, 0.002 * (1 + distance), **own)) for lag, distance in places]))


@pytest.mark.parametrize("num_hosts", [4, 5, 7])
@pytest.mark.parametrize("seed", range(4))
def test_a_fleet_shipped_host_by_host_is_above_suspicion_at_every_step(seed: int, num_hosts: int) -> None:
    """Of four each is always at the same place of a version."""
    chance = np.random.default_rng(seed)
    book = FleetBook(DAMNING)
    for step in range(32):
        host_by_host(book, step, chance, hosts=HOSTS[:num_hosts])
        assert book.suspects() == ()
    assert set(deviations(book.newest)) == set(HOSTS[:num_hosts]), "all are judged"


@pytest.mark.parametrize("changes", [{"factor": 6.0}, {"ratio": 0.85}])
@pytest.mark.parametrize("cheat", HOSTS[:4])
def test_whoever_is_off_is_suspected_in_a_fleet_shipped_host_by_host(cheat: str, changes: dict[str, float]) -> None:
    chance = np.random.default_rng(1)
    book = FleetBook(DAMNING)
    for step in range(14):
        host_by_host(book, step, chance, hosts=HOSTS, cheat=cheat, **changes)
    assert [one.host for one in book.suspects()] == [cheat]


def test_a_mac_whose_groups_come_last_of_every_version_is_above_suspicion() -> None:
    chance = np.random.default_rng(1)
    book = FleetBook(DAMNING)
    for step in range(24):
        hosts = [HOSTS[6]] * 8 if step % 4 == 3 else [HOSTS[i % 6] for i in range(8)]
        book.note(manifest(step, [(host, 0, mismatch(chance, 0.002 * (1 + step % 4))) for host in hosts]))
        assert book.suspects() == ()
    far = deviations([sample._replace(distance=0) for sample in book.newest])
    assert far[HOSTS[6]].sigmas > SIGMAS, "its groups differ more, by as much as the policy has moved"


def test_a_share_that_jumps_once_the_policy_has_moved_far_enough_accuses_nobody() -> None:
    """No token of a run's first steps is beyond the bound; then some are."""
    chance = np.random.default_rng(6)
    rows: list[Sample] = []
    for place, host in enumerate(HOSTS[:5]):
        for _ in range(8):
            group = mismatch(chance, 0.002 * (1 + place))
            rows.append(Sample(host, 0, 0, place, group._replace(far_share=0.04 if place == 4 else 0.0)))
        far = deviations(rows)
        assert all(one.sigmas < SIGMAS for one in far.values())
    assert HOSTS[4] in far
    assert deviations([row._replace(distance=0) for row in rows])[HOSTS[4]].sigmas > SIGMAS


def test_measures_are_corrected_for_distance_by_a_power_of_it() -> None:
    """By hand: |pi - mu| = 0.02 (1 + d)^2 of six hosts, each always at one distance."""
    rows = [Sample(f"h{n % 6}", 3, 0, n % 6, GroupMismatch(0.02 * (1 + n % 6) ** 2, 0.0, 0.0, 0.0, 1.0)) for n in range(48)]
    found = deviations(rows)
    assert max(one.sigmas for one in found.values()) < 0.5
    assert deviations([row._replace(distance=0) for row in rows])["h5"].effect > 1.0


@pytest.mark.parametrize(("changes", "words"), [({"factor": 6.0}, ""), ({"ratio": 0.9}, "pi / mu"), ({"ratio": 1.15}, "pi / mu")])
def test_a_mac_whose_logprobs_are_off_is_suspected_alone(changes: dict[str, float], words: str) -> None:
    chance = np.random.default_rng(1)
    book = FleetBook(DAMNING)
    played(book, 12, lambda host, lag: mismatch(chance, 0.01 * (1 + lag), **(changes if host == "mac-3" else {})))
    (found,) = book.suspects()
    assert found.host == "mac-3"
    assert words in found.reason
    assert book.suspects(shut_out=["mac-3"]) == ()
    assert book.suspects() == (), "what it did before it was shut out is forgotten"


def test_better_agreement_than_the_others_is_no_fault() -> None:
    chance = np.random.default_rng(2)
    book = FleetBook(DAMNING)
    played(book, 8, lambda host, lag: mismatch(chance, 0.01, factor=0.1 if host == "mac-3" else 1.0))
    assert book.suspects() == ()


def test_older_groups_are_compared_with_older_ones_only() -> None:
    """A slow Mac's groups are always two versions late, and differ more for that."""
    chance = np.random.default_rng(3)
    book = FleetBook(DAMNING)
    for step in range(12):
        late = [("mac-6", 2, mismatch(chance, 0.05)) for _ in range(2)]
        others = [(HOSTS[i % 6], 2 * (i // 8), mismatch(chance, 0.05 if i // 8 else 0.005)) for i in range(12)]
        book.note(manifest(step, [*others, *late]))
    assert book.suspects() == ()


def test_fewer_than_four_macs_cannot_accuse_each_other() -> None:
    chance = np.random.default_rng(4)
    book = FleetBook(DAMNING)
    played(book, 10, lambda host, lag: mismatch(chance, factor=50.0 if host == "mac-0" else 1.0), hosts=HOSTS[:3])
    assert book.suspects() == ()


def test_a_few_groups_are_no_evidence() -> None:
    chance = np.random.default_rng(5)
    book = FleetBook(DAMNING)
    played(book, 2, lambda host, lag: mismatch(chance, factor=50.0 if host == "mac-0" else 1.0))
    assert book.suspects() == ()


def test_deviation_is_in_units_of_one_groups_spread() -> None:
    """By hand: residuals of the others are +-1 about 0, of the outlier all clipped to 3; 12 groups each of five hosts."""
    rows: list[Sample] = []
    for host in range(5):
        for number in range(12):
            mean = 0.1 * (1.5 if number % 2 else 1 / 1.5)
            far = GroupMismatch(mean if host else 10.0, 0.0, 0.0, 0.0, 1.0)
            rows.append(Sample(f"h{host}", 3, 0, 2, far))
    found = deviations(rows)
    assert found["h0"].measure == "mean |pi - mu|"
    assert found["h0"].effect == pytest.approx(3.0, abs=0.4)
    assert found["h0"].num_groups == 12
    assert max(found[f"h{host}"].sigmas for host in range(1, 5)) < 1.0


def test_three_damning_refusals_make_a_mac_suspect_and_others_do_not() -> None:
    def refused(host: str, reason: str, number: int) -> list[Refused]:
        return [Refused(keys.group("toy", 3, host, 0, i), host, reason) for i in range(number)]

    book = FleetBook(DAMNING)
    book.note(manifest(0, [], refused=[*refused("liar", "wrong_reward", 2), *refused("late", "unknown_version", 8)]))
    assert book.suspects() == ()
    (found,) = book.suspects(pending=refused("liar", "wrong_reward", 1))
    assert (found.host, found.reason) == ("liar", "3 groups refused, most as wrong_reward")
    assert book.suspects() == (), "pending refusals are in the next step's manifest"
    book.note(manifest(1, [], refused=refused("liar", "wrong_reward", 1)))
    assert [one.host for one in book.suspects()] == ["liar"]
    book.note(manifest(2, [], hosts={"liar": HostCounts(quarantined=True)}))
    assert book.suspects() == ()


def test_evidence_is_read_back_from_the_bucket(store: Store) -> None:
    """A trainer that takes the run over suspects whom the one before did."""
    chance = np.random.default_rng(1)
    book = FleetBook(DAMNING)
    key = ""
    for step in range(12):
        groups = [(HOSTS[i % 7], 0, mismatch(chance, factor=8.0 if i % 7 == 3 else 1.0)) for i in range(14)]
        made = manifest(step, groups, parent_key=key)
        key = write_step(store, made)
        book.note(made)
    head = Head(HEAD_FORMAT, "toy", 1001, "gpu", 1, "", "running", 5, "", "", 12, key, "", 0.0)
    assert [one.host for one in book.suspects()] == ["mac-3"]
    assert FleetBook.of_run(store, head, DAMNING).suspects() == book.suspects()


def test_a_strike_is_outlived_by_good_groups() -> None:
    book = FleetBook(DAMNING)
    for step in range(6):
        strike = [Refused(keys.group("toy", 3, "mac-0", step, 0), "mac-0", "wrong_reward")]
        book.note(manifest(step, [], refused=strike, hosts={"mac-0": HostCounts(accepted=16)}))
        assert book.suspects() == (), "one strike in seventeen groups"


@pytest.mark.parametrize("moved", [0.15, -0.15])
def test_a_mac_that_prefers_likely_or_unlikely_tokens_is_suspected_though_its_logprobs_are_true(moved: float) -> None:
    """Nothing else tells a sampler at temperature 0.7 that reports what the policy says of its tokens."""
    chance = np.random.default_rng(3)
    book = FleetBook(DAMNING)

    def of(host: str, lag: int) -> GroupMismatch:
        drawn = 0.05 * float(chance.standard_normal()) + (moved if host == "mac-2" else 0.0)
        return mismatch(chance)._replace(likeliness=drawn)

    played(book, 6, of)
    (found,) = book.suspects()
    assert (found.host, found.reason.split(" is ")[0]) == ("mac-2", "likeliness of tokens")
