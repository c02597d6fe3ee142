"""Errors of the service and of the client: each keeps gRPC's code and the message.

What to do is the class:

* ``StepLost``: repeat the step (``lmhead.elastic_step`` does);
* ``HeadPoisoned``: restore or recreate the head, then repeat the step;
* ``Unavailable``: nobody answers; try again later;
* ``ResourceExhausted``: ask for less, or give the server more;
* any other: the request is wrong, and the message says what.
"""

from __future__ import annotations

from typing import Any, Dict, Optional, Tuple, Type


class Error(Exception):
    """A call that failed.

    Attributes:
        code: gRPC's number, such as 3 for INVALID_ARGUMENT.
        message: what was got, what was wanted, where, and what to do.
    """

    code: int = 2
    code_name: str = "UNKNOWN"

    def __init__(self, message: str, code: Optional[int] = None):
        super().__init__(message)
        self.message = message
        if code is not None:
            self.code = code
            self.code_name = _NAMES.get(code, f"code {code}")

    def __str__(self) -> str:
        return f"{self.code_name}: {self.message}"

    def __reduce__(self) -> Tuple[Any, ...]:
        return _rebuild, (type(self), self.message, self.__dict__)


def _rebuild(kind: Type[Error], message: str, attributes: Dict[str, Any]) -> Error:
    error = kind(message)
    error.__dict__.update(attributes)
    return error


class Cancelled(Error):
    """The step writer was cancelled."""

    code, code_name = 1, "CANCELLED"


class InvalidArgument(Error):
    """Bad input; nothing was counted."""

    code, code_name = 3, "INVALID_ARGUMENT"


class DeadlineExceeded(Error):
    """No answer in time."""

    code, code_name = 4, "DEADLINE_EXCEEDED"


class NotFound(Error):
    """No such head."""

    code, code_name = 5, "NOT_FOUND"


class AlreadyExists(Error):
    """A head of that name exists with another specification."""

    code, code_name = 6, "ALREADY_EXISTS"


class PermissionDenied(Error):
    """This client may not do that."""

    code, code_name = 7, "PERMISSION_DENIED"


class ResourceExhausted(Error):
    """No room for it."""

    code, code_name = 8, "RESOURCE_EXHAUSTED"


class FailedPrecondition(Error):
    """Wrong order or state."""

    code, code_name = 9, "FAILED_PRECONDITION"


class Aborted(Error):
    """The step, or the head, cannot go on."""

    code, code_name = 10, "ABORTED"


class Unimplemented(Error):
    """The server does not have it."""

    code, code_name = 12, "UNIMPLEMENTED"


class Internal(Error):
    """A fault of lmhead."""

    code, code_name = 13, "INTERNAL"


class Unavailable(Error):
    """Nobody answers, after all attempts."""

    code, code_name = 14, "UNAVAILABLE"


class DataLoss(Error):
    """Stored data is broken."""

    code, code_name = 15, "DATA_LOSS"


class Unauthenticated(Error):
    """The credentials are missing or wrong."""

    code, code_name = 16, "UNAUTHENTICATED"


class StepLost(Error):
    """The step is gone: repeat it. Nothing of it was applied, unless it is commit() that raised: then
    ``RemoteHead.info().last_committed_step`` tells.

    Attributes:
        restarted: the service has another incarnation now, so that its heads must be restored first. None when it does
            not answer yet.
    """

    code, code_name = 10, "ABORTED"
    restarted: Optional[bool] = None


class HeadPoisoned(Error):
    """The head had a fatal error and refuses everything until it is restored, or deleted and created again."""

    code, code_name = 10, "ABORTED"


_BY_CODE = {kind.code: kind for kind in (
    Cancelled, InvalidArgument, DeadlineExceeded, NotFound, AlreadyExists, PermissionDenied, ResourceExhausted,
    FailedPrecondition, Aborted, Unimplemented, Internal, Unavailable, DataLoss, Unauthenticated)}
_NAMES = {kind.code: kind.code_name for kind in _BY_CODE.values()}


def error_of(code: int, message: str) -> Error:
    """The exception for gRPC's ``code``."""
    return _BY_CODE.get(code, Error)(message, code)
