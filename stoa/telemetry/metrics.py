"""The catalogue of metrics: every number a step or version records, with its unit and which way is good.

A metric is declared here once and nowhere else; who computes it and who draws it look its meaning up by name. Families
(`staleness_3`, `would_drop_rate_tv`) are declared by their stem. Rates, shares and probabilities have no unit.
"""

from dataclasses import dataclass
from typing import Final, Literal

Better = Literal["higher", "lower", "neither"]
Unit = Literal["", "nats", "octaves", "steps", "tokens", "seconds", "versions", "groups", "episodes", "turns", "calls", "rows", "bytes"]


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric. `what` finishes the sentence "It is ..."."""

    name: str
    unit: Unit
    better: Better
    what: str


CATALOGUE: Final = (
    # Gate: shares are of tokens whose advantage is not 0.
    Metric("gate_drop_rate", "", "lower", "the share of tokens with an advantage that the gate drops"),
    Metric("gate_drop_rate_positive", "", "lower", "the same among tokens with a positive advantage"),
    Metric("gate_drop_rate_negative", "", "lower", "the same among tokens with a negative advantage"),
    Metric("ratio_capped_fraction", "", "lower", "the share of tokens whose pi / mu is held at the cap"),
    Metric("bad_fraction", "", "lower", "the share of tokens with a negative advantage that fell by more than 0.5 in probability"),
    # Divergence of the trainer (pi) from the sampler (mu), over sampled tokens.
    Metric("mismatch_mean", "", "lower", "the mean of |pi - mu|"),
    Metric("mismatch_p50", "", "lower", "the median of |pi - mu|"),
    Metric("mismatch_p99", "", "lower", "the 99th percentile of |pi - mu|"),
    Metric("mismatch_max", "", "lower", "the largest |pi - mu|"),
    Metric("mismatch_replayed", "", "lower", "the mean |pi - mu| of one row under the sampler's experts"),
    Metric("mismatch_not_replayed", "", "lower", "the same row's under the router's own choice of experts"),
    Metric("routing_differs_fraction", "", "lower", "the share of tokens and layers where the two choose other experts"),
    Metric("mismatch_episode_p90", "", "lower", "the 90th percentile over episodes of their mean |pi - mu|"),
    Metric("mismatch_episode_max", "", "lower", "the largest mean |pi - mu| of an episode"),
    Metric("binary_kl_mean", "nats", "lower", "the mean KL divergence of (mu, 1 - mu) from (pi, 1 - pi)"),
    Metric("k3", "nats", "lower", "the k3 estimate of the KL divergence of mu from pi"),
    Metric("ess_fraction", "", "higher", "the effective sample size of the weights pi / mu over the number of tokens"),
    # Policy.
    Metric("entropy", "nats", "neither", "the mean entropy of the policy where it sampled a token"),
    Metric("logprob_positive_mean", "nats", "higher", "the mean ln pi of tokens with a positive advantage: it sinks before a collapse"),
    Metric("loss", "", "neither", "the mean loss of a sampled token: only its gradient means something"),
    Metric("grad_norm", "", "neither", "the norm of the gradient before clipping"),
    Metric("update_norm", "", "neither", "the norm of what the step moved the weights by, without weight decay"),
    Metric("learning_rate", "", "neither", "the learning rate of the step"),
    Metric("sampled_tokens", "tokens", "neither", "the sampled tokens of the step"),
    Metric("num_rows", "rows", "neither", "the packed rows of the step"),
    # What the steps before tell of this one; alarms watch them.
    Metric("start_steps", "steps", "neither", "the number of steps that the run's beginning is the mean of"),
    Metric("entropy_start", "nats", "neither", "the mean entropy of the run's first 20 steps"),
    Metric("entropy_shift", "octaves", "lower", "how many times the entropy has doubled or halved since the beginning"),
    Metric("cover_gap", "", "lower", "the share of answers that contain a gold answer and are none"),
    Metric("cover_gap_start", "", "neither", "the mean cover_gap of the run's first 20 steps"),
    Metric("cover_gap_rise", "", "lower", "cover_gap minus that of the beginning: rewards are gained without answering"),
    Metric("answer_words_start", "", "neither", "the mean answer_words_mean of the run's first 20 steps"),
    Metric("answer_words_ratio", "", "neither", "answer_words_mean over that of the beginning"),
    Metric("hacking", "", "lower", "how far the looser mark rose while the stricter one fell, over ten steps"),
    Metric("num_versions_seen", "", "neither", "the versions behind changed_usual"),
    Metric("changed_usual", "", "neither", "the running mean of changed_fraction"),
    Metric("changed_ratio", "", "neither", "changed_fraction over the usual one"),
    Metric("changed_nothing", "", "lower", "1 if steps were taken and a version changed no code"),
    Metric("eval_seen", "versions", "neither", "the version of the newest held-out result that alarms have judged, -1 for none"),
    Metric("grad_norm_ratio", "", "neither", "the gradient's norm over its median of the 20 steps before"),
    Metric("logprob_positive_fall", "", "lower", "how far logprob_positive_mean is below its mean of the 20 steps before, as a share"),
    Metric("mismatch_start", "", "neither", "the mean mismatch_mean of the run's first 20 steps"),
    Metric("mismatch_ratio", "", "lower", "mismatch_mean over that of the beginning, or over 0.004 if that is more"),
    Metric("mismatch_climb", "", "lower", "mismatch_mean if it has risen 5 steps in a row, else 0"),
    Metric("ess_fall", "", "lower", "how much of ess_fraction was lost over 5 steps, as a share"),
    # Staleness and the queue.
    Metric("staleness_mean", "versions", "lower", "the mean lag of the step's groups at consumption"),
    Metric("staleness_max", "versions", "lower", "the largest lag of the step's groups"),
    Metric("staleness_beyond_fraction", "", "lower", "the share of groups older than admission plans for"),
    Metric("queue_seconds_mean", "seconds", "lower", "the mean time from a group's admission to the step that takes it"),
    Metric("stale_group_tokens_mean", "tokens", "neither", "the mean size of groups dropped as stale: slow ones are often long"),
    Metric("quarantined_share", "", "lower", "the share of known Macs that are quarantined, from two on"),
    Metric("infra_fault_rate", "", "lower", "the share of episodes missing from the step's groups"),
    Metric("pull_latency_seconds", "seconds", "lower", "the median time from a version's publication to serving it, over the step's Macs"),
    Metric("groups_refused", "groups", "lower", "the groups that were not admitted since the step before"),
    Metric("groups_untold", "groups", "lower", "the groups dropped or refused that later manifests name: one names 1,024 of each"),
    Metric("hosts_untold", "", "lower", "the hosts that the step's manifest does not count by name: it counts 1,024"),
    Metric("zero_variance_fraction", "", "lower", "the share of groups whose rewards are all equal, of those looked at"),
    Metric("groups_accepted", "groups", "neither", "the groups admitted since the step before"),
    Metric("groups_waiting", "groups", "neither", "the admitted groups that wait for a later step"),
    Metric("groups_running", "groups", "neither", "the groups that Macs have been granted and not brought, by the last census"),
    # Fleet and time, since the step before; the middle three as Macs say themselves, the newest group of each.
    Metric("fleet_tokens_per_second", "", "higher", "the sampled tokens admitted in a second, all Macs together"),
    Metric("fleet_episodes_per_hour", "", "higher", "the episodes admitted in an hour, all Macs together"),
    Metric("batch_occupancy_mean", "", "higher", "the mean share of its places for episodes that a Mac has filled"),
    Metric("prefix_hit_mean", "", "higher", "the mean share of prompt tokens that a Mac had in its cache already"),
    Metric("peak_memory_bytes_max", "bytes", "lower", "the most memory that the engine of a Mac has held"),
    Metric("trainer_wait_share", "", "lower", "the share of a step's wall clock that the trainer waited for groups"),
    # Task, over the episodes of the step's groups.
    Metric("num_groups", "groups", "neither", "the groups of the step"),
    Metric("num_episodes", "episodes", "neither", "the episodes of the step"),
    Metric("reward_mean", "", "higher", "the mean reward"),
    Metric("search_rate", "", "higher", "the share of episodes that searched"),
    Metric("cover", "", "higher", "the share of answers that contain a gold answer as text"),
    Metric("exact_match", "", "higher", "the share of answers that are a gold answer"),
    Metric("malformed_rate", "", "lower", "the share of episodes that a malformed turn ended"),
    Metric("unanswered_rate", "", "lower", "the share of episodes that ended without an answer"),
    Metric("num_calls_mean", "calls", "neither", "the mean number of tool calls of an episode"),
    Metric("empty_retrieval_rate", "", "lower", "the share of tool calls that found nothing"),
    Metric("answer_words_mean", "", "neither", "the mean number of words of an answer"),
    Metric("turns_mean", "turns", "neither", "the mean number of turns of an episode"),
    Metric("episode_tokens_mean", "tokens", "neither", "the mean length of an episode, prompt and results included"),
    Metric("episode_tokens_max", "tokens", "neither", "the longest episode"),
    Metric("sampled_tokens_per_episode", "tokens", "neither", "the mean number of sampled tokens of an episode"),
    Metric("truncated_rate", "", "lower", "the share of episodes that a token limit ended"),
    # Held-out results, in the first step after one.
    Metric("eval_version", "versions", "neither", "the version of the newest held-out result"),
    Metric("eval_pass_at_1", "", "higher", "its pass@1"),
    Metric("eval_fall", "", "lower", "how far the upper end of its 95 % interval lies below the run's first pass@1"),
    Metric("eval_fall_twice", "", "lower", "the smaller eval_fall of the last two results"),
    # Weights, of a version.
    Metric("changed_fraction", "", "neither", "the share of int8 codes that a version changes"),
    Metric("delta_bytes", "bytes", "lower", "the size of a version's delta"),
    Metric("anchor_bytes", "bytes", "neither", "the size of a version's anchor"),
    Metric("publish_latency_seconds", "seconds", "lower", "the time from a version's last optimizer step to HEAD naming it"),
    Metric("publish_latency_version", "versions", "neither", "the version that publish_latency_seconds is of"),
    Metric("num_clipped", "", "lower", "the weights whose master lies beyond the grid"),
)

FAMILIES: Final = (
    Metric("would_drop_rate", "", "neither", "the share of tokens with an advantage that this gate mode would have dropped"),
    Metric("gate_drop_rate_lag", "", "lower", "the share of tokens of this lag in versions that the gate drops"),
    Metric("mismatch_quarter", "", "lower", "the mean |pi - mu| in this quarter of an episode's sampled tokens"),
    Metric("log_ratio_permille", "nats", "neither", "this quantile, in thousandths, of ln(pi / mu)"),
    Metric("refused", "groups", "lower", "the groups refused for this reason since the step before"),
    Metric("staleness", "groups", "neither", "the number of the step's groups with this lag in versions"),
    Metric("dropped", "groups", "lower", "the groups dropped for this reason since the step before"),
    Metric("alarm", "", "lower", "1 where the alarm of this name fired"),
    Metric("warning", "", "lower", "1 where the alarm of this name was near"),
)

_BY_NAME: Final = {metric.name: metric for metric in CATALOGUE}


def find(name: str) -> Metric | None:
    """The metric of this name, or the family it belongs to; None if it is not declared."""
    if name in _BY_NAME:
        return _BY_NAME[name]
    return next((family for family in FAMILIES if name.startswith(f"{family.name}_")), None)
