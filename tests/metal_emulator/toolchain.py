"""The compiler: PyPI's `ziglang`, which brings a whole clang and a linker, and a cache of what it made.

A library's name in the cache is a hash of all that went into it, so the cache is never wrong and may be deleted at will.
"""

import atexit
import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from tests.metal_emulator.source import Call, cpp_text

SHIM = Path(__file__).parent / "shim"
_STANDARD = (
    "-std=c++14",
    "-fno-exceptions",
    "-fno-rtti",
    "-ffp-contract=off",
    "-Wall",
    "-Wno-unused-variable",
    "-Wno-unused-function",
    "-Wno-pass-failed",  # whether a loop was unrolled is the GPU compiler's affair
    "-Werror",
)
_CHECKED = "array-bounds,shift,signed-integer-overflow,integer-divide-by-zero,float-cast-overflow"
_RUN_FLAGS = (
    "-O1", "-fPIC", "-ffreestanding", "-ftrivial-auto-var-init=pattern",
    "-fsanitize=thread", f"-fsanitize={_CHECKED}", "-fno-sanitize-trap=all",
    "-mllvm", "-tsan-instrument-func-entry-exit=0", "-mllvm", "-tsan-compound-read-before-write=1",
)  # fmt: skip
"""The pattern is no number: a variable that a body forgets to set shows in its results."""
_RUNTIME_FLAGS = ("-std=c++17", "-O2", "-fPIC", "-fno-exceptions", "-fno-rtti", "-fno-sanitize=undefined")
_PORTABLE = ("-DEMU_UCONTEXT",)
_LIMIT_SECONDS = 120
_END = b"stoa: whole file"


class CompileError(RuntimeError):
    """The compiler or the address-space lint refuses the body; the message holds its words."""


def zig() -> Path | None:
    """The compiler's program, if `ziglang` is installed and this machine can run what it makes."""
    spec = find_spec("ziglang")
    if spec is None or spec.origin is None or not sys.platform.startswith("linux"):
        return None
    return Path(spec.origin).parent / "zig"


def cache_folder() -> Path:
    """Where compiled bodies are kept between sessions."""
    folder = Path(tempfile.gettempdir()) / f"stoa-metal-emulator-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        usable = folder.stat().st_uid == os.getuid() and os.access(folder, os.W_OK)
    except OSError:
        usable = False
    return folder if usable else _own_folder()


@cache
def _own_folder() -> Path:
    """For this process alone, where the common one is somebody else's or cannot be written."""
    folder = tempfile.mkdtemp(prefix="stoa-metal-emulator-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


@cache
def _shim_hash() -> str:
    digest = hashlib.sha256()
    for path in sorted(SHIM.iterdir()):
        digest.update(path.read_bytes())
    program = zig()
    digest.update(str(program.stat().st_size if program else 0).encode())
    return digest.hexdigest()


def library(call: Call, *, portable: bool = False) -> ctypes.CDLL:
    """The body compiled and linked with the runtime; `portable`: with the switch of fibers that needs no assembly.

    Raises CompileError.
    """
    path = library_path(call, portable=portable)
    if not _is_whole(path):
        lint(call)
        _build(path, cpp_text(call, lint=False), _runtime(*(_PORTABLE if portable else ())))
    return _load(path)


def _is_whole(path: Path) -> bool:
    """False for a library that is not there, or was cut short by a full disk: loading one of those ends the process."""
    try:
        with path.open("rb") as file:
            file.seek(-len(_END), os.SEEK_END)
            return file.read() == _END
    except OSError:
        return False


def library_path(call: Call, *, portable: bool = False) -> Path:
    """Where the cache has the library of a call, or will have it."""
    texts = (cpp_text(call, lint=which) for which in (False, True))
    parts = [_shim_hash(), *_STANDARD, *_RUN_FLAGS, *_RUNTIME_FLAGS, *texts]
    name = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]
    return cache_folder() / f"{name}{'-portable' if portable else ''}.so"


@cache
def _load(path: Path) -> ctypes.CDLL:
    return ctypes.CDLL(str(path))


def lint(call: Call) -> None:
    """Parse the body with real address spaces. Raises CompileError."""
    with tempfile.TemporaryDirectory(dir=cache_folder()) as folder:
        path = Path(folder) / "lint.cpp"
        path.write_text(cpp_text(call, lint=True), "ascii")
        _clang(["clang", "-fsyntax-only", *_STANDARD, f"-I{SHIM}", str(path)])


def _build(path: Path, text: str, runtime: Path) -> None:
    with tempfile.TemporaryDirectory(dir=cache_folder()) as folder:
        body, made = Path(folder) / "body.cpp", Path(folder) / "body.so"
        body.write_text(text, "ascii")
        compiled = body.with_suffix(".o")
        _clang(["clang", "-c", *_STANDARD, *_RUN_FLAGS, f"-I{SHIM}", str(body), "-o", str(compiled)])
        _clang(["ld.lld", "-shared", str(compiled), str(runtime), "-o", str(made)])
        with made.open("ab") as file:
            file.write(_END)
        made.replace(path)  # two processes may build the same: the last one wins, both are right


def _runtime(*more_flags: str) -> Path:
    """The scheduler and checks, compiled once."""
    flags = (*_RUNTIME_FLAGS, *more_flags)
    path = cache_folder() / f"runtime-{hashlib.sha256((_shim_hash() + ' '.join(flags)).encode()).hexdigest()[:32]}.o"
    if not path.is_file():
        with tempfile.TemporaryDirectory(dir=cache_folder()) as folder:
            made = Path(folder) / "runtime.o"
            _clang(["cc", "-x", "c++", *flags, "-c", str(SHIM / "runtime.cpp"), "-o", str(made)])
            made.replace(path)
    return path


def _clang(arguments: list[str]) -> None:
    program = zig()
    if program is None:
        raise CompileError("the emulator needs PyPI's ziglang on Linux: pip install 'stoa[dev]'")
    done = subprocess.run([str(program), *arguments], capture_output=True, text=True, timeout=_LIMIT_SECONDS, check=False)
    if done.returncode:
        raise CompileError(done.stderr[-4000:])
