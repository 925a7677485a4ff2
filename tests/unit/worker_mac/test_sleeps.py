"""The C interface that tells of sleep: prototypes and answers against a stand-in library with Apple's signatures."""

import ctypes
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from worker_mac.sleeps import MacSleeps, NoSleeps, sleeps_here

COMPILER = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")


@pytest.mark.skipif(COMPILER is None, reason="no C compiler")
def test_the_system_is_answered_once_we_are_still_and_waking_is_told(tmp_path: Path) -> None:
    source, library = Path(__file__).parent / "stubs" / "power_kit.c", tmp_path / "power_kit.so"
    subprocess.run([str(COMPILER), "-shared", "-fPIC", "-o", str(library), str(source)], check=True, timeout=50)
    stub = ctypes.CDLL(str(library))
    answers = (ctypes.c_char * 4096).in_dll(stub, "answers")
    seen: list[tuple[str, str]] = []

    def note(what: str) -> None:
        seen.append((what, answers.value.decode()))

    sleeps = MacSleeps(stub, stub)
    sleeps.start(lambda: note("sleep"), lambda: note("wake"))
    deadline = time.monotonic() + 10
    while len(seen) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    sleeps.close()
    # Ports, pointers and the argument of 40 bits come through whole; no answer before `before_sleep` has returned.
    asked = "source 1;allow f0000004 123456789a;"
    assert seen == [("sleep", asked), ("wake", asked + "allow f0000004 123456789b;")]
    assert answers.value.decode() == asked + "allow f0000004 123456789b;gone f0000003;"


def test_off_macos_nothing_is_told() -> None:
    sleeps = sleeps_here("linux")
    assert isinstance(sleeps, NoSleeps)
    sleeps.start(lambda: None, lambda: None)
    sleeps.close()
