"""Calls from a few numbers, where no data set is at hand.

Sessions of several turns, each on one of a set of documents that several sessions may share: the
shapes behind chats (no document), documents asked many questions, and agents with a long common
prompt. Collaborator: `workload.py`, which also says when they arrive.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import msgspec

from memserve.errors import ConfigError
from memserve.simulator.workload import Call, Piece, key_of

_ALLOWED = {
    "documents": (0, 10**9),
    "document_tokens": (1, 10**9),
    "system_tokens": (0, 10**9),
    "turns": (1, 1000),
    "user_tokens": (1, 10**9),
    "reply_tokens": (1, 10**9),
}


class Shape(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The numbers. Lengths are means of an exponential distribution, at least 1 token."""

    documents: int = 0
    """0: the sessions share nothing but the system prompt."""
    document_tokens: int = 4096
    """Of each, exactly."""
    hot: float = 0.0
    """Share of the sessions that are about the first document; the others are spread evenly."""
    system_tokens: int = 32
    """At the beginning of every prompt, exactly."""
    turns: int = 4
    """Of each session, exactly."""
    user_tokens: int = 64
    reply_tokens: int = 200

    def check(self) -> None:
        """Raises: ConfigError that names the number."""
        for name, (least, most) in _ALLOWED.items():
            if not least <= getattr(self, name) <= most:
                what = f"{getattr(self, name):,} is not allowed"
                raise ConfigError(f"--synthetic {name}", what, f"{least} to {most:,}")
        if not 0 <= self.hot <= 1:
            raise ConfigError("--synthetic hot", f"{self.hot} is no share", "0 to 1")
        if self.hot and not self.documents:
            raise ConfigError("--synthetic hot", "there is no document", "with documents=N")


def sessions(shape: Shape, count: int, seed: int) -> Iterator[Call]:
    """The calls of so many sessions, session by session, without arrivals."""
    rng = random.Random(seed)
    for number in range(count):
        session = f"s{number}"
        prompt: tuple[Piece, ...] = ()
        if shape.system_tokens:
            prompt += (Piece(key_of("system"), shape.system_tokens),)
        if shape.documents:
            is_hot = rng.random() < shape.hot
            document = 0 if is_hot else rng.randrange(shape.documents)
            prompt += (Piece(key_of("document", document), shape.document_tokens),)
        for turn in range(shape.turns):
            user = Piece(key_of(seed, session, turn), _length(rng, shape.user_tokens))
            reply = Piece(key_of(seed, session, turn, "reply"), _length(rng, shape.reply_tokens))
            prompt += (user,)
            yield Call(session, prompt, reply)
            prompt += (reply,)


def _length(rng: random.Random, mean: int) -> int:
    return max(1, round(rng.expovariate(1 / mean)))
