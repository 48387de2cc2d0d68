"""The exception tree.

    MemServeError
    ├── ConfigError            a key, its value, and what is allowed
    ├── RequestError           the client's request cannot be served (HTTP 4xx)
    │   └── UnknownModelError
    ├── UnavailableError       the cluster cannot serve it now (HTTP 503, with Retry-After)
    ├── OverloadedError        too many requests wait already (HTTP 429, with Retry-After)
    ├── DeadlineError          the request took longer than it may (HTTP 504)
    ├── InstanceLostError      the instance that held the request died (HTTP 500)
    ├── StartError             an instance or a port could not be brought up
    ├── RankLostError          a rank of an instance hangs: the instance must end
    ├── GeometryMismatchError  two instances' KV caches cannot exchange blocks
    ├── OutOfBlocksError       a pool has no room
    ├── TransferError          KV did not arrive whole
    └── ProtocolError          a message that its receiver cannot understand

A user's mistake is shown as one line; a traceback means a fault in MemServe.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class MemServeError(Exception):
    """Base of all errors that MemServe raises on purpose."""


class ConfigError(MemServeError):
    """A configuration key or flag has a bad value, or does not exist."""

    def __init__(self, key: str, problem: str, allowed: str | None = None) -> None:
        self.key = key
        self.problem = problem
        self.allowed = allowed
        super().__init__(f"{key}: {problem}" + (f"; allowed: {allowed}" if allowed else ""))

    @classmethod
    def unknown_key(cls, key: str, known: Iterable[str]) -> ConfigError:
        """An unknown key, with the nearest known one if there is one."""
        known = sorted(known)
        near = difflib.get_close_matches(key, known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else ", ".join(known)
        return cls(key, "unknown key", hint)


class RequestError(MemServeError):
    """The request itself cannot be served: too long, malformed, or it names something unknown.

    `field`: of its body, if one is at fault.
    """

    def __init__(self, message: str, field: str | None = None) -> None:
        self.field = field
        super().__init__(message)


class UnknownModelError(RequestError):
    """The request names a model that is not served here."""


class UnavailableError(MemServeError):
    """No instance can take the request now; trying again later may work."""

    def __init__(self, message: str, retry_after_s: int = 5) -> None:
        self.retry_after_s = retry_after_s
        super().__init__(message)


class OverloadedError(MemServeError):
    """The instances have all they can do, and so have those who wait."""

    def __init__(self, message: str, retry_after_s: int = 5) -> None:
        self.retry_after_s = retry_after_s
        super().__init__(message)


class DeadlineError(MemServeError):
    """The request was not complete when its time was over."""


class InstanceLostError(MemServeError):
    """An instance died and the request could not be moved to another one."""


class StartError(MemServeError):
    """An instance, the zygote or the HTTP port could not be brought up."""


class RankLostError(MemServeError):
    """A rank of this instance does not answer, and may still be touching memory."""


class GeometryMismatchError(MemServeError):
    """Two instances' KV caches differ in something that must be equal."""


class OutOfBlocksError(MemServeError):
    """A pool cannot give the blocks that were asked for."""


class TransferError(MemServeError):
    """A transfer failed, or fewer bytes arrived than were promised."""


class ProtocolError(MemServeError):
    """A message of another protocol version, or one that does not decode."""
