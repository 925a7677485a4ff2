"""What an invited Mac may ask of Temporal, and nothing else: one check a method, on the parsed request.

A Mac polls its own queue, heartbeats, completes and fails its own tasks, says hello and goodbye as itself, and asks what
the server can do. A request is parsed with the SDK's protos, its set fields are held against a list, unknown ones are
dropped, and it goes on as it was understood here, signed with the caller's host. Every method that is not in the table is
refused by its name alone.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from functools import cache
from typing import Any, Final, Literal, cast, get_args, get_origin, get_type_hints

from google.protobuf.message import DecodeError, Message
from temporalio.api.common.v1 import Payloads
from temporalio.api.enums.v1 import TaskQueueKind, WorkflowIdConflictPolicy, WorkflowIdReusePolicy
from temporalio.api.taskqueue.v1 import TaskQueue
from temporalio.api.workflowservice.v1 import (
    DescribeNamespaceRequest,
    GetSystemInfoRequest,
    PollActivityTaskQueueRequest,
    RecordActivityTaskHeartbeatRequest,
    RecordWorkerHeartbeatRequest,
    RespondActivityTaskCanceledRequest,
    RespondActivityTaskCompletedRequest,
    RespondActivityTaskFailedRequest,
    ShutdownWorkerRequest,
    SignalWithStartWorkflowExecutionRequest,
    SignalWorkflowExecutionRequest,
)

from cli.proxying.readable import check_payloads, clean, told
from cli.proxying.refusal import Code, RefusedError, denied, invalid
from cli.proxying.task_token import read_task_token
from stoa.bucket.invite import Pass
from stoa.contracts import names
from stoa.contracts.fleet_messages import Goodbye, Hello, SessionInput, SweepResult

SERVICE: Final = "/temporal.api.workflowservice.v1.WorkflowService/"
MAX_REQUEST_BYTES: Final = 64 * 1024
"""Of any request; messages of the project are at most 16 KiB."""
_SMALL_BYTES: Final = 8 * 1024
_MAX_TEXT: Final = 300
_MAX_SECONDS: Final = 30 * 86_400.0
_MAX_RESULT_TEXT: Final = 4000
_MAX_RESULT_NUMBER: Final = 1e15
_MAX_ITEMS: Final = 256
_ENCODING: Final = b"json/plain"
MAC_ACTIVITIES: Final = frozenset({names.SWEEP, names.NOTICE})
"""What a session asks of its Mac; everything else it asks of the control process."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where the Macs of the run live."""

    run: str
    namespace: str
    namespace_id: str


@dataclass(frozen=True, slots=True)
class Method:
    """One method a Mac may call."""

    request: type[Message]
    check: Callable[[Any, Pass, Place], None]
    may_set: frozenset[str]
    """Fields that may be set; every other field that is ends the call."""
    max_bytes: int = _SMALL_BYTES
    waits: bool = False
    """A long poll."""
    is_seldom: bool = False
    """An honest Mac calls it a few times a minute at most, and each call makes work for others: told apart for its rate."""


def understand(path: str, data: bytes, caller: Pass, place: Place) -> tuple[Method, bytes]:
    """The method at `path` and the request as it is to be passed on. Raises RefusedError."""
    method = METHODS.get(path.removeprefix(SERVICE)) if path.startswith(SERVICE) else None
    if method is None:
        raise denied(f"{path.rpartition('/')[2]} is not for Macs")
    if len(data) > method.max_bytes:
        raise RefusedError(Code.RESOURCE_EXHAUSTED, f"a request of {len(data)} bytes, where {method.max_bytes} may be")
    request = method.request()
    try:
        request.ParseFromString(data)
    except DecodeError:
        raise invalid("the request cannot be read") from None
    request.DiscardUnknownFields()
    for name in [field.name for field, _ in request.ListFields() if field.name not in method.may_set]:
        value = getattr(request, name)
        if not isinstance(value, Message) or value.ByteSize():  # the SDK sets some messages and leaves them empty
            raise denied(f"a Mac does not set {name}")
        request.ClearField(name)
    method.check(request, caller, place)
    _sign(request, caller)
    return method, request.SerializeToString()


def _sign(request: Any, caller: Pass) -> None:
    """Say who calls by the name in the pass: a Mac cannot pose as another, and its owner's name for it stays there."""
    if "identity" in request.DESCRIPTOR.fields_by_name:
        request.identity = caller.host
    if "worker_heartbeat" in request.DESCRIPTOR.fields_by_name:
        beats = request.worker_heartbeat if isinstance(request, RecordWorkerHeartbeatRequest) else [request.worker_heartbeat]
        for beat in beats:
            if beat.ByteSize():
                beat.worker_identity = beat.host_info.host_name = caller.host


def _nothing(_request: object, _caller: Pass, _place: Place) -> None:
    """What the server can do anybody may ask."""


def _same_namespace(request: Any, _caller: Pass, place: Place) -> None:
    if request.namespace != place.namespace:
        raise denied("another namespace than the Macs'")


def _own_queue(name: str, caller: Pass) -> None:
    if name != names.mac_queue(caller.run, caller.host):
        raise denied("another queue than your own")


def _poll(request: PollActivityTaskQueueRequest, caller: Pass, place: Place) -> None:
    _same_namespace(request, caller, place)
    _own_queue(_plain_queue(request.task_queue), caller)


def _plain_queue(queue: TaskQueue) -> str:
    if queue.kind not in (TaskQueueKind.TASK_QUEUE_KIND_UNSPECIFIED, TaskQueueKind.TASK_QUEUE_KIND_NORMAL) or queue.normal_name:
        raise denied("a Mac has no sticky queue")
    return queue.name


def _own_task(request: Any, caller: Pass, place: Place) -> None:
    _same_namespace(request, caller, place)
    try:
        token = read_task_token(request.task_token)
    except ValueError:
        raise invalid("the task token cannot be read") from None
    # A server that does not tell its namespace's id compares it with the request's namespace itself.
    is_here = token.namespace_id == place.namespace_id or not place.namespace_id
    own = names.session_workflow_id(caller.run, caller.host)
    if not is_here or token.workflow_id != own or token.activity_type not in MAC_ACTIVITIES:
        raise denied("the task is not one of yours")


def _own_result(request: RespondActivityTaskCompletedRequest, caller: Pass, place: Place) -> None:
    """Also what a sweep did must be readable: a session that cannot read its Mac's answer is stuck."""
    _own_task(request, caller, place)
    if read_task_token(request.task_token).activity_type != names.SWEEP:
        check_payloads(request.result)
        return
    document = _document(request.result, SweepResult, _is_result)
    request.result.payloads[0].data = json.dumps({name: _cleaned(value) for name, value in document.items()}).encode()


def _cleaned(value: object) -> object:
    if isinstance(value, list):
        return [_cleaned(one) for one in cast(list[object], value)]
    return clean(value) if isinstance(value, str) else value


def _own_beat(request: RecordActivityTaskHeartbeatRequest | RespondActivityTaskCanceledRequest, caller: Pass, place: Place) -> None:
    """A Mac's last words are read where its task was lost."""
    _own_task(request, caller, place)
    check_payloads(request.details)


def _own_failure(request: RespondActivityTaskFailedRequest, caller: Pass, place: Place) -> None:
    _own_task(request, caller, place)
    check_payloads(request.last_heartbeat_details)
    request.failure.CopyFrom(told(request.failure))


def _worker_heartbeat(request: RecordWorkerHeartbeatRequest, caller: Pass, place: Place) -> None:
    _same_namespace(request, caller, place)
    for beat in request.worker_heartbeat:
        _own_queue(beat.task_queue, caller)


def _shutdown(request: ShutdownWorkerRequest, caller: Pass, place: Place) -> None:
    _same_namespace(request, caller, place)
    for queue in (request.task_queue, request.worker_heartbeat.task_queue):
        if queue:
            _own_queue(queue, caller)


def _hello(request: SignalWithStartWorkflowExecutionRequest, caller: Pass, place: Place) -> None:
    _same_namespace(request, caller, place)
    asked = (request.workflow_id, request.workflow_type.name, _plain_queue(request.task_queue), request.signal_name)
    own = names.session_workflow_id(caller.run, caller.host)
    if asked != (own, names.MAC_SESSION, names.control_queue(caller.run), names.HELLO):
        raise denied("a Mac starts its own session, by saying hello, and no other workflow")
    conflict, reuse = request.workflow_id_conflict_policy, request.workflow_id_reuse_policy
    if conflict != WorkflowIdConflictPolicy.WORKFLOW_ID_CONFLICT_POLICY_USE_EXISTING:
        raise denied("a session that runs is not started again")
    if reuse not in (
        WorkflowIdReusePolicy.WORKFLOW_ID_REUSE_POLICY_UNSPECIFIED,
        WorkflowIdReusePolicy.WORKFLOW_ID_REUSE_POLICY_ALLOW_DUPLICATE,
    ):
        raise denied("a session that has ended is started again")
    session = _document(request.input, SessionInput, _is_modest)
    if (session.get("run"), session.get("host")) != (caller.run, caller.host):
        raise denied("a session of another Mac")
    if any(session.get(name) for name in ("totals", "next_sweep", "nonce")) or session.get("continue_after_events", 2000) != 2000:
        raise denied("a session remembers by itself")
    hello = _document(request.signal_input, Hello, _is_modest)
    if (hello.get("host"), hello.get("invite")) != (caller.host, caller.invite):
        raise denied("hello of another Mac")
    if not hello.get("nonce"):
        raise invalid("a hello without a nonce")


def _goodbye(request: SignalWorkflowExecutionRequest, caller: Pass, place: Place) -> None:
    _same_namespace(request, caller, place)
    own = names.session_workflow_id(caller.run, caller.host)
    if (request.workflow_execution.workflow_id, request.signal_name) != (own, names.GOODBYE):
        raise denied("a Mac says goodbye to its own session, and signals no other workflow")
    if _document(request.input, Goodbye, _is_modest).get("host") != caller.host:
        raise denied("goodbye of another Mac")


def _document(payloads: Payloads, kind: type, is_fit: Callable[[object], bool]) -> Mapping[str, object]:
    """The one JSON object of a message, of which every field is `kind`'s, of its type, and fit. Raises RefusedError."""
    if len(payloads.payloads) != 1 or payloads.payloads[0].metadata.get("encoding") != _ENCODING:
        raise invalid(f"not one {kind.__name__} as JSON")
    try:
        tree: object = json.loads(payloads.payloads[0].data)
    except (ValueError, RecursionError):
        raise invalid(f"a {kind.__name__} that is not JSON") from None
    if not isinstance(tree, dict):
        raise invalid(f"a {kind.__name__} that is no object")
    document = cast(dict[str, object], tree)
    types = _types(kind)
    if document.keys() - types.keys() or not all(_is_of(value, types[name], is_fit) for name, value in document.items()):
        raise invalid(f"a {kind.__name__} with fields that are none")
    missing = {field.name for field in fields(kind) if field.default is MISSING and field.default_factory is MISSING} - document.keys()
    if missing:
        raise invalid(f"a {kind.__name__} without {', '.join(sorted(missing))}")
    return document


@cache
def _types(kind: type) -> Mapping[str, object]:
    return get_type_hints(kind)


def _is_of(value: object, wanted: object, is_fit: Callable[[object], bool]) -> bool:
    """True for a fit value of a field's type: text, a flag, a number, one of a few words, or a short list of these."""
    if get_origin(wanted) is Literal:
        return value in get_args(wanted)
    if get_origin(wanted) is tuple:
        item = get_args(wanted)[0]
        return isinstance(value, list) and len(value) <= _MAX_ITEMS and all(_is_of(one, item, is_fit) for one in cast(list[object], value))
    if wanted is bool:
        return isinstance(value, bool)
    types = {str: str, int: int, float: int | float}.get(cast(type, wanted))
    return types is not None and isinstance(value, types) and not isinstance(value, bool) and is_fit(value)


def _is_modest(value: object) -> bool:
    """True for a short text, or a finite number that could be a count or a time."""
    if isinstance(value, str):
        return len(value) <= _MAX_TEXT and value.isprintable()
    return isinstance(value, int | float) and 0 <= value <= _MAX_SECONDS


def _is_result(value: object) -> bool:
    """The same for what is counted over a sweep: bytes, and a mean that may be below zero."""
    if isinstance(value, str):
        return len(value) <= _MAX_RESULT_TEXT
    return isinstance(value, int | float) and -_MAX_RESULT_NUMBER <= value <= _MAX_RESULT_NUMBER


_TASK: Final = frozenset({"task_token", "identity", "namespace", "resource_id", "worker_version"})
METHODS: Final[Mapping[str, Method]] = {
    "GetSystemInfo": Method(GetSystemInfoRequest, _nothing, frozenset()),
    "DescribeNamespace": Method(DescribeNamespaceRequest, _same_namespace, frozenset({"namespace"})),
    "PollActivityTaskQueue": Method(
        PollActivityTaskQueueRequest,
        _poll,
        frozenset({"namespace", "task_queue", "identity", "worker_instance_key", "task_queue_metadata", "worker_version_capabilities"}),
        waits=True,
    ),
    "RecordActivityTaskHeartbeat": Method(RecordActivityTaskHeartbeatRequest, _own_beat, _TASK | {"details"}),
    "RespondActivityTaskCompleted": Method(
        RespondActivityTaskCompletedRequest, _own_result, _TASK | {"result"}, MAX_REQUEST_BYTES, is_seldom=True
    ),
    "RespondActivityTaskFailed": Method(
        RespondActivityTaskFailedRequest, _own_failure, _TASK | {"failure", "last_heartbeat_details"}, MAX_REQUEST_BYTES, is_seldom=True
    ),
    "RespondActivityTaskCanceled": Method(
        RespondActivityTaskCanceledRequest, _own_beat, _TASK | {"details"}, MAX_REQUEST_BYTES, is_seldom=True
    ),
    "RecordWorkerHeartbeat": Method(
        RecordWorkerHeartbeatRequest,
        _worker_heartbeat,
        frozenset({"namespace", "identity", "worker_heartbeat", "resource_id"}),
        MAX_REQUEST_BYTES,
    ),
    "ShutdownWorker": Method(
        ShutdownWorkerRequest,
        _shutdown,
        frozenset({"namespace", "identity", "reason", "worker_heartbeat", "worker_instance_key", "task_queue", "task_queue_types"}),
        MAX_REQUEST_BYTES,
    ),
    "SignalWithStartWorkflowExecution": Method(
        SignalWithStartWorkflowExecutionRequest,
        _hello,
        frozenset(
            {"namespace", "workflow_id", "workflow_type", "task_queue", "input", "identity", "request_id", "signal_name", "signal_input"}
            | {"workflow_id_reuse_policy", "workflow_id_conflict_policy"}
        ),
        MAX_REQUEST_BYTES,
        is_seldom=True,
    ),
    "SignalWorkflowExecution": Method(
        SignalWorkflowExecutionRequest,
        _goodbye,
        frozenset({"namespace", "workflow_execution", "signal_name", "input", "identity", "request_id"}),
        is_seldom=True,
    ),
}
