"""What a worker knows of each request, from the first command about it to its `Abort`.

Collaborators: `commands.py` writes, `engine_loop.py` reads. Tokens travel once: a later command
names how many of them are known here and brings the rest.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from memserve.errors import ProtocolError
from memserve.types import RequestId


class Record(msgspec.Struct):
    """One request."""

    id: RequestId
    tokens: list[int]
    """All that were ever named, the prompt's first."""
    attempt: int = 0
    engine_id: str | None = None
    """While it is in the engine: what the engine calls it."""
    hold: bool = False
    """Its KV is to be pinned when it ends."""
    is_private: bool = False
    held_tokens: int = 0
    """How many tokens' KV was pinned when it ended."""


class Records:
    """By the hub's id, and by the engine's id for those that are in the engine."""

    def __init__(self) -> None:
        self._by_id: dict[RequestId, Record] = {}
        self._in_engine: dict[str, Record] = {}

    def __iter__(self) -> Iterator[Record]:
        return iter(self._by_id.values())

    def get(self, request_id: RequestId) -> Record | None:
        """None: nothing is known of it."""
        return self._by_id.get(request_id)

    def running(self, engine_id: str) -> Record | None:
        """The request that the engine calls so; None: it is not ours, or was dropped."""
        return self._in_engine.get(engine_id)

    def learn(self, request_id: RequestId, known_tokens: int, new_tokens: list[int]) -> Record:
        """Make or extend the record: its first `known_tokens` tokens, followed by new ones.

        Raises: ProtocolError if fewer than `known_tokens` are known.
        """
        record = self._by_id.get(request_id)
        num_known = 0 if record is None else len(record.tokens)
        if known_tokens > num_known:
            raise ProtocolError(f"{known_tokens} tokens are said to be known here, {num_known} are")
        if record is None:
            record = self._by_id[request_id] = Record(request_id, [])
        if known_tokens + len(new_tokens) > num_known:
            record.tokens = record.tokens[:known_tokens] + new_tokens
        return record

    def enter_engine(self, record: Record, engine_id: str) -> None:
        """It is in the engine from now on."""
        record.engine_id = engine_id
        self._in_engine[engine_id] = record

    def leave_engine(self, record: Record) -> None:
        """It has ended there."""
        if record.engine_id is not None:
            del self._in_engine[record.engine_id]
            record.engine_id = None

    def forget(self, request_id: RequestId) -> Record | None:
        """Drop the record; it must have left the engine. Returns it, if there was one."""
        record = self._by_id.pop(request_id, None)
        assert record is None or record.engine_id is None, record
        return record
