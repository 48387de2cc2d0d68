"""HTTP calls and the requests that each became.

A call has one id, minted here, in all ids that its client sees (`chatcmpl-<id>`, `cmpl-<id>`); it
may become several requests (`n` choices, several prompts), each with a `RequestId` of its own. The
index answers `GET /v1/requests/{id}` and lets whoever serves a call end everything it started.
"""

from __future__ import annotations

import re
import uuid
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from memserve.errors import MemServeError
from memserve.types import RequestId

_CALL_ID = re.compile(r"(?:chatcmpl-|cmpl-)?([0-9a-f]{32})(?![0-9a-f])")


async def _nothing() -> None:
    return


@dataclass(eq=False)
class Call:
    """One HTTP request that generates."""

    id: str
    client_id: str | None
    """The `X-Request-Id` that the client chose."""
    key_name: str = ""
    """Whose API key it came with; keys take turns."""
    session: str = ""
    """What the client calls the conversation, if anything."""
    grammar_field: str = "structured_outputs"
    """The field of its body that says what the output must follow, if one does."""
    request_ids: list[RequestId] = field(default_factory=list)
    endings: list[Callable[[], None]] = field(default_factory=list)
    """Free what the call started; each does nothing when called again."""
    failure: MemServeError | None = None
    """Why its stream ended early."""
    is_over: bool = False
    """Nothing may be started for it any more."""
    before_wait: Callable[[], Awaitable[None]] = _nothing
    """Awaited when all outputs at hand were passed on, before waiting for the next engine step."""


class CallIndex:
    """Open calls, and the last `capacity` ended ones."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._open: dict[str, Call] = {}
        self._ended: OrderedDict[str, Call] = OrderedDict()
        self._by_client_id: dict[str, Call] = {}

    def open(self, client_id: str | None = None, key_name: str = "") -> Call:
        """A new call. It is to be ended by `end`."""
        call = Call(uuid.uuid4().hex, client_id, key_name)
        self._open[call.id] = call
        if client_id is not None:
            self._by_client_id[client_id] = call
        return call

    def end(self, call: Call) -> None:
        """Free what the call still holds; it can be asked about for some time."""
        call.is_over = True
        for ending in call.endings:
            ending()
        call.endings.clear()
        if self._open.pop(call.id, None) is None:
            return
        self._ended[call.id] = call
        while len(self._ended) > self._capacity:
            self._forget(self._ended.popitem(last=False)[1])

    def serving(self, response_id: str) -> Call | None:
        """The open call that an id of vLLM's (`cmpl-<call id>-<prompt>`) belongs to."""
        match = _CALL_ID.match(response_id)
        return self._open.get(match[1]) if match else None

    def find(self, name: str) -> Call | None:
        """By any id that a client may have seen: a response's, or an `X-Request-Id`."""
        if name in self._by_client_id:
            return self._by_client_id[name]
        match = _CALL_ID.match(name)
        return (self._open.get(match[1]) or self._ended.get(match[1])) if match else None

    @property
    def num_open(self) -> int:
        return len(self._open)

    def _forget(self, call: Call) -> None:
        if call.client_id is not None and self._by_client_id.get(call.client_id) is call:
            del self._by_client_id[call.client_id]
