"""Errors as HTTP clients see them: OpenAI's JSON with a status.

Imports neither aiohttp nor vllm: `app.py` makes responses of these, `openai.py` makes these of
vLLM's errors.
"""

from __future__ import annotations

import json
from http import HTTPStatus

from memserve.errors import (
    DeadlineError,
    InstanceLostError,
    MemServeError,
    OverloadedError,
    RequestError,
    UnavailableError,
    UnknownModelError,
)

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "method_not_allowed_error",
    413: "request_too_large_error",
    422: "invalid_request_error",
    429: "rate_limit_error",
    500: "server_error",
    501: "not_supported_error",
    503: "unavailable_error",
    504: "timeout_error",
}

_STATUSES: tuple[tuple[type[MemServeError], int], ...] = (
    (UnknownModelError, 404),
    (RequestError, 400),
    (UnavailableError, 503),
    (OverloadedError, 429),
    (DeadlineError, 504),
    (InstanceLostError, 500),
)
"""The first class that fits counts."""


class ApiError(Exception):
    """An answer that is an error.

    `param` names the field of the body at fault, if one is.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        self.status = HTTPStatus(status)
        self.message = message
        self.param = param
        self.headers = headers or {}
        super().__init__(message)

    @classmethod
    def of(cls, error: MemServeError) -> ApiError:
        """What the client is told about one of our own errors."""
        status = next((status for kind, status in _STATUSES if isinstance(error, kind)), 500)
        headers: dict[str, str] = {}
        if isinstance(error, UnavailableError | OverloadedError):
            headers["Retry-After"] = str(error.retry_after_s)
        param = error.field if isinstance(error, RequestError) else None
        return cls(status, str(error), param=param, headers=headers)

    def body(self) -> bytes:
        """`{"error": {message, type, param, code}}`; `code` is the status, for streams too."""
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else None)
        error = {
            "message": self.message,
            "type": kind or "server_error",
            "param": self.param,
            "code": int(self.status),
        }
        return json.dumps({"error": error}).encode()

    def event(self) -> str:
        """The same as one server-sent event."""
        return f"data: {self.body().decode()}\n\n"
