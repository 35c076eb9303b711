"""The corners of the lossy codecs, bit for bit."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from dips.codecs import Codec
from dips.quantisers import QUANTISERS
from dips.wire.chunks import check_steps, decode_body, encode_body, put_body
from dips.wire.frame import BadFrame

BLOCK, INT4_BLOCK = Codec.INT8.block, Codec.INT4.block
STEPPED = [codec for codec in Codec if codec.block]


def there_and_back(codec: Codec, *values: float) -> list[float]:
    """What arrives of these numbers."""
    array = np.array(values, np.float32)
    return [float(x) for x in decode_body(codec, encode_body(codec, array), array.size)]


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
    assert there_and_back(Codec.BF16, sent) == [arrives]


@pytest.mark.parametrize("bits", [0x7FC00000, 0x7F800001, 0xFF800001, 0x7FFFFFFF])
def test_a_nan_arrives_as_a_nan_in_bf16(bits: int) -> None:
    """Whatever its payload: not as an infinity, not as a number, and its neighbours as they are."""
    nan = np.array([bits], np.uint32).view(np.float32)[0]
    first, middle, last = there_and_back(Codec.BF16, 1.0, nan, 2.0)
    assert np.isnan(middle) and (first, last) == (1.0, 2.0)


@pytest.mark.parametrize("codec", STEPPED)
@pytest.mark.parametrize("size", [3, BLOCK, BLOCK + 3])
def test_a_block_too_small_for_a_step_arrives_as_zeros(size: int, codec: Codec) -> None:
    """Below about 2^-119 the step would not be a normal number and its inverse no finite one."""
    for value in (2.0**-120, 2.0**-140):
        assert not any(there_and_back(codec, *([value] * size)))
    assert there_and_back(codec, *([codec.tiniest] * size)) == pytest.approx([codec.tiniest] * size, rel=1e-6)
    body = np.frombuffer(encode_body(codec, np.full(size, codec.tiniest, np.float32)), np.uint8)
    assert (body[: 4 * codec.count_blocks(size)].view(np.float32) >= np.finfo(np.float32).tiny).all()
    assert there_and_back(codec, *([2.0**-110] * size)) == pytest.approx([2.0**-110] * size, rel=1e-6)


@pytest.mark.parametrize("codec", [Codec.INT4, Codec.INT2])
@pytest.mark.parametrize("size", [1, 2, 7, INT4_BLOCK - 1, INT4_BLOCK + 1, 3 * INT4_BLOCK + 5])
def test_small_codes_bring_every_whole_step_exactly(codec: Codec, size: int) -> None:
    """Signs, the order within a byte and an end within one: nothing is lost of what steps can spell."""
    values = np.resize(np.arange(-codec.largest, codec.largest + 1, dtype=np.float32), size)
    values[:: codec.block] = codec.largest  # so that a step of each block is 1
    assert np.array_equal(there_and_back(codec, *values), values)


@pytest.mark.parametrize("codec", STEPPED)
def test_a_step_may_be_anything_from_0_to_what_stays_finite(codec: Codec) -> None:
    """0 is that of a block of zeros; beyond the largest one a block's largest code would arrive as infinity."""
    largest = np.finfo(np.float32).max / (codec.largest + 1)
    body = bytearray(encode_body(codec, np.zeros(3, np.float32)))
    for step, accepted in ((np.float32(0), True), (largest, True), (np.nextafter(largest, np.float32(np.inf)), False)):
        body[:4] = step.tobytes()
        if accepted:
            check_steps(codec, body, 3)
        else:
            with pytest.raises(BadFrame, match="expected finite steps from 0 on"):
                check_steps(codec, body, 3)


@pytest.mark.parametrize(("codec", "body"), [(Codec.INT4, "9f" + "81"), (Codec.INT2, "9f")])
def test_the_part_of_a_byte_that_nothing_needs_is_always_the_same(codec: Codec, body: str) -> None:
    """Three elements make one body, whatever was encoded before it in the same memory."""
    bodies, most = set(), codec.largest
    for before in (-most, most):
        encode_body(codec, np.full(64 * BLOCK, before, np.float32))
        bodies.add(bytes(encode_body(codec, np.array([most, 1.0, -most], np.float32))))
    assert {made[4:].hex() for made in bodies} == {body} and len(bodies) == 1


@pytest.mark.parametrize(
    ("codec", "elements"),
    [(Codec.INT8, b"\x00\x01\x80"), (Codec.INT4, b"\x98\x80"), (Codec.INT2, b"\xac"), (Codec.FP8, b"\x00\x01\xfe")],
)
@pytest.mark.parametrize("step", [np.nan, np.inf, -np.inf])
def test_a_hostile_step_arrives_not_finite_or_as_a_number(codec: Codec, elements: bytes, step: float) -> None:
    """A peer may send any step under a right checksum: it is refused, and if it were put, its block would show it."""
    target, body = np.ones(3, np.float32), np.float32(step).tobytes() + elements
    put_body(codec, body, target)
    assert not np.isfinite(target).any()
    with pytest.raises(BadFrame, match="for block 0 of a chunk") as refused:
        check_steps(codec, body, 3)
    assert refused.value.reason == "step"


@pytest.mark.parametrize(
    ("codec", "elements"), [(Codec.INT8, b"\x80\x7f\x00"), (Codec.INT4, b"\xf0\x08"), (Codec.INT2, b"\xac")]
)
def test_elements_that_no_encoder_writes_stay_within_one_step_more(codec: Codec, elements: bytes) -> None:
    """-128, -8 and -2 are no elements of ours; in a hostile body they are numbers, and nothing beside them changes."""
    target, most = np.zeros(4, np.float32), codec.largest + 1
    put_body(codec, np.float32(0.5).tobytes() + elements, target[:3])
    assert list(target) == [-most / 2, (most - 1) / 2, 0.0, 0.0]


# ---- fp8: a block whose largest element is 448 has a step of 1, so its elements are in steps as they are ------------

E4M3 = sorted(
    {0.0, *(f * 2.0**-9 for f in range(1, 8)), *((8 + f) * 2.0 ** (e - 10) for e in range(1, 16) for f in range(8))}
    - {480.0}
)  # the numbers from 0 on, by the format's definition: 480 would be NaN


def nearest(x: float) -> float:
    """The e4m3 number next to |x|, of two the one with an even code; 448 beyond it."""
    below = max(i for i, number in enumerate(E4M3) if number <= abs(x))
    if below + 1 == len(E4M3):
        return float(np.copysign(E4M3[-1], x))
    down, up = abs(x) - E4M3[below], E4M3[below + 1] - abs(x)
    return float(np.copysign(E4M3[below + (up < down or (up == down and below % 2))], x))


def test_fp8_brings_every_e4m3_number_exactly() -> None:
    """127 of each sign: subnormal and normal, the smallest and 448."""
    assert len(E4M3) == 127 and E4M3[-1] == 448
    for sign in (1, -1):
        values = [448.0, *(sign * number for number in E4M3)]
        assert there_and_back(Codec.FP8, *values) == values


def test_fp8_rounds_to_nearest_and_ties_to_even() -> None:
    """Every midpoint of two neighbours, what lies just beside it, and numbers of all sizes between."""
    middles = np.array([(a + b) / 2 for a, b in pairwise(E4M3)], np.float32)
    beside = [np.nextafter(middles, np.float32(towards)) for towards in (0, 500)]
    drawn = np.exp2(np.random.default_rng(2).uniform(-12, 8.7, 2000)).astype(np.float32)
    for values in np.array_split(np.concatenate([middles, *beside, drawn]), 40):
        for sign in (1, -1):
            sent = [448.0, *(sign * values)]
            assert there_and_back(Codec.FP8, *sent) == [nearest(float(x)) for x in sent]


def test_fp8_saturates_and_sends_no_nan() -> None:
    """Beyond 448 steps a code is 448; what is not finite is in its block's step alone."""
    beyond = np.array([448.01, 464, 480, 1e9, np.inf, -464, -np.inf], np.float32)
    codes = np.zeros(beyond.size, np.uint8)
    QUANTISERS[Codec.FP8].round(beyond, codes)
    assert [*codes] == [0x7E] * 5 + [0xFE] * 2
    rng = np.random.default_rng(3)
    x = (rng.standard_normal(1 << 16) * np.exp2(rng.uniform(-60, 60, 1 << 16))).astype(np.float32)
    body = np.frombuffer(encode_body(Codec.FP8, x), np.uint8)
    codes = body[4 * Codec.FP8.count_blocks(x.size) :]
    assert (codes & 0x7F).max() == 0x7E
    for bad in (np.nan, np.inf, -np.inf):
        codes = np.frombuffer(encode_body(Codec.FP8, np.array([1.0, bad, -2.0], np.float32)), np.uint8)[4:]
        assert ((codes & 0x7F) != 0x7F).all()


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_a_nan_that_a_hostile_peer_sends_in_fp8_is_one(code: int) -> None:
    """No encoder writes it: it is read as what it is, so that the gate sees it as it would in fp32 [invariant 8]."""
    target = np.ones(3, np.float32)
    put_body(Codec.FP8, np.float32(0.5).tobytes() + bytes([0x38, code, 0xB8]), target)
    assert (target[0], target[2]) == (1.5, 0.5) and np.isnan(target[1])


def test_fp8_is_finer_than_int8_below_a_sixteenth_of_the_largest_and_coarser_above() -> None:
    """Normal differences lose more to it, heavy-tailed ones less: of an element it keeps a sixteenth, of any size."""
    rng = np.random.default_rng(4)
    normal = rng.standard_normal(1 << 18).astype(np.float32)
    heavy = rng.standard_t(1.5, 1 << 18).astype(np.float32)

    def median_error(codec: Codec, x: np.ndarray) -> float:
        """Over the element."""
        brought = decode_body(codec, encode_body(codec, x), x.size)
        return float(np.median(np.abs(brought - x) / np.abs(x)))

    assert median_error(Codec.INT8, normal) < median_error(Codec.FP8, normal) < 1 / 16
    assert (
        median_error(Codec.FP8, heavy) < 1 / 16 and median_error(Codec.FP8, heavy) < median_error(Codec.INT8, heavy) / 2
    )
