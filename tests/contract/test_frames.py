"""Frames over a socket pair: whole, in order, without waiting, and to the last one."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memserve.errors import ProtocolError
from memserve.frames import HEADER_BYTES, MAX_FRAME_BYTES, FrameSocket, body_size, pack

Pair = tuple[FrameSocket, FrameSocket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    left, right = (FrameSocket(sock) for sock in socket.socketpair())
    yield left, right
    left.close()
    right.close()


def take_all(end: FrameSocket) -> list[bytes]:
    frames = []
    while (frame := end.receive()) is not None:
        frames.append(bytes(frame))
    return frames


@given(st.lists(st.binary(max_size=40), max_size=8), st.lists(st.integers(1, 30)))
def test_a_stream_is_cut_into_its_frames_however_it_arrives(
    bodies: list[bytes], cuts: list[int]
) -> None:
    ours, theirs = socket.socketpair()
    end = FrameSocket(theirs)
    stream = b"".join(pack(body) for body in bodies)
    found = []
    with ours:
        for size in [*cuts, len(stream)]:
            ours.sendall(stream[:size])
            stream = stream[size:]
            found += take_all(end)
    assert take_all(end) == [] and end.is_ended
    end.close()
    assert found == bodies


def test_what_the_kernel_does_not_take_is_kept_and_leaves_as_the_other_end_reads(
    pair: Pair,
) -> None:
    left, right = pair
    bodies = [bytes([number]) * 500_000 for number in range(8)]
    for body in bodies:
        left.send(body)
    assert left.has_unsent
    found = []
    while len(found) < len(bodies):
        found += take_all(right)
        left.flush()
    assert found == bodies and not left.has_unsent


def test_last_words_are_read_also_after_something_was_sent_to_who_said_them(pair: Pair) -> None:
    left, right = pair
    left.send(b"the last")
    left.close()
    right.send(b"too late")
    right.send(b"too late")
    assert not right.has_unsent
    assert take_all(right) == [b"the last"]
    assert right.is_ended


def test_an_end_that_dies_with_unread_frames_is_an_end(pair: Pair) -> None:
    left, right = pair
    right.send(b"never read")
    left.send(b"the last")
    left.close()
    assert take_all(right) == [b"the last"]
    assert right.is_ended


def test_a_frame_that_is_too_long_ends_the_stream() -> None:
    ours, theirs = socket.socketpair()
    end = FrameSocket(theirs)
    with ours:
        ours.sendall(pack(b"good") + (MAX_FRAME_BYTES + 1).to_bytes(HEADER_BYTES, "big") + b"rest")
        assert end.receive() == b"good"
        assert end.has_frame  # there is something to be told
        with pytest.raises(ProtocolError, match=f"a frame of {MAX_FRAME_BYTES + 1} bytes; the"):
            end.receive()
        assert end.is_ended and end.receive() is None
    end.close()


def test_the_longest_frame_is_allowed() -> None:
    assert body_size(MAX_FRAME_BYTES.to_bytes(HEADER_BYTES, "big")) == MAX_FRAME_BYTES


def test_one_end_can_end_and_still_hear_the_other(pair: Pair) -> None:
    left, right = pair
    left.end()
    right.send(b"still")
    assert take_all(left) == [b"still"]
    assert take_all(right) == [] and right.is_ended and not left.is_ended


def test_what_has_arrived_is_received_at_once(pair: Pair) -> None:
    left, right = pair
    left.send(b"x" * 100_000)  # more than is read in one piece
    assert not left.has_unsent
    assert right.receive() == b"x" * 100_000
