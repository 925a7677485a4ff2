"""One optimizer step on groups that were really sampled: what it measures, and what may not change it."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from stoa.bucket.steps import GroupMismatch
from stoa.config.run import Learning
from stoa.learning.batching import pack
from stoa.rollouts.records import Group
from stoa.telemetry.metrics import find
from tests.unit.trainer_gpu.player import POLICY, group_of, play, search
from trainer_gpu.convert import load_hub
from trainer_gpu.metrics import Tokens, group_metrics, group_mismatch, host_metrics, place_metrics
from trainer_gpu.model import build_model, read_model_config, recorded_routing, token_logprobs_packed
from trainer_gpu.parallel import Trainable, build_optimizer
from trainer_gpu.rows import share
from trainer_gpu.step import StepOutcome, compare_groups, learning_rate, optimizer_step
from trainer_gpu.weights import saved_buffers

LEARNING = Learning()


def trainable() -> Trainable:
    config = read_model_config(POLICY)
    model = build_model(config, torch.float32)
    load_hub(model, config, POLICY)
    return build_optimizer(model, lr=1e-4, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0, clip_grad=1.0)


@pytest.fixture(scope="module")
def groups() -> list[Group]:
    """Three groups with both rewards, played by the policy itself; version 3."""
    environment = search()
    questions = list(environment.question_ids("train"))[:24]
    played = play(trainable().model, environment, questions, num_episodes=8, seed=0)
    uneven = [episodes for episodes in played if 0 < sum(e.reward for e in episodes) < 8]
    return [
        group_of(episodes, run="r", host=f"mac-{i % 2}", sweep=0, group=i, version=3, state_id="s") for i, episodes in enumerate(uneven[:3])
    ]


def step(groups: list[Group], learning: Learning = LEARNING, **more: int) -> tuple[Trainable, StepOutcome]:
    policy = trainable()
    arguments = {"version": 5, "step": 1, "planned_sequences": 24, **more}
    outcome = optimizer_step(policy, groups, learning, on_row=lambda row: None, **arguments)
    return policy, outcome


def test_on_policy_step_drops_nothing_and_sees_no_mismatch(groups: list[Group]) -> None:
    policy, outcome = step(groups)
    metrics = outcome.metrics
    assert metrics["gate_drop_rate"] == metrics["ratio_capped_fraction"] == metrics["bad_fraction"] == 0
    assert metrics["mismatch_max"] < 1e-4
    assert metrics["ess_fraction"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["k3"] == pytest.approx(0.0, abs=1e-8)
    assert outcome.gated == {0: ((),) * 8}
    assert metrics["grad_norm"] > 0
    assert metrics["staleness_mean"] == 2.0
    assert metrics["staleness_2"] == 3.0
    assert metrics["reward_mean"] == np.mean([e.reward for g in groups for e in g.episodes])
    assert metrics["search_rate"] == np.mean([e.reward_parts["searched"] for g in groups for e in g.episodes])
    assert metrics["sampled_tokens"] == sum(len(e.logprobs) for g in groups for e in g.episodes)
    assert 0 < metrics["entropy"] < np.log(256)
    biases, before = saved_buffers(policy.model), saved_buffers(trainable().model)
    assert biases.keys() == before.keys() != set()
    assert all(torch.equal(bias, before[name]) for name, bias in biases.items()), "expert_bias is frozen"


def test_every_metric_is_declared_in_the_catalogue(groups: list[Group]) -> None:
    _, outcome = step(groups)
    assert [name for name in outcome.metrics if find(name) is None] == []


def test_gradient_equals_autograd_of_the_formula_one_episode_at_a_time(groups: list[Group]) -> None:
    """Sum of -A ln pi over sampled tokens / denominator: on policy the ratio is 1 and nothing is dropped."""
    from trainer_gpu.model import forward_packed

    policy, _ = step(groups, LEARNING.model_copy(update={"grad_clip": 1.0}))
    other = trainable()

    def losses():
        for group in groups:
            mean = group.rewards.mean()
            for episode in group.episodes:
                ids = torch.from_numpy(episode.ids.astype(np.int64))
                log_p = torch.log_softmax(forward_packed(other.model, ids, [len(ids)]), -1)
                sampled = torch.from_numpy(episode.mask.astype(bool)).nonzero().squeeze(1)
                total = log_p[sampled - 1, ids[sampled]].sum()
                yield lambda total=total, a=episode.reward - mean: -float(a) * total / (24 * LEARNING.tokens_per_sequence)

    other.step(losses())
    worst = max(float((policy.gradients()[n] - g).abs().max()) for n, g in other.gradients().items())
    assert worst < 1e-5


def test_groups_are_compared_without_a_step(groups: list[Group]) -> None:
    """A sampler that says half of each probability: pi is twice mu, and |pi - mu| half of what was true."""
    halved = replace(groups[1], episodes=tuple(replace(e, logprobs=e.logprobs + np.float32(np.log(0.5))) for e in groups[1].episodes))
    policy = trainable()
    before = {name: weights.clone() for name, weights in policy.masters().items()}
    honest, half = compare_groups(policy, [groups[0], halved], LEARNING)
    assert honest.mean < 1e-5
    assert honest.ratio_mean == pytest.approx(1.0, abs=1e-4)
    true = np.concatenate([np.exp(episode.logprobs.astype(np.float64)) for episode in groups[1].episodes])
    assert half.mean == pytest.approx(np.mean(true / 2), rel=1e-4)
    assert (half.ratio_mean, half.far_share) == (pytest.approx(2.0, rel=1e-4), 1.0)
    assert half.k3 == pytest.approx(2.0 - 1.0 - np.log(2.0), rel=1e-4)
    assert all(torch.equal(weights, before[name]) for name, weights in policy.masters().items())


def test_gradient_is_over_what_was_planned_and_not_over_what_came(groups: list[Group]) -> None:
    (_, whole), (_, half) = step(groups, planned_sequences=24), step(groups, planned_sequences=48)
    assert half.metrics["grad_norm"] == pytest.approx(whole.metrics["grad_norm"] / 2, rel=1e-5)


def test_stale_logprobs_are_gated_and_counted(groups: list[Group]) -> None:
    """Mu doubled in odds against pi: positive advantages on likely tokens move too far and are dropped."""
    shifted = [replace(g, episodes=tuple(replace(e, logprobs=np.log(np.exp(e.logprobs) * 0.5)) for e in g.episodes)) for g in groups]
    _, outcome = step(shifted)
    metrics = outcome.metrics
    assert metrics["gate_drop_rate_positive"] > 0.3
    assert metrics["gate_drop_rate_negative"] == 0
    assert metrics["gate_drop_rate"] == metrics["would_drop_rate_tv"]
    assert metrics["would_drop_rate_off"] == 0
    assert metrics["would_drop_rate_ppo_clip"] > metrics["would_drop_rate_tv"]


def test_where_tokens_differ_is_told_by_episode_by_place_and_by_lag() -> None:
    """Two episodes, of 4 and 2 tokens; the second, 3 versions old, moved up by 0.4 where its advantage is positive."""
    mu = np.array([0.5, 0.5, 0.5, 0.5, 0.5, 0.5])
    pi = np.array([0.5, 0.5, 0.5, 0.6, 0.9, 0.9])
    tokens = Tokens(np.log(pi), np.log(mu), np.array([1.0, 1.0, 1.0, 1.0, 1.0, 0.0]), np.zeros(6))
    found = place_metrics(tokens, LEARNING.gate, [4, 2], [0, 3])
    assert found["mismatch_episode_max"] == pytest.approx(0.4)
    assert found["mismatch_episode_p90"] == pytest.approx(0.025 + 0.9 * (0.4 - 0.025))
    quarters = [found[f"mismatch_quarter_{n}"] for n in (1, 2, 3, 4)]
    assert quarters == pytest.approx([0.2, 0.0, 0.2, 0.1]), "two tokens are the first and the third quarter"
    assert (found["gate_drop_rate_lag_0"], found["gate_drop_rate_lag_3"]) == (0.0, 1.0)


def test_host_is_told_by_its_own_tokens() -> None:
    mu, pi = np.array([0.5, 0.5, 0.5, 0.5]), np.array([0.5, 0.6, 0.9, 0.9])
    found = host_metrics(Tokens(np.log(pi), np.log(mu), np.array([1.0, 1.0, 1.0, 0.0]), np.zeros(4)), LEARNING.gate)
    assert found == pytest.approx({"mismatch_mean": 0.225, "mismatch_p99": 0.4, "gate_drop_rate": 1 / 3})


def test_step_says_how_many_episodes_are_missing_and_how_far_weights_moved(groups: list[Group]) -> None:
    short = [replace(groups[0], episodes=groups[0].episodes[:6]), *groups[1:]]
    policy, outcome = step(short)
    assert outcome.metrics["infra_fault_rate"] == pytest.approx(2 / 24)
    assert outcome.metrics["staleness_beyond_fraction"] == 0.0
    assert step(groups, version=7)[1].metrics["staleness_beyond_fraction"] == 1.0, "4 versions are more than the 3 planned for"
    moved = torch.cat([(t - trainable().masters()[name]).flatten() for name, t in policy.masters().items()]).norm()
    assert outcome.metrics["update_norm"] == pytest.approx(float(moved), rel=1e-3)


def test_hosts_are_told_apart(groups: list[Group]) -> None:
    _, outcome = step(groups)
    counts = {name: len(tokens.log_pi) for name, tokens in outcome.tokens_of_host.items()}
    assert counts == {
        "mac-0": sum(len(e.logprobs) for g in (groups[0], groups[2]) for e in g.episodes),
        "mac-1": sum(len(e.logprobs) for e in groups[1].episodes),
    }


def test_step_makes_rewarded_episodes_likelier(groups: list[Group]) -> None:
    policy, before = step(groups, LEARNING.model_copy(update={"learning_rate": 1e-3}))
    after = optimizer_step(policy, groups, LEARNING, version=5, step=2, planned_sequences=24, on_row=lambda row: None)
    assert after.metrics["logprob_positive_mean"] > before.metrics["logprob_positive_mean"]


def test_learning_rate_warms_up_and_the_first_step_moves() -> None:
    learning = LEARNING.model_copy(update={"warmup_steps": 4, "learning_rate": 1.0})
    assert [learning_rate(learning, n) for n in (1, 2, 4, 9)] == [0.25, 0.5, 1.0, 1.0]
    assert learning_rate(LEARNING, 1) == LEARNING.learning_rate


def with_routing(groups: list[Group], change: Callable[[torch.Tensor], torch.Tensor] = lambda routing: routing) -> list[Group]:
    """The groups with the experts that the policy itself chooses, `change`d, as a sampler would have recorded them."""
    model = trainable().model
    routed: list[Group] = []
    for group in groups:
        ids = torch.from_numpy(np.concatenate([e.ids for e in group.episodes]).astype(np.int64))
        lengths = [len(e.ids) for e in group.episodes]
        with torch.no_grad(), recorded_routing(model) as recorded:
            token_logprobs_packed(model, ids, lengths)
        parts = change(recorded[0]).to(torch.uint8).split(lengths)
        episodes = tuple(replace(e, routing=part.numpy()) for e, part in zip(group.episodes, parts, strict=True))
        routed.append(replace(group, episodes=episodes))
    return routed


def worst_gradient_difference(a: Trainable, b: Trainable) -> float:
    """Largest difference over all tensors, relative to the norm of the whole gradient."""
    ours, theirs = a.gradients(), b.gradients()
    norm = torch.cat([g.flatten() for g in ours.values()]).norm()
    return max(float((g - theirs[n]).abs().max() / norm) for n, g in ours.items())


def test_replaying_the_samplers_experts_is_exact_where_they_agree_and_seen_where_not(groups: list[Group]) -> None:
    plain, without = step(groups)
    assert "mismatch_replayed" not in without.metrics
    same, outcome = step(with_routing(groups))
    assert worst_gradient_difference(plain, same) < 1e-6
    assert outcome.metrics["routing_differs_fraction"] == 0
    assert outcome.metrics["mismatch_replayed"] == outcome.metrics["mismatch_not_replayed"] < 1e-5
    other, outcome = step(with_routing(groups, lambda routing: (routing + 1) % 8))
    assert worst_gradient_difference(plain, other) > 1e-3
    assert outcome.metrics["routing_differs_fraction"] > 0.5
    assert outcome.metrics["mismatch_replayed"] > 100 * outcome.metrics["mismatch_not_replayed"]
    assert outcome.metrics["mismatch_mean"] > 1e-3, "the step itself ran on the sampler's experts"


def test_replay_is_compared_every_fourth_step_only(groups: list[Group]) -> None:
    routed = with_routing(groups[:1])
    compared = ["mismatch_replayed" in step(routed, step=number)[1].metrics for number in range(1, 6)]
    assert compared == [True, False, False, False, True]


def test_experts_of_some_episodes_only_are_not_replayed(groups: list[Group]) -> None:
    routed = with_routing(groups, lambda routing: (routing + 1) % 8)
    mixed = [replace(routed[0], episodes=(groups[0].episodes[0], *routed[0].episodes[1:])), *routed[1:]]
    assert worst_gradient_difference(step(groups)[0], step(mixed)[0]) < 1e-6


@pytest.mark.parametrize("num_rows", [1, 2, 4, 8, 24])
def test_cut_into_rows_does_not_change_the_gradient(num_rows: int, groups: list[Group]) -> None:
    """24 episodes in 1, 2, 4 or 8 packed rows, or each in a row of its own."""
    lengths = [len(e.ids) for g in groups for e in g.episodes]
    budget = next(b for b in range(max(lengths), sum(lengths) + 1) if len(pack(lengths, b)) <= num_rows) if num_rows < 24 else 1
    whole, _ = step(groups, LEARNING.model_copy(update={"micro_batch_tokens": 10**6}))
    cut, outcome = step(groups, LEARNING.model_copy(update={"micro_batch_tokens": budget}))
    assert outcome.metrics["num_rows"] == num_rows
    assert worst_gradient_difference(whole, cut) < 1e-6


def test_shares_of_all_ranks_hold_every_episode_once() -> None:
    bins = [[0, 3], [1], [2, 4], [5], [6]]
    for num_ranks in (1, 2, 3, 8):
        for even in (False, True):
            shares = [share(bins, rank, num_ranks, even=even) for rank in range(num_ranks)]
            assert sorted(i for rows in shares for row in rows for i in row) == list(range(7))
            assert not even or len({len(rows) for rows in shares}) == 1, "ranks that share experts meet equally often"
    assert share(bins, 1, 2, even=True) == [(1,), (5,), ()]


def test_rows_are_reported_while_they_finish(groups: list[Group]) -> None:
    seen: list[str] = []
    holder = SimpleNamespace(report=seen.append)
    small = LEARNING.model_copy(update={"micro_batch_tokens": 128})
    optimizer_step(trainable(), groups, small, version=5, step=1, planned_sequences=24, on_row=holder.report)
    assert seen[-1] == f"row {len(seen)} of {len(seen)}"


def test_mismatch_of_a_group_by_hand() -> None:
    pi, mu = np.array([0.5, 0.8, 0.9, 0.3]), np.array([0.4, 0.8, 0.6, 0.6])
    found = group_mismatch(Tokens(np.log(pi), np.log(mu), np.ones(4), np.zeros(4)))
    assert found.mean == pytest.approx((0.1 + 0.0 + 0.3 + 0.3) / 4)
    assert found.ratio_mean == pytest.approx((1.25 + 1.0 + 1.5 + 0.5) / 4)
    # r - 1 - ln r of 1.25, 1, 1.5 and 0.5
    assert found.k3 == pytest.approx((0.0268564 + 0.0 + 0.0945349 + 0.1931472) / 4, abs=1e-6)
    assert found.far_share == pytest.approx(3 / 4)
    assert 0.29 < found.p99 <= 0.3 + 1e-12


def test_likeliness_tells_a_cool_sampler_with_true_logprobs_from_one_at_temperature_one() -> None:
    """By hand for tokens of 0.8 and 0.2, entropy 0.5004: 0 by temperature 1, by 0.5 ln 0.8 * 16/17 + ln 0.2 / 17 + 0.5004."""
    log_p = np.log(np.array([0.8, 0.2]))
    found: dict[float, GroupMismatch] = {}
    for temperature, often in ((1.0, 6800), (0.5, 8000)):
        drawn = np.repeat(log_p, [often, 8500 - often])
        found[temperature] = group_mismatch(Tokens(drawn, drawn, np.ones(8500), np.full(8500, 0.500402)))
    assert found[1.0].likeliness == pytest.approx(0.0, abs=1e-5)
    assert found[0.5].likeliness == pytest.approx(0.195712, abs=1e-5)
    assert found[0.5][:5] == found[1.0][:5] == (0.0, 0.0, 0.0, 0.0, 1.0)


def test_searches_that_found_nothing_are_told_as_a_share_of_all_searches(groups: list[Group]) -> None:
    """Six searches of which three found nothing, in 8 episodes of which four searched: 3 / 6, whatever the episodes are."""
    calls = [(3.0, 2.0), (1.0, 1.0), (1.0, 0.0), (1.0, 0.0), *[(0.0, 0.0)] * 4]
    told = tuple(
        replace(e, reward_parts={**e.reward_parts, "num_calls": num, "num_empty": empty})
        for e, (num, empty) in zip(groups[0].episodes, calls, strict=True)
    )
    assert group_metrics([replace(groups[0], episodes=told)], 3, 3)["empty_retrieval_rate"] == pytest.approx(0.5)
    idle = tuple(replace(e, reward_parts={}) for e in told)
    assert group_metrics([replace(groups[0], episodes=idle)], 3, 3)["empty_retrieval_rate"] == 0.0
