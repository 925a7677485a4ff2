"""Who plays which part of an evaluation: pure functions over what was handed out and answered.

A part is counted once, however many Macs answer it; one whose Mac failed or fell silent is handed out again.
"""

from dataclasses import dataclass, replace
from typing import Final

from stoa.contracts.evaluation_messages import EvalPartDone, EvalPlayer

FAULT_COOL_SECONDS: Final = 5.0
"""Times the number of its faults: how long a Mac that failed is passed over."""
MAX_COOL_SECONDS: Final = 60.0


@dataclass(frozen=True)
class Handed:
    """A part that a Mac plays now."""

    part: int
    host: str
    at: float


@dataclass(frozen=True)
class Faults:
    """Parts a Mac did not finish."""

    host: str
    num_faults: int
    last_at: float
    last_part: int


@dataclass(frozen=True)
class Deal:
    """The state of an evaluation's parts. `seconds` are those of each answer in `done`, from being handed to it."""

    num_parts: int
    handed: tuple[Handed, ...] = ()
    done: tuple[EvalPartDone, ...] = ()
    faults: tuple[Faults, ...] = ()
    seconds: tuple[float, ...] = ()
    barred: tuple[str, ...] = ()
    """Macs that answered a part which was no good."""

    @property
    def is_done(self) -> bool:
        """True once every part has been answered."""
        return len(self.done) == self.num_parts

    @property
    def keys(self) -> tuple[str, ...]:
        """Keys of the answers that count, in the order of parts."""
        return tuple(key for answer in sorted(self.done, key=lambda one: one.part) for key in answer.keys)

    def open_parts(self) -> tuple[int, ...]:
        """Parts that nobody plays and nobody has answered."""
        taken = {answer.part for answer in self.done} | {one.part for one in self.handed}
        return tuple(part for part in range(self.num_parts) if part not in taken)


def next_handings(deal: Deal, hosts: tuple[str, ...], now: float) -> tuple[Handed, ...]:
    """Open parts for idle hosts: one each, the most reliable hosts first.

    A host is not given the part it failed last while another live host, which did not, could take it.
    """
    faults = {one.host: one for one in deal.faults}
    busy = {one.host for one in deal.handed}
    idle = [host for host in sorted(set(hosts)) if host not in busy and _has_cooled(faults.get(host), now)]
    idle.sort(key=lambda host: faults[host].num_faults if host in faults else 0)
    last = {host: faults[host].last_part if host in faults else -1 for host in hosts}
    handings: list[Handed] = []
    left = list(deal.open_parts())
    for host in idle:
        part = next((one for one in left if last[host] != one or all(failed == one for failed in last.values())), None)
        if part is not None:
            left.remove(part)
            handings.append(Handed(part, host, now))
    return tuple(handings)


def _has_cooled(faults: Faults | None, now: float) -> bool:
    return faults is None or now - faults.last_at >= min(FAULT_COOL_SECONDS * faults.num_faults, MAX_COOL_SECONDS)


def hand(deal: Deal, handings: tuple[Handed, ...]) -> Deal:
    """The deal with `handings` being played."""
    return replace(deal, handed=(*deal.handed, *handings))


def on_answer(deal: Deal, answer: EvalPartDone, now: float) -> Deal:
    """A session's answer: the first good one of a part counts, a bad one frees the part."""
    if answer.part not in range(deal.num_parts) or any(one.part == answer.part for one in deal.done):
        return deal
    if answer.ok:
        at = next((one.at for one in deal.handed if (one.part, one.host) == (answer.part, answer.host)), now)
        return replace(
            deal,
            done=(*deal.done, answer),
            handed=tuple(one for one in deal.handed if one.part != answer.part),
            seconds=(*deal.seconds, now - at),
        )
    failed = next((one for one in deal.handed if (one.part, one.host) == (answer.part, answer.host)), None)
    return deal if failed is None else _fault(deal, failed, now)


def expire(deal: Deal, timeout_seconds: float, now: float) -> Deal:
    """Free the parts of Macs that were silent too long."""
    for one in deal.handed:
        if now - one.at >= timeout_seconds:
            deal = _fault(deal, one, now)
    return deal


def _fault(deal: Deal, failed: Handed, now: float) -> Deal:
    known = next((one for one in deal.faults if one.host == failed.host), Faults(failed.host, 0, 0.0, -1))
    others = tuple(one for one in deal.faults if one.host != failed.host)
    return replace(
        deal,
        handed=tuple(one for one in deal.handed if one != failed),
        faults=(*others, Faults(failed.host, known.num_faults + 1, now, failed.part)),
    )


def redeal(deal: Deal, bad: tuple[int, ...]) -> Deal:
    """The deal with these parts open again, and whoever answered them barred."""
    kept = [(one, seconds) for one, seconds in zip(deal.done, deal.seconds, strict=True) if one.part not in bad]
    hosts = {one.host for one in deal.done if one.part in bad}
    return replace(
        deal,
        done=tuple(one for one, _ in kept),
        seconds=tuple(seconds for _, seconds in kept),
        barred=tuple(sorted(hosts | set(deal.barred))),
    )


def newest(deal: Deal, limit: int = 40) -> Deal:
    """The deal with no more of each list than one message carries."""
    return replace(
        deal,
        handed=deal.handed[-limit:],
        done=deal.done[-limit:],
        faults=deal.faults[-limit:],
        seconds=deal.seconds[-limit:],
        barred=deal.barred[-limit:],
    )


def players(deal: Deal, limit: int = 50) -> tuple[EvalPlayer, ...]:
    """What each Mac did, those that did most first. Parts go to whoever is idle, so that faster Macs play more of them."""
    found: dict[str, list[tuple[EvalPartDone, float]]] = {}
    for answer, seconds in zip(deal.done, deal.seconds, strict=False):
        found.setdefault(answer.host, []).append((answer, seconds))
    rows = [_player(host, answers) for host, answers in found.items()]
    return tuple(sorted(rows, key=lambda row: (-row.num_questions, row.host))[:limit])


def _player(host: str, answers: list[tuple[EvalPartDone, float]]) -> EvalPlayer:
    num_questions = sum(answer.num_episodes for answer, _ in answers)
    hours = sum(seconds for _, seconds in answers) / 3600.0
    decode_seconds = sum(answer.decode_seconds for answer, _ in answers)
    tokens = sum(answer.num_sampled_tokens for answer, _ in answers)
    return EvalPlayer(
        host,
        len(answers),
        num_questions,
        round(num_questions / hours, 1) if hours else 0.0,
        round(tokens / decode_seconds, 1) if decode_seconds else 0.0,
    )


def trusted(hosts: tuple[str, ...], suspects: tuple[str, ...]) -> tuple[str, ...]:
    """Hosts that may be examined on: those under suspicion, or barred, only where there is nobody else."""
    return tuple(host for host in hosts if host not in suspects) or hosts
