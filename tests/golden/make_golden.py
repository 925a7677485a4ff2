"""Writes grid.npz and delta.npz: the int8 grid and one delta, worked out in plain Python without the project's code.

Run `python tests/golden/make_golden.py` after a deliberate change of the grid or of the delta format.

How to use them. Every implementation of the grid (numpy, torch, MLX) must give `grid.npz` bit for bit:
    quantise(weights [K, 64]) == codes, scales, biases (bf16 bits); dequantise(codes, scales, biases) == dequantised;
    scan(masters, codes, scales, biases, d) applied to them == codes_next_<d>, scales_next, biases_next, d = 0 and 0.02.
`names` says what each row is there for. `delta.npz` holds a delta's bytes (`delta`, uint8), the arrays it starts from
(`base.<name>`) and ends at (`next.<name>`), and the state ids of both (`state_ids`).
"""

import hashlib
import json
import math
import random
import struct
from fractions import Fraction
from pathlib import Path

import numpy as np
import xxhash
from pcodec import ChunkConfig, DeltaSpec, ModeSpec, standalone

FOLDER = Path(__file__).parent
LAYOUT_ID = hashlib.sha256(b"golden").hexdigest()


def f32(value: float) -> float:
    """The float32 nearest to a double; one operation on float32 done in double and rounded so is correctly rounded."""
    return struct.unpack("<f", struct.pack("<f", value))[0]


def bf16(value: float) -> int:
    """Bits of the bf16 nearest to a float32, ties to even, by comparing exact distances."""
    below = struct.unpack("<I", struct.pack("<f", value))[0] >> 16
    distances = [abs(Fraction(bf16_value(bits)) - Fraction(value)) for bits in (below, below + 1)]
    if distances[0] == distances[1]:
        return below + below % 2
    return below if distances[0] < distances[1] else below + 1


def bf16_value(bits: int) -> float:
    return struct.unpack("<f", struct.pack("<I", bits << 16))[0]


def make_grid(group: list[float]) -> tuple[int, int]:
    low, high = min(group), max(group)
    scale = bf16(f32(f32(high - low) / 251.0))
    if bf16_value(scale) < 2.0**-126:
        return bf16(1.0), bf16(low)
    return scale, bf16(f32(low - bf16_value(scale)))


def places(group: list[float], scale: int, bias: int) -> list[float]:
    return [f32(f32(weight - bf16_value(bias)) / bf16_value(scale)) for weight in group]


def nearest(place: float) -> int:
    return min(max(round(place), 0), 255)  # round() takes ties to even


def scan(group: list[float], codes: list[int], scale: int, bias: int, hysteresis: float) -> tuple[list[int], int, int]:
    at = places(group, scale, bias)
    if min(at) < -1 or max(at) > 256:
        new = make_grid(group)
        if new != (scale, bias):
            return [nearest(place) for place in places(group, *new)], *new
    threshold = f32(0.5 + hysteresis)
    moved = [nearest(p) if hysteresis == 0 or abs(f32(p - c)) > threshold else c for p, c in zip(at, codes, strict=True)]
    return moved, scale, bias


def groups() -> dict[str, list[float]]:
    chance = random.Random(20260101)
    normal = lambda width, centre=0.0: [f32(centre + chance.gauss(0, width)) for _ in range(64)]  # noqa: E731
    step = 2.0**-10
    ties = [-0.125 + step * (round(k * 251 / 63) + (0.5 if 0 < k < 63 else 0.0)) for k in range(64)]
    made = {f"normal {k}": normal(0.02) for k in range(8)}
    made |= {
        "zeros": [0.0] * 64,
        "minus zeros": [-0.0] * 64,
        "constant": [f32(0.3)] * 64,
        "negative constant": [f32(-1.7)] * 64,
        "constant 250": [250.0] * 64,
        "huge range": normal(1e37),
        "tiny range": normal(1e-34),
        "range below the smallest scale": [f32(1e-3)] + [f32(1e-3 + 1e-40)] * 63,
        "ties at half steps": ties,
        "all positive": [abs(w) + 0.01 for w in normal(0.02)],
        "all negative": [-abs(w) - 0.01 for w in normal(0.02)],
        "far from zero": normal(1e-3, 1.0),
        "one outlier": [*normal(0.001)[:63], 4.0],
        "two values": [f32(0.1), f32(-0.1)] * 32,
    }
    return {name: [f32(weight) for weight in group] for name, group in made.items()}


def grid_file() -> None:
    chance = random.Random(7)
    cases = groups()
    fresh = ("codes", "scales", "biases", "dequantised", "masters")
    after = ("codes_next_0", "codes_next_0.02", "scales_next", "biases_next")
    columns: dict[str, list] = {key: [] for key in (*fresh, *after)}
    for number, group in enumerate(cases.values()):
        scale, bias = make_grid(group)
        codes = [nearest(place) for place in places(group, scale, bias)]
        step = bf16_value(scale)
        # masters move by up to 0.8 step, a few land exactly on thresholds, every fifth group leaves the grid
        masters = [f32(weight + step * chance.uniform(-0.8, 0.8)) for weight in group]
        masters[0] = f32(step * (codes[0] + 0.5) + bf16_value(bias))
        if number % 5 == 4:
            masters[5] = f32(step * 300 + bf16_value(bias))
        columns["codes"].append(codes)
        columns["scales"].append([scale])
        columns["biases"].append([bias])
        columns["dequantised"].append([f32(f32(step * code) + bf16_value(bias)) for code in codes])
        columns["masters"].append(masters)
        for hysteresis in (0, 0.02):
            moved, new_scale, new_bias = scan(masters, codes, scale, bias, hysteresis)
            columns[f"codes_next_{hysteresis}"].append(moved)
        columns["scales_next"].append([new_scale])
        columns["biases_next"].append([new_bias])
    types = {"codes": np.uint8, "scales": np.uint16, "biases": np.uint16, "dequantised": np.float32, "masters": np.float32}
    arrays = {name: np.array(rows, dtype=types[name.split("_")[0]]) for name, rows in columns.items()}
    weights = np.array(list(cases.values()), dtype=np.float32)
    np.savez_compressed(FOLDER / "grid.npz", names=np.array(list(cases)), weights=weights, **arrays)


def gap_blob(positions: list[int]) -> bytes:
    gaps = [position - before - 1 for before, position in zip([-1, *positions], positions, strict=False)]
    config = ChunkConfig(compression_level=8, mode_spec=ModeSpec.classic(), delta_spec=DeltaSpec.no_op())
    return b"\x04" + standalone.simple_compress(np.array(gaps, dtype=np.uint32), config)


def state_id(arrays: dict[str, np.ndarray]) -> str:
    types = {"uint8": "uint8", "uint16": "bfloat16", "float32": "float32"}
    order = ["a.weight", "a.scales", "a.biases", "b.weight", "b.scales", "b.biases", "c.weight", "m.expert_bias"]
    table = []
    for name in order:
        array = arrays[name]
        table.append([name, types[str(array.dtype)], list(array.shape), xxhash.xxh3_128_hexdigest(array.tobytes())])
    return hashlib.sha256(json.dumps([LAYOUT_ID, table], separators=(",", ":")).encode()).hexdigest()


def delta_file() -> None:
    chance = np.random.default_rng(11)
    base = {
        "a.weight": chance.integers(1, 255, (2, 64), dtype=np.uint8),
        "b.weight": chance.integers(1, 255, (3, 2, 128), dtype=np.uint8),
        "a.scales": chance.integers(0x3800, 0x3C00, (2, 1), dtype=np.uint16),
        "b.scales": chance.integers(0x3800, 0x3C00, (3, 2, 2), dtype=np.uint16),
        "a.biases": chance.integers(0xB800, 0xBC00, (2, 1), dtype=np.uint16),
        "b.biases": chance.integers(0xB800, 0xBC00, (3, 2, 2), dtype=np.uint16),
        "c.weight": chance.normal(size=5).astype(np.float32),
        "m.expert_bias": chance.normal(size=4).astype(np.float32),
    }
    # the code space is a (128 codes), then b (768); group 3 of 14 (the second of b) is re-gridded
    changes = {0: 1, 1: -1, 63: 1, 64: 1, 127: -1, 128: 1, 500: -3, 777: 1, 895: -1}
    new = {name: array.copy() for name, array in base.items()}
    flat = np.concatenate([new["a.weight"].reshape(-1), new["b.weight"].reshape(-1)]).astype(int)
    flat[500] = max(flat[500], 10)
    base["b.weight"].reshape(-1)[500 - 128] = flat[500]
    for position, difference in changes.items():
        flat[position] += difference
    regrid_codes = chance.integers(0, 256, 64, dtype=np.uint8)
    flat[192:256] = regrid_codes
    new["a.weight"] = flat[:128].astype(np.uint8).reshape(2, 64)
    new["b.weight"] = flat[128:].astype(np.uint8).reshape(3, 2, 128)
    new["b.scales"].reshape(-1)[1], new["b.biases"].reshape(-1)[1] = 0x3A00, 0xBA00
    new["c.weight"][[1, 4]] = [math.pi, -0.0]
    signs = [0] * 16
    for bit, difference in enumerate(changes.values()):
        signs[bit] = int(difference > 0)
    config = ChunkConfig(compression_level=8, mode_spec=ModeSpec.classic(), delta_spec=DeltaSpec.no_op())
    sections: dict[str, tuple[str, list[int], bytes]] = {
        "raw.values": ("U32", [2], new["c.weight"][[1, 4]].tobytes()),
        "regrid.biases": ("U16", [1], struct.pack("<H", 0xBA00)),
        "regrid.scales": ("U16", [1], struct.pack("<H", 0x3A00)),
        "regrid.codes": ("U8", [1, 64], regrid_codes.tobytes()),
        "signs": ("U8", [2], bytes(sum(bit << k for k, bit in enumerate(signs[at : at + 8])) for at in (0, 8))),
    }
    blobs = {
        "gaps": gap_blob(list(changes)),
        "magnitudes": standalone.simple_compress(np.array([abs(d) - 1 for d in changes.values()], dtype=np.uint16), config),
        "raw.gaps": gap_blob([1, 4]),
        "regrid.groups": gap_blob([3]),
    }
    sections |= {name: ("U8", [len(data)], data) for name, data in blobs.items()}
    ids = [state_id(base), state_id(new)]
    metadata = {"format": "stoa-delta-1", "run": "golden", "base": "6", "version": "7", "base_state_id": ids[0], "state_id": ids[1]}
    metadata |= {"layout_id": LAYOUT_ID, "codec": "pco-8", "num_changed": str(len(changes)), "num_raw": "2", "num_regrid": "1"}
    header: dict[str, object] = {"__metadata__": metadata}
    body = b""
    for name, (dtype, shape, data) in sections.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(body), len(body) + len(data)]}
        body += data
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    delta = np.frombuffer(struct.pack("<Q", len(text)) + text + body, dtype=np.uint8)
    arrays = {f"base.{name}": array for name, array in base.items()} | {f"next.{name}": array for name, array in new.items()}
    np.savez_compressed(FOLDER / "delta.npz", delta=delta, state_ids=np.array(ids), **arrays)


if __name__ == "__main__":
    grid_file()
    delta_file()
