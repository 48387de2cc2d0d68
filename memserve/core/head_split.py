"""Which rank of a sender holds which heads of which rank of a receiver; pure.

Tensor parallelism divides the KV heads of a model among the ranks of an instance, in order. Where
there are more ranks than heads, neighbouring ranks hold copies of the same head::

    6 heads   TP 2  [0 1 2] [3 4 5]          2 heads   TP 1  [0 1]
              TP 3  [0 1] [2 3] [4 5]                  TP 4  [0] [0] [1] [1]

Two instances of unequal TP exchange each pair's common heads. Collaborators: `workers/links/heads`
makes links of it.
"""

from __future__ import annotations

import msgspec

from memserve.errors import GeometryMismatchError
from memserve.types import Heads


class HeadRoute(msgspec.Struct, frozen=True):
    """What one rank of the sender gives to one rank of the receiver; each counts its own heads."""

    sender: int
    receiver: int
    sender_heads: Heads
    receiver_heads: Heads


def heads_of_rank(total: int, tp: int, rank: int) -> range:
    """The model's heads that a rank holds. Raises: GeometryMismatchError (see `split_heads`)."""
    if total < 1 or tp < 1 or (total % tp and tp % total):
        raise GeometryMismatchError(f"{total} KV heads cannot be divided among {tp} ranks")
    if tp <= total:
        per_rank = total // tp
        return range(rank * per_rank, (rank + 1) * per_rank)
    head = rank // (tp // total)
    return range(head, head + 1)


def split_heads(total: int, sender_tp: int, receiver_tp: int) -> list[HeadRoute]:
    """The routes that give each rank of the receiver each of its heads exactly once.

    Copies of a head are read evenly: receivers of the same head are dealt out over those who have
    it. Between equals, each rank gives all of its heads to the rank of its own number.

    Raises: GeometryMismatchError where the heads cannot be divided evenly, nor copied so.
    """
    senders = [heads_of_rank(total, sender_tp, rank) for rank in range(sender_tp)]
    receivers = [heads_of_rank(total, receiver_tp, rank) for rank in range(receiver_tp)]
    sender_copies, receiver_copies = max(1, sender_tp // total), max(1, receiver_tp // total)
    routes = []
    for receiver, wanted in enumerate(receivers):
        copy = receiver % receiver_copies * sender_copies // receiver_copies
        for sender in range(copy, sender_tp, sender_copies):
            held = senders[sender]
            first, end = max(wanted.start, held.start), min(wanted.stop, held.stop)
            if first >= end:
                continue
            routes.append(
                HeadRoute(
                    sender,
                    receiver,
                    Heads(first - held.start, end - first),
                    Heads(first - wanted.start, end - first),
                )
            )
    return routes
