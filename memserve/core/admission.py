"""Who is placed next: the requests that wait for room, in order.

Collaborator: `scheduler.py` pushes what comes, looks at the first ones while an instance has room,
and takes those whose place is free. One that waits for its place lets the others pass.

Requests that had their place already, and lost it, go first. Then the lowest priority number.
Among equal priorities the clients (API keys) share what the cluster can do, counted in tokens: next
is the client that was given the fewest so far. Within a client, the order of arrival. A client that
comes (back) with nothing waiting starts level with who was served last, but not behind those of its
priority who wait: idling earns no credit.

Priorities are strict: a low one may wait as long as higher ones keep coming. Nobody waits for ever:
each request has its deadline.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Iterator

import msgspec

from memserve.types import RequestId

_REMEMBERED = 32
"""Turns that the estimate of the waiting time is made from."""
_MAX_RETRY_S = 60
"""Who is told to stay away for longer does not come back."""
_UNKNOWN_RETRY_S = 5


class Ticket(msgspec.Struct, frozen=True):
    """A request that waits."""

    id: RequestId
    client: str
    priority: int
    """Lower goes first."""
    num_tokens: int
    """What its turn is charged to the client."""
    deadline: float


class AdmissionQueue:
    """Holds at most `max_waiting` requests, besides those that come back."""

    def __init__(self, max_waiting: int) -> None:
        self._max_waiting = max_waiting
        self._tickets: dict[RequestId, Ticket] = {}
        self._returned: deque[Ticket] = deque()
        self._lines: dict[int, dict[str, deque[Ticket]]] = {}
        """Priority → client → its requests; no line is empty."""
        self._given: dict[str, int] = {}
        """Client → tokens that it was given, plus what it did not use while it was away."""
        self._level = 0
        """What the client that was served last had been given before."""
        self._turns: deque[float] = deque(maxlen=_REMEMBERED)
        self.num_changes = 0
        """Requests that came or went."""

    def __len__(self) -> int:
        return len(self._tickets)

    def __contains__(self, request_id: RequestId) -> bool:
        return request_id in self._tickets

    @property
    def is_full(self) -> bool:
        return len(self._tickets) >= self._max_waiting

    def push(self, ticket: Ticket) -> None:
        """The end of its line. Whether the queue is full is the caller's business (`is_full`)."""
        if not self._tickets:
            self._turns.clear()  # how fast it moves shows only while somebody waits
        self._tickets[ticket.id] = ticket
        self.num_changes += 1
        lines = self._lines.setdefault(ticket.priority, {})
        if not any(ticket.client in others for others in self._lines.values()):
            level = min([self._level, *(self._given[client] for client in lines)])
            self._given[ticket.client] = max(self._given.get(ticket.client, 0), level)
        lines.setdefault(ticket.client, deque()).append(ticket)

    def push_returned(self, ticket: Ticket) -> None:
        """A request that had its turn, and was paid for: it goes first."""
        self._tickets[ticket.id] = ticket
        self.num_changes += 1
        self._returned.append(ticket)

    def first(self, count: int) -> list[Ticket]:
        """The next ones, in the order in which they are to be served. Does not mutate."""
        tickets = list(itertools.islice(self._returned, count))
        for priority in sorted(self._lines):
            if len(tickets) < count:
                in_turn = self._in_turn(self._lines[priority])
                tickets += itertools.islice(in_turn, count - len(tickets))
        return tickets

    def _in_turn(self, lines: dict[str, deque[Ticket]]) -> Iterator[Ticket]:
        """Always the first in the line of the client that was given the fewest tokens by then."""
        turns = [
            (self._given[client], number, iter(line))
            for number, (client, line) in enumerate(lines.items())
        ]
        heapq.heapify(turns)
        while turns:
            given, number, line = turns[0]
            ticket = next(line, None)
            if ticket is None:
                heapq.heappop(turns)
            else:
                heapq.heapreplace(turns, (given + ticket.num_tokens, number, line))
                yield ticket

    def take(self, request_id: RequestId, now: float) -> None:
        """It is served: takes it out, and charges its client. Raises: KeyError."""
        ticket = self._tickets.pop(request_id)
        self.num_changes += 1
        self._turns.append(now)
        if ticket in self._returned:
            self._returned.remove(ticket)
            return
        self._level = max(self._level, self._given[ticket.client])
        self._leave_line(ticket)
        self.charge(ticket.client, ticket.num_tokens)

    def charge(self, client: str, num_tokens: int) -> None:
        """The client was given so much more: a turn, or generated tokens."""
        self._given[client] = self._given.get(client, 0) + num_tokens

    def remove(self, request_id: RequestId) -> bool:
        """Whether the request was waiting; it does not any more."""
        ticket = self._tickets.pop(request_id, None)
        if ticket is None:
            return False
        self.num_changes += 1
        if ticket in self._returned:
            self._returned.remove(ticket)
        else:
            self._leave_line(ticket)
        return True

    def waiting(self) -> list[RequestId]:
        """All of them, in the order of their arrival."""
        return list(self._tickets)

    def overdue(self, now: float) -> list[RequestId]:
        """Those whose deadline has passed. Does not mutate."""
        return [ticket.id for ticket in self._tickets.values() if ticket.deadline <= now]

    def retry_after_s(self, now: float) -> int:
        """When a place in the queue may be free, by how fast it moved lately; in whole seconds."""
        if len(self._turns) < 2:
            return _UNKNOWN_RETRY_S
        per_turn_s = (now - self._turns[0]) / len(self._turns)
        return min(max(math.ceil(per_turn_s * len(self._tickets) / 2), 1), _MAX_RETRY_S)

    def check_integrity(self) -> None:
        """Raises: AssertionError if the queue contradicts itself."""
        in_lines = [
            ticket
            for priority, lines in self._lines.items()
            for client, line in lines.items()
            for ticket in line
            if ticket.priority == priority and ticket.client == client
        ]
        everybody = [*in_lines, *self._returned]
        assert len(everybody) == len(self._tickets)
        assert all(self._tickets[ticket.id] is ticket for ticket in everybody)
        assert all(lines and all(lines.values()) for lines in self._lines.values())

    def _leave_line(self, ticket: Ticket) -> None:
        lines = self._lines[ticket.priority]
        line = lines[ticket.client]
        line.remove(ticket)
        if not line:
            del lines[ticket.client]
        if not lines:
            del self._lines[ticket.priority]
