"""What held-out results tell the alarms: whether the policy is worse than it began. Read from the bucket, never played here.

Who asks for evaluations is the workflow, who marks them `exam.py`; bounds and actions are the config's.
"""

from typing import Final

import structlog

from stoa.bucket.evals import new_summaries
from stoa.bucket.store import Store
from stoa.contracts.errors import ServiceUnavailableError
from stoa.contracts.evaluation_messages import EvaluationResult

NONE_SEEN: Final = -1.0

log = structlog.get_logger()


class EvalWatch:
    """The results of one run, in order of their versions."""

    def __init__(self, store: Store, run: str) -> None:
        self._store = store
        self._run = run
        self._results: dict[str, EvaluationResult | None] = {}
        """By key; None for one that cannot be read."""

    def news(self, seen: float) -> dict[str, float]:
        """Metrics of the newest result, if it is of a version after `seen`; nothing if there is none or the bucket is away.

        seen: version of the newest result that was told before, NONE_SEEN for none.
        """
        try:
            self._read()
        except ServiceUnavailableError as error:
            log.warning("evaluations_unread", error=error.message)
            return {}
        results = sorted((one for one in self._results.values() if one and not one.error), key=lambda one: one.version)
        if not results or results[-1].version <= seen:
            return {}
        falls = [results[0].pass_at_1 - result.interval_95[1] for result in results[1:]]
        found = {"eval_version": float(results[-1].version), "eval_pass_at_1": results[-1].pass_at_1}
        if falls:
            found["eval_fall"] = falls[-1]
        if len(falls) > 1:
            found["eval_fall_twice"] = min(falls[-2:])
        return found

    def _read(self) -> None:
        for key, summary in new_summaries(self._store, self._run, self._results).items():
            self._results[key] = summary.result if summary else None
