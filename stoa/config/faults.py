"""Turns what pydantic says about a settings tree into sentences a person can act on: file, line, key, nearest name.

All faults of a tree are told at once. Nothing here reads a file or the environment; `load.py` gives it the text.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from difflib import get_close_matches
from typing import cast

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from stoa.contracts.errors import ConfigError

_TABLE = re.compile(r"\s*\[\[?\s*([^\[\]]+?)\s*\]\]?\s*(#.*)?$")
_KEY = re.compile(r"\s*((?:[A-Za-z0-9_-]+|\"[^\"]*\"|'[^']*')(?:\s*\.\s*(?:[A-Za-z0-9_-]+|\"[^\"]*\"|'[^']*'))*)\s*=")
_BARE = re.compile(r"\"[^\"]*\"|'[^']*'|[^.\s]+")
_BETWEEN_SETTINGS = frozenset({"order", "moments", "price"})
"""Types of the faults that `run.py` finds between settings of one table."""
_UNION_PARTS = frozenset({"str", "int", "float", "bool"})


@dataclass(frozen=True, slots=True)
class Origin:
    """Where the settings came from: the file's name, its text, and names of later layers by dotted key."""

    name: str
    text: str = ""
    layers: Mapping[str, str] | None = None
    """Dotted key -> what set it (`--set` or a variable), when it was not the file."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing wrong: where, what, and what may have been meant."""

    where: str
    what: str
    hint: str

    def __str__(self) -> str:
        return f"{self.where}: {self.what}"


def faults_of(error: ValidationError, model: type[BaseModel], origin: Origin) -> list[Fault]:
    """Every fault pydantic found in a tree of `model`."""
    lines = find_lines(origin.text)
    return [_fault(detail, model, origin, lines) for detail in error.errors(include_url=False)]


def config_error(error: ValidationError, model: type[BaseModel], origin: Origin) -> ConfigError:
    """One ConfigError that tells every fault pydantic found in a tree of `model`."""
    return join_faults(faults_of(error, model, origin), origin.name)


def without_faulty(tree: Mapping[str, object], error: ValidationError) -> dict[str, object]:
    """A copy of `tree` without the settings that are wrong by themselves: what the rest says can then be looked at, too."""
    rest = deepcopy(dict(tree))
    for detail in error.errors(include_url=False):
        if not _contradicts(detail):
            _remove(rest, detail["loc"])
    return rest


def contradictions(again: ValidationError, first: ValidationError, model: type[BaseModel], origin: Origin) -> list[Fault]:
    """What settings that are good by themselves say against each other, of a tree that `without_faulty` made.

    One that names a setting that was taken out is left out: its default stands there now.
    """
    lines = find_lines(origin.text)
    gone = {str(part) for detail in first.errors(include_url=False) if not _contradicts(detail) for part in detail["loc"][-2:]}
    found = [detail for detail in again.errors(include_url=False) if _contradicts(detail)]
    return [_fault(detail, model, origin, lines) for detail in found if not gone & set(re.findall(r"\w+", detail["msg"]))]


def _contradicts(detail: ErrorDetails) -> bool:
    """True for a fault of a whole table, which is looked for once each of its settings is good."""
    return detail["type"] in _BETWEEN_SETTINGS


def _remove(tree: dict[str, object], loc: Sequence[int | str]) -> None:
    """Take the setting at `loc` out; its last part may be one of a union's, which is no key."""
    loc = loc[:-1] if len(loc) > 1 and loc[-1] in _UNION_PARTS else loc
    for part in loc[:-1]:
        inner = tree.get(str(part))
        if not isinstance(inner, dict):
            tree.pop(str(part), None)
            return
        tree = cast(dict[str, object], inner)
    tree.pop(str(loc[-1]), None)


def fault_at(key: str, what: str, hint: str, origin: Origin) -> Fault:
    """A fault of the setting `key`, found by somebody else."""
    return Fault(_where(key, origin, find_lines(origin.text)), what, hint)


def join_faults(faults: Sequence[Fault], name: str) -> ConfigError:
    """One ConfigError of all faults, in their places' order: a single one keeps its hint apart, several keep theirs beside them."""
    faults = sorted(dict.fromkeys(faults), key=_place)
    if len(faults) == 1:
        return ConfigError(str(faults[0]), hint=faults[0].hint)
    lines = [f"  {fault}" + (f" ({fault.hint})" if fault.hint else "") for fault in faults]
    return ConfigError("\n".join([f"{name}: {len(faults)} settings are wrong", *lines]), hint="correct all of them")


def find_lines(text: str) -> dict[str, int]:
    """Dotted key -> number of the line that gives it, of tables and plain keys of a TOML text."""
    lines: dict[str, int] = {}
    table: tuple[str, ...] = ()
    for number, line in enumerate(text.splitlines(), start=1):
        if (found := _TABLE.match(line)) is not None:
            table = _parts(found[1])
            lines.setdefault(".".join(table), number)
        elif (found := _KEY.match(line)) is not None:
            lines.setdefault(".".join((*table, *_parts(found[1]))), number)
    return lines


def dotted_names(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Every setting of a tree, tables included, as `table.key`."""
    for name, info in model.model_fields.items():
        yield f"{prefix}{name}"
        inner = info.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            yield from dotted_names(inner, f"{prefix}{name}.")


def nearest_name(wrong: str, model: type[BaseModel]) -> str:
    """The setting most like `wrong`: in the same table (initials count: lr), then by last part anywhere, else any; "" if none is."""
    names = list(dotted_names(model))
    table, _, last = wrong.rpartition(".")
    siblings = {name.rpartition(".")[2]: name for name in names if name.rpartition(".")[0] == table}
    if close := get_close_matches(last, list(siblings), n=1, cutoff=0.7):
        return siblings[close[0]]
    if initials := [name for own, name in siblings.items() if _initials(own) == last.lower()]:
        return initials[0]
    by_last = {name.rpartition(".")[2]: name for name in reversed(names)}
    if close := get_close_matches(last, list(by_last), n=1, cutoff=0.75):
        return by_last[close[0]]
    close = get_close_matches(wrong, [name for name in names if not wrong.startswith(f"{name}.")], n=1, cutoff=0.7)
    return close[0] if close else ""


def _listed(wrong: str, model: type[BaseModel]) -> str:
    """What there is in the table of a key that is like no setting at all."""
    names = list(dotted_names(model))
    table = wrong.rpartition(".")[0]
    while table and table not in names:
        table = table.rpartition(".")[0]
    here = [name.rpartition(".")[2] for name in names if name.rpartition(".")[0] == table]
    return f"{f'[{table}]' if table else 'the file'} has: {', '.join(here)}"


def _fault(detail: ErrorDetails, model: type[BaseModel], origin: Origin, lines: Mapping[str, int]) -> Fault:
    loc = detail["loc"]
    scalar = len(loc) > 1 and loc[-1] in _UNION_PARTS
    key = ".".join(str(part) for part in (loc[:-1] if scalar else loc))
    where = _where(key, origin, lines)
    if scalar:
        return Fault(where, f"{key} = {detail['input']!r}: should be text, a number, true or false", "")
    if detail["type"] == "extra_forbidden":
        near = nearest_name(key, model)
        return Fault(where, f"{key} is not a setting", f"did you mean {near}?" if near else _listed(key, model))
    said = detail["msg"]
    if detail["type"] == "order":
        return Fault(where, f"{key}: {said}", "")
    said = said[:1].lower() + said[1:]
    return Fault(where, f"{key} = {detail['input']!r}: {said}", _allowed(detail))


def _place(fault: Fault) -> tuple[bool, int]:
    """Faults of the file's lines in their order, then those of later layers as they came."""
    number = fault.where.rpartition(":")[2]
    return (not number.isdecimal(), int(number) if number.isdecimal() else 0)


def _allowed(detail: ErrorDetails) -> str:
    if detail["type"] == "literal_error":
        expected = re.findall(r"'([^']*)'", str(detail.get("ctx", {}).get("expected", "")))
        close = get_close_matches(str(detail["input"]), expected, n=1, cutoff=0.0)
        return f"did you mean {close[0]}?" if close else ""
    return ""


def _initials(name: str) -> str:
    return "".join(word[:1] for word in name.split("_"))


def _where(key: str, origin: Origin, lines: Mapping[str, int]) -> str:
    if origin.layers is not None and key in origin.layers:
        return origin.layers[key]
    number = lines.get(key)
    return origin.name if number is None else f"{origin.name}:{number}"


def _parts(dotted: str) -> tuple[str, ...]:
    return tuple(part.strip("\"'") for part in _BARE.findall(dotted))
