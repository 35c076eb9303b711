"""The backoff: pauses double up to a limit, are shortened by chance, and begin anew after a success."""

from __future__ import annotations

from random import Random

import zmq

from dips.transport.backoff import Backoff
from dips.transport.stream import FIRST_PAUSE_S, LONGEST_PAUSE_S, Stream
from dips.wire.frame import StreamName


class LongestPauses(Random):
    """Draws the longest pause that is allowed."""

    def uniform(self, a: float, b: float) -> float:
        return b


def test_pauses_double_up_to_the_longest() -> None:
    """Without jitter: 0.5, 1, 2, 3, 3 seconds, and after a success 0.5 again."""
    backoff = Backoff(0.5, 3.0, LongestPauses())
    assert [backoff.next_pause_s() for _ in range(5)] == [0.5, 1.0, 2.0, 3.0, 3.0]
    backoff.reset()
    assert backoff.next_pause_s() == 0.5


def test_jitter_takes_at_most_half() -> None:
    """Each pause lies between half of its full length and all of it, and they are spread over that interval."""
    pauses = [Backoff(1.0, 1.0, Random(seed)).next_pause_s() for seed in range(200)]
    assert all(0.5 <= pause <= 1.0 for pause in pauses)
    assert min(pauses) < 0.55 and max(pauses) > 0.95


def test_equal_generators_give_equal_pauses() -> None:
    """Chance comes from the generator alone, so a simulation can repeat itself."""
    one, other = Backoff(0.1, 5.0, Random(7)), Backoff(0.1, 5.0, Random(7))
    assert [one.next_pause_s() for _ in range(10)] == [other.next_pause_s() for _ in range(10)]


def test_a_stream_connects_as_soon_as_its_pause_is_over() -> None:
    """The first time at once, then when the pause that was drawn has passed, not a look later."""

    def connected(now: float) -> bool:
        stream.advance_connection(now)
        stream.register_poll(poller := zmq.Poller())
        return bool(poller.sockets)

    name = StreamName("r", "push", "a", 1, 1, 0, "s", 0, 1, "v1@r1")
    with zmq.Context() as context:
        stream = Stream(context, "127.0.0.1:1", name, (), 10.0, Random(1))
        assert connected(0.0)
        stream.reconnect_later("a test", 5.0)
        over = 5.0 + Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S, Random(1)).next_pause_s()
        assert not connected(over - 1e-6) and connected(over)
        stream.close()
