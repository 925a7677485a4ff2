"""Whole sweeps against two other implementations in fp32: mlx_lm's BatchGenerator, and its plain forward pass over each episode."""

import mlx.core as mx
import numpy as np
import pytest

from benchmarks.stock_sweep import play as play_stock
from stoa.rollouts.records import Episode
from tests.unit.worker_mac.policies import TINY, WIDE, model_of, oracle_of, random_state
from tests.unit.worker_mac.tasks import Dialogue, Fixed, play
from tests.unit.worker_mac.test_schedule import Varied
from worker_mac.sampler import seed_of
from worker_mac.sweep import Casting


class Recorded:
    """Played episodes, to be played again by another engine."""

    def __init__(self, found: dict[int, list[Episode]], environment: object) -> None:
        self.episodes = [episode for group in sorted(found) for episode in found[group]]
        self.prompts = [environment.prompt_ids(str(group)) for group in sorted(found)]
        self.group_size = len(found[0])
        self.stop_ids = environment.stop_ids
        self.turns = [[tuple(e.ids[turn.start : turn.end].tolist()) for turn in e.turns] for e in self.episodes]

    def reply_of(self, episode: int, num_turns: int) -> list[int] | None:
        turns = self.episodes[episode].turns
        if num_turns == len(turns):
            return None
        return self.episodes[episode].ids[turns[num_turns - 1].end : turns[num_turns].start].tolist()


class Short(Varied):
    """Turns of at most nine ids that go on whether or not they were ended, and few ids an episode."""

    limits = type(Varied.limits)(4, 9, 110)


@pytest.mark.parametrize(
    ("config", "environment", "seed", "pages"),
    [(TINY, Dialogue(), 1, None), (WIDE, Varied(70), 2, 40), (TINY, Short(), 3, 14), (WIDE, Short(40), 4, None)],
    ids=["turns", "long prompts, parked", "budgets, parked", "budgets"],
)
def test_random_sweeps_equal_the_full_forward_and_the_batch_generator(config: dict, environment: object, seed: int, pages: int) -> None:
    state = random_state(config, seed=seed, spread=0.08)
    castings = [Casting(group, str(group), seed_of(seed, group, episode)) for group in range(5) for episode in range(4)]
    played, found = play(model_of(config, state), environment, castings, num_pages=pages, pace=Fixed(64))
    assert played.ended
    assert (played.num_parked > 0) == (pages is not None)
    recorded = Recorded(found, environment)
    oracle = oracle_of(config, state, quantised=True)
    stock = play_stock(oracle, recorded)
    assert len({len(e.turns) for e in recorded.episodes}) > 1
    for episode, logprobs in zip(recorded.episodes, stock.logprobs, strict=True):
        logits = oracle(mx.array(episode.ids[None, :-1].astype(np.int64)))[0].astype(mx.float32)
        whole = np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True))
        places = np.flatnonzero(episode.mask)
        np.testing.assert_allclose(episode.logprobs, whole[places - 1, episode.ids[places]], rtol=0, atol=5e-5)
        np.testing.assert_allclose(episode.logprobs, logprobs, rtol=0, atol=5e-5)
