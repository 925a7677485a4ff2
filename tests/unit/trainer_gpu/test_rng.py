"""Random generators in a checkpoint: every one comes back, those of CUDA where it exists, and nonsense is refused."""

import json
import random

import numpy as np
import pytest
import torch
from structlog.testing import capture_logs

from stoa.contracts.errors import CheckpointError
from trainer_gpu.rng import Generator, as_text, capture, generators, restore


def draw() -> list[object]:
    """Also Gaussian numbers, of which two generators keep one for the next call."""
    return [random.random(), random.gauss(0, 1), np.random.rand(), np.random.standard_normal(), torch.rand(2).tolist()]


class Device:
    """A generator of a device that this machine lacks: its state is a number."""

    def __init__(self, state: int) -> None:
        self.state = state

    def of(self) -> Generator:
        return Generator(lambda: [self.state], self._set)

    def _set(self, state: list[int]) -> None:
        (self.state,) = state


def test_every_generator_of_a_process_comes_back() -> None:
    draw()
    text = as_text([capture()])
    drawn = draw()
    assert draw() != drawn
    restore(text, 0)
    assert draw() == drawn
    assert draw() != drawn


def test_text_is_plain_json_and_says_nothing_of_cuda_where_there_is_none() -> None:
    (state,) = json.loads(as_text([capture(generators(cuda=False))]))
    assert sorted(state) == ["numpy", "python", "torch"]
    assert sorted(generators(cuda=True)) == ["cuda", "megatron", "numpy", "python", "torch"]


def test_each_rank_takes_its_own_and_one_that_is_new_keeps_its_seed() -> None:
    ranks = [Device(10), Device(11)]
    text = as_text([capture({"cuda": one.of()}) for one in ranks])
    later = [Device(0), Device(1), Device(2)]
    for rank, one in enumerate(later):
        restore(text, rank, {"cuda": one.of()})
    assert [one.state for one in later] == [10, 11, 2]


def test_state_with_cuda_is_read_without_and_one_without_leaves_cuda_as_seeded() -> None:
    here, device = generators(cuda=False), Device(7)
    with_cuda = as_text([capture({**here, "cuda": device.of()})])
    drawn = draw()
    restore(with_cuda, 0, here)
    assert draw() == drawn
    device.state = 8
    restore(as_text([capture(here)]), 0, {**here, "cuda": device.of()})
    assert device.state == 8


def test_a_text_without_states_leaves_every_generator_as_it_is_and_names_them() -> None:
    before = as_text([capture()])
    with capture_logs() as said:
        restore("", 3)
    assert as_text([capture()]) == before
    (warning,) = said
    assert (warning["event"], warning["log_level"], warning["rank"]) == ("generators_not_restored", "warning", 3)
    assert {"numpy", "python", "torch"} <= set(warning["generators"])


@pytest.mark.parametrize(
    "text",
    [
        "not a state", " ", "5", "[5]", '{"torch":1}', '[{"torch":"!"}]', '[{"torch":"AAAA"}]', '[{"python":[3,[1,2],null]}]',
        '[{"python":"x"}]', '[{"numpy":["MT19937","AAAA",624,0,0.0]}]', '[{"numpy":null}]', f'[{{"numpy":["PCG64","{"A" * 4}",1,0,0.0]}}]',
    ],
)  # fmt: skip
def test_nonsense_is_refused(text: str) -> None:
    with pytest.raises(CheckpointError, match="unusable"):
        restore(text, 0)


def test_megatrons_trackers_come_back() -> None:
    """Its tracker holds named states and draws nothing by itself, so it can be filled and read without CUDA."""
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    tracker = get_cuda_rng_tracker()
    before = dict(tracker.get_states())
    only = {"megatron": generators(cuda=True)["megatron"]}
    try:
        tracker.set_states({"expert-parallel-rng": torch.tensor([1, 2, 250], dtype=torch.uint8)})
        text = as_text([capture(only)])
        tracker.set_states({})
        restore(text, 0, only)
        assert tracker.get_states()["expert-parallel-rng"].tolist() == [1, 2, 250]
    finally:
        tracker.set_states(before)
