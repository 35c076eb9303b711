"""The corners of the lossy codecs, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest

from dips.wire import codecs
from dips.wire.frame import BLOCK


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


@pytest.mark.parametrize("size", [3, BLOCK, BLOCK + 3])
def test_a_block_too_small_for_a_step_arrives_as_zeros(size: int) -> None:
    """Below 2^-119 the step would not be a normal number and its inverse no finite one."""
    for value in (2.0**-120, 2.0**-140):
        assert not any(there_and_back("int8", *([value] * size)))
    assert there_and_back("int8", *([2.0**-110] * size)) == pytest.approx([2.0**-110] * size, rel=1e-6)
