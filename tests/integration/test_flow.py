"""The data flow over loopback: a real ZmqFlow and real ranks in threads; what is staged and pulled is bit for bit.

Failures are placed by bytes (a proxy that cuts, a peer that speaks the frames itself), never by sleeping.
"""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import xxhash
import zmq

from dips.client.rank.fragments import FragmentGate
from dips.client.rank.transfer import (
    Piece,
    PullTransfer,
    TransferCancelled,
    TransferIdentity,
    TransferRate,
    TransferStats,
    pull_pieces,
    push_pieces,
)
from dips.codecs import Codec, Dtype
from dips.errors import (
    ConfigError,
    DipsError,
    LocalProtocolError,
    StaleIncarnation,
    StalePush,
    StaleVersion,
    UnavailableSlave,
)
from dips.ids import PullId, PushId, VersionId
from dips.protocol.effects import Grant, SlaveAddress
from dips.protocol.manifest import Layer, Manifest, Parameter
from dips.slave.flow import ZmqFlow
from dips.slave.ports import FlowEvent, PushOver, Released, SourceMoved, Staged
from dips.slave.sender import ChunkSend, OutStream
from dips.wire.chunks import LayerLayout, encode_body, put_body, split_chunks
from dips.wire.frame import (
    Header,
    Kind,
    Range,
    StreamName,
    decode_done,
    decode_error,
    decode_want,
    decode_welcome,
    encode_done,
    encode_hello,
    encode_ranges,
    encode_want,
    make_message,
    pack_header,
    run_id,
    unpack_header,
)
from tests.codec_bounds import error_bound
from tests.waiting import until

RUN = "demo"
CHUNK_BYTES = 1 << 16
SINC = 3
V = VersionId(4, 5)
MANIFEST = Manifest(
    (
        Layer("embed", (Parameter("embed.weight", (300, 700)),)),
        Layer("layers.0", (Parameter("layers.0.w", (1000, 513)), Parameter("layers.0.norm", (7,)))),
        Layer("head", (Parameter("head.weight", (64, 64)), Parameter("head.bias", (1,)))),
    )
)
LAYERS = (0, 1, 2)
LOSSY = [codec for codec in Codec if codec.lossy]
Model = dict[int, np.ndarray]


class FlowRecorder:
    """Collects what the flow reports, and waits for it."""

    def __init__(self) -> None:
        self.all: list[tuple[str, object, object]] = []
        self._new = threading.Condition()

    def _add(self, kind: str, who: object, what: object) -> None:
        with self._new:
            self.all.append((kind, who, what))
            self._new.notify_all()

    def on_event(self, event: FlowEvent) -> None:
        match event:
            case Staged(push, nbytes):
                self._add("staged", push, nbytes)
            case PushOver(push, reason):
                self._add("refused", push, reason)
            case Released(pull, reason):
                self._add("released", pull, reason)
            case SourceMoved(pull):
                self._add("moved", pull, True)

    def of(self, kind: str, who: object) -> list[object]:
        return [what for k, w, what in self.all if (k, w) == (kind, who)]

    def wait(self, kind: str, who: object) -> object:
        with self._new:
            assert self._new.wait_for(lambda: self.of(kind, who), 20), f"no {kind} of {who}: {self.all}"
            return self.of(kind, who)[0]


class FlowUnderTest:
    """One slave: its flow, its events, its buffers."""

    def __init__(self, lanes: int = 1, stall_s: float = 10.0, transit_bytes: int = 64 << 20) -> None:
        self.flow = ZmqFlow(RUN, "s0", ("127.0.0.1:0",) * lanes, CHUNK_BYTES, transit_bytes, 2, stall_s)
        self.heard = FlowRecorder()
        self.flow.set_layers(MANIFEST, LAYERS)
        self.flow.start(SINC, self.heard.on_event)

    def address(self, lanes: Sequence[str] | None = None, sinc: int = SINC) -> SlaveAddress:
        return SlaveAddress("s0", sinc, tuple(lanes or self.flow.lane_addresses()), LAYERS)

    def grant(
        self, ranks: int, lanes: Sequence[str] | None = None, deadline_s: float = 30.0, codec: Codec = Codec.FP32
    ) -> Grant:
        base = V if codec.lossy else None
        return Grant(V, (self.address(lanes),), deadline_s, codec, base)

    def open_push(
        self,
        push_id: PushId,
        ranks: int = 1,
        deadline_s: float = 30.0,
        codec: Codec = Codec.FP32,
        theta: Model | None = None,
    ) -> Model:
        """Open it; under a lossy codec the slot begins as `theta`."""
        buffers = blank() if theta is None else {i: theta[i].copy() for i in LAYERS}
        self.flow.open_push(push_id, tuple(range(ranks)), buffers, deadline_s, codec)
        return buffers


@contextmanager
def running_flow(failed: int = 0, **options) -> Iterator[FlowUnderTest]:
    """A slave that is gone, with its threads, when the test is over; nothing stays in transit, and so many exceptions
    were met that nobody foresaw.
    """
    made = FlowUnderTest(**options)
    try:
        yield made
    finally:
        made.flow.close()
        assert made.flow.transit_bytes[0] == 0
        assert made.flow.refused_frames["failed"] == failed


def blank() -> Model:
    return {i: np.full(MANIFEST.layers[i].numel, np.nan, np.float32) for i in LAYERS}


def model(seed: int) -> Model:
    return {i: drawn.copy() for i, drawn in _draw(seed).items()}


@cache
def _draw(seed: int) -> Model:
    rng = np.random.default_rng(seed)
    return {i: rng.standard_normal(MANIFEST.layers[i].numel).astype(np.float32) for i in LAYERS}


def shares(values: Model, ranks: int) -> list[list[Piece]]:
    """Cut every parameter unevenly: rank r has r + 1 parts of it, so small ones fall to some ranks only."""
    hands: list[list[Piece]] = [[] for _ in range(ranks)]
    whole = ranks * (ranks + 1) // 2
    for i in LAYERS:
        layer = MANIFEST.layers[i]
        for k, (parameter, start) in enumerate(zip(layer.parameters, layer.param_offsets(), strict=True)):
            for r in range(ranks):
                a, b = (parameter.numel * (n * (n + 1) // 2) // whole for n in (r, r + 1))
                if b > a:
                    hands[r].append(Piece(i, k, a, b - a, values[i][start + a : start + b]))
    return hands


def base(seq: int, rank: int = 0, cluster: str = "fast") -> TransferIdentity:
    return TransferIdentity(RUN, cluster, 1, seq, rank)


def same(a: Model, b: Model) -> bool:
    return all(np.array_equal(a[i].view(np.uint32), b[i].view(np.uint32)) for i in LAYERS)


def together(*calls) -> list[object]:
    """Run every rank in a thread of its own; the first error is raised."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result(60) for future in [pool.submit(call) for call in calls]]


@contextmanager
def background(call) -> Iterator[Future]:
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(call)


class Proxy:
    """TCP to `target`; the first `cuts` connections are cut after `after` bytes in the given direction."""

    def __init__(self, target: str, after: int, cuts: int = 1, upward: bool = True) -> None:
        host, port = target.rsplit(":", 1)
        self._target = (host, int(port))
        self._after, self._cuts, self._upward = after, cuts, upward
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._server.getsockname()[1]}"
        self.connections = 0
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._server.accept()
            except OSError:
                return  # closed
            self.connections += 1
            far = socket.create_connection(self._target)
            self._sockets += [near, far]
            limit = self._after if self.connections <= self._cuts else None
            for a, b, counted in ((near, far, self._upward), (far, near, not self._upward)):
                thread = threading.Thread(target=self._pump, args=(a, b, limit if counted else None))
                self._threads.append(thread)
                thread.start()

    def _pump(self, source: socket.socket, sink: socket.socket, limit: int | None) -> None:
        moved = 0
        try:
            while (piece := source.recv(4096)) and (limit is None or moved < limit):
                sink.sendall(piece)
                moved += len(piece)
        except OSError:
            pass  # the other direction ended first
        for end in (source, sink):
            try:
                end.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # it is over already

    def close(self) -> None:
        self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        for end in self._sockets:
            try:
                end.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # it is over already
        for thread in self._threads:
            thread.join(10)
            assert not thread.is_alive()
        for end in self._sockets:
            end.close()


@contextmanager
def proxy(*args, **options) -> Iterator[Proxy]:
    made = Proxy(*args, **options)
    try:
        yield made
    finally:
        made.close()


class Raw:
    """A peer that speaks frames itself, as honest or as false as the test wants."""

    def __init__(self, address: str, name: StreamName, rcvhwm: int = 1000) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.RCVHWM, rcvhwm)
        self.socket.setsockopt(zmq.RCVTIMEO, 20_000)
        self.socket.connect(f"tcp://{address}")
        self.name = name

    def send_message(self, kind: Kind, body: bytes) -> None:
        self.socket.send_multipart(make_message(kind, run_id(RUN), self.name.stream_id, body))

    def hello(self, pieces: Sequence[Range]) -> None:
        self.send_message(Kind.HELLO, encode_hello(self.name, pieces))

    def chunk(self, chunk: Range, body: bytes, checksum: int | None = None, dtype: Dtype = Codec.FP32.dtype) -> None:
        checksum = xxhash.xxh3_64_intdigest(body) if checksum is None else checksum
        header = Header(Kind.CHUNK, run_id(RUN), self.name.stream_id, len(body), checksum, *chunk[:3], dtype)
        self.socket.send_multipart([pack_header(header), body])

    def read_message(self, kind: Kind) -> bytes:
        header, body = self.socket.recv_multipart()
        assert unpack_header(header, run_id(RUN), len(body), CHUNK_BYTES).kind is kind, decode_error(body)
        return body

    def close(self) -> None:
        self.context.destroy(linger=0)


@contextmanager
def raw(*args, **options) -> Iterator[Raw]:
    made = Raw(*args, **options)
    try:
        yield made
    finally:
        made.close()


@contextmanager
def asking(slave) -> Iterator[tuple[PullId, Raw]]:
    """A rank that may ask for the chunks of an open pull."""
    pull_id = PullId("fast", 1, 1)
    slave.flow.open_pull(pull_id, V, model(1))
    with raw(slave.flow.lane_addresses()[0], name_of("pull", 1)) as peer:
        peer.hello([])
        peer.read_message(Kind.WELCOME)
        yield pull_id, peer


def name_of(kind: str, seq: int, rank: int = 0, epoch: int = 1) -> StreamName:
    return StreamName(RUN, kind, "fast", 1, seq, rank, "s0", SINC, epoch, str(V) if kind == "pull" else "")


WHOLE = [Range(i, k, 0, parameter.numel) for i in LAYERS for k, parameter in enumerate(MANIFEST.layers[i].parameters)]


def body_of(values: Model, chunk: Range) -> bytes:
    start = MANIFEST.layers[chunk.layer].param_offsets()[chunk.param] + chunk.offset
    return values[chunk.layer][start : start + chunk.length].tobytes()


def decoded(codec: Codec, theta: Model, pieces: Sequence[Piece]) -> Model:
    """θ plus the pieces' differences as the codec brings them, chunk by chunk."""
    made = {i: theta[i].copy() for i in LAYERS}
    for piece in pieces:
        start = MANIFEST.layers[piece.layer].param_offsets()[piece.param] + piece.offset
        for chunk in split_chunks(encode_ranges(codec.dtype, [piece.range]), codec.chunk_bytes(CHUNK_BYTES)):
            at = chunk.offset - piece.offset
            elements = piece.array[at : at + chunk.length]
            put_body(codec, encode_body(codec, elements), made[piece.layer][start + at : start + at + chunk.length])
    return made


# ---- pushes -------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("stage_threads")
@pytest.mark.parametrize(("ranks", "lanes"), [(1, 1), (2, 1), (3, 1), (3, 2), (1, 4), (2, 3)])
def test_a_push_is_staged_bit_for_bit(ranks, lanes):
    """Whatever each rank holds, the slave's buffers are the cluster's parameters [invariant 1]."""
    with running_flow(lanes=lanes) as slave:
        values, push_id = model(ranks), PushId("fast", 1, 1)
        buffers = slave.open_push(push_id, ranks)
        grant = slave.grant(ranks)
        hands = shares(values, ranks)
        seen: list[TransferRate] = []

        def rank(r: int) -> TransferStats:
            return push_pieces(grant, base(1, r), hands[r], progress=seen.append if r == 0 else None)

        stats = together(*(lambda r=r: rank(r) for r in range(ranks)))
        assert slave.heard.wait("staged", push_id) == 4 * MANIFEST.numel
        assert same(buffers, values)
        assert sum(s.nbytes for s in stats) == slave.flow.bytes_in == 4 * MANIFEST.numel
        assert [s.connections for s in stats] == [lanes] * ranks
        assert (seen[-1].nbytes, seen[-1].total, seen[-1].remaining_s) == (stats[0].nbytes, stats[0].nbytes, 0)
        assert not slave.flow.refused_frames


@pytest.mark.usefixtures("stage_threads")
@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("codec", LOSSY)
def test_differences_are_added_to_the_base_within_the_bound(codec, ranks):
    """A lossy push is staged as θ of its base plus what the codec makes of the differences; real bytes count."""
    with running_flow(lanes=2) as slave:
        theta, differences, push_id = model(1), model(2), PushId("fast", 1, 1)
        buffers = slave.open_push(push_id, ranks, codec=codec, theta=theta)
        hands, grant = shares(differences, ranks), slave.grant(ranks, codec=codec)
        seen: list[TransferRate] = []
        stats = together(
            *(
                lambda r=r: push_pieces(grant, base(1, r), hands[r], progress=None if r else seen.append)
                for r in range(ranks)
            )
        )
        moved = slave.heard.wait("staged", push_id)
        assert moved == sum(s.nbytes for s in stats) == slave.flow.bytes_in
        assert moved == pytest.approx(codec.element_bytes * MANIFEST.numel, rel=0.01)
        assert (seen[-1].nbytes, seen[-1].total) == (stats[0].nbytes, stats[0].nbytes)
        assert same(buffers, decoded(codec, theta, [piece for hand in hands for piece in hand]))
        for i in LAYERS:
            error = np.abs(buffers[i] - (theta[i] + differences[i]))
            assert (error <= error_bound(codec, differences[i], block=differences[i].size) + 1e-6).all()
        assert not slave.flow.refused_frames


@pytest.mark.parametrize("codec", LOSSY)
def test_a_cut_lossy_push_is_resumed_and_nothing_is_added_twice(codec):
    """Differences are added: each chunk exactly once, whatever connections break between [invariants 1, 5]."""
    with running_flow() as slave, proxy(slave.flow.lane_addresses()[0], 60_000, cuts=3) as cut:
        theta, differences, push_id = model(1), model(2), PushId("fast", 1, 1)
        buffers = slave.open_push(push_id, codec=codec, theta=theta)
        hand = shares(differences, 1)[0]
        stats = push_pieces(slave.grant(1, [cut.address], codec=codec), base(1), hand)
        slave.heard.wait("staged", push_id)
        assert stats.connections == 4
        assert same(buffers, decoded(codec, theta, hand))


def test_a_chunk_of_another_codec_than_the_granted_is_refused():
    """Right place, right checksum, whole elements, wrong spelling: counted, nothing else; the right one counts."""
    with running_flow() as slave, raw(slave.flow.lane_addresses()[0], name_of("push", 1)) as peer:
        theta, differences, push_id = model(1), model(2), PushId("fast", 1, 1)
        buffers = slave.open_push(push_id, codec=Codec.BF16, theta=theta)
        peer.hello(WHOLE)
        peer.read_message(Kind.WELCOME)
        left, refused = MANIFEST.numel, 0
        while left:
            for chunk in decode_want(peer.read_message(Kind.WANT)):
                peer.chunk(chunk, body_of(differences, chunk))
                elements = np.frombuffer(body_of(differences, chunk), np.float32)
                peer.chunk(chunk, bytes(encode_body(Codec.BF16, elements)), dtype=Codec.BF16.dtype)
                left, refused = left - chunk.length, refused + 1
        slave.heard.wait("staged", push_id)
        assert slave.flow.refused_frames["type"] == refused
        assert same(buffers, decoded(Codec.BF16, theta, shares(differences, 1)[0]))


@pytest.mark.parametrize("codec", [codec for codec in LOSSY if codec.block])
def test_a_difference_that_is_not_finite_ends_its_push_at_the_slave(codec):
    """Its block's step is NaN: refused before it is written, told to the rank and to the master, never asked again."""
    with running_flow() as slave:
        theta, differences, push_id = model(1), model(2), PushId("fast", 1, 1)
        buffers = slave.open_push(push_id, codec=codec, theta=theta)
        differences[LAYERS[0]][7] = np.inf
        with pytest.raises(DipsError, match=r"is refused: .*block 0 of a chunk"):
            push_pieces(slave.grant(1, codec=codec), base(1), shares(differences, 1)[0])
        assert "expected finite steps from 0 on, got nan" in slave.heard.wait("refused", push_id)
        assert slave.flow.refused_frames["step"] == 1
        assert all(np.isfinite(layer).all() for layer in buffers.values())


def test_a_rank_that_holds_nothing_is_waited_for_and_told_done():
    """Every rank says HELLO; before that nobody is asked."""
    with running_flow() as slave:
        values, push_id = model(1), PushId("fast", 1, 1)
        buffers = slave.open_push(push_id, 2)
        with background(lambda: push_pieces(slave.grant(2), base(1, 1), shares(values, 1)[0])) as first:
            empty = push_pieces(slave.grant(2), base(1, 0), [])
            assert first.result(20).nbytes == 4 * MANIFEST.numel
        assert empty.nbytes == 0
        slave.heard.wait("staged", push_id)
        assert same(buffers, values)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda p: replace(p, length=p.length - 9, array=p.array[:-9]), "come from no rank"),
        (
            lambda p: replace(p, offset=p.offset - 9, length=p.length + 9, array=np.zeros(p.length + 9, np.float32)),
            "rank 0 and from rank 1",
        ),
    ],
)
def test_ranks_that_do_not_fit_are_refused_by_name(change, says):
    """A gap, an overlap: each rank hears which, and the master does."""
    with running_flow() as slave:
        push_id = PushId("fast", 1, 1)
        slave.open_push(push_id, 2)
        hands = shares(model(1), 2)
        hands[1][1] = change(hands[1][1])

        def rank(r: int) -> str:
            with pytest.raises(LocalProtocolError) as refused:
                push_pieces(slave.grant(2), base(1, r), hands[r])
            return str(refused.value)

        for text in together(lambda: rank(0), lambda: rank(1)):
            assert says in text
            assert "layers.0.w" in text
        assert says in slave.heard.wait("refused", push_id)
        assert not slave.heard.of("staged", push_id)


def test_a_range_beyond_its_parameter_is_refused_to_its_rank_alone():
    """Whoever says such a HELLO hears why; the push stands, and the rank's next HELLO counts."""
    with running_flow() as slave:
        values, push_id = model(1), PushId("fast", 1, 1)
        buffers = slave.open_push(push_id, 2)
        hands = shares(values, 2)
        wrong = [hands[1][0], replace(hands[1][1], offset=hands[1][1].offset + 9), *hands[1][2:]]
        with pytest.raises(LocalProtocolError, match=r"layers\.0\.w.* were named, it has"):
            push_pieces(slave.grant(2), base(1, 1), wrong)
        together(*(lambda r=r: push_pieces(slave.grant(2), base(1, r), hands[r]) for r in range(2)))
        slave.heard.wait("staged", push_id)
        assert not slave.heard.of("refused", push_id)
        assert same(buffers, values)


@pytest.mark.usefixtures("stage_threads")
@pytest.mark.parametrize("after", [0, 40, 100_000, 600_000])
def test_a_cut_push_is_resumed(after):
    """A connection that breaks anywhere costs its frames in flight, not the push."""
    with running_flow() as slave, proxy(slave.flow.lane_addresses()[0], after, cuts=2) as cut:
        values, push_id = model(2), PushId("fast", 1, 1)
        buffers = slave.open_push(push_id)
        stats = push_pieces(slave.grant(1, [cut.address]), base(1), shares(values, 1)[0])
        slave.heard.wait("staged", push_id)
        assert same(buffers, values)
        assert stats.connections == cut.connections == 3
        assert slave.flow.bytes_in == 4 * MANIFEST.numel  # every chunk was staged once


def test_an_answer_that_is_lost_is_asked_again():
    """Cut in the slave's direction, DONE included: the rank says HELLO again and hears what is missing, or DONE."""
    with running_flow() as slave:
        values = model(3)
        for seq, after in enumerate((0, 100, 300, 500), start=1):
            push_id = PushId("fast", 1, seq)
            buffers = slave.open_push(push_id)
            with proxy(slave.flow.lane_addresses()[0], after, upward=False) as cut:
                push_pieces(slave.grant(1, [cut.address]), base(seq), shares(values, 1)[0])
            slave.heard.wait("staged", push_id)
            assert same(buffers, values)
            slave.flow.drop_push(push_id)


def test_duplicates_and_strangers_change_nothing():
    """Unasked, repeated, corrupt, misplaced and late chunks are refused and counted; the buffers are right."""
    with running_flow() as slave, raw(slave.flow.lane_addresses()[0], name_of("push", 1)) as peer:
        values, false, push_id = model(4), model(5), PushId("fast", 1, 1)
        buffers = slave.open_push(push_id)
        early = Range(0, 0, 0, 100)
        peer.chunk(early, body_of(false, early))  # before HELLO
        peer.hello(WHOLE)
        assert decode_welcome(peer.read_message(Kind.WELCOME)).missing == 4 * MANIFEST.numel
        corrupt = True
        left = 4 * MANIFEST.numel
        while left:
            for chunk in decode_want(peer.read_message(Kind.WANT)):
                if corrupt:
                    corrupt = False
                    peer.chunk(chunk, body_of(values, chunk), checksum=1)
                    continue
                peer.chunk(chunk._replace(offset=chunk.offset + 1), body_of(false, chunk))  # nobody asked for that
                peer.chunk(chunk, body_of(values, chunk))
                peer.chunk(chunk, body_of(false, chunk))  # again, with other bytes
                left -= chunk.nbytes
        assert decode_done(peer.read_message(Kind.DONE)) == 4 * MANIFEST.numel
        slave.heard.wait("staged", push_id)
        peer.chunk(early, body_of(false, early))  # after the freeze
        peer.hello(WHOLE)  # of the same epoch
        assert decode_error(peer.read_message(Kind.ERROR)).code == "stale_push"
        assert same(buffers, values)
        refused = slave.flow.refused_frames
        chunks = refused["unasked"] // 2
        assert chunks > 10
        assert {k: refused[k] for k in ("stream", "body_checksum", "hello")} == {
            "stream": 1,
            "body_checksum": 1,
            "hello": 1,
        }
        assert len(slave.heard.of("staged", push_id)) == 1


def test_an_older_epoch_is_refused():
    """After a new HELLO the old connection's frames change nothing [invariant 5]."""
    address_of = lambda slave: slave.flow.lane_addresses()[0]  # noqa: E731
    with running_flow() as slave, ExitStack() as stack:
        values, false, push_id = model(4), model(5), PushId("fast", 1, 1)
        buffers = slave.open_push(push_id)
        old = stack.enter_context(raw(address_of(slave), name_of("push", 1, epoch=1)))
        old.hello(WHOLE)
        old.read_message(Kind.WELCOME)
        wanted = decode_want(old.read_message(Kind.WANT))
        new = stack.enter_context(raw(address_of(slave), name_of("push", 1, epoch=2)))
        new.hello(WHOLE)
        new.read_message(Kind.WELCOME)
        for chunk in wanted:
            old.chunk(chunk, body_of(false, chunk))
        old.hello(WHOLE)
        while True:  # WANTs of the first asking come before the answer
            header, body = old.socket.recv_multipart()
            if unpack_header(header, run_id(RUN), len(body), CHUNK_BYTES).kind is Kind.ERROR:
                break
        assert decode_error(body).code == "stale_push"
        assert slave.flow.refused_frames["stream"] == len(wanted)
        left = 4 * MANIFEST.numel
        while left:
            for chunk in decode_want(new.read_message(Kind.WANT)):
                new.chunk(chunk, body_of(values, chunk))
                left -= chunk.nbytes
        slave.heard.wait("staged", push_id)
        assert same(buffers, values)


def test_garbage_beside_a_push_costs_it_nothing():
    """HTTP, random ZMTP, foreign runs, endless claims: refused by name or by libzmq; the push never notices."""
    with running_flow() as slave, ExitStack() as stack:
        address = slave.flow.lane_addresses()[0]
        host, port = address.rsplit(":", 1)
        for noise in (b"GET / HTTP/1.1\r\n\r\n", bytes(range(256)) * 64, b"\xff" + b"\0" * 8 + b"\x7f"):
            plain = stack.enter_context(socket.create_connection((host, int(port))))
            plain.sendall(noise)
        peer = stack.enter_context(raw(address, name_of("push", 1)))
        rng = np.random.default_rng(0)
        for n in (1, 2, 3, 5):
            peer.socket.send_multipart([rng.bytes(64)] * n)
        foreign = pack_header(Header(Kind.HELLO, run_id("other"), 1, 1, xxhash.xxh3_64_intdigest(b"x")))
        peer.socket.send_multipart([foreign, b"x"])
        peer.send_message(Kind.HELLO, b"\xc1")
        peer.send_message(Kind.WELCOME, b"\0")
        peer.send_message(Kind.WANT, encode_want([Range(0, 0, 0, 1)]))
        peer.send_message(Kind.DONE, b"\xc1")
        peer.send_message(Kind.DONE, encode_done(1))
        values, push_id = model(6), PushId("fast", 1, 1)
        buffers = slave.open_push(push_id)
        push_pieces(slave.grant(1), base(1), shares(values, 1)[0])
        slave.heard.wait("staged", push_id)
        assert same(buffers, values)
        peer.send_message(Kind.HELLO, encode_hello(replace(name_of("push", 9), sinc=SINC), ()))  # refused, not answered
        peer.name = name_of("push", 9)
        peer.hello([])  # its ERROR is the last answer: everything before it was read
        assert decode_error(peer.read_message(Kind.ERROR)).code == "unknown"
        assert dict(slave.flow.refused_frames) == {
            "parts": 3, "magic": 1, "run": 1, "message": 3, "kind": 1, "stream": 1, "hello": 1
        }  # fmt: skip


IDLE, HOSTILE = 120, 80


@pytest.mark.parametrize("lanes", [1, 2])
def test_two_hundred_strangers_cost_a_push_and_a_pull_nothing(lanes):
    """Connections that say nothing, half a greeting, garbage, or 10 GiB by their header: nobody's bytes wait for them.

    Guards: invariant 11, memory within the pool. What libzmq does not refuse by itself is refused and counted.
    """
    with running_flow(lanes=lanes) as slave, ExitStack() as stack:
        ports = [int(address.rsplit(":", 1)[1]) for address in slave.flow.lane_addresses()]
        greeting = b"\xff" + b"\0" * 8 + b"\x7f\x03\x00NULL" + b"\0" * 16 + b"\0" + b"\0" * 31
        ready = b"\x04\x19\x05READY\x0bSocket-Type\0\0\0\x06DEALER"
        ten_gib = b"\x02" + (10 << 30).to_bytes(8, "big")  # a long frame, and the first bytes of what it claims
        says = (b"", greeting[:10], b"GET / HTTP/1.1\r\n\r\n", greeting + ready + ten_gib + b"\0" * 4096)
        for k in range(IDLE + HOSTILE):
            plain = stack.enter_context(socket.create_connection(("127.0.0.1", ports[k % lanes])))
            plain.sendall(says[k % len(says)])
        liar = stack.enter_context(raw(slave.flow.lane_addresses()[0], name_of("push", 1)))
        for claimed in (10 << 30, CHUNK_BYTES + 4):  # a right header for a body that is not there, or too long
            header = Header(Kind.CHUNK, run_id(RUN), liar.name.stream_id, claimed & 0xFFFFFFFF, 0)
            liar.socket.send_multipart([pack_header(header), b"\0" * 64])
        values = model(9)
        for seq in (1, 2, 3):
            buffers = slave.open_push(PushId("fast", 1, seq))
            pushed = push_pieces(slave.grant(1), base(seq), shares(values, 1)[0])
            slave.heard.wait("staged", PushId("fast", 1, seq))
            assert same(buffers, values)
            slave.flow.drop_push(PushId("fast", 1, seq))
            slave.flow.open_pull(PullId("fast", 1, seq), V, values)
            fetched = blank()
            pulled = pull_pieces(slave.grant(1), base(seq), shares(fetched, 1)[0])
            slave.flow.close_pull(PullId("fast", 1, seq))
            slave.heard.wait("released", PullId("fast", 1, seq))
            assert same(fetched, values)
            assert pushed.connections == pulled.connections == lanes  # none was broken and resumed
        liar.hello([])  # of a push that is over: its ERROR is the last answer, everything before it was read
        assert decode_error(liar.read_message(Kind.ERROR)).code == "stale_push"
        assert dict(slave.flow.refused_frames) == {"length": 2, "hello": 1}


def test_two_pushes_at_once_do_not_mix():
    """Two clusters on one lane, each in its own slot."""
    with running_flow(transit_bytes=4 << 20) as slave:
        a, b = model(7), model(8)
        ids = PushId("fast", 1, 1), PushId("slow", 1, 1)
        buffers = [slave.open_push(push_id, 2) for push_id in ids]
        together(
            *(
                lambda values=values, push_id=push_id, r=r: push_pieces(
                    slave.grant(2), base(1, r, push_id.cluster), shares(values, 2)[r]
                )
                for values, push_id in zip((a, b), ids, strict=True)
                for r in (0, 1)
            )
        )
        for push_id in ids:
            slave.heard.wait("staged", push_id)
        assert same(buffers[0], a)
        assert same(buffers[1], b)


def test_a_push_without_one_of_its_ranks_ends():
    """One rank never comes: the push ends after its deadline and says who is missing; the other rank hears it."""
    with running_flow() as slave:
        push_id = PushId("fast", 1, 1)
        slave.open_push(push_id, 2, deadline_s=0.3)
        with pytest.raises(UnavailableSlave, match=r"ranks \[1\] never said HELLO"):
            push_pieces(slave.grant(2), base(1), shares(model(1), 2)[0])
        assert "ranks [1] never said HELLO" in slave.heard.wait("refused", push_id)


def test_a_rank_that_stops_sending_ends_its_push_and_no_other():
    """It was asked and is silent: its push ends after stall_s; a push beside it is staged meanwhile."""
    with running_flow(stall_s=0.5) as slave, raw(slave.flow.lane_addresses()[0], name_of("push", 1)) as peer:
        silent, lively = PushId("fast", 1, 1), PushId("slow", 1, 1)
        slave.open_push(silent)
        values = model(2)
        buffers = slave.open_push(lively)
        peer.hello(WHOLE)
        peer.read_message(Kind.WELCOME)
        peer.read_message(Kind.WANT)
        push_pieces(slave.grant(1), base(1, 0, "slow"), shares(values, 1)[0])
        assert same(buffers, values)
        assert "rank 0 brought 0 of" in slave.heard.wait("refused", silent)
        assert not slave.heard.of("refused", lively)


def test_a_push_that_is_refused_is_told_to_its_ranks():
    """Its other rank does not come: the first one hears why."""
    with running_flow() as slave, raw(slave.flow.lane_addresses()[0], name_of("push", 1)) as peer:
        push_id = PushId("fast", 1, 1)
        slave.open_push(push_id, 2, deadline_s=0.2)
        peer.hello(WHOLE)
        assert "no HELLO for 0.2 s" in slave.heard.wait("refused", push_id)
        while True:
            header, body = peer.socket.recv_multipart()
            if unpack_header(header, run_id(RUN), len(body), CHUNK_BYTES).kind is Kind.ERROR:
                break
        assert decode_error(body).code == "refused"


def test_a_dropped_push_is_not_written_any_more():
    """On return of drop_push its buffers are somebody else's; chunks that come later are refused."""
    with running_flow() as slave, raw(slave.flow.lane_addresses()[0], name_of("push", 1)) as peer:
        push_id = PushId("fast", 1, 1)
        buffers = slave.open_push(push_id)
        peer.hello(WHOLE)
        peer.read_message(Kind.WELCOME)
        wanted = decode_want(peer.read_message(Kind.WANT))
        values = model(1)
        for chunk in wanted:
            peer.chunk(chunk, body_of(values, chunk))
        slave.flow.drop_push(push_id)
        for layer in buffers.values():
            layer[:] = -1.0
        for chunk in wanted:
            peer.chunk(chunk, body_of(values, chunk))
        peer.hello(WHOLE)
        while True:
            header, body = peer.socket.recv_multipart()
            if unpack_header(header, run_id(RUN), len(body), CHUNK_BYTES).kind is Kind.ERROR:
                break
        assert decode_error(body).code == "stale_push"
        assert all((layer == -1.0).all() for layer in buffers.values())
        assert slave.flow.list_transfers() == ()


def test_a_rank_waits_for_a_push_that_is_not_open_yet():
    """Its HELLO came before OpenPush: it backs off and tries again."""
    with running_flow() as slave:
        values, push_id = model(1), PushId("fast", 1, 1)
        with background(lambda: push_pieces(slave.grant(1), base(1), shares(values, 1)[0])) as moving:
            while not slave.flow.refused_frames["hello"]:
                assert not moving.done()
            buffers = slave.open_push(push_id)
            assert moving.result(20).connections > 1
        slave.heard.wait("staged", push_id)
        assert same(buffers, values)


def test_what_ends_a_push_is_named():
    """Deadline, cancel, another incarnation of the slave, a push that is over."""
    with running_flow() as slave:
        pieces = shares(model(1), 1)[0]
        with pytest.raises(UnavailableSlave, match="not open yet: try again"):
            push_pieces(slave.grant(1, deadline_s=0.3), base(1), pieces)
        cancel = threading.Event()
        cancel.set()
        with pytest.raises(TransferCancelled):
            push_pieces(slave.grant(1), base(1), pieces, cancel=cancel)
        lives_on = Grant(V, (slave.address(sinc=SINC - 1),), 30.0)
        with pytest.raises(StaleIncarnation, match="incarnation 3"):
            push_pieces(lives_on, base(1), pieces)
        slave.open_push(PushId("fast", 1, 2))
        slave.flow.drop_push(PushId("fast", 1, 2))
        with pytest.raises(StalePush, match="is over"):
            push_pieces(slave.grant(1), base(2), pieces)


def test_an_unreachable_slave_is_tried_until_the_deadline():
    """Nobody listens there: the error names slave, address and what was seen."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    grant = Grant(V, (SlaveAddress("s0", SINC, (address,), LAYERS),), 0.5)
    with pytest.raises(UnavailableSlave, match=f"slave s0 at {address} is not connected"):
        push_pieces(grant, base(1), shares(model(1), 1)[0])


def test_a_new_incarnation_drops_what_the_last_one_had_open():
    """After a new Register streams of the old incarnation are refused, and its pulls are released."""
    with running_flow() as slave:
        slave.open_push(PushId("fast", 1, 1))
        slave.flow.open_pull(PullId("fast", 1, 1), V, model(1))
        slave.flow.start(SINC + 1, slave.heard.on_event)
        assert "incarnation 4" in slave.heard.wait("released", PullId("fast", 1, 1))
        assert slave.flow.list_transfers() == ()
        with pytest.raises(StaleIncarnation):
            push_pieces(slave.grant(1), base(1), shares(model(1), 1)[0])


def test_a_pull_that_is_opened_while_the_flow_ends_does_not_hold_it(monkeypatch):
    """The shard's thread still carries out what it was given before SIGTERM: its pull was never released."""
    with running_flow() as slave:
        lane = slave.flow._lanes[0]
        stop = lane.stop
        monkeypatch.setattr(lane, "stop", lambda: (slave.flow.open_pull(PullId("fast", 1, 1), V, model(1)), stop()))
        ending = threading.Thread(target=slave.flow.close, daemon=True)
        ending.start()
        ending.join(10.0)
        held = ending.is_alive()
        slave.flow.close_pull(PullId("fast", 1, 1))
        assert not held


def test_a_port_in_use_is_named():
    """Two slaves cannot share a lane's port, and the second says so."""
    with running_flow() as slave, pytest.raises(ConfigError, match=slave.flow.lane_addresses()[0]):
        ZmqFlow(RUN, "s1", slave.flow.lane_addresses(), CHUNK_BYTES, 4 << 20, 2, 1.0)


STALL_S, FRAGMENTS = 0.5, ((1,), (2,), (0,))  # a loaded machine is silent for less


def open_slowly(gate: FragmentGate, pause_s: float = 1.2 * STALL_S) -> None:
    """One fragment after the other, with more than the slave's stall_s in between."""
    while gate.open < gate.count:
        time.sleep(pause_s)
        gate.open_next()


@pytest.mark.parametrize(("lanes", "codec"), [(1, Codec.FP32), (2, Codec.INT8)])
def test_a_push_in_fragments_is_staged_though_its_ranks_are_silent_for_long(lanes, codec):
    """What is not offered is not asked for and not owed: no stall, no second connection, the same bytes."""
    with running_flow(lanes=lanes, stall_s=STALL_S) as slave:
        theta, values, push_id = model(1), model(2), PushId("fast", 1, 1)
        buffers = slave.open_push(push_id, 2, codec=codec, theta=theta if codec.lossy else None)
        hands, grant = shares(values, 2), slave.grant(2, codec=codec)
        gates = [FragmentGate(FRAGMENTS, hand) for hand in hands]
        moves = [lambda r=r: push_pieces(grant, base(1, r), hands[r], gate=gates[r]) for r in range(2)]
        *stats, _, _ = together(*moves, *(lambda g=g: open_slowly(g) for g in gates))
        slave.heard.wait("staged", push_id)
        pieces = [piece for hand in hands for piece in hand]
        assert same(buffers, decoded(codec, theta, pieces) if codec.lossy else values)
        assert [s.connections for s in stats] == [lanes] * 2 and not slave.flow.refused_frames
        assert all(s.seconds > 2 * STALL_S for s in stats)


@pytest.mark.parametrize("after", [3_000, 600_000])
def test_a_cut_push_in_fragments_is_resumed(after):
    """The next HELLO offers what was open by then."""
    with running_flow() as slave, proxy(slave.flow.lane_addresses()[0], after, cuts=2) as cut:
        values, push_id = model(3), PushId("fast", 1, 1)
        buffers, hands = slave.open_push(push_id, 1), shares(values, 1)
        gate, grant = FragmentGate(FRAGMENTS, hands[0]), slave.grant(1, [cut.address])
        stats, _ = together(lambda: push_pieces(grant, base(1), hands[0], gate=gate), lambda: open_slowly(gate, 0.05))
        slave.heard.wait("staged", push_id)
        assert same(buffers, values) and stats.connections == cut.connections > 1


def test_a_pull_in_fragments_counts_what_has_arrived():
    """Each is whole before the next is asked for, on every rank; idle streams neither stall nor hold others up."""
    with running_flow(lanes=2, stall_s=STALL_S) as slave:
        source, target, pull_id = model(9), blank(), PullId("fast", 1, 1)
        slave.flow.open_pull(pull_id, V, source)
        (hand,) = shares(target, 1)
        gate, seen = FragmentGate(FRAGMENTS, hand), []

        def open_and_look() -> None:
            for opened in range(1, gate.count + 1):
                time.sleep(1.2 * STALL_S)
                seen.append((gate.arrived, [bool(np.isfinite(target[i]).all()) for i in LAYERS]))
                if opened < gate.count:
                    gate.open_next()

        stats, _ = together(
            lambda: pull_pieces(slave.grant(1), base(1), hand, stall_s=STALL_S, gate=gate), open_and_look
        )
        assert same(source, target) and stats.connections == 2
        assert seen == [(1, [False, True, False]), (2, [False, True, True]), (3, [True, True, True])]
        slave.flow.close_pull(pull_id)
        slave.heard.wait("released", pull_id)


# ---- pulls --------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("stage_threads")
@pytest.mark.parametrize(("ranks", "lanes"), [(1, 1), (2, 1), (3, 2)])
def test_a_pull_is_bit_for_bit(ranks, lanes):
    """Every rank gets its own shard of the version; the source is released once, after the close."""
    with running_flow(lanes=lanes) as slave:
        source, target, pull_id = model(9), blank(), PullId("fast", 1, 1)
        slave.flow.open_pull(pull_id, V, source)
        hands = shares(target, ranks)
        together(*(lambda r=r: pull_pieces(slave.grant(ranks), base(1, r), hands[r]) for r in range(ranks)))
        assert same(source, target)
        assert not slave.heard.of("released", pull_id)
        slave.flow.close_pull(pull_id)
        slave.flow.close_pull(pull_id)
        assert slave.heard.wait("released", pull_id) == "closed"
        assert slave.flow.bytes_out == 4 * MANIFEST.numel
        with pytest.raises(StalePush, match="is over"):
            pull_pieces(slave.grant(ranks), base(1), hands[0])
        assert slave.heard.of("released", pull_id) == ["closed"]


def test_a_rank_pulls_its_layers_from_several_slaves():
    """Each slave gives what it holds, in the order of the grant."""
    with ExitStack() as stack:
        source, target, pull_id = model(1), blank(), PullId("fast", 1, 1)
        addresses = []
        for index, layers in enumerate(((0, 2), (1,))):
            flow = ZmqFlow(RUN, f"s{index}", ("127.0.0.1:0",), CHUNK_BYTES, 4 << 20, 2, 10.0)
            stack.callback(flow.close)
            flow.set_layers(MANIFEST, layers)
            flow.start(index, FlowRecorder().on_event)
            flow.open_pull(pull_id, V, {i: source[i] for i in layers})
            addresses.append(SlaveAddress(f"s{index}", index, flow.lane_addresses(), layers))
        grant = Grant(V, tuple(addresses), 30.0, first=1)
        pull_pieces(grant, base(1), shares(target, 1)[0])
        assert same(source, target)


def test_a_pull_goes_on_from_another_source_with_the_same_bytes():
    """Its first source may be overwritten once `moved` is said: nothing of it is read any more
    (docs/rationale.md#8, #19)."""
    with running_flow() as slave:
        source, target, pull_id = model(9), blank(), PullId("fast", 1, 1)
        file = {layer: array.copy() for layer, array in source.items()}
        hands = shares(target, 2)
        slave.flow.open_pull(pull_id, V, source)
        pull_pieces(slave.grant(2), base(1, 0), hands[0])
        slave.flow.move_pull(pull_id, file)
        slave.heard.wait("moved", pull_id)
        for array in source.values():
            array.fill(np.nan)
        pull_pieces(slave.grant(2), base(1, 1), hands[1])
        assert same(file, target)
        slave.flow.close_pull(pull_id)
        assert slave.heard.wait("released", pull_id) == "closed"
        assert slave.heard.of("moved", pull_id) == [True]


@pytest.mark.usefixtures("stage_threads")
@pytest.mark.parametrize("after", [0, 30, 5_000, 2_000_000])
def test_a_cut_pull_is_resumed(after):
    """What did not come is asked again on a new connection; what came is kept."""
    with running_flow() as slave, proxy(slave.flow.lane_addresses()[0], after, cuts=2, upward=False) as cut:
        source, target, pull_id = model(9), blank(), PullId("fast", 1, 1)
        slave.flow.open_pull(pull_id, V, source)
        stats = pull_pieces(slave.grant(1, [cut.address]), base(1), shares(target, 1)[0])
        assert same(source, target)
        assert stats.connections == cut.connections
        assert stats.connections > 1
        slave.flow.close_pull(pull_id)
        slave.heard.wait("released", pull_id)


def test_a_rank_that_vanishes_leaves_no_pin():
    """It asked and is gone: close releases the source, though nobody read what was asked."""
    with running_flow() as slave:
        with asking(slave) as (pull_id, peer):
            peer.send_message(Kind.WANT, encode_want([Range(0, 0, 0, 1000)]))
            peer.read_message(Kind.CHUNK)
        slave.flow.close_pull(pull_id)
        assert slave.heard.wait("released", pull_id) == "closed"


def test_a_rank_that_never_reads_is_released_when_its_connection_dies():
    """It asks for more than any kernel buffers and reads nothing: the pull stalls, its connection ends, once."""
    big = Manifest((Layer("big", (Parameter("big.w", (16 << 20,)),)),))
    flow, heard = ZmqFlow(RUN, "s0", ("127.0.0.1:0",), 1 << 20, 4 << 20, 2, 0.5), FlowRecorder()
    try:
        flow.set_layers(big, (0,))
        flow.start(SINC, heard.on_event)
        pull_id = PullId("fast", 1, 1)
        flow.open_pull(pull_id, V, {0: np.zeros(16 << 20, np.float32)})
        with raw(flow.lane_addresses()[0], name_of("pull", 1), rcvhwm=1) as peer:
            peer.hello([])
            assert decode_welcome(peer.read_message(Kind.WELCOME)).chunk_bytes == 1 << 20
            chunks = [Range(0, 0, i << 18, 1 << 18) for i in range(64)]
            peer.send_message(Kind.WANT, encode_want(chunks))
            assert "nothing moved for 0.5 s" in heard.wait("released", pull_id)
        assert len(heard.of("released", pull_id)) == 1
    finally:
        flow.close()


def test_an_event_that_its_receiver_fails_on_ends_no_lane():
    """A bug of ours is counted, and the next pull is served and released."""
    flow, released = ZmqFlow(RUN, "s0", ("127.0.0.1:0",), CHUNK_BYTES, 4 << 20, 2, 10.0), queue.SimpleQueue[PullId]()

    def on_event(event: FlowEvent) -> None:
        assert isinstance(event, Released)
        released.put(event.pull)
        assert event.pull.seq > 1, "a bug"

    try:
        flow.set_layers(MANIFEST, LAYERS)
        flow.start(SINC, on_event)
        for pull in (PullId("fast", 1, 1), PullId("fast", 1, 2)):
            flow.open_pull(pull, V, model(1))
            flow.close_pull(pull)
            assert released.get(timeout=20) == pull
        assert flow.refused_frames["failed"] == 1
    finally:
        flow.close()


@pytest.mark.parametrize("codec", [Codec.FP32, Codec.INT8])
def test_a_chunk_that_no_memory_is_left_for_ends_its_push_and_holds_nothing_up(monkeypatch, codec):
    """Its ranks hear why, and the slot is free: the order to drop it would else wait for a copy that has ended."""
    monkeypatch.setattr(LayerLayout, "place_range", lambda layout, chunk: lack_memory())
    with running_flow(failed=1) as slave, raw(slave.flow.lane_addresses()[0], name_of("push", 1)) as peer:
        slave.open_push(push_id := PushId("fast", 1, 1), codec=codec, theta=model(1))
        peer.hello(WHOLE)
        peer.read_message(Kind.WELCOME)
        chunk = decode_want(peer.read_message(Kind.WANT))[0]
        body = bytes(encode_body(codec, np.ones(chunk.length, np.float32)))
        peer.chunk(chunk, body, dtype=codec.dtype)
        assert "could not be placed: MemoryError" in slave.heard.wait("refused", push_id)
        dropped = threading.Thread(target=slave.flow.drop_push, args=(push_id,), daemon=True)
        dropped.start()
        dropped.join(10)
        assert not dropped.is_alive() and slave.flow.transit_bytes[0] == 0


def test_a_chunk_that_cannot_be_cut_holds_no_version(monkeypatch):
    """The bank of a version that is pulled is free when its pull is closed; else no outer step would ever get it."""
    with running_flow(failed=1) as slave, asking(slave) as (pull_id, peer):
        monkeypatch.setattr(ChunkSend, "make_body", lambda job: lack_memory())
        peer.send_message(Kind.WANT, encode_want([Range(0, 0, 0, 100)]))
        until(lambda: slave.flow.refused_frames["failed"])
        slave.flow.close_pull(pull_id)
        assert slave.heard.wait("released", pull_id) == "closed"


def lack_memory():
    raise MemoryError


def test_chunks_beyond_the_queue_wait(monkeypatch):
    """However few a lane hashes at a time, its ranks get all that they ask for, over their first connections."""
    monkeypatch.setattr("dips.slave.sender.MOST_JOBS", 1)
    monkeypatch.setattr("dips.slave.flow.MOST_JOBS", 1)
    monkeypatch.setattr("dips.slave.flow.spare_threads", lambda cores: 1)
    with running_flow() as slave:
        values, target = model(1), blank()
        slave.flow.open_pull(PullId("fast", 1, 1), V, values)
        with ThreadPoolExecutor(2) as pool:
            pulls = [pool.submit(pull_pieces, slave.grant(2), base(1, r), shares(target, 2)[r]) for r in range(2)]
            assert [pull.result(30).connections for pull in pulls] == [1, 1]
        assert all(np.array_equal(target[layer], values[layer]) for layer in LAYERS)


def test_ranks_in_the_middle_of_a_long_step_find_their_push_and_pull():
    """Both are open for five times `stall_s` before the first HELLO: they move at the first attempt."""
    with running_flow(stall_s=0.2) as slave:
        pushed, pulled, values, target = PushId("fast", 1, 1), PullId("fast", 1, 2), model(1), blank()
        buffers = slave.open_push(pushed)
        slave.flow.open_pull(pulled, V, values)
        time.sleep(5 * 0.2)
        assert push_pieces(slave.grant(1), base(1), shares(values, 1)[0]).connections == 1
        assert pull_pieces(slave.grant(1), base(2), shares(target, 1)[0]).connections == 1
        slave.heard.wait("staged", pushed)
        assert same(buffers, values) and same(target, values)
        assert not slave.heard.of("released", pulled)


def test_one_slow_rank_pulls_from_eight_slaves_at_the_first_attempt():
    """It takes five times `stall_s`, and asks two slaves at a time: those that are not asked wait [invariant 12]."""
    stall_s, slaves, items = 0.4, 8, 48 * (CHUNK_BYTES // 4)
    many = Manifest(tuple(Layer(f"l{i}", (Parameter(f"l{i}.w", (items,)),)) for i in range(slaves)))
    flows, source = list[ZmqFlow](), np.random.default_rng(0).standard_normal((slaves, items)).astype(np.float32)
    try:
        for i in range(slaves):
            flows.append(ZmqFlow(RUN, f"s{i}", ("127.0.0.1:0",), CHUNK_BYTES, 64 << 20, 2, stall_s))
            flows[i].set_layers(many, (i,))
            flows[i].start(SINC, FlowRecorder().on_event)
            flows[i].open_pull(PullId("fast", 1, 1), V, {i: source[i]})
        addresses = tuple(SlaveAddress(f"s{i}", SINC, flows[i].lane_addresses(), (i,)) for i in range(slaves))
        grant, target = Grant(V, addresses, 30.0), np.empty_like(source)
        pieces = [Piece(i, 0, 0, items, target[i]) for i in range(slaves)]
        rank, begun = SlowRank(grant, base(1), pieces, stall_s, time.monotonic), time.monotonic()
        rank.chunk_s = 5 * stall_s / (slaves * 48)
        stats = rank.run(threading.Event(), None)
        assert time.monotonic() - begun >= 5 * stall_s
        assert stats.connections == slaves, "no stream was broken"
        assert np.array_equal(source, target)
        assert not any(flow.refused_frames for flow in flows)
    finally:
        for flow in flows:
            flow.close()


def test_a_pull_does_not_depend_on_when_libzmq_lets_go(monkeypatch):
    """Its books lag behind on a busy machine, while the rank has its chunks and asks on: no question is lost.

    It was: both ends then waited in silence for `stall_s`, and if the slave's was over first the rank heard "pull …
    is over" (StalePush).
    """
    items, chunks, let_go = CHUNK_BYTES // 4, 3 * 128, threading.Event()
    big, reap = Manifest((Layer("big", (Parameter("big.w", (chunks * items,)),)),)), OutStream.reap_sent
    monkeypatch.setattr(OutStream, "reap_sent", lambda stream: reap(stream) if let_go.is_set() else 0)
    flow, source = ZmqFlow(RUN, "s0", ("127.0.0.1:0",), CHUNK_BYTES, 64 << 20, 2, 10.0), model_of(big)
    timer = threading.Timer(0.3, let_go.set)
    try:
        flow.set_layers(big, (0,))
        flow.start(SINC, FlowRecorder().on_event)
        flow.open_pull(PullId("fast", 1, 1), V, {0: source})
        timer.start()
        grant = Grant(V, (SlaveAddress("s0", SINC, flow.lane_addresses(), (0,)),), 30.0)
        target = np.empty_like(source)
        assert pull_pieces(grant, base(1), [Piece(0, 0, 0, source.size, target)]).connections == 1
        assert np.array_equal(source, target)
        assert not flow.refused_frames
    finally:
        timer.cancel()
        let_go.set()
        flow.close()


def model_of(manifest: Manifest) -> np.ndarray:
    return np.arange(manifest.layers[0].numel, dtype=np.float32)


class SlowRank(PullTransfer):
    """The bottleneck: it takes its time for each chunk."""

    chunk_s = 0.0

    def process_chunk(self, staged) -> int:
        time.sleep(self.chunk_s)
        return super().process_chunk(staged)


def test_a_pull_of_another_version_is_refused():
    """v@r is in the name of every stream: a rank never fills its arrays from another version [invariant 5]."""
    with running_flow() as slave:
        slave.flow.open_pull(PullId("fast", 1, 1), VersionId(4, 6), model(1))
        target = blank()
        with pytest.raises(StaleVersion, match="v4@r6"):
            pull_pieces(slave.grant(1), base(1), shares(target, 1)[0])
        assert all(np.isnan(layer).all() for layer in target.values())


def test_a_rank_asks_for_no_more_than_it_may():
    """WANTs beyond the credit, beyond a chunk, or outside the slave's layers are refused; the lane goes on."""
    with running_flow() as slave, raw(slave.flow.lane_addresses()[0], name_of("pull", 1)) as peer:
        slave.flow.open_pull(PullId("fast", 1, 1), V, model(1))
        peer.hello([])
        peer.read_message(Kind.WELCOME)
        for chunks in ([Range(0, 0, 0, CHUNK_BYTES)], [Range(7, 0, 0, 1)], [Range(0, 0, i, 1) for i in range(1000)]):
            peer.send_message(Kind.WANT, encode_want(chunks))
        peer.send_message(Kind.WANT, encode_want([Range(0, 0, 5, 1)]))
        assert len(peer.read_message(Kind.CHUNK)) == 4
        assert dict(slave.flow.refused_frames) == {"range": 2, "credit": 1}


def test_closing_the_flow_releases_every_pull():
    """A slave that ends says so for each pull, and its threads are gone."""
    with running_flow() as slave:
        slave.flow.open_pull(PullId("fast", 1, 1), V, model(1))
        heard = slave.heard
    assert heard.of("released", PullId("fast", 1, 1)) == ["the data flow ends"]
    assert not [t.name for t in threading.enumerate() if t.name.startswith("lane-")]
