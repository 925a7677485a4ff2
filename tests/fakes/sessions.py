"""A session that plays sweeps and asks nobody: the real one's name, queues and signals, without a control process."""

from datetime import timedelta

from temporalio import workflow
from temporalio.common import RetryPolicy

with workflow.unsafe.imports_passed_through():
    from stoa.contracts import names
    from stoa.contracts.fleet_messages import Goodbye, Hello, SessionInput, SweepRequest, SweepResult


@workflow.defn(name=names.MAC_SESSION)
class PlainSession:
    """Plays one sweep after another until its Mac says goodbye."""

    @workflow.init
    def __init__(self, given: SessionInput) -> None:
        self._left, self._invites = False, list[str]()

    @workflow.run
    async def run(self, given: SessionInput) -> int:
        """Number of sweeps played."""
        sweep = 0
        while not self._left:
            await workflow.execute_activity(
                names.SWEEP,
                SweepRequest(given.run, given.host, sweep, "train", (f"q{sweep}",), 4),
                task_queue=names.mac_queue(given.run, given.host),
                result_type=SweepResult,
                start_to_close_timeout=timedelta(seconds=60),
                heartbeat_timeout=timedelta(seconds=20),
                retry_policy=RetryPolicy(maximum_attempts=3),
            )
            sweep += 1
        return sweep

    @workflow.signal(name=names.HELLO)
    def hello(self, hello: Hello) -> None:
        """A Mac is here."""
        self._invites.append(hello.invite)

    @workflow.signal(name=names.GOODBYE)
    def goodbye(self, _: Goodbye) -> None:
        """It leaves."""
        self._left = True

    @workflow.query(name=names.SESSION_QUERY)
    def invites(self) -> list[str]:
        """Invites that said hello."""
        return self._invites
