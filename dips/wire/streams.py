"""The messages of a stream, in msgpack: HELLO, WELCOME, WANT, READY, DONE, ERROR; and its name. PROBE stands alone.

A stream is one rank's share of one push or pull at one slave's lane in one incarnation of both; a broken one is taken
up by
the same name with the next epoch. What is decoded is checked for type and size before anybody sees it; everything else
raises BadFrame("message").
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields
from functools import cached_property
from typing import Any, NamedTuple

import msgpack
import xxhash

from dips.dataclass import dataclass
from dips.errors import (
    ConfigError,
    Denied,
    DipsError,
    LocalProtocolError,
    StaleIncarnation,
    StalePush,
    StaleVersion,
    UnavailableSlave,
)
from dips.wire.chunks import Range
from dips.wire.frame import MESSAGE_LIMIT, BadFrame, Buffer

NAME_LIMIT = 64  # characters of any name in a message
TEXT_LIMIT = 4000  # characters of an ERROR's message
FEWER_RANGES = "more slaves, more lanes (slaves.lanes), or experts fused into one tensor a block make fewer"
_BIGGEST = 1 << 62  # of any number in a message

# What an ERROR's code means for the rank that gets it; "unknown" alone is tried again until the deadline.
CODES: dict[str, type[DipsError] | None] = {
    "unknown": None,  # the push or pull is not open here yet
    "stale_incarnation": StaleIncarnation,  # the slave has another incarnation
    "stale_push": StalePush,  # the push or pull is closed, or a later epoch of this stream exists
    "stale_version": StaleVersion,  # the pull is open on another version
    "ranges": LocalProtocolError,  # all ranks together do not hold each element exactly once
    "too_many": ConfigError,  # all ranks together name more ranges than this slave ever keeps
    "invalid": LocalProtocolError,  # the HELLO contradicts itself
    "denied": Denied,  # the connection's key is another rank's
    "refused": UnavailableSlave,  # the slave gave the push up: it stalled or passed its deadline
}


@dataclass(frozen=True)
class StreamName:
    """Who sends what to whom, in which incarnation; never used twice."""

    run: str
    kind: str  # "push" | "pull"
    cluster: str
    inc: int
    seq: int
    rank: int
    slave: str
    sinc: int
    epoch: int  # rises with each new connection
    version: str  # "v12@r17" for pulls, "" for pushes
    lane: int = 0  # index of the slave's lane
    held: str = ""  # pull: the version that the rank's buffer holds, if it can take updates from there; "": none

    @cached_property
    def stream_id(self) -> int:
        """The name in 64 bits, as every header carries it."""
        who = f"{self.run}|{self.kind}|{self.cluster}|{self.inc}|{self.seq}|{self.rank}|{self.slave}|{self.sinc}"
        return xxhash.xxh3_64_intdigest(f"{who}|{self.epoch}|{self.version}|{self.lane}|{self.held}".encode())


_NAME_TYPES = tuple(int if f.type == "int" else str for f in fields(StreamName))


@dataclass(frozen=True, slots=True)
class Welcome:
    """The slave knows the stream; `missing` bytes of a push it does not have yet (pulls: of what HELLO named)."""

    missing: int
    chunk_bytes: int  # no WANT of this stream names a longer range, in bytes of fp32
    dtype: int = 0  # of a pull's chunks: of parameters, or of updates
    depth: int = 0  # how many updates each chunk brings, one after the other; 0: parameters


@dataclass(frozen=True, slots=True)
class ErrorMessage:
    """A HELLO is refused; `code` is one of CODES."""

    code: str
    message: str


class Hello(NamedTuple):
    """The ranges that a rank holds or wants at a lane. Of a push the first `ready` may be asked for, the rest later."""

    name: StreamName
    pieces: tuple[Range, ...]
    ready: int  # READY raises it


def encode_hello(name: StreamName, pieces: Sequence[Range], ready: int | None = None) -> bytes:
    """Spell a HELLO; `ready` is by default all. Raise LocalProtocolError if the ranges do not fit into one."""
    first = len(pieces) if ready is None else ready
    body = _pack_body([*(getattr(name, f.name) for f in fields(name)), first, _flatten_ranges(pieces)])
    if len(body) > MESSAGE_LIMIT:
        raise ConfigError(
            f"this rank holds {len(pieces)} pieces of the parameters of one lane of {name.slave}: {len(body)} bytes to "
            f"name them, expected at most {MESSAGE_LIMIT}, some 75,000 pieces; {FEWER_RANGES}"
        )
    return body


def decode_hello(body: Buffer) -> Hello:
    """Read a HELLO."""
    values = _check_list(body, len(_NAME_TYPES) + 2)
    for value, kind in zip(values, _NAME_TYPES, strict=False):
        _check_number(value) if kind is int else _check_text(value, NAME_LIMIT)
    name = StreamName(*values[:-2])
    if name.kind not in ("push", "pull"):
        raise BadFrame("message", f"expected a push or a pull, got {name.kind!r}")
    pieces, ready = _check_ranges(values[-1]), _check_number(values[-2])
    if ready > len(pieces):
        raise BadFrame("message", f"expected at most {len(pieces)} ranges that are ready, got {ready}")
    return Hello(name, pieces, ready)


def encode_ready(ready: int) -> bytes:
    """Spell a READY: so many of the ranges that HELLO named may be asked for now, from the first on."""
    return _pack_body(ready)


def decode_ready(body: Buffer) -> int:
    """Read a READY."""
    return _check_number(_unpack_body(body))


def encode_welcome(welcome: Welcome) -> bytes:
    return _pack_body([welcome.missing, welcome.chunk_bytes, welcome.dtype, welcome.depth])


def decode_welcome(body: Buffer) -> Welcome:
    """Read a WELCOME."""
    missing, chunk_bytes, dtype, depth = _check_list(body, 4)
    if not 4 <= _check_number(chunk_bytes) <= MESSAGE_LIMIT:
        raise BadFrame("message", f"expected chunks of 4 to {MESSAGE_LIMIT} bytes, got {chunk_bytes}")
    return Welcome(_check_number(missing), chunk_bytes, _check_number(dtype), _check_number(depth))


def encode_want(chunks: Sequence[Range]) -> bytes:
    return _pack_body(_flatten_ranges(chunks))


def decode_want(body: Buffer) -> tuple[Range, ...]:
    """Read a WANT: one CHUNK is asked for by each of its ranges."""
    return _check_ranges(_unpack_body(body))


def encode_done(nbytes: int) -> bytes:
    """Spell a DONE: the receiver has all of the stream's `nbytes`, checked."""
    return _pack_body(nbytes)


def decode_done(body: Buffer) -> int:
    """Read a DONE."""
    return _check_number(_unpack_body(body))


def encode_error(code: str, text: str) -> bytes:
    assert code in CODES, code
    return _pack_body([code, text[:TEXT_LIMIT]])


def decode_error(body: Buffer) -> ErrorMessage:
    """Read an ERROR; an unknown code counts as `refused`, so that a later release may add some."""
    code, text = _check_list(body, 2)
    _check_text(code, NAME_LIMIT)
    return ErrorMessage(code if code in CODES else "refused", _check_text(text, TEXT_LIMIT))


def encode_probe(answer: int, nbytes: int = 0) -> bytes:
    """Spell a PROBE that is to be answered by a PROBE of `answer` bytes; `nbytes` of padding measure the way there."""
    return _pack_body([answer, bytes(nbytes)])


def decode_probe(body: Buffer) -> int:
    """Read a PROBE: how many bytes its answer is to have."""
    answer, padding = _check_list(body, 2)
    if not isinstance(padding, bytes) or _check_number(answer) > MESSAGE_LIMIT:
        raise BadFrame("message", f"expected a PROBE for at most {MESSAGE_LIMIT} bytes and padding, got {answer}")
    return int(answer)


def _pack_body(value: Any) -> bytes:
    packed: bytes = msgpack.packb(value)
    return packed


def _unpack_body(body: Buffer) -> Any:
    try:
        return msgpack.unpackb(body)
    except (ValueError, TypeError, OverflowError, msgpack.UnpackException) as error:
        raise BadFrame("message", f"not msgpack: {error}") from error


def _flatten_ranges(pieces: Iterable[Range]) -> list[int]:
    return [number for piece in pieces for number in piece]


def _check_list(body: Buffer, length: int) -> list[Any]:
    value = _unpack_body(body)
    if not isinstance(value, list) or len(value) != length:
        raise BadFrame("message", f"expected a list of {length}, got {str(value)[:80]}")
    return value


def _check_number(value: Any) -> int:
    if type(value) is not int or not 0 <= value < _BIGGEST:
        raise BadFrame("message", f"expected a whole number from 0 on, got {str(value)[:80]}")
    return value


def _check_text(value: Any, limit: int) -> str:
    if not isinstance(value, str) or len(value) > limit:
        raise BadFrame("message", f"expected a text of at most {limit} characters, got {str(value)[:80]}")
    return value


def _check_ranges(value: Any) -> tuple[Range, ...]:
    if not isinstance(value, list) or len(value) % 4:
        raise BadFrame("message", "expected ranges as a flat list of layer, param, offset, length")
    for number in value:
        _check_number(number)
    return tuple(Range(*value[i : i + 4]) for i in range(0, len(value), 4))
