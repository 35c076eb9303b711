"""The written error bound of each codec: a codec without one here fails every test that walks the table."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt

from dips.codecs import Codec

F32, F64 = npt.NDArray[np.float32], npt.NDArray[np.float64]

# |x| of an element and the step of its block, in fp64 → the most that its error may be (dips/codecs.py).
BOUNDS: Mapping[Codec, Callable[[F64, F64], F64]] = {
    Codec.FP32: lambda x, step: np.zeros_like(x),
    Codec.BF16: lambda x, step: np.maximum(2.0**-8 * x, 2.0**-134),
    Codec.INT8: lambda x, step: step / 2,
    Codec.INT4: lambda x, step: step / 2,
    Codec.INT2: lambda x, step: step / 2,
    Codec.FP8: lambda x, step: np.maximum(x / 16, step / 1024),
}
SLACK = 2e-4  # of a bound, in fp32's own roundings: of the step, its inverse, and the element in steps


def error_bound(codec: Codec, values: F32, block: int | None = None) -> F64:
    """The most that each element's error may be; `block` elements share a step, if not the codec's own number."""
    wide, size = np.abs(values.astype(np.float64)), block or codec.block or 1
    tops = np.maximum.reduceat(wide, range(0, wide.size, size)) if wide.size else wide
    steps = np.repeat(tops, size)[: wide.size] / codec.largest
    bound = BOUNDS[codec](wide, steps)
    return np.maximum((1 + SLACK) * bound, codec.tiniest) if codec.block else bound
