"""Every call that waits for another machine or process says how long: by its arguments, in the source."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOMS = ("activities", "cli", "environments", "metal", "stoa", "trainer_gpu", "worker_mac", "workflows")
BOUNDS = {
    "subprocess.run": {"timeout"},
    "subprocess.check_output": {"timeout"},
    "urlopen": {"timeout"},
    "create_connection": {"timeout"},
    "Config": {"connect_timeout", "read_timeout"},
    "start_workflow": {"rpc_timeout"},
    "list_workflows": {"rpc_timeout"},
    "count_workflows": {"rpc_timeout"},
    "execute_update": {"rpc_timeout"},
    "handle.query": {"rpc_timeout"},
    "handle.describe": {"rpc_timeout"},
    "handle.result": {"rpc_timeout"},
    "get_workflow_handle.signal": {"rpc_timeout"},
}
"""Last words of a call -> arguments it must have. `Config` is botocore's."""


def words(call: ast.Call) -> str:
    """What is called, without the arguments in between: `client.get_workflow_handle(x).signal` -> client.get_workflow_handle.signal."""
    parts: list[str] = []
    node: ast.expr = call.func
    while True:
        if isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        elif isinstance(node, ast.Call):
            node = node.func
        else:
            break
    if isinstance(node, ast.Name):
        parts.append(node.id)
    return ".".join(reversed(parts))


def unbounded(text: str) -> Iterator[str]:
    """Calls of a source that wait without a limit, as `line: call lacks argument`."""
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Call):
            continue
        called = words(node)
        given = {keyword.arg for keyword in node.keywords}
        for name, wanted in BOUNDS.items():
            if (called == name or called.endswith(f".{name}")) and None not in given and wanted - given:
                yield f"{node.lineno}: {called} lacks {', '.join(sorted(wanted - given))}"


@pytest.mark.parametrize("room", ROOMS)
def test_calls_that_wait_for_others_have_a_limit(room: str) -> None:
    found = [f"{path.relative_to(ROOT)}:{line}" for path in sorted((ROOT / room).rglob("*.py")) for line in unbounded(path.read_text())]
    assert found == []


def test_a_call_without_a_limit_is_found() -> None:
    text = "import subprocess\nsubprocess.run(['x'])\nsubprocess.run(['x'], timeout=1)\nclient.get_workflow_handle(i).signal('s', 1)\n"
    assert list(unbounded(text)) == ["2: subprocess.run lacks timeout", "4: client.get_workflow_handle.signal lacks rpc_timeout"]
