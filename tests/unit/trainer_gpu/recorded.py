"""What a trainer must record of a step, name by name, and under which key: the list that the trainer was specified with.

A key that ends in `_` is a family's, whose members are numbered. Keys under `hosts` are fields of each Mac's counts in the step manifest,
those under `version` fields of a version's manifest, written into metrics.jsonl as rows of kind "version".
"""

from collections.abc import Mapping
from dataclasses import fields
from typing import Final

from stoa.bucket.manifest import Manifest
from stoa.bucket.steps import HostCounts, StepManifest
from trainer_gpu.step import COMPARE_EVERY_STEPS

EVERY_STEP: Final[Mapping[str, tuple[str, ...]]] = {
    "gate: drop rate of all, A > 0, A < 0": ("gate_drop_rate", "gate_drop_rate_positive", "gate_drop_rate_negative"),
    "gate: drop rate by lag": ("gate_drop_rate_lag_",),
    "gate: capped fraction": ("ratio_capped_fraction",),
    "gate: what every mode would have dropped": (
        "would_drop_rate_tv", "would_drop_rate_kl", "would_drop_rate_symmetric", "would_drop_rate_ppo_clip",
        "would_drop_rate_dual_clip_tv", "would_drop_rate_off",
    ),
    "divergence: |pi - mu| mean, p50, p99, max": ("mismatch_mean", "mismatch_p50", "mismatch_p99", "mismatch_max"),
    "divergence: binary KL, k3": ("binary_kl_mean", "k3"),
    "divergence: quantiles of ln r": tuple(f"log_ratio_permille_{which}" for which in (1, 10, 500, 990, 999)),
    "divergence: ESS / N": ("ess_fraction",),
    "divergence: bad fraction": ("bad_fraction",),
    "divergence: position buckets": tuple(f"mismatch_quarter_{which}" for which in (1, 2, 3, 4)),
    "policy: entropy, ln pi on A > 0": ("entropy", "logprob_positive_mean"),
    "policy: gradient norm": ("grad_norm",),
    "staleness: lag histogram, mean, largest": ("staleness_", "staleness_mean", "staleness_max"),
    "staleness: queue age": ("queue_seconds_mean",),
    "staleness: admitted, accepted": ("groups_accepted", "groups_waiting"),
    "staleness: discarded by reason": ("groups_refused", "zero_variance_fraction"),
    "task: reward, EM, cover, their gap": ("reward_mean", "exact_match", "cover", "cover_gap"),
    "task: search rate, turns, queries an episode": ("search_rate", "turns_mean", "num_calls_mean"),
    "task: empty retrievals": ("empty_retrieval_rate",),
    "task: tool-parse errors": ("malformed_rate",),
    "task: length, truncation": ("episode_tokens_mean", "episode_tokens_max", "sampled_tokens_per_episode", "truncated_rate"),
    "task: answer length, empty answers": ("answer_words_mean", "unanswered_rate"),
    "fleet: tokens/s, episodes/h": ("fleet_tokens_per_second", "fleet_episodes_per_hour"),
    "fleet: infra faults": ("infra_fault_rate",),
    "time: the trainer's share of waiting": ("trainer_wait_share",),
}  # fmt: skip

SOME_STEPS: Final[Mapping[str, tuple[str, ...]]] = {"policy: update norm": ("update_norm",)}
"""In every COMPARE_EVERY_STEPS-th step from the first on."""

AFTER_ARRIVALS: Final[Mapping[str, tuple[str, ...]]] = {
    "fleet: batch occupancy, prefix-cache hits, memory": ("batch_occupancy_mean", "prefix_hit_mean", "peak_memory_bytes_max")
}
"""In a step before which groups came."""

AFTER_A_VERSION: Final[Mapping[str, tuple[str, ...]]] = {
    "weights: changed-code fraction": ("changed_fraction",),
    "weights: publish latency": ("publish_latency_seconds", "publish_latency_version"),
    "weights: publish-to-applied time": ("pull_latency_seconds",),
}
"""In the first step after a version came to be known."""

WHEN_IT_HAPPENS: Final[Mapping[str, tuple[str, ...]]] = {
    "staleness: discarded by reason": ("dropped_stale", "dropped_quarantined", "refused_wrong_reward"),
    "staleness: running, from the first census on": ("groups_running",),
    "staleness: discarded by length": ("stale_group_tokens_mean",),
    "weights: digest failures": ("refused_wrong_state",),
    "task: zero variance, all 0 and all 1": ("dropped_all_zero", "dropped_all_one", "dropped_all_equal"),
    "task: duplicates": ("refused_duplicate",),
    "R3: mismatch with and without replay": ("mismatch_replayed", "mismatch_not_replayed", "routing_differs_fraction"),
    "held-out results": ("eval_version", "eval_pass_at_1", "eval_fall", "eval_fall_twice"),
}

HOSTS: Final[Mapping[str, tuple[str, ...]]] = {
    "gate and divergence by worker": ("gate_drop_rate", "mismatch_mean", "mismatch_p99"),
    "publish-to-applied time by worker": ("pull_latency_seconds",),
    "tokens/s by worker": ("num_sampled_tokens", "decode_seconds", "idle_seconds"),
    "batch occupancy, prefix-cache hits, memory by worker": ("batch_occupancy", "prefix_hit_share", "peak_memory_bytes"),
    "infra faults by worker": ("num_missing_episodes",),
    "admitted, discarded by worker": ("accepted", "refused", "quarantined"),
}

VERSION: Final[Mapping[str, tuple[str, ...]]] = {"weights: delta bytes, anchors, changed codes": ("delta", "anchor", "stats")}

ALARMS: Final[Mapping[str, tuple[str, ...]]] = {
    "gate drop rate": ("gate_drop_rate",),
    "mean |pi - mu| against calibration": ("mismatch_mean", "mismatch_ratio"),
    "mean |pi - mu| above a bound and rising 5 steps": ("mismatch_climb",),
    "bad fraction": ("bad_fraction",),
    "ESS / N below a bound, or a third less in 5 steps": ("ess_fraction", "ess_fall"),
    "gradient norm over its running median": ("grad_norm_ratio",),
    "mean ln pi on A > 0 below its 20-step mean": ("logprob_positive_fall",),
    "entropy against the first 20 steps": ("entropy_shift",),
    "cover - EM gap and answer length rise": ("cover_gap_rise", "answer_words_ratio"),
    "strict cover falls while cover rises": ("hacking",),
    "truncated or empty answers": ("truncated_rate", "malformed_rate", "unanswered_rate"),
    "infra-faulted episodes": ("infra_fault_rate",),
    "zero-variance groups": ("zero_variance_fraction",),
    "lag beyond S": ("staleness_beyond_fraction",),
    "workers quarantined": ("quarantined_share",),
    "eval subset below start, twice in a row": ("eval_fall", "eval_fall_twice"),
    "changed-code fraction, digest mismatch": ("changed_ratio", "changed_nothing", "refused_wrong_state"),
}
"""Each has a bound in `[alarms]`. Not here, because no bound can be set: a gradient that is not finite fails its step; a
group beyond the hard bound never reaches one; one worker against the fleet is quarantined by `stoa.learning.fleet`; no
usable group in a step's refills is "starved"; the canary is a command."""


def lacking(manifest: StepManifest, *, after_a_version: bool) -> list[str]:
    """Keys of the list that a step's manifest does not have."""
    some = SOME_STEPS.values() if manifest.step % COMPARE_EVERY_STEPS == 1 else ()
    came = AFTER_ARRIVALS.values() if manifest.metrics["groups_accepted"] else ()
    wanted = [*EVERY_STEP.values(), *some, *came, *(AFTER_A_VERSION.values() if after_a_version else ())]
    found = list(manifest.metrics)
    missing = [key for group in wanted for key in group if not any(_is(name, key) for name in found)]
    in_hosts = {field.name for field in fields(HostCounts)}
    return missing + [key for group in HOSTS.values() for key in group if key not in in_hosts or not manifest.hosts]


def lacking_of_version() -> list[str]:
    """Fields of the list that a version's manifest does not have."""
    known = {field.name for field in fields(Manifest)}
    return [key for group in VERSION.values() for key in group if key not in known]


def _is(name: str, key: str) -> bool:
    return name == key or (key.endswith("_") and name.removeprefix(key).isdigit())
