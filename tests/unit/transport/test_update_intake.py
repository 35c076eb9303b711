"""Updates over links that are slow, or not known yet: however their chunks are cut, every bit comes once."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dips.codecs import ITEM_BYTES, UPDATE_BLOCK
from dips.protocol.manifest import Layer, Manifest, Parameter
from dips.slave.sender import cut_updates
from dips.transport.intake import LEAST_CHUNK_BYTES, Intake, Transit
from dips.wire.chunks import LayerLayout, put_pulled
from dips.wire.frame import Header, Kind, Range, range_type
from tests.unit.wire.test_updates import PULLS, Pull, chain_of

MIB = 1 << 20
PIECE = LEAST_CHUNK_BYTES // ITEM_BYTES  # elements of the piece that tries a link
NUMEL = 4 * PIECE + 70
LAYOUT = LayerLayout(Manifest((Layer("a", (Parameter("a.0", (9,)), Parameter("a.1", (NUMEL,)))),)), (0,))
CHAINS = {key: chain_of(*key, LAYOUT) for key in PULLS}


def arrive(intake: Intake, chunk: Range, now: float) -> None:
    """The slave has sent what was asked."""
    assert intake.claim_chunk(Header(Kind.CHUNK, 0, 0, chunk.nbytes, 0, *chunk[:3], chunk.dtype), now) == chunk


@st.composite
def ranges(draw: st.DrawFn) -> Range:
    offset = draw(st.integers(0, NUMEL - 1))
    return Range(0, 1, offset, draw(st.integers(1, NUMEL - offset)))


@pytest.mark.parametrize("key", PULLS)
@settings(deadline=None, max_examples=40)
@given(
    piece=ranges(),
    chunk_bytes=st.integers(LEAST_CHUNK_BYTES // 3, 3 * LEAST_CHUNK_BYTES),
    ends=st.lists(st.sampled_from(["here", "wrong", "lost"]), max_size=12),
    second_s=st.sampled_from([1e-4, 20.0]),
)
def test_any_cut_of_any_range_becomes_the_newer_version(
    key: Pull, piece: Range, chunk_bytes: int, ends: list[str], second_s: float
) -> None:
    """A fast link or a slow one, that breaks or brings wrong bytes: the books balance, and so do the bits."""
    start, after, updates = CHAINS[key]
    now, pool = 0.0, Transit(256 * MIB)
    intake = Intake([range_type(*key)(*piece)], chunk_bytes, pool, now)
    expected, arrived, cut = intake.total, 0, slice(*LAYOUT.place_range(piece))
    target = start[cut].copy()
    while not intake.complete:
        for chunk in [chunk for unit in intake.ask_chunks(now, 1 << 60) for chunk in unit]:
            now += second_s
            assert chunk.length <= chunk_bytes // ITEM_BYTES, "no longer than the slave allows"
            end = ends.pop() if ends else "here"
            if end == "lost":
                intake.on_connection_lost()
                break
            arrive(intake, chunk, now)
            if end == "wrong":
                intake.mark_wrong(chunk)
                continue
            begin = chunk.offset - piece.offset
            body = cut_updates(LAYOUT, updates, chunk)
            put_pulled(chunk, body, target[begin : begin + chunk.length])
            intake.mark_received(chunk)
            arrived += len(body)
    assert target.tobytes() == after[cut].tobytes()
    assert arrived == intake.total == expected, "nothing was asked twice, no block was cut in two"
    assert pool.used_bytes == 0 and intake.in_flight == 0


@pytest.mark.parametrize("offset", [0, 1, UPDATE_BLOCK - 1, UPDATE_BLOCK])
@pytest.mark.parametrize("key", PULLS)
def test_one_piece_of_updates_tells_how_fast_a_link_is(key: Pull, offset: int) -> None:
    """It ends with a block of the parameter wherever it begins, and is no shorter than what counts as a trial."""
    intake = Intake([range_type(*key)(0, 1, offset, 3 * PIECE)], MIB, Transit(256 * MIB), 0.0)
    ((trial,),) = intake.ask_chunks(0.0, 1 << 60)
    assert type(trial) is range_type(*key) and PIECE <= trial.length < PIECE + UPDATE_BLOCK
    assert (trial.offset + trial.length) % UPDATE_BLOCK == 0
    arrive(intake, trial, 0.01)
    intake.mark_received(trial)
    ((rest,),) = intake.ask_chunks(0.01, 1 << 60)
    assert rest.offset + rest.length == offset + 3 * PIECE, "the rest goes in one chunk"
