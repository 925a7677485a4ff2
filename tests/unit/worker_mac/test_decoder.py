import mlx.core as mx
import numpy as np
import pytest

from metal.sizes import PAGE_TOKENS
from stoa.contracts.errors import GpuInterruptedError, WeightsError
from tests.unit.worker_mac.policies import TINY, WIDE, model_of, random_state
from tests.unit.worker_mac.tasks import Dialogue, play
from worker_mac.cache import Cache
from worker_mac.decoder import Decoder
from worker_mac.forced import Forced, check_batching
from worker_mac.model import Feed, Model
from worker_mac.sampler import Sampling, seed_of
from worker_mac.sweep import Casting

NUMBERS = np.random.default_rng(2)
PROMPTS = [NUMBERS.integers(0, 256, size).astype(np.int32) for size in (12, 1, 30, 5)]
LONG = NUMBERS.integers(0, 256, 600).astype(np.int32)


@pytest.fixture(scope="module", params=[TINY, WIDE], ids=["tiny", "wide"])
def model(request: pytest.FixtureRequest) -> Model:
    return model_of(request.param, random_state(request.param, spread=0.08))


def last_logits(model: Model, ids: np.ndarray) -> np.ndarray:
    """Logits after a whole sequence, fed alone token by token."""
    return Forced(model, 1, len(ids)).walk(ids[None])[-1, 0]


@pytest.mark.parametrize("pad_to", [1, 16], ids=["rows as they come", "rows in sixteens"])
def test_stretches_of_any_length_end_as_if_fed_alone_token_by_token(model: Model, pad_to: int) -> None:
    rows = Forced(model, 4, 64, pad_to=pad_to)
    found = rows.feed(PROMPTS)
    for row, prompt in enumerate(PROMPTS):
        np.testing.assert_array_equal(found[row], last_logits(model, prompt))


def test_sequences_fed_in_any_company_and_order_have_the_same_logits(model: Model) -> None:
    rows = Forced(model, 4, 64)
    rows.feed([PROMPTS[2][:7], PROMPTS[0][:11], PROMPTS[3][:1]], [2, 0, 3])
    rows.feed([PROMPTS[1], PROMPTS[2][7:8], PROMPTS[3][1:4]], [1, 2, 3])
    one = rows.feed([PROMPTS[3][4:], PROMPTS[0][11:]], [3, 0])
    two = rows.feed([PROMPTS[2][8:]], [2])
    np.testing.assert_array_equal(one[0], last_logits(model, PROMPTS[3]))
    np.testing.assert_array_equal(one[1], last_logits(model, PROMPTS[0]))
    np.testing.assert_array_equal(two[0], last_logits(model, PROMPTS[2]))


def test_a_short_row_is_the_same_beside_one_of_many_pages_and_ranges(model: Model) -> None:
    """600 tokens are 19 pages in two ranges; tiles, tables and ranges of the batch differ, the row's bits do not."""
    rows = Forced(model, 3, 640)
    rows.feed([LONG[:530], PROMPTS[0][:5], LONG[:40]])
    rows.feed([LONG[530:599], PROMPTS[0][5:11], LONG[40:41]])
    found = rows.feed([LONG[599:], PROMPTS[0][11:], LONG[41:42]])
    np.testing.assert_array_equal(found[1], last_logits(model, PROMPTS[0]))
    np.testing.assert_array_equal(found[2], last_logits(model, LONG[:42]))
    alone = Forced(model, 1, 640)
    alone.feed([LONG[:300]])
    alone.feed([LONG[300:598]])
    alone.feed([LONG[598:599]])
    np.testing.assert_array_equal(found[0], alone.feed([LONG[599:]])[0])


def test_self_test_passes_on_a_right_model(model: Model) -> None:
    check_batching(model)


class FirstRowsPosition(Model):
    """Rotates every row by the position of the first one, as engines with a single rope offset do."""

    def _rotate(self, x: mx.array, feed: Feed) -> mx.array:
        first = tuple(mx.broadcast_to(part[:1], part.shape) for part in feed.turns)
        return super()._rotate(x, Feed(**{name: getattr(feed, name) for name in Feed.__slots__} | {"turns": first}))


class OthersPages(Model):
    """Reads the pages of another sequence where a batch has several."""

    def _attend(self, index: int, weights: object, x: mx.array, feed: Feed, cache: Cache) -> mx.array:
        tiles = tuple(type(tile)(tile.tables[::-1], tile.lengths, tile.queries) for tile in feed.tiles)
        return super()._attend(index, weights, x, Feed(**{name: getattr(feed, name) for name in Feed.__slots__} | {"tiles": tiles}), cache)


@pytest.mark.parametrize("wrong", [FirstRowsPosition, OthersPages])
def test_self_test_finds_rows_that_depend_on_their_batch(wrong: type[Model]) -> None:
    right = model_of(TINY, random_state(TINY))
    with pytest.raises(WeightsError, match="rows"):
        check_batching(wrong(right.config, right._arrays))


def test_appending_to_pages_copies_no_pool() -> None:
    """A pool of 50 MB: steps, copies of pages and slots among them, must take next to nothing beside it."""
    model = model_of(TINY, random_state(TINY))
    rows = Forced(model, 8, 64)
    rows.decoder = Decoder(model, 6000, 9)
    pool_bytes = rows.decoder.num_cache_bytes
    assert pool_bytes > 48_000_000
    rows.feed([PROMPTS[0]] * 8)
    mx.synchronize()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    for step in range(8):
        rows.decoder._cache.copy([(1, 5000 + step), (3, 4000 + step)], [(1, 2)])
        rows.feed([PROMPTS[0][step : step + 1]] * 8)
        rows.feed([PROMPTS[0][:3]] * 2, [0, 5])
    assert mx.get_peak_memory() - before < pool_bytes / 20


def test_copies_of_pages_and_slots_are_read_before_any_is_written() -> None:
    model = model_of(TINY, random_state(TINY))
    cache = Cache(model.cache_shape, 4, 4)
    layer = model.cache_shape.attention_layers[0]
    tails = model.cache_shape.conv_layers[0]
    for number in range(1, 4):
        cache.keys[layer][number] = number
        cache.tails[tails][number] = number
    cache.copy([(1, 2), (2, 3)], [(2, 1), (1, 3)])
    assert cache.keys[layer][:, 0, 0, 0].tolist() == [0, 1, 1, 2]
    assert cache.tails[tails][:, 0, 0].tolist() == [0, 2, 2, 1]


def test_memory_after_sweeps_is_what_it_was_before() -> None:
    model = model_of(TINY, random_state(TINY))
    castings = [Casting(group, str(group), seed_of(group, episode)) for group in range(4) for episode in range(8)]
    play(model, Dialogue(), castings)
    mx.synchronize()
    before = mx.get_active_memory()
    for _ in range(3):
        play(model, Dialogue(), castings)
    mx.synchronize()
    assert mx.get_active_memory() == before


def test_a_temperature_and_filters_are_drawn_by_and_their_logprob_is_given() -> None:
    model = model_of(TINY, random_state(TINY, spread=0.08))
    rows = Forced(model, 2, 64)
    logits = rows.feed([PROMPTS[0][:-1], PROMPTS[2][:-1]])
    logits = rows.feed([PROMPTS[0][-1:], PROMPTS[2][-1:]])
    work = Forced(model, 2, 64)._work([PROMPTS[0], PROMPTS[2]], None)
    decoder = Decoder(model, 1 + 2 * (64 // PAGE_TOKENS), 3, sampling=Sampling(temperature=0.5, top_k=3))
    drawn = decoder.step(work, np.array([0.999, 0.0], np.float32))
    for row, uniform in ((0, 0.999), (1, 0.0)):
        wide = logits[row].astype(np.float64) / 0.5
        kept = np.sort(np.argsort(-wide, kind="stable")[:3])
        weights = np.exp(wide[kept] - wide[kept].max())
        index = int(np.flatnonzero(np.cumsum(weights) > uniform * weights.sum())[0])
        assert drawn.tokens[row] == kept[index]
        np.testing.assert_allclose(drawn.logprobs[row], np.log(weights[index] / weights.sum()), atol=1e-4)


def test_work_that_the_system_ended_is_told_from_other_failures() -> None:
    class Ending(Model):
        words = "[METAL] Command buffer execution failed: Impacting Interactivity (0000000e)"

        def hidden(self, feed: Feed, cache: Cache, routes: list[mx.array] | None = None) -> mx.array:
            raise RuntimeError(self.words)

    right = model_of(TINY, random_state(TINY))
    rows = Forced(right, 1, 32)
    rows.decoder._model = Ending(right.config, right._arrays)
    with pytest.raises(GpuInterruptedError, match="Impacting"):
        rows.decoder.step(rows._work([PROMPTS[0]], None), np.zeros(1, np.float32))
    Ending.words = "shapes do not match"
    with pytest.raises(RuntimeError, match="shapes"):
        rows.decoder.step(rows._work([PROMPTS[0]], None), np.zeros(1, np.float32))
