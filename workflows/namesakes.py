"""Turns away Macs of other runs whose session would have this session's id (see `stoa.contracts.namesakes`).

Such a Mac says hello here because its own session cannot be started. It is told so through the queue that both Macs poll;
the Mac that is here passes on what is not for it.
"""

from temporalio import workflow
from temporalio.workflow import ActivityHandle

with workflow.unsafe.imports_passed_through():
    from stoa.contracts import names
    from stoa.contracts.fleet_messages import Notice, SessionInput
    from stoa.contracts.namesakes import clash, other_run
    from workflows import limits
    from workflows.calls import call, forget

PATCH = "namesakes"


class Namesakes:
    """Of one session."""

    def __init__(self, given: SessionInput) -> None:
        self._run, self._host, self._heartbeat_seconds = given.run, given.host, given.heartbeat_seconds
        self._telling: ActivityHandle[object] | None = None

    def is_other(self, run: str, host: str) -> bool:
        """True for what is not meant for this session: it names another host, or a run ("" where a message names none)."""
        return (host != self._host or run not in ("", self._run)) and workflow.patched(PATCH)

    def turn_away(self, host: str) -> None:
        """Tell a Mac that said hello as `host` that it cannot be here; one at a time. A name that is no namesake is nobody's."""
        run = other_run(self._run, self._host, host)
        if not run or (self._telling is not None and not self._telling.done()):
            return
        notice = Notice(run, host, "name_taken", clash(self._run, self._host, (run, host)), ends=True)
        queue = names.mac_queue(self._run, self._host)
        bounds = limits.namesake(self._heartbeat_seconds)
        self._telling = forget(call(names.NOTICE, notice, object, bounds, queue=queue, summary=f"name_taken: {host} of run {run}"))
