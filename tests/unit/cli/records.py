"""Hand-made rows of a run for tests of the audit, the summary and the report."""

from cli.report.record import HostShare, Landing, RunFacts, RunRecord, StepRow, SweepBar, VersionRow
from cli.transcript import EpisodeView, Stretch, TurnView
from stoa.contracts.evaluation_messages import EvaluationResult
from stoa.contracts.fleet_messages import SessionStatus


def step(number: int, *, version: int = 0, consumed: tuple[str, ...] = (), epoch: int = 1001, **changes: object) -> StepRow:
    fields: dict[str, object] = {
        "step": number,
        "version": version,
        "epoch": epoch,
        "key": f"s{number}",
        "parent_key": f"s{number - 1}" if number > 1 else "",
        "started_at": 100.0 + 2 * number,
        "wait_seconds": 0.5,
        "train_seconds": 1.5,
        "consumed": consumed or (f"g{number}a", f"g{number}b"),
        "dropped": {},
        "refused": (),
        "hosts": {"mac-1": HostShare(accepted=2)},
        "metrics": {
            "reward_mean": number / 10,
            "search_rate": 0.5,
            "gate_drop_rate": 0.01 * number,
            "mismatch_mean": 0.02,
            "staleness_mean": 1.0,
        },
    }
    return StepRow(**{**fields, **changes})  # type: ignore[arg-type]


def version(number: int, **changes: object) -> VersionRow:
    fields: dict[str, object] = {
        "version": number,
        "step": number * 2,
        "epoch": 1001,
        "key": f"m{number}",
        "sha256": f"sha{number}",
        "parent_version": number - 1,
        "parent_sha256": f"sha{number - 1}" if number else "",
        "state_id": f"state{number}",
        "parent_state_id": f"state{number - 1}" if number else "",
        "published_at": 100.5 + 4 * number,
        "delta_bytes": 1000 * number,
        "anchor_bytes": 40_000,
        "anchor_version": 0,
        "changed_fraction": 0.01 * number,
        "latency_seconds": 0.25 * number,
        "work_seconds": 0.25 * number,
    }
    return VersionRow(**{**fields, **changes})  # type: ignore[arg-type]


def evaluation(number: int, pass_at_1: float, *, num_questions: int = 100, search_rate: float = 0.5) -> EvaluationResult:
    return EvaluationResult("demo", f"e{number}", number, num_questions, pass_at_1, (0.0, 1.0), search_rate, pass_at_1, pass_at_1)


def session(host: str, **changes: object) -> SessionStatus:
    fields: dict[str, object] = {
        "host": host,
        "state": "live",
        "sweep": 4,
        "version": 2,
        "num_sweeps": 4,
        "num_groups": 32,
        "num_episodes": 256,
        "num_sampled_tokens": 4000,
        "decode_seconds": 2.0,
        "pull_seconds": 0.5,
        "apply_seconds": 0.5,
        "idle_seconds": 1.0,
        "join_seconds": 3.0,
        "pull_latency_seconds_last": 0.4,
        "bytes_up": 500,
        "bytes_down": 45_000,
    }
    return SessionStatus(**{**fields, **changes})  # type: ignore[arg-type]


def sweep(host: str, number: int, of_version: int) -> SweepBar:
    """From second 104.75 to 108.2, with two groups; the second landed after the interval of version 1."""
    return SweepBar(host, number, of_version, 104.75, 0.3, (Landing(106.0, 106.0, 90), Landing(108.2, 109.0, 80)))


def episode() -> EpisodeView:
    stretches = (Stretch("kept", "search", 2), Stretch("dropped", "<b>x", 1))
    return EpisodeView(
        "v1/mac-1/7/0/3", "key", "q1", "who ?", ("me",), "mac-1", 1, 4, "trained on", 1.0, {"cover": 1.0}, "answered", 7, 3, 1,
        (TurnView("a prompt", stretches, ("search('x')",), ""),), "",
    )  # fmt: skip


FACTS = RunFacts("demo", "environments/search/policy", "search", 0, 99.0, "{}", 4)


def record(**changes: object) -> RunRecord:
    """Four steps, three versions, two evaluations, two Macs."""
    fields: dict[str, object] = {
        "facts": FACTS,
        "state": "stopped",
        "end_reason": "max_steps",
        "started_at": 100.0,
        "ended_at": 112.0,
        "version": 2,
        "step": 4,
        "steps": tuple(step(n, version=(n - 1) // 2) for n in (1, 2, 3, 4)),
        "versions": tuple(version(n) for n in (0, 1, 2)),
        "evaluations": (evaluation(0, 0.29), evaluation(2, 0.8)),
        "sessions": (session("mac-1"), session("mac-2", num_sampled_tokens=2000)),
        "bucket_objects": {"groups": 8, "manifests": 3},
    }
    return RunRecord(**{**fields, **changes})  # type: ignore[arg-type]
