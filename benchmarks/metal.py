"""The Metal kernels on the emulator: random cases against float64, planted faults, rows alone and in 64, traffic.

    python -m benchmarks.metal [--json] [--cases 300] [--full]

Run from a checkout: the emulator is a part of the tests. It computes what the bodies say and counts what they load; it
says nothing of speed. `--full` adds the check that a Mac makes at its start, at LFM2.5's own widths (two CPU minutes).
Stock MLX is simulated from its tiling (`metal/roofline.py`). The last line of stdout is JSON.
"""

import argparse
import json
import logging
import sys

import structlog

from tests.metal_emulator.emulator import can_emulate
from tests.metal_emulator.shown import measure, start_up_checks, tables


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print the JSON object alone")
    parser.add_argument("--cases", type=int, default=300, help="random cases of each kernel")
    parser.add_argument("--full", action="store_true", help="also the start-up check at LFM2.5's widths, in fp32 and bf16")
    arguments = parser.parse_args()
    if not can_emulate():
        print("error: the emulator needs PyPI's ziglang on Linux\nhint: pip install 'stoa[dev]'", file=sys.stderr)
        return 1
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    found = measure(arguments.cases)
    if arguments.full:
        found["start_up_check_at_full_widths"] = start_up_checks()
    if not arguments.json:
        print(tables())
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
