"""Answers a session that asks what its Mac may generate. Implements `ports.Granter`; runs in the control process.

The rule is `stoa.learning.ledger`'s; here the facts it needs are read from the bucket, anew as they change, so a new
control process goes on where the old one ended. Nothing here imports torch.
"""

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import structlog

from stoa.bucket import keys
from stoa.bucket.head import Head, poll_head
from stoa.bucket.keys import GroupKey
from stoa.bucket.revocations import Revoked
from stoa.bucket.steps import StepManifest, lineage, read_drop_notes, read_step
from stoa.bucket.store import Store
from stoa.bucket.tickets import Mint
from stoa.config.run import RunConfig
from stoa.contracts.errors import FormatError, ObjectMissingError
from stoa.contracts.fleet_messages import Grant, GrantRequest, WaitsFor
from stoa.contracts.ports import Progress
from stoa.learning.ledger import AdmissionRule, Decision, Facts, GrantRecord, Outstanding, QuestionOrder, decide, outstanding
from trainer_gpu.grant_book import MAX_AHEAD, GrantBook
from trainer_gpu.tickets import TicketCounter

REFRESH_SECONDS = 0.3
WAITS_SECONDS = 10.0
"""So long a Mac that waits is remembered; it asks again sooner."""

log = structlog.get_logger()


@dataclass(slots=True)
class _Lineage:
    """What the steps since the window began have settled, by HEAD's lineage and the steps made after it."""

    epoch: int = -1
    last_key: str = ""
    settled: set[GroupKey] = field(default_factory=set)
    consumed_by_version: dict[int, int] = field(default_factory=dict)

    def add(self, manifest: StepManifest) -> None:
        gone = [*manifest.consumed, *(d.key for d in manifest.dropped), *(r.key for r in manifest.refused)]
        self.settled |= {keys.parse_group(key) for key in gone}
        consumed = self.consumed_by_version
        consumed[manifest.version] = consumed.get(manifest.version, 0) + len(manifest.consumed)

    def forget(self, oldest: int) -> None:
        self.settled = {key for key in self.settled if key.version >= oldest}
        self.consumed_by_version = {v: n for v, n in self.consumed_by_version.items() if v >= oldest}


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
    ) -> None:
        """`question_ids`: all training questions of the environment. `refresh_seconds`: age up to which facts are used again.

        tickets: for a run to which Macs may be invited.
        """
        self._store = store
        self._run = config.run
        self._public_key = public_key
        self._refresh_seconds = refresh_seconds
        self._rule = AdmissionRule(
            max_staleness=config.learning.max_staleness,
            max_staleness_hard=config.learning.max_staleness_hard,
            groups_per_version=config.groups_per_version,
            # A grant may wait for whole sweeps before its own begins.
            lost_after_seconds=(1 + MAX_AHEAD) * config.timeouts.sweep_seconds + config.timeouts.heartbeat_seconds,
            max_ahead=MAX_AHEAD,
        )
        self._order = QuestionOrder(question_ids, config.seed)
        self._book = GrantBook(store, config.run)
        self._tickets = None if tickets is None else self._counter(config, *tickets)
        self._grants: dict[tuple[str, int], GrantRecord] = {}
        self._head: Head | None = None
        self._etag = ""
        self._lineage = _Lineage()
        self._notes: set[str] = set()
        self._noted: set[GroupKey] = set()
        self._arrived: set[GroupKey] = set()
        self._ended_before: dict[str, int] = {}
        self._away: set[str] = set()
        self._let_go: dict[str, int] = {}
        """Host -> first of its sweeps that a draining run has refused: it does not begin that one nor those after it."""
        self._waiting: dict[str, float] = {}
        self._on_the_way: Outstanding | None = None
        """Counted once for facts that are used again."""
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
        with self._lock:
            answer = self._refused(request) or self._granted(request)
        progress.report(answer.reason or f"granted {len(answer.question_ids)} groups", version=self._head.version if self._head else -1)
        return answer

    def _granted(self, request: GrantRequest) -> Grant:
        if request.host in self._away:
            self._away.discard(request.host)
            self._on_the_way = None
        if request.evaluation and self._tickets is not None:
            return self._tickets.part_ticket(request)
        self._ended_before[request.host] = max(self._ended_before.get(request.host, 0), request.ended_before)
        answer = self._answer(request)
        self._note_waiting(request, answer)
        if self._tickets is not None and self._head is not None and answer.newest_sweep < 0:
            answer = self._tickets.with_tickets(request, answer, self._head.version, self._arrived)
        return answer

    def _refused(self, request: GrantRequest) -> Grant | None:
        """What a Mac is told that may not take part: to it the run has stopped, so that its session ends after a while."""
        reason = self._tickets.refusal(request) if self._tickets is not None else None
        if reason is None:
            return None
        self._away.add(request.host)
        return replace(self._empty(request, reason), run_state="stopped")

    def on_the_way(self) -> tuple[int, int]:
        """See `ports.Granter`."""
        with self._lock:
            head = self._refresh()
            if head is None:
                return 0, 0
            found = self._outstanding(head)
        return found.running, found.waiting

    def host_left(self, host: str) -> None:
        """See `ports.Granter`."""
        with self._lock:
            self._away.add(host)
            self._on_the_way = None

    def _answer(self, request: GrantRequest) -> Grant:
        head = self._refresh()
        if head is None or head.version < 0:
            return self._empty(request, "no version is published yet: waiting for a trainer", "version")
        self._note_refused(request, head)
        if head.state != "running":
            return replace(self._empty(request, f"the run is {head.state}", "run"), run_state=head.state)
        newest = max((sweep for host, sweep in self._grants if host == request.host), default=-1)
        if request.sweep < newest - MAX_AHEAD:
            over = self._empty(request, f"sweep {request.sweep} is over, {newest} was granted already")
            return replace(over, newest_sweep=newest)
        decision = self._decide(request, head)
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
                waiting=decision.outstanding.waiting,
                running=decision.outstanding.running,
            )
            self._keep(grant)
        return Grant(self._run, grant.host, grant.sweep, grant.question_ids, grant.min_version)

    def _note_refused(self, request: GrantRequest, head: Head) -> None:
        """Who asks for a sweep has not begun it, and while the run drains nobody may: groups granted ahead are not on the way then."""
        if head.state != "draining":
            self._let_go.clear()
        elif self._let_go.get(request.host) != request.sweep:
            self._let_go[request.host] = request.sweep
            self._on_the_way = None

    def _open_grants(self) -> list[GrantRecord]:
        """Grants without those that are not begun any more."""
        return [grant for grant in self._grants.values() if grant.sweep < self._let_go.get(grant.host, grant.sweep + 1)]

    def _decide(self, request: GrantRequest, head: Head) -> Decision:
        on_the_way = self._outstanding(head)
        return decide(
            self._rule,
            self._facts(head),
            self._order,
            host=request.host,
            sweep=request.sweep,
            num_groups=request.num_groups,
            now=time.time(),
            num_kept=self._num_kept(request, on_the_way),
            on_the_way=on_the_way,
        )

    def _outstanding(self, head: Head) -> Outstanding:
        """Groups on the way, by the facts at hand. A large fleet asks hundreds of times a second, and counting takes a while."""
        if self._on_the_way is None:
            self._on_the_way = outstanding(self._rule, self._facts(head), time.time())
        return self._on_the_way

    def _facts(self, head: Head) -> Facts:
        return Facts(
            version=head.version,
            num_consumed=self._lineage.consumed_by_version.get(head.version, 0),
            grants=self._open_grants() if self._let_go else self._grants.values(),
            arrived=self._arrived,
            settled=self._lineage.settled | self._noted,
            ended_before=self._ended_before,
            away=self._away,
        )

    def _num_kept(self, request: GrantRequest, on_the_way: Outstanding) -> int:
        """Room kept from a Mac that still has something to play.

        A sweep for each Mac that waits for a grant too and has less left to play: room goes where it is needed first. For
        more than one sweep ahead, a sweep for every Mac as well.
        """
        left = on_the_way.left(request.host)
        waits_after = time.monotonic() - WAITS_SECONDS
        num_first = sum(
            on_the_way.left(host) < left
            for host, asked_at in self._waiting.items()
            if host != request.host and asked_at > waits_after and host not in self._away
        )
        num_ahead = sum(sweep < request.sweep and num > 0 for sweep, num in on_the_way.of_host.get(request.host, {}).items())
        num_hosts = len({host for host, _ in self._grants} - self._away)
        return (num_first + max(0, num_ahead - 1) * num_hosts) * request.num_groups

    def _note_waiting(self, request: GrantRequest, answer: Grant) -> None:
        """Remember who asks and gets nothing."""
        if answer.question_ids or answer.newest_sweep >= 0:
            self._waiting.pop(request.host, None)
        else:
            self._waiting[request.host] = time.monotonic()

    def _empty(self, request: GrantRequest, reason: str, waits_for: WaitsFor = "") -> Grant:
        return Grant(self._run, request.host, request.sweep, (), reason=reason, waits_for=waits_for)

    def _keep(self, grant: GrantRecord) -> None:
        """Add a grant and forget sweeps of its host that can no longer be open."""
        self._grants[grant.host, grant.sweep] = grant
        if self._on_the_way is not None:
            self._on_the_way = self._on_the_way.granted(grant)
        for old in [key for key in self._grants if key[0] == grant.host and key[1] < grant.sweep - MAX_AHEAD - 1]:
            del self._grants[old]

    def _refresh(self) -> Head | None:
        """Bring the facts up to date with the bucket, if they are older than `refresh_seconds`."""
        if time.monotonic() < self._fresh_until and self._head is not None:
            return self._head
        self._on_the_way = None
        try:
            changed = poll_head(self._store, self._run, self._public_key, self._etag)
        except ObjectMissingError:
            return None
        if self._head is None:
            self._grants = {(grant.host, grant.sweep): grant for grant in self._book.newest()}
        if changed is not None:
            self._head, self._etag = changed
        head = self._head
        if head is None:
            return None
        oldest = max(0, head.version - self._rule.max_staleness_hard)
        self._follow_steps(head, oldest)
        for note, group_keys in read_drop_notes(self._store, self._run, self._notes).items():
            self._notes.add(note)
            self._noted |= {keys.parse_group(key) for key in group_keys}
        self._noted = {key for key in self._noted if key.version >= oldest}
        start_after = keys.groups_of_version(self._run, oldest)
        sizes = {found.key: found.num_bytes for found in self._store.list(keys.groups_prefix(self._run), start_after)}
        arrived = dict(keys.ours(sizes, keys.parse_group))
        self._arrived = set(arrived.values())
        if self._tickets is not None:
            for key, named in arrived.items():
                self._tickets.note_size(named, sizes[key])
        self._fresh_until = time.monotonic() + self._refresh_seconds
        return head

    def _follow_steps(self, head: Head, oldest: int) -> None:
        """Read the steps not read yet; after a new lease all over again, because steps may have been given back."""
        if self._lineage.epoch != head.epoch:
            self._lineage = _Lineage(head.epoch)
            for manifest in lineage(self._store, head):
                if manifest.version < oldest:
                    break
                self._lineage.add(manifest)
            if head.step_manifest_key.startswith(keys.steps_of_epoch(self._run, head.epoch)):
                self._lineage.last_key = head.step_manifest_key
        listed = (found.key for found in self._store.list(keys.steps_of_epoch(self._run, head.epoch), self._lineage.last_key))
        for key, _ in keys.ours(listed, keys.parse_step):
            self._lineage.add(read_step(self._store, self._run, key))
            self._lineage.last_key = key
        self._lineage.forget(oldest)
