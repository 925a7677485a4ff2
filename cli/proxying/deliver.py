"""A task that the queue of a Mac gave out is handed on only to the Mac it is for.

Two runs can have Macs whose queues are spelt alike (`stoa.contracts.namesakes`). What is another run's goes back to the
server as a failed attempt, which its session sees, and its tickets are shown to nobody.
"""

import json
from typing import Any, Final, cast

from google.protobuf.message import DecodeError
from temporalio.api.workflowservice.v1 import PollActivityTaskQueueResponse, RespondActivityTaskFailedRequest

from stoa.bucket.invite import Pass
from stoa.contracts.errors import NamesakeError
from stoa.contracts.namesakes import HINT

MISDELIVERED: Final = f"this Mac's name, with its run's, is spelt like that of another run's Mac: {HINT}"


def give_back(reply: bytes, caller: Pass, namespace: str) -> RespondActivityTaskFailedRequest | None:
    """What to tell the server about the task in a poll's reply; None if it is the caller's, or there is none."""
    task = PollActivityTaskQueueResponse()
    try:
        task.ParseFromString(reply)
    except DecodeError:
        return None
    if not task.task_token or _addressee(task) == (caller.run, caller.host):
        return None
    request = RespondActivityTaskFailedRequest(task_token=task.task_token, namespace=namespace, identity=caller.host)
    request.failure.message = "the task was polled by the Mac of another run whose name is spelt alike"
    request.failure.application_failure_info.type = NamesakeError.__name__
    return request


def _addressee(task: PollActivityTaskQueueResponse) -> tuple[object, object]:
    """Run and host that a session wrote into the task; nobody where there are none."""
    try:
        tree: Any = json.loads(task.input.payloads[0].data)
    except (ValueError, IndexError, RecursionError):
        return None, None
    if not isinstance(tree, dict):
        return None, None
    document = cast(dict[str, object], tree)
    return document.get("run"), document.get("host")
