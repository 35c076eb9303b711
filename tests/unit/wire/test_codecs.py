"""Codecs: the written bound of each holds, zeros are exact, what is not finite stays so, bytes are what was counted."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from dips.errors import LocalProtocolError
from dips.wire.chunks import Range, split_chunks
from dips.wire.codecs import CODECS, FP32, TINIEST, codec_named
from dips.wire.frame import BLOCK, INT4_BLOCK, BadFrame, Dtype, Header, Kind, pack_header, run_id, unpack_header

BIGGEST = float(np.float32(2.0**127))  # above it bf16 may round to infinity, which the gate refuses
LENGTHS = st.one_of(st.integers(1, 3 * BLOCK), st.sampled_from([64 * BLOCK, 64 * BLOCK + 1, 65 * BLOCK - 1]))


@st.composite
def differences(draw: st.DrawFn) -> np.ndarray:
    """Finite fp32 of any size and sign, some blocks of one magnitude, some of all."""
    length = draw(LENGTHS)
    element = st.floats(-BIGGEST, BIGGEST, width=32)
    some = draw(hnp.arrays(np.float32, st.integers(1, 40), elements=element))
    return np.resize(some, length) * np.float32(draw(st.sampled_from([1.0, 2.0**-20, 2.0**-130])))


def blockwise_max(x: np.ndarray, block: int = BLOCK) -> np.ndarray:
    """For each element the largest |x| of its block, in fp64."""
    out = np.empty(x.size)
    for begin in range(0, x.size, block):
        out[begin : begin + block] = np.abs(x[begin : begin + block].astype(np.float64)).max()
    return out


@pytest.mark.parametrize("name", CODECS)
@settings(deadline=None)
@given(x=differences())
def test_the_error_is_within_the_written_bound(name, x):
    """fp32 exact; bf16 2^-8 of the element; int8 half a step of its block's max / 127, int4 / 7."""
    codec = CODECS[name]
    error = np.abs(codec.decode(codec.encode(x), x.size).astype(np.float64) - x)
    wide = np.abs(x.astype(np.float64))
    bound = {
        "fp32": np.zeros(x.size),
        "bf16": np.maximum(2.0**-8 * wide, 2.0**-134),
        "int8": np.maximum((0.5 + 1e-4) * blockwise_max(x) / 127, float(TINIEST)),
        "int4": np.maximum((0.5 + 1e-4) * blockwise_max(x, INT4_BLOCK) / 7, float(TINIEST)),
    }[name]
    assert (error <= bound).all()


@pytest.mark.parametrize("name", CODECS)
@settings(deadline=None)
@given(x=differences())
def test_bytes_are_those_that_were_counted_and_always_the_same(name, x):
    """`range.nbytes` is the length of the body, so credit and progress count real bytes; encoding is a function."""
    codec = CODECS[name]
    body = bytes(codec.encode(x))
    assert len(body) == codec.range(0, 0, 0, x.size).nbytes
    assert bytes(codec.encode(x.copy())) == body


@pytest.mark.parametrize("name", CODECS)
def test_zeros_are_exact(name):
    """An element, or a whole model, that did not change is not moved: not even by the sign of its zero."""
    codec = CODECS[name]
    x = np.zeros(3 * BLOCK + 7, np.float32)
    x[::3] = -0.0
    assert (codec.decode(codec.encode(x), x.size) == 0).all()
    x[5] = 1.0  # zeros beside others are exact too
    back = codec.decode(codec.encode(x), x.size)
    assert (np.delete(back, 5) == 0).all() and back[5] == pytest.approx(1.0, rel=2**-8)


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("bits", [0x7F800000, 0xFF800000, 0x7FC00000, 0x7F800001, 0x7FFFFFFF, 0xFFFFFFFF])
@pytest.mark.parametrize("at", [0, 3, BLOCK - 1, BLOCK, 2 * BLOCK + 1])
def test_what_is_not_finite_arrives_not_finite(name, bits, at):
    """Every infinity and NaN reaches Measure as such, so that the gate sees it [invariant 8]; other blocks are well."""
    codec = CODECS[name]
    x = np.full(2 * BLOCK + 2, 0.25, np.float32)
    x.view(np.uint32)[at] = bits
    back = codec.decode(codec.encode(x), x.size)
    assert not np.isfinite(back[at])
    far = np.arange(x.size) // BLOCK != at // BLOCK
    assert np.allclose(back[far], 0.25, rtol=2**-8)


@pytest.mark.parametrize("name", ["bf16", "int8", "int4"])
def test_what_is_put_is_added_to_the_base_also_from_an_odd_address(name):
    """slot = θ_base + difference, in one fp32 addition; a body in a message begins anywhere."""
    codec, rng = CODECS[name], np.random.default_rng(1)
    base, x = (rng.standard_normal(70_000).astype(np.float32) for _ in range(2))
    body = bytes(codec.encode(x))
    slot = base.copy()
    codec.put(memoryview(b"?" + body)[1:], slot)
    assert np.array_equal(slot, base + codec.decode(body, x.size))


def test_lossy_chunks_are_whole_blocks():
    """However long a chunk may be, no block is cut in two: the chunks' bytes add up to the range's."""
    for chunk_bytes in (4096, 5000, 65_536, 1 << 20):
        for codec in CODECS.values():
            pieces = codec.encoded_ranges([Range(0, 0, 3, 1_000_003)])
            chunks = list(split_chunks(pieces, codec.chunk_bytes(chunk_bytes)))
            assert sum(c.nbytes for c in chunks) == sum(p.nbytes for p in pieces)
            assert max(c.nbytes for c in chunks) <= chunk_bytes
            assert {type(c) for c in chunks} == {codec.range}


def test_a_codec_that_nobody_knows_is_named():
    """A grant of a later release is refused by name."""
    assert codec_named("fp32") is FP32
    with pytest.raises(LocalProtocolError, match="expected one of fp32, bf16, int8, int4, got 'fp8'"):
        codec_named("fp8")


@pytest.mark.parametrize(
    ("dtype", "good", "bad"),
    [
        (Dtype.FP32, (4, 4096), (0, 2, 6)),
        (Dtype.BF16, (2, 6), (0, 1, 7)),
        (Dtype.INT8, (5, 260, 265), (0, 1, 4, 264)),
        (Dtype.INT4, (5, 68, 73), (0, 1, 4, 72)),
    ],
)
def test_a_body_is_a_number_of_whole_elements(dtype, good, bad):
    """A length that no number of elements has is refused by the header alone."""
    run = run_id("demo")
    for length in (*good, *bad):
        part = pack_header(Header(Kind.CHUNK, run, 1, length, 0, dtype=dtype))
        if length in good:
            assert unpack_header(part, run, length, 4096).dtype is dtype
        else:
            with pytest.raises(BadFrame) as refused:
                unpack_header(part, run, length, 4096)
            assert refused.value.reason == "length"


def test_only_chunks_have_a_codec():
    """A message of another dtype than 0 is refused."""
    run = run_id("demo")
    with pytest.raises(BadFrame) as refused:
        unpack_header(pack_header(Header(Kind.WANT, run, 1, 4, 0, dtype=Dtype.BF16)), run, 4, 4096)
    assert refused.value.reason == "type"
