"""Shares: a chunk is found in the caller's own array, or nowhere."""

from __future__ import annotations

import numpy as np
import pytest

from dips.errors import LocalProtocolError
from dips.transport.shares import Piece, Share, deal
from dips.wire.chunks import Range


def piece(param: int, offset: int, length: int) -> Piece:
    return Piece(0, param, offset, length, np.arange(offset, offset + length, dtype=np.float32))


def test_a_chunk_is_a_view_of_the_piece_it_lies_in():
    """No copy: what is written through the view is in the array."""
    pieces = [piece(0, 100, 50), piece(0, 10, 20), piece(1, 0, 5)]
    share = Share(pieces)
    view = share.view(Range(0, 0, 12, 3))
    assert view is not None
    assert np.frombuffer(view, np.float32).tolist() == [12, 13, 14]
    np.frombuffer(view, np.float32)[:] = 7
    assert pieces[1].array[2:5].tolist() == [7, 7, 7]
    assert share.nbytes == 4 * 75


@pytest.mark.parametrize("chunk", [Range(0, 0, 9, 2), Range(0, 0, 28, 3), Range(0, 0, 30, 1), Range(1, 0, 10, 1)])
def test_what_lies_in_no_piece_is_not_found(chunk):
    """Beginning before, ending behind, between, or in another layer."""
    assert Share([piece(0, 10, 20), piece(0, 100, 50)]).view(chunk) is None


@pytest.mark.parametrize(
    "array",
    [np.zeros(4, np.float64), np.zeros(3, np.float32), np.zeros((2, 2), np.float32), np.zeros(8, np.float32)[::2]],
)
def test_arrays_are_flat_contiguous_fp32(array):
    """Anything else is refused with what came."""
    with pytest.raises(LocalProtocolError, match="expected 4 contiguous float32"):
        Share([Piece(0, 0, 0, 4, array)])


def test_lanes_are_dealt_evenly():
    """Each piece goes to the lane with the fewest bytes, and each to exactly one."""
    pieces = [piece(i, 0, n) for i, n in enumerate((50, 30, 20, 10))]
    hands = deal(pieces, 2)
    assert [sum(p.length for p in hand) for hand in hands] == [60, 50]
    assert deal(pieces, 1) == [pieces]
