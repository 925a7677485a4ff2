"""The proxy's rules without a server: task tokens, rates, passes, and requests of every allowed method."""

import base64
import json
import resource
from dataclasses import asdict

import pytest
from hypothesis import given
from hypothesis import strategies as st
from temporalio.api.common.v1 import Payload, Payloads
from temporalio.api.workflowservice.v1 import (
    DescribeNamespaceRequest,
    PollActivityTaskQueueRequest,
    PollActivityTaskQueueResponse,
    RecordActivityTaskHeartbeatRequest,
    RecordWorkerHeartbeatRequest,
    RespondActivityTaskCanceledRequest,
    RespondActivityTaskCompletedRequest,
    RespondActivityTaskFailedRequest,
    ShutdownWorkerRequest,
    SignalWithStartWorkflowExecutionRequest,
)
from temporalio.converter import DataConverter
from temporalio.exceptions import ApplicationError

from cli.proxy import make_room_for_connections
from cli.proxying import limits
from cli.proxying.allow import MAX_REQUEST_BYTES, METHODS, SERVICE, Place, understand
from cli.proxying.deliver import give_back
from cli.proxying.limits import Limiter, Rates
from cli.proxying.passes import Passes
from cli.proxying.refusal import Code, RefusedError
from cli.proxying.task_token import MAX_BYTES, TaskToken, read_task_token
from stoa.bucket.invite import PASS_FORMAT, BucketDoor, Pass, TemporalDoor, write_invite
from stoa.bucket.manifest import Signer
from stoa.contracts.fleet_messages import Hello, SessionInput, SweepResult

PLACE = Place("demo", "mac", "a9cb20a4-3fc7-4bbe-9c12-e18bd2dfb122")
CALLER = Pass(PASS_FORMAT, "demo", "mac-1", "mac-1.0123abcd", 0, 2_000_000_000)
# A token that Temporal's dev server 1.32 made for a sweep of mac-2.
REAL = base64.b64decode(
    "CiRhOWNiMjBhNC0zZmM3LTRiYmUtOWMxMi1lMThiZDJkZmIxMjISDm1hYy1kZW1vLW1hYy0yGiQ3ODY5M2U4YS1hN2QwLTQyODgtYWFiMi0xMzUwZTFl"
    "NDk0ODcgBigBMgExQgVzd2VlcEoICAEQmoBAGAE="
)


def field(number: int, value: bytes) -> bytes:
    return bytes([number << 3 | 2, len(value)]) + value


def token(workflow_id: str = "mac-demo-mac-1", activity_type: str = "sweep", namespace_id: str = PLACE.namespace_id) -> bytes:
    return field(1, namespace_id.encode()) + field(2, workflow_id.encode()) + field(8, activity_type.encode())


def test_a_token_says_whose_task_it_is() -> None:
    assert read_task_token(REAL) == TaskToken(PLACE.namespace_id, "mac-demo-mac-2", "sweep")
    assert read_task_token(token()) == TaskToken(PLACE.namespace_id, "mac-demo-mac-1", "sweep")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        REAL[:-1],
        REAL[:30],
        REAL + field(2, b"mac-demo-mac-2"),  # said twice: the server would take the second
        REAL + field(8, b"grant_sweep"),
        bytes([2 << 3 | 0, 1]),  # a number where a string is
        field(1, b"\xff\xfe"),
        b"\x07\x00",
        b"\x00\x01",
        b"\xff" * 20,
        field(2, b"x") * (MAX_BYTES // 3 + 1),
    ],
)
def test_what_is_no_token_is_told(data: bytes) -> None:
    with pytest.raises(ValueError):
        read_task_token(data)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_token_or_a_value_error(data: bytes) -> None:
    try:
        read_task_token(data)
    except ValueError:
        return


@given(st.integers(0, len(REAL) - 1), st.integers(0, 255))
def test_one_changed_byte_makes_it_nobody_elses(at: int, byte: int) -> None:
    changed = REAL[:at] + bytes([byte]) + REAL[at + 1 :]
    try:
        found = read_task_token(changed)
    except ValueError:
        return
    # The only byte between two hosts of one length is the last of the workflow id.
    assert found.workflow_id != "mac-demo-mac-1" or (at, byte) == (REAL.index(b"mac-demo-mac-2") + 13, ord("1"))


def passes(method: str, request: object) -> bytes:
    return understand(SERVICE + method, request.SerializeToString(), CALLER, PLACE)[1]


def refused(method: str, data: bytes) -> RefusedError:
    with pytest.raises(RefusedError) as caught:
        understand(method if method.startswith("/") else SERVICE + method, data, CALLER, PLACE)
    return caught.value


def as_json(value: object) -> Payloads:
    return Payloads(payloads=[Payload(metadata={"encoding": b"json/plain"}, data=json.dumps(value).encode())])


def hello(session: dict[str, object] | None = None, said: dict[str, object] | None = None, **changes: object) -> bytes:
    request = SignalWithStartWorkflowExecutionRequest(
        namespace="mac",
        workflow_id="mac-demo-mac-1",
        workflow_type={"name": "MacSessionWorkflow"},
        task_queue={"name": "rl-ctl-demo"},
        signal_name="hello",
        workflow_id_reuse_policy=1,
        workflow_id_conflict_policy=2,
        input=as_json({**asdict(SessionInput("demo", "mac-1")), **(session or {})}),
        signal_input=as_json({**asdict(Hello("mac-1", "n", invite=CALLER.invite)), **(said or {})}),
    )
    request.MergeFrom(SignalWithStartWorkflowExecutionRequest(**changes))
    return request.SerializeToString()


def test_a_hello_as_the_worker_says_it_passes() -> None:
    understand(SERVICE + "SignalWithStartWorkflowExecution", hello(), CALLER, PLACE)
    understand(SERVICE + "SignalWithStartWorkflowExecution", hello({"place": "Lyon, at home"}), CALLER, PLACE)


@pytest.mark.parametrize(
    "data",
    [
        hello({"host": "mac-2"}),
        hello({"run": "other"}),
        hello({"totals": '{"sweep": 7}'}),
        hello({"next_sweep": 7}),
        hello({"continue_after_events": 10}),
        hello({"heartbeat_seconds": 1e300}),
        hello({"heartbeat_seconds": -1}),
        hello({"groups": [1]}),
        hello({"groups": "eight"}),
        hello({"groups": 1.5}),
        hello({"groups": True}),
        hello({"heartbeat_seconds": "30"}),
        hello({"heartbeat_seconds": float("nan")}),
        hello({"place": 7}),
        hello(said={"nonce": 5}),
        hello(said={"nonce": ""}),
        hello(said={"groups": None}),
        hello({"place": "x" * 5000}),
        hello({"place": "\x1b[31m"}),
        hello({"stranger": 1}),
        hello(said={"host": "mac-2"}),
        hello(said={"invite": "mac-1.99999999"}),
        hello(said={"invite": ""}),
        hello(workflow_id="run-demo"),
        hello(workflow_id="mac-demo-mac-2"),
        hello(workflow_type={"name": "RunWorkflow"}),
        hello(task_queue={"name": "mac-demo-mac-1"}),
        hello(task_queue={"kind": 2}),
        hello(signal_name="run_stopped"),
        hello(namespace="core"),
        hello(workflow_id_conflict_policy=3),
        hello(workflow_id_reuse_policy=4),
        hello(cron_schedule="* * * * *"),
        hello(search_attributes={"indexed_fields": {"RlHost": Payload(data=b'"mac-2"')}}),
        hello(memo={"fields": {"a": Payload(data=b"1")}}),
        hello(header={"fields": {"a": Payload(data=b"1")}}),
        hello(retry_policy={"maximum_attempts": 3}),
        hello(workflow_run_timeout={"seconds": 1}),
        hello(input=as_json({})),  # a second payload
        b"\xff\xff",
    ],
)
def test_a_hello_that_says_anything_else_is_refused(data: bytes) -> None:
    assert refused("SignalWithStartWorkflowExecution", data).code in (Code.PERMISSION_DENIED, Code.INVALID_ARGUMENT)


def test_unknown_fields_do_not_pass() -> None:
    known = DescribeNamespaceRequest(namespace="mac").SerializeToString()
    smuggled = known + bytes([0xFA, 0x3F, 3]) + b"abc"  # field 1023
    assert understand(SERVICE + "DescribeNamespace", smuggled, CALLER, PLACE)[1] == known


def test_a_second_value_of_a_field_does_not_slip_past() -> None:
    twice = DescribeNamespaceRequest(namespace="core").SerializeToString() + DescribeNamespaceRequest(namespace="mac").SerializeToString()
    assert (
        understand(SERVICE + "DescribeNamespace", twice, CALLER, PLACE)[1] == DescribeNamespaceRequest(namespace="mac").SerializeToString()
    )
    assert (
        refused("DescribeNamespace", DescribeNamespaceRequest(namespace="mac").SerializeToString() + twice[:6]).code
        is Code.PERMISSION_DENIED
    )


def test_a_call_is_signed_with_the_host_of_its_pass() -> None:
    poll = PollActivityTaskQueueRequest(namespace="mac", task_queue={"name": "mac-demo-mac-1"}, identity="77@annas-macbook")
    assert PollActivityTaskQueueRequest.FromString(passes("PollActivityTaskQueue", poll)).identity == "mac-1"
    beat = {"task_queue": "mac-demo-mac-1", "worker_identity": "77@mac-2", "host_info": {"host_name": "annas-macbook", "process_id": "77"}}
    sent = passes("RecordWorkerHeartbeat", RecordWorkerHeartbeatRequest(namespace="mac", worker_heartbeat=[beat]))
    assert b"annas" not in sent and b"mac-2" not in sent
    assert RecordWorkerHeartbeatRequest.FromString(sent).worker_heartbeat[0].host_info.process_id == "77"
    ended = passes("ShutdownWorker", ShutdownWorkerRequest(namespace="mac", worker_heartbeat=beat))
    assert b"annas" not in ended
    assert not ShutdownWorkerRequest.FromString(passes("ShutdownWorker", ShutdownWorkerRequest(namespace="mac"))).HasField(
        "worker_heartbeat"
    )


def test_a_server_that_does_not_tell_its_namespaces_id_is_trusted_to_look() -> None:
    result = as_json(asdict(SweepResult("done", 3)))
    request = RespondActivityTaskCompletedRequest(
        namespace="mac", task_token=token(namespace_id="unknown"), result=result
    ).SerializeToString()
    understand(SERVICE + "RespondActivityTaskCompleted", request, CALLER, Place("demo", "mac", ""))
    with pytest.raises(RefusedError):
        understand(SERVICE + "RespondActivityTaskCompleted", request, CALLER, PLACE)


def test_requests_have_a_size_by_method() -> None:
    large = PollActivityTaskQueueRequest(namespace="mac", task_queue={"name": "mac-demo-mac-1"}, identity="x" * 9000)
    assert refused("PollActivityTaskQueue", large.SerializeToString()).code is Code.RESOURCE_EXHAUSTED
    full = {"status": "done", "sweep": 3, "purpose": "eval", "keys": ["evals/" + "k" * 200] * 90}
    result = RespondActivityTaskCompletedRequest(namespace="mac", task_token=token(), result=as_json(full))
    passes("RespondActivityTaskCompleted", result)
    result.result.payloads[0].data = b"x" * MAX_REQUEST_BYTES
    assert refused("RespondActivityTaskCompleted", result.SerializeToString()).code is Code.RESOURCE_EXHAUSTED


def completed(**changes: object) -> RespondActivityTaskCompletedRequest:
    result = {**asdict(SweepResult("done", 3, version=7, reward_mean=-0.5, unsent=("groups/a",), reason="two\nlines")), **changes}
    return RespondActivityTaskCompletedRequest(namespace="mac", task_token=token(), result=as_json(result))


def test_a_sweeps_result_that_its_session_could_not_read_is_refused() -> None:
    """A workflow that cannot read an answer tries for ever: its Mac would be counted as live, and hold its grants."""
    passes("RespondActivityTaskCompleted", completed())
    passes("RespondActivityTaskCompleted", completed(decode_seconds=12, bytes_down=5 * 10**12))
    for name, value in (
        ("status", "glorious"),
        ("status", 5),
        ("num_groups", "many"),
        ("num_groups", 1.5),
        ("num_groups", True),
        ("decode_seconds", float("nan")),
        ("decode_seconds", float("inf")),
        ("decode_seconds", None),
        ("bytes_up", 10**400),
        ("keys", "groups/a"),
        ("keys", [1]),
        ("keys", ["k"] * 300),
        ("unasked", 1),
        ("reason", "x" * 5000),
        ("stranger", 1),
    ):
        code = refused("RespondActivityTaskCompleted", completed(**{name: value}).SerializeToString()).code
        assert code is Code.INVALID_ARGUMENT, (name, value)
    bare = RespondActivityTaskCompletedRequest(namespace="mac", task_token=token(), result=as_json({"sweep": 3}))
    assert "without status" in refused("RespondActivityTaskCompleted", bare.SerializeToString()).message
    # The owner's notice has no result of this kind.
    passes("RespondActivityTaskCompleted", RespondActivityTaskCompletedRequest(namespace="mac", task_token=token(activity_type="notice")))


@pytest.mark.parametrize(
    "task_token",
    [
        token("mac-demo-mac-2"),
        token("run-demo"),
        token(activity_type="grant_sweep"),
        token(activity_type=""),
        token(namespace_id="other"),
        b"\x00",
    ],
)
@pytest.mark.parametrize("method", [name for name in METHODS if "ActivityTask" in name and name != "PollActivityTaskQueue"])
def test_only_own_sweeps_are_answered(method: str, task_token: bytes) -> None:
    request = METHODS[method].request(namespace="mac", task_token=task_token)
    assert refused(method, request.SerializeToString()).code in (Code.PERMISSION_DENIED, Code.INVALID_ARGUMENT)
    passes(method, completed() if "Completed" in method else METHODS[method].request(namespace="mac", task_token=token()))


UNREADABLE = [
    Payload(metadata={"encoding": b"strange"}, data=b"x"),
    Payload(data=b"1"),
    Payload(metadata={"encoding": b"binary/null"}, data=b"x"),
    Payload(metadata={"encoding": b"json/protobuf", "messageType": b"none.Such"}, data=b"{}"),
    Payload(metadata={"encoding": b"json/plain"}, data=b"{"),
    Payload(metadata={"encoding": b"json/plain"}, data=b"\xff"),
    Payload(metadata={"encoding": b"json/plain"}, data=b"[" * 3000 + b"]" * 3000),
]


@pytest.mark.parametrize("payload", UNREADABLE)
def test_a_word_that_its_session_could_not_read_is_refused(payload: Payload) -> None:
    """Last words of a lost task, details of a failure, the answer to a notice: a workflow reads all of them."""
    bad, at = Payloads(payloads=[payload]), {"namespace": "mac", "task_token": token()}
    for method, request in (
        ("RecordActivityTaskHeartbeat", RecordActivityTaskHeartbeatRequest(**at, details=bad)),
        ("RespondActivityTaskCanceled", RespondActivityTaskCanceledRequest(**at, details=bad)),
        ("RespondActivityTaskFailed", RespondActivityTaskFailedRequest(**at, last_heartbeat_details=bad)),
        ("RespondActivityTaskFailed", RespondActivityTaskFailedRequest(**at, failure={"application_failure_info": {"details": bad}})),
        (
            "RespondActivityTaskCompleted",
            RespondActivityTaskCompletedRequest(namespace="mac", task_token=token(activity_type="notice"), result=bad),
        ),
    ):
        assert refused(method, request.SerializeToString()).code is Code.INVALID_ARGUMENT, method
    passes("RecordActivityTaskHeartbeat", RecordActivityTaskHeartbeatRequest(**at, details=as_json({"progress": "[3 of 8]"})))


def test_a_sweep_without_a_result_is_refused() -> None:
    bare = RespondActivityTaskCompletedRequest(namespace="mac", task_token=token()).SerializeToString()
    assert refused("RespondActivityTaskCompleted", bare).code is Code.INVALID_ARGUMENT


@pytest.mark.parametrize(
    "failure",
    [
        {"timeout_failure_info": {"timeout_type": 99}},
        {"timeout_failure_info": {"last_heartbeat_details": {"payloads": [UNREADABLE[0]]}}},
        {"canceled_failure_info": {"details": {"payloads": [UNREADABLE[0]]}}},
        {"activity_failure_info": {"retry_state": 77}},
        {"application_failure_info": {"type": "X", "category": 99}},
        {"cause": {"child_workflow_execution_failure_info": {"retry_state": 77}}},
        {"encoded_attributes": UNREADABLE[0]},
        {},
    ],
)
def test_a_failure_goes_on_as_one_that_its_session_can_read(failure: dict[str, object]) -> None:
    said = {"message": "cut\n\x1b]0;owned\x07", **failure}
    sent = passes("RespondActivityTaskFailed", RespondActivityTaskFailedRequest(namespace="mac", task_token=token(), failure=said))
    converter = DataConverter.default
    read = converter.failure_converter.from_failure(RespondActivityTaskFailedRequest.FromString(sent).failure, converter.payload_converter)
    assert isinstance(read, ApplicationError)
    assert (read.message, read.cause) == ("cut\n?]0;owned?", None)


def test_a_failure_keeps_its_kind_and_hint() -> None:
    info = {"type": "DiskFullError", "non_retryable": True, "details": as_json("make room")}
    request = RespondActivityTaskFailedRequest(
        namespace="mac", task_token=token(), failure={"message": "full", "stack_trace": "at x\n", "application_failure_info": info}
    )
    assert RespondActivityTaskFailedRequest.FromString(passes("RespondActivityTaskFailed", request)).failure == request.failure


def test_signs_that_a_terminal_obeys_or_no_file_can_hold_do_not_pass() -> None:
    """Half a surrogate pair passes as JSON, and ends whoever writes it as UTF-8."""
    sent = passes("RespondActivityTaskCompleted", completed(reason="a\ud800\x1b[2Jb\u00a0\nc", unsent=["k\udfff"], heat="\x9b"))
    read = json.loads(RespondActivityTaskCompletedRequest.FromString(sent).result.payloads[0].data)
    assert (read["reason"], read["unsent"], read["heat"]) == ("a??[2Jb\u00a0\nc", ["k?"], "?")
    assert (read["status"], read["sweep"], read["reward_mean"]) == ("done", 3, -0.5)


@pytest.mark.parametrize(
    "path", ["", "/", "GetSystemInfo", "/temporal.api.operatorservice.v1.OperatorService/GetSystemInfo", SERVICE, SERVICE + "a/b"]
)
def test_a_path_that_is_not_in_the_table_is_refused(path: str) -> None:
    with pytest.raises(RefusedError):
        understand(path, b"", CALLER, PLACE)


def test_a_caller_has_so_many_calls_a_second_and_so_many_open() -> None:
    now = [0.0]
    limiter = Limiter(Rates(calls_per_second=2.0, burst_calls=4.0, open_calls=2), clock=lambda: now[0])
    with limiter.call("a"), limiter.call("a"):
        with pytest.raises(RefusedError, match="open already"), limiter.call("a"):
            pass
        with limiter.call("b"):
            pass
    for _ in range(2):
        with limiter.call("a"):
            pass
    with pytest.raises(RefusedError, match="slow down") as caught, limiter.call("a"):
        pass
    assert caught.value.code is Code.RESOURCE_EXHAUSTED
    now[0] = 0.5
    with limiter.call("a"):
        pass
    with pytest.raises(RefusedError), limiter.call("a"):
        pass


def test_callers_are_forgotten_when_there_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_CALLERS", 3)
    limiter = Limiter(Rates())
    for name in "abcdef":
        with limiter.call(name):
            pass
    assert list(limiter._uses) == ["d", "e", "f"]


def test_a_pass_is_good_until_its_end_and_its_revocation() -> None:
    signer, now, revoked = Signer.generate(), [1000.0], dict[str, str]()
    _, invite = write_invite(
        signer,
        "demo",
        "mac-1",
        seconds=100,
        temporal=TemporalDoor("a:1", "mac"),
        bucket=BucketDoor("http://b:1", "b", "auto", "k", "s"),
        now=1000,
    )
    known = Passes("demo", signer.public_key, lambda host, _: revoked.get(host), clock=lambda: now[0])
    shown = [("authorization", f"Bearer {invite.proof}")]
    assert known.known(shown) is None
    assert known.check(shown).host == "mac-1"
    assert known.known(shown) == known.check(shown)
    for wrong in (
        [],
        [*shown, *shown],
        [("authorization", invite.proof)],
        [("authorization", b"Bearer x")],
        [("authorization", "Bearer ")],
    ):
        assert known.known(wrong) is None
        with pytest.raises(RefusedError, match="no pass") as caught:
            known.check(wrong)
        assert caught.value.code is Code.UNAUTHENTICATED
    revoked["mac-1"] = "mac-1 was revoked: sold"
    for ask in (known.known, known.check):
        with pytest.raises(RefusedError, match="sold") as caught:
            ask(shown)
        assert caught.value.code is Code.PERMISSION_DENIED
    revoked.clear()
    now[0] = 1100.0
    for ask in (known.known, known.check):
        with pytest.raises(RefusedError, match="was good until") as caught:
            ask(shown)
        assert caught.value.code is Code.UNAUTHENTICATED
        assert invite.proof not in caught.value.message


def test_the_proxy_may_open_more_files_than_a_process_begins_with() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = 10**6 if hard == resource.RLIM_INFINITY else hard
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(1024, most), hard))
        make_room_for_connections()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (min(21_000, most), hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize(
    ("data", "is_ours"),
    [
        (b'{"run": "demo", "host": "mac-1"}', True),
        (b'{"run": "demo-mac", "host": "1"}', False),
        (b'{"run": "demo"}', False),
        (b"[1]", False),
        (b"{", False),
    ],
)
def test_a_task_is_handed_only_to_the_mac_it_names(data: bytes, is_ours: bool) -> None:
    payload = Payload(metadata={"encoding": b"json/plain"}, data=data)
    task = PollActivityTaskQueueResponse(task_token=token(), input=Payloads(payloads=[payload]))
    back = give_back(task.SerializeToString(), CALLER, "mac")
    assert (back is None) == is_ours
    if back is not None:
        assert (back.task_token, back.namespace, back.failure.application_failure_info.type) == (token(), "mac", "NamesakeError")
    assert give_back(PollActivityTaskQueueResponse().SerializeToString(), CALLER, "mac") is None
