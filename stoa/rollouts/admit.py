"""Whether a group from another machine may be trained on, and as what.

The trainer trusts nothing in a group but its token ids and its logprobs: prompts, tool results, where turns end and
rewards are worked out again from the ids, by the environment that the caller binds. Cheap checks come before dear ones;
the first that fails refuses the group with a reason. How many refusals make a worker suspect is not decided here.

Legend: T tokens of an episode, S sampled tokens of an episode.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final, NoReturn

import numpy as np
from numpy.typing import NDArray

from stoa.bucket import keys
from stoa.bucket.keys import GroupKey
from stoa.contracts.errors import FormatError, GroupRefusedError, StoaError
from stoa.rollouts.records import Episode, Group
from stoa.rollouts.shard import MAX_GROUP_BYTES, MAX_HEADER_BYTES, TURN_BYTES, decode_group


class Reason(StrEnum):
    """Why a group is refused."""

    QUARANTINED = "quarantined"
    """Its host may take part no more; the group was not read."""
    CANARY = "canary"
    """Its host is under suspicion: the group was judged like any other, and is not trained on."""
    BAD_KEY = "bad_key"
    """The object's key is not one of a group of this run."""
    MALFORMED = "malformed"
    """The bytes are no group."""
    WRONG_OWNER = "wrong_owner"
    """The group says another run, host, version, sweep or number than its key."""
    WRONG_PURPOSE = "wrong_purpose"
    UNKNOWN_VERSION = "unknown_version"
    WRONG_STATE = "wrong_state"
    """Sampled from weights that are not the ones published as this version."""
    TOO_LARGE = "too_large"
    """More bytes than any group of this run can have."""
    UNREADABLE = "unreadable"
    """The group, or what it was granted, could not be read twice: a fault of the bucket."""
    NOT_GRANTED = "not_granted"
    """The slot was not granted."""
    WRONG_QUESTION = "wrong_question"
    """The slot was granted for another question."""
    SLOT_TAKEN = "slot_taken"
    """The slot's group has come already, under another version: a sweep that was played again."""
    UNKNOWN_ENGINE = "unknown_engine"
    """Sampled by an engine whose numeric fingerprint is not one the run names."""
    GROUP_SIZE = "group_size"
    TEMPERATURE = "temperature"
    UNKNOWN_QUESTION = "unknown_question"
    MIXED_QUESTIONS = "mixed_questions"
    TOO_LONG = "too_long"
    """More tokens or turns than the environment allows."""
    VOCABULARY = "vocabulary"
    """An id that no token has."""
    WRONG_MASK = "wrong_mask"
    """The mask marks other tokens than the turns do."""
    WRONG_TURNS = "wrong_turns"
    """A turn ends, or goes on, where the environment says otherwise."""
    LOGPROB = "logprob"
    """A logprob is not finite, positive, or of a token that is never sampled."""
    ROUTING = "routing"
    WRONG_PROMPT = "wrong_prompt"
    INVENTED_RESULT = "invented_result"
    """Between two turns stand other tokens than the environment answers."""
    UNPLAYABLE = "unplayable"
    """Turns follow the one that ended the episode."""
    UNFINISHED = "unfinished"
    """The episode stops where the environment would go on and no limit is reached."""
    WRONG_REWARD = "wrong_reward"
    DUPLICATE = "duplicate"
    """Episodes of an earlier group, or one of its own several times, too unlikely to have been sampled twice."""
    NON_FINITE = "non_finite"
    """Alone it makes the trainer's logprobs or gradient NaN or infinite, with weights that are finite."""


DAMNING: Final = frozenset(Reason) - {
    Reason.QUARANTINED,
    Reason.CANARY,
    Reason.BAD_KEY,
    Reason.UNREADABLE,
    Reason.UNKNOWN_VERSION,
    Reason.NOT_GRANTED,
    Reason.SLOT_TAKEN,
    Reason.UNKNOWN_ENGINE,
}
"""Reasons that no honest Mac gives. The others come about by time, by an outage, or by the build of an engine."""


@dataclass(frozen=True, slots=True)
class Replayed:
    """What the environment says to an episode's turns.

    appended: for each turn the ids that follow it; of the last one they are not looked at.
    done: the last turn ended the episode.
    """

    appended: Sequence[Sequence[int]]
    reward: float
    parts: Mapping[str, float]
    done: bool = True


@dataclass(frozen=True, slots=True)
class Rules:
    """What an honest group of this run looks like."""

    run: str
    vocab_size: int
    min_group_size: int
    group_size: int
    max_turns: int
    max_turn_tokens: int
    max_episode_tokens: int
    stop_ids: frozenset[int]
    known: Callable[[int], str | None]
    """state_id of a version that may be trained on, None for any other version."""
    granted: Callable[[GroupKey], str | None] | None = None
    """Question that was granted to a slot, None for a slot never granted; without it every question is taken."""
    fingerprints: frozenset[str] = frozenset()
    """Numeric fingerprints of engines that are taken; none: all are."""
    routing: tuple[int, int, int] | None = None
    """MoE layers, experts a token and experts, where routing is recorded; a group without it is refused then."""

    @property
    def max_group_bytes(self) -> int:
        """Bytes that no group of this run exceeds, packed or unpacked."""
        layers, top_k, _ = self.routing or (0, 0, 0)
        token_bytes = 9 + layers * top_k  # id, mask, logprob, experts
        episode_bytes = self.max_episode_tokens * token_bytes + self.max_turns * TURN_BYTES
        return min(MAX_GROUP_BYTES, MAX_HEADER_BYTES + self.group_size * episode_bytes)


PromptIdsOf = Callable[[str], Sequence[int]]
"""Prompt of a question. Raises a StoaError for an unknown one."""
Rescore = Callable[[str, Sequence[Sequence[int]]], Replayed]
"""Plays the turns of an episode of a question again. Raises a StoaError if they cannot be played."""

# Rounding of a float32 log softmax may leave a sure token a little above 0.
_MAX_LOGPROB: Final = 1e-4
# A token this unlikely is not sampled in the life of a run, and no float32 softmax tells it from 0.
_MIN_LOGPROB: Final = -100.0
_REWARD_TOLERANCE: Final = 1e-6
# Two honest groups share episodes this unlikely about once in e^50 draws.
_SURPRISE_NATS: Final = 50.0


class DuplicateIndex:
    """Groups admitted before, by question and by slot: what a copy is measured against.

    Honest groups may share episodes: a sure policy answers alike twice. So equal ids alone are no evidence; what counts
    is how unlikely the shared episodes were, by the claims of the two groups, whichever calls them likelier.
    The newest `max_groups` groups are remembered.
    """

    def __init__(self, max_groups: int = 20_000) -> None:
        self._max_groups = max_groups
        self._groups: OrderedDict[str, tuple[str, dict[bytes, list[float]]]] = OrderedDict()
        self._keys_of_question: dict[str, set[str]] = {}
        self._key_of_slot: dict[tuple[str, int, int], str] = {}

    def remember_key(self, key: str) -> None:
        """Mark the slot of a group whose ids are no longer at hand, such as one trained on before a restart."""
        slot = _slot(keys.parse_group(key))
        self._key_of_slot.setdefault(slot, key)

    def remember(self, key: str, group: Group) -> None:
        """Add an admitted group."""
        self.remember_key(key)
        self._groups[key] = (group.question_id, _surprises(group))
        self._groups.move_to_end(key)
        self._keys_of_question.setdefault(group.question_id, set()).add(key)
        if len(self._groups) > self._max_groups:
            oldest, (question_id, _) = self._groups.popitem(last=False)
            self._keys_of_question[question_id].discard(oldest)

    def slot_taken(self, key: str) -> bool:
        """True if another key's group has the slot (host, sweep, group) of this one."""
        return self._key_of_slot.get(_slot(keys.parse_group(key)), key) != key

    def copied_from(self, key: str, group: Group) -> str | None:
        """Key of the earlier group that this one repeats, if there is one."""
        mine = _surprises(group)
        for other in sorted(self._keys_of_question.get(group.question_id, set()) - {key}):
            theirs = self._groups[other][1]
            shared = sum(
                sum(min(pair) for pair in zip(sorted(mine[digest]), sorted(theirs[digest]), strict=False))
                for digest in mine.keys() & theirs.keys()
            )
            if shared >= _SURPRISE_NATS:
                return other
        return None


def admit(
    data: bytes,
    key: str,
    *,
    rules: Rules,
    prompt_ids_of: PromptIdsOf,
    rescore: Rescore,
    seen: DuplicateIndex,
) -> Group:
    """The group under `key` with rewards and reward parts worked out anew, logprobs at most 0; remembered in `seen`.

    Admitting the same key again gives the same answer. Raises GroupRefusedError with a `Reason`; a retryable error of
    the environment passes through.
    """
    named = _check_key(key, rules)
    if seen.slot_taken(key):
        _refuse(Reason.SLOT_TAKEN, key, "the group of this slot came before under another version")
    if rules.known(named.version) is None:
        _refuse(Reason.UNKNOWN_VERSION, key, f"version {named.version} is not one that may be trained on")
    granted = None if rules.granted is None else rules.granted(named)
    if rules.granted is not None and granted is None:
        _refuse(Reason.NOT_GRANTED, key, f"sweep {named.sweep} of {named.host} has no grant for group {named.group}")
    if len(data) > rules.max_group_bytes:
        _refuse(Reason.TOO_LARGE, key, f"{len(data)} bytes, no group of this run has more than {rules.max_group_bytes}")
    try:
        group = decode_group(data, max_bytes=rules.max_group_bytes)
    except FormatError as error:
        raise GroupRefusedError(Reason.MALFORMED, f"{key}: {error.message}") from error
    _check_group(group, named, key, rules, granted)
    prompt = _prompt(group.question_id, key, prompt_ids_of)
    for episode in group.episodes:
        check_episode(episode, prompt, rules, key)
    original = seen.copied_from(key, group)
    if original is not None:
        _refuse(Reason.DUPLICATE, key, f"it repeats {original}")
    if _repeated_nats(group) >= _SURPRISE_NATS:
        _refuse(Reason.DUPLICATE, key, "it repeats episodes of its own")
    group = replace(group, episodes=tuple(rescore_episode(episode, rules, rescore, key) for episode in group.episodes))
    seen.remember(key, group)
    return group


def check_episode(episode: Episode, prompt: Sequence[int], rules: Rules, where: str) -> None:
    """Raise GroupRefusedError unless the episode is well formed and starts with `prompt`; no environment is asked."""
    num_tokens, num_turns = len(episode.ids), len(episode.turns)
    if num_tokens > rules.max_episode_tokens or num_turns > rules.max_turns:
        _refuse(Reason.TOO_LONG, where, f"{num_tokens} tokens in {num_turns} turns")
    if int(episode.ids.min()) < 0 or int(episode.ids.max()) >= rules.vocab_size:
        _refuse(Reason.VOCABULARY, where, f"ids reach beyond the vocabulary of {rules.vocab_size}")
    if not num_turns:
        _refuse(Reason.WRONG_TURNS, where, "an episode without a turn")
    if not np.array_equal(episode.mask, _mask_of_turns(episode)):
        _refuse(Reason.WRONG_MASK, where, "the mask marks other tokens than the turns")
    _check_turns(episode, rules, where)
    _check_logprobs(episode.logprobs, where)
    _check_routing(episode, rules, where)
    start = episode.turns[0].start
    if start != len(prompt) or not np.array_equal(episode.ids[:start], np.asarray(prompt, dtype=np.int32)):
        _refuse(Reason.WRONG_PROMPT, where, f"it does not start with the prompt of {episode.question_id!r}")


def rescore_episode(episode: Episode, rules: Rules, rescore: Rescore, where: str) -> Episode:
    """The episode with the environment's own reward. Raises GroupRefusedError if what is claimed differs from a replay."""
    turns = [episode.ids[turn.start : turn.end].tolist() for turn in episode.turns]
    try:
        replayed = rescore(episode.question_id, turns)
    except StoaError as error:
        if error.retryable:
            raise
        raise GroupRefusedError(Reason.UNPLAYABLE, f"{where}: {error.message}") from error
    for turn, after, appended in zip(episode.turns, episode.turns[1:], replayed.appended, strict=False):
        if episode.ids[turn.end : after.start].tolist() != list(appended):
            _refuse(Reason.INVENTED_RESULT, where, f"tokens {turn.end} to {after.start} are not the environment's")
    room = rules.max_episode_tokens - len(episode.ids)
    if not replayed.done and len(turns) < rules.max_turns and room > rules.max_turn_tokens + len(replayed.appended[-1]):
        _refuse(Reason.UNFINISHED, where, f"it stops after turn {len(turns)}, where the environment goes on")
    if not abs(replayed.reward - episode.reward) <= _REWARD_TOLERANCE:  # so that NaN is refused, too
        _refuse(Reason.WRONG_REWARD, where, f"it claims reward {episode.reward}, its ids earn {replayed.reward}")
    return replace(
        episode,
        logprobs=np.minimum(episode.logprobs, np.float32(0.0)),
        reward=replayed.reward,
        reward_parts=dict(replayed.parts),
        # Experts nobody asked for were not checked, and must not be replayed.
        routing=episode.routing if rules.routing is not None else None,
    )


def _check_key(key: str, rules: Rules) -> GroupKey:
    try:
        named = keys.parse_group(key)
    except FormatError as error:
        raise GroupRefusedError(Reason.BAD_KEY, error.message) from error
    if named.run != rules.run:
        _refuse(Reason.BAD_KEY, key, f"it is of another run than {rules.run}")
    return named


def _check_group(group: Group, named: GroupKey, key: str, rules: Rules, granted: str | None) -> None:
    said = GroupKey(group.run, group.version, group.host, group.sweep, group.group)
    if said != named:
        _refuse(Reason.WRONG_OWNER, key, f"its bytes say {said}")
    if group.purpose != "train":
        _refuse(Reason.WRONG_PURPOSE, key, f"its purpose is {group.purpose}")
    if group.state_id != rules.known(group.version):
        _refuse(Reason.WRONG_STATE, key, f"state {group.state_id[:16]} is not the one published as version {group.version}")
    if rules.fingerprints and group.fingerprint.numeric not in rules.fingerprints:
        _refuse(Reason.UNKNOWN_ENGINE, key, f"engine {group.fingerprint.engine[:80]!r} has no fingerprint that the run names")
    if granted is not None and group.question_id != granted:
        _refuse(Reason.WRONG_QUESTION, key, f"question {group.question_id!r} was not the one granted")
    if not rules.min_group_size <= len(group.episodes) <= rules.group_size:
        _refuse(Reason.GROUP_SIZE, key, f"{len(group.episodes)} episodes, not {rules.min_group_size} to {rules.group_size}")
    if group.temperature != 1.0:
        _refuse(Reason.TEMPERATURE, key, f"sampled at temperature {group.temperature}, not 1")
    if any(episode.question_id != group.question_id for episode in group.episodes):
        _refuse(Reason.MIXED_QUESTIONS, key, "its episodes are of several questions")


def _check_turns(episode: Episode, rules: Rules, where: str) -> None:
    if episode.turns[-1].end != len(episode.ids):
        _refuse(Reason.WRONG_TURNS, where, "tokens follow the last turn")
    for turn in episode.turns:
        num_tokens = turn.end - turn.start
        if num_tokens > rules.max_turn_tokens:
            _refuse(Reason.TOO_LONG, where, f"a turn of {num_tokens} tokens")
        *before, last = episode.ids[turn.start : turn.end].tolist()
        if not rules.stop_ids.isdisjoint(before) or (last in rules.stop_ids) != turn.stopped:
            _refuse(Reason.WRONG_TURNS, where, f"the turn at {turn.start} does not end with its first stop id")
        at_limit = num_tokens == rules.max_turn_tokens or turn.end == rules.max_episode_tokens
        if not turn.stopped and not at_limit:
            _refuse(Reason.WRONG_TURNS, where, f"the turn at {turn.start} ends before its limit without a stop id")


def _check_logprobs(logprobs_S: NDArray[np.float32], where: str) -> None:
    if not bool(np.isfinite(logprobs_S).all()):
        _refuse(Reason.LOGPROB, where, "a logprob is not finite")
    if float(logprobs_S.max()) > _MAX_LOGPROB or float(logprobs_S.min()) < _MIN_LOGPROB:
        _refuse(Reason.LOGPROB, where, f"a logprob is outside [{_MIN_LOGPROB:g}, 0]")


def _check_routing(episode: Episode, rules: Rules, where: str) -> None:
    if rules.routing is None:
        return
    num_layers, top_k, num_experts = rules.routing
    routing = episode.routing
    if routing is None or routing.shape != (len(episode.ids), num_layers, top_k) or int(routing.max()) >= num_experts:
        _refuse(Reason.ROUTING, where, f"routing is not {num_layers} layers of {top_k} out of {num_experts}")
    ordered = np.sort(routing, axis=-1)
    if bool((ordered[..., 1:] == ordered[..., :-1]).any()):
        _refuse(Reason.ROUTING, where, "routing names one expert twice for a token")


def _mask_of_turns(episode: Episode) -> NDArray[np.uint8]:
    mask_T = np.zeros(len(episode.ids), dtype=np.uint8)
    for turn in episode.turns:
        mask_T[turn.start : turn.end] = 1
    return mask_T


def _prompt(question_id: str, key: str, prompt_ids_of: PromptIdsOf) -> Sequence[int]:
    try:
        return prompt_ids_of(question_id)
    except StoaError as error:
        if error.retryable:
            raise
        raise GroupRefusedError(Reason.UNKNOWN_QUESTION, f"{key}: {error.message}") from error


def _surprises(group: Group) -> dict[bytes, list[float]]:
    """For each different episode of the group, how unlikely each time it was sampled, in nats (0 or more)."""
    found: dict[bytes, list[float]] = {}
    for episode in group.episodes:
        digest = hashlib.blake2b(episode.ids.tobytes(), digest_size=16).digest()
        found.setdefault(digest, []).append(max(0.0, -float(episode.logprobs.sum(dtype=np.float64))))
    return found


def _repeated_nats(group: Group) -> float:
    """How unlikely the group's repeated episodes were, each time but the first."""
    return sum(sum(sorted(found)[:-1]) for found in _surprises(group).values())


def _slot(named: GroupKey) -> tuple[str, int, int]:
    return (named.host, named.sweep, named.group)


def _refuse(reason: Reason, where: str, what: str) -> NoReturn:
    raise GroupRefusedError(reason, f"{where}: {what}")
