"""Which rank of this instance writes which heads to which rank of a peer, and where those lie.

Collaborators: `core/head_split.py` has the rule; `choice.py` and `workers/rank_group.py` open one
link for each pair of ranks that is named here; the links ask `rows_of` for the part of each page
that they have to move.
"""

from __future__ import annotations

import msgspec

from memserve.core.head_split import split_heads
from memserve.messages import PeerJoined
from memserve.ops.views import PageOrder, Rows, head_rows
from memserve.types import Geometry, Heads
from memserve.workers.links.base import RankPeer, rank_peer


class Route(msgspec.Struct, frozen=True):
    """From one own rank to one rank of the peer."""

    own_rank: int
    peer: RankPeer


def routes_to(kind: str, own: Geometry, peer: PeerJoined) -> list[Route]:
    """All pairs of ranks between which a link of this kind is needed.

    `own`: the geometry of any rank. Raises: TransferError (the peer offers no such memory),
    GeometryMismatchError (the heads cannot be split so).
    """
    routes = []
    for route in split_heads(own.model_kv_heads, own.tp_size, peer.geometry.tp_size):
        target = msgspec.structs.replace(
            rank_peer(kind, peer, route.receiver),
            own_heads=_unless_all(route.sender_heads, own),
            peer_heads=_unless_all(route.receiver_heads, peer.geometry),
        )
        routes.append(Route(route.sender, target))
    return routes


def rows_of(own: Geometry, peer: RankPeer) -> tuple[Rows, Rows] | None:
    """The rows of each page that go from this rank to that of the peer, on either side.

    None: whole pages, which may be moved in longer pieces. Raises: TransferError.
    """
    if peer.own_heads is None and peer.peer_heads is None:
        return None
    own_heads = peer.own_heads or Heads(0, own.num_kv_heads)
    peer_heads = peer.peer_heads or Heads(0, peer.geometry.num_kv_heads)
    order = common_order(own, peer.geometry)
    return (
        head_rows(own, own_heads.first, own_heads.count, order),
        head_rows(peer.geometry, peer_heads.first, peer_heads.count, order),
    )


def common_order(own: Geometry, peer: Geometry) -> PageOrder:
    """How both order their pages: a page of one head is the same bytes in either order."""
    return PageOrder((own if own.num_kv_heads > 1 else peer).page_order)


def _unless_all(heads: Heads, geometry: Geometry) -> Heads | None:
    return None if heads.count == geometry.num_kv_heads else heads
