"""Sizes that references, kernels and whoever plans for them agree on. Imports nothing: planners run where there is no MLX."""

from typing import Final

BITS: Final = 8
GROUP_SIZE: Final = 64
PAGE_TOKENS: Final = 32
"""Tokens of a page of keys and values."""
RANGE_PAGES: Final = 16
"""Attention is summed over ranges of this many pages, always the same ones, and the ranges are merged in order."""
SORT_EXPERTS_FROM: Final = 64
"""When expert rows are sorted, so that rows of one expert share its weights, it is from this many on."""
SUM_WORDS: Final = 128
"""Words of the vocabulary whose probabilities are summed up first; the sums of such blocks come second."""
ONE_SUM_WORDS: Final = 1024
"""Probabilities of a vocabulary of at most so many words are summed up without such blocks, where plain ops do it."""
ATTENTION_BYTES: Final = 64 << 20
"""What the plain attention may take beside its arguments: more tiles than fit are computed one block after the other."""
