"""Answers a session that asks what its Mac may generate. Implements `ports.Granter`; runs in the control process.

The rule is `stoa.learning.ledger`'s; here the facts it needs are read from the bucket, as they change, so a new
control process goes on where the old one ended. Nothing here imports torch.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import structlog

from stoa.bucket import keys
from stoa.bucket.head import Head, poll_head
from stoa.bucket.keys import GroupKey
from stoa.bucket.revocations import Revoked
from stoa.bucket.steps import StepManifest, lineage, read_drop_notes, read_step
from stoa.bucket.store import Store
from stoa.bucket.tickets import Mint
from stoa.config.run import MOST_GROUPS, RunConfig
from stoa.contracts.errors import FormatError, ObjectMissingError
from stoa.contracts.fleet_messages import Grant, GrantRequest, WaitsFor
from stoa.contracts.ports import Progress
from stoa.learning.ledger import AdmissionRule, Decision, Ledger, QuestionOrder
from trainer_gpu.arrivals import Arrivals
from trainer_gpu.grant_book import MAX_AHEAD, GrantBook
from trainer_gpu.tickets import TicketCounter

REFRESH_SECONDS = 0.3
WAITS_SECONDS = 10.0
"""So long a Mac that waits is remembered; it asks again sooner."""
FAIR_SECONDS = 10.0
"""Of two Macs with as much to play, one that has waited so much longer comes first: else chance decides who asks at the right moment."""

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class _Wait:
    """A Mac that asked and got nothing, by the monotonic clock. since: with so many groups left to play as now."""

    since: float
    asked_at: float
    left: int


@dataclass(slots=True)
class _Lineage:
    """Which steps of HEAD's lease have been read, and how many groups the steps of each version trained on."""

    epoch: int = -1
    step: int = 0
    """Of HEAD when it was last looked at: it falls where a lease goes back to an older checkpoint."""
    last_key: str = ""
    last_note: str = ""
    consumed_by_version: dict[int, int] = field(default_factory=dict)

    def add(self, manifest: StepManifest) -> set[GroupKey]:
        """Count a step; returns the groups it settled."""
        consumed = self.consumed_by_version
        consumed[manifest.version] = consumed.get(manifest.version, 0) + len(manifest.consumed)
        gone = [*manifest.consumed, *(d.key for d in manifest.dropped), *(r.key for r in manifest.refused)]
        return {keys.parse_group(key) for key in gone}


class GrantKeeper:
    """The ledger of one run. Safe from any thread; answers one request at a time."""

    def __init__(
        self,
        store: Store,
        config: RunConfig,
        public_key: str,
        question_ids: Sequence[str],
        *,
        tickets: tuple[Mint, Revoked] | None = None,
        refresh_seconds: float = REFRESH_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`question_ids`: all training questions of the environment. `refresh_seconds`: age up to which facts are used again.

        tickets: for a run to which Macs may be invited.
        """
        self._store = store
        self._run = config.run
        self._public_key = public_key
        self._refresh_seconds, self._clock = refresh_seconds, clock
        self._oldest_by = config.learning.max_staleness_hard
        rule = AdmissionRule(
            max_staleness=config.learning.max_staleness,
            max_staleness_hard=config.learning.max_staleness_hard,
            groups_per_version=config.groups_per_version,
            # A grant may wait for whole sweeps before its own begins.
            lost_after_seconds=(1 + MAX_AHEAD) * config.timeouts.sweep_seconds + config.timeouts.heartbeat_seconds,
            max_ahead=MAX_AHEAD,
        )
        self._ledger = Ledger(rule)
        self._order = QuestionOrder(question_ids, config.seed)
        self._book = GrantBook(store, config.run)
        self._tickets = None if tickets is None else self._counter(config, *tickets)
        self._head: Head | None = None
        self._etag = ""
        self._lineage = _Lineage()
        self._has_begun = False
        self._arrivals = Arrivals(store, config.run)
        self._ended: dict[str, int] = {}
        """Host -> sweeps with a lower number are over, as sessions said since the look at the bucket that goes on began."""
        self._ending: dict[str, int] = {}
        """The same, as said before it: all that came of those sweeps is seen once it ends."""
        self._let_go: dict[str, int] = {}
        """Host -> first of its sweeps that a draining run has refused: it does not begin that one nor those after it."""
        self._waiting: dict[str, _Wait] = {}
        self._fresh_until = 0.0
        self._lock = threading.Lock()

    def _counter(self, config: RunConfig, mint: Mint, revoked: Revoked) -> TicketCounter:
        def is_granted(slot: GroupKey) -> bool:
            return self._book.question_of(slot) is not None

        return TicketCounter(config.run, mint, revoked, is_granted, max_staleness_hard=config.learning.max_staleness_hard)

    def grant(self, request: GrantRequest, progress: Progress) -> Grant:
        """See `ports.Granter`. An empty grant says what it waits for. Raises FormatError for a request of another run."""
        if request.run != self._run:
            raise FormatError(f"this control process serves run {self._run}, not {request.run}")
        # A Mac says how many it wants: a grant of millions would fill a message, the bucket and all the room there is.
        request = replace(request, num_groups=min(max(request.num_groups, 1), MOST_GROUPS))
        with self._lock:
            answer = self._refused(request) or self._granted(request)
        progress.report(answer.reason or f"granted {len(answer.question_ids)} groups", version=self._head.version if self._head else -1)
        return answer

    def _granted(self, request: GrantRequest) -> Grant:
        self._ledger.come_back(request.host)
        if request.evaluation and self._tickets is not None:
            return self._tickets.part_ticket(request)
        self._ended[request.host] = max(self._ended.get(request.host, 0), request.ended_before)
        answer = self._answer(request)
        self._note_waiting(request, answer)
        if self._tickets is not None and self._head is not None and answer.newest_sweep < 0:
            answer = self._tickets.with_tickets(request, answer, self._head.version, self._ledger.arrived_of(request.host, request.sweep))
        return answer

    def _refused(self, request: GrantRequest) -> Grant | None:
        """What a Mac is told that may not take part: why, and to it the run has stopped."""
        reason = self._tickets.refusal(request) if self._tickets is not None else None
        if reason is None:
            return None
        self._ledger.leave(request.host)
        return replace(self._empty(request, reason), run_state="stopped", refused=True)

    def on_the_way(self) -> tuple[int, int]:
        """See `ports.Granter`."""
        with self._lock:
            if self._refresh() is None:
                return 0, 0
            not_begun = sum(self._ledger.left_from(host, sweep) for host, sweep in self._let_go.items())
            return self._ledger.running - not_begun, self._ledger.waiting

    def host_left(self, host: str) -> None:
        """See `ports.Granter`."""
        with self._lock:
            self._ledger.leave(host)

    def _answer(self, request: GrantRequest) -> Grant:
        head = self._refresh()
        if head is None or head.version < 0:
            return self._empty(request, "no version is published yet: waiting for a trainer", "version")
        self._note_refused(request, head)
        if head.state != "running":
            return replace(self._empty(request, f"the run is {head.state}", "run"), run_state=head.state)
        newest = self._ledger.newest_sweep(request.host)
        if request.sweep < newest - MAX_AHEAD:
            over = self._empty(request, f"sweep {request.sweep} is over, {newest} was granted already")
            return replace(over, newest_sweep=newest)
        decision = self._decide(request)
        if decision.grant is None:
            return self._empty(request, decision.reason, "turn" if decision.room > 0 else "room")
        grant = decision.grant
        if decision.is_new:
            grant = self._book.write(grant)
            log.info(
                "sweep_granted",
                host=grant.host,
                sweep=grant.sweep,
                num_groups=len(grant.question_ids),
                room=decision.room,
                waiting=self._ledger.waiting,
                running=self._ledger.running,
            )
            self._ledger.grant(grant)
        return Grant(self._run, grant.host, grant.sweep, grant.question_ids, grant.min_version)

    def _note_refused(self, request: GrantRequest, head: Head) -> None:
        """Who asks for a sweep has not begun it, and while the run drains nobody may: groups granted ahead are not on the way then."""
        if head.state != "draining":
            self._let_go.clear()
        else:
            self._let_go[request.host] = request.sweep

    def _decide(self, request: GrantRequest) -> Decision:
        now = time.time()
        self._ledger.pass_time(now)
        return self._ledger.decide(
            self._order,
            host=request.host,
            sweep=request.sweep,
            num_groups=request.num_groups,
            now=now,
            kept=lambda: self._num_kept(request),
        )

    def _num_kept(self, request: GrantRequest) -> int:
        """Room kept from a Mac that still has something to play, or has waited less.

        A sweep for each Mac that waits for a grant too and has less left to play, or as much for much longer: room goes where it
        is needed first. For more than one sweep ahead, a sweep for every Mac as well.
        """
        ledger, now = self._ledger, self._clock()
        mine = self._wait_of(request.host, now)
        num_first = sum(
            (ledger.left(host), wait.since + FAIR_SECONDS) < (mine.left, mine.since)
            for host, wait in self._waiting.items()
            if host != request.host and wait.asked_at > now - WAITS_SECONDS and not ledger.is_away(host)
        )
        num_ahead = ledger.num_unfinished_before(request.host, request.sweep)
        return (num_first + max(0, num_ahead - 1) * ledger.num_present) * request.num_groups

    def _wait_of(self, host: str, now: float) -> _Wait:
        """The wait of a Mac that asks now: one that goes on, or a new one."""
        left, before = self._ledger.left(host), self._waiting.get(host)
        goes_on = before is not None and before.left == left and before.asked_at > now - WAITS_SECONDS
        return _Wait(before.since if before is not None and goes_on else now, now, left)

    def _note_waiting(self, request: GrantRequest, answer: Grant) -> None:
        """Remember who asks and gets nothing."""
        if answer.question_ids or answer.newest_sweep >= 0:
            self._waiting.pop(request.host, None)
        else:
            self._waiting[request.host] = self._wait_of(request.host, self._clock())

    def _empty(self, request: GrantRequest, reason: str, waits_for: WaitsFor = "") -> Grant:
        return Grant(self._run, request.host, request.sweep, (), reason=reason, waits_for=waits_for)

    def _refresh(self) -> Head | None:
        """Bring the facts up to date with the bucket, if they are older than `refresh_seconds`."""
        if self._clock() < self._fresh_until and self._head is not None:
            return self._head
        try:
            changed = poll_head(self._store, self._run, self._public_key, self._etag)
        except ObjectMissingError:
            return None
        if not self._has_begun:
            for grant in self._book.newest():
                self._ledger.grant(grant)
        if changed is not None:
            self._head, self._etag = changed
        head = self._head
        if head is None:
            return None
        oldest = max(0, head.version - self._oldest_by)
        self._follow_steps(head, oldest)
        self._read_notes(head)
        self._ledger.see(head.version, self._lineage.consumed_by_version.get(head.version, 0))
        self._look(oldest)
        while not (self._has_begun or self._arrivals.has_seen_all):
            self._look(oldest)
        self._has_begun = True
        self._fresh_until = self._clock() + self._refresh_seconds
        return head

    def _look(self, oldest: int) -> None:
        """Note groups that arrived. A sweep that was said to be over is settled once all that came of it has been seen."""
        if self._arrivals.has_seen_all:
            self._ending, self._ended = self._ended, {}
        for named, num_bytes in self._arrivals.look(oldest):
            self._ledger.arrive(named)
            if self._tickets is not None:
                self._tickets.note_size(named, num_bytes)
        if self._arrivals.has_seen_all:
            for host, before in self._ending.items():
                self._ledger.end(host, before)
            self._ending = {}

    def _follow_steps(self, head: Head, oldest: int) -> None:
        """Read the steps not read yet; after a new lease, or one that went back, all over again: steps may have been given back."""
        if self._lineage.epoch != head.epoch or head.step < self._lineage.step:
            begun = _Lineage(head.epoch, head.step)
            settled: set[GroupKey] = set()
            for manifest in lineage(self._store, head):
                if manifest.version < oldest:
                    break
                settled |= begun.add(manifest)
            if head.step_manifest_key.startswith(keys.steps_of_epoch(self._run, head.epoch)):
                begun.last_key = head.step_manifest_key
            self._lineage = begun
            self._ledger.settle_only(settled)
        known = self._lineage
        known.step = head.step
        listed = (found.key for found in self._store.list(keys.steps_of_epoch(self._run, head.epoch), known.last_key))
        for key, _ in keys.ours(listed, keys.parse_step):
            for group in known.add(read_step(self._store, self._run, key)):
                self._ledger.settle(group)
            known.last_key = key
        known.consumed_by_version = {version: num for version, num in known.consumed_by_version.items() if version >= oldest}

    def _read_notes(self, head: Head) -> None:
        """Read the notes of drops: once in a lease those of all leases, and then its own new ones."""
        known, own = self._lineage, keys.drop_notes_prefix(self._run, head.epoch)
        if known.last_note:
            notes = read_drop_notes(self._store, self._run, epoch=head.epoch, start_after=known.last_note)
        else:
            notes = read_drop_notes(self._store, self._run)
        for dropped in notes.values():
            for key in dropped:
                self._ledger.settle(keys.parse_group(key))
        numbered = (key for key, _ in keys.ours(notes, keys.parse_drop_note) if key.startswith(own))
        known.last_note = max(numbered, default=known.last_note or own)
