"""A call that is not passed on: its gRPC status and the sentence the caller gets. No secret and no other host is named."""

from enum import Enum


class Code(Enum):
    """The statuses a refusal may have; values are names of `grpc.StatusCode`."""

    UNAUTHENTICATED = "UNAUTHENTICATED"
    PERMISSION_DENIED = "PERMISSION_DENIED"
    INVALID_ARGUMENT = "INVALID_ARGUMENT"
    RESOURCE_EXHAUSTED = "RESOURCE_EXHAUSTED"
    UNAVAILABLE = "UNAVAILABLE"


class RefusedError(Exception):
    """Ends a call inside the proxy; becomes the status of the reply."""

    def __init__(self, code: Code, message: str) -> None:
        super().__init__(message)
        self.code, self.message = code, message


def denied(message: str) -> RefusedError:
    """The caller may not do this."""
    return RefusedError(Code.PERMISSION_DENIED, message)


def invalid(message: str) -> RefusedError:
    """The request is not one a Mac of this project makes."""
    return RefusedError(Code.INVALID_ARGUMENT, message)
