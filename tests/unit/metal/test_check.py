"""What decides whether a kernel is used: the self-check, the switches, the verdicts that doctor shows."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from structlog.testing import capture_logs

from metal import kernels
from metal.check import KERNELS, Dims, self_check
from metal.kernels import Compiled, body_text, metal_works
from metal.ops import NO_METAL, SWITCHED_OFF, Ops, choose_ops, plain, verdicts
from metal.router import RouterKernel
from tests.metal_emulator.emulator import Emulator, can_emulate
from tests.metal_emulator.proof import Mutant, mutants_of, planted

DIMS = Dims(
    hidden=64,
    inner=64,
    num_experts=8,
    top_k=2,
    num_heads=8,
    num_kv_heads=2,
    head_size=64,
    conv_kernel=3,
    dtype=mx.bfloat16,
    raw_dtype=mx.bfloat16,
)
NAMES = dict(zip(("K1", "K2", "K3", "K4", "K5", "K6"), KERNELS, strict=True))
BODIES = {path.stem for path in Path(kernels.__file__).parent.glob("*.metal")} - {"int8_tile"}
needs_emulator = pytest.mark.skipif(not can_emulate(), reason="needs PyPI's ziglang on Linux")


@needs_emulator
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_every_kernel_agrees_with_plain_ops(dtype: mx.Dtype) -> None:
    emulator = Emulator()
    most: dict[str, int] = {}

    def launcher(name: str, input_names: Sequence[str], *texts: Any) -> Compiled:
        compiled = emulator.metal_kernel(name, input_names, *texts)

        def call(**asked: Any) -> list[mx.array]:
            for one, array in zip(input_names, asked["inputs"], strict=True):
                most[f"{name}/{one}"] = max(most.get(f"{name}/{one}", 0), array.size)
            return compiled(**asked)

        return call

    found = verdicts(replace(DIMS, dtype=dtype, raw_dtype=dtype), launcher=launcher, available=lambda: True)
    assert [(one.kernel, one.uses_kernel, one.reason) for one in found] == [(kernel, True, "") for kernel in KERNELS]
    assert emulator.most_threadgroup_bytes <= 32768
    assert {name.split("/")[0] for name in most} == {f"stoa_{body}" for body in BODIES}
    # MLX compiles inputs of 8 numbers and more otherwise: what grows with the batch is checked so.
    short = {name.split("/")[1] for name, size in most.items() if size < 8}
    assert short == {"size", "sizes", "scale", "width", "keys", "positions"}


FOUND = [
    ("K1", "wrong expert", "outputs differ"),
    ("K1", "gate and up exchanged", "outputs differ"),
    ("K1", "wrong byte", "outputs differ"),
    ("K2", "wrong block", "other tokens"),
    ("K2", "not normalised", "logprobs differ"),
    ("K2", "sums of one simdgroup", "other tokens"),
    ("K3", "wrong page", "outputs differ"),
    ("K3", "wrong tail", "outputs differ"),
    ("K4", "wrong tie", "other experts"),
    ("K4", "not normalised", "weights differ"),
    ("K5", "prefix left out", "outputs differ"),
    ("K6", "product not rounded", "other outputs"),
]


@needs_emulator
@pytest.mark.parametrize(("kernel", "kind", "words"), FOUND)
def test_self_check_finds_a_planted_fault(kernel: str, kind: str, words: str) -> None:
    mutant: Mutant = next(one for one in mutants_of(kernel) if one.kind == kind)
    verdict = self_check(NAMES[kernel], DIMS, planted(Emulator(), mutant))
    assert not verdict.uses_kernel
    assert words in verdict.reason


def refusing(name: str, input_names: Sequence[str], output_names: Sequence[str], source: str, header: str = "") -> Compiled:
    raise RuntimeError(f"[metal::Device] Unable to build metal library from source: {name}")


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_body_the_driver_refuses_means_plain_ops(kernel: str) -> None:
    verdict = self_check(kernel, DIMS, refusing)
    assert not verdict.uses_kernel
    assert verdict.reason.startswith("does not run: [metal::Device] Unable")


def gone(*_: object) -> Compiled:
    raise FileNotFoundError(2, "No such file or directory", "router.metal")


def test_a_body_whose_file_is_gone_means_plain_ops() -> None:
    verdict = self_check("router", DIMS, gone)
    assert not verdict.uses_kernel
    assert verdict.reason == "does not run: [Errno 2] No such file or directory: 'router.metal'"
    # What was checked is what runs: the text is not read again for the kernels of a later model.
    assert body_text("router") is RouterKernel()._route.source


@needs_emulator
def test_a_kernel_that_disagrees_is_logged_and_plain_ops_compute() -> None:
    emulator = Emulator()
    mutant = next(one for one in mutants_of("K6") if one.kind == "wrong third")
    others = tuple(kernel for kernel in KERNELS if kernel != "conv")
    with capture_logs() as logs:
        found = verdicts(DIMS, without=others, launcher=planted(emulator, mutant), available=lambda: True)
    assert [(one["event"], one["log_level"], one["kernel"], one["used"], one["reason"]) for one in logs] == [
        ("kernel_checked", "warning", "conv", False, "other outputs at 1 rows")
    ]
    launched = emulator.num_launches
    ops = Ops(found, planted(emulator, mutant))
    x, tails, taps = mx.ones((2, 192), mx.bfloat16), mx.ones((2, 2, 64), mx.bfloat16), mx.ones((64, 3, 1), mx.bfloat16)
    assert mx.array_equal(ops.convolve(x, tails, taps)[0], mx.full((2, 64), 3.0)).item()
    assert (launched > 0, emulator.num_launches, ops.name) == (True, launched, "plain")


def test_a_model_the_kernels_are_not_made_for_gets_plain_ops() -> None:
    dense = replace(DIMS, num_experts=0, top_k=0, head_size=48)
    reasons = {kernel: self_check(kernel, dense, refusing).reason for kernel in KERNELS}
    assert reasons["experts"] == reasons["router"] == "this model has no experts"
    assert reasons["attention"] == "not made for this model: attention: head size 48 is not a multiple of 32"
    many = replace(DIMS, num_experts=300)
    assert "of at most 256" in self_check("router", many, refusing).reason


def test_without_metal_everything_is_plain_and_says_so() -> None:
    if metal_works():
        pytest.skip("this machine has a Metal back end")
    ops = choose_ops(DIMS)
    assert {one.reason for one in ops.verdicts} == {NO_METAL}
    assert (ops.name, ops.kernels) == ("plain", ())
    # A machine that claims Metal and has none: the first call of each check fails.
    assert all(one.reason.startswith("does not run") for one in verdicts(DIMS, available=lambda: True) if one.kernel != "prefix")
    assert plain().name == "plain"


@needs_emulator
def test_each_kernel_has_its_switch() -> None:
    launcher = Emulator().metal_kernel
    without = ("experts", "head", "router", "conv", "attention")
    found = {one.kernel: one for one in verdicts(DIMS, without=without, launcher=launcher, available=lambda: True)}
    assert all(found[kernel].reason == SWITCHED_OFF for kernel in without)
    assert found["prefix"].reason == "needs the kernel of attention"
    without = ("experts", "head", "router", "attention")
    ops = Ops(verdicts(DIMS, without=without, launcher=launcher, available=lambda: True), launcher)
    assert (ops.kernels, ops.name) == (("conv",), "metal(conv)")
    assert not ops.shares_prompts


@needs_emulator
def test_ops_call_the_kernel_where_it_is_used_and_plain_ops_elsewhere() -> None:
    emulator = Emulator()
    ops = Ops([self_check("conv", DIMS, emulator.metal_kernel)], emulator.metal_kernel)
    before = emulator.num_launches
    x, tails, taps = mx.ones((2, 192), mx.bfloat16), mx.ones((2, 2, 64), mx.bfloat16), mx.ones((64, 3, 1), mx.bfloat16)
    y, kept = ops.convolve(x, tails, taps)
    assert emulator.num_launches == before + 1
    assert mx.array_equal(y, mx.full((2, 64), 3.0)).item()
    assert mx.array_equal(kept, tails).item()
    plain().convolve(x, tails, taps)
    assert emulator.num_launches == before + 1
