"""The self-test: silent on a machine that computes rightly, and each planted fault is named and keeps the worker out."""

import json
import subprocess
import sys
from dataclasses import replace

import mlx.core as mx
import pytest

from stoa.config.load import PROJECT_ROOT
from stoa.contracts.errors import WeightsError
from worker_mac import fingerprint, selftest
from worker_mac.cache import Cache
from worker_mac.model import Feed, Model
from worker_mac.model_config import read_model_config
from worker_mac.weights import LiveWeights


def test_this_machine_passes_and_says_what_it_is() -> None:
    verdict = selftest.run()
    assert verdict.fault == ""
    assert selftest.require(verdict) == verdict.fingerprint == fingerprint.name_of(fingerprint.logprobs(fingerprint.fixed_model()))
    assert verdict.difference < 1e-4
    assert (verdict.device, verdict.memory_bytes) == ("cpu", 0) or verdict.memory_bytes > 0


class WrongOffsets(Model):
    """Rotates every row by the first row's position, as a public version did."""

    def _rotate(self, x: mx.array, feed: Feed) -> mx.array:
        cosines, sines = (mx.broadcast_to(part[:1], part.shape) for part in feed.turns)
        return super()._rotate(x, replace(feed, turns=(cosines, sines)))


class Holding(Model):
    """Reads the pools as they were once more after they are written, so that they are copied."""

    def hidden(self, feed: Feed, cache: Cache, routes: list[mx.array] | None = None) -> mx.array:
        before = [pool[:1].sum() for pool in cache.keys.values()]
        return super().hidden(feed, cache, routes) + 0 * sum(before)


class Hot(Model):
    """Logits a hundredth too large."""

    def logits(self, hidden: mx.array) -> mx.array:
        return super().logits(hidden) * 1.01


class NotANumber(Model):
    def logits(self, hidden: mx.array) -> mx.array:
        return super().logits(hidden) * float("nan")


def made(kind: type[Model]) -> Model:
    return kind(read_model_config(fingerprint.CONFIG), LiveWeights.of(fingerprint.fixed_state()).arrays)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (WrongOffsets, "rows of a batch: logits"),
        (Holding, "pages in place: 8 steps"),
        (Hot, "arithmetic: a logprob is 0.0"),
        (NotANumber, "arithmetic: a logprob is inf nats"),
    ],
)
def test_a_planted_fault_is_named(kind: type[Model], words: str) -> None:
    verdict = selftest.run(lambda: made(kind))
    assert words in verdict.fault
    with pytest.raises(WeightsError, match="fails its self-test and may not join") as error:
        selftest.require(verdict)
    assert "extra `mac`" in error.value.hint


def test_weights_that_are_copied_are_named() -> None:
    def copied() -> Model:
        raise WeightsError("this MLX copies arrays where it should share them")

    assert selftest.run(copied).fault == "weights in place: this MLX copies arrays where it should share them"


def test_as_a_program_it_prints_json() -> None:
    done = subprocess.run([sys.executable, "-m", "worker_mac.selftest"], capture_output=True, text=True, timeout=50, cwd=PROJECT_ROOT)
    found = json.loads(done.stdout)
    assert (done.returncode, found["fault"], len(found["findings"])) == (0, "", 4)
    assert found["fingerprint"] == selftest.run().fingerprint


def test_what_is_said_of_kernels_goes_to_stderr() -> None:
    # As on a Mac whose driver refuses every body: each is checked, and logged.
    program = (
        "import metal.ops as ops; ops.verdicts.__kwdefaults__['available'] = lambda: True; from worker_mac import selftest; selftest.main()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=50, cwd=PROJECT_ROOT)
    assert [one["kernel"] for one in json.loads(done.stdout)["kernels"] if "does not run" in one["reason"]] == [
        "experts", "head", "attention", "router", "conv",
    ]  # fmt: skip
    assert done.stderr.count("kernel_checked") == 5


def test_a_verdict_without_faults_is_required_quietly_and_one_with_two_names_both() -> None:
    good = selftest.Verdict((selftest.Finding("a"), selftest.Finding("b")), "x")
    assert selftest.require(good) == "x"
    bad = replace(good, findings=(selftest.Finding("a", "one"), selftest.Finding("b", "two")))
    assert bad.fault == "a: one; b: two"
