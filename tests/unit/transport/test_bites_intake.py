"""What a stream owes: no more chunks than the queue is deep, and nothing once all that was asked is in its place."""

from __future__ import annotations

import pytest

from dips.transport.intake import FLOOR_BYTES, Intake, Transit
from dips.wire.frame import Header, Kind, Range


def test_tiny_chunks_are_as_many_as_the_queue_is_deep() -> None:
    """A hundred parameters of one element each: no more are asked than `most_chunks`, however few bytes they are."""
    pool = Transit(10 * FLOOR_BYTES)
    intake = Intake([Range(0, param, 0, 1) for param in range(100)], 4096, pool, 0.0)
    asked = [chunk for want in intake.ask_chunks(0.0, 1 << 20) for chunk in want]
    assert len(asked) == pool.most_chunks == 10
    assert pool.used_bytes == pool.limit


@pytest.mark.parametrize("end", ["mark_received", "mark_wrong", "drop_claim"])
def test_a_stream_is_busy_until_its_last_chunk_has_an_end(end: str) -> None:
    """Else a push that waits for its turn would count as one that stalls."""
    intake = Intake([Range(0, 0, 0, 4)], 4096, Transit(FLOOR_BYTES), 0.0)
    assert not intake.busy
    ((chunk,),) = intake.ask_chunks(0.0, 1 << 20)
    assert intake.busy
    claimed = intake.claim_chunk(Header(Kind.CHUNK, 0, 1, chunk.nbytes, 0), 0.0)
    assert claimed == chunk and intake.busy
    getattr(intake, end)(chunk)
    assert not intake.busy
