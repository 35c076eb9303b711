"""Frames: what is packed is read again, and every way to be wrong is refused under its name."""

from __future__ import annotations

import struct

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from dips.wire.frame import (
    CHECKSUMS,
    FRAME_LIMIT,
    HEADER_BYTES,
    MESSAGE_LIMIT,
    REASONS,
    BadFrame,
    Header,
    Kind,
    check_body,
    is_greeting,
    make_message,
    pack_header,
    run_id,
    unpack_header,
)

RUN = run_id("demo")
CHUNK_BYTES = 1 << 20
BODY = bytes(range(64))
GOOD = Header(Kind.CHUNK, RUN, 77, len(BODY), xxhash.xxh3_64_intdigest(BODY), layer=3, param=2, offset=1 << 40)


def reason(part: bytes, body_bytes: int = len(BODY)) -> str:
    """Why `part` is refused."""
    with pytest.raises(BadFrame) as refused:
        unpack_header(part, RUN, body_bytes, CHUNK_BYTES)
    assert refused.value.reason in REASONS
    return refused.value.reason


def sealed(fields: bytes) -> bytes:
    """56 bytes of header, with a right checksum."""
    return fields + struct.pack("<Q", xxhash.xxh3_64_intdigest(fields))


def with_bytes(at: int, value: bytes) -> bytes:
    """The good header with other bytes at `at`, and a right checksum."""
    fields = bytearray(pack_header(GOOD)[:56])
    fields[at : at + len(value)] = value
    return sealed(bytes(fields))


def test_a_header_is_64_bytes_at_fixed_places():
    """The layout on the wire is the written one: a golden frame of format 1."""
    packed = pack_header(GOOD)
    assert len(packed) == HEADER_BYTES
    assert packed[:8] == b"DIPS" + bytes([1, 4, 0, 0])
    assert struct.unpack_from("<IIQIIQQQ", packed, 8) == (RUN, 3, 77, 2, len(BODY), 1 << 40, 0, GOOD.body_xxh3)
    assert struct.unpack_from("<Q", packed, 56)[0] == xxhash.xxh3_64_intdigest(packed[:56])


@given(
    layer=st.integers(0, 2**32 - 1),
    param=st.integers(0, 2**32 - 1),
    offset=st.integers(0, 2**62),
    length=st.integers(1, CHUNK_BYTES // 4),
    stream=st.integers(0, 2**64 - 1),
)
def test_what_is_packed_is_read_again(layer, param, offset, length, stream):
    """Every chunk header survives the wire."""
    header = Header(Kind.CHUNK, RUN, stream, 4 * length, 5, layer, param, offset)
    assert unpack_header(pack_header(header), RUN, 4 * length, CHUNK_BYTES) == header


@given(st.binary(max_size=100))
def test_arbitrary_bytes_are_refused_by_name(part):
    """Whatever a stranger sends is a BadFrame, never another exception."""
    assert reason(part) in REASONS


@given(st.integers(0, 8 * HEADER_BYTES - 1))
def test_any_flipped_bit_is_refused(bit):
    """A header is believed after its checksum."""
    part = bytearray(pack_header(GOOD))
    part[bit // 8] ^= 1 << bit % 8
    assert reason(bytes(part)) in ("magic", "format", "header_checksum")


@pytest.mark.parametrize(
    ("part", "why"),
    [
        (b"", "size"),
        (pack_header(GOOD)[:-1], "size"),
        (pack_header(GOOD) + b"\0", "size"),
        (with_bytes(0, b"HTTP"), "magic"),
        (with_bytes(4, b"\2"), "format"),
        (pack_header(GOOD)[:56] + bytes(8), "header_checksum"),
        (with_bytes(5, b"\0"), "kind"),
        (with_bytes(5, b"\x0a"), "kind"),
        (with_bytes(6, b"\1"), "type"),
        (with_bytes(6, b"\xff"), "type"),  # a dtype that is none
        (with_bytes(7, b"\1"), "type"),
        (with_bytes(8, bytes(4)), "run"),
        (with_bytes(40, b"\1"), "counter"),
        (pack_header(GOOD._replace(length=len(BODY) + 4)), "length"),
        (pack_header(GOOD._replace(offset=(1 << 62) + 1)), "place"),
        (pack_header(Header(Kind.WANT, RUN, 1, len(BODY), 0, layer=1)), "place"),
        (pack_header(Header(Kind.WANT, RUN, 1, len(BODY), 0, offset=1)), "place"),
    ],
)
def test_each_field_is_checked(part, why):
    """Every field that can be wrong is refused under its own name."""
    assert reason(part) == why


def test_the_last_place_that_can_be_named():
    """No parameter has so many elements; the arithmetic of places stays within 64 bits."""
    part = pack_header(GOOD._replace(offset=1 << 62))
    assert unpack_header(part, RUN, len(BODY), CHUNK_BYTES).offset == 1 << 62


def test_a_greeting_is_known_by_its_header():
    """It is opened before there are keys; nothing else is, nor what is no header."""
    greeting, _ = make_message(Kind.GREETING, RUN, 7, bytes(32))
    assert is_greeting(greeting)
    assert not is_greeting(pack_header(GOOD)) and not is_greeting(greeting[:-1]) and not is_greeting(b"")


@pytest.mark.parametrize("nbytes", [0, 3, 6, CHUNK_BYTES + 4])
def test_a_chunk_is_whole_floats_within_the_limit(nbytes):
    """No empty chunk, no half float, none above chunk_bytes."""
    assert reason(pack_header(GOOD._replace(length=nbytes)), nbytes) == "length"


def test_messages_are_bounded():
    """A message above MESSAGE_LIMIT is refused before it is decoded; the largest is read, and fits ZMQ_MAXMSGSIZE."""
    header = Header(Kind.HELLO, RUN, 1, MESSAGE_LIMIT + 1, 0)
    assert reason(pack_header(header), MESSAGE_LIMIT + 1) == "length"
    largest = make_message(Kind.HELLO, RUN, 1, bytes(MESSAGE_LIMIT))
    assert unpack_header(largest[0], RUN, MESSAGE_LIMIT, CHUNK_BYTES).length == MESSAGE_LIMIT
    assert max(map(len, largest)) <= FRAME_LIMIT


def test_a_body_is_believed_after_its_checksum():
    """One changed byte of a body is seen."""
    check_body(GOOD, BODY)
    assert CHECKSUMS.open_frame(GOOD, BODY) is BODY
    for check in (check_body, CHECKSUMS.open_frame):
        with pytest.raises(BadFrame, match="checksum") as refused:
            check(GOOD, b"\1" + BODY[1:])
        assert refused.value.reason == "body_checksum"


def test_a_message_carries_the_checksum_of_its_body():
    """Both parts of a message fit together."""
    header, body = make_message(Kind.DONE, RUN, 9, b"\5")
    check_body(unpack_header(header, RUN, len(body), CHUNK_BYTES), body)
