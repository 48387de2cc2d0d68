"""Every message survives the wire; what is no message is refused with one clear error."""

from __future__ import annotations

import typing

import msgspec
import pytest

from memserve import changes, messages
from memserve.errors import ProtocolError
from memserve.messages import (
    AnyCommand,
    AnyEvent,
    Command,
    Event,
    TokenOutput,
    Tokens,
    decode_command,
    decode_event,
    encode,
)
from memserve.types import InstanceId, Medium, Namespace, RequestId
from tests.core.test_types import BLOCK_FIRST

COMMANDS = typing.get_args(AnyCommand)
EVENTS = typing.get_args(AnyEvent)

CHANGES: list[changes.AnyChange] = [
    changes.Inserted(Namespace("salt", "lora"), None, 1, b"\x00" * 64, Medium.HBM),
    changes.Swapped([(1, 1)], Medium.DRAM),
    changes.Evicted([(1, 1)]),
    changes.Cleared(),
]
STATS = messages.PoolStats(*range(11))
EXAMPLES: dict[object, object] = {
    int: 7,
    float: 0.5,
    str: "text",
    bytes: b"\x00\xff",
    bool: True,
    list[int]: [0, 1, 2**31 - 1],
    list[str]: ["request r1"],
    dict[str, tuple[str, ...]]: {"shm": ("/proc/1/fd/3", "/proc/2/fd/3")},
    dict[str, float]: {"imports": 1.5},
    list[TokenOutput]: [TokenOutput(RequestId("r1"), 1, [5], "stop")],
    Namespace: Namespace("salt", "lora"),
    typing.Optional[messages.History]: messages.History(Namespace("salt"), [7, 8]),  # noqa: UP045
    type(BLOCK_FIRST): BLOCK_FIRST,
    messages.PoolStats: STATS,
    list[changes.AnyChange]: CHANGES,
    list[changes.Inserted]: CHANGES[:1],
    typing.Optional[str]: "salt",  # noqa: UP045
}


def example_of(kind: type[msgspec.Struct]) -> msgspec.Struct:
    """One message of this kind with every field filled in."""
    hints = typing.get_type_hints(kind)
    values = {}
    for field in msgspec.structs.fields(kind):
        hint = hints[field.name]
        if typing.get_origin(hint) is list and hasattr(typing.get_args(hint)[0], "__supertype__"):
            hint = list[typing.get_args(hint)[0].__supertype__]
        values[field.name] = EXAMPLES[getattr(hint, "__supertype__", hint)]
    return kind(**values)


@pytest.mark.parametrize("kind", COMMANDS, ids=lambda kind: kind.__name__)
def test_commands_survive_the_wire(kind: type[msgspec.Struct]) -> None:
    message = example_of(kind)
    assert isinstance(message, Command)
    assert decode_command(encode(message)) == message
    with pytest.raises(ProtocolError, match="not an event"):
        decode_event(encode(message))


@pytest.mark.parametrize("kind", EVENTS, ids=lambda kind: kind.__name__)
def test_events_survive_the_wire(kind: type[msgspec.Struct]) -> None:
    message = example_of(kind)
    assert isinstance(message, Event)
    assert decode_event(encode(message)) == message
    with pytest.raises(ProtocolError, match="not a command"):
        decode_command(encode(message))


def test_every_message_is_in_a_union() -> None:
    """A struct that is forgotten there could be sent and never be understood."""
    assert set(COMMANDS) == set(Command.__subclasses__())
    assert set(EVENTS) == set(Event.__subclasses__())


def test_nothing_is_left_out_of_a_message() -> None:
    tokens = Tokens(instance=InstanceId("P0"), epoch=3, outputs=[], payload=b"")
    fields = msgspec.msgpack.decode(encode(tokens))
    assert fields == {
        "type": "Tokens",
        "instance": "P0",
        "epoch": 3,
        "outputs": [],
        "payload": b"",
    }


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\xc1",
        b"not msgpack",
        msgspec.msgpack.encode({"type": "Reboot", "epoch": 1}),
        msgspec.msgpack.encode({"type": "Audit", "epoch": 1}),
        msgspec.msgpack.encode({"type": "Audit", "epoch": "1", "audit_id": 2}),
        msgspec.msgpack.encode({"epoch": 1, "audit_id": 2}),
        encode(messages.Audit(epoch=1, audit_id=2)) + b"\x00",
    ],
    ids=["empty", "reserved", "text", "unknown", "field missing", "type", "untagged", "longer"],
)
def test_what_is_no_command_is_a_protocol_error(frame: bytes) -> None:
    with pytest.raises(ProtocolError, match="not a command"):
        decode_command(frame)


def test_messages_cannot_be_changed() -> None:
    message = messages.Stop(epoch=1)
    with pytest.raises(AttributeError):
        message.epoch = 2  # type: ignore[misc]
