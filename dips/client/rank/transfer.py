"""One rank's push or pull: its own bytes, directly to and from every slave of the grant, a stream per lane."""

from __future__ import annotations

import random
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np
import zmq

from dips.client.rank.fragments import FragmentGate
from dips.codecs import Codec
from dips.errors import DipsError, LocalProtocolError, RemoteProtocolError, UnavailableSlave
from dips.ids import VersionId
from dips.protocol.effects import Grant, SlaveAddress
from dips.protocol.heartbeats import remaining_s
from dips.protocol.order import slaves_for_worker
from dips.transport.intake import Intake, LinkRate, Rate, Transit, pool_cost
from dips.transport.lane import Stage, Waker, available_cores, spare_threads
from dips.transport.memory import keep_message_memory
from dips.transport.seal import KeyPair
from dips.transport.stream import Arrived, Stream
from dips.wire.chunks import Piece, Share, check_piece, deal_pieces, encode_body, put_pulled
from dips.wire.frame import (
    CODES,
    BadFrame,
    Buffer,
    ErrorMessage,
    FrameGuard,
    Kind,
    Range,
    StreamName,
    Welcome,
    decode_done,
    decode_error,
    decode_want,
    decode_welcome,
    encode_done,
    encode_ranges,
    encode_want,
    pulled_range_type,
    range_type,
)

__all__ = [
    "EncodeChunk",
    "Piece",
    "Progress",
    "TransferCancelled",
    "TransferIdentity",
    "TransferRate",
    "TransferStats",
    "pull_pieces",
    "push_pieces",
]


# ---- transfer types -------------------------------------------------------------------------------------------------


EncodeChunk = Callable[[Range, memoryview], Buffer]  # a chunk and its elements in the caller's array → its body


@dataclass(frozen=True, slots=True)
class TransferRate:
    """The progress and rate of a transfer."""

    nbytes: int
    total: int
    bytes_per_s: float  # over the last seconds

    @property
    def remaining_s(self) -> float:
        """Seconds until all bytes are moved at this rate; infinite while none move."""
        return remaining_s(self.nbytes, self.total, self.bytes_per_s)


Progress = Callable[[TransferRate], None]  # called on the caller's thread


class TransferCancelled(DipsError):
    """Raised when the caller's `cancel` event is set."""


@dataclass(frozen=True, slots=True)
class TransferIdentity:
    """The identity of a transferring rank: the part of every stream's name that is the same for all slaves."""

    run: str
    cluster: str
    inc: int
    seq: int
    rank: int
    keys: KeyPair | None = None  # this rank's keys for encrypted lanes; None: lanes are plain


@dataclass(frozen=True, slots=True)
class TransferStats:
    """Statistics of a completed transfer."""

    nbytes: int  # on the wire; a lossy push has fewer than its pieces
    seconds: float
    connections: int  # one per stream, and one per resume


# ---- lane parts -----------------------------------------------------------------------------------------------------


FIRST_EPOCH = 1  # epoch of a new stream; each reconnect raises it


@dataclass(eq=False, slots=True)
class LanePart:
    """This rank's share at one lane of one slave."""

    slave: SlaveAddress
    share: Share
    nbytes: int  # of the share, on the wire
    stream: Stream
    ends: tuple[int, ...]  # number of its ranges in the first fragment, in the first two, …
    intake: Intake | None = None  # pull: from the first WELCOME on
    posted: int = 0  # push: bytes that were sent
    done: bool = False
    ranges: type[Range] = Range  # pull: of its chunks, parameters or updates, as the slave said

    def count_ready(self, gate: FragmentGate) -> int:
        """Return the number of its ranges that may move now."""
        return _count_open(self.ends, gate)


def _count_open(ends: tuple[int, ...], gate: FragmentGate) -> int:
    return ends[gate.open - 1]


# ---- transfer loop --------------------------------------------------------------------------------------------------
# The calling thread owns everything but the stage, a thread that checksums and copies chunks if cores are available.
# The directions handle the frames: a push sends the chunks that slaves ask for, a pull asks and receives.
# No torch here.


TRANSIT_BYTES = 128 << 20  # of a rank: requested and not yet in the caller's arrays; of a push: sealed and not yet sent
POLL_MS = 50
DEPTH = TRANSIT_BYTES // 4096  # chunks queued between the polling thread and the stage
BATCH = 4  # frames read from one stream before more are requested: with more, the requests in flight would run out
FLUSH_MS = 500  # time for sending the DONE of a pull


@dataclass(eq=False, slots=True)
class StagedChunk:
    """A chunk in the stage: to be encoded and sealed or hashed (push), or checked and copied (pull)."""

    part: LanePart
    chunk: Range
    view: memoryview  # in the caller's array
    stream: int  # push: the stream, with its epoch, that asked for it
    guard: FrameGuard  # of the connection that it leaves or arrived by
    frame: Arrived | None = None  # pull: the frame that arrived
    parts: tuple[bytes, Buffer] = b"", b""  # push: the frame, set by the stage


class TransferLoop(ABC):
    """The loop of both directions; the calling thread owns everything but the stage."""

    kind: str

    def __init__(
        self,
        grant: Grant,
        base: TransferIdentity,
        pieces: Sequence[Piece],
        stall_s: float,
        clock: Callable[[], float],
        gate: FragmentGate | None = None,
        *,
        held: VersionId | None = None,
        encode: EncodeChunk | None = None,
    ) -> None:
        """Make the streams of a transfer.

        stall_s  how long to wait for a silent slave
        gate     opens the pieces' fragments one after the other; None: all may move at once
        held     pull: the version that the pieces hold, which updates may be added to
        encode   push: makes the body of each chunk; None: the codec encodes
        """
        keep_message_memory()
        self._name = f"{self.kind} {base.cluster}/{base.inc} {base.seq} of rank {base.rank}"
        self._grant, self._base, self._clock, self._stall_s, self._held = grant, base, clock, stall_s, held
        self._check_pieces(pieces)
        self._gate = gate or FragmentGate((tuple({piece.layer for piece in pieces}),), pieces)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        # Each lane takes three, with its monitor: libzmq's own 1,023 are those of 85 slaves.
        self._context.set(zmq.MAX_SOCKETS, self._context.get(zmq.SOCKET_LIMIT))
        self._waker = Waker()
        self._codec = grant.codec if self.kind == "push" else Codec.FP32
        self._encode = encode or self._encode_elements
        self._pool, self._link = Transit(TRANSIT_BYTES), LinkRate()
        self._results: deque[tuple[StagedChunk, bool]] = deque()  # of the stage: a chunk, and whether it is intact
        self._parts = list(self._open_parts(pieces))
        self._total = sum(part.nbytes for part in self._parts)
        self._failure: Exception | None = None  # error of the stage's thread
        self._more = False  # a batch was full: more frames may be there without a poll
        self._in_place = False  # the calling thread also does the stage's work

    def _check_pieces(self, pieces: Sequence[Piece]) -> None:
        """Raise LocalProtocolError unless the grant has a slave for each piece, and this rank a key if lanes are
        encrypted.
        """
        for piece in pieces:
            check_piece(piece)
        slaves = self._grant.slaves
        if self._base.keys is None and (asking := [slave.name for slave in slaves if slave.key]):
            raise LocalProtocolError(
                f"{self._name}: the lanes of {', '.join(asking)} are encrypted, and this rank has no key"
            )
        held = {layer for slave in slaves for layer in slave.layers}
        if strays := sorted({p.layer for p in pieces} - held):
            raise LocalProtocolError(f"{self._name}: no slave of the grant holds layers {strays}")

    def _open_parts(self, pieces: Sequence[Piece]) -> Iterator[LanePart]:
        """Open the streams, in the order of the grant; a push has one to every lane, even without pieces."""
        grant, base, gate, rng, kind = self._grant, self._base, self._gate, random.Random(), self.kind
        version, held = str(grant.version) if kind == "pull" else "", str(self._held or "")
        for index in slaves_for_worker(grant.first + base.rank, len(grant.slaves)):
            slave = grant.slaves[index]
            groups = gate.group_pieces(p for p in pieces if p.layer in slave.layers and p.length)
            dealt = [deal_pieces(group, len(slave.lanes)) for group in groups]  # each lane has a part of each fragment
            for lane in range(len(slave.lanes)):
                share = Share([piece for hands in dealt for piece in hands[lane]])
                ends = tuple(accumulate(len(hands[lane]) for hands in dealt))
                name = StreamName(
                    base.run, kind, base.cluster, base.inc, base.seq, base.rank, slave.name, slave.sinc,
                    FIRST_EPOCH, version, lane, held,
                )  # fmt: skip
                keys = (base.keys, slave.key) if base.keys is not None and slave.key else None
                ready = partial(_count_open, ends, gate) if kind == "push" else None
                stream = Stream(self._context, slave.lanes[lane], name, share.ranges, self._stall_s, rng, keys, ready)
                stream.waits = False
                if share.nbytes or kind == "push":
                    nbytes = sum(piece.nbytes for piece in encode_ranges(self._codec.dtype, share.ranges))
                    yield LanePart(slave, share, nbytes, stream, ends)

    def run(self, cancel: threading.Event, progress: Progress | None) -> TransferStats:
        """Move everything. Raises UnavailableSlave if a slave owes us something and nothing moves until the
        deadline.
        """
        began, reported = self._clock(), -1
        rate, moved_at = Rate(began), began
        stage = Stage(f"{self.kind}-{self._base.rank}", DEPTH, self._process_chunk, spare_threads(available_cores()))
        self._in_place = stage.in_place
        self._put = stage.put_item
        try:
            while not all(part.done for part in self._parts):
                now = self._clock()
                if cancel.is_set():
                    raise TransferCancelled(f"{self._name} was cancelled")
                if now - moved_at >= self._grant.deadline_s:
                    raise UnavailableSlave(f"{self._name} passed its deadline: {self._describe_waiting()}")
                self._run_once(now)
                if reported != (moved := self._moved_bytes()):
                    reported, moved_at = moved, now
                    rate.record_bytes(moved, now)
                    if progress is not None:
                        progress(TransferRate(moved, self._total, rate.bytes_per_s))
                elif not self._is_owed():
                    moved_at = now
        finally:
            self._close_streams(stage)
        connections = sum(part.stream.name.epoch for part in self._parts)
        return TransferStats(self._total, self._clock() - began, connections)

    def _run_once(self, now: float) -> None:
        """Reconnect, poll, handle the frames that arrived and the stage's results."""
        for part in self._parts:
            if not part.done and part.stream.advance_connection(now):
                self.on_stream_lost(part)
        if not self._more:
            self._poll_sockets()
        now, self._more = self._clock(), False
        for part in self._parts:
            self._more |= self._read_frames(part, now)
        while self._results:
            self.on_processed(*self._results.popleft())
        if self._failure is not None:
            raise self._failure
        self.after_frames(now)

    def _poll_sockets(self) -> None:
        poller = zmq.Poller()
        poller.register(self._waker.theirs, zmq.POLLIN)
        for part in self._parts:
            part.stream.register_poll(poller)
        if self._waker.theirs.fileno() in dict(poller.poll(POLL_MS)):
            self._waker.drain()

    def _read_frames(self, part: LanePart, now: float) -> bool:
        """Handle at most BATCH frames of one stream; return whether there may be more."""
        count = 0
        for frame in part.stream.read_frames(now, BATCH):
            count += 1
            self._on_frame(part, frame, now)
            if part.done:
                break
        return count == BATCH

    def _on_frame(self, part: LanePart, frame: Arrived, now: float) -> None:
        try:
            if frame.header.kind is Kind.CHUNK:
                self.on_chunk(part, frame, now)
                return
            body = frame.guard.open_frame(frame.header, frame.body)
            match frame.header.kind:
                case Kind.WELCOME:
                    part.stream.on_welcome()
                    self.on_welcome(part, decode_welcome(body), now)
                case Kind.WANT:
                    self.on_want(part, decode_want(body))
                case Kind.DONE:
                    decode_done(body)
                    self.finish_part(part)
                case Kind.ERROR:
                    self._on_error(part, decode_error(body), now)
        except BadFrame as bad:
            part.stream.reconnect_later(f"slave {part.slave.name} sent a bad frame: {bad}", now)
            self.on_stream_lost(part)

    def _on_error(self, part: LanePart, error: ErrorMessage, now: float) -> None:
        cls = CODES[error.code]
        if cls is not None:
            raise cls(f"{self._name}: slave {part.slave.name} answered: {error.message}")
        part.stream.reconnect_later(error.message, now)
        self.on_stream_lost(part)

    def _is_owed(self) -> bool:
        """Return whether a slave does not answer or does not send requested chunks; waiting to be asked is no fault."""
        return any(not p.done and (p.stream.waits or not p.stream.welcomed) for p in self._parts)

    def _describe_waiting(self) -> str:
        return "; ".join(
            f"slave {p.slave.name} at {p.stream.address} "
            + ("is connected" if p.stream.welcomed else f"is not connected ({p.stream.why})")
            for p in self._parts
            if not p.done
        )

    def finish_part(self, part: LanePart) -> None:
        """Mark a part as completely moved and close its stream."""
        part.done = True
        part.stream.close(FLUSH_MS if self.kind == "pull" else 0)

    def _close_streams(self, stage: Stage[StagedChunk]) -> None:
        for part in self._parts:
            part.stream.close()
        stage.close()
        self._context.term()  # after this, libzmq no longer reads the caller's arrays
        self._waker.close()

    def _process_chunk(self, staged: StagedChunk) -> None:
        """Process a chunk, on the stage's thread if it has one."""
        try:
            intact = self.process_chunk(staged)
        except Exception as failure:  # noqa: BLE001  raised again on the caller's thread
            self._failure = failure
            self._waker.wake()
            return
        if self._in_place:
            self.on_processed(staged, intact)  # at once: libzmq sends the chunk while the next one is read
        else:
            self._results.append((staged, intact))
            self._waker.wake()

    def _encode_elements(self, chunk: Range, view: memoryview) -> Buffer:
        return encode_body(self._codec, np.frombuffer(view, np.float32))

    @abstractmethod
    def process_chunk(self, staged: StagedChunk) -> bool:
        """Encode and seal or hash, or check and copy; return whether it is intact. Runs on the stage's thread."""

    @abstractmethod
    def on_processed(self, staged: StagedChunk, intact: bool) -> None:
        """Continue with a chunk that was processed."""

    @abstractmethod
    def _moved_bytes(self) -> int: ...

    def on_stream_lost(self, part: LanePart) -> None:
        """Process the loss of a connection; the next connection resumes."""

    def after_frames(self, now: float) -> None:
        """Do the work at the end of each pass of the loop."""

    def on_welcome(self, part: LanePart, welcome: Welcome, now: float) -> None:
        """Process the slave's acceptance of the stream."""

    def on_want(self, part: LanePart, chunks: tuple[Range, ...]) -> None:
        raise RemoteProtocolError(f"{self._name}: slave {part.slave.name} asked for {chunks[:1]}, but this is a pull")

    def on_chunk(self, part: LanePart, frame: Arrived, now: float) -> None:
        raise RemoteProtocolError(f"{self._name}: slave {part.slave.name} sent a chunk, but this is a push")


# ---- transfer -------------------------------------------------------------------------------------------------------
# A push sends HELLO to every slave at once (also without ranges: slaves wait for all ranks) and then the chunks that
# they ask for. A pull asks the slaves in the grant's order, checks each chunk and copies it into the caller's arrays.
# All sockets and threads are made for one transfer, in the calling process (no context is ever inherited by a fork),
# and closed when the call returns: the arrays are the caller's again, also after an error. A lost connection is
# resumed. No torch here.


CONCURRENT_STREAMS = 2  # streams that a rank pulls from at once: the next begins while the last one drains
SLOW_S = 1.0  # a stream without a chunk for this long does not count as one of them


def push_pieces(
    grant: Grant,
    base: TransferIdentity,
    pieces: Sequence[Piece],
    *,
    stall_s: float = 30.0,
    cancel: threading.Event | None = None,
    progress: Progress | None = None,
    encode: EncodeChunk | None = None,
    gate: FragmentGate | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> TransferStats:
    """Send `pieces` to the slaves of the grant; return when every slave has all of this rank's bytes.

    The arrays must not change until this returns. Legal after the push was granted; every rank calls it, also a rank
    that has nothing to push. Under a grant in a lossy codec the pieces hold differences to the grant's base.

    encode  makes the body of each chunk, on another thread if cores are available, identically each time it is called
            for a chunk; None: the codec encodes
    gate    opens the fragments whose arrays may be read; None: all may
    Errors  UnavailableSlave: deadline passed, or a slave gave the push up. StaleIncarnation: a slave was restarted.
            StalePush: the push is over. LocalProtocolError: all ranks together do not hold each element exactly once.
            TransferCancelled.
    """
    moving = PushTransfer(grant, base, pieces, stall_s, clock, gate, encode=encode)
    return moving.run(cancel or threading.Event(), progress)


def pull_pieces(
    grant: Grant,
    base: TransferIdentity,
    pieces: Sequence[Piece],
    *,
    stall_s: float = 30.0,
    cancel: threading.Event | None = None,
    progress: Progress | None = None,
    held: VersionId | None = None,
    gate: FragmentGate | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> TransferStats:
    """Fill `pieces` with the grant's version; return when every element has arrived and is checked.

    After an error the contents of the arrays are undefined.

    held    the version that the pieces hold now: slaves may send updates to it; None: no version
    gate    opens the fragments to be requested, and counts arrivals; None: all at once
    Errors  as for push, and StaleVersion: the pull is open on another version.
    """
    moving = PullTransfer(grant, base, pieces, stall_s, clock, gate, held=held)
    return moving.run(cancel or threading.Event(), progress)


class PushTransfer(TransferLoop):
    """The push direction: sends the chunks that slaves ask for."""

    kind = "push"

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._asked: deque[StagedChunk] = deque()  # wait for room among what is sealed and not sent

    def on_want(self, part: LanePart, chunks: tuple[Range, ...]) -> None:
        for chunk in chunks:
            view = part.share.view_chunk(chunk)
            if view is None:
                raise RemoteProtocolError(f"{self._name}: slave {part.slave.name} asks for {chunk}, not held here")
            self._asked.append(StagedChunk(part, chunk, view, part.stream.id, part.stream.guard))
        if len(self._asked) > DEPTH:
            raise RemoteProtocolError(f"{self._name}: slaves ask for more than {DEPTH} chunks")
        self._stage_asked()

    def _stage_asked(self) -> None:
        """Stage what was asked for; a sealed chunk is a copy, whose room is free again when libzmq has sent it."""
        while self._asked:
            staged = self._asked[0]
            if staged.guard.tag_bytes and not self._pool.take_bytes(pool_cost(len(staged.view))):
                break
            if not self._put(self._asked.popleft()):
                raise RemoteProtocolError(f"{self._name}: slaves ask for more than {DEPTH} chunks")

    def process_chunk(self, staged: StagedChunk) -> bool:
        chunk = range_type(self._codec.dtype)(*staged.chunk)
        header = staged.part.stream.chunk_header(chunk, staged.stream)
        staged.parts = staged.guard.seal_frame(header, self._encode(staged.chunk, staged.view))
        if staged.guard.tag_bytes:
            body = staged.parts[1]
            assert isinstance(body, memoryview)
            weakref.finalize(body.obj, self._pool.give_back, pool_cost(len(staged.view)))
        return True

    def on_processed(self, staged: StagedChunk, intact: bool) -> None:
        stream, guard = staged.part.stream, staged.guard
        if staged.stream == stream.id and not staged.part.done:
            stream.post_frame(*staged.parts)
            stream.flush_outbox()
            staged.part.posted += len(staged.parts[1]) - guard.tag_bytes

    def after_frames(self, now: float) -> None:
        """Offer fragments that have been frozen since the last pass, and send what has found room."""
        self._stage_asked()
        for part in self._parts:
            if not part.done:
                part.stream.tell_ready()

    def _moved_bytes(self) -> int:
        return sum(p.nbytes if p.done else min(p.posted, p.nbytes) for p in self._parts)


class PullTransfer(TransferLoop):
    """The pull direction: asks for chunks in the order of the grant, and checks those that arrive."""

    kind = "pull"

    def on_welcome(self, part: LanePart, welcome: Welcome, now: float) -> None:
        kind = pulled_range_type(welcome.dtype, welcome.depth)
        if welcome.depth and self._held is None:
            raise BadFrame("message", "updates are offered to a rank that holds no version")
        if part.intake is None:
            part.ranges, ranges = kind, tuple(kind(*piece) for piece in part.share.ranges)
            ready = part.count_ready(self._gate)
            part.intake = Intake(ranges, welcome.chunk_bytes, self._pool, now, self._link, ready)
            self._total += part.intake.total - part.nbytes
            part.nbytes = part.intake.total
        elif part.ranges is not kind:
            raise UnavailableSlave(f"{self._name}: slave {part.slave.name} offers other chunks than before")

    def after_frames(self, now: float) -> None:
        """Ask the first CONCURRENT_STREAMS that are not done; a slow stream does not count, so the next is asked as
        well.
        """
        asking = 0
        for part in self._parts:
            intake = part.intake
            if part.done or intake is None or not part.stream.welcomed:
                continue
            intake.release_pieces(part.count_ready(self._gate))
            if asking < CONCURRENT_STREAMS and not intake.idle:
                asking += not (intake.in_flight and now - intake.last_byte_at > SLOW_S)
                for unit in intake.ask_chunks(now, self._total):
                    part.stream.send_message(Kind.WANT, encode_want(unit))
            part.stream.waits = (
                intake.in_flight > 0
            )  # also for a stream that is not asked any more, which then owes nothing

    def on_chunk(self, part: LanePart, frame: Arrived, now: float) -> None:
        chunk = part.intake.claim_chunk(frame.header, now) if part.intake is not None else None
        if chunk is None:
            return  # requested on a former connection, or never: ignored
        view = part.share.view_chunk(chunk)
        assert view is not None, chunk
        queued = self._put(StagedChunk(part, chunk, view, part.stream.id, frame.guard, frame))
        assert queued, "the queue is as deep as the pool"

    def process_chunk(self, staged: StagedChunk) -> bool:
        """Check a chunk and write it; a wrong one may leave garbage in the place of parameters, which is filled anew,
        and never touches the base of updates.
        """
        assert staged.frame is not None
        header, body, guard = staged.frame.header, staged.frame.body, staged.guard
        try:
            if not staged.chunk.depth:
                guard.open_into(header, body, np.frombuffer(staged.view, np.uint8))
            else:
                opened = guard.open_frame(header, body)
                put_pulled(staged.chunk, opened, np.frombuffer(staged.view, np.float32))
        except BadFrame:
            return False
        return True

    def on_processed(self, staged: StagedChunk, intact: bool) -> None:
        intake = staged.part.intake
        assert intake is not None
        if not intact:
            intake.mark_wrong(staged.chunk)
            return
        intake.mark_received(staged.chunk)
        self._gate.record_arrived(staged.chunk.layer, staged.chunk.length)
        if intake.complete:
            staged.part.stream.send_message(Kind.DONE, encode_done(intake.total))
            staged.part.stream.flush_outbox()
            self.finish_part(staged.part)

    def on_stream_lost(self, part: LanePart) -> None:
        part.stream.waits = False
        if part.intake is not None:
            part.intake.on_connection_lost()

    def _moved_bytes(self) -> int:
        return sum(p.intake.total - p.intake.left for p in self._parts if p.intake is not None)
