"""Before a link sends: which pieces blocks are cut into, and who can be a peer at all."""

from __future__ import annotations

import random

import pytest

from memserve.errors import GeometryMismatchError, TransferError
from memserve.messages import PeerJoined
from memserve.types import InstanceId
from memserve.workers.links.base import plan_pieces, rank_peer, require_compatible
from tests.contract.link_rig import NUM_BLOCKS, NUM_LAYERS, PAGE_BYTES, geometry, ids
from tests.contract.wire_rig import LAYOUTS


def test_a_peers_rank_is_known_by_its_address_and_number() -> None:
    peer = PeerJoined(
        epoch=1,
        peer=InstanceId("D0"),
        peer_epoch=3,
        geometry=geometry(),
        addresses={"tcp": ("host:1", "host:2")},
    )
    second = rank_peer("tcp", peer, 1)
    assert (second.peer, second.peer_epoch, second.address) == ("D0", 3, "host:2")
    assert second.geometry.tp_rank == 1
    with pytest.raises(TransferError, match=r"rank 2 of D0 has no .* tcp; D0 offers: tcp$"):
        rank_peer("tcp", peer, 2)
    with pytest.raises(TransferError, match=r"rank 0 of D0 has no .* shm; D0 offers: tcp$"):
        rank_peer("shm", peer, 0)


def test_aggregated_blocks_travel_as_one_piece_per_run() -> None:
    shape = geometry()
    size = shape.block_bytes
    pieces = plan_pieces(shape, shape, ids(3, 4, 5, 9), ids(7, 8, 9, 10))
    assert pieces == [(3 * size, 7 * size, 3 * size), (9 * size, 10 * size, size)]
    assert plan_pieces(shape, shape, [], []) == []


def test_discrete_blocks_travel_page_by_page_in_every_layout() -> None:
    for layout in ("block_first", "layer_first", "padded"):
        shape = geometry(layout)
        pieces = plan_pieces(shape, shape, ids(1, 2, 3), ids(5, 6, 7), is_discrete=True)
        assert len(pieces) == 3 * NUM_LAYERS and {length for *_, length in pieces} == {PAGE_BYTES}


def test_layer_first_blocks_travel_as_one_piece_per_layer_and_run() -> None:
    shape = geometry("layer_first")
    pieces = plan_pieces(shape, shape, ids(3, 4), ids(7, 8))
    layer = NUM_BLOCKS * PAGE_BYTES
    assert pieces == [
        (layer * i + 3 * PAGE_BYTES, layer * i + 7 * PAGE_BYTES, 2 * PAGE_BYTES) for i in range(3)
    ]


@pytest.mark.parametrize("layouts", LAYOUTS)
def test_pieces_cover_random_blocks_exactly_once(layouts: tuple[str, str]) -> None:
    rng = random.Random(5)
    source_of, target_of = geometry(layouts[0]), geometry(layouts[1])
    for _ in range(50):
        num = rng.randrange(1, NUM_BLOCKS)
        source_ids = ids(*rng.sample(range(NUM_BLOCKS), num))
        target_ids = ids(*rng.sample(range(NUM_BLOCKS), num))
        pieces = plan_pieces(source_of, target_of, source_ids, target_ids)
        written = [b for _, start, size in pieces for b in range(start, start + size)]
        assert len(written) == len(set(written)) == num * source_of.block_bytes


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"model": "other"}, "model is 'tiny' on P0 and 'other' on D1"),
        ({"dtype": "bfloat16"}, "dtype is 'float32' on P0 and 'bfloat16' on D1"),
        ({"block_size": 8}, "block_size is 4 on P0 and 8 on D1"),
        ({"num_kv_heads": 4}, "KV heads of the model is 2 on P0 and 4 on D1"),
        ({"tp_size": 2}, "KV heads of the model is 2 on P0 and 4 on D1"),
        ({"page_bytes": 32}, "bytes of a head in a page is 32.0 on P0 and 16.0 on D1"),
        ({"page_order": "NHC"}, "page_order is 'HNC' on P0 and 'NHC' on D1"),
        ({"layer_offsets": (0, 64)}, "num_layers is 3 on P0 and 2 on D1"),
    ],
)
def test_a_mismatch_names_both_values(changes: dict[str, object], text: str) -> None:
    own, peer = geometry(num_kv_heads=2), geometry(**{"num_kv_heads": 2, **changes})
    with pytest.raises(GeometryMismatchError) as caught:
        require_compatible(own, peer, InstanceId("P0"), InstanceId("D1"))
    assert text in str(caught.value)


def test_ranks_may_differ_where_heads_can_be_split() -> None:
    whole = geometry(num_kv_heads=3, page_bytes=96)
    third = geometry(page_bytes=32, tp_size=3, tp_rank=1, page_order="NHC")
    require_compatible(whole, third, InstanceId("P0"), InstanceId("D1"))
    require_compatible(third, whole, InstanceId("D1"), InstanceId("P0"))


def test_heads_that_cannot_be_split_are_refused_with_both_degrees() -> None:
    whole = geometry(num_kv_heads=3, page_bytes=96)
    other = geometry(page_bytes=32, tp_size=2, total_kv_heads=3)
    words = r"P0 and D1 cannot .* 3 KV heads .* 2 ranks \(TP 1 on P0, TP 2 on D1\)"
    with pytest.raises(GeometryMismatchError, match=words):
        require_compatible(whole, other, InstanceId("P0"), InstanceId("D1"))


def test_layout_and_size_may_differ() -> None:
    require_compatible(geometry(), geometry("layer_first", 40), InstanceId("P0"), InstanceId("D1"))
