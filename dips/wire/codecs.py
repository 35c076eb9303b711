"""How the elements of a CHUNK are spelled: fp32 as they are, or differences to a named version in fewer bits.

A lossy codec carries differences only, never parameters: bf16 *of parameters* would round a norm's gain near 1.0 to
steps of 2^-8, and the outer changes of 1e-3 would vanish (docs/rationale.md#38). What is lost comes back with the next
push: the error feedback of client/rank/feedback.py. What pulls bring instead of parameters: updates.py.

    fp32   4 B an element, exact
    bf16   2 B; error at most 2^-8 of the element (2^-134 below the smallest normal number)
    int8   1 B and a 4 B step for each block of 256; error at most half a step, a step being the block's max |x| / 127
    int4   ½ B and a 4 B step for each block of 128; error at most half a step, a step being the block's max |x| / 7

What must stay true: a zero stays zero; what is not finite is noticed: in fp32 and bf16 it arrives not finite, so that
the gate sees it, in int8 and int4 its block's step is NaN, which the receiver refuses (`check_steps`); the same
elements make the same bytes, so a repeated chunk is the same. A body of blocks is all steps, then all elements: both
are read as flat arrays. In int4 two elements share a byte, the first in the low half, each as 8 more than its steps; a
half without an element is 8. Nothing here knows versions or sockets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Literal

import numpy as np
import numpy.typing as npt

from dips.dataclass import dataclass
from dips.errors import LocalProtocolError
from dips.wire.chunks import Bf16Range, Int4Range, Int8Range, Range
from dips.wire.frame import BLOCK, INT4_BLOCK, BadFrame, Buffer, Dtype

F32 = npt.NDArray[np.float32]
I8 = npt.NDArray[np.int8]
U8 = npt.NDArray[np.uint8]
Name = Literal["fp32", "bf16", "int8", "int4"]

TINIEST = np.float32(2.0**-119)  # a block whose elements are all smaller is sent as zeros: its step would not be normal
_SPAN = 64 * BLOCK  # elements done at once: 64 KiB of fp32, so that each pass after the first reads the cache
_STEPS = np.float32(127)  # from 0 to a block's largest element, int8
_STEPS4 = np.float32(7)  # likewise, int4
_LARGEST = np.finfo(np.float32).max
_ZERO4 = 8  # how int4 writes 0: −7 to 7 are 1 to 15
_NAN_BF16 = np.uint16(0x7FC0)


@dataclass(frozen=True, slots=True)
class Codec:
    """One spelling. `range` is a Range whose `nbytes` counts what really travels."""

    name: Name
    dtype: Dtype
    range: type[Range]
    encode: Callable[[F32], Buffer]  # elements → the body of their chunk; fp32: their own memory
    put: Callable[[Buffer, F32], None]  # body → its place; lossy: added to the base that lies there
    block: int = 0  # elements that share one step; 0: there are no steps
    most: np.float32 = np.float32(1)  # steps of a block's largest element

    @property
    def lossy(self) -> bool:
        """It carries differences to a base."""
        return self.dtype is not Dtype.FP32

    def encoded_ranges(self, pieces: Iterable[Range]) -> tuple[Range, ...]:
        """The same ranges, counted in this codec's bytes."""
        return tuple(self.range(*piece) for piece in pieces)

    def chunk_bytes(self, most: int) -> int:
        """What a WANT may ask for at once, in bytes of fp32: whole blocks, so that no block is cut in two."""
        whole = most - most % (4 * BLOCK)
        return whole if self.lossy and whole else most

    def check_steps(self, body: Buffer, length: int) -> None:
        """Raise BadFrame if a step of a body of `length` elements could bring what is not finite."""
        if not self.block:
            return
        steps, _ = _split_body(body, length, self.block)
        wrong = ~((steps >= 0) & (steps <= _LARGEST / (self.most + 1)))  # NaN compares false; −128 and −8 can be sent
        if wrong.any():
            first = int(wrong.argmax())
            raise BadFrame("step", f"expected finite steps from 0 on, got {steps[first]} for block {first} of a chunk")

    def decode(self, body: Buffer, length: int) -> F32:
        """The `length` elements that a body stands for."""
        out = np.zeros(length, np.float32)
        self.put(body, out)
        return out


def codec_named(name: str) -> Codec:
    """Return the codec of that name; raise LocalProtocolError if there is none."""
    try:
        return CODECS[name]
    except KeyError:
        raise LocalProtocolError(f"codec: expected one of {', '.join(CODECS)}, got {name!r}") from None


def _split_spans(length: int) -> Iterable[slice]:
    return (slice(begin, min(begin + _SPAN, length)) for begin in range(0, length, _SPAN))


# ---- fp32 ------------------------------------------------------------------------------------------------------------


def _as_they_are(values: F32) -> Buffer:
    return values.view(np.uint8).data


def _copy_body(body: Buffer, target: F32) -> None:
    np.copyto(target.view(np.uint8), np.frombuffer(body, np.uint8))


# ---- bf16 ------------------------------------------------------------------------------------------------------------


def _encode_bf16(values: F32) -> Buffer:
    """Round to nearest, ties to even. A finite element beyond the largest bf16 (3.39e38) becomes infinite."""
    out = np.empty(values.size, np.uint16)
    for cut in _split_spans(values.size):
        bits = values[cut].view(np.uint32)
        odd = bits >> 16
        odd &= 1
        odd += 0x7FFF
        odd += bits
        odd >>= 16
        out[cut] = odd
        wrong = np.isnan(values[cut])
        if wrong.any():  # the sum above may have carried a NaN's payload away
            out[cut][wrong] = _NAN_BF16
    return out.view(np.uint8).data


def _add_bf16(body: Buffer, target: F32) -> None:
    halves = np.frombuffer(body, np.uint16)
    for cut in _split_spans(target.size):
        bits = halves[cut].astype(np.uint32)
        bits <<= 16
        with np.errstate(all="ignore"):
            target[cut] += bits.view(np.float32)


# ---- blocks of whole steps -------------------------------------------------------------------------------------------


def _quantise(values: F32, steps: F32, whole: I8, block: int, most: np.float32) -> None:
    """One span: the step of each block, its largest |element| being `most` steps, and each element in steps."""
    full = values.size - values.size % block
    square = values[:full].reshape(-1, block)
    blocks = full // block
    np.maximum(square.max(axis=1, initial=0), -square.min(axis=1, initial=0), out=steps[:blocks])
    if full < values.size:
        steps[blocks] = np.abs(values[full:]).max()
    steps[steps < TINIEST] = 0
    steps /= most
    steps[~np.isfinite(steps)] = np.nan
    inverse = np.divide(np.float32(1), steps, where=steps > 0, out=np.zeros_like(steps))
    scaled = square * inverse[:blocks, None]
    np.copyto(whole[:full].reshape(-1, block), np.rint(scaled, out=scaled), casting="unsafe")
    if full < values.size:
        np.copyto(whole[full:], np.rint(values[full:] * inverse[blocks]), casting="unsafe")


def _add_span(whole: I8, steps: F32, target: F32, block: int) -> None:
    full = whole.size - whole.size % block
    blocks = full // block
    values = whole.astype(np.float32)
    values[:full].reshape(-1, block)[...] *= steps[:blocks, None]
    if full < whole.size:
        values[full:] *= steps[blocks]
    target += values


def _split_body(body: Buffer, length: int, block: int) -> tuple[F32, U8]:
    """The steps and the elements' bytes of a body."""
    raw = np.frombuffer(body, np.uint8)
    count = -(-length // block)
    return np.frombuffer(raw[: 4 * count].tobytes(), np.float32), raw[4 * count :]  # it may begin at an odd address


def _cut_steps(steps: F32, cut: slice, block: int) -> F32:
    return steps[cut.start // block : -(-cut.stop // block)]


def _encode_int8(values: F32) -> Buffer:
    count = -(-values.size // BLOCK)
    out = np.empty(4 * count + values.size, np.uint8)
    steps, whole = out[: 4 * count].view(np.float32), out[4 * count :].view(np.int8)
    with np.errstate(all="ignore"):  # what is not finite is made so on purpose
        for cut in _split_spans(values.size):
            _quantise(values[cut], _cut_steps(steps, cut, BLOCK), whole[cut], BLOCK, _STEPS)
    return out.data


def _add_int8(body: Buffer, target: F32) -> None:
    steps, raw = _split_body(body, target.size, BLOCK)
    whole = raw.view(np.int8)
    with np.errstate(all="ignore"):
        for cut in _split_spans(target.size):
            _add_span(whole[cut], _cut_steps(steps, cut, BLOCK), target[cut], BLOCK)


def _encode_int4(values: F32) -> Buffer:
    count = -(-values.size // INT4_BLOCK)
    out = np.empty(4 * count + -(-values.size // 2), np.uint8)
    steps, halves = out[: 4 * count].view(np.float32), out[4 * count :]
    whole = np.zeros(min(_SPAN, values.size + values.size % 2), np.int8)
    with np.errstate(all="ignore"):
        for cut in _split_spans(values.size):
            n = cut.stop - cut.start
            whole[n : n + n % 2] = 0
            _quantise(values[cut], _cut_steps(steps, cut, INT4_BLOCK), whole[:n], INT4_BLOCK, _STEPS4)
            _pack_halves(whole[: n + n % 2], halves[cut.start // 2 : -(-cut.stop // 2)])
    return out.data


def _pack_halves(whole: I8, halves: U8) -> None:
    """Write each two elements into a byte; two at once as one little-endian number."""
    pairs = (whole.view(np.uint8) + np.uint8(_ZERO4)).view("<u2")
    pairs &= 0x0F0F
    pairs |= pairs >> 4
    np.copyto(halves, pairs, casting="unsafe")


def _unpack_halves(halves: U8, length: int) -> I8:
    pairs = halves.astype("<u2")
    pairs |= pairs << 4
    pairs &= 0x0F0F
    whole = pairs.view(np.int8)
    whole -= _ZERO4
    return whole[:length]


def _add_int4(body: Buffer, target: F32) -> None:
    steps, halves = _split_body(body, target.size, INT4_BLOCK)
    with np.errstate(all="ignore"):
        for cut in _split_spans(target.size):
            whole = _unpack_halves(halves[cut.start // 2 : -(-cut.stop // 2)], cut.stop - cut.start)
            _add_span(whole, _cut_steps(steps, cut, INT4_BLOCK), target[cut], INT4_BLOCK)


CODECS: Mapping[str, Codec] = {
    codec.name: codec
    for codec in (
        Codec("fp32", Dtype.FP32, Range, _as_they_are, _copy_body),
        Codec("bf16", Dtype.BF16, Bf16Range, _encode_bf16, _add_bf16),
        Codec("int8", Dtype.INT8, Int8Range, _encode_int8, _add_int8, BLOCK, _STEPS),
        Codec("int4", Dtype.INT4, Int4Range, _encode_int4, _add_int4, INT4_BLOCK, _STEPS4),
    )
}
FP32 = CODECS["fp32"]
