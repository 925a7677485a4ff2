"""What each command prints with `--json`: one object, its keys, and the class whose fields they are.

The reference page is made from this table, and tests hold real output against it. A key that a command adds by itself
has its sentence here; the others have theirs beside the field of the class.
"""

import dataclasses
import importlib
from dataclasses import dataclass, field
from typing import Any, Final

_RUN: Final = {"run": "Name of the run."}
_STATUS: Final = "stoa.contracts.messages:RunStatus"


@dataclass(frozen=True, slots=True)
class Output:
    """Keys of an object: `own` with a sentence each, and the fields of `kind` (module:class).

    rows: key -> class of the objects in the list under it. is_list: a list of such objects is printed.
    """

    own: dict[str, str] = field(default_factory=dict)
    kind: str = ""
    rows: dict[str, str] = field(default_factory=dict)
    is_list: bool = False
    without: tuple[str, ...] = ()
    """Fields of the class that are left out."""

    def keys(self) -> set[str]:
        """Keys of the object."""
        fields = {one.name for one in dataclasses.fields(load(self.kind))} if self.kind else set[str]()
        return {*self.own, *fields} - set(self.without)


def load(kind: str) -> Any:
    """The class that `module:class` names."""
    module, _, name = kind.partition(":")
    return getattr(importlib.import_module(module), name)


OUTPUTS: Final[dict[str, Output]] = {
    "status": Output(
        {
            **_RUN,
            "state": "created, running, paused, draining, stopping, stopped, failed; gone: Temporal runs it no more.",
            "waiting_for": "One sentence; empty when it has ended.",
            "end_reason": "Why it ended; else empty.",
            "version": "The newest version, -1 before the first.",
            "step": "The last step.",
            "max_steps": "At which it ends by itself, 0 for none: the limit in force.",
            "seconds": "Since it was started.",
            "pass_at_1": "Of the last evaluation, none before the first.",
            "search_rate": "Of the same.",
            "macs": "What the session of each Mac says.",
            "gpu_hours": "Used so far.",
            "dollars": "What they cost by stop.dollars_per_gpu_hour.",
        },
        rows={"macs": "stoa.contracts.fleet_messages:SessionStatus"},
    ),
    "live": Output({}, "cli.live.view:View"),
    "fleet": Output(
        {
            **_RUN,
            "num_macs": "Macs that play.",
            "slowest": "Which is the slowest and why, in a sentence.",
            "note": "Why nothing newer is known, of a run for which nobody answers.",
            "macs": "The fastest first: host, session (its workflow's id), sweep, state, doing (waits or ahead in a paused run), version, "
            "tokens_per_second, place, reason...",
        }
    ),
    "episode show": Output({**_RUN, "num_masked": "Tokens that were given, not sampled."}, "cli.transcript:EpisodeView"),
    "episode ls": Output(
        {**_RUN, "version": "They were sampled from it.", "episodes": "One a row."}, rows={"episodes": "cli.episodes:EpisodeRow"}
    ),
    "eval": Output(
        {"measures": "Every measure with its interval, none where single marks were not kept."},
        "cli.evaluation.shown:Exam",
        is_list=True,
        without=("marks",),
    ),
    "report": Output({}, "cli.report.summary:Summary"),
    "metrics": Output({**_RUN, "rows": "As in metrics.jsonl."}),
    "export": Output({**_RUN, "folder": "Where it was written.", "to": "For which library."}, "cli.export:Export"),
    "weights ls": Output({**_RUN, "versions": "One a row."}, rows={"versions": "cli.weights:VersionLine"}),
    "weights verify": Output(_RUN, "cli.weights:Verified"),
    "weights diff": Output(_RUN, "cli.weights:Difference"),
    "weights gc": Output(
        {
            **_RUN,
            "version": "The newest.",
            "dry_run": "True if nothing was deleted.",
            "floor": "The oldest version that somebody may still need.",
            "needed": "Objects and bytes that stay, by kind.",
            "deleted": "Objects that went, or would go.",
            "announced": "Objects that go after the grace.",
        }
    ),
    "invite": Output(
        {
            **_RUN,
            "token": "The line for the friend; whoever has it may join.",
            "invite": "Its id, for `stoa revoke`.",
            "host": "The Mac's name.",
            "expires_at": "Unix seconds.",
            "temporal": "Address the Mac will call.",
            "bucket": "Endpoint the Mac will call.",
            "notes": "What may go wrong with these, in sentences.",
        }
    ),
    "revoke": Output({**_RUN, "revoked": "What was taken back.", "is_new": "False if it was before."}),
    "doctor": Output(
        {"verdict": "The worst of all checks: pass, warn or fail.", "seconds": "All of it took.", "checks": "One a row."},
        rows={"checks": "cli.doctor.finding:Finding"},
    ),
    "warmstart": Output({"memory": "Bytes planned and used.", "last_step": "Steps taken.", "exported": "The checkpoint, or none."}),
    "bundle": Output({}, "cli.bundle:Bundled"),
    "bench": Output(
        {"(all)": "What `worker_mac.bench` measures: tokens_per_second by width, knee_groups, update, watts...; the line; the run."}
    ),
    "bench kernels": Output({"(all)": "What `metal.bench` reports: chip, measured, rows, verdicts."}),
    "config check": Output(
        {
            "file": "As it was named.",
            "well_configured": "True or false; the exit code says so too.",
            "faults": "One sentence each, with line and key.",
            "hint": "What to do.",
            "weights_bytes": "In int8; only where well configured, as is the next.",
            "settings": "All of them, defaults included.",
        }
    ),
    "plan fleet": Output({"plan": "The fleet that was planned with."}, "cli.plan.fleet_answers:Answers"),
    "plan gpu": Output(
        {"model": "Its sizes.", "micro_batch_tokens": "As asked.", "machines": "Each with gpus, memory_gb, advice and its ways."}
    ),
    "search questions": Output({"questions_id": "Names the questions in a configuration."}, "environments.papersearchqa.cleaning:Report"),
    "search index": Output({}, "environments.search.building:IndexAbout"),
    "search ask": Output({"query": "As asked.", "passages": "The best first."}),
    "canary": Output({"num_versions": "Flown.", "flat": "True if nothing moved."}, "cli.canary:Canary"),
    **{name: Output({}, _STATUS) for name in ("pause", "resume", "stop", "drain", "quarantine", "anchors")},
}
"""By command. `eval --compare` and `canary --decompose` print an object of their own."""
