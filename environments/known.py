"""The environments that `registry.py` names, for everybody who needs one: its file is loaded here, at the first question.

What is wrong with that file, or with an environment that it names, is then told by file and line, and stands in the way only
of who asks for an environment.
"""

import importlib
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Protocol, cast

from environments.base import Environment, Setting
from stoa.contracts.errors import BrokenEnvironmentError

_HERE: Final = Path(__file__).parent
_FAULTS: Final = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    NameError,
    RuntimeError,
    SyntaxError,
    TypeError,
    ValueError,
)
"""What Python code raises that is wrong in itself."""


class _Registry(Protocol):
    names: Callable[[], list[str]]
    create: Callable[[str, Mapping[str, Setting], bytes], Environment]


def names() -> list[str]:
    """The names `create` knows. Raises BrokenEnvironmentError."""
    return _registry().names()


def create(name: str, settings: Mapping[str, Setting], tokenizer_json: bytes) -> Environment:
    """Build an environment for the checkpoint whose tokenizer.json is given.

    Raises UnknownNameError, ConfigError (a bad setting), CheckpointError (a tokenizer without the chat tokens) or
    BrokenEnvironmentError (Python code that cannot be loaded, or fails while it builds).
    """
    registry = _registry()
    with _told(f"environment {name} cannot be built", _FAULTS):
        return registry.create(name, settings, tokenizer_json)


def _registry() -> _Registry:
    with _told("environments cannot be loaded", (*_FAULTS, OSError)):
        return cast(_Registry, importlib.import_module("environments.registry"))


@contextmanager
def _told(what: str, faults: tuple[type[Exception], ...]) -> Iterator[None]:
    try:
        yield
    except faults as fault:
        said = fault.msg if isinstance(fault, SyntaxError) else str(fault)
        where = _place(fault)
        raise BrokenEnvironmentError(
            f"{where}: {type(fault).__name__}: {said}; so {what}",
            hint=f"mend {where.partition(', line')[0]}: docs/guides/write-an-environment.md shows what an environment needs",
        ) from fault


def _place(fault: Exception) -> str:
    """File and line of a fault: where Python could not read on, else the last line of an environment that was being run."""
    if isinstance(fault, SyntaxError) and fault.filename:
        return f"{_short(fault.filename)}, line {fault.lineno or 0}"
    lines = [(frame.filename, frame.lineno or 0) for frame in traceback.extract_tb(fault.__traceback__) if frame.filename != __file__]
    ours = [line for line in lines if Path(line[0]).is_relative_to(_HERE)] or lines
    filename, number = ours[-1] if ours else (str(_HERE / "registry.py"), 0)
    return f"{_short(filename)}, line {number}"


def _short(filename: str) -> str:
    path = Path(filename)
    return str(path.relative_to(_HERE.parent)) if path.is_relative_to(_HERE) else filename
