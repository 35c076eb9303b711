"""The messages of a stream, in msgpack: HELLO, WELCOME, WANT, READY, DONE, ERROR; and its name. PROBE stands alone.

A stream is one rank's share of one push or pull at one slave's lane in one incarnation of both; a broken one is taken
up by the same name with the next epoch. What is decoded is checked for type and size before anybody sees it; everything
else raises BadFrame("message").
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields
from functools import cached_property
from typing import Annotated, Any, NamedTuple, TypeVar

import msgspec
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

_T = TypeVar("_T")

NAME_LIMIT = 64  # characters of any name in a message
TEXT_LIMIT = 4000  # characters of an ERROR's message
FEWER_RANGES = "more slaves, more lanes (slaves.lanes), or experts fused into one tensor a block make fewer"

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


_Number = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
_Name = Annotated[str, msgspec.Meta(max_length=NAME_LIMIT)]
_Text = Annotated[str, msgspec.Meta(max_length=TEXT_LIMIT)]
_NAME_TYPES = tuple(_Number if f.type == "int" else _Name for f in fields(StreamName))
_Decoder = msgspec.msgpack.Decoder
_HELLO: _Decoder[Any] = _Decoder(tuple[*_NAME_TYPES, _Number, tuple[_Number, ...]])  # type: ignore[valid-type]
_WELCOME = _Decoder(tuple[_Number, _Number, _Number, _Number])
_RANGES: _Decoder[Sequence[int]] = _Decoder(tuple[_Number, ...])
_NUMBER = _Decoder(_Number)
_ERROR, _PROBE = _Decoder(tuple[_Name, _Text]), _Decoder(tuple[_Number, bytes])


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
    body = msgspec.msgpack.encode([*(getattr(name, f.name) for f in fields(name)), first, _flatten_ranges(pieces)])
    if len(body) > MESSAGE_LIMIT:
        raise ConfigError(
            f"this rank holds {len(pieces)} pieces of the parameters of one lane of {name.slave}: {len(body)} bytes to "
            f"name them, expected at most {MESSAGE_LIMIT}, some 75,000 pieces; {FEWER_RANGES}"
        )
    return body


def decode_hello(body: Buffer) -> Hello:
    """Read a HELLO."""
    *of_name, ready, numbers = _decode_body(_HELLO, body)
    name, pieces = StreamName(*of_name), _cut_ranges(numbers)
    if name.kind not in ("push", "pull"):
        raise BadFrame("message", f"expected a push or a pull, got {name.kind!r}")
    if ready > len(pieces):
        raise BadFrame("message", f"expected at most {len(pieces)} ranges that are ready, got {ready}")
    return Hello(name, pieces, ready)


def encode_ready(ready: int) -> bytes:
    """Encode a READY message: the first `ready` ranges that HELLO named may be asked for now."""
    return msgspec.msgpack.encode(ready)


def decode_ready(body: Buffer) -> int:
    """Read a READY."""
    return _decode_body(_NUMBER, body)


def encode_welcome(welcome: Welcome) -> bytes:
    return msgspec.msgpack.encode([welcome.missing, welcome.chunk_bytes, welcome.dtype, welcome.depth])


def decode_welcome(body: Buffer) -> Welcome:
    """Read a WELCOME."""
    welcome = Welcome(*_decode_body(_WELCOME, body))
    if not 4 <= welcome.chunk_bytes <= MESSAGE_LIMIT:
        raise BadFrame("message", f"expected chunks of 4 to {MESSAGE_LIMIT} bytes, got {welcome.chunk_bytes}")
    return welcome


def encode_want(chunks: Sequence[Range]) -> bytes:
    return msgspec.msgpack.encode(_flatten_ranges(chunks))


def decode_want(body: Buffer) -> tuple[Range, ...]:
    """Read a WANT: one CHUNK is asked for by each of its ranges."""
    return _cut_ranges(_decode_body(_RANGES, body))


def encode_done(nbytes: int) -> bytes:
    """Spell a DONE: the receiver has all of the stream's `nbytes`, checked."""
    return msgspec.msgpack.encode(nbytes)


def decode_done(body: Buffer) -> int:
    """Read a DONE."""
    return _decode_body(_NUMBER, body)


def encode_error(code: str, text: str) -> bytes:
    assert code in CODES, code
    return msgspec.msgpack.encode([code, text[:TEXT_LIMIT]])


def decode_error(body: Buffer) -> ErrorMessage:
    """Read an ERROR; an unknown code counts as `refused`, so that a later release may add some."""
    code, text = _decode_body(_ERROR, body)
    return ErrorMessage(code if code in CODES else "refused", text)


def encode_probe(answer: int, nbytes: int = 0) -> bytes:
    """Spell a PROBE that is to be answered by a PROBE of `answer` bytes; `nbytes` of padding measure the way there."""
    return msgspec.msgpack.encode([answer, bytes(nbytes)])


def decode_probe(body: Buffer) -> int:
    """Read a PROBE: how many bytes its answer is to have."""
    answer, _ = _decode_body(_PROBE, body)
    if answer > MESSAGE_LIMIT:
        raise BadFrame("message", f"expected a PROBE for at most {MESSAGE_LIMIT} bytes, got {answer}")
    return answer


def _decode_body(decoder: _Decoder[_T], body: Buffer) -> _T:
    try:
        return decoder.decode(body)
    except ValueError as error:
        raise BadFrame("message", f"not msgpack of the expected form: {error}") from error


def _flatten_ranges(pieces: Iterable[Range]) -> list[int]:
    return [number for piece in pieces for number in piece]


def _cut_ranges(numbers: Sequence[int]) -> tuple[Range, ...]:
    if len(numbers) % 4:
        raise BadFrame("message", "expected ranges as a flat list of layer, param, offset, length")
    return tuple(Range(*numbers[i : i + 4]) for i in range(0, len(numbers), 4))
