"""The corners of the lossy codecs, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest

from dips.wire import codecs
from dips.wire.frame import BLOCK, INT4_BLOCK, BadFrame


def there_and_back(codec: str, *values: float) -> list[float]:
    """What arrives of these numbers."""
    spelled = codecs.codec_named(codec)
    array = np.array(values, np.float32)
    return [float(x) for x in spelled.decode(spelled.encode(array), array.size)]


@pytest.mark.parametrize(
    ("sent", "arrives"),
    [
        (1 + 2**-8, 1.0),  # half-way, down to the even one
        (1 + 3 * 2**-8, 1 + 2**-6),  # half-way, up to the even one
        (1 + 2**-8 + 2**-20, 1 + 2**-7),  # beyond half-way
        (-1 - 2**-8, -1.0),
    ],
)
def test_bf16_rounds_to_nearest_and_ties_to_even(sent: float, arrives: float) -> None:
    """Halves that always went up would drift, push after push."""
    assert there_and_back("bf16", sent) == [arrives]


@pytest.mark.parametrize("bits", [0x7FC00000, 0x7F800001, 0xFF800001, 0x7FFFFFFF])
def test_a_nan_arrives_as_a_nan_in_bf16(bits: int) -> None:
    """Whatever its payload: not as an infinity, not as a number, and its neighbours as they are."""
    nan = np.array([bits], np.uint32).view(np.float32)[0]
    first, middle, last = there_and_back("bf16", 1.0, nan, 2.0)
    assert np.isnan(middle) and (first, last) == (1.0, 2.0)


@pytest.mark.parametrize("codec", ["int8", "int4"])
@pytest.mark.parametrize("size", [3, BLOCK, BLOCK + 3])
def test_a_block_too_small_for_a_step_arrives_as_zeros(size: int, codec: str) -> None:
    """Below 2^-119 the step would not be a normal number and its inverse no finite one."""
    for value in (2.0**-120, 2.0**-140):
        assert not any(there_and_back(codec, *([value] * size)))
    assert there_and_back(codec, *([2.0**-110] * size)) == pytest.approx([2.0**-110] * size, rel=1e-6)


@pytest.mark.parametrize("size", [1, 2, 7, INT4_BLOCK - 1, INT4_BLOCK + 1, 3 * INT4_BLOCK + 5])
def test_int4_brings_every_whole_step_exactly_from_minus_seven_to_seven(size: int) -> None:
    """Signs, the order within a byte and an odd end: nothing is lost of what steps can spell."""
    values = np.resize(np.arange(-7, 8, dtype=np.float32), size)
    values[::INT4_BLOCK] = 7.0  # so that a step of each block is 1
    assert np.array_equal(there_and_back("int4", *values), values)


def test_the_half_byte_that_nothing_needs_is_always_the_same() -> None:
    """An odd number of elements makes one body, whatever was encoded before it in the same memory."""
    spelled = codecs.codec_named("int4")
    bodies = set()
    for before in (-7.0, 7.0):
        spelled.encode(np.full(64 * BLOCK, before, np.float32))
        bodies.add(bytes(spelled.encode(np.array([7.0, 1.0, -7.0], np.float32))))
    assert {body[4:].hex() for body in bodies} == {"9f" + "81"} and len(bodies) == 1


@pytest.mark.parametrize(("codec", "elements"), [("int8", b"\x00\x01\x80"), ("int4", b"\x98\x80")])
@pytest.mark.parametrize("step", [np.nan, np.inf, -np.inf])
def test_a_hostile_step_arrives_not_finite_or_as_a_number(codec: str, elements: bytes, step: float) -> None:
    """A peer may send any step under a right checksum: it is refused, and if it were put, its block would show it."""
    target, body = np.ones(3, np.float32), np.float32(step).tobytes() + elements
    codecs.codec_named(codec).put(body, target)
    assert not np.isfinite(target).any()
    with pytest.raises(BadFrame, match="for block 0 of a chunk") as refused:
        codecs.codec_named(codec).check_steps(body, 3)
    assert refused.value.reason == "step"


@pytest.mark.parametrize(("codec", "elements"), [("int8", b"\x80\x7f\x00"), ("int4", b"\xf0\x08")])
def test_elements_that_no_encoder_writes_stay_within_one_step_more(codec: str, elements: bytes) -> None:
    """-128 and -8 are no elements of ours; in a hostile body they are numbers, and nothing beside them changes."""
    target, most = np.zeros(4, np.float32), {"int8": 128, "int4": 8}[codec]
    codecs.codec_named(codec).put(np.float32(0.5).tobytes() + elements, target[:3])
    assert list(target) == [-most / 2, (most - 1) / 2, 0.0, 0.0]
