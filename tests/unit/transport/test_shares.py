"""Shares: a chunk is found in the caller's own array, or nowhere."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dips.errors import LocalProtocolError
from dips.wire.chunks import CUT_ITEMS, Piece, Share, deal_pieces
from dips.wire.frame import Range


def piece(param: int, offset: int, length: int) -> Piece:
    return Piece(0, param, offset, length, np.arange(offset, offset + length, dtype=np.float32))


def test_a_chunk_is_a_view_of_the_piece_it_lies_in():
    """No copy: what is written through the view is in the array."""
    pieces = [piece(0, 100, 50), piece(0, 10, 20), piece(1, 0, 5)]
    share = Share(pieces)
    view = share.view_chunk(Range(0, 0, 12, 3))
    assert view is not None
    assert np.frombuffer(view, np.float32).tolist() == [12, 13, 14]
    np.frombuffer(view, np.float32)[:] = 7
    assert pieces[1].array[2:5].tolist() == [7, 7, 7]
    assert share.nbytes == 4 * 75


@pytest.mark.parametrize("chunk", [Range(0, 0, 9, 2), Range(0, 0, 28, 3), Range(0, 0, 30, 1), Range(1, 0, 10, 1)])
def test_what_lies_in_no_piece_is_not_found(chunk):
    """Beginning before, ending behind, between, or in another layer."""
    assert Share([piece(0, 10, 20), piece(0, 100, 50)]).view_chunk(chunk) is None


@pytest.mark.parametrize(
    "array",
    [np.zeros(4, np.float64), np.zeros(3, np.float32), np.zeros((2, 2), np.float32), np.zeros(8, np.float32)[::2]],
)
def test_arrays_are_flat_contiguous_fp32(array):
    """Anything else is refused with what came."""
    with pytest.raises(LocalProtocolError, match="expected 4 contiguous float32"):
        Share([Piece(0, 0, 0, 4, array)])


@given(st.lists(st.integers(1, 20_000), max_size=12), st.integers(1, 5))
def test_lanes_are_dealt_evenly(lengths, lanes):
    """Each element to exactly one lane, in order; no lane has more than its share and a cut."""
    pieces = [piece(i, 7, n) for i, n in enumerate(lengths)]
    hands = deal_pieces(pieces, lanes)
    dealt = [(p.param, p.offset, p.length) for hand in hands for p in hand]
    for index, length in enumerate(lengths):
        at = 7
        for _, offset, part in (d for d in dealt if d[0] == index):
            assert offset == at
            at += part
        assert at == 7 + length
    assert max(sum(p.length for p in hand) for hand in hands) <= sum(lengths) / lanes + CUT_ITEMS
    assert deal_pieces(pieces, 1) == [pieces]
