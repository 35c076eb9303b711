"""Transit bounds the number of chunks, too: the smallest one costs a floor."""

from __future__ import annotations

from dips.transport.intake import Intake
from dips.transport.pool import FLOOR_BYTES, Transit
from dips.wire.chunks import Range


def test_tiny_chunks_are_as_many_as_the_queue_is_deep() -> None:
    """A hundred parameters of one element each: no more are asked than `frames`, however few bytes they are."""
    pool = Transit(10 * FLOOR_BYTES)
    intake = Intake([Range(0, param, 0, 1) for param in range(100)], 4096, pool, 0.0)
    asked = [chunk for want in intake.ask(0.0, 1 << 20) for chunk in want]
    assert len(asked) == pool.frames == 10
    assert pool.used == pool.limit
