"""The text of router.metal, compiled for the CPU by way of lockstep.h, against the plain-op reference."""

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from metal.kernels import Kernel
from metal.router import RouterRule, route_plain, self_test, tied_case

FOLDER = Path(__file__).parent
SHAPES = [(8, 2), (32, 4), (64, 6), (40, 5)]
PROGRAM = """
#include "lockstep.h"
template <int E, int K, bool NORMALISE>
void router(const float* logits, const float* bias, const float* scale, uint* experts, float* weights, uint rows) {{
    run_simdgroups(rows, [=](uint3 thread_position_in_grid, uint3 thread_position_in_threadgroup) {{
{body}
    }});
}}
{entries}
"""
ENTRY = """
extern "C" void router_{e}_{k}_{n}(const float* l, const float* b, const float* s, uint* x, float* w, uint rows) {{
    router<{e}, {k}, {n}>(l, b, s, x, w, rows);
}}"""

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++ to run the kernel's text on the CPU")


def compiled(folder: Path, body: str) -> Callable[..., list[mx.array]]:
    """The body as a callable with the arguments of `mx.fast.metal_kernel`'s result."""
    folder.mkdir(exist_ok=True)
    entries = "".join(ENTRY.format(e=e, k=k, n=n) for e, k in SHAPES for n in ("true", "false"))
    (folder / "router.cpp").write_text(PROGRAM.format(body=body, entries=entries))
    library = folder / "router.so"
    flags = ["-std=c++20", "-O1", "-fPIC", "-shared", "-pthread", "-ffp-contract=off", f"-I{FOLDER}"]
    subprocess.run(["g++", *flags, str(folder / "router.cpp"), "-o", str(library)], check=True, timeout=50)
    loaded = ctypes.CDLL(str(library))

    def call(*, inputs: list[mx.array], template: list, output_shapes: list, **_: object) -> list[mx.array]:
        values = dict(template)
        arrays = [np.ascontiguousarray(np.array(array), np.float32) for array in inputs]
        outputs = [np.full(output_shapes[0], 0xDEAD, np.uint32), np.full(output_shapes[1], np.nan, np.float32)]
        entry = loaded[f"router_{values['E']}_{values['K']}_{str(values['NORMALISE']).lower()}"]
        entry(*(array.ctypes.data_as(ctypes.c_void_p) for array in arrays + outputs), ctypes.c_uint(output_shapes[0][0]))
        return [mx.array(output) for output in outputs]

    return call


@pytest.fixture(scope="module")
def source() -> str:
    return Kernel("router", inputs=("logits", "bias", "scale"), outputs=("experts", "weights")).source


@pytest.fixture(scope="module")
def kernel(source: str, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[mx.array]]:
    return compiled(tmp_path_factory.mktemp("router"), source)


def run(kernel: Callable[..., list[mx.array]], logits: mx.array, bias: mx.array, rule: RouterRule) -> tuple[np.ndarray, np.ndarray]:
    shapes = [(logits.shape[0], rule.top_k)] * 2
    template = [("E", rule.num_experts), ("K", rule.top_k), ("NORMALISE", rule.normalise)]
    inputs = [logits, bias, mx.array([rule.scale])]
    experts, weights = kernel(inputs=inputs, template=template, output_shapes=shapes)
    return np.array(experts), np.array(weights)


def test_body_passes_the_start_up_self_test(kernel: Callable[..., list[mx.array]]) -> None:
    assert self_test(kernel) == ""


@pytest.mark.parametrize(("num_experts", "top_k"), SHAPES)
def test_body_equals_the_reference_on_ties_and_on_drawn_logits(kernel: Callable[..., list[mx.array]], num_experts: int, top_k: int) -> None:
    drawn = np.random.default_rng(num_experts).normal(0, 3, (50, num_experts)).astype(np.float32)
    for logits, bias in (tied_case(50, num_experts), (mx.array(drawn), mx.array(drawn[0] / 4))):
        rule = RouterRule(num_experts, top_k, True, 2.5)
        experts, weights = run(kernel, logits, bias, rule)
        wanted_experts, wanted_weights = route_plain(logits, bias, rule)
        np.testing.assert_array_equal(experts, np.array(wanted_experts))
        np.testing.assert_allclose(weights, np.array(wanted_weights), rtol=1e-5)


def test_a_row_is_bit_identical_alone_and_in_64(kernel: Callable[..., list[mx.array]]) -> None:
    logits, bias = tied_case(64, 32)
    rule = RouterRule(32, 4, True, 1.0)
    experts, weights = run(kernel, logits, bias, rule)
    for row in (0, 17, 63):
        alone = run(kernel, logits[row : row + 1], bias, rule)
        assert alone[0].tobytes() == experts[row : row + 1].tobytes()
        assert alone[1].tobytes() == weights[row : row + 1].tobytes()


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("simd_min(mine)", "0xffffffffu - simd_min(0xffffffffu - (best == top ? mine : 0u))"),  # the highest index of equals
        ("left[best_slot] = -INFINITY", "left[0] = -INFINITY"),  # chosen again where a lane has two experts
        ("score[slot] + bias[expert]", "score[slot] + bias[lane]"),  # bias of the wrong slot
        ("total += won", "total = won"),  # normalised by the last one only
    ],
)
def test_self_test_finds_a_fault_planted_in_the_body(source: str, tmp_path: Path, right: str, wrong: str) -> None:
    assert right in source
    assert self_test(compiled(tmp_path / "mutant", source.replace(right, wrong))) != ""
