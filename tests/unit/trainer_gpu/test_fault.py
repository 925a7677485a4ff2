"""A step that is not finite: the groups at fault are found and refused, and a policy that is at fault itself says so."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from stoa.bucket.steps import lineage, read_step
from stoa.bucket.store import Store
from stoa.contracts.errors import FaultyGroupsError, NonFiniteError
from stoa.contracts.messages import AcquireRequest, CheckpointRequest, StepRequest
from stoa.learning.ledger import GrantRecord
from stoa.rollouts.records import Group
from stoa.telemetry.metrics import find
from tests.unit.trainer_gpu.player import search
from tests.unit.trainer_gpu.runs import Reports, config_of, head_of, put_group, start_run, state_of
from tests.unit.trainer_gpu.test_intake import QUESTIONS, group
from tests.unit.trainer_gpu.test_policy import policy
from trainer_gpu.engine import TrainerEngine
from trainer_gpu.grant_book import GrantBook
from trainer_gpu.metrics import ReplayedRow, replay_metrics
from trainer_gpu.policy import Policy
from trainer_gpu.run_handle import RunHandle

HUGE = 1e300
"""A reward that float64 holds and the trainer's float32 does not."""
SPOILT = frozenset(QUESTIONS[:3])

pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered in:RuntimeWarning")


def spoilt(one: Group) -> Group:
    return replace(one, episodes=tuple(replace(episode, reward=episode.reward * HUGE) for episode in one.episodes))


def train(made: Policy, groups: Sequence[Group], seen: list[str] | None = None) -> None:
    made.train(groups, version=3, step=1, planned_sequences=16, on_row=(seen if seen is not None else []).append)


def copied(made: Policy) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in made.state().items()}


def differing(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    return [name for name, tensor in one.items() if not torch.equal(tensor, other[name])]


def test_groups_at_fault_are_named_and_the_others_train_as_if_they_had_never_been() -> None:
    made, never, seen = policy(), policy(), list[str]()
    groups = [group(0), spoilt(group(1)), group(2), spoilt(group(3))]
    before, chance = copied(made), made.capture_rng()
    with pytest.raises(FaultyGroupsError, match="2 of 4 groups") as caught:
        train(made, groups, seen)
    assert caught.value.places == (1, 3)
    assert seen[-1] == "not finite: trying group 4 of 4 alone"
    assert (differing(copied(made), before), made.capture_rng()) == ([], chance)
    for one in (made, never):
        train(one, [groups[0], groups[2]])
    assert differing(copied(made), copied(never)) == []


def test_where_no_group_passes_a_prompt_tells_the_groups_from_the_policy() -> None:
    with pytest.raises(FaultyGroupsError) as caught:
        train(policy(), [spoilt(group(0)), spoilt(group(1))])
    assert caught.value.places == (0, 1)


def routed(made: Policy, one: Group, first: int) -> Group:
    """As if all its tokens had gone to the experts from `first` on."""
    layers, top_k, _ = made.routing or (0, 0, 0)
    experts = np.arange(first, first + top_k, dtype=np.uint8)
    episodes = [replace(e, routing=np.broadcast_to(experts, (len(e.ids), layers, top_k))) for e in one.episodes]
    return replace(one, episodes=tuple(episodes))


def overflow_in_one_expert(made: Policy) -> int:
    """Finite weights with which one expert, that no router chooses by itself, gives no finite number; returns its number."""
    for name, weight in made.trainable.model.named_parameters():
        if ".experts." in name:
            weight.data[-1].fill_(1e30)
    for name, buffer in made.trainable.model.named_buffers():
        if name.endswith("expert_bias"):
            buffer[-1] = -1e9
    return (made.routing or (0, 0, 0))[2] - 1


def test_group_that_overflows_in_the_forward_pass_is_the_only_one_refused() -> None:
    made = policy()
    expert = overflow_in_one_expert(made)
    groups = [routed(made, group(slot), first) for slot, first in ((0, 0), (1, expert - 1), (2, 0))]
    with pytest.raises(FaultyGroupsError) as caught:
        train(made, groups)
    assert caught.value.places == (1,)
    train(made, [groups[0], groups[2]])


def enlarge(made: Policy) -> None:
    """Finite weights, of which every number of the model overflows."""
    with torch.no_grad():
        for weight in made.trainable.model.parameters():
            weight.fill_(3e38)


def lose(made: Policy) -> None:
    """One number of the masters and of the weights, of an expert that few tokens go to."""
    name = next(name for name, _ in made.trainable.model.named_parameters() if "experts" in name)
    dict(made.trainable.model.named_parameters())[name].data.view(-1)[0] = torch.nan
    made.state()[f"master.{name}"].view(-1)[0] = torch.nan


@pytest.mark.parametrize(
    ("harm", "said"),
    [(enlarge, "what it makes of plain prompts is not"), (lose, "weights of the policy are NaN or infinite, the first decoder")],
)
def test_policy_at_fault_is_no_groups_fault(harm: Callable[[Policy], None], said: str) -> None:
    made = policy()
    harm(made)
    with pytest.raises(NonFiniteError, match=said) as caught:
        train(made, [group(0), group(1)])
    assert not isinstance(caught.value, FaultyGroupsError)


def test_routers_own_choice_that_is_not_finite_costs_a_measurement_and_no_step() -> None:
    row = ReplayedRow(np.zeros(2), np.array([0.0, np.nan]), np.zeros(2), np.zeros(2, np.bool_))
    assert replay_metrics([row]) == {}


class Extreme:
    """The search environment, which pays `HUGE` for some questions."""

    def __init__(self) -> None:
        self._inner = search()

    def __getattr__(self, name: str):
        return getattr(self._inner, name)

    def score(self, question_id: str, turns: Sequence[Sequence[int]]):
        outcome = self._inner.score(question_id, turns)
        return replace(outcome, reward=outcome.reward * HUGE) if question_id in SPOILT else outcome


def ship(handle: RunHandle, host: str, slots: range, change: Callable[[Group], Group] = lambda one: one) -> list[str]:
    """One sweep of half right groups of version 0, with a grant."""
    state_id = state_of(handle, head_of(handle))
    GrantBook(handle.store, handle.run).write(GrantRecord(host, 0, 0, tuple(QUESTIONS[slot] for slot in slots), 0.0, 0))
    made = [group(slot, host=host, version=0, group=number, state_id=state_id) for number, slot in enumerate(slots)]
    return [put_group(handle, change(spoilt(one) if one.question_id in SPOILT else one)) for one in made]


def test_run_refuses_the_groups_counts_them_on_their_mac_and_a_successor_does_the_same(store: Store) -> None:
    handle = replace(start_run(store, config_of(store, groups_per_step=3, learning_rate=1e-3)), environment=Extreme())
    first, second = TrainerEngine(handle), TrainerEngine(handle)
    try:
        token = first.acquire(AcquireRequest("test", 1), 1, Reports()).token
        bad, good = ship(handle, "mac-a", range(3)), ship(handle, "mac-b", range(3, 6))
        done = first.train_step(StepRequest("test", token, 1), Reports())
        assert (done.status, [suspect.host for suspect in done.suspects]) == ("done", ["mac-a"])
        lost = read_step(store, "test", done.manifest_key)
        assert lost.consumed == tuple(good)
        assert [(one.key, one.host, one.reason) for one in lost.refused] == [(key, "mac-a", "non_finite") for key in bad]
        assert (lost.hosts["mac-a"].refused, lost.dropped) == ({"non_finite": 3}, ())
        assert lost.metrics["refused_non_finite"] == 3
        assert find("refused_non_finite") is not None
        after = copied(first.prepare())

        # HEAD never named the step: it is done again, to the bit, and then nothing of it comes again.
        token = second.acquire(AcquireRequest("test", 2), 1, Reports()).token
        redone = second.train_step(StepRequest("test", token, 1), Reports())
        assert read_step(store, "test", redone.manifest_key).consumed == lost.consumed
        assert differing(copied(second.prepare()), after) == []
        second.checkpoint(CheckpointRequest("test", token, 1), Reports())
        third = first.acquire(AcquireRequest("test", 3), 1, Reports()).token
        waits = first.train_step(StepRequest("test", third, 2, wait_seconds=1.0), Reports())
        assert (waits.status, waits.num_missing) == ("starved", 3)
        assert first._lease is not None
        assert first._lease.intake.refused == ()
        assert [key for step in lineage(store, head_of(handle)) for key in step.consumed] == good
    finally:
        first.close()
        second.close()


def test_canary_that_is_not_finite_counts_against_its_mac_and_stops_no_step(store: Store) -> None:
    """Its mismatch was written into the step's manifest, which nobody could read: the run paused for ever."""
    config = config_of(store, groups_per_step=3)
    handle = start_run(store, config.model_copy(update={"rollout": config.rollout.model_copy(update={"record_routing": True})}))
    engine = TrainerEngine(handle)
    try:
        token = engine.acquire(AcquireRequest("test", 1), 1, Reports()).token
        expert = overflow_in_one_expert(engine.prepare())
        good = ship(handle, "mac-b", range(3, 6), lambda one: routed(engine.prepare(), one, 0))
        bad = ship(handle, "mac-a", range(6, 9), lambda one: routed(engine.prepare(), one, expert - 1))
        assert engine._lease is not None
        engine._lease.intake.quarantine(["mac-a"], ["mac-a"])
        deadline = time.monotonic() + 20
        while len(engine._lease.intake.refused) < 3:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        done = engine.train_step(StepRequest("test", token, 1, quarantined=("mac-a",), on_trial=("mac-a",)), Reports())
        manifest = read_step(store, "test", done.manifest_key)
        assert (manifest.consumed, manifest.canaries) == (tuple(good), ())
        assert [(news.host, news.verdict) for news in done.canaries] == [("mac-a", "failed")]
        assert "non_finite" in done.canaries[0].reason
        assert len(bad) == 3
    finally:
        engine.close()


def test_policy_at_fault_names_the_checkpoint_to_go_back_to_and_none_with_such_weights_is_loaded(store: Store) -> None:
    handle = start_run(store, config_of(store, groups_per_step=3))
    engine = TrainerEngine(handle)
    try:
        token = engine.acquire(AcquireRequest("test", 1), 1, Reports()).token
        whole = head_of(handle).checkpoint_key
        ship(handle, "mac", range(3, 6))
        lose(engine.prepare())
        with pytest.raises(NonFiniteError, match=f"`stoa resume test` goes back to checkpoint {whole}") as caught:
            engine.train_step(StepRequest("test", token, 1), Reports())
        assert len(f"TrainStep failed: NonFiniteError: {caught.value.message}") <= 300, "what the workflow says of it"
        assert not caught.value.retryable
        assert engine._lease is not None
        assert engine._lease.intake.refused == ()
        resumed = engine.acquire(AcquireRequest("test", 2), 1, Reports()).token
        assert engine.train_step(StepRequest("test", resumed, 1), Reports()).status == "done"

        lose(engine.prepare())
        broken = engine.checkpoint(CheckpointRequest("test", resumed, 1), Reports()).key
        assert head_of(handle).checkpoint_key == broken
        assert engine.acquire(AcquireRequest("test", 3), 1, Reports()).step == 0
        assert (engine._lease.unusable, head_of(handle).checkpoint_key) == ((broken,), whole)
    finally:
        engine.close()
