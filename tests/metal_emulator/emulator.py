"""`Emulator.metal_kernel` takes the arguments of `mx.fast.metal_kernel` and gives a callable with the same arguments.

What it checks besides computing stands at the top of `shim/runtime.cpp`. A fault of the body raises `EmulatorError`.
Each input ends at a guard page, outputs are filled with a pattern that is NaN in every float type, and the order of
threads is drawn from the seed. Nothing here says anything of speed on a GPU.
"""

import ctypes
import mmap
from collections.abc import Sequence
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from tests.metal_emulator.source import Call, Input, TemplateValue
from tests.metal_emulator.toolchain import CompileError, library, zig

__all__ = ["CompileError", "Emulator", "EmulatorError", "can_emulate"]

_POISON = 0xFF
_MOST_THREADS = 1024
_LANES = 32
_libc = ctypes.CDLL(None, use_errno=True)


class EmulatorError(RuntimeError):
    """The body did what no correct kernel does; the message says what and where."""


def can_emulate() -> bool:
    """True where the compiler is installed and the machine is one it makes code for."""
    return zig() is not None


class _Buffer(ctypes.Structure):
    _fields_ = [
        ("base", ctypes.c_void_p),
        ("num_bytes", ctypes.c_uint64),
        ("writable", ctypes.c_uint32),
        ("num_unwritten", ctypes.c_uint32),
        ("num_loaded", ctypes.c_uint64),
        ("name", ctypes.c_char_p),
    ]


class _Guarded:
    """Memory that ends at a page nobody may touch and begins after another one."""

    def __init__(self, num_bytes: int) -> None:
        page = mmap.PAGESIZE
        inner = max(1, -(-num_bytes // page)) * page
        self._map = mmap.mmap(-1, inner + 2 * page)
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        for guard in (start, start + page + inner):
            if _libc.mprotect(ctypes.c_void_p(guard), ctypes.c_size_t(page), 0):
                raise OSError(ctypes.get_errno(), "mprotect")
        # A multiple of 16 from the end, as every MLX buffer is aligned; the few bytes past it are checked by the runtime.
        self.base = start + page + inner - -(-num_bytes // 16) * 16
        self.view: NDArray[np.uint8] = np.ctypeslib.as_array((ctypes.c_uint8 * num_bytes).from_address(self.base))


@dataclass
class Emulator:
    """Stands in for the Metal back end. `seed` draws the order of threads; it moves on with each launch. `portable` as in `library`."""

    seed: int = 0
    portable: bool = False
    num_launches: int = 0
    most_threadgroup_bytes: int = 0
    unwritten: dict[str, int] = field(default_factory=dict)
    """Output -> bytes that the last launch left unwritten."""
    loaded: dict[str, int] = field(default_factory=dict)
    """Kernel and input, "stoa_conv/taps" -> bytes its threads loaded, over all launches; a byte loaded twice counts twice."""

    def metal_kernel(
        self,
        name: str,
        input_names: Sequence[str],
        output_names: Sequence[str],
        source: str,
        header: str = "",
        ensure_row_contiguous: bool = True,
        atomic_outputs: bool = False,
    ) -> "EmulatedKernel":
        """As `mx.fast.metal_kernel`."""
        if not output_names:
            raise ValueError("[metal_kernel] Must specify at least one output.")
        if not ensure_row_contiguous or atomic_outputs:
            raise NotImplementedError("strided inputs and atomic outputs are not emulated")
        return EmulatedKernel(self, name, tuple(input_names), tuple(output_names), source, header)


@dataclass(frozen=True)
class EmulatedKernel:
    """A body bound to an emulator; compiled for each set of types and template values on first use."""

    emulator: Emulator
    name: str
    input_names: tuple[str, ...]
    output_names: tuple[str, ...]
    source: str
    header: str

    def __call__(
        self,
        *,
        inputs: Sequence[mx.array],
        output_shapes: Sequence[Sequence[int]],
        output_dtypes: Sequence[mx.Dtype],
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        template: Sequence[tuple[str, TemplateValue]] = (),
        init_value: float | None = None,
        verbose: bool = False,
        stream: object = None,
    ) -> list[mx.array]:
        """Run it. Raises EmulatorError, CompileError, or ValueError where MLX would."""
        for given, wanted, what in (
            (len(inputs), len(self.input_names), "inputs"),
            (len(output_shapes), len(self.output_names), "output_shapes"),
            (len(output_dtypes), len(self.output_names), "output_dtypes"),
        ):
            if given != wanted:
                raise ValueError(f"[metal_kernel] Expected `{what}` to have size {wanted} but got size {given}.")
        _check_launch(grid, threadgroup)
        call = Call(
            self.name,
            self.source,
            self.header,
            tuple(template),
            tuple(Input(name, x.dtype, x.ndim, x.size) for name, x in zip(self.input_names, inputs, strict=True)),
            tuple(zip(self.output_names, output_dtypes, strict=True)),
        )
        loaded = library(call, portable=self.emulator.portable)
        arrays = [_bytes_of(x) for x in inputs]
        extras = [(i, _extra(inputs[i], kind)) for i, kind in call.extras]
        ordered: list[tuple[str, NDArray[np.uint8]]] = []
        for i, array in enumerate(arrays):
            ordered.append((self.input_names[i], array))
            ordered += [(f"{self.input_names[i]} (shape)", extra) for j, extra in extras if j == i]
        outputs = [_filled(shape, dtype, init_value) for shape, dtype in zip(output_shapes, output_dtypes, strict=True)]
        self._launch(loaded, ordered, outputs, grid, threadgroup)
        if verbose:
            print(f"{self.name}: {self.emulator.most_threadgroup_bytes} bytes of threadgroup memory at most")
        return [
            mx.array(out).view(dtype).reshape(tuple(shape)) if out.size else mx.zeros(tuple(shape), dtype)
            for out, shape, dtype in zip(outputs, output_shapes, output_dtypes, strict=True)
        ]

    def _launch(
        self,
        loaded: ctypes.CDLL,
        inputs: list[tuple[str, NDArray[np.uint8]]],
        outputs: list[NDArray[np.uint8]],
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
    ) -> None:
        emulator = self.emulator
        named = [*inputs, *zip(self.output_names, outputs, strict=True)]
        guarded = [_Guarded(data.size) for _, data in named]
        buffers = (_Buffer * len(named))()
        for i, ((name, data), memory) in enumerate(zip(named, guarded, strict=True)):
            memory.view[:] = data
            buffers[i] = _Buffer(memory.base, data.size, int(i >= len(inputs)), 0, 0, name.encode())
        pointers = (ctypes.c_void_p * len(named))(*(memory.base for memory in guarded))
        message = ctypes.create_string_buffer(512)
        emulator.num_launches += 1
        used = loaded.emu_run(
            ctypes.cast(loaded.emu_entry, ctypes.c_void_p),
            pointers,
            buffers,
            ctypes.c_uint32(len(named)),
            (ctypes.c_uint32 * 3)(*grid),
            (ctypes.c_uint32 * 3)(*threadgroup),
            ctypes.c_uint64(emulator.seed * 1_000_003 + emulator.num_launches),
            message,
            ctypes.c_uint32(len(message)),
        )
        if used < 0:
            raise EmulatorError(f"{self.name}: {message.value.decode()}")
        emulator.most_threadgroup_bytes = max(emulator.most_threadgroup_bytes, used)
        first = len(inputs)
        emulator.unwritten = {name: buffers[first + i].num_unwritten for i, name in enumerate(self.output_names)}
        for i, name in enumerate(name for name, _ in inputs):
            key = f"{self.name}/{name}"
            emulator.loaded[key] = emulator.loaded.get(key, 0) + int(buffers[i].num_loaded)
        for i, out in enumerate(outputs):
            out[:] = guarded[first + i].view


def _check_launch(grid: tuple[int, int, int], threadgroup: tuple[int, int, int]) -> None:
    size = [min(g, t) for g, t in zip(grid, threadgroup, strict=True)]
    if min(grid) < 1 or min(threadgroup) < 1:
        raise ValueError(f"an empty launch: grid {grid}, threadgroup {threadgroup}")
    if size[0] * size[1] * size[2] > _MOST_THREADS:
        raise ValueError(f"[metal_kernel] Thread group size ({size[0] * size[1] * size[2]}) is greater than {_MOST_THREADS}")
    if size[0] * size[1] * size[2] % _LANES or any(g % t for g, t in zip(grid, size, strict=True)):
        raise EmulatorError(f"a threadgroup that is not whole simdgroups, or a ragged one: grid {grid}, threadgroup {threadgroup}")


def _bytes_of(x: mx.array) -> NDArray[np.uint8]:
    if not x.size:
        return np.zeros(0, np.uint8)
    flat = mx.contiguous(x).reshape(-1)
    return np.array(flat.astype(mx.uint8) if x.dtype == mx.bool_ else flat.view(mx.uint8))


def _extra(x: mx.array, kind: str) -> NDArray[np.uint8]:
    if kind == "ndim":
        return np.array([x.ndim], np.int32).view(np.uint8)
    if kind == "shape":
        return np.array(x.shape, np.int32).view(np.uint8)
    sizes = [*x.shape[1:], 1]
    return np.cumprod(sizes[::-1], dtype=np.int64)[::-1].copy().view(np.uint8)


def _filled(shape: Sequence[int], dtype: mx.Dtype, init_value: float | None) -> NDArray[np.uint8]:
    num_bytes = int(np.prod(list(shape), dtype=np.int64)) * dtype.size
    if init_value is None:
        return np.full(num_bytes, _POISON, np.uint8)
    return np.array(mx.full(tuple(shape), init_value, dtype).reshape(-1).view(mx.uint8))
