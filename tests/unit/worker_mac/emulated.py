"""A tiny model whose every op is computed by its kernel on the emulator, and the same model on plain ops: head size 64, 4 query
heads a key/value head, fp32.
"""

from metal.check import KERNELS
from metal.ops import Ops, verdicts
from stoa.rollouts.records import Episode
from tests.metal_emulator.emulator import Emulator
from tests.unit.worker_mac.policies import model_of, random_state
from tests.unit.worker_mac.tasks import Dialogue, play
from worker_mac.fingerprint import CONFIG
from worker_mac.model import Model
from worker_mac.model_config import read_model_config
from worker_mac.sampler import seed_of
from worker_mac.sweep import Casting
from worker_mac.weights import LiveWeights

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


def episodes(model: Model, castings: list[Casting], **options: int) -> list[Episode]:
    _, found = play(model, Dialogue(num_turns=2, max_turn_tokens=4), castings, record_routing=True, **options)
    return [episode for group in sorted(found) for episode in found[group]]
