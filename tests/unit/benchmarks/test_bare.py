"""The yardsticks of the data flow move every byte: a yardstick that loses some would be too fast."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.bare import BareZmq, GrpcStream

NBYTES, CHUNK = 1_000_003, 1 << 16  # the last chunk is a short one


@pytest.mark.parametrize("lanes", [1, 2])
def test_bare_zeromq_returns_when_all_bytes_are_there(lanes: int) -> None:
    """Twice in each direction: neither side waits for bytes that do not come, nor leaves any for the next time."""
    with BareZmq(NBYTES, CHUNK, lanes) as pair:
        for _ in range(2):
            pair.push()
            pair.pull()
        assert not pair.pipe.poll(), "the peer said more than it was asked"


@pytest.mark.parametrize("lanes", [1, 2])
def test_checked_zeromq_puts_every_byte_into_place(lanes: int) -> None:
    """What is pulled is the peer's data, and what was pushed has become the peer's data."""
    with BareZmq(NBYTES, CHUNK, lanes) as pair:
        pair.data[:] = np.arange(NBYTES) % 251
        pair.push_checked()
        pair.data[:] = 0
        pair.pull_checked()
        assert (pair.data == np.arange(NBYTES) % 251).all(), "what was pushed is not what is pulled"


def test_grpc_streams_every_byte_into_place() -> None:
    """What is pulled with checks is the peer's data, and a push with checks is checked there."""
    with GrpcStream(NBYTES, CHUNK) as stream:
        stream.push()
        stream.pull()
        stream.data[:] = 7
        stream.push_checked()
        stream.data[:] = 0
        stream.pull_checked()
        assert (stream.data == 7).all(), "what was pushed is not what is pulled"
