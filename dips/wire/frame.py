"""The contents of a lane: frames of a header and a body, the ranges that they name, and the messages of a stream.

A frame is believed after its checksums, on encrypted lanes after its seal (docs/protocol.md#frames): a FrameGuard knows
which. Every way to be wrong has a name in REASONS; receivers count refusals under it. Numbers are little-endian; what a
CHUNK's body is says its dtype (dips/codecs.py).
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from enum import IntEnum
from functools import cache, cached_property
from typing import Annotated, Any, NamedTuple, Protocol, Self, TypeVar

import msgspec
import numpy as np
import xxhash

from dips.codecs import DTYPES, ITEM_BYTES, UPDATE_BLOCK, Codec, Dtype
from dips.dataclass import dataclass
from dips.errors import (
    ConfigError,
    CorruptFrame,
    Denied,
    DipsError,
    LocalProtocolError,
    StaleIncarnation,
    StalePush,
    StaleVersion,
    UnavailableSlave,
)

_T = TypeVar("_T")
Buffer = bytes | bytearray | memoryview

MAGIC = b"DIPS"
FORMAT = 1
HEADER_BYTES = 64
MESSAGE_LIMIT = 1 << 20  # bytes of a body that is not a CHUNK's: about 75,000 ranges in one HELLO
FRAME_LIMIT = MESSAGE_LIMIT + 4096  # ZMQ_MAXMSGSIZE: the largest body, and room; chunks are at most 1 MiB too

# magic, format, kind, dtype, codec, run, layer, stream, param, length, offset, counter, body checksum
_FIELDS = struct.Struct("<4sBBBBIIQIIQQQ")
_CHECKSUM = struct.Struct("<Q")

REASONS = (
    "parts",  # not exactly a header and a body
    "size",  # the header is not 64 bytes
    "magic",  # not a frame of Di-PS
    "format",  # of another release
    "header_checksum",
    "kind",
    "type",  # a dtype or codec that this release does not know
    "counter",  # on a lane that is not encrypted
    "greeting",  # of no cipher or key with which a connection can be sealed
    "seal",  # not sealed with its connection's key, altered, or before its greeting
    "replayed",  # sealed, and not later than what was opened before
    "place",  # a message that names a layer, or a place beyond 2^62
    "length",  # not what the header says, or above the limit
    "body_checksum",
    "run",  # of another run
    "message",  # the body is not the message that its kind says
    "stream",  # nobody said HELLO for it on this connection, or its epoch is over
    "unasked",  # never asked for, or asked for once and here already
    "step",  # a step of a block that is negative, or it or a code brings what is not finite
    "range",  # outside the layers that are held here
    "credit",  # asks for more than a stream may have in flight
    "hello",  # a HELLO that is answered with ERROR
    "key",  # a connection whose key no open push or pull has
    "failed",  # our own fault while handling it: see the log
)


class Kind(IntEnum):
    """The kinds of frames."""

    HELLO = 1
    WELCOME = 2
    WANT = 3
    CHUNK = 4
    DONE = 5
    ERROR = 6
    PROBE = 7  # outside any transfer: a measure of the way, and its answer
    READY = 8  # more of a push may be asked for
    GREETING = 9  # the keys that an encrypted connection begins with; alone it is not sealed


_KINDS = {int(kind): kind for kind in Kind}  # a look-up costs a sixth of Kind(n), and every frame needs one


class BadFrame(CorruptFrame):
    """A frame that is refused; `reason` is one of REASONS."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class Header(NamedTuple):
    """The header of a frame; layer, param, offset and dtype are 0 unless the frame is a CHUNK."""

    kind: Kind
    run: int  # run_id of the run's name
    stream: int  # StreamName.stream_id
    length: int  # bytes of the body, before it is sealed
    body_xxh3: int  # 0 if it is sealed
    layer: int = 0  # index in the manifest
    param: int = 0  # index in the layer
    offset: int = 0  # elements from the parameter's first
    dtype: Dtype = Codec.FP32.dtype
    counter: int = 0  # of a sealed frame, in its direction of its connection


def run_id(run: str) -> int:
    """Name a run in 32 bits, so that frames of another run are foreign."""
    return xxhash.xxh32_intdigest(run.encode())


def pack_header(header: Header) -> bytes:
    """Spell a header with its checksum."""
    fields = _FIELDS.pack(
        MAGIC,
        FORMAT,
        header.kind,
        header.dtype.number,
        header.dtype.content,
        header.run,
        header.layer,
        header.stream,
        header.param,
        header.length,
        header.offset,
        header.counter,
        header.body_xxh3,
    )
    return fields + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(fields))


def make_message(kind: Kind, run: int, stream: int, body: bytes) -> tuple[bytes, bytes]:
    """Make both parts of a frame that is not a CHUNK."""
    assert len(body) <= MESSAGE_LIMIT, f"{kind.name} of {len(body)} bytes"
    return pack_header(Header(kind, run, stream, len(body), xxhash.xxh3_64_intdigest(body))), body


def is_greeting(part: Buffer) -> bool:
    """Whether a header says that its frame is a GREETING."""
    return len(part) == HEADER_BYTES and part[5] == Kind.GREETING


def unpack_header(part: Buffer, run: int, body_bytes: int, chunk_bytes: int, tag_bytes: int = 0) -> Header:
    """Read the header of a frame whose body has `body_bytes`; raise BadFrame with the reason if anything is wrong.

    The body is not looked at here: a FrameGuard does that, for chunks on another thread.

    tag_bytes  of a body, the seal's; 0: the frame is not sealed
    """
    if len(part) != HEADER_BYTES:
        raise BadFrame("size", f"expected a header of {HEADER_BYTES} bytes, got {len(part)}")
    fields = bytes(part)
    magic, form, kind, dtype, codec, its_run, layer, stream, param, length, offset, counter, checksum = (
        _FIELDS.unpack_from(fields)
    )
    if magic != MAGIC:
        raise BadFrame("magic", f"expected a frame that begins with {MAGIC!r}, got {magic!r}")
    if form != FORMAT:
        raise BadFrame("format", f"expected frame format {FORMAT}, got {form}")
    if _CHECKSUM.unpack_from(fields, _FIELDS.size)[0] != xxhash.xxh3_64_intdigest(fields[: _FIELDS.size]):
        raise BadFrame("header_checksum", "the header's checksum does not match the header")
    known, encoded = _KINDS.get(kind), DTYPES.get(dtype)
    if known is None:
        raise BadFrame("kind", f"expected a kind from {Kind.HELLO} to {max(Kind)}, got {kind}")
    if encoded is None or encoded.content != codec or (dtype and known is not Kind.CHUNK):
        raise BadFrame("type", f"a {known.name} of dtype {dtype}, codec {codec} is not known")
    if known is Kind.GREETING and tag_bytes:
        raise BadFrame("greeting", "a connection greets once, got another greeting")
    if counter and not tag_bytes:
        raise BadFrame("counter", f"expected 0 in a frame that is not sealed, got {counter}")
    if its_run != run:
        raise BadFrame("run", f"expected a frame of run {run:08x}, got one of {its_run:08x}")
    header = Header(known, its_run, stream, length, checksum, layer, param, offset, encoded, counter)
    _check_bounds(header, body_bytes - tag_bytes, chunk_bytes)
    return header


def _check_bounds(header: Header, body_bytes: int, chunk_bytes: int) -> None:
    if header.length != body_bytes:
        raise BadFrame("length", f"the header says {header.length} bytes, the body has {body_bytes}")
    if header.kind is Kind.CHUNK:
        if not 0 < header.length <= chunk_bytes or not header.dtype.is_whole(header.length):
            raise BadFrame(
                "length",
                f"expected whole elements of {header.dtype.name}, at most {chunk_bytes} bytes, got {header.length}",
            )
        if header.offset > 1 << 62:
            raise BadFrame("place", f"offset {header.offset} is beyond any parameter")
        return
    if header.length > MESSAGE_LIMIT:
        raise BadFrame("length", f"expected at most {MESSAGE_LIMIT} bytes in a {header.kind.name}, got {header.length}")
    if header.layer or header.param or header.offset:
        raise BadFrame("place", f"a {header.kind.name} names no place, this one names layer {header.layer}")


HashBody = Callable[[Buffer], int]
hash_body: HashBody = xxhash.xxh3_64_intdigest


class FrameGuard(Protocol):
    """Makes the frames of a connection trustworthy: by checksums, or by the seal of transport/seal.py."""

    tag_bytes: int  # that each body has more on the wire

    def seal_frame(self, header: Header, body: Buffer, digest: HashBody = ...) -> tuple[bytes, Buffer]:
        """Return both parts of a frame; `digest` may know the body's checksum already."""

    def open_frame(self, header: Header, body: Buffer) -> Buffer:
        """Return the body as its sender saw it; raise BadFrame if it is another."""

    def open_into(self, header: Header, body: Buffer, target: Any) -> None:
        """The same, into an array of `header.length` bytes, whose contents are undefined after BadFrame."""

    @property
    def worn(self) -> bool:
        """Whether the connection should be replaced by a new one."""


class ChecksumGuard:
    """The guard of lanes that are not encrypted: it finds what was damaged, not who has forged it."""

    tag_bytes = 0
    worn = False

    def seal_frame(self, header: Header, body: Buffer, digest: HashBody = hash_body) -> tuple[bytes, Buffer]:
        return pack_header(header._replace(body_xxh3=digest(body))), body

    def open_frame(self, header: Header, body: Buffer) -> Buffer:
        check_body(header, body)
        return body

    def open_into(self, header: Header, body: Buffer, target: Any) -> None:
        check_body(header, body)
        np.copyto(target, np.frombuffer(body, np.uint8))


CHECKSUMS: FrameGuard = ChecksumGuard()


def check_body(header: Header, body: Buffer) -> None:
    """Raise BadFrame if the body is not what its sender saw. Cost: reads the body once, without the GIL."""
    if hash_body(body) != header.body_xxh3:
        raise BadFrame("body_checksum", f"the checksum of a {header.kind.name} body does not match its header")


# ---- ranges ---------------------------------------------------------------------------------------------------------


class Range(NamedTuple):
    """`length` elements of one parameter from element `offset` on, as fp32; a chunk is one of at most chunk_bytes."""

    layer: int  # index in the manifest
    param: int  # index in the layer
    offset: int
    length: int

    @property
    def dtype(self) -> Dtype:
        """The data type in which this range is encoded on the wire."""
        return Codec.FP32.dtype

    @property
    def depth(self) -> int:
        """How many updates follow one another; 0: it is no update."""
        return 0

    @property
    def nbytes(self) -> int:
        """Bytes that it takes on the wire."""
        return self.length * ITEM_BYTES

    def cut(self, most: int) -> Self:
        """Its beginning of `most` elements, which are whole blocks; all of it if it is not longer."""
        return type(self)(*self[:3], min(self.length, most))


class EncodedRange(Range):
    """A range that travels in another dtype, or as updates: `range_type` makes a class for each."""

    __slots__ = ()

    @property
    def nbytes(self) -> int:
        return (self.depth or 1) * self.dtype.count_bytes(self.offset, self.length)

    def cut(self, most: int) -> Self:
        """An update's ends with a block of the parameter: one that is cut in two would travel with two steps."""
        return Range.cut(self, most + -(self.offset + most) % UPDATE_BLOCK if self.depth else most)


@cache
def range_type(dtype: Dtype, depth: int = 0) -> type[Range]:
    """The class of ranges whose chunks have this dtype and, of a pull that brings updates, so many of them."""
    if (dtype, depth) == (Codec.FP32.dtype, 0):
        return Range
    name = f"{dtype.codec.name.title()}{'Update' * depth}Range"
    return type(name, (EncodedRange,), {"__slots__": (), "dtype": dtype, "depth": depth})


def pulled_range_type(number: int, depth: int) -> type[Range]:
    """The class of a pull's chunks, parameters or updates, as a WELCOME says; raise BadFrame if it is not known."""
    dtype = DTYPES.get(number)
    if dtype is None or not (1 <= depth <= dtype.codec.updates if dtype.update else number == depth == 0):
        raise BadFrame("message", f"chunks of {depth} updates of dtype {number} are not known")
    return range_type(dtype, depth)


def encode_ranges(dtype: Dtype, pieces: Iterable[Range]) -> tuple[Range, ...]:
    """The same ranges, of a push's chunks in this dtype."""
    return tuple(itertools.starmap(range_type(dtype), pieces))


# ---- messages -------------------------------------------------------------------------------------------------------
# The messages of a stream, in msgpack: HELLO, WELCOME, WANT, READY, DONE, ERROR; and its name. PROBE stands alone.
#
# A stream is one rank's share of one push or pull at one slave's lane in one incarnation of both; a broken one is taken
# up by the same name with the next epoch. What is decoded is checked for type and size before anybody sees it;
# everything else raises BadFrame("message").


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
    *of_name, ready, numbers = _decode_message(_HELLO, body)
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
    return _decode_message(_NUMBER, body)


def encode_welcome(welcome: Welcome) -> bytes:
    return msgspec.msgpack.encode([welcome.missing, welcome.chunk_bytes, welcome.dtype, welcome.depth])


def decode_welcome(body: Buffer) -> Welcome:
    """Read a WELCOME."""
    welcome = Welcome(*_decode_message(_WELCOME, body))
    if not 4 <= welcome.chunk_bytes <= MESSAGE_LIMIT:
        raise BadFrame("message", f"expected chunks of 4 to {MESSAGE_LIMIT} bytes, got {welcome.chunk_bytes}")
    return welcome


def encode_want(chunks: Sequence[Range]) -> bytes:
    return msgspec.msgpack.encode(_flatten_ranges(chunks))


def decode_want(body: Buffer) -> tuple[Range, ...]:
    """Read a WANT: one CHUNK is asked for by each of its ranges."""
    return _cut_ranges(_decode_message(_RANGES, body))


def encode_done(nbytes: int) -> bytes:
    """Spell a DONE: the receiver has all of the stream's `nbytes`, checked."""
    return msgspec.msgpack.encode(nbytes)


def decode_done(body: Buffer) -> int:
    """Read a DONE."""
    return _decode_message(_NUMBER, body)


def encode_error(code: str, text: str) -> bytes:
    assert code in CODES, code
    return msgspec.msgpack.encode([code, text[:TEXT_LIMIT]])


def decode_error(body: Buffer) -> ErrorMessage:
    """Read an ERROR; an unknown code counts as `refused`, so that a later release may add some."""
    code, text = _decode_message(_ERROR, body)
    return ErrorMessage(code if code in CODES else "refused", text)


def encode_probe(answer: int, nbytes: int = 0) -> bytes:
    """Spell a PROBE that is to be answered by a PROBE of `answer` bytes; `nbytes` of padding measure the way there."""
    return msgspec.msgpack.encode([answer, bytes(nbytes)])


def decode_probe(body: Buffer) -> int:
    """Read a PROBE: how many bytes its answer is to have."""
    answer, _ = _decode_message(_PROBE, body)
    if answer > MESSAGE_LIMIT:
        raise BadFrame("message", f"expected a PROBE for at most {MESSAGE_LIMIT} bytes, got {answer}")
    return answer


def _decode_message(decoder: _Decoder[_T], body: Buffer) -> _T:
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
