"""What a Mac says is made such that a workflow can read it: payloads, failures, texts.

A workflow tries for ever to read an answer that it cannot read, and its Mac would be counted as live all that time. So
payloads are plain JSON, a failure is a kind and a sentence, and a text has no sign that a terminal obeys or UTF-8 lacks.
"""

import json
from typing import Final

from temporalio.api.common.v1 import Payload, Payloads
from temporalio.api.failure.v1 import Failure

from cli.proxying.refusal import invalid

_JSON: Final = b"json/plain"
_NULL: Final = b"binary/null"
_MAX_NESTED: Final = 100
_MAX_MESSAGE: Final = 4000
_MAX_TRACE: Final = 20_000
_MAX_KIND: Final = 100


def check_payloads(payloads: Payloads) -> None:
    """Raises RefusedError if a reader would fail on one of them."""
    for payload in payloads.payloads:
        if not _is_readable(payload):
            raise invalid("a payload that is not plain JSON")


def _is_readable(payload: Payload) -> bool:
    encoding, data = payload.metadata.get("encoding"), payload.data
    if encoding == _NULL:
        return not data
    # Deep nesting ends a reader that stands deeper on its stack than we do here.
    if encoding != _JSON or data.count(b"[") + data.count(b"{") > _MAX_NESTED:
        return False
    try:
        json.loads(data)
    except (ValueError, RecursionError):
        return False
    return True


def told(failure: Failure) -> Failure:
    """What a failure says, as the failure of an activity: kind, sentence, trace and hint. Raises RefusedError for its details."""
    info = failure.application_failure_info
    check_payloads(info.details)
    plain = Failure(
        message=clean(failure.message[:_MAX_MESSAGE]),
        source=clean(failure.source[:_MAX_KIND]),
        stack_trace=clean(failure.stack_trace[:_MAX_TRACE]),
    )
    plain.application_failure_info.type = clean(info.type[:_MAX_KIND])
    plain.application_failure_info.non_retryable = info.non_retryable
    if info.details.payloads:
        plain.application_failure_info.details.CopyFrom(info.details)
    return plain


def clean(text: str) -> str:
    """`text` with a question mark for each control sign but those of layout, and for each half of a surrogate pair."""
    return "".join("?" if _is_foul(sign) else sign for sign in text)


def _is_foul(sign: str) -> bool:
    return (sign < " " and sign not in "\n\r\t") or "\x7f" <= sign <= "\x9f" or "\ud800" <= sign <= "\udfff"
