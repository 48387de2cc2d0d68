"""What a load asks for: calls, made of named pieces of text, and when they arrive.

Collaborators: `datasets.py` and `synthetic.py` make calls; `simulation.py` sends them.

A piece is a name and a length; its tokens follow from both, so that calls which share a piece share
its tokens and nothing of it is kept. A call's reply is a piece too, and the session's next prompt
may begin with it: then the KV that decoding made can be reused, as if the client had stitched the
generated tokens into its next prompt.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np

_VOCABULARY = 1 << 15
_FIRST_ID = 1000
_OBJECTS = np.empty(_VOCABULARY, dtype=object)
_OBJECTS[:] = range(_FIRST_ID, _FIRST_ID + _VOCABULARY)
"""Every token id as one shared object: a long prompt then costs a pointer a token."""


class Piece(msgspec.Struct, frozen=True):
    """Some text: equal pieces have equal tokens, others differ in almost every token."""

    key: int
    length: int
    """In tokens."""


class Literal(msgspec.Struct, frozen=True):
    """Tokens that a data set names itself, packed in 32 bits each."""

    packed: bytes

    @property
    def length(self) -> int:
        return len(self.packed) // 4


class Call(msgspec.Struct, frozen=True):
    """One request. Its session's next call is sent only after it has ended."""

    session: str
    prompt: tuple[Piece | Literal, ...]
    reply: Piece
    arrival_s: float | None = None
    """From the start of the load; None: the data set does not say."""

    @property
    def prompt_tokens(self) -> int:
        return sum(piece.length for piece in self.prompt)

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.reply.length


def key_of(*parts: object) -> int:
    """A key for a piece from anything that names it; the same in every process."""
    text = "\0".join(map(str, parts)).encode()
    return zlib.crc32(text) << 32 | zlib.adler32(text)


def literal(token_ids: Iterable[int]) -> Literal:
    """Raises: OverflowError for ids that are negative, or need more than 31 bits."""
    ids = np.array(list(token_ids), dtype=np.int32)
    if ids.size and ids.min() < 0:
        raise OverflowError(f"{ids.min()} is no token id")
    return Literal(ids.tobytes())


def tokens_of(piece: Piece | Literal) -> list[int]:
    """The tokens of a piece (a new list)."""
    if isinstance(piece, Literal):
        ids: list[int] = np.frombuffer(piece.packed, dtype=np.int32).tolist()
        return ids
    mixed = np.arange(piece.length, dtype=np.uint64) + np.uint64(piece.key)
    mixed *= np.uint64(0x9E3779B97F4A7C15)  # wraps around, as it should
    mixed ^= mixed >> np.uint64(29)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    objects: list[int] = _OBJECTS[(mixed >> np.uint64(40)) & np.uint64(_VOCABULARY - 1)].tolist()
    return objects


def prompt_ids(call: Call) -> list[int]:
    """The tokens of the prompt (a new list)."""
    ids: list[int] = []
    for piece in call.prompt:
        ids += tokens_of(piece)
    return ids


# ── when calls arrive ─────────────────────────────────────────────────────────────────────────


def replay(calls: Sequence[Call], rate: float | None, copies: int = 1, seed: int = 0) -> list[Call]:
    """The calls at their own times, or faster or slower: `rate` calls a second in the mean.

    `copies`: so many crowds at once, which share nothing with each other; each but the first is
    shifted by a random part of the load's length, round its end. Sorted by arrival.
    """
    first = min(_arrival(call) for call in calls)
    length = max(_arrival(call) for call in calls) - first
    period = length * (len(calls) + 1) / len(calls)
    rng = random.Random(seed)
    shifts = [0.0, *(rng.random() * period for _ in range(copies - 1))]
    shifted = [
        msgspec.structs.replace(
            of_crowd(call, crowd),
            arrival_s=(_arrival(call) - first + shift) % period if period else 0.0,
        )
        for crowd, shift in enumerate(shifts)
        for call in calls
    ]
    shifted.sort(key=_arrival)
    if rate is None or length == 0:
        return shifted
    factor = len(shifted) / (rate * period)
    return [msgspec.structs.replace(call, arrival_s=_arrival(call) * factor) for call in shifted]


def poisson(
    calls: Iterable[Call], *, rate: float, requests: int, think_s: float | None, seed: int
) -> list[Call]:
    """Up to `requests` calls at `rate` a second, by a Poisson process; a session's in order.

    At each arrival one of the open sessions makes its next call. As many are open as make a session
    call every `think_s` in the mean (None: all that are needed); one that has ended makes room for
    the next. The sessions come in a random order.
    """
    rng = random.Random(seed)
    waiting = _sessions(calls, requests, rng)
    count = len(waiting) if think_s is None else max(1, round(rate * think_s))
    open_sessions = [waiting.pop() for _ in range(min(count, len(waiting)))]
    now = 0.0
    sent: list[Call] = []
    while open_sessions and len(sent) < requests:
        now += rng.expovariate(rate)
        place = rng.randrange(len(open_sessions))
        session = open_sessions[place]
        sent.append(msgspec.structs.replace(session.pop(), arrival_s=now))
        if not session and waiting:
            open_sessions[place] = waiting.pop()
        elif not session:
            del open_sessions[place]
    return sent


def _sessions(calls: Iterable[Call], requests: int, rng: random.Random) -> list[list[Call]]:
    """The sessions that make at least so many calls, each with its last call first."""
    by_name: dict[str, list[Call]] = {}
    for call in calls:
        by_name.setdefault(call.session, []).append(call)
    sessions = list(by_name.values())
    rng.shuffle(sessions)
    chosen: list[list[Call]] = []
    count = 0
    while sessions and count < requests:
        session = sessions.pop()
        count += len(session)
        chosen.append(session[::-1])
    return chosen


def _arrival(call: Call) -> float:
    assert call.arrival_s is not None, call.session
    return call.arrival_s


def of_crowd(call: Call, crowd: int) -> Call:
    """The same call by somebody else: pieces are other ones, literal tokens stay as they are."""
    if crowd == 0:
        return call
    return msgspec.structs.replace(
        call,
        session=f"{call.session}·{crowd}",
        prompt=tuple(
            Piece(key_of(crowd, piece.key), piece.length) if isinstance(piece, Piece) else piece
            for piece in call.prompt
        ),
        reply=Piece(key_of(crowd, call.reply.key), call.reply.length),
    )
