"""Messages between the agent and rank 0 survive the socket, and nothing else passes for one."""

from __future__ import annotations

from dataclasses import fields

import msgspec
import pytest

from dips.client.ipc import messages
from dips.client.ipc.messages import (
    AskAgain,
    Attach,
    InsideChanged,
    LossReported,
    ManifestSent,
    Message,
    PipelineReported,
    PlayedStage,
    PullNow,
    Remarked,
    Stepped,
)
from dips.errors import LocalProtocolError, RemoteProtocolError
from dips.ids import VersionId
from dips.protocol.effects import Grant, ManifestWanted, SlaveAddress
from dips.protocol.enums import DivergencePolicy

spell = msgspec.msgpack.encode
GRANT = Grant(VersionId(3, 4), (SlaveAddress("ps0", 2, ("127.0.0.1:1",), (0, 2)),), 60.0)


def nested(field: str, value: object) -> bytes:
    """The body of a PullNow with another value in a field of its grant."""
    kind, fields = msgspec.msgpack.decode(messages.encode_message(PullNow(1, 2, GRANT, 0.5))[4:])
    return spell([kind, fields | {"grant": fields["grant"] | {field: value}}])


@pytest.mark.parametrize(
    "message",
    [
        PullNow(1, 2, GRANT, 0.5),
        Stepped(1, 4096, None),
        Stepped(1, 4096, 2.5),
        LossReported(1, 7.5, 3),
        Remarked(1, "set stop.tokens"),
        PipelineReported(1, 2, 0.5, 0.25, (PlayedStage({"forward": 0.125}, {"border": 0.5}, {"gathered": 64}),)),
        InsideChanged(1, "gear", "gear 1 to 2"),
        AskAgain("äöü"),
        Attach(1, 0, "9", "0" * 64, 1, 2, True, 4, DivergencePolicy.STOP),
        ManifestWanted("0" * 64),
        ManifestSent("9", b"\x78\x01"),
    ],
)
def test_a_message_comes_back_equal(message: Message) -> None:
    """What was encoded is decoded to an equal message, nested grants included."""
    wire = messages.encode_message(message)
    assert messages.body_length(wire[:4]) == len(wire) - 4
    assert messages.decode_message(wire[4:]) == message


@pytest.mark.parametrize(
    "body",
    [
        b"\xc1",
        spell(7),
        spell({"reason": "no kind"}),
        spell(["Exit", {}]),
        spell(["AskAgain", {}]),
        spell(["AskAgain", {"reason": ""}]),
        spell(["AskAgain", {"reason": 7, "steps": 1}]),
        spell(["AskAgain", {"reason": "", "steps": 1, "more": 1}]),
        spell(["AskAgain", {"reason": "", "steps": 1}, 0]),
        spell(["Detach", {"attempt": True}]),
        spell(["Detach", {"attempt": [[1]]}]),
        b"\x92\xa6Detach" + b"\x91" * 100_000,
        b"\x92\xa6Detach\x82\xa7attempt\x01\xa7attempt\x02",
        nested("base", {"version": 1, "round": 1, "more": 1}),
        nested("base", {"version": 1}),
        nested("slaves", [7]),
        messages.encode_message(PullNow(1, 2, GRANT, 0.5))[4:].replace(b"fp32", b"fp31"),
    ],
)
def test_anything_else_is_refused(body: bytes) -> None:
    """Foreign bytes, unknown kinds, missing, excess and mistyped fields raise RemoteProtocolError."""
    with pytest.raises(RemoteProtocolError):
        messages.decode_message(body)


def test_a_whole_number_passes_for_a_float() -> None:
    """`PullNow(..., 0)` is read as 0.0; a field of another type is its sender's error."""
    assert messages.decode_message(messages.encode_message(PullNow(1, 2, GRANT, 0))[4:]) == PullNow(1, 2, GRANT, 0.0)
    with pytest.raises(LocalProtocolError, match=r"Expected `str`, got `int` - at `\$\.reason`"):
        messages.encode_message(AskAgain(7))  # type: ignore[arg-type]


def test_length_is_bounded_both_ways() -> None:
    """A message above 1 MiB is neither sent nor believed."""
    with pytest.raises(RemoteProtocolError, match="claims"):
        messages.body_length(messages.LENGTH.pack(messages.MOST_BYTES + 1))
    with pytest.raises(LocalProtocolError, match="ManifestSent takes"):
        messages.encode_message(ManifestSent("9", bytes(messages.MOST_BYTES)))
    beside = len(messages.encode_message(ManifestSent("9", bytes(1 << 17)))) - (1 << 17)
    largest = messages.encode_message(ManifestSent("9", bytes(messages.MOST_BYTES + messages.LENGTH.size - beside)))
    assert messages.body_length(largest[: messages.LENGTH.size]) == messages.MOST_BYTES


def test_every_message_is_in_the_table() -> None:
    """Names are unique, and every message has only fields that the codec can read."""
    assert len(messages.MESSAGES) == 32
    for cls in messages.MESSAGES.values():
        assert all(f.name != "kind" for f in fields(cls))
