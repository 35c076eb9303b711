"""One rank's push and pull against a scripted lane, with the stage's work in a thread of its own and without one."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import xxhash
import zmq

from dips.client.rank.transfer import BATCH, FLUSH_MS, Piece, TransferIdentity, TransferLoop, pull_pieces, push_pieces
from dips.ids import VersionId
from dips.protocol.effects import Grant, SlaveAddress
from dips.transport.stream import Stream
from dips.wire.frame import (
    Header,
    Kind,
    Range,
    Welcome,
    check_body,
    decode_hello,
    decode_want,
    encode_done,
    encode_error,
    encode_want,
    encode_welcome,
    make_message,
    pack_header,
    run_id,
    unpack_header,
)

RUN, CHUNK_BYTES = "r", 4096
ITEMS = CHUNK_BYTES // 4
NUMEL = 5 * ITEMS + 7
V = VersionId(3, 3)
CHUNKS = [Range(0, 0, at, min(ITEMS, NUMEL - at)) for at in range(0, NUMEL, ITEMS)]


class ScriptedLane:
    """A slave's lane that holds one parameter: it serves pulls, and asks for all of a push."""

    def __init__(self, theta: np.ndarray, corrupted: set[int]) -> None:
        """`corrupted`: the chunks, by number, that are sent once with a flipped bit under the right checksum."""
        self.theta, self.received = theta, np.full(theta.size, np.nan, np.float32)
        self.wanted: Counter[Range] = Counter()
        self._corrupted = {CHUNKS[number] for number in corrupted}
        self.interrupts = list[tuple[Kind, bytes]]()  # messages, each of which answers one WANT instead of its chunks
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self.address = f"127.0.0.1:{self._socket.bind_to_random_port('tcp://127.0.0.1')}"
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def close(self) -> None:
        self._end.set()
        self._thread.join()
        self._context.destroy(linger=0)

    def _serve(self) -> None:
        while not self._end.is_set():
            if self._socket.poll(5):
                peer, head, body = self._socket.recv_multipart()
                header = unpack_header(head, run_id(RUN), len(body), CHUNK_BYTES)
                check_body(header, body)
                for parts in self._answer(header, body):
                    self._socket.send_multipart([peer, *parts])

    def _answer(self, header: Header, body: bytes) -> Iterator[tuple[bytes, bytes]]:
        def say(kind: Kind, answer: bytes) -> tuple[bytes, bytes]:
            return make_message(kind, header.run, header.stream, answer)

        match header.kind:
            case Kind.HELLO:
                name = decode_hello(body).name
                yield say(Kind.WELCOME, encode_welcome(Welcome(self.theta.nbytes, CHUNK_BYTES)))
                if name.kind == "push":
                    yield say(Kind.WANT, encode_want(CHUNKS))
            case Kind.WANT if self.interrupts:
                yield say(*self.interrupts.pop())
            case Kind.WANT:
                for chunk in decode_want(body):
                    yield self._chunk(header, chunk)
            case Kind.CHUNK:
                self.received[header.offset : header.offset + header.length // 4] = np.frombuffer(body, np.float32)
                if not np.isnan(self.received).any():
                    yield say(Kind.DONE, encode_done(self.theta.nbytes))

    def _chunk(self, asked: Header, chunk: Range) -> tuple[bytes, bytes]:
        self.wanted[chunk] += 1
        body = bytearray(self.theta[chunk.offset : chunk.offset + chunk.length].tobytes())
        checksum = xxhash.xxh3_64_intdigest(bytes(body))
        if chunk in self._corrupted and self.wanted[chunk] == 1:
            body[1] ^= 0x10
        return pack_header(Header(Kind.CHUNK, asked.run, asked.stream, len(body), checksum, *chunk[:3])), bytes(body)


def grant(lane: ScriptedLane) -> Grant:
    return Grant(V, (SlaveAddress("s0", 1, (lane.address,), (0,)),), 10.0)


def identity(seq: int = 1) -> TransferIdentity:
    return TransferIdentity(RUN, "c", 1, seq, 0)


@pytest.fixture(params=[set(), {0, 2, len(CHUNKS) - 1}], ids=["intact", "corrupted"])
def lane(request: pytest.FixtureRequest) -> Iterator[ScriptedLane]:
    theta = np.random.default_rng(1).standard_normal(NUMEL).astype(np.float32)
    made = ScriptedLane(theta, request.param)
    yield made
    made.close()


@pytest.mark.usefixtures("stage_threads")
def test_a_corrupted_chunk_of_a_pull_is_refused_and_asked_for_again(lane: ScriptedLane) -> None:
    """Headers pass, so only the body's own checksum tells: the array never keeps a byte that the slave did not hold."""
    target = np.full(NUMEL, np.nan, np.float32)
    stats = pull_pieces(grant(lane), identity(), [Piece(0, 0, 0, NUMEL, target)])
    assert np.array_equal(target, lane.theta)
    assert (stats.nbytes, stats.connections) == (4 * NUMEL, 1)
    assert lane.wanted == {chunk: 1 + (chunk in lane._corrupted) for chunk in CHUNKS}


@pytest.mark.parametrize("lane", [set()], indirect=True)
@pytest.mark.parametrize(
    "interrupt",
    [(Kind.DONE, b"no such message"), (Kind.ERROR, encode_error("unknown", "not open here yet"))],
    ids=["bad", "error"],
)
def test_what_was_in_flight_is_asked_again_on_the_next_connection(
    lane: ScriptedLane, interrupt: tuple[Kind, bytes]
) -> None:
    """Whatever ended the one before; otherwise the next would stand still until it stalls."""
    lane.interrupts.append(interrupt)
    target = np.full(NUMEL, np.nan, np.float32)
    assert pull_pieces(grant(lane), identity(), [Piece(0, 0, 0, NUMEL, target)]).connections == 2
    assert np.array_equal(target, lane.theta)


@pytest.mark.parametrize("lane", [set()], indirect=True)
@pytest.mark.usefixtures("stage_threads")
def test_a_push_sends_every_chunk_that_is_asked_for(lane: ScriptedLane) -> None:
    """Header and body belong together, whatever thread made them."""
    values = np.arange(NUMEL, dtype=np.float32)
    stats = push_pieces(grant(lane), identity(), [Piece(0, 0, 0, NUMEL, values)])
    assert np.array_equal(lane.received, values)
    assert (stats.nbytes, stats.connections) == (4 * NUMEL, 1)


@pytest.mark.parametrize("lane", [set()], indirect=True)
def test_the_stage_works_where_the_test_says(lane: ScriptedLane, stage_threads: int) -> None:
    """The other tests of this file run both ways on any machine, not twice in one way."""
    threads: set[str] = set()

    def encode(chunk: Range, view: memoryview) -> bytes:
        threads.add(threading.current_thread().name)
        return bytes(view)

    push_pieces(grant(lane), identity(), [Piece(0, 0, 0, NUMEL, np.zeros(NUMEL, np.float32))], encode=encode)
    assert threads == {"push-0-0" if stage_threads else threading.current_thread().name}


@pytest.mark.parametrize("lane", [set()], indirect=True)
@pytest.mark.usefixtures("stage_threads")
def test_an_error_of_the_stage_is_raised_to_the_caller(lane: ScriptedLane) -> None:
    """At once, not at the deadline, and no thread is left behind."""

    def encode(chunk: Range, view: memoryview) -> bytes:
        raise MemoryError(f"of {chunk}")

    began = time.monotonic()
    with pytest.raises(MemoryError, match="of Range"):
        push_pieces(grant(lane), identity(), [Piece(0, 0, 0, NUMEL, np.zeros(NUMEL, np.float32))], encode=encode)
    assert time.monotonic() - began < 5
    assert not [t.name for t in threading.enumerate() if t.name.startswith("push-")]


@pytest.mark.parametrize("lane", [set()], indirect=True)
@pytest.mark.parametrize("kind", ["pull", "push"])
def test_the_last_word_of_a_pull_is_sent(lane: ScriptedLane, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream's DONE may still be with libzmq when it is closed: a pull waits for it, a push has none to send."""
    closed: list[int] = []
    close = Stream.close
    monkeypatch.setattr(
        Stream, "close", lambda self, linger_ms=0: (closed.append(linger_ms), close(self, linger_ms))[1]
    )
    move = pull_pieces if kind == "pull" else push_pieces
    move(grant(lane), identity(), [Piece(0, 0, 0, NUMEL, np.zeros(NUMEL, np.float32))])
    assert closed[0] == (FLUSH_MS if kind == "pull" else 0)


def test_more_is_read_at_once_only_behind_a_full_batch() -> None:
    """Less: all was read that had come, and the loop waits in its poll instead of running round and round."""

    class Frames(TransferLoop):
        kind = "pull"

        def __init__(self, frames: int) -> None:
            self.left = frames

        def read_frames(self, now: float, most: int) -> Iterator[int]:
            for _ in range(min(most, self.left)):
                self.left -= 1
                yield self.left

        def _on_frame(self, part: object, frame: object, now: float) -> None:
            pass

        def process_chunk(self, staged: object) -> int:
            raise AssertionError("no chunk")

        def on_processed(self, staged: object, value: int) -> None:
            raise AssertionError("no chunk")

        def _moved_bytes(self) -> int:
            return 0

    loop = Frames(BATCH + 1)
    part: Any = SimpleNamespace(stream=loop, done=False)
    assert loop._read_frames(part, 0.0)
    assert not loop._read_frames(part, 0.0)
