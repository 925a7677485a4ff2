"""The engine with every op computed by its kernel on the emulator, against plain ops: a tiny model, head size 64, 4 query heads
a key/value head, in fp32. The same tokens are drawn; logprobs differ by rounding (within 2e-5 nats, stated here).
"""

from typing import get_args

import numpy as np
import pytest

from metal.check import KERNELS
from metal.ops import SWITCHED_OFF, Ops, verdicts
from stoa.config.host import Part
from stoa.rollouts.records import Episode
from tests.metal_emulator.emulator import Emulator, can_emulate
from tests.unit.worker_mac.policies import model_of, random_state
from tests.unit.worker_mac.tasks import Dialogue, Fixed, play
from worker_mac.fingerprint import CONFIG, fixed_model
from worker_mac.model import Model
from worker_mac.model_config import read_model_config
from worker_mac.sampler import seed_of
from worker_mac.sweep import Casting
from worker_mac.weights import LiveWeights

pytestmark = pytest.mark.skipif(not can_emulate(), reason="needs PyPI's ziglang on Linux")

TOLERANCE_NATS = 2e-5
STATE = random_state(CONFIG, spread=0.08)
PLAIN = model_of(CONFIG, STATE)
QUESTIONS = ("30", "59")  # prompts of 36 and 65 ids: one whole page, and two
GROUPS = [Casting(group, question, seed_of("kernels", group, episode)) for group, question in enumerate(QUESTIONS) for episode in range(2)]


class Launches:
    """An emulated model and how often each body ran."""

    def __init__(self) -> None:
        emulator = Emulator()
        self.names: list[str] = []

        def launcher(name: str, *arguments: object) -> object:
            kernel = emulator.metal_kernel(name, *arguments)

            def call(**options: object) -> object:
                self.names.append(name)
                return kernel(**options)

            return call

        found = verdicts(PLAIN.dims, launcher=launcher, available=lambda: True)
        assert [(one.kernel, one.reason) for one in found] == [(kernel, "") for kernel in KERNELS]
        self.model = Model(read_model_config(CONFIG), LiveWeights.of(STATE).arrays, ops=Ops(found, launcher))
        self.names.clear()


@pytest.fixture(scope="module")
def emulated() -> Launches:
    return Launches()


def episodes(model: Model, castings: list[Casting], **options: int) -> list[Episode]:
    _, found = play(model, Dialogue(num_turns=2, max_turn_tokens=4), castings, record_routing=True, **options)
    return [episode for group in sorted(found) for episode in found[group]]


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
