"""Asks a running server for its status over HTTP: for `memserve status` and `memserve top`."""

from __future__ import annotations

import http.client
import urllib.error
import urllib.request
from typing import TypeVar
from urllib.parse import urlsplit

import msgspec

from memserve.errors import ConfigError, ProtocolError, UnavailableError
from memserve.status import AuditReport, Snapshot

_T = TypeVar("_T")


class Audited(msgspec.Struct, frozen=True):
    """The part of an audited status that is not in `Snapshot`."""

    audit: list[AuditReport]


class StatusClient:
    """One server. Every call blocks for at most about `timeout_s`."""

    def __init__(self, url: str, *, api_key: str = "", timeout_s: float = 5.0) -> None:
        """Raises: ConfigError: not an http(s) address."""
        if "://" not in url:
            url = f"http://{url}"
        try:
            parts = urlsplit(url)
            is_valid = parts.scheme in ("http", "https") and bool(parts.hostname)
            _ = parts.port  # raises where it is no number
        except ValueError:
            is_valid = False
        if not is_valid:
            raise ConfigError("--url", f"{url!r} is not an address", "http://host:port")
        self.url = url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._timeout_s = timeout_s
        # The server is near; a proxy in the environment is meant for something else.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def fetch(self, *, audit: bool = False) -> bytes:
        """The status as JSON. Raises: UnavailableError."""
        path = "/v1/status?audit=true" if audit else "/v1/status"
        request = urllib.request.Request(self.url + path, headers=self._headers)
        try:
            with self._opener.open(request, timeout=self._timeout_s) as response:
                body: bytes = response.read()
                return body
        except urllib.error.HTTPError as error:
            with error:
                hint = "; give its key by --api-key" if error.code in (401, 403) else ""
                raise UnavailableError(
                    f"{self.url} answers HTTP {error.code} {error.reason}{hint}"
                ) from error
        except urllib.error.URLError as error:
            reason = getattr(error.reason, "strerror", None) or str(error.reason)
            raise UnavailableError(f"no server answers at {self.url}: {reason}") from error
        except (OSError, http.client.HTTPException) as error:
            reason = str(error) or type(error).__name__
            raise UnavailableError(f"no server answers at {self.url}: {reason}") from error

    def snapshot(self) -> Snapshot:
        """Raises: UnavailableError; ProtocolError: what answers is not this version's MemServe."""
        return self.decode(self.fetch(), Snapshot)

    def decode(self, body: bytes, kind: type[_T]) -> _T:
        """Raises: ProtocolError."""
        try:
            return msgspec.json.decode(body, type=kind)
        except msgspec.MsgspecError as error:
            raise ProtocolError(f"{self.url} does not speak MemServe's status: {error}") from error
