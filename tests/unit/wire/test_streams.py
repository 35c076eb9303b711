"""Messages of a stream: read as they were written; anything else is a BadFrame."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import fields, replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dips.errors import ConfigError, DipsError
from dips.wire.frame import (
    CODES,
    MESSAGE_LIMIT,
    TEXT_LIMIT,
    BadFrame,
    ErrorMessage,
    Range,
    StreamName,
    Welcome,
    decode_done,
    decode_error,
    decode_hello,
    decode_ready,
    decode_want,
    decode_welcome,
    encode_done,
    encode_error,
    encode_hello,
    encode_ready,
    encode_want,
    encode_welcome,
)

NAME = StreamName("demo", "push", "fast", 2, 7, 1, "s0", 3, 1, "")
RANGES = (Range(0, 1, 0, 10), Range(4, 0, 1 << 40, 3))
READERS = (
    decode_hello,
    decode_welcome,
    decode_want,
    decode_ready,
    decode_done,
    decode_error,
)


def test_each_message_is_read_as_it_was_written():
    """HELLO, WELCOME, WANT, READY, DONE and ERROR survive the wire."""
    assert decode_hello(encode_hello(NAME, RANGES)) == (NAME, RANGES, len(RANGES))
    assert decode_hello(encode_hello(NAME, RANGES, 1)) == (NAME, RANGES, 1)
    assert decode_hello(encode_hello(NAME, ())) == (NAME, (), 0)
    assert decode_ready(encode_ready(7)) == 7
    assert decode_welcome(encode_welcome(Welcome(5, 4096))) == Welcome(5, 4096)
    assert decode_want(encode_want(RANGES)) == RANGES
    assert decode_done(encode_done(1 << 50)) == 1 << 50
    assert decode_error(encode_error("ranges", "a gap")) == ErrorMessage("ranges", "a gap")


def verdict(read, body: bytes) -> str:
    """`read`, or the reason of the refusal; any other exception is the test's failure."""
    try:
        read(body)
    except BadFrame as bad:
        return bad.reason
    return "read"


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_a_bad_frame(body):
    """A stranger's bytes never raise anything else."""
    for read in READERS:
        assert verdict(read, body) in ("read", "message")


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=11) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=20,
)


@given(VALUES)
def test_arbitrary_msgpack_is_a_bad_frame_or_a_message(value):
    """Well-formed msgpack of the wrong shape is refused as such."""
    for read in READERS:
        assert verdict(read, msgspec.msgpack.encode(value)) in ("read", "message")


@pytest.mark.parametrize(
    "body", [[1, True, 0, 1], [0, 0, -1, 1], [0, 0, 0], [0, 0, 0, 1.0], [0, 0, 1 << 62, 1], "abcd"]
)
def test_ranges_are_whole_numbers_in_fours(body):
    """Negative, fractional, huge or missing numbers never become a range."""
    with pytest.raises(BadFrame):
        decode_want(msgspec.msgpack.encode(body))


def test_a_hello_names_a_push_or_a_pull():
    """Another kind of transfer is not known."""
    with pytest.raises(BadFrame, match="push or a pull"):
        decode_hello(encode_hello(replace(NAME, kind="steal"), ()))


def test_a_hello_has_no_more_ranges_ready_than_it_names():
    """A count beyond them is a bad frame."""
    with pytest.raises(BadFrame, match="at most 2 ranges that are ready, got 3"):
        decode_hello(encode_hello(NAME, RANGES, 3))


def test_a_hello_that_does_not_fit_says_so_to_its_sender():
    """Too many ranges end its job, with what makes fewer."""
    with pytest.raises(ConfigError, match=r"holds 60000 pieces of .* lane of s.*more slaves, more lanes"):
        encode_hello(NAME, [Range(2**30, 2**30, 2**40, 2**40)] * 60_000)


def test_every_part_of_a_name_makes_another_stream():
    """No two incarnations of anybody share a stream."""
    for field in fields(StreamName):
        value = getattr(NAME, field.name)
        other = replace(NAME, **{field.name: value + 1 if isinstance(value, int) else value + "x"})
        assert other.stream_id != NAME.stream_id, field.name


def test_every_error_code_is_an_error_of_ours_or_a_retry():
    """Ranks know what each code means; only `unknown` is tried again."""
    assert [code for code, cls in CODES.items() if cls is None] == ["unknown"]
    assert all(issubclass(cls, DipsError) for cls in CODES.values() if cls)


def test_an_unknown_error_code_is_a_refusal():
    """A later release may add codes."""
    assert decode_error(msgspec.msgpack.encode(["later", "x"])).code == "refused"


def test_an_error_that_is_too_long_arrives_cut():
    """A reason that names hundreds of ranks would be refused by the rank that it is for."""
    assert decode_error(encode_error("refused", "x" * (TEXT_LIMIT + 1))) == ErrorMessage("refused", "x" * TEXT_LIMIT)


@pytest.mark.parametrize(
    ("nbytes", "taken"), [(3, False), (4, True), (MESSAGE_LIMIT, True), (MESSAGE_LIMIT + 1, False)]
)
def test_chunks_of_a_welcome_hold_an_element_and_fit_into_a_frame(nbytes: int, taken: bool):
    """Of fewer bytes a rank would cut no chunk at all."""
    with nullcontext() if taken else pytest.raises(BadFrame, match="expected chunks of 4 to"):
        assert decode_welcome(encode_welcome(Welcome(5, nbytes))) == Welcome(5, nbytes)
