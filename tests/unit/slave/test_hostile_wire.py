"""Whatever the wire does to a push, what is staged is what was sent, bit for bit, and memory stays within the pool.

Hypothesis plays the wire: it reorders, loses, repeats and corrupts frames, makes up others, breaks connections. Pure:
the receiver without its sockets, frames spelled and read as on the wire.
"""

from __future__ import annotations

import numpy as np
import pytest
import xxhash
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dips.codecs import Codec
from dips.ids import PushId
from dips.protocol.manifest import Layer, Manifest, Parameter
from dips.slave.ports import FrameRefused, Move, PushOver, Say, Staged
from dips.slave.receiver import Receiver
from dips.transport.intake import Transit
from dips.wire.chunks import LayerLayout, encode_body
from dips.wire.frame import (
    REASONS,
    BadFrame,
    Header,
    Kind,
    Range,
    StreamName,
    check_body,
    decode_hello,
    decode_want,
    encode_hello,
    pack_header,
    run_id,
    unpack_header,
)

PUSH = PushId("fast", 1, 1)
RUN = run_id("demo")
CHUNK = 4096
LIMIT = 5 * CHUNK  # of the transit pool: less than both ranks could have in flight
N = 9000  # elements: chunks of both ranks end within a page
MANIFEST = Manifest((Layer("a", (Parameter("a.w", (N,)), Parameter("a.b", (3,)))),))
PIECES = (
    (Range(0, 0, 0, 5000), Range(0, 1, 0, 3)),
    (Range(0, 0, 5000, N - 5000),),
)
VALUES = np.random.default_rng(7).standard_normal(N + 3).astype(np.float32)
Frame = tuple[bytes, bytes]


class HostileWorld:
    """A slave's receiver, two honest ranks, and the frames between them, which the wire may do anything to."""

    def __init__(self, codec: Codec = Codec.FP32) -> None:
        self.codec = codec
        self.pool = Transit(LIMIT)
        self.receiver = Receiver(1, CHUNK, self.pool, concurrent_streams=2, stall_s=1e9)
        self.layout = LayerLayout(MANIFEST, (0,))
        self.receiver.set_layers(self.layout)
        self.buffer = np.full(N + 3, 0 if self.codec.lossy else np.nan, np.float32)
        self.receiver.open_push(PUSH, (0, 1), {0: self.buffer}, 1e9, 0.0, self.codec)
        self.epochs = [0, 0]
        self.up: list[tuple[bytes, Frame]] = []  # from a rank's connection to the slave
        self.news: list[Move] = []
        self.refused: list[str] = []
        self.now = 0.0

    def name(self, rank: int) -> StreamName:
        return StreamName("demo", "push", "fast", 1, 1, rank, "s0", 1, self.epochs[rank], "")

    def peer(self, rank: int) -> bytes:
        """ROUTER's own name of a rank's present connection."""
        return b"%d.%d" % (rank, self.epochs[rank])

    def connect(self, rank: int) -> None:
        """The rank makes a new connection; frames of the old one may still arrive."""
        self.epochs[rank] += 1
        body = encode_hello(self.name(rank), PIECES[rank])
        self.up.append((self.peer(rank), self.frame(Kind.HELLO, self.name(rank).stream_id, body)))

    def frame(self, kind: Kind, stream: int, body: bytes, chunk: Range = Range(0, 0, 0, 0)) -> Frame:
        dtype = self.codec.dtype if kind is Kind.CHUNK else Codec.FP32.dtype
        header = Header(kind, RUN, stream, len(body), xxhash.xxh3_64_intdigest(body), *chunk[:3], dtype)
        return pack_header(header), body

    def deliver(self, index: int) -> None:
        """The slave takes one frame, as the data flow does."""
        if self.up:
            self.take(*self.up.pop(index % len(self.up)))

    def take(self, peer: bytes, frame: Frame) -> None:
        try:
            header = unpack_header(frame[0], RUN, len(frame[1]), CHUNK)
            if header.kind is Kind.CHUNK:
                self.do(
                    self.receiver.stage_chunk(
                        self.receiver.claim_chunk(0, peer, header, memoryview(frame[1]), self.now)
                    )
                )
                return
            check_body(header, frame[1])
            if header.kind is not Kind.HELLO:
                raise BadFrame("kind", "a receiver takes HELLO and CHUNK")
            name, pieces, _ = decode_hello(frame[1])
            if name.stream_id != header.stream:
                raise BadFrame("message", "another stream's number")
            self.do(self.receiver.on_hello(0, peer, name, pieces, self.now))
        except BadFrame as bad:
            self.refused.append(bad.reason)

    def ask(self) -> None:
        """The slave's turn: the ranks that are asked send at once; a WANT to an old connection is lost."""
        self.now += 0.001
        self.do(self.receiver.plan_wants(0, self.now))

    def do(self, moves: list[Move]) -> None:
        for move in moves:
            self.news.append(move)
            if isinstance(move, Say) and move.kind is Kind.WANT:
                for rank in (0, 1):
                    if move.peer == self.peer(rank):
                        self.up += [(move.peer, self.chunk(rank, c)) for c in decode_want(move.body)]
        assert 0 <= self.pool.used_bytes <= LIMIT

    def chunk(self, rank: int, chunk: Range) -> Frame:
        begin, end = self.layout.place_range(chunk)
        return self.frame(
            Kind.CHUNK, self.name(rank).stream_id, bytes(encode_body(self.codec, VALUES[begin:end])), chunk
        )

    @property
    def over(self) -> bool:
        return any(isinstance(move, Staged | PushOver) for move in self.news)


def corrupt(frame: Frame, at: int) -> Frame:
    """Change one bit, of the header or of the body."""
    both = bytearray(frame[0] + frame[1])
    both[at % len(both)] ^= 1 << at % 8
    return bytes(both[:64]), bytes(both[64:])


deeds = st.one_of(
    st.tuples(
        st.sampled_from(["deliver", "deliver", "deliver", "lose", "repeat", "corrupt", "late", "cut"]), st.integers(0)
    ),
    st.tuples(st.sampled_from(["ask", "break"]), st.integers(0, 1)),
    st.tuples(st.just("noise"), st.binary(max_size=200)),
    st.tuples(st.just("claim"), st.tuples(st.integers(0, 2**63), st.integers(0, 2**32 - 1), st.integers(0, 2**62))),
)


def play(world: HostileWorld, deed: str, what) -> None:
    """One thing that the wire, a stranger or a rank does."""
    if deed == "deliver":
        world.deliver(what)
    elif deed == "ask":
        world.ask()
    elif deed == "break":
        world.connect(what)
    elif deed == "noise":
        world.take(world.peer(0), (what[:64], what[64:]))
    elif deed == "claim":  # a header that is right in itself and claims what it likes, 4 GiB too
        stream, length, offset = what
        header = Header(Kind.CHUNK, RUN, world.name(0).stream_id if stream % 2 else stream, length, 0, 0, 0, offset)
        world.take(world.peer(0), (pack_header(header), b"\0" * (length % 64)))
    elif world.up:
        peer, frame = world.up[what % len(world.up)]
        if deed == "lose":
            world.up.remove((peer, frame))
        elif deed == "repeat":
            world.up.append((peer, frame))
        elif deed == "corrupt":
            world.take(peer, corrupt(frame, what))
        elif deed == "cut":  # right in itself, at a place that was asked, but shorter
            header = unpack_header(frame[0], RUN, len(frame[1]), CHUNK)
            chunk = Range(header.layer, header.param, header.offset, 1)
            world.take(peer, world.frame(header.kind, header.stream, frame[1][:4], chunk))
        else:  # a frame of this connection arrives by another
            world.take(b"elsewhere", frame)


@settings(max_examples=50, deadline=None)
@given(st.lists(deeds, min_size=40, max_size=120))
def test_what_is_staged_is_what_was_sent(story):
    """After any story the push is finished by honest ranks that connect again, or it is refused; nothing else.

    Guards: invariants 5 (old epochs change nothing), 8 and 11 (bounded memory, nothing written after the freeze).
    """
    world = HostileWorld()
    world.connect(0)
    world.connect(1)
    for deed, what in story:
        play(world, deed, what)
    world.ask()
    for _ in range(50):
        if world.over:
            break
        for rank in (0, 1):  # what was lost is asked again on a new connection
            world.connect(rank)
        for _ in range(40):
            while world.up:
                world.deliver(0)
            world.ask()
    assert world.over
    staged = [move for move in world.news if isinstance(move, Staged)]
    assert staged == [Staged(PUSH, 4 * (N + 3))]
    frozen = world.buffer.copy()
    assert np.array_equal(frozen, VALUES)
    for deed, what in story:  # and all of it again after the freeze
        play(world, deed, what)
    assert np.array_equal(world.buffer, frozen)
    assert world.pool.used_bytes == 0
    assert set(world.refused) <= set(REASONS) - {"failed"}


@settings(max_examples=100, deadline=None)
@example(Codec.FP8, 2, 4, b"\x00\x00\x00\x7f")  # beyond the steps: the code of a NaN
@given(
    st.sampled_from([codec for codec in Codec if codec.block]),
    st.integers(0, 30),
    st.integers(0, 15),
    st.binary(min_size=4, max_size=4),
)
def test_no_step_brings_what_is_not_finite(codec, number, block, step):
    """One rank writes any four bytes over a block's step, or over codes, under a right checksum: the push is over at
    once, or what is staged is finite [invariant 8]; all memory is given back, and the rest changes nothing.
    """
    world = HostileWorld(codec)
    world.connect(0)
    world.connect(1)
    for turn in range(40):
        world.ask()
        if turn == number and world.up:
            peer, (head, body) = world.up.pop()
            header, at = unpack_header(head, RUN, len(body), CHUNK), 4 * block
            chunk = Range(header.layer, header.param, header.offset, 0)
            if header.kind is Kind.CHUNK and at + 4 < len(body):
                body = body[:at] + step + body[at + 4 :]
            world.up.append((peer, world.frame(header.kind, header.stream, body, chunk)))
        world.deliver(0)
    assert world.over and np.isfinite(world.buffer).all() and world.pool.used_bytes == 0
    told = [move for move in world.news if isinstance(move, FrameRefused | PushOver)]
    assert not told or [type(move) for move in told] == [FrameRefused, PushOver]
    assert set(world.refused) <= ({"stream"} if told else set())


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=300), st.integers(0, 1 << 40))
def test_arbitrary_bytes_are_refused_by_name(noise, claimed):
    """No bytes at all make anything but a BadFrame with a known reason, whatever length a body is said to have."""
    world = HostileWorld()
    world.take(b"x", (noise[:64], noise[64:]))
    assert len(world.refused) == 1
    assert world.refused[0] in REASONS
    with pytest.raises(BadFrame) as refused:
        unpack_header(noise[:64], RUN, claimed, CHUNK)
    assert refused.value.reason in REASONS
    assert world.pool.used_bytes == 0
    assert np.isnan(world.buffer).all()
