"""Bodies in every codec of the table: bounds hold, zeros are exact, what is not finite stays so, bytes are counted."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from dips.codecs import DTYPES, UPDATE_BLOCK, Codec, Dtype
from dips.wire.chunks import decode_body, encode_body, put_body, split_chunks
from dips.wire.frame import BadFrame, Header, Kind, Range, encode_ranges, pack_header, range_type, run_id, unpack_header
from tests.codec_bounds import error_bound

BLOCK = UPDATE_BLOCK

BIGGEST = float(np.float32(2.0**127))  # above it bf16 may round to infinity, which the gate refuses
LENGTHS = st.one_of(st.integers(1, 3 * BLOCK), st.sampled_from([64 * BLOCK, 64 * BLOCK + 1, 65 * BLOCK - 1]))


@st.composite
def differences(draw: st.DrawFn) -> np.ndarray:
    """Finite fp32 of any size and sign, some blocks of one magnitude, some of all."""
    length = draw(LENGTHS)
    element = st.floats(-BIGGEST, BIGGEST, width=32)
    some = draw(hnp.arrays(np.float32, st.integers(1, 40), elements=element))
    return np.resize(some, length) * np.float32(draw(st.sampled_from([1.0, 2.0**-20, 2.0**-130])))


@pytest.mark.parametrize("codec", Codec)
@settings(deadline=None)
@given(x=differences())
def test_the_error_is_within_the_written_bound(codec: Codec, x: np.ndarray) -> None:
    """Of each element, whatever lies beside it in its block (tests/codec_bounds.py)."""
    error = np.abs(decode_body(codec, encode_body(codec, x), x.size).astype(np.float64) - x)
    assert (error <= error_bound(codec, x)).all()


@pytest.mark.parametrize("codec", Codec)
@settings(deadline=None)
@given(x=differences())
def test_bytes_are_those_that_were_counted_and_always_the_same(codec, x):
    """`range.nbytes` is the length of the body, so credit and progress count real bytes; encoding is a function."""
    body = bytes(encode_body(codec, x))
    assert len(body) == range_type(codec.dtype)(0, 0, 0, x.size).nbytes
    assert bytes(encode_body(codec, x.copy())) == body


@pytest.mark.parametrize("codec", Codec)
def test_zeros_are_exact(codec):
    """An element, or a whole model, that did not change is not moved: not even by the sign of its zero."""
    x = np.zeros(3 * BLOCK + 7, np.float32)
    x[::3] = -0.0
    assert (decode_body(codec, encode_body(codec, x), x.size) == 0).all()
    x[5] = 1.0  # zeros beside others are exact too
    back = decode_body(codec, encode_body(codec, x), x.size)
    assert (np.delete(back, 5) == 0).all() and back[5] == pytest.approx(1.0, rel=2**-8)


@pytest.mark.parametrize("codec", Codec)
@pytest.mark.parametrize("bits", [0x7F800000, 0xFF800000, 0x7FC00000, 0x7F800001, 0x7FFFFFFF, 0xFFFFFFFF])
@pytest.mark.parametrize("at", [0, 3, BLOCK - 1, BLOCK, 2 * BLOCK + 1])
def test_what_is_not_finite_arrives_not_finite(codec, bits, at):
    """Every infinity and NaN reaches Measure as such, so that the gate sees it [invariant 8]; other blocks are well."""
    x = np.full(2 * BLOCK + 2, 0.25, np.float32)
    x.view(np.uint32)[at] = bits
    back = decode_body(codec, encode_body(codec, x), x.size)
    assert not np.isfinite(back[at])
    far = np.arange(x.size) // BLOCK != at // BLOCK
    assert np.allclose(back[far], 0.25, rtol=2**-8)


@pytest.mark.parametrize("codec", [codec for codec in Codec if codec.lossy])
def test_what_is_put_is_added_to_the_base_also_from_an_odd_address(codec):
    """slot = θ_base + difference, in one fp32 addition; a body in a message begins anywhere."""
    rng = np.random.default_rng(1)
    base, x = (rng.standard_normal(70_000).astype(np.float32) for _ in range(2))
    body = bytes(encode_body(codec, x))
    slot = base.copy()
    put_body(codec, memoryview(b"?" + body)[1:], slot)
    assert np.array_equal(slot, base + decode_body(codec, body, x.size))


def test_lossy_chunks_are_whole_blocks():
    """However long a chunk may be, no block is cut in two: the chunks' bytes add up to the range's."""
    for chunk_bytes in (4096, 5000, 65_536, 1 << 20):
        for codec in Codec:
            pieces = encode_ranges(codec.dtype, [Range(0, 0, 3, 1_000_003)])
            chunks = list(split_chunks(pieces, codec.chunk_bytes(chunk_bytes)))
            assert sum(c.nbytes for c in chunks) == sum(p.nbytes for p in pieces)
            assert max(c.nbytes for c in chunks) <= chunk_bytes
            assert {type(c) for c in chunks} == {range_type(codec.dtype)}


WHOLE = {  # lengths that a number of elements has, and lengths that none has
    "fp32": ((4, 4096), (0, 2, 6)),
    "bf16": ((2, 6), (0, 1, 7)),
    "bf16 update": ((2, 6), (0, 1, 7)),
    "int8": ((5, 260, 265), (0, 1, 4, 264)),
    "int8 update": ((5, 8, 260, 264), (0, 1, 4)),
    "int4": ((5, 68, 73), (0, 1, 4, 72)),
    "int2": ((5, 20, 25), (0, 1, 4, 24)),
    "fp8": ((5, 260, 265), (0, 1, 4, 264)),
}


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=lambda dtype: dtype.name)
def test_a_body_is_a_number_of_whole_elements(dtype: Dtype) -> None:
    """A length that no number of elements has is refused by the header alone."""
    run, (good, bad) = run_id("demo"), WHOLE[dtype.name]
    for length in (*good, *bad):
        part = pack_header(Header(Kind.CHUNK, run, 1, length, 0, dtype=dtype))
        if length in good:
            assert unpack_header(part, run, length, 4096).dtype is dtype
        else:
            with pytest.raises(BadFrame) as refused:
                unpack_header(part, run, length, 4096)
            assert refused.value.reason == "length"


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=lambda dtype: dtype.name)
def test_every_length_that_a_range_can_have_is_whole(dtype: Dtype) -> None:
    """Whatever its row says: no chunk of ours is refused, and asked for again without end."""
    for offset in (0, 1, UPDATE_BLOCK - 1) if dtype.update else (0,):
        for length in range(1, 2 * UPDATE_BLOCK + 3):
            assert dtype.is_whole(dtype.count_bytes(offset, length)), (offset, length)


def test_only_chunks_have_a_codec():
    """A message of another dtype than 0 is refused."""
    run = run_id("demo")
    with pytest.raises(BadFrame) as refused:
        unpack_header(pack_header(Header(Kind.WANT, run, 1, 4, 0, dtype=Codec.BF16.dtype)), run, 4, 4096)
    assert refused.value.reason == "type"
