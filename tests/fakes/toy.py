"""A tiny honest world for tests of admission and replay: a task played on small integers, and Macs that play it.

Ids: prompts are 1 and the question's number; a turn is digits and the stop id 9; a turn that begins with 7 calls the
tool, which answers 40, its second id, 41; any other turn ends the episode, and earns 1 if it begins with 5.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from stoa.bucket import keys
from stoa.contracts.errors import StoaError, UnknownNameError
from stoa.rollouts.admit import Replayed, Rules
from stoa.rollouts.records import Episode, Fingerprint, Group, Timings, Turn

STOP = 9
RUN = "toy"
STATE_IDS = {version: f"{version:064x}" for version in range(12)}


class OverError(StoaError):
    """A turn after the end."""


def prompt_ids_of(question_id: str) -> tuple[int, ...]:
    if not question_id.startswith("q"):
        raise UnknownNameError(f"no question {question_id}")
    return (1, 100 + int(question_id[1:]))


def rescore(question_id: str, turns: Sequence[Sequence[int]]) -> Replayed:
    appended: list[tuple[int, ...]] = []
    for number, turn in enumerate(turns):
        calls = turn[0] == 7
        if not calls and number < len(turns) - 1:
            raise OverError("the episode was over")
        appended.append((40, turn[1], 41) if calls else ())
    last = turns[-1]
    return Replayed(appended, float(last[0] == 5), {"searched": float(len(turns) > 1)}, last[0] != 7)


def rules(**changes: object) -> Rules:
    settings: dict = {
        "run": RUN,
        "vocab_size": 256,
        "min_group_size": 4,
        "group_size": 8,
        "max_turns": 3,
        "max_turn_tokens": 5,
        "max_episode_tokens": 40,
        "stop_ids": frozenset({STOP}),
        "known": STATE_IDS.get,
    }
    return Rules(**{**settings, **changes})


def episode(question_id: str, turns: Sequence[Sequence[int]], logprob: float = -0.5, reward: float | None = None) -> Episode:
    """An honest episode of these sampled turns, each token with the same logprob."""
    ids = list(prompt_ids_of(question_id))
    spans = []
    replies = rescore(question_id, turns)
    for number, turn in enumerate(turns):
        spans.append(Turn(len(ids), len(ids) + len(turn), turn[-1] == STOP))
        ids += turn
        if number < len(turns) - 1:
            ids += replies.appended[number]
    mask = np.zeros(len(ids), np.uint8)
    for span in spans:
        mask[span.start : span.end] = 1
    return Episode(
        question_id=question_id,
        ids=np.array(ids, np.int32),
        mask=mask,
        logprobs=np.full(int(mask.sum()), logprob, np.float32),
        turns=tuple(spans),
        reward=replies.reward if reward is None else reward,
        reward_parts=dict(replies.parts),
        stop_reason="answered",
        seconds=0.25,
    )


RIGHT = ((7, 3, STOP), (5, 2, STOP))
WRONG = ((6, 2, STOP),)


def group(
    *,
    question_id: str = "q1",
    host: str = "mac-a",
    sweep: int = 0,
    index: int = 0,
    version: int = 3,
    plays: Sequence[Sequence[Sequence[int]]] = (RIGHT, WRONG, RIGHT, WRONG),
    logprob: float = -0.5,
    run: str = RUN,
) -> Group:
    """An honest group: its episodes play `plays`."""
    return Group(
        run=run,
        host=host,
        sweep=sweep,
        group=index,
        purpose="train",
        question_id=question_id,
        version=version,
        state_id=STATE_IDS.get(version, ""),
        temperature=1.0,
        seed=17,
        episodes=tuple(episode(question_id, play, logprob) for play in plays),
        fingerprint=Fingerprint("toy 1", "0.1.0"),
        timings=Timings(1000.0, 2.0, 0.5, 0.25, 12),
    )


def key_of(played: Group) -> str:
    return keys.group(played.run, played.version, played.host, played.sweep, played.group)


def with_version(played: Group, version: int) -> Group:
    return replace(played, version=version)


def with_reward(played: Group, reward: float) -> Group:
    """The group as if every episode had earned `reward`."""
    return replace(played, episodes=tuple(replace(e, reward=reward) for e in played.episodes))
