"""The reference pages, made from the code they describe: `python -m cli.reference` writes them to docs/reference.

One function a page, each a pure text of what the code declares. Nothing is explained here: the sentences stand beside
the settings, metrics, errors and messages themselves. A test holds the pages that are kept against these functions.
"""

import ast
import dataclasses
import importlib
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, Final, Literal, get_args, get_origin, get_type_hints

from cli import say
from cli.say import Exit
from stoa.contracts.errors import StoaError, UsageError

_HEAD: Final = "<!-- Made by `python -m cli.reference` from {source}; edit that. -->\n\n# {title}\n\n{words}\n"
_BOUNDS: Final = (("ge", ">= {}"), ("gt", "> {}"), ("le", "<= {}"), ("lt", "< {}"))
_WORDS: Final = {"NoneType": "none", "str": "text", "int": "whole number", "float": "number", "bool": "true or false"}


def commands() -> str:
    """Every command with its arguments, as `--help` tells them."""
    from cli.main import build

    text = str(build().generate_docs(output_format="markdown"))
    text = re.sub(r"^(stoa [a-z ]+) -m \S+", r"\1", text, flags=re.MULTILINE)  # commands of commands tell how Python was started
    before, _, after = text.partition("## Table of Contents")
    listed = after[after.index("\n**") :]
    words = "Every command takes `--help`. Exit codes: 0 done, 1 failed, 2 wrong use, 3 stopped by limit or person, 4 fault found."
    body = before.partition("```\n\n")[2] + listed.lstrip()
    return _HEAD.format(source="cli/", title="Commands", words=words) + "\n" + body.strip() + "\n"


def settings() -> str:
    """Every setting of a run, of a Mac's owner and of a fleet to plan, with type, default and sentence; and the environment."""
    from cli.plan.fleet_spec import FleetPlan
    from stoa.config import load
    from stoa.config.host import MacHost
    from stoa.config.run import RunConfig

    words = "Files are TOML; an unknown key is an error that names the nearest one. `stoa config check FILE` tells all faults at once."
    parts = [_HEAD.format(source="stoa/config and cli/plan/fleet_spec.py", title="Settings", words=words)]
    for title, kind, where in (
        ("A run", RunConfig, "`configs/demo.toml` and your own copies of it"),
        ("A Mac, by its owner", MacHost, "`mac.toml` in the Mac's state folder; `configs/mac.toml` shows all of it"),
        ("A fleet to plan", FleetPlan, "`configs/fleet.toml`, read by `stoa plan fleet`"),
    ):
        parts.append(f"\n## {title}\n\n{where}.\n")
        parts += _tables(kind, "")
    block = inspect.cleandoc(load.__doc__ or "").split("\n\n")[2]
    parts.append(f"\n## The environment\n\nSecrets and endpoints only.\n\n```text\n{inspect.cleandoc(block)}\n```\n")
    return "".join(parts)


def metrics() -> str:
    """The catalogue of metrics."""
    from stoa.telemetry.metrics import CATALOGUE, FAMILIES

    words = "As they stand in `metrics.jsonl`, step manifests, the report and alarms. Shares, rates and probabilities have no unit."
    parts = [_HEAD.format(source="stoa/telemetry/metrics.py", title="Metrics", words=words)]
    for declared, end in ((CATALOGUE, ""), (FAMILIES, "_...")):
        parts.append("\n| metric | unit | better | it is |\n|---|---|---|---|\n")
        parts += [f"| `{one.name}{end}` | {one.unit or '-'} | {one.better} | {_cell(one.what)} |\n" for one in declared]
    return "".join(parts)


def errors() -> str:
    """The tree of errors with what each leads to."""
    words = "What happened, to what, and after an empty line what to do next. `again`: trying again can help, and Temporal does."
    rows: list[str] = []
    for depth, kind in _subclasses(StoaError, 0):
        code = Exit.WRONG_USE if issubclass(kind, UsageError) else Exit.FAILED
        name = "&nbsp;&nbsp;" * depth + f"`{kind.__name__}`"
        rows.append(f"| {name} | {int(code)} | {'again' if kind.retryable else ''} | {_first(kind)} |\n")
    table = "\n| error | exit code | | when |\n|---|---|---|---|\n"
    return _HEAD.format(source="stoa/contracts/errors.py", title="Errors", words=words) + table + "".join(rows)


def object_keys() -> str:
    """Every key of the bucket, and which of them an invited Mac may read."""
    from stoa.bucket import keys

    words, _, rest = inspect.cleandoc(keys.__doc__ or "").partition("\n\n")
    block, _, after = rest.partition("\n\n")
    read = ", ".join(f"`{pattern}`" for pattern in keys.MAC_READS)
    body = f"\n```text\n{inspect.cleandoc(block)}\n```\n\n{after}\n\nAn invited Mac's key reads {read}, and nothing else.\n"
    body += "It writes with create-only tickets, each for one key under `groups/` or `evals/` that its grant names.\n"
    return _HEAD.format(source="stoa/bucket/keys.py", title="Objects of the bucket", words=words) + body


def messages() -> str:
    """Names of workflows, queries, updates and queues, and every message that crosses Temporal."""
    from stoa.contracts import evaluation_messages, fleet_messages, names, sealed
    from stoa.contracts import messages as run_messages

    words = f"Plain JSON in Temporal's history, at most {names.MAX_MESSAGE_BYTES // 1024} KiB a message; only tickets are sealed."
    parts = [_HEAD.format(source="stoa/contracts", title="Messages", words=words)]
    parts.append("\n## Names\n\n| name | in the code |\n|---|---|\n")
    constants = {name: value for name, value in vars(names).items() if name.isupper() and isinstance(value, str)}
    parts += [f"| `{value}` | `{name}` |\n" for name, value in constants.items()]
    parts.append("\n| queue or id | what it is |\n|---|---|\n")
    for name, function in inspect.getmembers(names, inspect.isfunction):
        shown = str(function(*(f"<{argument}>" for argument in inspect.signature(function).parameters)))
        parts.append(f"| `{shown}` | {_first(function)} (`{name}`) |\n")
    for module in (run_messages, fleet_messages, evaluation_messages, sealed):
        parts += _dataclasses(module)
    return "".join(parts)


def outputs() -> str:
    """What `--json` prints, command by command."""
    from cli.outputs import OUTPUTS, load

    words = "One object a command on standard output, with these keys; talk goes to standard error. Sizes are bytes, times seconds."
    parts = [_HEAD.format(source="cli/outputs.py and the classes it names", title="JSON", words=words)]
    named: list[str] = []
    for name, output in OUTPUTS.items():
        parts.append(f"\n## stoa {name}\n\n{'A list of such objects.' if output.is_list else 'An object.'}\n\n| key | |\n|---|---|\n")
        parts += [f"| `{key}` | {_cell(said)}{_of(output.rows.get(key, ''))} |\n" for key, said in output.own.items()]
        if output.kind:
            out = f", without {', '.join(output.without)}" if output.without else ""
            parts.append(f"| the fields{_of(output.kind)}{out} | |\n")
        named += filter(None, (output.kind, *output.rows.values()))
    for kind in _with_inner([load(name) for name in named]):
        parts += _dataclasses(importlib.import_module(kind.__module__), kind.__name__)
    return "".join(parts)


def _of(kind: str) -> str:
    return f" of [{kind.partition(':')[2]}](#{kind.partition(':')[2].lower()})" if kind else ""


def _with_inner(kinds: list[Any]) -> list[Any]:
    """The classes and those that their fields hold, each once, by name."""
    found: dict[Any, None] = {}
    left = list(kinds)
    while left:
        kind = left.pop(0)
        if kind not in found:
            found[kind] = None
            hints = get_type_hints(kind)
            left += [part for hint in hints.values() for part in (hint, *get_args(hint)) if dataclasses.is_dataclass(part)]
    return sorted(found, key=lambda kind: kind.__name__)


PAGES: Final[dict[str, Callable[[], str]]] = {
    "commands.md": commands,
    "settings.md": settings,
    "metrics.md": metrics,
    "errors.md": errors,
    "keys.md": object_keys,
    "messages.md": messages,
    "json.md": outputs,
}


def write(folder: Path) -> list[str]:
    """Write all pages into `folder`; returns the names of those that changed."""
    folder.mkdir(parents=True, exist_ok=True)
    changed: list[str] = []
    for name, page in PAGES.items():
        path, text = folder / name, page()
        if not path.is_file() or path.read_text("utf-8") != text:
            path.write_text(text, "utf-8")
            changed.append(name)
    return changed


def _tables(kind: Any, prefix: str) -> Iterator[str]:
    """The settings of a section as a table, then those of each section inside it."""
    inner: list[tuple[str, Any]] = []
    rows: list[str] = []
    for name, found in kind.model_fields.items():
        if hasattr(found.annotation, "model_fields") and found.annotation.__name__ != "Alarm":
            inner.append((name, found.annotation))
            continue
        default = found.get_default(call_default_factory=True)
        rows.append(f"| `{name}` | {_type(found)} | `{_value(default)}` | {_cell(found.description or '')} |\n")
    if rows:
        title = f"`[{prefix.rstrip('.')}]`" if prefix else "Top of the file"
        yield f"\n### {title}\n\n{_first(kind)}\n\n| setting | type | default | what it does |\n|---|---|---|---|\n"
        yield from rows
    for name, section in inner:
        yield from _tables(section, f"{prefix}{name}.")


def _type(found: Any) -> str:
    said = [_kind(found.annotation)]
    for limit in found.metadata:
        said += [words.format(_number(getattr(limit, name))) for name, words in _BOUNDS if getattr(limit, name, None) is not None]
        said += [f"like `{limit.pattern}`"] if getattr(limit, "pattern", None) else []
    return _cell(", ".join(said))


def _number(value: float) -> str:
    return f"{value:g}" if isinstance(value, float) else f"{value:_}"


def _kind(annotation: Any) -> str:
    """A type in words."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return " or ".join(f"`{_value(value)}`" for value in inner)
    if origin in (list, tuple):
        return f"list of {_kind(inner[0])}"
    if origin is dict:
        return f"table of {_kind(inner[1])}"
    if inner:
        return " or ".join(_kind(part) for part in inner)
    name = getattr(annotation, "__name__", str(annotation))
    return _WORDS.get(name, name)


def _value(value: object) -> str:
    """A default as TOML has it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_value(item) for item in value) + "]"
    fields = getattr(type(value), "model_fields", None)
    if fields is not None:
        shown = {name: getattr(value, name) for name in fields}
        return "{ " + ", ".join(f"{name} = {_value(item)}" for name, item in shown.items() if item is not None) + " }"
    return "{}" if value == {} else str(value)


def _dataclasses(module: ModuleType, only: str = "") -> Iterator[str]:
    """The dataclasses of one module, or one: their sentence, and each field with type, default and the text under it."""
    tree = ast.parse(inspect.getsource(module))
    nodes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    for name, node in nodes.items():
        kind: Any = getattr(module, name)
        if not dataclasses.is_dataclass(kind) or only not in ("", name):
            continue
        yield f"\n## {name}\n\n{_first(kind)}\n\n| field | type | default | |\n|---|---|---|---|\n"
        for position, item in enumerate(node.body):
            if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
                kind_text, default = _cell(ast.unparse(item.annotation)), f"`{_cell(ast.unparse(item.value))}`" if item.value else ""
                yield f"| `{item.target.id}` | `{kind_text}` | {default} | {_text_after(node.body, position)} |\n"


def _text_after(body: list[ast.stmt], position: int) -> str:
    follows = body[position + 1] if position + 1 < len(body) else None
    if isinstance(follows, ast.Expr) and isinstance(follows.value, ast.Constant) and isinstance(follows.value.value, str):
        return _cell(follows.value.value)
    return ""


def _subclasses(kind: type[StoaError], depth: int) -> Iterator[tuple[int, type[StoaError]]]:
    yield depth, kind
    for inner in kind.__subclasses__():
        if inner.__module__ == kind.__module__:
            yield from _subclasses(inner, depth + 1)


def _first(thing: Any) -> str:
    """The sentences of something's docstring, on one line."""
    return _cell(inspect.getdoc(thing) or "")


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def main(arguments: list[str]) -> Exit:
    """Write the pages into the folder that is named, else docs/reference."""
    if arguments and arguments[0].startswith("-"):
        say.talk("Usage: python -m cli.reference [FOLDER]")
        return Exit.DONE if arguments[0] in ("-h", "--help") else Exit.WRONG_USE
    folder = Path(arguments[0]) if arguments else Path("docs/reference")
    changed = write(folder)
    say.talk(f"{folder}: {', '.join(changed) if changed else 'all pages are current'}")
    return Exit.DONE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
