"""Headers that are nearly right: each refused for its reason, and its nearest neighbour that is right is read."""

from __future__ import annotations

import pytest

from dips.codecs import Codec, Dtype
from dips.wire.frame import BadFrame, Header, Kind, pack_header, unpack_header

RUN, CHUNK_BYTES = 7, 4096
BLOCK, INT4_BLOCK = Codec.INT8.block, Codec.INT4.block


def reason(header: Header) -> str:
    """Why a frame with this header is refused; empty if it is not."""
    try:
        unpack_header(pack_header(header), RUN, header.length, CHUNK_BYTES)
    except BadFrame as refused:
        return refused.reason
    return ""


@pytest.mark.parametrize(
    ("dtype", "length", "whole"),
    [
        (Codec.BF16.dtype, 2, True),
        (Codec.BF16.dtype, 3, False),
        (Codec.FP32.dtype, 4, True),
        (Codec.FP32.dtype, 6, False),
        (Codec.INT8.dtype, 4, False),  # a step, and no element
        (Codec.INT8.dtype, 5, True),
        (Codec.INT8.dtype, 4 + BLOCK, True),
        (Codec.INT8.dtype, 4 + BLOCK + 4, False),
        (Codec.INT8.dtype, 4 + BLOCK + 5, True),
        (Codec.INT4.dtype, 4, False),
        (Codec.INT4.dtype, 5, True),
        (Codec.INT4.dtype, 4 + INT4_BLOCK // 2, True),
        (Codec.INT4.dtype, 4 + INT4_BLOCK // 2 + 4, False),
        (Codec.INT4.dtype, 4 + INT4_BLOCK // 2 + 5, True),
    ],
)
def test_a_chunk_is_a_number_of_whole_elements(dtype: Dtype, length: int, whole: bool) -> None:
    """In its own spelling; of int8 and int4 each block is a step and at least one element."""
    assert reason(Header(Kind.CHUNK, RUN, 1, length, 0, 0, 0, 0, dtype)) == ("" if whole else "length")


@pytest.mark.parametrize("place", [{"layer": 1}, {"param": 1}, {"offset": 1}])
def test_only_a_chunk_names_a_place(place: dict[str, int]) -> None:
    """Each of the three numbers alone is one too many in a message."""
    assert reason(Header(Kind.DONE, RUN, 1, 4, 0)) == ""
    assert reason(Header(Kind.DONE, RUN, 1, 4, 0, **place)) == "place"
    assert reason(Header(Kind.CHUNK, RUN, 1, 4, 0, **place)) == ""
