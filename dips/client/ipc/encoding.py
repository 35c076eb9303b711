"""The encoding of messages between agent and rank 0: a 4-byte big-endian length, then a msgpack map.

The map holds the message's fields, and its class name as `kind`. No socket, no clock.
"""

from __future__ import annotations

import dataclasses
import struct
from typing import Any, get_args

import msgpack

from dips.client.ipc.messages import Answer, Message, Notice, Question
from dips.errors import LocalProtocolError, RemoteProtocolError
from dips.plain import field_types, from_plain

MOST_BYTES = 1 << 20  # in one message; the largest is ManifestSent, sent if the model is not the run's
LENGTH = struct.Struct(">I")

MESSAGES: dict[str, type[Message]] = {
    cls.__name__: cls for cls in (*get_args(Question), *get_args(Notice), *get_args(Answer))
}
FIELDS = {kind: tuple(field.name for field in dataclasses.fields(cls)) for kind, cls in MESSAGES.items()}


def encode_message(message: Message) -> bytes:
    """Encode a message with its length in front. Raises LocalProtocolError if it is too long."""
    body: bytes = msgpack.packb({"kind": type(message).__name__, **_read_fields(message)}, default=_read_fields)
    if len(body) > MOST_BYTES:
        raise LocalProtocolError(
            f"{type(message).__name__} takes {len(body)} bytes, at most {MOST_BYTES} can travel to or from the agent"
        )
    return LENGTH.pack(len(body)) + body


def body_length(head: bytes) -> int:
    """Decode the length in front of a message. Raises RemoteProtocolError if it exceeds the limit."""
    length: int = LENGTH.unpack(head)[0]
    if length > MOST_BYTES:
        raise RemoteProtocolError(f"a local message claims {length} bytes, at most {MOST_BYTES} were expected")
    return length


def decode_message(body: bytes) -> Message:
    """Decode a message's body. Raises RemoteProtocolError for anything that `encode_message` did not write."""
    try:
        fields = msgpack.unpackb(body)
        kind = fields.pop("kind")
        message: Message = from_plain(MESSAGES[kind], fields)
    except (ValueError, KeyError, TypeError, AttributeError, msgpack.UnpackException) as error:
        raise RemoteProtocolError(f"not a local message: {error!r} in {body[:80]!r}") from error
    return message


def _read_fields(message: Any) -> dict[str, Any]:
    """Return the fields without copying: a message may be sent with every inner step, and `asdict` would copy all of
    it.
    """
    if not dataclasses.is_dataclass(message):
        raise TypeError(f"expected a message, got {message!r}")
    cls: Any = type(message)
    return {name: getattr(message, name) for name in field_types(cls)}
