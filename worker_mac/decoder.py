"""Rows of a batch bound to a model: start from prompts, feed several tokens, step all rows by one token, keep some.

What the tokens mean and which row plays which episode is the sweep's business. All calls come from one thread, and
nothing here gives out an `mx.array`: results are numpy arrays, so no caller can pin a cache.

Legend: R rows, S rows fed, W most tokens of one row, N tokens fed.
"""

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from stoa.contracts.errors import WeightsError
from worker_mac.model import Feed, Model
from worker_mac.sampler import draw

Ids = NDArray[np.int32]


class Decoder:
    """One batch. `positions[r]`: tokens that row r's cache holds."""

    def __init__(self, model: Model, *, feed_tokens: int = 4096, record_routing: bool = False) -> None:
        self._model = model
        self._feed_tokens = feed_tokens
        config = model.config
        num_layers = config.num_layers - config.num_dense_layers if record_routing and config.num_experts else 0
        # Experts of every token fed, uint8 [R, capacity, MoE layers, K]; without recording there are no layers.
        self._routes = np.zeros((0, 0, num_layers, config.experts_per_token), np.uint8)
        self._cache = model.new_cache(0)
        self.positions: Ids = np.zeros(0, np.int32)
        self._rows = mx.array(self.positions)

    def begin(self, prompts: Sequence[Ids], rows: NDArray[np.intp]) -> int:
        """Feed all but the last token of each prompt once; then row r continues prompt `rows[r]`.

        Returns the number of tokens fed. Each row's first step is given its prompt's last token.
        """
        self._cache = self._model.new_cache(len(prompts))
        self._routes = np.zeros((len(prompts), 0, *self._routes.shape[2:]), np.uint8)
        self.positions = np.zeros(len(prompts), np.int32)
        everyone = np.arange(len(prompts))
        self.feed(everyone, [prompt[:-1] for prompt in prompts])
        num_fed = int(self.positions.sum())
        self.keep(rows)
        return num_fed

    def feed(self, rows: NDArray[np.intp], tokens: Sequence[Ids]) -> None:
        """Give row `rows[i]` the tokens `tokens[i]`, without sampling; in bites of at most `feed_tokens` tokens."""
        done = np.zeros(len(rows), np.int64)
        sizes = np.array([len(ids) for ids in tokens], np.int64)
        while (left := sizes - done).any():
            bites = np.minimum(left, np.maximum(self._feed_tokens - (np.cumsum(left) - left), 0))
            fed = np.flatnonzero(bites)
            bite = [tokens[i][int(done[i]) : int(done[i] + bites[i])] for i in fed.tolist()]
            self._feed_once(rows[fed], bite)
            done += bites

    def _feed_once(self, rows: NDArray[np.intp], tokens: Sequence[Ids]) -> None:
        counts_S = np.array([len(ids) for ids in tokens], np.int32)
        width = int(counts_S.max())
        starts_S = self.positions[rows]
        offsets_S = np.cumsum(counts_S, dtype=np.int32) - counts_S
        columns_W = np.arange(width, dtype=np.int32)
        real_SW = columns_W < counts_S[:, None]
        padded_SW = offsets_S[:, None] + np.minimum(columns_W, counts_S[:, None] - 1)
        ragged = not bool(real_SW.all())
        self._reserve(int((starts_S + counts_S).max()))
        slots_N, places_N = np.repeat(rows, counts_S).astype(np.int32), (starts_S[:, None] + columns_W)[real_SW]
        feed = Feed(
            tokens=mx.array(np.concatenate(tokens)),
            slots=mx.array(slots_N),
            positions=mx.array(places_N),
            starts=mx.array(starts_S),
            width=width,
            rows=mx.array(rows.astype(np.int32)),
            padded=mx.array(padded_SW) if ragged else None,
            packed=mx.array(np.flatnonzero(real_SW).astype(np.int32)) if ragged else None,
            counts=mx.array(counts_S) if ragged else None,
        )
        routes = self._new_routes()
        self._model.hidden(feed, self._cache, routes)
        mx.eval(routes or [], self._cache.arrays())
        self._keep_routes(routes, slots_N, places_N)
        self.positions[rows] += counts_S

    def step(self, tokens: Ids, uniform: NDArray[np.float32], active: NDArray[np.bool_]) -> tuple[Ids, NDArray[np.float32]]:
        """Give every active row one token and draw its next: int32 [R], float32 [R], bool [R] -> int32 [R], float32 [R].

        Inactive rows keep their state; what is returned for them means nothing.
        """
        routes = self._new_routes()
        drawn, logprobs = draw(self._logits(tokens, active, routes), mx.array(uniform))
        mx.eval(drawn, logprobs, routes or [], self._cache.arrays())
        self._keep_routes(routes, np.arange(len(tokens), dtype=np.int32), self.positions)
        self.positions += active
        return np.array(drawn), np.array(logprobs)

    def logits(self, tokens: Ids) -> NDArray[np.float32]:
        """Give every row one token and return what its next would be drawn from: int32 [R] -> float32 [R, V]."""
        found = self._logits(tokens, np.ones(len(tokens), bool))
        mx.eval(found, self._cache.arrays())
        self.positions += 1
        return np.array(found)

    def routing(self, row: int, num_tokens: int) -> NDArray[np.uint8] | None:
        """Experts of the first `num_tokens` tokens of a row: uint8 [T, MoE layers, K]; None if they are not recorded.

        The last token of an episode is sampled but never fed: it gets experts 0 .. K - 1, which nobody uses.
        """
        if not self._routes.shape[2]:
            return None
        found = np.empty((num_tokens, *self._routes.shape[2:]), np.uint8)
        found[:] = np.arange(self._routes.shape[3], dtype=np.uint8)
        num_fed = min(num_tokens, int(self.positions[row]))
        found[:num_fed] = self._routes[row, :num_fed]
        return found

    def _new_routes(self) -> list[mx.array] | None:
        return [] if self._routes.shape[2] else None

    def _keep_routes(self, routes: list[mx.array] | None, slots: Ids, positions: Ids) -> None:
        if routes:
            self._routes[slots, positions] = np.stack([np.array(layer) for layer in routes], axis=1)

    def _reserve(self, num_tokens: int) -> None:
        self._cache.reserve(num_tokens)
        missing = self._cache.capacity - self._routes.shape[1]
        if missing > 0:
            self._routes = np.pad(self._routes, ((0, 0), (0, missing), (0, 0), (0, 0)))

    def _logits(self, tokens: Ids, active: NDArray[np.bool_], routes: list[mx.array] | None = None) -> mx.array:
        self._reserve(int(self.positions.max()) + 1)
        places = mx.array(self.positions)
        feed = Feed(
            tokens=mx.array(tokens),
            slots=self._rows,
            positions=places,
            starts=places,
            width=1,
            active=None if active.all() else mx.array(active),  # pyright: ignore[reportArgumentType] - MLX takes bools
        )
        return self._model.logits(self._model.hidden(feed, self._cache, routes))

    def keep(self, rows: NDArray[np.intp]) -> None:
        """Go on with these rows only, in this order; a row named twice is copied."""
        self._cache.take(mx.array(rows.astype(np.int32)))
        mx.eval(self._cache.arrays())
        self.positions, self._routes = self.positions[rows].copy(), self._routes[rows]
        self._rows = mx.arange(len(rows), dtype=mx.int32)

    @property
    def num_cache_bytes(self) -> int:
        """Bytes of the batch's cache."""
        return self._cache.num_bytes


def check_batching(model: Model) -> None:
    """Raise WeightsError unless rows of unequal length in one batch get the logits each gets alone.

    Faults of offsets and padding in a batch have shipped in public engines; this takes milliseconds at each join.
    """
    numbers = np.random.default_rng(0)
    vocabulary = model.config.vocab_size
    prompts = [numbers.integers(0, vocabulary, size).astype(np.int32) for size in (3, 12, 7)]
    forced = numbers.integers(0, vocabulary, (4, len(prompts))).astype(np.int32)
    together = _forced_logits(model, prompts, forced)
    alone = [_forced_logits(model, [prompt], forced[:, row : row + 1]) for row, prompt in enumerate(prompts)]
    difference = float(np.abs(together - np.concatenate(alone, axis=1)).max())
    tolerance = 1e-3 if model.dtype == mx.float32 else 0.25
    if not difference <= tolerance:
        raise WeightsError(
            f"logits of a batch's rows differ by {difference:.3g} from those of the same rows alone",
            hint="this MLX computes batches wrongly: install the version that the extra `mac` names",
        )


def _forced_logits(model: Model, prompts: Sequence[Ids], forced: Ids) -> NDArray[np.float32]:
    """Logits of rows that are fed `forced` [steps, R] after their prompts: [steps, R, V]."""
    rows = Decoder(model, feed_tokens=5)
    rows.begin(prompts, np.arange(len(prompts)))
    return np.stack([rows.logits(ids) for ids in forced])
