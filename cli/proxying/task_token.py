"""Reads a Temporal task token, far enough to know whose task it is.

A token is the server's own protobuf message (`temporal.server.api.token.v1.Task`), unsigned; the server looks only at its
namespace. Here it is read strictly: of the fields that say whose it is each must be there once, as the server writes them,
so that no second reading of the same bytes is possible.

    1 namespace_id   2 workflow_id   3 run_id   4 scheduled_event_id   5 attempt   6 activity_id   7 workflow_type
    8 activity_type   9 clock   10 started_event_id   11 version   12 started_time   13 start_version   14 component_ref
    ...  unknown fields are passed over
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

MAX_BYTES: Final = 2048
_STRING_FIELDS: Final = {1: "namespace_id", 2: "workflow_id", 6: "activity_id", 8: "activity_type"}


@dataclass(frozen=True, slots=True)
class TaskToken:
    """Whose task a token is for."""

    namespace_id: str
    workflow_id: str
    activity_type: str


def read_task_token(data: bytes) -> TaskToken:
    """What a token says. Raises ValueError if it is none, or says something twice."""
    if not data or len(data) > MAX_BYTES:
        raise ValueError(f"{len(data)} bytes are no task token")
    found: dict[str, str] = {}
    for number, wire_type, value in _fields(data):
        name = _STRING_FIELDS.get(number)
        if name is None:
            continue
        if wire_type != 2 or name in found:
            raise ValueError(f"{name} of a task token is not one string")
        found[name] = value.decode("utf-8")
    return TaskToken(found.get("namespace_id", ""), found.get("workflow_id", ""), found.get("activity_type", ""))


def _fields(data: bytes) -> Iterator[tuple[int, int, bytes]]:
    """Number, wire type and bytes of each field of a protobuf message. Raises ValueError where it ends early."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        number, wire_type = tag >> 3, tag & 7
        if wire_type == 0:
            _, end = _varint(data, at)
        elif wire_type == 1:
            end = at + 8
        elif wire_type == 2:
            length, at = _varint(data, at)
            end = at + length
        elif wire_type == 5:
            end = at + 4
        else:
            raise ValueError(f"wire type {wire_type} in a task token")
        if number == 0 or end > len(data):
            raise ValueError("a task token that was cut off")
        yield number, wire_type, data[at:end]
        at = end


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 64, 7):
        if at >= len(data):
            break
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise ValueError("a task token that was cut off")
