"""How wide a sweep a Mac's memory allows: what weights, pages, tails and one step take, and how many groups that leaves room for.

Pure arithmetic on a model's shapes; what a Mac has is read by the engine. Paged, an episode takes the pages of its own
tokens and a share of its group's prompt; the dense cache of a batch takes the longest episode for every row.
"""

from dataclasses import dataclass
from typing import Final

from metal.sizes import ATTENTION_BYTES, PAGE_TOKENS
from stoa.weights.layout import Layout
from worker_mac.model_config import ModelConfig

USUAL_GROUPS: Final = 8
"""As wide as a sweep is where nothing else is known."""
CACHE_BYTES: Final = 64 << 20
"""Buffers MLX may keep for reuse; its default fills a Mac's memory."""
MARGIN_BYTES: Final = 64 << 20
"""Small arrays, and what the allocator rounds up."""
SPARE_BYTES: Final = ATTENTION_BYTES + CACHE_BYTES + MARGIN_BYTES
"""What a step takes on any Mac, whatever its layers are, beside weights and pages."""
_MOST_ELEMENTS: Final = 2**31 - 1
"""Of one array: MLX's indices are 32 bits wide."""


@dataclass(frozen=True, slots=True)
class ModelBytes:
    """What one model takes. A step's temporaries are `token_bytes` a token fed and `row_bytes` a row sampled from."""

    weights_bytes: int
    page_bytes: int
    slot_bytes: int
    token_bytes: int
    row_bytes: int
    page_elements: int
    """Of one page in one array."""


def model_bytes(config: ModelConfig, layout: Layout, *, item_bytes: int, activation_bytes: int) -> ModelBytes:
    """Of a model whose keys and values take `item_bytes` each, and whose activations `activation_bytes`."""
    num_attention = len(config.attention_layers)
    page_elements = config.num_kv_heads * PAGE_TOKENS * config.head_size
    num_conv = config.num_layers - num_attention
    top_k = max(1, config.experts_per_token)
    # Widest part inside a block, of all experts of a token together.
    blocks = [spec.shape for spec in layout.tensors if spec.name.endswith(("gate_proj.weight", "feed_forward.w1.weight"))]
    inner_size = max(shape[-2] * (top_k if len(shape) == 3 else 1) for shape in blocks)
    return ModelBytes(
        weights_bytes=layout.num_bytes,
        page_bytes=2 * num_attention * page_elements * item_bytes,
        slot_bytes=num_conv * (config.conv_kernel - 1) * config.hidden_size * activation_bytes,
        token_bytes=(3 * inner_size + (2 * top_k + 6) * config.hidden_size) * activation_bytes,
        row_bytes=config.vocab_size * (3 * 4 + 1),
        page_elements=page_elements,
    )


@dataclass(frozen=True, slots=True)
class Play:
    """What is to be played: groups of `group_size` episodes of at most `longest_tokens`, prompts of `prompt_tokens`.

    `mean_tokens`: mean length an episode is expected to have at the widest moment; 0 for not known, then it is the longest.
    """

    group_size: int
    longest_tokens: int
    prompt_tokens: int = 0
    mean_tokens: int = 0

    @property
    def group_pages(self) -> int:
        """Pages of one group: the prompt's once, the rest for each episode, each episode's last page half full."""
        tokens = min(self.mean_tokens or self.longest_tokens, self.longest_tokens)
        shared = max(0, self.prompt_tokens - 1) // PAGE_TOKENS
        own = -(-tokens // PAGE_TOKENS) + (1 if 0 < self.mean_tokens < self.longest_tokens else 0) - shared
        return shared + 1 + self.group_size * max(1, own)

    @property
    def least_pages(self) -> int:
        """The smallest pool in which every episode ends; see `schedule.least_pages`."""
        return -(-self.longest_tokens // PAGE_TOKENS) + 2


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """A sweep of `groups` groups at once: its arrays and what they take."""

    groups: int
    num_pages: int
    max_rows: int
    weights_bytes: int
    pool_bytes: int
    tails_bytes: int
    step_bytes: int

    @property
    def total_bytes(self) -> int:
        """Everything."""
        return self.weights_bytes + self.pool_bytes + self.tails_bytes + self.step_bytes


def plan_memory(model: ModelBytes, play: Play, *, most_groups: int, memory_bytes: int | None, step_tokens: int = 0) -> MemoryPlan:
    """The widest plan of at most `most_groups` groups within `memory_bytes`; one group where even that does not fit.

    A group that does not fit is played all the same, in the pages that there are, its episodes after one another;
    but weights and the least of pools are never refused here. `step_tokens`: most tokens fed in a step; 0: one a row.
    """
    for groups in range(most_groups, 0, -1):
        found = _plan(model, play, groups, 1 + groups * play.group_pages, step_tokens)
        if memory_bytes is None or found.total_bytes <= memory_bytes:
            return found
    least = _plan(model, play, 1, play.least_pages, step_tokens)
    spare = 0 if memory_bytes is None else max(0, memory_bytes - least.total_bytes) // model.page_bytes
    return _plan(model, play, 1, play.least_pages + spare, step_tokens)


def _plan(model: ModelBytes, play: Play, groups: int, num_pages: int, step_tokens: int) -> MemoryPlan:
    num_pages = min(max(num_pages, play.least_pages), _MOST_ELEMENTS // model.page_elements)
    rows = groups * play.group_size
    slots = 2 + rows + groups
    step = _step_bytes(model, rows, step_tokens)
    return MemoryPlan(groups, num_pages, rows, model.weights_bytes, num_pages * model.page_bytes, slots * model.slot_bytes, step)


def _step_bytes(model: ModelBytes, rows: int, step_tokens: int) -> int:
    # The head's arrays are there when those of the layers are gone.
    largest = max(max(step_tokens, rows) * model.token_bytes, rows * model.row_bytes)
    return largest + SPARE_BYTES


def most_episodes(model: ModelBytes, play: Play, memory_bytes: int, *, paged: bool) -> int:
    """Episodes that can be played at once, with pages or with a dense cache, in which every row takes the longest episode."""
    num = 0
    while num < 1 << 16:
        rows = num + 1
        if paged:
            groups = -(-rows // play.group_size)
            shared = max(0, play.prompt_tokens - 1) // PAGE_TOKENS + 1
            own = (play.group_pages - shared) // play.group_size
            cache = (1 + groups * shared + rows * own) * model.page_bytes + (2 + rows + groups) * model.slot_bytes
        else:
            cache = rows * (-(-play.longest_tokens // PAGE_TOKENS) * model.page_bytes + model.slot_bytes)
        if model.weights_bytes + cache + _step_bytes(model, rows, 0) > memory_bytes:
            return num
        num = rows
    return num
