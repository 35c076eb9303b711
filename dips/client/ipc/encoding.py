"""The encoding of messages between agent and rank 0: a 4-byte big-endian length, then kind and fields in msgpack.

The kind is the name of the message's class, the fields are a map. A message has one encoding: what is read is encoded
again and compared, so that a field that is missing, unknown or given twice is refused, in nested classes too. This file
has no socket and no clock.
"""

from __future__ import annotations

import struct
from typing import Any, get_args

import msgspec

from dips.client.ipc.messages import Answer, Message, Notice, Question
from dips.errors import LocalProtocolError, RemoteProtocolError

MOST_BYTES = 1 << 20  # in one message; the largest is ManifestSent, sent if the model is not the run's
LENGTH = struct.Struct(">I")

MESSAGES: dict[str, type[Message]] = {
    cls.__name__: cls for cls in (*get_args(Question), *get_args(Notice), *get_args(Answer))
}
_DECODERS = {kind: msgspec.msgpack.Decoder(cls) for kind, cls in MESSAGES.items()}
_HEAD = msgspec.msgpack.Decoder(tuple[str, msgspec.Raw])
_encode: Any = msgspec.msgpack.Encoder().encode


def encode_message(message: Message) -> bytes:
    """Encode a message with its length in front. Raises LocalProtocolError if it is too long, or a field has a wrong
    type.
    """
    kind = type(message).__name__
    try:
        exact = _DECODERS[kind].decode(_encode(message))  # an int in a field of floats becomes a float
    except (KeyError, TypeError, ValueError) as error:
        raise LocalProtocolError(
            f"expected a message of messages.py with its types, got {message!r}: {error}"
        ) from error
    body: bytes = _encode((kind, exact))
    if len(body) > MOST_BYTES:
        raise LocalProtocolError(
            f"{kind} takes {len(body)} bytes, at most {MOST_BYTES} can travel to or from the agent"
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
        kind, fields = _HEAD.decode(body)
        message = _DECODERS[kind].decode(fields)
        if _encode((kind, message)) != body:
            raise ValueError(f"expected each field of {kind} once and no other; do agent and ranks run the same Di-PS?")
    except (KeyError, ValueError, RecursionError) as error:
        raise RemoteProtocolError(f"not a local message: {error!r} in {body[:80]!r}") from error
    return message
