"""How each codec rounds elements to codes, in numpy: what chunks and updates are made of and read by.

A lossy codec is two functions: one rounds elements (of a codec with blocks: in its steps) to codes, the other widens
codes again. Blocks, spans and steps are the same for all. The compiled twins in outer/kernels.py have the same bits.

What must stay true: a zero stays zero; of what is not finite, bf16 keeps the NaN or infinity and a block's step becomes
NaN; no code of ours is NaN; equal elements make equal codes, so a repeated chunk is the same. Elements are numbered
from a block's begin. Spans keep what one pass writes in the cache for the next.
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
Codes = npt.NDArray[Any]  # of the type that the codec's quantiser names

SPAN = 1 << 15  # elements done at once, whole blocks: 128 KiB of fp32
_NAN_BF16 = np.uint16(0x7FC0)
_ZERO4 = 8  # how int4 writes 0: −7 to 7 are 1 to 15, the first of two elements in the low half of their byte


@dataclass(frozen=True, slots=True)
class Quantiser:
    """A codec's two functions. `round` may overwrite elements in steps, which are an array of its own."""

    codes: type[np.generic]  # what holds one code, or two of 4 bits
    round: Callable[[F32, Codes], None]  # elements → codes
    widen: Callable[[Codes, int], F32]  # codes → so many elements, an array of its own


def quantise(codec: Codec, values: F32, steps: F32, codes: Codes) -> None:
    """Round `values` to codes. Callers silence numpy's warnings: what is not finite is made so on purpose.

    values  f32[n]         in
    steps   f32[n/block]   out  of each block: its largest |element| / codec.largest, 0 if that is tiny; else empty
    codes   n of them      out  of the quantiser's type
    """
    quantiser = QUANTISERS[codec]
    for cut, blocks, places in _split_spans(codec, values.size, codes.itemsize):
        part = values[cut]
        quantiser.round(_count_steps(codec, part, steps[blocks]) if codec.block else part, codes[places])


def add_codes(codec: Codec, codes: Codes, steps: F32, target: F32) -> None:
    """Add what codes stand for to `target`, in one fp32 addition each."""
    quantiser = QUANTISERS[codec]
    for cut, blocks, places in _split_spans(codec, target.size, codes.itemsize):
        values = quantiser.widen(codes[places], cut.stop - cut.start)
        if codec.block:
            _take_steps(codec, values, steps[blocks])
        target[cut] += values


def _split_spans(codec: Codec, length: int, itemsize: int) -> Iterator[tuple[slice, slice, slice]]:
    """Elements, blocks and codes of each span."""
    block, bits, held = codec.block or SPAN, codec.bits, 8 * itemsize
    for begin in range(0, length, SPAN):
        end = min(begin + SPAN, length)
        places = slice(begin * bits // held, -(-end * bits // held))
        yield slice(begin, end), slice(begin // block, -(-end // block)), places


def _count_steps(codec: Codec, values: F32, steps: F32) -> F32:
    """Set the step of each block; return the elements in steps."""
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
    """Turn elements in steps into elements."""
    blocks, rest = divmod(values.size, codec.block)
    square = values[: values.size - rest].reshape(blocks, codec.block)
    square *= steps[:blocks, None]
    if rest:
        values[-rest:] *= steps[blocks]


# ---- bf16 ------------------------------------------------------------------------------------------------------------


def _round_bf16(values: F32, codes: U16) -> None:
    """To nearest, ties to even. A finite element beyond the largest bf16 (3.39e38) becomes infinite."""
    bits = values.view(np.uint32)
    odd = bits >> 16
    odd &= 1
    odd += 0x7FFF
    odd += bits
    odd >>= 16
    codes[:] = odd
    wrong = np.isnan(values)
    if wrong.any():  # the sum above may have carried a NaN's payload away
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
    """Two elements in a byte: two at once as one little-endian number."""
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


# ---- e4m3: a sign, 4 bits of exponent with bias 7, 3 of fraction; no infinity, NaN is 0x7F ---------------------------

_NAN_E4M3, _MOST_E4M3 = 0x7F, np.uint32(0x7E)  # the largest number is 448


def _list_e4m3() -> F32:
    """What each of the 256 codes is."""
    codes = np.arange(256)
    exponent, fraction = codes >> 3 & 15, codes & 7
    magnitude = np.ldexp(fraction + 8.0 * (exponent > 0), np.maximum(exponent, 1) - 10)
    magnitude[codes & 0x7F == _NAN_E4M3] = np.nan
    numbers: F32 = np.where(codes < 128, magnitude, -magnitude).astype(np.float32)
    return numbers


_E4M3 = _list_e4m3()
_SUBNORMAL = np.float32(2.0**-6)  # smaller numbers are multiples of 2^-9
_SHIFT = np.float32(2.0**14)  # a sum with it is rounded to multiples of 2^-9: they are its last bits


def _round_fp8(values: F32, codes: U8) -> None:
    """To nearest, ties to even; beyond 448 to 448."""
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
    Codec.FP8: Quantiser(np.uint8, _round_fp8, _widen_fp8),
}
