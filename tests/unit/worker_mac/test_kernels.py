"""The engine with every op computed by its kernel on the emulator, against plain ops: a tiny model, head size 64, 4 query heads
a key/value head, in fp32. The same tokens are drawn; logprobs differ by rounding (within 2e-5 nats, stated here).
"""

from typing import get_args

import numpy as np
import pytest

from metal.attention import most_rows
from metal.check import KERNELS
from metal.ops import SWITCHED_OFF
from stoa.config.host import Part
from stoa.rollouts.records import Episode
from tests.metal_emulator.emulator import can_emulate
from tests.unit.worker_mac.emulated import GROUPS, PLAIN, STATE, Launches, episodes
from tests.unit.worker_mac.tasks import Dialogue, Fixed, play
from worker_mac.fingerprint import CONFIG, fixed_model
from worker_mac.model import Model
from worker_mac.model_config import read_model_config
from worker_mac.sampler import seed_of
from worker_mac.sweep import Casting
from worker_mac.weights import LiveWeights

pytestmark = pytest.mark.skipif(not can_emulate(), reason="needs PyPI's ziglang on Linux")

TOLERANCE_NATS = 2e-5


@pytest.fixture(scope="module")
def emulated() -> Launches:
    return Launches()


@pytest.fixture(scope="module")
def together(emulated: Launches) -> list[Episode]:
    return episodes(emulated.model, GROUPS)


def test_kernels_draw_the_tokens_of_plain_ops(emulated: Launches, together: list[Episode]) -> None:
    assert (emulated.model.ops, PLAIN.ops) == ("metal", "plain")
    for ours, plain in zip(together, episodes(PLAIN, GROUPS), strict=True):
        assert ours.ids.tolist() == plain.ids.tolist()
        np.testing.assert_allclose(ours.logprobs, plain.logprobs, atol=TOLERANCE_NATS)
        np.testing.assert_array_equal(ours.routing, plain.routing)
    bodies = (
        "router", "expert_order", "experts_up", "experts_down", "paged_attention", "prefix_attention", "attention_merge", "short_conv",
        "head_partial", "head_pick",
    )  # fmt: skip
    assert set(emulated.names) == {f"stoa_{body}" for body in bodies}


def test_the_owners_switch_names_every_part_and_is_obeyed() -> None:
    assert get_args(Part) == KERNELS
    model = fixed_model(("experts", "conv"))
    reasons = {one.kernel: one.reason for one in model.verdicts}
    assert [kernel for kernel in KERNELS if reasons[kernel] == SWITCHED_OFF] == ["experts", "conv"]


def test_an_episode_alone_has_the_bits_it_has_in_a_group_and_among_others(emulated: Launches, together: list[Episode]) -> None:
    (alone,) = episodes(emulated.model, GROUPS[3:])
    assert alone.ids.tolist() == together[3].ids.tolist()
    assert alone.logprobs.tobytes() == together[3].logprobs.tobytes()


def test_an_episode_that_was_parked_and_fed_again_has_the_same_bits(emulated: Launches) -> None:
    # 64 ids of prompt and 2 drawn: three pages an episode, one of them shared, and six for three episodes.
    castings = [Casting(0, "58", seed_of("kernels", 0, episode)) for episode in range(3)]
    talk = Dialogue(num_turns=1, max_turn_tokens=2, stop_ids=frozenset())
    roomy, wanted = play(emulated.model, talk, castings, num_pages=12, pace=Fixed(64))
    tight, found = play(emulated.model, talk, castings, num_pages=7, pace=Fixed(64))
    assert (roomy.num_parked, tight.num_parked) == (0, 1)
    for one, other in zip(wanted[0], found[0], strict=True):
        assert one.ids.tolist() == other.ids.tolist()
        assert one.logprobs.tobytes() == other.logprobs.tobytes()


class Narrow(Model):
    """Attention that takes three queries at once."""

    def attention_rows(self, num_pages: int) -> int:
        return 3


def test_attention_in_blocks_gives_the_same_bits() -> None:
    narrow = Narrow(read_model_config(CONFIG), LiveWeights.of(STATE).arrays)
    for one, other in zip(episodes(narrow, GROUPS), episodes(PLAIN, GROUPS), strict=True):
        assert one.ids.tolist() == other.ids.tolist()
        assert one.logprobs.tobytes() == other.logprobs.tobytes()


def test_pieces_of_attention_fit_the_memory_that_is_planned_for_them() -> None:
    # 32 heads, head size 64: 33,792 bytes a row for each 512 tokens and each of two lots of pieces; 64 MiB in all.
    assert most_rows(16, 32, 64) == (64 << 20) // (2 * 32 * 66 * 4) == 3971
    assert most_rows(256, 32, 64) == 248
    assert most_rows(1 << 20, 32, 64) == 1
