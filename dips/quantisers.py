"""The rounding of elements to codes by each codec, in numpy, for encoding and decoding chunks and updates.

A lossy codec has two functions: one rounds elements (in units of the step, for codecs with blocks) to codes, the other
widens codes. Blocks, spans and steps are the same for all. The compiled twins in outer/kernels.py give the same bits.

Must stay true: a zero stays zero; of elements that are not finite, bf16 keeps the NaN or infinity and a block's step
becomes NaN; our encoder never writes the code of a NaN; equal elements make equal codes, so a repeated chunk is the
same. Elements are numbered from a block's begin. Spans keep what one pass writes in the cache for the next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from dips.codecs import Codec
from dips.dataclass import dataclass

F32 = npt.NDArray[np.float32]
I8 = npt.NDArray[np.int8]
U8 = npt.NDArray[np.uint8]
U16 = npt.NDArray[np.uint16]
Codes = npt.NDArray[Any]  # of the type in the codec's quantiser

SPAN = 1 << 15  # elements processed at once, whole blocks: 128 KiB of fp32
_NAN_BF16 = np.uint16(0x7FC0)
_ZERO4 = 8  # int4's code of 0: −7 to 7 are 1 to 15, the first of two elements in the low half of their byte
_ZERO2 = 2  # int2's code of 0: −1 to 1 are 1 to 3, the first of four elements in the low bits of their byte


@dataclass(frozen=True, slots=True)
class Quantiser:
    """The two functions of a codec. `round` may overwrite its input if the codec has blocks."""

    codes: type[np.generic]  # type of one code, or of as many small ones as a byte holds
    round: Callable[[F32, Codes], None]  # elements → codes
    widen: Callable[[Codes, int], F32]  # codes, number of elements → a new array of elements
    nan_code: int | None = None  # the code of a NaN without its sign, which no encoder of ours writes


def quantise(codec: Codec, values: F32, steps: F32, codes: Codes) -> None:
    """Round `values` to codes. Callers silence numpy's warnings: values that are not finite are expected.

    values  f32[n]         in
    steps   f32[n/block]   out  largest |element| of each block / codec.largest, 0 if tiny; empty without blocks
    codes   n of them      out  of the quantiser's type
    """
    quantiser = QUANTISERS[codec]
    for cut, blocks, places in _split_spans(codec, values.size, codes.itemsize):
        part = values[cut]
        quantiser.round(_count_steps(codec, part, steps[blocks]) if codec.block else part, codes[places])


def add_codes(codec: Codec, codes: Codes, steps: F32, target: F32) -> None:
    """Add the values of codes to `target`, in one fp32 addition each."""
    quantiser = QUANTISERS[codec]
    for cut, blocks, places in _split_spans(codec, target.size, codes.itemsize):
        values = quantiser.widen(codes[places], cut.stop - cut.start)
        if codec.block:
            _take_steps(codec, values, steps[blocks])
        target[cut] += values


def _split_spans(codec: Codec, length: int, itemsize: int) -> Iterator[tuple[slice, slice, slice]]:
    """Yield the slices of elements, blocks and codes of each span."""
    block, bits, held = codec.block or SPAN, codec.bits, 8 * itemsize
    for begin in range(0, length, SPAN):
        end = min(begin + SPAN, length)
        places = slice(begin * bits // held, -(-end * bits // held))
        yield slice(begin, end), slice(begin // block, -(-end // block)), places


def _count_steps(codec: Codec, values: F32, steps: F32) -> F32:
    """Set the step of each block; return the elements in units of their steps."""
    blocks, rest = divmod(values.size, codec.block)
    full, scaled = values.size - rest, np.abs(values)
    square = scaled[:full].reshape(blocks, codec.block)
    square.max(axis=1, initial=0, out=steps[:blocks])
    if rest:
        steps[blocks] = scaled[full:].max()
    steps[steps < np.float32(codec.tiniest)] = 0
    steps /= np.float32(codec.largest)
    steps[~np.isfinite(steps)] = np.nan
    inverse = np.divide(np.float32(1), steps, where=steps > 0, out=np.zeros_like(steps))
    np.multiply(values[:full].reshape(blocks, codec.block), inverse[:blocks, None], out=square)
    if rest:
        np.multiply(values[full:], inverse[blocks], out=scaled[full:])
    return scaled


def _take_steps(codec: Codec, values: F32, steps: F32) -> None:
    """Convert elements in units of their steps into elements, in place."""
    blocks, rest = divmod(values.size, codec.block)
    square = values[: values.size - rest].reshape(blocks, codec.block)
    square *= steps[:blocks, None]
    if rest:
        values[-rest:] *= steps[blocks]


# ---- bf16 ------------------------------------------------------------------------------------------------------------


def _round_bf16(values: F32, codes: U16) -> None:
    """Round to nearest, ties to even. A finite element beyond the largest bf16 (3.39e38) becomes infinite."""
    bits = values.view(np.uint32)
    odd = bits >> 16
    odd &= 1
    odd += 0x7FFF
    odd += bits
    odd >>= 16
    codes[:] = odd
    wrong = np.isnan(values)
    if wrong.any():  # the sum above may have changed a NaN's payload
        codes[wrong] = _NAN_BF16


def _widen_bf16(codes: U16, _: int) -> F32:
    bits = codes.astype(np.uint32)
    bits <<= 16
    return bits.view(np.float32)


# ---- whole steps -----------------------------------------------------------------------------------------------------


def _round_int8(values: F32, codes: I8) -> None:
    np.copyto(codes, np.rint(values, out=values), casting="unsafe")


def _widen_int8(codes: I8, _: int) -> F32:
    return codes.astype(np.float32)


def _round_int4(values: F32, codes: U8) -> None:
    """Round to whole steps and pack two elements per byte, both at once as one little-endian number."""
    whole = np.zeros(2 * codes.size, np.int8)
    np.copyto(whole[: values.size], np.rint(values, out=values), casting="unsafe")
    pairs = (whole.view(np.uint8) + np.uint8(_ZERO4)).view("<u2")
    pairs &= 0x0F0F
    pairs |= pairs >> 4
    np.copyto(codes, pairs, casting="unsafe")


def _widen_int4(codes: U8, length: int) -> F32:
    pairs = codes.astype("<u2")
    pairs |= pairs << 4
    pairs &= 0x0F0F
    whole = pairs.view(np.int8)
    whole -= _ZERO4
    return whole[:length].astype(np.float32)


def _round_int2(values: F32, codes: U8) -> None:
    """Round to −1, 0 or 1 steps and pack four elements per byte, all at once as one little-endian number."""
    whole = np.zeros(4 * codes.size, np.int8)
    np.copyto(whole[: values.size], np.rint(values, out=values), casting="unsafe")
    fours = (whole.view(np.uint8) + np.uint8(_ZERO2)).view("<u4")
    fours &= 0x03030303
    fours |= fours >> 6
    fours |= fours >> 12
    np.copyto(codes, fours & 0xFF, casting="unsafe")


def _widen_int2(codes: U8, length: int) -> F32:
    fours = codes.astype("<u4")
    fours |= fours << 12
    fours &= 0x000F000F
    fours |= fours << 6
    fours &= 0x03030303
    whole = fours.view(np.int8)
    whole -= _ZERO2
    return whole[:length].astype(np.float32)


# ---- e4m3: a sign, 4 bits of exponent with bias 7, 3 of fraction; no infinity, NaN is 0x7F ---------------------------

_NAN_E4M3, _MOST_E4M3 = 0x7F, np.uint32(0x7E)  # the largest number is 448


def _list_e4m3() -> F32:
    """Return the value of each of the 256 codes."""
    codes = np.arange(256)
    exponent, fraction = codes >> 3 & 15, codes & 7
    magnitude = np.ldexp(fraction + 8.0 * (exponent > 0), np.maximum(exponent, 1) - 10)
    magnitude[codes & 0x7F == _NAN_E4M3] = np.nan
    numbers: F32 = np.where(codes < 128, magnitude, -magnitude).astype(np.float32)
    return numbers


_E4M3 = _list_e4m3()
_SUBNORMAL = np.float32(2.0**-6)  # smaller numbers are multiples of 2^-9
_SHIFT = np.float32(2.0**14)  # a sum with it is rounded to multiples of 2^-9, which are its last bits


def _round_fp8(values: F32, codes: U8) -> None:
    """Round to nearest, ties to even; values beyond 448 become 448."""
    magnitude = np.abs(values)
    small = (magnitude + _SHIFT).view(np.uint32) & 15
    bits = magnitude.view(np.uint32)
    odd = bits >> 20
    odd &= 1
    odd += 0x7FFFF
    odd += bits
    odd >>= 20
    odd -= (127 - 7) << 3
    np.copyto(odd, small, where=magnitude < _SUBNORMAL)
    np.minimum(odd, _MOST_E4M3, out=odd)
    odd |= values.view(np.uint32) >> 24 & 0x80
    np.copyto(codes, odd, casting="unsafe")


def _widen_fp8(codes: U8, _: int) -> F32:
    values: F32 = _E4M3.take(codes)  # twice as fast as [codes]
    return values


QUANTISERS: Mapping[Codec, Quantiser] = {
    Codec.BF16: Quantiser(np.uint16, _round_bf16, _widen_bf16),
    Codec.INT8: Quantiser(np.int8, _round_int8, _widen_int8),
    Codec.INT4: Quantiser(np.uint8, _round_int4, _widen_int4),
    Codec.FP8: Quantiser(np.uint8, _round_fp8, _widen_fp8, _NAN_E4M3),
    Codec.INT2: Quantiser(np.uint8, _round_int2, _widen_int2),
}
