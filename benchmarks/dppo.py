"""Rows of a DPPO reference against what the trainer computes: `python -m benchmarks.dppo --vectors FILE --tv D --json`.

FILE is JSON: a document of the form of tests/golden/dppo.json, or a bare list of rows with mu, pi, advantage, keep and
dloss_dlogpi. Each row is one token; the trainer's torch loss and the numpy reference both answer it, in float64 (which
`num_mismatches` counts) and in float32 (`num_mismatches_float32`). A row that is answered otherwise is listed with what
was found.
"""

import argparse
import json
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from stoa.config.run import Gate
from stoa.contracts.errors import FormatError
from stoa.learning import gate as reference
from trainer_gpu.loss import dppo_loss, keep_mask

RELATIVE = {"float64": 1e-6, "float32": 2e-5}
"""Tolerances of a gradient. Files may be rounded to seven digits; in float32 1 - pi and ln mu are."""
ABSOLUTE = 1e-9
Mode = Literal["tv", "kl"]
Engine = Literal["torch", "numpy"]
ENGINES: tuple[Engine, ...] = ("torch", "numpy")


@dataclass(frozen=True, slots=True)
class Row:
    """One token and what must come out of it. `index`: place in the file; the modes of one row share it."""

    index: int
    name: str
    mode: Mode
    mu: float
    pi: float
    advantage: float
    keep: int
    dloss_dlogpi: float
    ratio_cap: float


@dataclass(frozen=True, slots=True)
class Difference:
    """A row that came out otherwise, and from whom."""

    row: Row
    engine: Engine
    dtype: str
    keep: int
    dloss_dlogpi: float


@dataclass(frozen=True, slots=True)
class Thresholds:
    """Of the gate; a file's own are replaced by what the command line gives."""

    tv: float
    kl: float
    ratio_cap: float


def read_rows(document: Any, thresholds: Thresholds) -> list[Row]:
    """Rows of a parsed file. Raises FormatError naming the row that cannot be used."""
    listed = document if isinstance(document, list) else document.get("rows", []) if isinstance(document, dict) else []
    if not listed:
        raise FormatError("the file holds no rows", hint='give a list of rows, or an object with "rows"')
    rows = [row for index, entry in enumerate(listed) for row in _rows_of(index, entry, thresholds)]
    if isinstance(document, dict):  # the golden file also tells what other caps make of one token
        for index, entry in enumerate(document.get("ratio_cap", [])):
            told = {"keep": 1, **entry, "name": f"ratio cap {entry.get('cap')}"}
            rows += _rows_of(len(listed) + index, told, Thresholds(thresholds.tv, thresholds.kl, float(entry["cap"])))
    return rows


def _rows_of(index: int, entry: Any, thresholds: Thresholds) -> Iterator[Row]:
    """A row names its answer itself (for TV), or one for each mode under the mode's name."""
    try:
        name = str(entry.get("name", index))
        mu, pi, advantage = (float(entry[key]) for key in ("mu", "pi", "advantage"))
        modes: tuple[Mode, ...] = ("tv", "kl")
        answers: dict[Mode, Any] = {mode: entry[mode] for mode in modes if mode in entry} or {"tv": entry}
        for mode, answer in answers.items():
            keep, gradient = int(answer["keep"]), float(answer["dloss_dlogpi"])
            yield Row(index, name, mode, mu, pi, advantage, keep, gradient, thresholds.ratio_cap)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise FormatError(f"row {index} cannot be read: {error!r}", hint="a row has mu, pi, advantage, keep and dloss_dlogpi") from error
    if not (0 < mu <= 1 and 0 < pi <= 1 and math.isfinite(advantage)):
        raise FormatError(f"row {index}: mu = {mu} and pi = {pi} must be probabilities above 0, advantage = {advantage} finite")


def evaluate(row: Row, gate: Gate, engine: Engine, dtype: str) -> tuple[int, float]:
    """(keep, d loss / d ln pi) of one row, as `engine` computes it in `dtype`."""
    gate = gate.model_copy(update={"mode": row.mode, "ratio_cap": row.ratio_cap})
    values = [np.array([value], dtype) for value in (math.log(row.pi), math.log(row.mu), row.advantage)]
    if engine == "numpy":
        found = reference.gate(values[0], values[1], values[2], gate)
        return int(found.keep[0]), float(-values[2][0] * found.coefficient[0] * found.keep[0])
    log_pi, log_mu, advantage = (torch.from_numpy(value) for value in values)
    log_pi.requires_grad_()
    dppo_loss(log_pi, log_mu, advantage, denominator=1.0, gate=gate).backward()
    if log_pi.grad is None:
        raise AssertionError("the loss does not depend on ln pi")
    return int(keep_mask(log_pi.detach(), log_mu, advantage, gate)[0]), float(log_pi.grad[0])


def compare(rows: Sequence[Row], thresholds: Thresholds) -> list[Difference]:
    """Every answer that is not the file's."""
    gate = Gate(delta=thresholds.tv, delta_kl=thresholds.kl)
    differences: list[Difference] = []
    for row in rows:
        for dtype, relative in RELATIVE.items():
            for engine in ENGINES:
                keep, gradient = evaluate(row, gate, engine, dtype)
                close = math.isclose(gradient, row.dloss_dlogpi, rel_tol=relative, abs_tol=ABSOLUTE)
                if keep != row.keep or not close:
                    differences.append(Difference(row, engine, dtype, keep, gradient))
    return differences


def measure(path: Path, tv: float | None, kl: float | None, ratio_cap: float | None) -> dict[str, object]:
    """The command's result. Mismatches are counted by row, however many modes and engines answer it otherwise."""
    document = json.loads(path.read_text(encoding="utf-8"))
    told = document.get("thresholds", {}) if isinstance(document, dict) else {}
    defaults = Gate()
    thresholds = Thresholds(
        tv if tv is not None else float(told.get("tv", defaults.delta)),
        kl if kl is not None else float(told.get("kl", defaults.delta_kl)),
        ratio_cap if ratio_cap is not None else float(told.get("ratio_cap", defaults.ratio_cap)),
    )
    rows = read_rows(document, thresholds)
    differences = compare(rows, thresholds)
    differing = {dtype: {found.row.index for found in differences if found.dtype == dtype} for dtype in RELATIVE}
    return {
        "num_rows": len(document["rows"] if isinstance(document, dict) else document),
        "num_mismatches": len(differing["float64"]),
        "num_mismatches_float32": len(differing["float32"]),
        "differing_rows": [
            {**asdict(row), "found": [_found(difference) for difference in differences if difference.row is row]}
            for row in rows
            if any(difference.row is row for difference in differences)
        ],
        "num_ratio_cap_rows": len(document.get("ratio_cap", [])) if isinstance(document, dict) else 0,
        "num_answers": len(rows) * len(ENGINES) * len(RELATIVE),
        "thresholds": asdict(thresholds),
    }


def _found(difference: Difference) -> dict[str, object]:
    return {name: value for name, value in asdict(difference).items() if name != "row"}


def main() -> None:
    """Print the result: JSON to standard output, or a few lines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vectors", type=Path, required=True, help="JSON file of rows")
    parser.add_argument("--tv", type=float, help="threshold of the TV gate (default: the file's, else 0.2)")
    parser.add_argument("--kl", type=float, help="threshold of the KL gate (default: the file's, else 0.05)")
    parser.add_argument("--ratio-cap", type=float, help="cap on pi / mu (default: the file's, else 20)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    asked = parser.parse_args()
    try:
        found = measure(asked.vectors, asked.tv, asked.kl, asked.ratio_cap)
    except (OSError, ValueError, RecursionError, LookupError, TypeError, AttributeError, FormatError) as error:
        sys.exit(f"error: {asked.vectors}: {error}")
    if asked.json:
        print(json.dumps(found))
        return
    print(f"{found['num_mismatches']} of {found['num_rows']} rows differ")
    for row in found["differing_rows"]:  # pyright: ignore[reportGeneralTypeIssues]
        print(json.dumps(row))


if __name__ == "__main__":
    main()
