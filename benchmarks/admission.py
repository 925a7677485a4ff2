"""`python -m benchmarks.admission --json`: what admission lets through, what it keeps, what that costs, and who is found out.

A thousand mutated objects and honest groups beside them go through `admit` with the demo's environment, one process and
one core; then a fleet of six honest Macs and four that cheat is trained on until the cheats are suspected.
"""

import argparse
import json
import resource
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Final

from benchmarks.hostile import Hostile, hostile_objects, key_of
from benchmarks.sweeps import RUN, Player, demo_environment, demo_layout, first_state
from stoa.bucket.keys import GroupKey
from stoa.config.run import RunConfig
from stoa.contracts.errors import GroupRefusedError
from stoa.rollouts.admit import DuplicateIndex, Rules, admit
from stoa.rollouts.records import Group
from stoa.rollouts.shard import encode_group
from trainer_gpu.referee import Referee, rules_of

NUM_HOSTILE: Final = 1000
NUM_HONEST: Final = 96
GROUP_SIZE: Final = 8
SPEED_ROUNDS: Final = 3


@dataclass(frozen=True, slots=True)
class Judged:
    """What became of the objects."""

    num_hostile: int
    hostile_accepted: int
    accepted_kinds: dict[str, int]
    refused_by_reason: dict[str, int]
    num_honest: int
    honest_refused: int
    slowest_seconds: float
    slowest_kind: str
    mib_more_at_peak: float
    """Growth of the process's largest resident size over all of it."""


def honest_groups(num: int) -> list[Group]:
    """Groups of the demo's base policy, each of another question, as Macs would send them."""
    from benchmarks.sweeps import POLICY
    from trainer_gpu.policy import Policy
    from trainer_gpu.publish import host_tensors

    layout = demo_layout()
    policy = Policy(POLICY, RunConfig().learning, seed=0, layout_id=layout.layout_id)
    state = first_state(layout, host_tensors(policy))
    player = Player(state)
    questions = player.environment.question_ids("train")[:num]
    return player.play(state, questions, group_size=GROUP_SIZE, version=0, sweep=0, seed=0)


class Gatekeeper:
    """`admit` as the trainer calls it; the honest groups' weights are the run's version 0."""

    def __init__(self, honest: list[Group]) -> None:
        environment = demo_environment()
        self.referee = Referee(environment)
        self.state_id = honest[0].state_id
        config = RunConfig(run=RUN)
        self.rules: Rules = rules_of(config, environment, 2048, lambda version: self.state_id if version == 0 else None, self._granted)
        self.seen = DuplicateIndex()
        self._question = ""

    def _granted(self, named: GroupKey) -> str | None:
        return self._question

    def judge(self, key: str, data: bytes, question_id: str) -> str:
        """Why the object is refused, "" if it is not; its slot was granted `question_id`."""
        self._question = question_id
        try:
            admit(data, key, rules=self.rules, prompt_ids_of=self.referee.prompt_ids_of, rescore=self.referee.rescore, seen=self.seen)
        except GroupRefusedError as error:
            return str(error.reason)
        return ""


def judge_all(honest: list[Group], num_hostile: int, seed: int) -> Judged:
    """Honest groups first, then hostile objects made of them, with fresh honest groups in between."""
    half = len(honest) // 2
    keeper = Gatekeeper(honest)
    honest_refused = sum(bool(keeper.judge(key_of(group), encode_group(group), group.question_id)) for group in honest[:half])
    later = iter(honest[half:])
    before = peak_mib()
    accepted: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    slowest = (0.0, "")
    every = max(1, num_hostile // (len(honest) - half))
    num_later = 0
    for number, thing in enumerate(hostile_objects(honest[:half], num_hostile, seed)):
        reason, seconds = _timed(keeper, thing)
        slowest = max(slowest, (seconds, thing.kind))
        reasons[reason or "admitted"] += 1
        accepted[thing.kind] += not reason
        if number % every == 0 and (group := next(later, None)) is not None:
            num_later += 1
            honest_refused += bool(keeper.judge(key_of(group), encode_group(group), group.question_id))
    return Judged(
        num_hostile,
        accepted.total(),
        {kind: num for kind, num in sorted(accepted.items()) if num},
        dict(sorted(reasons.items())),
        half + num_later,
        honest_refused,
        round(slowest[0], 4),
        slowest[1],
        round(peak_mib() - before, 1),
    )


def _timed(keeper: Gatekeeper, thing: Hostile) -> tuple[str, float]:
    started = time.process_time()
    return keeper.judge(thing.key, thing.data, thing.question_id), time.process_time() - started


def groups_per_second(honest: list[Group]) -> float:
    """Honest groups admitted in a second of one core; the best of a few rounds, each with nothing remembered."""
    sent = [(key_of(group), encode_group(group), group.question_id) for group in honest]
    best = 0.0
    for _ in range(SPEED_ROUNDS):
        keeper = Gatekeeper(honest)
        started = time.process_time()
        for key, data, question_id in sent:
            assert not keeper.judge(key, data, question_id)
        best = max(best, len(sent) / (time.process_time() - started))
    return best


def peak_mib() -> float:
    """The process's largest resident size so far."""
    size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return size / (1 << 20) if sys.platform == "darwin" else size / 1024


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object on the last line")
    parser.add_argument("--hostile", type=int, default=NUM_HOSTILE, help="mutated objects")
    parser.add_argument("--seed", type=int, default=0, help="seed of all mutations")
    given = parser.parse_args()
    from benchmarks.distrust import catch

    honest = honest_groups(NUM_HONEST)
    judged = judge_all(honest, given.hostile, given.seed)
    speed = groups_per_second(honest)
    caught = catch(seed=given.seed)
    found = {
        "hostile_accepted": judged.hostile_accepted,
        "honest_refused": judged.honest_refused,
        "groups_per_second": round(speed, 1),
        "peak_mib": round(peak_mib(), 1),
        "sweeps_before_quarantine": caught.sweeps_before_quarantine,
        "honest_quarantined": len(caught.honest_suspected),
        "judged": asdict(judged),
        "fleet": asdict(caught),
        "conditions": f"demo policy and task, {GROUP_SIZE} episodes a group, CPU seconds of one core, {sys.platform}",
    }
    if given.json:
        print(json.dumps(found))
        return
    for name, value in found.items():
        print(f"{name:28} {value}")


if __name__ == "__main__":
    main()
