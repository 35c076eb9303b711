"""The loop of one rank's transfer, the same for both directions: streams, their breaks, a stage for the heavy part.

A rank's pieces are dealt to the lanes of the slaves that hold their layers; each lane has a stream. The calling thread
owns everything but the stage. What a chunk means says the direction (transfer.py): `Push` sends what it is asked,
`Pull` asks and takes in. No torch here.
"""

from __future__ import annotations

import random
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import zmq

from dips.errors import DipsError, LocalProtocolError, RemoteProtocolError, UnavailableSlave
from dips.protocol.effects import Grant, SlaveAddress
from dips.protocol.heartbeats import remaining_s
from dips.transport import curve
from dips.transport.intake import Intake
from dips.transport.lane import Waker
from dips.transport.memory import keep_message_memory
from dips.transport.pipeline import Stage, cores, spare_threads
from dips.transport.rate import Rate
from dips.transport.shares import Piece, Share, check, deal
from dips.transport.stream import Arrived, Stream
from dips.wire import codecs, streams
from dips.wire.chunks import Range
from dips.wire.frame import BadFrame, Buffer, Kind, check_body
from dips.wire.streams import StreamName

TRANSIT_BYTES = 128 << 20  # asked and not yet in the caller's arrays, of one rank's pull
POLL_MS = 50
DEPTH = TRANSIT_BYTES // 4096  # chunks between the thread that polls and the one that checks
BATCH = 4  # frames of one stream read before more is asked: later, and what is in flight drains meanwhile
FLUSH_MS = 500  # for the DONE of a pull to leave


@dataclass(frozen=True, slots=True)
class TransferRate:
    """How far a transfer is."""

    nbytes: int
    total: int
    bytes_per_s: float  # over the last seconds

    @property
    def remaining_s(self) -> float:
        """Seconds until all is moved at this rate; infinite while nothing moves."""
        return remaining_s(self.nbytes, self.total, self.bytes_per_s)


Progress = Callable[[TransferRate], None]  # called on the caller's thread


class TransferCancelled(DipsError):
    """The caller's `cancel` was set."""


@dataclass(frozen=True, slots=True)
class TransferIdentity:
    """Who transfers: the part of every stream's name that is the same for all slaves."""

    run: str
    cluster: str
    inc: int
    seq: int
    rank: int


@dataclass(frozen=True, slots=True)
class TransferStats:
    """What a transfer moved."""

    nbytes: int  # as they travel: a lossy push has fewer than its pieces
    seconds: float
    connections: int  # 1 for each stream, and 1 more for each resume
    last_epoch: int = 1  # of any of its streams


@dataclass(frozen=True, slots=True)
class LayerOrder:
    """What is to be moved, and how long silence is borne."""

    grant: Grant
    base: TransferIdentity
    pieces: Sequence[Piece]
    stall_s: float
    clock: Callable[[], float]
    first_epoch: int = 1  # of its streams


@dataclass(eq=False, slots=True)
class Part:
    """This rank's share at one lane of one slave."""

    slave: SlaveAddress
    share: Share
    nbytes: int  # of the share, as they travel
    stream: Stream
    intake: Intake | None = None  # pull: from the first WELCOME on
    posted: int = 0  # push: bytes that were asked
    done: bool = False


@dataclass(eq=False, slots=True)
class StagedChunk:
    """A chunk on its way through the stage: to be spelled and checksummed (push), or checked and copied (pull)."""

    part: Part
    chunk: Range
    view: memoryview  # in the caller's array
    stream: int  # push: the epoch that asked
    frame: Arrived | None = None  # pull
    body: Buffer = b""  # push: how it travels, from the stage on


class TransferLoop(ABC):
    """The loop of both directions; the calling thread owns everything but the stage."""

    kind: str

    def __init__(self, order: LayerOrder) -> None:
        keep_message_memory()
        grant, base, pieces = order.grant, order.base, order.pieces
        self._what = f"{self.kind} {base.cluster}/{base.inc} {base.seq} of rank {base.rank}"
        self._grant, self._base, self._pieces = grant, base, pieces
        self._stall_s, self._clock, self._first_epoch = order.stall_s, order.clock, order.first_epoch
        for piece in pieces:
            check(piece)
        strays = sorted({p.layer for p in pieces} - {layer for slave in grant.slaves for layer in slave.layers})
        if strays:
            raise LocalProtocolError(f"{self._what}: no slave of the grant holds layers {strays}")
        line = grant.order[base.rank] if base.rank < len(grant.order) else ()
        if sorted(line) != list(range(len(grant.slaves))):
            raise LocalProtocolError(f"{self._what}: expected an order of all {len(grant.slaves)} slaves, got {line}")
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=_io_threads(grant))
        self._waker = Waker()
        self._codec = codecs.named(grant.codec) if self.kind == "push" else codecs.FP32
        self._results: deque[tuple[StagedChunk, int]] = (
            deque()
        )  # of the stage: job, and checksum (push) or 1 for right (pull)
        self._parts = list(self._make_parts())
        self._total = sum(part.nbytes for part in self._parts)
        self._failure: Exception | None = None
        self._more = False  # a batch was full: there may be frames without a poll
        self._alone = False  # the calling thread does the heavy part, too

    def _make_parts(self) -> Iterator[Part]:
        b, rng = self._base, random.Random()
        version = str(self._grant.version) if self.kind == "pull" else ""
        own = curve.new()  # nobody knows us by it: it lives as long as this transfer
        for index in self._grant.order[b.rank]:
            slave = self._grant.slaves[index]
            hands = deal((p for p in self._pieces if p.layer in slave.layers and p.length), len(slave.lanes))
            for lane, hand in enumerate(hands):
                share = Share(hand)
                name = StreamName(
                    b.run,
                    self.kind,
                    b.cluster,
                    b.inc,
                    b.seq,
                    b.rank,
                    slave.name,
                    slave.sinc,
                    self._first_epoch,
                    version,
                    lane,
                )
                keys = (own, slave.key) if slave.key else None
                stream = Stream(self._context, slave.lanes[lane], name, share.ranges, self._stall_s, rng, keys)
                stream.waits = False
                if share.nbytes or self.kind == "push":
                    nbytes = sum(piece.nbytes for piece in self._codec.ranges(share.ranges))
                    yield Part(slave, share, nbytes, stream)

    def run(self, cancel: threading.Event, progress: Progress | None) -> TransferStats:
        """Move everything, or raise."""
        began, told = self._clock(), -1
        rate = Rate(began)
        stage = Stage(f"{self.kind}-{self._base.rank}", DEPTH, self._heavy, spare_threads(cores()))
        self._alone = stage.in_place
        self._put = stage.put
        try:
            while not all(part.done for part in self._parts):
                now = self._clock()
                if cancel.is_set():
                    raise TransferCancelled(f"{self._what} was cancelled")
                if now - began >= self._grant.deadline_s:
                    raise UnavailableSlave(f"{self._what} passed its deadline: {self._waiting()}")
                self._round(now)
                if progress is not None and told != (moved := self._moved()):
                    told = moved
                    rate.saw(moved, now)
                    progress(TransferRate(moved, self._total, rate.bytes_per_s))
        finally:
            self._close(stage)
        connections = sum(part.stream.name.epoch for part in self._parts)
        last_epoch = max((part.stream.name.epoch for part in self._parts), default=self._first_epoch)
        return TransferStats(self._total, self._clock() - began, connections, last_epoch)

    def _round(self, now: float) -> None:
        for part in self._parts:
            if not part.done and part.stream.step(now):
                self.broke(part)
        if not self._more:
            self._poll()
        now, self._more = self._clock(), False
        for part in self._parts:
            came = 0
            for frame in part.stream.arrived(now, BATCH):
                came += 1
                self._frame(part, frame, now)
                if part.done:
                    break
            self._more |= came == BATCH
        while self._results:
            self.result(*self._results.popleft())
        if self._failure is not None:
            raise self._failure
        self.advance(now)

    def _poll(self) -> None:
        poller = zmq.Poller()
        poller.register(self._waker.theirs, zmq.POLLIN)
        for part in self._parts:
            part.stream.register(poller)
        if self._waker.theirs.fileno() in dict(poller.poll(POLL_MS)):
            self._waker.drain()

    def _frame(self, part: Part, frame: Arrived, now: float) -> None:
        try:
            if frame.header.kind is Kind.CHUNK:
                self.chunk(part, frame, now)
                return
            check_body(frame.header, frame.body)
            match frame.header.kind:
                case Kind.WELCOME:
                    part.stream.settled()
                    self.welcome(part, streams.decode_welcome(frame.body), now)
                case Kind.WANT:
                    self.want(part, streams.decode_want(frame.body))
                case Kind.DONE:
                    streams.decode_done(frame.body)
                    self.finish(part)
                case Kind.ERROR:
                    self._refused(part, streams.decode_error(frame.body), now)
        except BadFrame as bad:
            part.stream.again(f"slave {part.slave.name} sent a bad frame: {bad}", now)
            self.broke(part)

    def _refused(self, part: Part, error: streams.ErrorMessage, now: float) -> None:
        cls = streams.CODES[error.code]
        if cls is not None:
            raise cls(f"{self._what}: slave {part.slave.name} says: {error.message}")
        part.stream.again(error.message, now)
        self.broke(part)

    def _waiting(self) -> str:
        return "; ".join(
            f"slave {p.slave.name} at {p.stream.address} "
            + ("is connected" if p.stream.welcomed else f"is not connected ({p.stream.why})")
            for p in self._parts
            if not p.done
        )

    def finish(self, part: Part) -> None:
        """The part is over."""
        part.done = True
        part.stream.close(FLUSH_MS if self.kind == "pull" else 0)

    def _close(self, stage: Stage[StagedChunk]) -> None:
        for part in self._parts:
            part.stream.close()
        stage.close()
        self._results.clear()
        self._context.term()  # on return libzmq reads no array of the caller's
        self._waker.close()

    def _heavy(self, job: StagedChunk) -> None:
        """On the stage's thread."""
        try:
            value = self.heavy(job)
        except Exception as failure:  # noqa: BLE001  raised again on the caller's thread
            self._failure = failure
            self._waker.wake()
            return
        if self._alone:
            self.result(job, value)  # at once: libzmq sends the chunk while the next one is read
        else:
            self._results.append((job, value))
            self._waker.wake()

    @abstractmethod
    def heavy(self, job: StagedChunk) -> int:
        """Checksum, or check and copy; on the stage's thread."""

    @abstractmethod
    def result(self, job: StagedChunk, value: int) -> None:
        """What `heavy` returned."""

    @abstractmethod
    def _moved(self) -> int: ...

    def broke(self, part: Part) -> None:
        """The connection is lost; the next one resumes."""

    def advance(self, now: float) -> None:
        """After each round of the loop."""

    def welcome(self, part: Part, welcome: streams.Welcome, now: float) -> None:
        """The slave knows the stream."""

    def want(self, part: Part, chunks: tuple[Range, ...]) -> None:
        raise RemoteProtocolError(f"{self._what}: slave {part.slave.name} asked for {chunks[:1]}, but this is a pull")

    def chunk(self, part: Part, frame: Arrived, now: float) -> None:
        raise RemoteProtocolError(f"{self._what}: slave {part.slave.name} sent a chunk, but this is a push")


def _io_threads(grant: Grant) -> int:
    """A core for each lane that encrypts: CURVE works in libzmq's I/O threads, a connection in one of them."""
    lanes = max((len(slave.lanes) for slave in grant.slaves if slave.key), default=1)
    return max(1, min(lanes, cores()))
