"""Ids, caching levels and the geometry of a KV cache."""

from __future__ import annotations

import msgspec
import pytest

from memserve.types import Caching, Geometry

BLOCK_FIRST = Geometry(
    model="m",
    dtype="bfloat16",
    block_size=16,
    num_blocks=8,
    num_kv_heads=3,
    page_bytes=100,
    block_stride=300,
    layer_offsets=(0, 100, 200),
)
LAYER_FIRST = msgspec.structs.replace(BLOCK_FIRST, block_stride=100, layer_offsets=(0, 800, 1600))


@pytest.mark.parametrize(
    ("caching", "keeps"),
    [
        (Caching.NONE, (False, False, False)),
        (Caching.PREFILL, (True, False, False)),
        (Caching.DECODE, (True, True, False)),
        (Caching.FULL, (True, True, True)),
    ],
)
def test_each_level_of_caching_adds_one_thing(
    caching: Caching, keeps: tuple[bool, bool, bool]
) -> None:
    told = (caching.prefill_keeps, caching.decode_keeps, caching.decode_returns)
    assert told == keeps


def test_a_block_has_the_same_bytes_in_every_layout() -> None:
    assert BLOCK_FIRST.num_layers == LAYER_FIRST.num_layers == 3
    assert BLOCK_FIRST.block_bytes == LAYER_FIRST.block_bytes == 300


@pytest.mark.parametrize(
    ("geometry", "is_aggregated"),
    [
        (BLOCK_FIRST, True),
        (LAYER_FIRST, False),
        (msgspec.structs.replace(BLOCK_FIRST, layer_offsets=(64, 164, 264)), True),
        (msgspec.structs.replace(BLOCK_FIRST, layer_offsets=(100, 0, 200)), False),
        (msgspec.structs.replace(BLOCK_FIRST, block_stride=304), False),
        (msgspec.structs.replace(BLOCK_FIRST, layer_offsets=(0,), block_stride=100), True),
    ],
)
def test_aggregated_means_that_the_pages_of_a_block_touch(
    geometry: Geometry, is_aggregated: bool
) -> None:
    assert geometry.is_aggregated is is_aggregated


def test_a_geometry_survives_the_wire() -> None:
    frame = msgspec.msgpack.encode(BLOCK_FIRST)
    assert msgspec.msgpack.decode(frame, type=Geometry) == BLOCK_FIRST
