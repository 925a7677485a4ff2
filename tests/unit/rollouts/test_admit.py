"""Honest groups are all kept; each kind of dishonest one is refused for its own reason, and nothing is taken on trust."""

import dataclasses
import itertools
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from stoa.contracts.errors import FormatError, GroupRefusedError, InfrastructureFaultError
from stoa.rollouts.admit import DuplicateIndex, Reason, Rules, admit
from stoa.rollouts.records import Episode, Fingerprint, Group, Turn
from stoa.rollouts.shard import encode_group
from tests.fakes import toy


def judge(
    group: Group, *, key: str = "", rules: Rules | None = None, seen: DuplicateIndex | None = None, data: bytes | None = None, rescore=None
) -> Group:
    return admit(
        encode_group(group) if data is None else data,
        key or toy.key_of(group),
        rules=rules or toy.rules(),
        prompt_ids_of=toy.prompt_ids_of,
        rescore=rescore or toy.rescore,
        seen=DuplicateIndex() if seen is None else seen,
    )


def reason_of(act: Callable[[], object]) -> str:
    with pytest.raises(GroupRefusedError) as caught:
        act()
    return caught.value.reason


def with_episode(group: Group, **changes: object) -> Group:
    """The group with its second episode changed."""
    first, second, *rest = group.episodes
    return dataclasses.replace(group, episodes=(first, dataclasses.replace(second, **changes), *rest))


def edited(group: Group, name: str, place: int, value: float) -> Group:
    array = getattr(group.episodes[1], name).copy()
    array[place] = value
    return with_episode(group, **{name: array})


def test_an_honest_group_is_admitted_as_it_is():
    sent = toy.group()
    found = judge(sent)
    assert [e.reward for e in found.episodes] == [1.0, 0.0, 1.0, 0.0]
    for mine, theirs in zip(sent.episodes, found.episodes, strict=True):
        np.testing.assert_array_equal(mine.ids, theirs.ids)
        np.testing.assert_array_equal(mine.logprobs, theirs.logprobs)


def test_a_reward_that_is_no_number_is_refused_also_where_the_environment_says_so():
    def rescore(question_id, turns):
        return dataclasses.replace(toy.rescore(question_id, turns), reward=float("nan"))

    assert reason_of(lambda: judge(toy.group(), rescore=rescore)) == "wrong_reward"


def test_reward_parts_are_worked_out_again_and_not_believed():
    found = judge(with_episode(toy.group(), reward_parts={"searched": 1.0, "cover": 1.0}))
    assert found.episodes[1].reward_parts == {"searched": 0.0}


def test_a_logprob_a_rounding_above_zero_is_admitted_as_zero():
    found = judge(edited(toy.group(), "logprobs", 0, 1e-6))
    assert found.episodes[1].logprobs[0] == 0.0
    assert found.episodes[1].logprobs.dtype == np.float32


@pytest.mark.parametrize("group_size", [4, 5, 8])
def test_groups_of_four_to_eight_are_admitted(group_size):
    plays = list(itertools.islice(itertools.cycle([toy.RIGHT, toy.WRONG]), group_size))
    assert len(judge(toy.group(plays=plays)).episodes) == group_size


def test_an_episode_cut_off_by_a_limit_is_admitted():
    too_long = ((6, 2, 2, 2, 2),)
    out_of_turns = ((7, 3, toy.STOP),) * 3
    found = judge(toy.group(plays=(too_long, out_of_turns, toy.RIGHT, toy.RIGHT)))
    assert [e.reward for e in found.episodes] == [0.0, 0.0, 1.0, 1.0]


def test_a_turn_without_its_end_is_admitted_only_where_the_episode_is_full():
    cut = toy.group(plays=(((6, 2, 2),), toy.WRONG, toy.WRONG, toy.WRONG))
    assert len(judge(cut, rules=toy.rules(max_episode_tokens=5)).episodes) == 4
    assert reason_of(lambda: judge(cut, rules=toy.rules(max_episode_tokens=6))) == Reason.WRONG_TURNS


HONEST = toy.group()
LAST_WRONG = len(HONEST.episodes[1].ids) - 1

CHEATS: dict[str, tuple[Group, Reason]] = {
    "another host": (dataclasses.replace(HONEST, host="mac-b"), Reason.WRONG_OWNER),
    "another run": (dataclasses.replace(HONEST, run="other"), Reason.WRONG_OWNER),
    "another sweep": (dataclasses.replace(HONEST, sweep=1), Reason.WRONG_OWNER),
    "another number": (dataclasses.replace(HONEST, group=1), Reason.WRONG_OWNER),
    "another version": (dataclasses.replace(HONEST, version=4), Reason.WRONG_OWNER),
    "an evaluation": (dataclasses.replace(HONEST, purpose="eval"), Reason.WRONG_PURPOSE),
    "other weights": (dataclasses.replace(HONEST, state_id="f" * 64), Reason.WRONG_STATE),
    "cool sampling": (dataclasses.replace(HONEST, temperature=0.7), Reason.TEMPERATURE),
    "no such question": (
        dataclasses.replace(HONEST, question_id="x1", episodes=tuple(dataclasses.replace(e, question_id="x1") for e in HONEST.episodes)),
        Reason.UNKNOWN_QUESTION,
    ),
    "two questions": (with_episode(HONEST, question_id="q2"), Reason.MIXED_QUESTIONS),
    "an id beyond the vocabulary": (edited(HONEST, "ids", 2, 256), Reason.VOCABULARY),
    "a negative id": (edited(HONEST, "ids", 2, -1), Reason.VOCABULARY),
    "another prompt": (edited(HONEST, "ids", 1, 102), Reason.WRONG_PROMPT),
    "an infinite logprob": (edited(HONEST, "logprobs", 1, -np.inf), Reason.LOGPROB),
    "a logprob that is no number": (edited(HONEST, "logprobs", 1, np.nan), Reason.LOGPROB),
    "a probability above one": (edited(HONEST, "logprobs", 1, 0.01), Reason.LOGPROB),
    "a token never sampled": (edited(HONEST, "logprobs", 1, -1000.0), Reason.LOGPROB),
    "a higher reward": (with_episode(HONEST, reward=1.0), Reason.WRONG_REWARD),
    "a stop id within a turn": (edited(HONEST, "ids", 3, toy.STOP), Reason.WRONG_TURNS),
    "a turn that only claims to have stopped": (edited(HONEST, "ids", LAST_WRONG, 2), Reason.WRONG_TURNS),
    "a turn said not to have stopped": (with_episode(HONEST, turns=(Turn(2, 5, False),)), Reason.WRONG_TURNS),
    "no turn": (
        with_episode(HONEST, turns=(), mask=np.zeros(5, np.uint8), logprobs=np.zeros(0, np.float32)),
        Reason.WRONG_TURNS,
    ),
    "a mask over the prompt": (
        with_episode(HONEST, mask=np.array([0, 1, 1, 1, 1], np.uint8), logprobs=np.full(4, -0.5, np.float32)),
        Reason.WRONG_MASK,
    ),
    "a mask short of the turn": (
        with_episode(HONEST, mask=np.array([0, 0, 1, 1, 0], np.uint8), logprobs=np.full(2, -0.5, np.float32)),
        Reason.WRONG_MASK,
    ),
    "a shorter prompt": (
        with_episode(HONEST, ids=HONEST.episodes[1].ids[1:], mask=HONEST.episodes[1].mask[1:], turns=(Turn(1, 4, True),)),
        Reason.WRONG_PROMPT,
    ),
}


@pytest.mark.parametrize("name", CHEATS)
def test_a_cheat_is_refused_for_its_own_reason(name):
    group, reason = CHEATS[name]
    assert reason_of(lambda: judge(group, key=toy.key_of(HONEST))) == reason


def test_an_invented_tool_result_is_refused():
    first = HONEST.episodes[0]
    ids = first.ids.copy()
    assert ids[5] == 40
    ids[6] = 99
    forged = dataclasses.replace(HONEST, episodes=(dataclasses.replace(first, ids=ids), *HONEST.episodes[1:]))
    assert reason_of(lambda: judge(forged)) == Reason.INVENTED_RESULT


def test_tokens_after_the_last_turn_are_refused():
    tail = Episode(
        **{f.name: getattr(HONEST.episodes[1], f.name) for f in dataclasses.fields(Episode)}
        | {"ids": np.array([1, 101, 6, 2, 9, 3], np.int32), "mask": np.array([0, 0, 1, 1, 1, 0], np.uint8)}
    )
    forged = dataclasses.replace(HONEST, episodes=(tail, *HONEST.episodes[1:]))
    assert reason_of(lambda: judge(forged)) == Reason.WRONG_TURNS


def test_turns_after_the_end_of_an_episode_are_refused():
    first = HONEST.episodes[0]
    ids = np.array([1, 101, 5, 2, 9, 40, 3, 41, 5, 2, 9], np.int32)
    forged = dataclasses.replace(HONEST, episodes=(dataclasses.replace(first, ids=ids), *HONEST.episodes[1:]))
    assert reason_of(lambda: judge(forged)) == Reason.UNPLAYABLE


def test_an_episode_that_stops_before_its_end_is_refused():
    half = toy.episode("q1", ((7, 3, toy.STOP),))
    forged = dataclasses.replace(HONEST, episodes=(half, *HONEST.episodes[1:]))
    assert reason_of(lambda: judge(forged)) == Reason.UNFINISHED


def test_an_episode_may_stop_only_where_the_answer_to_its_last_turn_and_another_turn_leave_no_room():
    """It has 5 tokens, the tool answers 3 and a turn may have 5: with 13 the other turn fills the episode, with 14 a token is left."""
    half = toy.episode("q1", ((7, 3, toy.STOP),))
    stopped = dataclasses.replace(HONEST, episodes=(half, *HONEST.episodes[1:]))
    assert len(judge(stopped, rules=toy.rules(max_episode_tokens=13)).episodes) == 4
    assert reason_of(lambda: judge(stopped, rules=toy.rules(max_episode_tokens=14))) == Reason.UNFINISHED


def test_more_turns_tokens_or_turn_tokens_than_allowed_are_refused():
    assert reason_of(lambda: judge(HONEST, rules=toy.rules(max_turns=1))) == Reason.TOO_LONG
    assert reason_of(lambda: judge(HONEST, rules=toy.rules(max_episode_tokens=10))) == Reason.TOO_LONG
    assert reason_of(lambda: judge(HONEST, rules=toy.rules(max_turn_tokens=2))) == Reason.TOO_LONG


def test_too_few_or_too_many_episodes_are_refused():
    assert reason_of(lambda: judge(HONEST, rules=toy.rules(min_group_size=5))) == Reason.GROUP_SIZE
    five = toy.group(plays=[toy.WRONG] * 5)
    assert reason_of(lambda: judge(five, rules=toy.rules(group_size=4))) == Reason.GROUP_SIZE


def test_a_version_that_is_not_known_is_refused_before_anything_is_decoded():
    rules = toy.rules(known={}.get)
    assert reason_of(lambda: judge(HONEST, rules=rules, data=b"never read")) == Reason.UNKNOWN_VERSION


@given(st.integers(0, 40), st.integers(0, 40), st.booleans())
def test_of_a_run_resumed_at_a_version_no_group_of_a_later_one_is_admitted(resumed_at, played_at, same_weights):
    """Objects of a trainer that died after HEAD's version are there still; they say a version that HEAD does not lead to."""
    own = toy.rules().known(HONEST.version)
    known = dict.fromkeys(range(resumed_at + 1), own)
    left = dataclasses.replace(HONEST, version=played_at, state_id=own if same_weights else "e" * 64)
    rules = dataclasses.replace(toy.rules(), known=known.get)
    if played_at > resumed_at:
        assert reason_of(lambda: judge(left, rules=rules)) == Reason.UNKNOWN_VERSION
    elif same_weights:
        assert judge(left, rules=rules).version == played_at
    else:
        assert reason_of(lambda: judge(left, rules=rules)) == Reason.WRONG_STATE


@given(st.lists(st.integers(-2, 2), min_size=len(HONEST.episodes), max_size=len(HONEST.episodes)))
@example([1, -1, *[0] * (len(HONEST.episodes) - 2)])
def test_each_sampled_token_has_one_logprob_also_where_the_sums_agree(excess):
    """What one episode has too many and the next too few would otherwise be another token's logprob."""
    lengths = [max(0, len(one.logprobs) + more) for one, more in zip(HONEST.episodes, excess, strict=True)]
    episodes = tuple(
        dataclasses.replace(one, logprobs=np.resize(one.logprobs, length)) for one, length in zip(HONEST.episodes, lengths, strict=True)
    )
    changed = dataclasses.replace(HONEST, episodes=episodes)
    if lengths == [len(one.logprobs) for one in HONEST.episodes]:
        assert judge(changed).episodes[1].logprobs.tolist() == HONEST.episodes[1].logprobs.tolist()
        return
    with pytest.raises(FormatError):
        encode_group(changed)


def test_bytes_that_are_no_group_are_refused():
    assert reason_of(lambda: judge(HONEST, data=b"junk")) == Reason.MALFORMED


NUMERIC = "0.32.4-0123456789ab"


@pytest.mark.parametrize(("engine", "numeric"), [(f"mlx 0.32.4 cpu x86_64 plain {NUMERIC}", NUMERIC), ("mlx 0.32.4 gpu", ""), ("", "")])
def test_only_engines_that_the_run_names_are_taken_if_it_names_any(engine: str, numeric: str) -> None:
    group = dataclasses.replace(HONEST, fingerprint=Fingerprint(engine, "0.1.0"))
    assert group.fingerprint.numeric == numeric
    assert judge(group).fingerprint.engine == engine
    other, both = (toy.rules(fingerprints=frozenset(names)) for names in (["0.32.4-ba9876543210"], [NUMERIC, "0.32.4-ba9876543210"]))
    assert reason_of(lambda: judge(group, rules=other)) == Reason.UNKNOWN_ENGINE
    if numeric:
        assert judge(group, rules=both).fingerprint.numeric == NUMERIC
    else:
        assert reason_of(lambda: judge(group, rules=both)) == Reason.UNKNOWN_ENGINE


@pytest.mark.parametrize("key", ["runs/toy/groups/v00000003/mac-a/00000000/0.safetensors.zst", "x", "", "runs/toy/run.json"])
def test_a_key_that_is_no_groups_is_refused(key):
    assert reason_of(lambda: judge(HONEST, key=key or " ")) == Reason.BAD_KEY


def test_a_key_of_another_run_is_refused():
    other = dataclasses.replace(HONEST, run="other")
    assert reason_of(lambda: judge(other)) == Reason.BAD_KEY


def test_only_the_granted_question_is_taken():
    assert judge(HONEST, rules=toy.rules(granted=lambda named: "q1")).question_id == "q1"
    for granted, reason in (("q2", Reason.WRONG_QUESTION), (None, Reason.NOT_GRANTED)):
        rules = toy.rules(granted=lambda named, granted=granted: granted)
        assert reason_of(lambda rules=rules: judge(HONEST, rules=rules)) == reason


def test_routing_is_checked_where_the_run_records_it():
    def routed(layers: int, *experts: int) -> Group:
        chosen = np.array(experts, np.uint8)
        episodes = tuple(
            dataclasses.replace(e, routing=np.broadcast_to(chosen, (len(e.ids), layers, len(chosen))).copy()) for e in HONEST.episodes
        )
        return dataclasses.replace(HONEST, episodes=episodes)

    rules = toy.rules(routing=(2, 4, 8))
    assert judge(routed(2, 4, 0, 7, 1), rules=rules).episodes[0].routing is not None
    bad = [HONEST, routed(3, 4, 5, 6, 7), routed(2, 6, 7), routed(2, 5, 6, 7, 8), routed(2, 4, 7, 5, 7)]
    for group in bad:
        assert reason_of(lambda group=group: judge(group, rules=rules)) == Reason.ROUTING
    assert judge(routed(2, 7, 7, 7, 7)).episodes[0].routing is None, "experts nobody asked for are not replayed"


def test_a_fault_of_the_environment_that_may_pass_is_no_refusal():
    def out_of_order(question_id, turns):
        raise InfrastructureFaultError("index not loaded")

    with pytest.raises(InfrastructureFaultError):
        judge(HONEST, rescore=out_of_order)


# copies

UNLIKELY = -9.0
"""Per token: a right episode of six sampled tokens then has e^-54."""
DIFFERENT = (toy.RIGHT, ((6, 2, toy.STOP),), ((7, 4, toy.STOP), (5, 3, toy.STOP)), ((6, 4, toy.STOP),))


def unlikely(logprob: float = UNLIKELY, **changes: object) -> Group:
    """An honest group of different episodes, none of which is ever sampled twice."""
    return toy.group(**{"logprob": logprob, "plays": DIFFERENT, **changes})


def test_a_copy_of_another_hosts_group_is_refused():
    seen = DuplicateIndex()
    judge(unlikely(), seen=seen)
    assert reason_of(lambda: judge(unlikely(host="mac-b"), seen=seen)) == Reason.DUPLICATE


def test_a_copy_in_another_order_of_another_version_is_refused():
    seen = DuplicateIndex()
    judge(unlikely(), seen=seen)
    copy = toy.group(logprob=UNLIKELY, host="mac-b", version=4, plays=(*DIFFERENT[2:], *DIFFERENT[:2]))
    assert reason_of(lambda: judge(copy, seen=seen)) == Reason.DUPLICATE


def test_one_unlikely_episode_among_fresh_ones_gives_a_copy_away():
    seen = DuplicateIndex()
    judge(unlikely(), seen=seen)
    copy = toy.group(logprob=UNLIKELY, sweep=5, plays=(toy.RIGHT, ((6, 3, toy.STOP),), ((6, 5, toy.STOP),), ((6, 7, toy.STOP),)))
    assert reason_of(lambda: judge(copy, seen=seen)) == Reason.DUPLICATE


def test_likely_episodes_may_come_again():
    seen = DuplicateIndex()
    judge(toy.group(logprob=-0.1), seen=seen)
    assert judge(toy.group(logprob=-0.1, host="mac-b"), seen=seen)


def test_claiming_an_episode_unlikely_does_not_shut_out_honest_ones():
    seen = DuplicateIndex()
    judge(unlikely(logprob=-99.0), seen=seen)
    assert judge(toy.group(logprob=-0.1, host="mac-b"), seen=seen)


def test_equal_episodes_within_a_group_are_no_duplicate_unless_they_are_too_unlikely():
    assert judge(toy.group(logprob=-0.5, plays=[toy.RIGHT] * 8))
    assert reason_of(lambda: judge(toy.group(logprob=UNLIKELY, plays=[toy.RIGHT] * 4))) == Reason.DUPLICATE


def test_a_group_larger_than_any_of_the_run_is_refused_undecoded():
    rules = toy.rules()
    assert rules.max_group_bytes == 1024 * 1024 + 8 * (40 * 9 + 3 * 16)
    assert reason_of(lambda: judge(HONEST, data=bytes(rules.max_group_bytes + 1))) == Reason.TOO_LARGE


def test_the_same_answer_to_another_question_is_no_duplicate():
    seen = DuplicateIndex()
    judge(unlikely(), seen=seen)
    assert judge(unlikely(question_id="q2", sweep=1), seen=seen)


def test_admitting_a_key_again_gives_the_same_group():
    seen = DuplicateIndex()
    for _ in range(3):
        assert judge(unlikely(), seen=seen).host == "mac-a"


def test_a_sweep_played_again_under_another_version_brings_its_groups_once():
    seen = DuplicateIndex()
    judge(toy.group(version=3), seen=seen)
    assert reason_of(lambda: judge(toy.group(version=4), seen=seen)) == Reason.SLOT_TAKEN
    after_a_restart = DuplicateIndex()
    after_a_restart.remember_key(toy.key_of(toy.group(version=3)))
    assert reason_of(lambda: judge(toy.group(version=4), seen=after_a_restart)) == Reason.SLOT_TAKEN
    assert judge(toy.group(version=4, index=1), seen=after_a_restart)


def test_only_the_newest_groups_are_remembered():
    seen = DuplicateIndex(max_groups=2)
    for sweep in range(3):
        judge(unlikely(question_id=f"q{sweep}", sweep=sweep), seen=seen)
    assert judge(unlikely(question_id="q0", sweep=7), seen=seen)
    assert reason_of(lambda: judge(unlikely(question_id="q2", sweep=8), seen=seen)) == Reason.DUPLICATE


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.floats(0.6, 0.999))
def test_honest_groups_of_a_sure_policy_are_never_taken_for_copies(seed, sureness):
    """Sixty groups of one question, each episode drawn honestly from a policy that mostly says the same."""
    chance = np.random.default_rng(seed)
    seen = DuplicateIndex()
    options = [toy.RIGHT, toy.WRONG, ((6, 3, toy.STOP),), ((5, 4, toy.STOP),)]
    shares = np.array([sureness, *[(1 - sureness) / 3] * 3])
    for sweep in range(60):
        episodes = []
        for choice in chance.choice(4, size=8, p=shares):
            num_sampled = sum(len(turn) for turn in options[choice])
            episodes.append(toy.episode("q1", options[choice], logprob=float(np.log(shares[choice])) / num_sampled))
        judge(dataclasses.replace(toy.group(sweep=sweep), episodes=tuple(episodes)), seen=seen)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_an_edited_group_is_refused_or_still_earns_what_its_ids_say(data):
    """Ids, masks and turns changed at random: whatever is admitted has the environment's own reward and results."""
    group = toy.group()
    number = data.draw(st.integers(0, 3))
    episode = group.episodes[number]
    ids = episode.ids.copy()
    for _ in range(data.draw(st.integers(1, 3))):
        ids[data.draw(st.integers(0, len(ids) - 1))] = data.draw(st.sampled_from([1, 5, 6, 7, 9, 40, 41, 101, 255, 256, -1]))
    episodes = list(group.episodes)
    episodes[number] = dataclasses.replace(episode, ids=ids)
    try:
        found = judge(dataclasses.replace(group, episodes=tuple(episodes)))
    except GroupRefusedError as error:
        assert error.reason in list(Reason)
        return
    admitted = found.episodes[number]
    turns = [admitted.ids[turn.start : turn.end].tolist() for turn in admitted.turns]
    honest = toy.episode("q1", turns)
    np.testing.assert_array_equal(admitted.ids, honest.ids)
    assert admitted.reward == honest.reward
