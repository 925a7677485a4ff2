"""What is shown of each kernel: random cases against float64, rows alone and in 64, and planted faults that must be found.

A proof draws its own cases and knows its float64 reference, which is written in numpy from the meaning of the operation
and shares no code with the kernel or the plain ops. A wrong result raises `WrongResult`.
"""

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Protocol

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from metal.kernels import Compiled, Launcher
from metal.products import Int8
from tests.metal_emulator.emulator import CompileError, Emulator, EmulatorError

Array64 = NDArray[np.float64]

FP32_BOUND = 1e-5
"""Largest |error| / max(1, |value|) of a float32 result."""
_MANTISSA_BITS = {mx.bfloat16: 8, mx.float16: 11}
_LEAST_EXPONENT = {mx.bfloat16: -126, mx.float16: -14}


class WrongResult(AssertionError):
    """A kernel's result is not what it should be."""


@dataclass
class Errors:
    """The largest errors seen: of float32 results relative to max(1, |value|); of 16-bit ones in halves of their last place."""

    float32: float = 0.0
    rounding: float = 0.0

    def add(self, what: str, got: mx.array, wanted: Array64) -> None:
        """Compare a result with its float64 value. Raises WrongResult past the bounds."""
        found = np.array(got.astype(mx.float32)).astype(np.float64)
        error = np.abs(found - wanted)
        allowed = FP32_BOUND * np.maximum(1.0, np.abs(wanted))
        if not np.isfinite(found).all():
            raise WrongResult(f"{what}: not finite")
        if got.dtype == mx.float32:
            worst = float((error / allowed).max(initial=0.0)) * FP32_BOUND
            self.float32 = max(self.float32, worst)
            if worst > FP32_BOUND:
                raise WrongResult(f"{what}: error {worst:.3g} in float32")
            return
        exponent = np.maximum(np.floor(np.log2(np.maximum(np.abs(wanted), 1e-300))), _LEAST_EXPONENT[got.dtype])
        half = 2.0 ** (exponent - _MANTISSA_BITS[got.dtype])
        # A value that stands within the float32 error of a tie may go either way.
        worst = float((np.maximum(error - allowed, 0.0) / half).max(initial=0.0))
        self.rounding = max(self.rounding, worst)
        if worst > 1.0:
            raise WrongResult(f"{what}: {worst:.3g} times the rounding of {got.dtype}")


@dataclass(frozen=True)
class Mutant:
    """A fault to plant: in body `name`, `right` becomes `wrong` at its only place."""

    kind: str
    name: str
    right: str
    wrong: str


@cache
def mutants_of(kernel: str) -> tuple[Mutant, ...]:
    """The faults of mutants.toml for a kernel, K1 to K6."""
    listed = tomllib.loads((Path(__file__).parent / "mutants.toml").read_text("ascii"))
    return tuple(Mutant(one["kind"], one["body"], one["right"], one["wrong"]) for one in listed[kernel])


class Proof(Protocol):
    """One kernel's cases."""

    mutants: Sequence[Mutant]

    def case(self, launcher: Launcher, numbers: np.random.Generator, errors: Errors) -> None:
        """Draw a case, run it and compare. Raises WrongResult."""
        ...

    def alone_and_in_64(self, launcher: Launcher) -> bool:
        """True if rows have the same bits alone as in a batch of 64."""
        ...


@dataclass
class Fuzzed:
    """What came of many cases."""

    num_cases: int = 0
    errors: Errors = field(default_factory=Errors)
    threadgroup_bytes: int = 0


def fuzz(proof: Proof, num_cases: int, *, seed: int = 0) -> Fuzzed:
    """Run so many cases on the emulator, each with its own order of threads. Raises at the first fault."""
    done = Fuzzed()
    for number in range(num_cases):
        emulator = Emulator(seed=seed + number)
        proof.case(emulator.metal_kernel, np.random.default_rng((seed, number)), done.errors)
        done.threadgroup_bytes = max(done.threadgroup_bytes, emulator.most_threadgroup_bytes)
        done.num_cases += 1
    return done


def planted(emulator: Emulator, mutant: Mutant) -> Launcher:
    """A launcher that plants the fault in the body it belongs to."""

    def launch(name: str, input_names: Sequence[str], output_names: Sequence[str], source: str, header: str = "") -> Compiled:
        if name == f"stoa_{mutant.name}":
            if source.count(mutant.right) != 1:
                raise LookupError(f"{mutant.name}: {mutant.right!r} stands {source.count(mutant.right)} times")
            source = source.replace(mutant.right, mutant.wrong)
        elif mutant.right in header and mutant.name == "int8_tile":
            if header.count(mutant.right) != 1:
                raise LookupError(f"{mutant.name}: {mutant.right!r} stands {header.count(mutant.right)} times")
            header = header.replace(mutant.right, mutant.wrong)
        return emulator.metal_kernel(name, input_names, output_names, source, header)

    return launch


def finding(proof: Proof, mutant: Mutant, *, num_cases: int = 40) -> str:
    """What the cases, or rows alone and in 64, find of a planted fault; "" if nothing does."""
    for number in range(num_cases):
        emulator = Emulator(seed=number)
        try:
            proof.case(planted(emulator, mutant), np.random.default_rng((0, number)), Errors())
        except (WrongResult, EmulatorError) as error:
            return str(error)
        except CompileError as error:
            raise AssertionError(f"the mutant {mutant.kind!r} of {mutant.name} does not compile: {error}") from error
    return "" if proof.alone_and_in_64(planted(Emulator(), mutant)) else "other bits alone than in 64"


def check(holds: bool, what: str) -> None:
    """Raise WrongResult unless it holds."""
    if not holds:
        raise WrongResult(what)


def exact(what: str, got: mx.array, wanted: NDArray[np.generic] | Sequence[object]) -> None:
    """Raise WrongResult unless the integers are equal."""
    check(np.array_equal(np.array(got), np.asarray(wanted)), f"{what}: other values")


def same_bits(one: mx.array, other: mx.array) -> bool:
    """True if two arrays have the same shape and bytes."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return bool(np.array_equal(np.array(one.reshape(-1).view(mx.uint8)), np.array(other.reshape(-1).view(mx.uint8))))


def rounded(numbers: NDArray[np.floating], dtype: mx.Dtype) -> tuple[mx.array, Array64]:
    """Numbers rounded to `dtype`, as an array of it and as float64."""
    array = mx.array(numbers.astype(np.float32)).astype(dtype)
    return array, wide(array)


def wide(array: mx.array) -> Array64:
    """An array as float64."""
    return np.array(array.astype(mx.float32)).astype(np.float64)


def int8(numbers: np.random.Generator, shape: Sequence[int], *, spread: float = 1.0) -> tuple[Int8, Array64]:
    """A random int8 matrix [.., out, in] and its float64 values of about N(0, spread / in), from its bytes."""
    *outer, width = shape
    codes = numbers.integers(0, 256, shape).astype(np.uint8)
    groups = (*outer, width // 64)
    scales, scales64 = rounded(
        spread / 74.0 / np.sqrt(width) * numbers.uniform(0.5, 1.5, groups) * numbers.choice([-1, 1], groups), mx.bfloat16
    )
    biases, biases64 = rounded(-scales64 * 128.0 + numbers.normal(0, 0.1 * spread / np.sqrt(width), groups), mx.bfloat16)
    values = codes.reshape(*groups, 64) * scales64[..., None] + biases64[..., None]
    return Int8(mx.array(codes.view(np.uint32)), scales, biases), values.reshape(shape)
