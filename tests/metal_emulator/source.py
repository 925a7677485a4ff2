"""Turns a body into a C++ file, with the function signature that MLX would write around it for these arguments.

MLX passes an input of fewer than 8 elements in the constant address space and one without dimensions by reference, adds
`NAME_shape`, `NAME_strides` and `NAME_ndim` where the body names them, and passes those attributes the body names
(mlx/backend/common/metal_kernel.cpp of 0.32.4). A body that is right for large arrays only is found here by `lint.h`.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

TemplateValue = int | bool | mx.Dtype

MOST_CONSTANT_ELEMENTS = 7
_TYPES = {
    mx.float32: "float",
    mx.bfloat16: "bfloat16_t",
    mx.float16: "float16_t",
    mx.uint8: "uint8_t",
    mx.uint16: "uint16_t",
    mx.uint32: "uint32_t",
    mx.uint64: "uint64_t",
    mx.int8: "int8_t",
    mx.int16: "int16_t",
    mx.int32: "int32_t",
    mx.int64: "int64_t",
    mx.bool_: "bool",
}
_ATTRIBUTES = {
    "simdgroup_index_in_threadgroup": "uint",
    "simdgroups_per_threadgroup": "uint",
    "thread_index_in_simdgroup": "uint",
    "thread_index_in_threadgroup": "uint",
    "thread_position_in_grid": "uint3",
    "thread_position_in_threadgroup": "uint3",
    "threadgroup_position_in_grid": "uint3",
    "threadgroups_per_grid": "uint3",
    "threads_per_grid": "uint3",
    "threads_per_simdgroup": "uint",
    "threads_per_threadgroup": "uint3",
}
_THREADGROUP_ARRAY = re.compile(r"^(\s*)threadgroup\s+([\w:]+)\s+(\w+)((?:\s*\[[^\]]+\])*)\s*;", re.MULTILINE)
_INCLUDE = re.compile(r"^\s*#include\s*<metal_\w+>.*$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Input:
    """How MLX would pass one input: its type and which of the three address forms."""

    name: str
    dtype: mx.Dtype
    num_dims: int
    num_elements: int

    @property
    def space(self) -> str:
        """Address space of the pointer."""
        return "constant" if self.num_elements <= MOST_CONSTANT_ELEMENTS else "device"


@dataclass(frozen=True, slots=True)
class Call:
    """Everything the C++ text depends on. `extras`: pairs of an input's place and shape, strides or ndim it is named with."""

    name: str
    source: str
    header: str
    template: tuple[tuple[str, TemplateValue], ...]
    inputs: tuple[Input, ...]
    outputs: tuple[tuple[str, mx.Dtype], ...]

    @property
    def extras(self) -> list[tuple[int, str]]:
        """The hidden arguments, in MLX's order: (index of the input, "shape" | "strides" | "ndim")."""
        kinds = ("shape", "strides", "ndim")
        named = [(i, kind) for i, one in enumerate(self.inputs) for kind in kinds if f"{one.name}_{kind}" in self.source]
        return [(i, kind) for i, kind in named if self.inputs[i].num_dims]


def cpp_text(call: Call, *, lint: bool) -> str:
    """The C++ file of a call: to run, or for the address-space lint. Raises KeyError for a type MLX cannot pass."""
    numbers = iter(range(1000))

    def declare(match: re.Match[str]) -> str:
        indent, kind, name, sizes = match.groups()
        if lint:
            return f"{indent}static threadgroup {kind} {name}{sizes};"
        return (
            f'{indent}typedef {kind} {name}_array{sizes}; {name}_array& {name} = emu_threadgroup<{name}_array, {next(numbers)}>("{name}");'
        )

    body = _THREADGROUP_ARRAY.sub(declare, call.source)
    header = _INCLUDE.sub("", call.header)
    attributes = [name for name in _ATTRIBUTES if name in call.source]
    parameters = _parameters(call) + [f"{_ATTRIBUTES[name]} {name}" for name in attributes]
    names = ", ".join(f"{_kind(value)} {name}" for name, value in call.template)
    values = ", ".join(_value(value) for _, value in call.template)
    function = f"body_{call.name}"
    lines = [
        f'#include "{"lint" if lint else "msl"}.h"',
        f'#line 1 "{call.name}.header"',
        header,
        *([f"template <{names}>"] if call.template else []),
        f"static void {function}({', '.join(parameters)}) {{",
        f'#line 1 "{call.name}.metal"',
        body,
        "}",
        '#line 1 "entry"',
        _entry(call, f"{function}<{values}>" if call.template else function, attributes, lint=lint),
    ]
    return "\n".join(lines) + "\n"


def _parameters(call: Call) -> list[str]:
    written: list[str] = []
    extras = call.extras
    for index, one in enumerate(call.inputs):
        sign = "*" if one.num_dims else "&"
        written.append(f"const {one.space} {_TYPES[one.dtype]}{sign} {one.name}")
        forms = {
            "shape": "const constant int* {}_shape",
            "strides": "const constant int64_t* {}_strides",
            "ndim": "const constant int& {}_ndim",
        }
        written += [forms[kind].format(one.name) for i, kind in extras if i == index]
    return written + [f"device {_TYPES[dtype]}* {name}" for name, dtype in call.outputs]


def _entry(call: Call, function: str, attributes: Sequence[str], *, lint: bool) -> str:
    """A function without types that the runtime can call: pointers of inputs with their hidden ones, then of outputs."""
    given: list[str] = []

    def give(space: str, kind: str, *, reference: bool) -> None:
        pointer = f"({space} {kind}*)emu_arguments[{len(given)}]"
        given.append(f"*{pointer}" if reference else pointer)

    extras = call.extras
    for index, one in enumerate(call.inputs):
        give(f"const {one.space}", _TYPES[one.dtype], reference=not one.num_dims)
        for kind in [kind for i, kind in extras if i == index]:
            give("const constant", "int64_t" if kind == "strides" else "int", reference=kind == "ndim")
    for _, dtype in call.outputs:
        give("device", _TYPES[dtype], reference=False)
    if lint:
        filled = ", ".join([*given, *(f"{_ATTRIBUTES[name]}()" for name in attributes)])
        return f"void emu_entry(void** emu_arguments) {{ {function}({filled}); }}"
    filled = ", ".join([*given, *(f"emu_now->{name}" for name in attributes)])
    return (
        'extern "C" EMU_OWN void emu_entry(void** emu_arguments) {\n'
        f"    const EmuThread* emu_now = emu_thread();\n    (void)emu_now;\n    {function}({filled});\n}}"
    )


def _kind(value: TemplateValue) -> str:
    if isinstance(value, bool):
        return "bool"
    return "int" if isinstance(value, int) else "typename"


def _value(value: TemplateValue) -> str:
    if isinstance(value, bool):
        return str(int(value))
    return str(value) if isinstance(value, int) else _TYPES[value]
