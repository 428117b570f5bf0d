"""Why a request has no answer, and how clients hear of it: errors in OpenAI's form (lesson 9).

{"error": {"message": …, "type": …, "param": the field of the body or null, "code": OpenAI's name or null}}
"""

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response


class Failure(Exception):
    """A request without an answer: the status, the field of the body that is wrong, and OpenAI's code, if any."""

    status, field, code, headers = 500, None, None, None


class Refused(Failure):
    """A request that the server does not compute: something is wrong with the request, or the server ends."""

    def __init__(self, message: str, field: str | None = None, *, status: int = 400, code: str | None = None) -> None:
        super().__init__(message)
        self.field, self.status, self.code = field, status, code


class Full(Failure):
    """The queue is full: `max_queue` requests wait or run."""

    status, code, headers = 429, "rate_limit_exceeded", {"Retry-After": "1"}


class StepFailed(Failure):
    """The step that computed a request raised an exception, or a choice ended with an error."""


def refusal(error: Exception, request: Request) -> Response:
    """Return the answer to a request that ended in an exception."""
    if isinstance(error, ClientDisconnect):
        return Response()  # no one reads it
    if isinstance(error, HTTPException):
        error = Refused(f"{request.method} {request.url.path}: {error.detail}", status=error.status_code)
    if not isinstance(error, Failure):
        error = Failure(f"{type(error).__name__}: {error}")
    return JSONResponse(error_body(error), error.status, headers=error.headers)


def error_body(error: Failure) -> dict:
    """Return an error in the form that OpenAI's client raises as an exception."""
    kind = "server_error" if error.status >= 500 else "invalid_request_error"
    return {"error": {"message": str(error), "type": kind, "param": error.field, "code": error.code}}
