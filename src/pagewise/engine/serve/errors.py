"""Why a request has no answer, and how clients hear of it: errors in OpenAI's form (lesson 9).

{"error": {"message": …, "type": …, "param": the field of the body or null, "code": OpenAI's name or null}}
"""


class Failure(Exception):
    """A request without an answer: the field of the body that is wrong, the status, and OpenAI's code, if any."""

    def __init__(self, message: str, field: str | None = None, *, status: int = 400, code: str | None = None) -> None:
        super().__init__(message)
        self.field, self.status, self.code = field, status, code

    @property
    def body(self) -> dict:
        """The error in the form that OpenAI's client raises as an exception."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {"error": {"message": str(self), "type": kind, "param": self.field, "code": self.code}}
