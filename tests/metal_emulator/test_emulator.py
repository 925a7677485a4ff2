"""The emulator computes as written, and finds what it is there to find."""

import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from tests.metal_emulator import toolchain
from tests.metal_emulator.emulator import CompileError, Emulator, EmulatorError, can_emulate
from tests.metal_emulator.source import Call

pytestmark = pytest.mark.skipif(not can_emulate(), reason="needs PyPI's ziglang on Linux")

NUMBERS = mx.array(np.random.default_rng(0).normal(0, 3, 64).astype(np.float32))
BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"
SIMD_BARRIER = "simdgroup_barrier(mem_flags::mem_threadgroup);"
SHARED = "threadgroup float shared[64];\n"


def run(
    body: str, *inputs: mx.array, dtype: mx.Dtype = mx.float32, shape: tuple[int, ...] = (64,), threads: int = 64,
    template: Sequence[tuple[str, int | bool | mx.Dtype]] = (), header: str = "", emulator: Emulator | None = None,
    group: int | None = None, init_value: float | None = None,
) -> mx.array:  # fmt: skip
    """The output `out` of a body over inputs a, b, c with thread number `i`."""
    kernel = (emulator or Emulator()).metal_kernel(
        "test", list("abc"[: len(inputs)]), ["out"], f"const uint i = thread_position_in_grid.x;\n{body}", header
    )
    return kernel(
        inputs=inputs, template=template, grid=(threads, 1, 1), threadgroup=(group or threads, 1, 1), output_shapes=[shape],
        output_dtypes=[dtype], init_value=init_value,
    )[0]  # fmt: skip


@pytest.mark.parametrize("portable", [False, True])
def test_lanes_exchange_as_metal_says(portable: bool) -> None:
    a = np.array(NUMBERS)
    lanes = a.reshape(2, 32)
    at = np.arange(64)
    prefix = np.cumsum(lanes.astype(np.float64), axis=1)
    for text, wanted in (
        ("simd_sum(a[i])", np.repeat(lanes.sum(axis=1, dtype=np.float64), 32)),
        ("simd_max(a[i])", np.repeat(lanes.max(axis=1), 32)),
        ("simd_min(a[i])", np.repeat(lanes.min(axis=1), 32)),
        ("simd_shuffle(a[i], ushort(31 - i % 32))", lanes[:, ::-1].reshape(-1)),
        ("simd_shuffle_xor(a[i], 5)", a[at ^ 5]),
        ("simd_shuffle_down(a[i], 3)", np.where(at % 32 < 29, a[np.minimum(at + 3, 63)], a)),
        ("simd_shuffle_up(a[i], 3)", np.where(at % 32 >= 3, a[at - 3], a)),
        ("simd_broadcast(a[i], 7)", a[at // 32 * 32 + 7]),
        ("simd_prefix_inclusive_sum(a[i])", prefix.reshape(-1)),
        ("simd_prefix_exclusive_sum(a[i])", (prefix - lanes).reshape(-1)),
        ("float(simd_any(a[i] > 1e9f)) + 2.0f * float(simd_all(a[i] < 1e9f))", np.full(64, 2.0)),
        ("float(popcount(uint(ulong(simd_ballot(a[i] > 0.0f)))))", np.repeat((lanes > 0).sum(axis=1), 32)),
    ):
        got = run(f"out[i] = {text};", NUMBERS, emulator=Emulator(seed=3, portable=portable))
        np.testing.assert_allclose(np.array(got), wanted, rtol=2e-6, atol=2e-6, err_msg=text)


def test_matrices_multiply_as_metal_says() -> None:
    draw = np.random.default_rng(1).normal(0, 1, (2, 16, 16)).astype(np.float32)
    body = """
simdgroup_matrix<float, 8, 8> left, right, sum = make_filled_simdgroup_matrix<float, 8, 8>(1.5f);
simdgroup_load(left, a, 16, ulong2{8, 0});
simdgroup_load(right, b + 8, 16, 0, true);
simdgroup_multiply_accumulate(sum, left, right, sum);
simdgroup_store(sum, out, 8);
"""
    got = run(body, mx.array(draw[0]), mx.array(draw[1]), shape=(8, 8), threads=32)
    wanted = draw[0][:8, 8:].astype(np.float64) @ draw[1][:8, 8:].astype(np.float64).T + 1.5
    np.testing.assert_allclose(np.array(got), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("dtype", "name"), [(mx.bfloat16, "bfloat16_t"), (mx.float16, "half")])
def test_small_floats_round_to_nearest_even_and_come_back_exactly(dtype: mx.Dtype, name: str) -> None:
    random = np.random.default_rng(2).integers(0, 1 << 32, 4096, dtype=np.uint32)
    # Every 16-bit pattern of the type with a half, less and more of its last place below it: all the ties.
    step, base = (
        (1 << 16, np.arange(0, 1 << 16, 37, dtype=np.uint32) << 16)
        if dtype == mx.bfloat16
        else (1 << 13, np.arange(0x33000000, 0x47900000, 1 << 13, dtype=np.uint32)[::37])
    )
    ties = (base[:, None] + np.array([step // 2 - 1, step // 2, step // 2 + 1], np.uint32)).reshape(-1)
    bits = np.concatenate([random, ties, ties | np.uint32(1 << 31)])
    bits = bits[: bits.size // 64 * 64]
    numbers = bits.view(np.float32)
    with np.errstate(all="ignore"):
        wanted = np.array(mx.array(numbers).astype(dtype).astype(mx.float32))
    got = run(
        "out[i] = float(static_cast<T>(a[i]));",
        mx.array(numbers),
        template=[("T", dtype)],
        shape=numbers.shape,
        threads=numbers.size,
        group=64,
    )
    np.testing.assert_array_equal(np.array(got), wanted)
    assert name in ("bfloat16_t", "half")
    sums = run(f"out[i] = {name}(1.0f) + {name}(a[i]) * {name}(a[i]);", NUMBERS, dtype=dtype)
    small = NUMBERS.astype(dtype)
    np.testing.assert_array_equal(np.array(sums.astype(mx.float32)), np.array((1 + (small * small)).astype(mx.float32)))


def test_arguments_come_as_mlx_passes_them() -> None:
    body = "out[i] = float(a_shape[0] * 1000 + a_strides[0] * 10 + a_ndim) + b + float(c[2]) + float(N) + float(LATE);"
    got = run(body, mx.zeros((4, 16)), mx.array(0.5), mx.array([1, 2, 3]), template=[("N", 7), ("LATE", True)])
    assert np.array(got).tolist() == [4000 + 160 + 2 + 0.5 + 3 + 7 + 1] * 64
    turned = mx.arange(64, dtype=mx.float32).reshape(8, 8).T  # not contiguous: MLX copies it first
    assert np.array(run("out[i] = a[i];", turned)).tolist() == np.arange(64).reshape(8, 8).T.reshape(-1).tolist()
    assert np.array(run("if (i == 0) out[i] = 1.0f;", init_value=3.0)).tolist() == [1.0] + [3.0] * 63
    header = "#include <metal_simdgroup>\ntemplate <typename P> inline float first(P p) { return p[0]; }"
    assert run("out[i] = first(a);", NUMBERS, header=header)[5].item() == NUMBERS[0].item()


def test_what_nobody_writes_is_no_number() -> None:
    emulator = Emulator()
    got = run("if (i != 5) out[i] = a[i];", NUMBERS, emulator=emulator)
    assert np.flatnonzero(np.isnan(np.array(got))).tolist() == [5]
    assert emulator.unwritten == {"out": 4}


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("out[i] = a[i + 1];", "loads near a, byte 256 of 256"),
        ("out[i] = a[int(i) - 1];", "loads near a, byte -4 of 256"),
        ("out[i + 1] = a[i];", "stores near out, byte 256 of 256"),
        ("out[i * 16777216] = a[i];", "outside all buffers"),
        ("out[0] = a[i];", "which another thread stored"),
        ("out[i] = a[i]; out[i] += out[63 - i];", " out"),
        ("if (i < 3) { out[i] = simd_sum(a[i]); }", "divergence"),
        (f"if (i < 40) {{ {BARRIER} }} out[i] = a[i];", "divergence"),
        (f"if (i < 32) {{ {BARRIER} }} else {{ {BARRIER} }} out[i] = a[i];", "divergence"),
        (f"{SHARED} shared[i] = a[i]; out[i] = shared[63 - i];", "shared[byte"),
        (f"{SHARED} shared[i] = a[i]; {SIMD_BARRIER} out[i] = shared[63 - i];", "shared[byte"),
        (f"{SHARED} shared[i] = a[i]; {BARRIER} out[i] = shared[63 - i]; shared[i] = 0.0f;", "no barrier between"),
        (f"{SHARED} shared[i % 32] = a[i]; {BARRIER} out[i] = shared[i % 32];", "no barrier between"),
        (f"{SHARED} if (i < 60) shared[i] = a[i]; {BARRIER} out[i] = shared[i];", "which nobody has stored"),
        (f"{SHARED} shared[i] = a[i]; {BARRIER} threadgroup float* p = shared; out[i] = *(p + i + 1);", "outside all arrays"),
        (f"{SHARED} shared[i] = a[i]; {BARRIER.replace('mem_threadgroup', 'mem_device')} out[i] = shared[63 - i];", "no barrier between"),
        (f"{SHARED} shared[i] = a[i]; {SIMD_BARRIER.replace('mem_threadgroup', 'mem_none')} out[i] = shared[i ^ 1];", "no barrier between"),
        ("threadgroup float shared[8193];\n shared[i] = a[i]; out[i] = shared[i];", "32772 bytes of threadgroup memory"),
        ("float own[4] = {a[0], a[1], a[2], a[3]}; own[i % 5] = 0.0f; out[i] = own[i % 4];", "past the end of an array"),
        ("out[i] = float(int(i) / int(a[i] * 0.0f));", "division by zero"),
    ],
)  # fmt: skip
def test_a_fault_is_found(body: str, words: str) -> None:
    with pytest.raises(EmulatorError, match=words.replace("[", r"\[")):
        run(body, NUMBERS)


@pytest.mark.parametrize(
    ("body", "inputs"),
    [
        ("const float* p = a; out[i] = p[i];", (NUMBERS,)),  # no address space
        ("threadgroup float shared[64];\n threadgroup float* p = shared; const device float* q = p; out[i] = q[i];", ()),
        ("const device float* p = a; out[i] = p[0];", (NUMBERS[:3],)),  # MLX passes small inputs as constant
        ("a[i] = 1.0f; out[i] = a[i];", (NUMBERS,)),
        ("out[i] = __builtin_cosf(nothing_of_this_name(a[i]));", (NUMBERS,)),
        ("out[i] = a[i] + float(threads_per_quadgroup);", (NUMBERS,)),
        ("out[i] = float(double(a[i]));", (NUMBERS,)),
    ],
)
def test_what_a_metal_compiler_would_refuse_is_refused(body: str, inputs: tuple[mx.array, ...]) -> None:
    with pytest.raises(CompileError, match="error"):
        run(body, *inputs)


def test_ordered_uses_of_threadgroup_memory_are_no_fault() -> None:
    exchange = f"{SHARED} shared[i] = a[i]; {SIMD_BARRIER} out[i] = shared[i ^ 31]; {SIMD_BARRIER} shared[i] = 0.0f;"
    np.testing.assert_array_equal(np.array(run(exchange, NUMBERS)), np.array(NUMBERS).reshape(2, 32)[:, ::-1].reshape(-1))
    turns = f"for (uint t = 0; t < 3; ++t) {{ {BARRIER} shared[i] = a[i]; {BARRIER} sum += shared[63 - i]; }}"
    twice = f"{SHARED} float sum = 0.0f; {turns} out[i] = sum;"
    np.testing.assert_allclose(np.array(run(twice, NUMBERS)), np.array(NUMBERS)[::-1] * 3, rtol=1e-6)


def test_a_variable_that_was_not_set_is_no_number() -> None:
    got = run("float own[4]; own[i % 4] = a[i]; out[i] = own[i < 32 ? i % 4 : (i + 1) % 4];", NUMBERS)
    assert np.isnan(np.array(got)).tolist() == [False] * 32 + [True] * 32
    add = "simdgroup_multiply_accumulate(sum, part, part, sum); simdgroup_store(sum, out, 8);"
    got = run(f"simdgroup_matrix<float, 8, 8> sum, part; simdgroup_load(part, a, 8); {add}", NUMBERS, threads=32)
    assert np.isnan(np.array(got)).all()


def test_of_a_number_and_none_min_and_max_are_the_number() -> None:
    got = run("const float x = i % 2 ? NAN : a[i]; out[i] = i < 32 ? min(x, 9e9f) + max(-9e9f, x) : simd_max(x) + simd_min(x);", NUMBERS)
    even = np.array(NUMBERS)[::2]
    np.testing.assert_allclose(np.array(got)[::2], [*(2 * even[:16]), *([even[16:].max() + even[16:].min()] * 16)], rtol=1e-6)


def test_what_the_compiler_does_not_report_ends_at_a_guard_page() -> None:
    unseen = "template <typename P> __attribute__((disable_sanitizer_instrumentation, noinline)) inline float unseen(P p, int i)"
    for place in (64, -1500):
        with pytest.raises(EmulatorError, match="guard page"):
            run(f"out[i] = unseen(a, {place});", NUMBERS, header=f"{unseen} {{ return p[i]; }}")


@pytest.mark.parametrize("part", [0.0, 0.4])
def test_a_library_that_was_cut_short_is_made_again(part: float) -> None:
    whole, cut = (Call("cut", f"out[0] = {number}.0f;", "", (), (), (("out", mx.float32),)) for number in (1, os.getpid()))
    toolchain.library(whole)
    made = toolchain.library_path(whole).read_bytes()
    path = toolchain.library_path(cut)
    path.write_bytes(made[: int(len(made) * part)])
    toolchain._load.cache_clear()
    assert toolchain.library(cut).emu_run is not None
    assert path.stat().st_size == len(made)
    path.unlink()


def test_a_cache_that_cannot_be_made_is_one_for_this_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / f"stoa-metal-emulator-{os.getuid()}").write_text("")  # a file where the folder would be
    folder = toolchain.cache_folder()
    assert folder.is_dir()
    assert folder == toolchain.cache_folder()
    toolchain._own_folder.cache_clear()


def test_order_of_threads_follows_the_seed() -> None:
    # A race that no check sees: threads take turns by way of what they find in an output's poison. Here it is refused;
    # the order itself shows in which thread is named.
    def named(seed: int) -> str:
        with pytest.raises(EmulatorError) as found:
            run("out[0] = a[i];", NUMBERS, emulator=Emulator(seed=seed))
        return str(found.value)

    assert named(1) == named(1)
    assert len({named(seed) for seed in range(6)}) > 1


@pytest.mark.parametrize(("grid", "group"), [((48, 1, 1), (48, 1, 1)), ((96, 1, 1), (64, 1, 1))])
def test_ragged_threadgroups_are_refused(grid: tuple[int, int, int], group: tuple[int, int, int]) -> None:
    kernel = Emulator().metal_kernel("test", ["a"], ["out"], "out[0] = a[0];")
    with pytest.raises(EmulatorError, match="ragged"):
        kernel(inputs=[NUMBERS], grid=grid, threadgroup=group, output_shapes=[(64,)], output_dtypes=[mx.float32])


def test_a_wrong_number_of_arguments_is_refused_as_by_mlx() -> None:
    kernel = Emulator().metal_kernel("test", ["a"], ["out"], "out[0] = a[0];")
    with pytest.raises(ValueError, match="Expected `inputs` to have size 1 but got size 0"):
        kernel(inputs=[], grid=(32, 1, 1), threadgroup=(32, 1, 1), output_shapes=[(1,)], output_dtypes=[mx.float32])
    with pytest.raises(ValueError, match="greater than 1024"):
        kernel(inputs=[NUMBERS], grid=(2048, 1, 1), threadgroup=(2048, 1, 1), output_shapes=[(1,)], output_dtypes=[mx.float32])


def test_a_case_takes_less_than_half_a_second() -> None:
    body = (
        f"{SHARED} for (uint t = 0; t < 200; ++t) {{ {BARRIER} shared[i % 64] = a[i % 64]; {BARRIER} }} out[i] = simd_sum(shared[i % 64]);"
    )
    run(body, NUMBERS)  # compiles
    began = time.process_time()
    run(body, NUMBERS)
    assert time.process_time() - began < 0.5
