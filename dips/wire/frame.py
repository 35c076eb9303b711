"""One frame of the data flow: a 64-byte header with its own checksum, and a body (docs/protocol.md#frames).

A header is believed after its checksum, a body after its own. Every way to be wrong has a name in REASONS; receivers
count refusals under it. Numbers are little-endian; what a CHUNK's body is says its dtype (dips/codecs.py).
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple

import xxhash

from dips.codecs import DTYPES, Codec, Dtype
from dips.errors import CorruptFrame

Buffer = bytes | bytearray | memoryview

MAGIC = b"DIPS"
FORMAT = 1
HEADER_BYTES = 64
MESSAGE_LIMIT = 1 << 20  # bytes of a body that is not a CHUNK's: about 75,000 ranges in one HELLO
FRAME_LIMIT = MESSAGE_LIMIT + 4096  # ZMQ_MAXMSGSIZE: the largest body, and room; chunks are at most 1 MiB too

# magic, format, kind, dtype, codec, run, layer, stream, param, length, offset, reserved, body checksum
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
    "reserved",
    "place",  # a message that names a layer, or a place beyond 2^62
    "length",  # not what the header says, or above the limit
    "body_checksum",
    "run",  # of another run
    "message",  # the body is not the message that its kind says
    "stream",  # nobody said HELLO for it on this connection, or its epoch is over
    "unasked",  # never asked for, or asked for once and here already
    "step",  # a block's step that is negative, or brings what is not finite
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
    length: int  # bytes of the body
    body_xxh3: int
    layer: int = 0  # index in the manifest
    param: int = 0  # index in the layer
    offset: int = 0  # elements from the parameter's first
    dtype: Dtype = Codec.FP32.dtype


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
        0,
        header.body_xxh3,
    )
    return fields + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(fields))


def make_message(kind: Kind, run: int, stream: int, body: bytes) -> tuple[bytes, bytes]:
    """Make both parts of a frame that is not a CHUNK."""
    assert len(body) <= MESSAGE_LIMIT, f"{kind.name} of {len(body)} bytes"
    return pack_header(Header(kind, run, stream, len(body), xxhash.xxh3_64_intdigest(body))), body


def unpack_header(part: Buffer, run: int, body_bytes: int, chunk_bytes: int) -> Header:
    """Read the header of a frame whose body has `body_bytes`; raise BadFrame with the reason if anything is wrong.

    The body's checksum is not looked at here: `check_body` does that, for chunks on another thread.
    """
    if len(part) != HEADER_BYTES:
        raise BadFrame("size", f"expected a header of {HEADER_BYTES} bytes, got {len(part)}")
    fields = bytes(part)
    magic, form, kind, dtype, codec, its_run, layer, stream, param, length, offset, reserved, checksum = (
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
    if reserved:
        raise BadFrame("reserved", f"expected 0 in the reserved field, got {reserved}")
    if its_run != run:
        raise BadFrame("run", f"expected a frame of run {run:08x}, got one of {its_run:08x}")
    header = Header(known, its_run, stream, length, checksum, layer, param, offset, encoded)
    _check_bounds(header, body_bytes, chunk_bytes)
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


def check_body(header: Header, body: Buffer) -> None:
    """Raise BadFrame if the body is not what its sender saw. Cost: reads the body once, without the GIL."""
    if xxhash.xxh3_64_intdigest(body) != header.body_xxh3:
        raise BadFrame("body_checksum", f"the checksum of a {header.kind.name} body does not match its header")
