"""Ranges: cut into chunks without loss, and covering each element once or not at all."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dips.protocol.manifest import Layer, Manifest, Parameter
from dips.wire.chunks import LayerLayout, Piece, Share, describe_uncovered, split_chunks
from dips.wire.frame import Range

MANIFEST = Manifest(
    (
        Layer("a", (Parameter("a.w", (10, 3)), Parameter("a.b", (10,)))),
        Layer("b", (Parameter("b.w", (8,)),)),
    )
)
LAYOUT = LayerLayout(MANIFEST, (0, 1))
WHOLE = [Range(0, 0, 0, 30), Range(0, 1, 0, 10), Range(1, 0, 0, 8)]


@given(st.integers(0, 1000), st.integers(1, 5000), st.integers(1, 300))
def test_chunks_of_a_range_are_the_range(offset, length, items):
    """Cutting loses nothing, repeats nothing, and keeps to the limit."""
    chunks = list(split_chunks([Range(1, 2, offset, length)], 4 * items))
    assert [e for c in chunks for e in range(c.offset, c.offset + c.length)] == list(range(offset, offset + length))
    assert all(c.nbytes <= 4 * items and c[:2] == (1, 2) for c in chunks)


def test_a_range_lies_where_its_parameter_begins():
    """Parameters follow one another in a layer's flat array."""
    assert LAYOUT.place_range(Range(0, 1, 2, 5)) == (32, 37)
    assert LAYOUT.nbytes == 4 * 48


def test_a_chunk_is_viewed_in_the_piece_that_holds_it():
    """From its first element to its last; across two pieces it is in none."""
    values = np.arange(20, dtype=np.float32)
    share = Share([Piece(0, 0, 5, 10, values[5:15]), Piece(0, 0, 15, 5, values[15:])])
    for offset, length in ((5, 10), (5, 1), (14, 1), (15, 5), (19, 1)):
        found = share.view_chunk(Range(0, 0, offset, length))
        assert np.frombuffer(found, np.float32).tolist() == values[offset : offset + length].tolist()
    for offset, length in ((4, 1), (14, 2), (20, 1)):
        assert share.view_chunk(Range(0, 0, offset, length)) is None
    assert share.view_chunk(Range(0, 1, 5, 1)) is None and share.nbytes == 60


def test_what_is_not_held_is_outside():
    """A foreign layer, a foreign parameter, an empty range, one that is too long: each is described."""
    assert LAYOUT.describe_outside(WHOLE) is None
    assert LAYOUT.describe_outside([Range(2, 0, 0, 1)]) == "layer 2 parameter 0 is not held here"
    assert LAYOUT.describe_outside([Range(0, 2, 0, 1)]) == "layer 0 parameter 2 is not held here"
    assert LAYOUT.describe_outside([Range(0, 1, 9, 2)]) == "a.b: elements 9 to 11 were named, it has 10"
    assert LAYOUT.describe_outside([Range(0, 1, 0, 0)]) is not None
    assert LayerLayout(MANIFEST, (1,)).describe_outside([Range(0, 0, 0, 1)]) is not None


def test_ranks_that_cover_everything_once_have_no_problem():
    """Uneven shares of several ranks fit together, in any order."""
    claims = {"rank 1": [Range(0, 0, 17, 13), WHOLE[2]], "rank 0": [Range(0, 0, 0, 17), WHOLE[1]], "rank 2": []}
    assert describe_uncovered(LAYOUT, claims) == []


def test_a_gap_and_an_overlap_are_named():
    """The parameter, the elements and the ranks stand in the message."""
    claims = {"rank 0": [Range(0, 0, 0, 17), WHOLE[1]], "rank 1": [Range(0, 0, 15, 10), WHOLE[2]]}
    assert describe_uncovered(LAYOUT, claims) == [
        "a.w: elements 15 to 17 come from rank 0 and from rank 1",
        "a.w: elements 25 to 30 come from no rank",
    ]


def test_what_lies_within_a_range_of_another_is_named_as_it_is():
    """Not up to where the longer range ends."""
    claims = {"rank 0": [Range(0, 0, 0, 30), WHOLE[1], WHOLE[2]], "rank 1": [Range(0, 0, 15, 5)]}
    assert describe_uncovered(LAYOUT, claims) == ["a.w: elements 15 to 20 come from rank 0 and from rank 1"]


def test_a_long_list_of_problems_is_cut():
    """A person reads at most a few lines."""
    manifest = Manifest(tuple(Layer(f"l{i}", (Parameter(f"l{i}.w", (2,)),)) for i in range(20)))
    problems = describe_uncovered(LayerLayout(manifest, range(20)), {})
    assert len(problems) == 6
    assert problems[-1] == "and 15 more"


@given(st.lists(st.tuples(st.integers(0, 7), st.integers(1, 8)), max_size=5))
def test_the_cover_check_agrees_with_counting(spans):
    """Against the dumb reference: each element is counted once, or there is a problem."""
    layout = LayerLayout(MANIFEST, (1,))
    pieces = [Range(1, 0, offset, min(length, 8 - offset)) for offset, length in spans]
    counts = [sum(p.offset <= e < p.offset + p.length for p in pieces) for e in range(8)]
    claims = {f"rank {i}": [piece] for i, piece in enumerate(pieces)}
    assert (describe_uncovered(layout, claims) == []) == (counts == [1] * 8)
