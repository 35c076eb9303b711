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

from dips.client.rank import transfer
from dips.client.rank.fragments import FragmentGate
from dips.client.rank.transfer import (
    BATCH,
    FLUSH_MS,
    SLOW_S,
    LanePart,
    Piece,
    PullTransfer,
    PushTransfer,
    StagedChunk,
    TransferIdentity,
    TransferLoop,
    TransferRate,
    pull_pieces,
    push_pieces,
)
from dips.errors import LocalProtocolError, RemoteProtocolError, UnavailableSlave
from dips.ids import VersionId
from dips.protocol.effects import Grant, SlaveAddress
from dips.transport.intake import FLOOR_BYTES, Intake, Transit
from dips.transport.memory import keep_message_memory
from dips.transport.seal import new_keys
from dips.transport.stream import Stream
from dips.wire.chunks import Share
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
THETA = np.random.default_rng(1).standard_normal(NUMEL).astype(np.float32)
CHUNKS = [Range(0, 0, at, min(ITEMS, NUMEL - at)) for at in range(0, NUMEL, ITEMS)]


class ScriptedLane:
    """A slave's lane that holds one parameter: it serves pulls, and asks for all of a push."""

    def __init__(self, theta: np.ndarray, corrupted: set[int]) -> None:
        """`corrupted`: the chunks, by number, that are sent once with a flipped bit under the right checksum."""
        self.theta, self.received = theta, np.full(theta.size, np.nan, np.float32)
        self.wanted: Counter[Range] = Counter()
        self._corrupted = {CHUNKS[number] for number in corrupted}
        self.interrupts = list[tuple[Kind, bytes]]()  # messages, each of which answers one WANT instead of its chunks
        self.thinks_s, self.done = 0.0, threading.Event()  # before it answers a WANT; whether it heard DONE
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
            case Kind.DONE:
                self.done.set()
            case Kind.WANT if self.interrupts:
                yield say(*self.interrupts.pop())
            case Kind.WANT:
                time.sleep(self.thinks_s)
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
    """A rank has keys of its own, whether or not lanes ask for them."""
    return TransferIdentity(RUN, "c", 1, seq, 0, new_keys())


@pytest.fixture(params=[set(), {0, 2, len(CHUNKS) - 1}], ids=["intact", "corrupted"])
def lane(request: pytest.FixtureRequest) -> Iterator[ScriptedLane]:
    made = ScriptedLane(THETA, request.param)
    yield made
    made.close()


@pytest.mark.usefixtures("stage_threads")
def test_a_corrupted_chunk_of_a_pull_is_refused_and_asked_for_again(lane: ScriptedLane) -> None:
    """Headers pass, so only the body's own checksum tells: the array never keeps a byte that the slave did not hold."""
    target, gate = np.full(NUMEL, np.nan, np.float32), FragmentGate(((0,),), [Piece(0, 0, 0, NUMEL, THETA)])
    stats = pull_pieces(grant(lane), identity(), [Piece(0, 0, 0, NUMEL, target)], gate=gate)
    assert np.array_equal(target, lane.theta) and gate.arrived == 1
    assert (stats.nbytes, stats.connections) == (4 * NUMEL, 1)
    assert lane.wanted == {chunk: 1 + (chunk in lane._corrupted) for chunk in CHUNKS}
    assert lane.done.wait(10), "the slave knows that it need not keep the version any longer"


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
    keep_message_memory.cache_clear()
    values, seen = np.arange(NUMEL, dtype=np.float32), list[TransferRate]()
    stats = push_pieces(grant(lane), identity(), [Piece(0, 0, 0, NUMEL, values)], progress=seen.append)
    assert np.array_equal(lane.received, values)
    assert (stats.nbytes, stats.connections) == (4 * NUMEL, 1)
    assert seen[0].nbytes == 0 and (seen[-1].nbytes, seen[-1].total) == (4 * NUMEL, 4 * NUMEL)
    assert seen[-1].bytes_per_s > 0 and keep_message_memory.cache_info().currsize


@pytest.mark.parametrize("lane", [{0}], indirect=True)
@pytest.mark.usefixtures("stage_threads")
def test_a_transfer_sleeps_until_there_is_something_to_do(lane: ScriptedLane, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes no core from training while a slave thinks, and is woken by a frame and by its own threads alike."""
    monkeypatch.setattr(transfer, "POLL_MS", 60_000)
    lane.thinks_s, passes, began = 0.05, [0], time.monotonic()

    def clock() -> float:
        passes[0] += 1
        return time.monotonic()

    pull_pieces(grant(lane), identity(), [Piece(0, 0, 0, NUMEL, np.zeros(NUMEL, np.float32))], clock=clock)
    assert passes[0] < 100 and time.monotonic() - began < 20


@pytest.mark.parametrize("lane", [set()], indirect=True)
def test_the_deadline_is_the_grants(lane: ScriptedLane) -> None:
    """From the last byte on; at its very moment nothing more is waited for."""
    times = iter([0.0, 10.0, 99.0])
    with pytest.raises(UnavailableSlave, match=r"push c/1 1 of rank 0 passed its deadline: slave s0 at .* is not conn"):
        push_pieces(grant(lane), identity(), [Piece(0, 0, 0, NUMEL, THETA)], clock=lambda: next(times))
    assert next(times) == 99.0


@pytest.mark.parametrize("lane", [set()], indirect=True)
@pytest.mark.parametrize("depth", [len(CHUNKS), len(CHUNKS) - 1])
def test_a_slave_may_ask_for_so_many_chunks_at_once(
    lane: ScriptedLane, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And for no more, whatever it is. Only what is sealed, a copy, takes of the memory in transit."""
    monkeypatch.setattr(transfer, "DEPTH", depth)
    monkeypatch.setattr(transfer, "pool_cost", lambda nbytes: 1 << 40)
    pieces = [Piece(0, 0, 0, NUMEL, THETA)]
    if depth == len(CHUNKS):
        assert push_pieces(grant(lane), identity(), pieces).nbytes == 4 * NUMEL
    else:
        with pytest.raises(RemoteProtocolError, match=f"slaves ask for more than {depth} chunks"):
            push_pieces(grant(lane), identity(), pieces)


def test_a_piece_that_is_not_its_range_is_refused() -> None:
    """Before anything travels: its bytes would be another parameter's."""
    nowhere = Grant(V, (SlaveAddress("s0", 1, ("127.0.0.1:9",), (0,)),), 10.0)
    for move in (pull_pieces, push_pieces):
        with pytest.raises(LocalProtocolError, match="expected 9 contiguous float32"):
            move(nowhere, identity(), [Piece(0, 0, 0, 9, np.zeros(8, np.float32))])


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
def test_an_error_of_the_stage_is_raised_to_the_caller(lane: ScriptedLane, monkeypatch: pytest.MonkeyPatch) -> None:
    """At once, not at the deadline, and no thread is left behind."""
    monkeypatch.setattr(transfer, "POLL_MS", 60_000)

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


def part_of(kind: str, **state: Any) -> LanePart:
    """A lane's part of a transfer, whose stream has no socket and keeps what it is given in `sent`."""
    sent = list[Any]()
    stream = SimpleNamespace(
        waits=False, welcomed=True, id=1, sent=sent,
        send_message=lambda kind, body: sent.append(kind), post_frame=lambda *parts: sent.append(parts),
        flush_outbox=lambda: sent.append("flushed"),
    )  # fmt: skip
    unused: Any = None
    made: Any = LanePart(unused, Share([]), 4 * NUMEL, stream, (1,))  # type: ignore[arg-type]
    if kind == "pull":
        made.intake = Intake(CHUNKS, CHUNK_BYTES, Transit(FLOOR_BYTES), 0.0)
    for name, value in state.items():
        setattr(made if hasattr(made, name) else stream, name, value)
    return made


def loop_of(kind: type[TransferLoop], *parts: LanePart) -> Any:
    loop: Any = object.__new__(kind)
    loop._parts, loop._gate, loop._total = parts, FragmentGate(((0,),), ()), 1 << 30
    return loop


def test_a_push_has_sockets_for_a_hundred_slaves() -> None:
    """With four lanes each; beyond 85 every push ended its job: `Too many open files`, whatever the limit of files."""
    slaves = tuple(SlaveAddress(f"s{n}", 1, ("127.0.0.1:9",) * 4, (n,)) for n in range(100))
    loop = PushTransfer(Grant(V, slaves, 10.0), identity(), [], 30.0, time.monotonic)
    assert loop._context.get(zmq.MAX_SOCKETS) >= 3 * len(loop._parts) == 1200
    loop._context.term()
    loop._waker.close()


def test_a_rank_pulls_from_few_slaves_at_once() -> None:
    """In the grant's order: the next is asked when one is done or slow. Who is not connected, or has nothing more to
    give, is no slave that one waits for.
    """
    idle = Intake([], CHUNK_BYTES, Transit(FLOOR_BYTES), 0.0)
    parts = [part_of("pull", intake=idle), part_of("pull", welcomed=False), *(part_of("pull") for _ in range(6))]
    loop = loop_of(PullTransfer, part_of("pull", intake=None), *parts)

    def asked(now: float) -> list[int]:
        loop.after_frames(now)
        assert [part.stream.waits for part in parts] == [bool(part.stream.sent) for part in parts]
        return [number for number, part in enumerate(parts) if part.stream.sent]

    assert asked(0.0) == [2, 3] == asked(SLOW_S)
    assert asked(1.5 * SLOW_S) == [2, 3, 4, 5]
    parts[4].done = True
    assert asked(1.5 * SLOW_S) == [2, 3, 4, 5, 6]


def test_a_stream_that_has_no_room_counts_as_one_that_is_asked() -> None:
    """What is in transit is bounded over all: the next slave would take what the first one needs."""
    pool, third = Transit(FLOOR_BYTES), part_of("pull")
    assert pool.take_bytes(FLOOR_BYTES)
    full = [part_of("pull", intake=Intake(CHUNKS, CHUNK_BYTES, pool, 0.0)) for _ in range(2)]
    loop_of(PullTransfer, *full, third).after_frames(9.0)
    assert not any(part.stream.waits for part in (*full, third))


@pytest.mark.parametrize(
    ("states", "owed"),
    [
        ([{}], False),
        ([{"waits": True}], True),
        ([{"welcomed": False}], True),
        ([{"waits": True, "done": True}], False),
        ([{}, {"welcomed": False}], True),
    ],
)
def test_a_slave_that_owes_nothing_is_not_late(states: list[dict[str, bool]], owed: bool) -> None:
    """A push waits for as long as no slave asks; one that is not connected, or sends nothing, uses up the deadline."""
    assert loop_of(PullTransfer, *(part_of("push", **state) for state in states))._is_owed() is owed


def test_a_chunk_leaves_by_the_connection_that_asked_for_it() -> None:
    """At once; what a former connection asked for, or a slave that has all by now, is dropped."""
    for state, sent in (({}, [(b"head", b"body"), "flushed"]), ({"id": 2}, []), ({"done": True}, [])):
        part = part_of("push", **state)
        guard: Any = SimpleNamespace(tag_bytes=0)
        staged = StagedChunk(part, CHUNKS[0], memoryview(b""), 1, guard, parts=(b"head", b"body"))
        loop = loop_of(PushTransfer, part)
        loop.on_processed(staged, True)
        assert part.stream.sent == sent and part.posted == 4 * bool(sent)  # type: ignore[attr-defined]
        part.posted = 5 * NUMEL
        assert loop._moved_bytes() == 4 * NUMEL, "sent again after a connection broke, it counts once"
