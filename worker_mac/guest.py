"""A worker as a guest on somebody's Mac: looks at the Mac once a second and keeps the present decision for the engine.

The looking is done by a thread, because probes take milliseconds that a decode step does not have. What is decided is
`power.py`'s, what is sensed `senses.py`'s, what is held while groups are played `holds.py`'s.
"""

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Final

import structlog

from stoa.config.host import MacHost
from worker_mac.holds import Awake
from worker_mac.panics import Caution
from worker_mac.power import PLAY, Decision, Senses, decide
from worker_mac.senses import NoProbe, Probe

_log = structlog.get_logger(__name__)

LOOK_SECONDS: Final = 1.0
GUEST_FILE: Final = "guest.json"
"""In the state folder."""
NO_SLEEP_SECONDS: Final = 60.0
"""A system that has not slept this long after it said so does not: this clock stands still while it sleeps."""
_LONGEST_REST_SECONDS: Final = 1.0


class Guest:
    """The present decision. Without a probe nothing is known, and everything is played."""

    def __init__(
        self,
        allowed: MacHost | None = None,
        probe: Probe | None = None,
        *,
        spent_budget: Callable[[], str] = lambda: "",
        look_seconds: float = LOOK_SECONDS,
        memory: Path | None = None,
        awake: Awake | None = None,
    ) -> None:
        """spent_budget: which budget of the network is spent, in words. memory: file in which it is noted."""
        self.allowed = allowed or MacHost()
        self._probe, self._spent_budget, self._look_seconds = probe or NoProbe(), spent_budget, look_seconds
        self._memory, self._awake = memory, awake or Awake()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._still = threading.Event()
        self._still.set()
        self._looking = threading.Lock()
        self._senses = Senses(time.monotonic())
        self.caution = Caution()
        """What crashes of the whole Mac ask for."""
        self._sleep_due: float | None = None
        self._noted: tuple[str, str, bool, float | None, int] | None = None
        self.spool_bytes = 0
        """Kept up to date by the engine."""
        self.shipping: Callable[[], str] = lambda: ""
        """Why no further group can be kept or sent; set by the engine, as is the next."""
        self.num_refused: Callable[[], int] = lambda: 0
        """Groups that the bucket would not have."""
        self.decision: Decision = replace(PLAY, since_seconds=time.monotonic(), restarted_at_seconds=_last_restart(memory))

    def start(self) -> None:
        """Look once, then every second until `close`."""
        self.look()
        self._thread = threading.Thread(target=self._watch, name="guest", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the looking, and let the system sleep."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
        self._awake.release()

    def let_sleep(self) -> None:
        """Let the system sleep from now on, whatever hangs: what keeps it awake outlives a process that begins anew in its place."""
        self._ended.set()
        self._awake.release()

    def look(self) -> Decision:
        """Sense, decide, and say so if the decision is another one. Safe from any thread."""
        sensed = self._probe.read()
        with self._looking:
            before = self.decision
            self._senses = replace(
                sensed,
                spent_budget=self._spent_budget(),
                spool_bytes=self.spool_bytes,
                shipping=self.shipping(),
                going_to_sleep=self.going_to_sleep,
                crash=self.caution.waits(time.time()),
                share=self.caution.share,
            )
            self.decision = decide(self._senses, self.allowed, before)
            self._hold()
            self._note()
        if (self.decision.state, self.decision.reason) != (before.state, before.reason):
            _log.info("guest_decided", state=self.decision.state, reason=self.decision.reason, heat=self.heat)
        return self.decision

    @property
    def must_leave(self) -> str:
        """Why groups in hand must be let go of now; "" while they may go on."""
        decision = self.decision
        return decision.reason if decision.leaves(time.monotonic()) else ""

    @property
    def may_transfer(self) -> bool:
        """False while the network is not ours to use."""
        return self.decision.may_transfer

    @property
    def heat(self) -> str:
        """How hot the Mac is, as it says itself; "" where it does not."""
        return self._senses.thermal or ""

    @property
    def going_to_sleep(self) -> bool:
        """True from the system's notice on until it has woken up, or has not slept after all."""
        return self._sleep_due is not None and time.monotonic() < self._sleep_due

    @property
    def playing_now(self) -> bool:
        """True while groups are played."""
        return not self._still.is_set()

    def paused_seconds(self) -> float:
        """How long nothing may have been started; 0 while it may."""
        decision = self.decision
        return 0.0 if decision.starts else time.monotonic() - decision.since_seconds

    def rest(self, step_seconds: float) -> None:
        """Rest after a step that took so long, by the share of time that is ours."""
        duty = self.decision.duty
        if duty < 1.0:
            self._ended.wait(min(step_seconds * (1.0 / duty - 1.0), _LONGEST_REST_SECONDS))

    @contextmanager
    def playing(self) -> Iterator[None]:
        """While the block runs groups are played, and a Mac on mains is kept awake."""
        self._still.clear()
        with self._looking:
            self._hold()
            self._note()
        try:
            yield
        finally:
            self._still.set()
            with self._looking:
                self._hold()
                self._note()

    def be_still(self, timeout_seconds: float) -> bool:
        """Before the system sleeps: no group is started, and those in hand are let go of. False if they were not in time."""
        self._sleep_due = time.monotonic() + NO_SLEEP_SECONDS
        self.look()
        return self._still.wait(timeout_seconds)

    def wake(self) -> None:
        """The system no longer sleeps, or did not."""
        self._sleep_due = None
        self.look()

    def _hold(self) -> None:
        if self.playing_now and self._senses.on_mains and not self.going_to_sleep and not self._ended.is_set():
            self._awake.hold()
        else:
            self._awake.release()

    def _watch(self) -> None:
        while not self._ended.wait(self._look_seconds):
            self.look()

    def _note(self) -> None:
        """Write down, for people and for the next process, what is so now; nothing if nothing has changed."""
        if self._memory is None:
            return
        decision, restarted, num_refused = self.decision, self.decision.restarted_at_seconds, self.num_refused()
        now = (decision.state, decision.reason, self.playing_now, restarted, num_refused)
        if now == self._noted:
            return
        self._noted = now
        document = {
            "restarted_at": None if restarted is None else _wall_clock(restarted),
            "state": decision.state,
            "reason": decision.reason,
            "is_playing": self.playing_now,
            "num_refused": num_refused,
            "since": _wall_clock(decision.since_seconds),
            "pid": os.getpid(),
        }
        part = self._memory.with_name(f"{self._memory.name}.part")
        try:
            part.write_text(json.dumps(document), "utf-8")
            part.replace(self._memory)
        except OSError as error:  # a full disk must not end the looking
            _log.warning("guest_not_noted", reason=str(error))


def _wall_clock(at_seconds: float) -> float:
    """A time of the clock that never goes back, in Unix seconds."""
    return time.time() - (time.monotonic() - at_seconds)


def _last_restart(path: Path | None) -> float | None:
    """When something last started after a stop that may flap, by the note of an earlier process, on this one's clock."""
    try:
        at = None if path is None else json.loads(path.read_text("utf-8"))["restarted_at"]
        return None if at is None else time.monotonic() - max(0.0, time.time() - float(at))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def said_now(path: Path, pid: int) -> str:
    """What the worker with this process id does now, by its note, in words; "" if it has not said."""
    try:
        noted = json.loads(path.read_text("utf-8"))
        if noted["pid"] != pid:
            return ""
        since = time.strftime("%H:%M", time.localtime(float(noted["since"])))
        doing = "plays" if noted["is_playing"] else "waits for groups to play"
        refused = f"; the bucket refused {noted['num_refused']} groups, see spool/refused" if noted.get("num_refused") else ""
        if noted["state"] in ("full", "gentle"):
            return doing + (f" gently, since {noted['reason']}" if noted["state"] == "gentle" else "") + refused
        return f"pauses since {since}: {noted['reason']}{refused}"
    except (OSError, ValueError, KeyError, TypeError):
        return ""
