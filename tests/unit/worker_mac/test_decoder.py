import mlx.core as mx
import numpy as np
import pytest

from stoa.contracts.errors import WeightsError
from tests.unit.worker_mac.policies import TINY, WIDE, model_of, random_state
from worker_mac.decoder import Decoder, check_batching
from worker_mac.model import Feed, Model

NUMBERS = np.random.default_rng(2)
PROMPTS = [NUMBERS.integers(0, 256, size).astype(np.int32) for size in (12, 1, 30, 5)]


@pytest.fixture(scope="module", params=[TINY, WIDE], ids=["tiny", "wide"])
def model(request: pytest.FixtureRequest) -> Model:
    return model_of(request.param, random_state(request.param, spread=0.08))


def last_logits(model: Model, ids: np.ndarray) -> np.ndarray:
    """Logits after a whole sequence, fed alone token by token."""
    rows = Decoder(model)
    rows.begin([ids[:1]], np.array([0]))
    return [rows.logits(ids[t : t + 1]) for t in range(len(ids))][-1][0]


@pytest.mark.parametrize("feed_tokens", [1, 7, 4096])
def test_ragged_prompts_fed_in_bites_end_as_if_fed_alone(model: Model, feed_tokens: int) -> None:
    rows = Decoder(model, feed_tokens=feed_tokens)
    num_fed = rows.begin(PROMPTS, np.arange(4))
    assert num_fed == 11 + 0 + 29 + 4
    found = rows.logits(np.array([prompt[-1] for prompt in PROMPTS], np.int32))
    for row, prompt in enumerate(PROMPTS):
        np.testing.assert_array_equal(found[row], last_logits(model, prompt))


def test_rows_of_one_prompt_go_separate_ways(model: Model) -> None:
    rows = Decoder(model)
    rows.begin(PROMPTS[:1], np.zeros(3, np.intp))
    forced = np.array([[PROMPTS[0][-1]] * 3, [1, 2, 3], [4, 4, 4]], np.int32)
    found = [rows.logits(ids) for ids in forced][-1]
    for row in range(3):
        whole = np.concatenate([PROMPTS[0], forced[1:, row]])
        np.testing.assert_array_equal(found[row], last_logits(model, whole))


def test_inactive_rows_keep_their_state_while_others_step(model: Model) -> None:
    rows = Decoder(model)
    rows.begin(PROMPTS, np.arange(4))
    active = np.array([True, False, True, False])
    junk, half = np.full(4, 9, np.int32), np.full(4, 0.5, np.float32)
    for _ in range(3):
        rows.step(junk, half, active)
    assert rows.positions.tolist() == [14, 0, 32, 4]
    found = rows.logits(np.array([prompt[-1] for prompt in PROMPTS], np.int32))
    for row in (1, 3):
        np.testing.assert_array_equal(found[row], last_logits(model, PROMPTS[row]))


def test_feeding_some_rows_leaves_the_others_alone(model: Model) -> None:
    rows = Decoder(model)
    rows.begin(PROMPTS, np.arange(4))
    more = NUMBERS.integers(0, 256, 17).astype(np.int32)
    rows.feed(np.array([3, 1]), [more[:4], more])
    found = rows.logits(np.full(4, 7, np.int32))
    wholes = [PROMPTS[0][:-1], np.concatenate([PROMPTS[1][:-1], more]), PROMPTS[2][:-1], np.concatenate([PROMPTS[3][:-1], more[:4]])]
    for row, whole in enumerate(wholes):
        np.testing.assert_array_equal(found[row], last_logits(model, np.append(whole, np.int32(7))))


def test_kept_rows_go_on_in_the_new_order(model: Model) -> None:
    rows = Decoder(model)
    rows.begin(PROMPTS, np.arange(4))
    rows.keep(np.array([2, 0]))
    found = rows.logits(np.array([PROMPTS[2][-1], PROMPTS[0][-1]], np.int32))
    np.testing.assert_array_equal(found, [last_logits(model, PROMPTS[2]), last_logits(model, PROMPTS[0])])


def test_self_test_passes_on_a_right_model(model: Model) -> None:
    check_batching(model)


class FirstRowsPosition(Model):
    """Rotates every row by the position of the first one, as engines with a single rope offset do."""

    def _attend(self, index: int, weights: object, x: mx.array, feed: Feed, cache: object, visible: mx.array) -> mx.array:
        self.first = feed.positions[0]
        return super()._attend(index, weights, x, feed, cache, visible)

    def _rotate(self, x: mx.array, positions: mx.array) -> mx.array:
        return super()._rotate(x, mx.broadcast_to(self.first, positions.shape))


def test_self_test_finds_rows_that_depend_on_their_batch() -> None:
    right = model_of(TINY, random_state(TINY))
    wrong = FirstRowsPosition(right.config, right._arrays)
    with pytest.raises(WeightsError, match="rows"):
        check_batching(wrong)


def test_memory_after_a_batch_is_what_it_was_before() -> None:
    model = model_of(TINY, random_state(TINY))

    def play() -> None:
        rows = Decoder(model)
        rows.begin(PROMPTS, np.repeat(np.arange(4), 8))
        half, active = np.full(32, 0.5, np.float32), np.ones(32, bool)
        tokens = np.full(32, 3, np.int32)
        for step in range(40):
            tokens, _ = rows.step(tokens, half[: len(tokens)], active[: len(tokens)])
            if step == 20:
                rows.keep(np.arange(5))
                tokens = tokens[:5]

    play()
    mx.synchronize()
    before = mx.get_active_memory()
    for _ in range(3):
        play()
    mx.synchronize()
    assert mx.get_active_memory() == before
