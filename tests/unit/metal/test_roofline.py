"""Formulas of traffic and tiles, worked out by hand for small numbers and compared with the notes for the real model."""

import json
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from metal import bench, roofline
from metal.check import KERNELS
from metal.kernels import Compiled, metal_works
from metal.roofline import CHIPS, Shape, Step, Work, chip_named, mean_tiling, our_tiling, stock_tiling, work
from tests.metal_emulator.emulator import Emulator, can_emulate
from tests.metal_emulator.proof import mutants_of, planted

README = Path(roofline.__file__).parent / "README.md"


def test_tiles_of_a_small_example_by_hand() -> None:
    # 9, 0, 33 and 22 rows. Ours: tiles 2 + 0 + 5 + 3 of 8 rows = 80 of 64 rows; passes 1 + 0 + 2 + 1 for 3 experts.
    counts = np.array([9, 0, 33, 22])
    ours = our_tiling(counts)
    assert (ours.row_overcompute, ours.weight_reads, ours.num_experts) == (80 / 64, 4 / 3, 3)
    # Stock: four tiles of 16 sorted rows; experts in them: {0, 2}, {2}, {2, 3}, {3}: 9 + 33 = 42 ends in the third.
    stock = stock_tiling(counts)
    assert (stock.row_overcompute, stock.weight_reads) == (6 * 16 / 64, 6 / 3)


def test_stock_falls_to_one_product_a_row_below_four_rows_an_expert() -> None:
    above, below = np.full(32, 4), np.full(32, 4)
    below[0] = 3
    assert stock_tiling(above).row_overcompute == 8 * 16 * 4 / 128  # every tile holds four experts
    assert (stock_tiling(below).row_overcompute, stock_tiling(below).weight_reads) == (1.0, 127 / 32)


@pytest.mark.parametrize(("rows", "ours", "stock"), [(64, 1.41, 2.82), (48, 1.51, 3.43), (32, 2.00, 4.61)])
def test_row_overcompute_is_what_the_notes_found(rows: int, ours: float, stock: float) -> None:
    assert mean_tiling(Shape(), rows, stock=False).row_overcompute == pytest.approx(ours, abs=0.03)
    assert mean_tiling(Shape(), rows, stock=True).row_overcompute == pytest.approx(stock, abs=0.05)


def test_traffic_by_hand() -> None:
    shape = Shape(
        hidden=64, inner=64, num_experts=2, top_k=2, moe_layers=3, num_heads=4, num_kv_heads=1, head_size=64,
        attention_layers=2, conv_layers=1, conv_kernel=3, vocab=320,
    )  # fmt: skip
    works = work(shape, Step(rows=8, tokens=512, shared_tokens=512, group_rows=8))
    ours, _ = works["K1"]  # both experts have 8 rows: one tile each, weights once
    assert ours.num_flops == 3 * 6 * 64 * 64 * 16
    assert ours.num_bytes == 3 * (3 * 64 * 64 * 1.0625 * 2 + 16 * (2 * 64 + 3 * 64) * 2)
    ours, stock = works["K3"]
    held = 2 * 1 * 64 * 2 * 512
    assert ours.num_bytes == 2 * 8 * (held + 4 * 66 * 4 * 2)
    assert stock.num_bytes == 2 * 8 * 3 * held
    ours, alone = works["K5"]  # one group: the prompt once instead of eight times
    assert ours.num_bytes == 2 * (held + 8 * 4 * 66 * 4 * 2)
    assert alone.num_bytes == 2 * 8 * (held + 4 * 66 * 4 * 2)
    assert ours.num_flops == alone.num_flops  # 8 rows of 4 heads fill the 32 query rows
    ours, _ = works["K6"]
    assert ours.num_bytes == 8 * 64 * 2 * (3 + 2 + 2 + 1)


def test_seconds_are_the_larger_of_both_roofs() -> None:
    chip = next(chip for chip in CHIPS if chip.name == "M4 Pro")
    assert Work(273e9 * 0.8, 1.0, 1).seconds(chip) == pytest.approx(1.0)
    assert Work(1.0, 8.5e12 * 0.6 * 2, 1).seconds(chip) == pytest.approx(2.0)


def test_a_chip_is_known_by_the_systems_name() -> None:
    assert [chip.name for name in ("Apple M4 Pro", "Apple M4", "Apple M1") if (chip := chip_named(name))] == ["M4 Pro", "M4", "M1"]
    assert [chip_named(f"Apple {name}") for name in ("M9 Ultra", "M1 Pro", "M2 Max", "M1 Ultra")] == [None] * 4
    assert chip_named("") is None


def test_readme_holds_the_tables_as_they_are_computed() -> None:
    for table in roofline.tables().split("\n\n"):
        assert table in README.read_text("utf-8")


def test_bench_times_nothing_without_metal_and_says_so() -> None:
    report = bench.measure(available=lambda: False, chip="Apple M2")
    assert not report.measured
    assert [row.kernel for row in report.rows] == list(KERNELS)
    assert all(row.kernel_seconds is None and row.plain_seconds is None for row in report.rows)
    assert all(row.roofline_seconds and row.stock_roofline_seconds for row in report.rows)
    assert {one.reason for one in report.verdicts} == {"no Metal back end"}
    unknown = bench.measure(available=lambda: False, chip="")
    assert all(row.roofline_seconds is None for row in unknown.rows)


def test_bench_prints_its_report_alone_and_logs_to_stderr() -> None:
    program = "import metal.bench, metal.ops; metal.bench.main(); metal.ops._log.warning('kernel_checked')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=50, cwd=README.parent.parent, check=True)
    assert json.loads(done.stdout)["measured"] is metal_works()
    assert "kernel_checked" in done.stderr


@pytest.mark.skipif(not can_emulate(), reason="needs PyPI's ziglang on Linux")
def test_bench_runs_every_kernel_that_agrees_and_its_plain_ops() -> None:
    shape = Shape(
        hidden=64, inner=64, num_experts=8, top_k=2, moe_layers=1, num_heads=4, num_kv_heads=1, head_size=64, attention_layers=1,
        conv_layers=1, conv_kernel=3, vocab=64,
    )  # fmt: skip
    emulator = Emulator()
    mutant = next(one for one in mutants_of("K6") if one.kind == "wrong third")
    report = bench.measure(shape, Step(2, 64, 32, 2), launcher=planted(emulator, mutant), available=lambda: True, chip="Apple M1")
    assert report.measured
    assert all((row.plain_seconds or 0) > 0 for row in report.rows)
    assert {row.kernel for row in report.rows if row.kernel_seconds is None} == {"conv"}
    assert emulator.num_launches >= 5 * 8 * 8
    # Shared tokens are compared with MLX's own operations, also where the kernel of attention does not compile.
    broken = bench.measure(shape, Step(2, 64, 32, 2), launcher=no_attention, available=lambda: True, chip="")
    assert all((row.plain_seconds or 0) > 0 for row in broken.rows)
    assert all(row.kernel_seconds is None for row in broken.rows)
    mx.clear_cache()


def no_attention(name: str, *_: object) -> Compiled:
    raise RuntimeError(f"[metal::Device] Unable to build metal library from source: {name}")
