"""A rank's stream and one lane's socket: when it polls, what it sends, and when it takes its connection for broken."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random

import pytest
import zmq

from dips.transport.backoff import Backoff
from dips.transport.stream import FIRST_PAUSE_S, LONGEST_PAUSE_S, LOOK_S, Stream
from dips.wire.frame import (
    CHECKSUMS,
    MESSAGE_LIMIT,
    Kind,
    Range,
    StreamName,
    Welcome,
    decode_hello,
    decode_ready,
    encode_done,
    encode_welcome,
    make_message,
    run_id,
    unpack_header,
)

NAME = StreamName("r", "push", "a", 1, 1, 0, "s", 0, 1, "v1@r1")
PIECES = (Range(0, 0, 0, 8), Range(0, 0, 8, 8))
STALL_S, WAIT_MS = 10.0, 10_000


def test_a_stream_connects_as_soon_as_its_pause_is_over() -> None:
    """The first time at once, then when the pause that was drawn has passed, not a look later; a WELCOME makes the
    next pause short again.
    """

    def connected(now: float) -> bool:
        stream.advance_connection(now)
        stream.register_poll(poller := zmq.Poller())
        return bool(poller.sockets)

    with zmq.Context() as context:
        stream = Stream(context, "127.0.0.1:1", NAME, (), 10.0, Random(1))
        assert connected(0.0)
        stream.reconnect_later("a test", 5.0)
        over = 5.0 + Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S, Random(1)).next_pause_s()
        assert not connected(over - 1e-6) and connected(over)
        stream.on_welcome()
        stream.reconnect_later("a test", 50.0)
        pauses = Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S, Random(1))
        pauses.next_pause_s()
        pauses.reset()
        over = 50.0 + pauses.next_pause_s()
        assert not connected(over - 1e-6) and connected(over)
        stream.close()


class SlaveEnd:
    """A lane's socket, and the stream that is connected to it."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], ready: Callable[[], int] | None = None) -> None:
        self.socket = context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.RCVTIMEO, WAIT_MS)
        self.socket.setsockopt(zmq.LINGER, 0)
        port = self.socket.bind_to_random_port("tcp://127.0.0.1")
        self.stream = Stream(context, f"127.0.0.1:{port}", NAME, PIECES, STALL_S, Random(1), None, ready)
        self.now, self.peer = 0.0, b""
        self.stream.advance_connection(0.0)

    def poll(self, timeout_ms: int = WAIT_MS) -> int:
        """Return what the stream's poll sees, after it has waited for that."""
        self.stream.register_poll(poller := zmq.Poller())
        return sum(events for _, events in poller.poll(timeout_ms))

    def hear(self) -> tuple[Kind, bytes]:
        """Send what the stream has posted; return the next message of it."""
        assert self.poll() & zmq.POLLOUT
        assert not self.breaks(self.now)
        self.peer, header, body = self.socket.recv_multipart()
        return unpack_header(header, run_id("r"), len(body), MESSAGE_LIMIT).kind, body

    def say(self, kind: Kind, body: bytes, stream: int | None = None) -> None:
        parts = make_message(kind, run_id("r"), self.stream.id if stream is None else stream, body)
        self.socket.send_multipart([self.peer, *parts])

    def read(self) -> list[Kind]:
        assert self.poll() & zmq.POLLIN
        return [frame.header.kind for frame in self.stream.read_frames(self.now, 100)]

    def breaks(self, now: float) -> bool:
        self.now = now
        return self.stream.advance_connection(now)


@contextmanager
def slave(ready: Callable[[], int] | None = None) -> Iterator[SlaveEnd]:
    with zmq.Context() as context:
        made = SlaveEnd(context, ready)
        try:
            yield made
        finally:
            made.stream.close()
            made.socket.close()


@contextmanager
def welcomed(ready: Callable[[], int] | None = None) -> Iterator[SlaveEnd]:
    """A stream that has said HELLO and was welcomed at 0."""
    with slave(ready) as made:
        kind, hello = made.hear()
        assert kind is Kind.HELLO and decode_hello(hello)[0] == NAME
        made.say(Kind.WELCOME, encode_welcome(Welcome(0, 1 << 20)))
        assert made.read() == [Kind.WELCOME]
        made.stream.on_welcome()
        while made.stream._held:
            made.breaks(0.0)
        yield made


def test_a_poll_wakes_for_what_can_be_done_and_for_nothing_else() -> None:
    """To send while something is to be sent, to read, and when the connection breaks."""
    with welcomed() as it:
        assert it.poll(0) == 0
        it.stream.send_message(Kind.DONE, encode_done(3))
        assert it.hear() == (Kind.DONE, encode_done(3))
        it.say(Kind.DONE, encode_done(3))
        assert it.read() == [Kind.DONE] and it.poll(0) == 0
        it.socket.close()
        assert it.poll() & zmq.POLLIN


def test_what_is_not_of_this_epoch_is_skipped() -> None:
    """Nor what is no frame: it is as if it had not come, and what follows it is read."""
    with welcomed() as it:
        it.say(Kind.WANT, b"", stream=it.stream.id + 1)
        it.socket.send_multipart([it.peer, b"one part"])
        it.socket.send_multipart([it.peer, b"no header", b"body"])
        it.say(Kind.DONE, encode_done(3))
        read = list[Kind]()
        while not read:
            read += it.read()
        assert read == [Kind.DONE]


def test_a_connection_that_breaks_is_made_anew_with_the_next_epoch() -> None:
    """What was posted to the old one is not sent on the new one: the slave asks again for what it lacks."""
    with welcomed() as it:
        it.stream.post_frame(*make_message(Kind.DONE, run_id("r"), it.stream.id, encode_done(3)))
        it.stream.reconnect_later("a test", 5.0)
        assert it.poll(0) == 0 and not it.breaks(5.0)
        assert not it.breaks(5.0 + LONGEST_PAUSE_S)
        kind, hello = it.hear()
        assert kind is Kind.HELLO and decode_hello(hello)[0].epoch == it.stream.name.epoch == 2
        assert not it.socket.poll(50)
        it.socket.close()
        assert it.poll() & zmq.POLLIN
        assert it.breaks(5.0 + LONGEST_PAUSE_S + LOOK_S) and it.stream.why.startswith("connection lost")
        assert it.stream.name.epoch == 3


def test_the_health_of_a_connection_is_looked_at_now_and_then() -> None:
    """Not at each turn of its owner, of which there are thousands a second."""
    with welcomed() as it:
        assert not it.breaks(1.0)
        it.socket.close()
        assert it.poll() & zmq.POLLIN
        assert not it.breaks(1.0 + LOOK_S / 2) and it.breaks(1.0 + LOOK_S)


@pytest.mark.parametrize("owed", [True, False])
def test_silence_breaks_a_connection_while_something_is_owed(owed: bool) -> None:
    """Counted from when it began to be owed."""
    with welcomed() as it:
        it.stream.waits = owed
        assert not it.breaks(STALL_S - 0.1)
        assert it.breaks(STALL_S) is owed
        if owed:
            assert it.stream.why == "nothing moved for 10 s"
            return
        it.stream.waits = True
        assert not it.breaks(2 * STALL_S - 0.1) and it.breaks(2 * STALL_S)


def test_a_slave_that_answers_nothing_is_owing() -> None:
    """A HELLO without a WELCOME, though the rank waits for nothing yet."""
    with slave() as it:
        it.stream.waits = False
        it.hear()
        while it.stream._held:
            it.breaks(0.0)
        assert not it.breaks(STALL_S - 0.1) and it.breaks(STALL_S)


def test_a_rank_tells_of_more_that_is_ready() -> None:
    """Once for each number that is above the last, and not before the slave knows the stream."""
    ready = [0]
    with welcomed(lambda: ready[0]) as it:
        it.stream.tell_ready()
        assert it.poll(0) == 0
        ready[0] = 2
        it.stream.welcomed = False
        it.stream.tell_ready()
        assert it.poll(0) == 0
        it.stream.welcomed = True
        for _ in range(2):
            it.stream.tell_ready()
        kind, body = it.hear()
        assert kind is Kind.READY and decode_ready(body) == 2 and it.poll(0) == 0


class WornGuard(type(CHECKSUMS)):
    """The guard of a connection whose keys have sealed as much as they should."""

    worn = True


def test_worn_keys_end_a_connection() -> None:
    """A new one has new keys."""
    with welcomed() as it:
        it.stream.guard = WornGuard()
        assert it.breaks(LOOK_S) and it.stream.why.startswith("its keys")
        assert not it.breaks(LOOK_S + LONGEST_PAUSE_S) and not it.stream.guard.worn


def test_what_a_former_connection_holds_is_not_owed_by_the_next() -> None:
    """libzmq frees a body late: a connection on which nobody owed anything was broken, and made anew, all the time."""
    body = zmq.Frame(bytes(1 << 20), track=True)  # held here, as libzmq may hold it
    with welcomed() as it:
        it.stream.waits = False
        it.stream.post_frame(b"header", body)
        assert it.poll() & zmq.POLLOUT
        assert not it.breaks(0.0) and it.socket.recv_multipart()[1:] == [b"header", body.bytes]
        assert not it.breaks(STALL_S - 0.1) and it.breaks(STALL_S), "here it is"
        assert not it.breaks(begun := STALL_S + LONGEST_PAUSE_S)
        assert it.hear()[0] is Kind.HELLO
        it.stream.on_welcome()
        assert not it.breaks(begun + STALL_S) and not it.breaks(begun + 2 * STALL_S)
    del body
