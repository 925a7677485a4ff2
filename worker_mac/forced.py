"""Sequences that are fed given tokens and sampled from by nobody: what self-tests and comparisons look at a model with.

Pages and slots are dealt out once; nothing is parked, shared or scheduled.

Legend: S sequences, V vocabulary.
"""

from collections.abc import Callable, Sequence
from typing import Final, Protocol

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from metal.sizes import PAGE_TOKENS
from stoa.contracts.errors import WeightsError
from worker_mac.decoder import Decoder
from worker_mac.model import Model
from worker_mac.plan import Ints, Work

APPEND_POOL_BYTES: Final = 64 << 20
MAX_GROWTH: Final = 0.05
"""Share of that pool that steps may take beside it."""


class LogitRows(Protocol):
    """Gives the logits after a piece of work; see `Decoder.logits`."""

    def logits(self, work: Work) -> NDArray[np.float32]: ...  # noqa: D102


MakeRows = Callable[[int, int], LogitRows]
"""From numbers of pages and slots."""


class Forced:
    """`num_sequences` sequences of at most `max_tokens` tokens each."""

    def __init__(
        self, model: Model, num_sequences: int, max_tokens: int, *, make: MakeRows | None = None, pad_to: int | None = None
    ) -> None:
        """make: what computes over so many pages and slots, in place of a decoder on this machine alone."""
        num_pages = -(-max_tokens // PAGE_TOKENS)
        size = 1 + num_sequences * num_pages, 1 + num_sequences
        self.decoder: LogitRows = Decoder(model, *size, pad_to=pad_to) if make is None else make(*size)
        self._tables = 1 + np.arange(num_sequences * num_pages, dtype=np.int32).reshape(num_sequences, num_pages)
        self.lengths = np.zeros(num_sequences, np.int32)
        """Tokens fed so far."""

    def feed(self, tokens: Sequence[Ints], sequences: Sequence[int] | None = None) -> NDArray[np.float32]:
        """Append tokens to sequences (all, unless given) in one step; the logits after each one's last: float32 [S, V]."""
        return self.decoder.logits(self._work(tokens, sequences))

    def walk(self, tokens: Ints) -> NDArray[np.float32]:
        """Append tokens [S, T] one by one to all sequences; the logits after each: float32 [T, S, V]."""
        return np.stack([self.feed(list(column[:, None])) for column in tokens.T])

    def _work(self, tokens: Sequence[Ints], sequences: Sequence[int] | None) -> Work:
        chosen = np.arange(len(self.lengths)) if sequences is None else np.array(sequences, np.intp)
        starts, counts = self.lengths[chosen].copy(), np.array([len(ids) for ids in tokens], np.int32)
        self.lengths[chosen] += counts
        return Work(
            chosen, starts, counts, np.ones(len(chosen), bool), np.concatenate(tokens).astype(np.int32), self._tables[chosen],
            (chosen + 1).astype(np.int32),
        )  # fmt: skip


def check_batching(model: Model, make: MakeRows | None = None) -> None:
    """Raise WeightsError unless rows of unequal length in one batch get the logits each gets alone. make: see `Forced`.

    Faults of offsets and padding in a batch have shipped in public engines; this takes milliseconds at each join.
    """
    numbers = np.random.default_rng(0)
    vocabulary = model.config.vocab_size
    prompts = [numbers.integers(0, vocabulary, size).astype(np.int32) for size in (3, 12, 7)]
    forced = numbers.integers(0, vocabulary, (len(prompts), 4)).astype(np.int32)
    together = _forced_logits(model, prompts, forced, make)
    alone = [_forced_logits(model, [prompt], forced[row : row + 1], make) for row, prompt in enumerate(prompts)]
    difference = float(np.abs(together - np.concatenate(alone, axis=1)).max())
    tolerance = 1e-3 if model.dtype == mx.float32 else 0.25
    if not difference <= tolerance:
        raise WeightsError(
            f"logits of a batch's rows differ by {difference:.3g} from those of the same rows alone",
            hint="this MLX computes batches wrongly: install the version that the extra `mac` names",
        )


def check_appends(model: Model) -> None:
    """Raise WeightsError unless steps write into the pool where it lies.

    An MLX that copies it instead needs twice the memory and a pass over it in each step, without a word.
    """
    rows = Forced(model, 4, 64)
    rows.decoder = Decoder(model, 1 + APPEND_POOL_BYTES // model.cache_shape.page_bytes, 5)
    token = [np.zeros(1, np.int32)] * 4
    rows.feed(token)
    mx.synchronize()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    for _ in range(8):
        rows.feed(token)
    grown = mx.get_peak_memory() - before
    if grown > APPEND_POOL_BYTES * MAX_GROWTH:
        raise WeightsError(
            f"8 steps on a pool of {APPEND_POOL_BYTES} bytes took {grown} bytes beside it: it is copied",
            hint="this MLX needs twice the memory: install the version that the extra `mac` names",
        )


def _forced_logits(model: Model, prompts: Sequence[Ints], forced: Ints, make: MakeRows | None = None) -> NDArray[np.float32]:
    """Logits of rows that are fed `forced` [S, T] after their prompts, in bites of 5: [T, S, V]."""
    rows = Forced(model, len(prompts), 64, make=make)
    for start in range(0, max(len(prompt) for prompt in prompts), 5):
        fed = [row for row, prompt in enumerate(prompts) if len(prompt) > start]
        rows.feed([prompts[row][start : start + 5] for row in fed], fed)
    return rows.walk(forced)
