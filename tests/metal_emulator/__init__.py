"""Runs Metal kernel bodies on the CPU, with the call signature of `mx.fast.metal_kernel`; see `emulator.py`."""
