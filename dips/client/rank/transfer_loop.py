"""The loop of one rank's transfer, the same for both directions: streams, their reconnects, a stage for the heavy part.

The calling thread owns everything but the stage, a thread that checksums and copies chunks where cores are to be had.
What a frame means is up to the direction (transfer.py): a push sends what slaves ask for, a pull asks and takes in.
No torch here.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass

import zmq

from dips.client.rank.lane_parts import LanePart, check_order, open_parts
from dips.client.rank.transfer_types import LayerOrder, Progress, TransferCancelled, TransferRate, TransferStats
from dips.codecs import Codec
from dips.errors import RemoteProtocolError, UnavailableSlave
from dips.protocol.effects import Grant
from dips.transport.lane import Waker
from dips.transport.memory import keep_message_memory
from dips.transport.pipeline import Stage, available_cores, spare_threads
from dips.transport.rate import Rate
from dips.transport.stream import Arrived
from dips.wire import streams
from dips.wire.chunks import Range
from dips.wire.frame import BadFrame, Buffer, Kind, check_body

TRANSIT_BYTES = 128 << 20  # asked for and not yet in the caller's arrays, of one rank's pull
POLL_MS = 50
DEPTH = TRANSIT_BYTES // 4096  # chunks between the thread that polls and the one that checks
BATCH = 4  # frames read of one stream before more is asked for: later, and what is in flight drains meanwhile
FLUSH_MS = 500  # for the DONE of a pull to be sent


@dataclass(eq=False, slots=True)
class StagedChunk:
    """A chunk on its way through the stage: to be encoded and checksummed (push), or checked and copied (pull)."""

    part: LanePart
    chunk: Range
    view: memoryview  # in the caller's array
    stream: int  # push: the stream, with its epoch, that asked for it
    frame: Arrived | None = None  # pull
    body: Buffer = b""  # push: as it is sent, from the stage on


class TransferLoop(ABC):
    """The loop of both directions; the calling thread owns everything but the stage."""

    kind: str

    def __init__(self, order: LayerOrder) -> None:
        keep_message_memory()
        base = order.base
        self._name = f"{self.kind} {base.cluster}/{base.inc} {base.seq} of rank {base.rank}"
        check_order(order, self._name)
        self._order, self._grant, self._pieces, self._clock = order, order.grant, order.pieces, order.clock
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=_io_threads(order.grant))
        self._waker = Waker()
        self._codec = order.grant.codec if self.kind == "push" else Codec.FP32
        # What the stage returned: a chunk, and its checksum (push) or whether it is intact (pull).
        self._results: deque[tuple[StagedChunk, int]] = deque()
        self._parts = list(open_parts(order, self.kind, self._codec, self._context))
        self._total = sum(part.nbytes for part in self._parts)
        self._failure: Exception | None = None  # on the stage's thread
        self._more = False  # a batch was full: there may be frames without a poll
        self._in_place = False  # the calling thread does the stage's work, too

    def run(self, cancel: threading.Event, progress: Progress | None) -> TransferStats:
        """Move everything, or raise; the deadline is for a slave that owes us something while nothing moves."""
        began, reported = self._clock(), -1
        rate, moved_at = Rate(began), began
        stage = Stage(
            f"{self.kind}-{self._order.base.rank}", DEPTH, self._process_chunk, spare_threads(available_cores())
        )
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
        """Reconnect, poll, handle the frames that arrived and what the stage returned."""
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
            check_body(frame.header, frame.body)
            match frame.header.kind:
                case Kind.WELCOME:
                    part.stream.on_welcome()
                    self.on_welcome(part, streams.decode_welcome(frame.body), now)
                case Kind.WANT:
                    self.on_want(part, streams.decode_want(frame.body))
                case Kind.DONE:
                    streams.decode_done(frame.body)
                    self.finish_part(part)
                case Kind.ERROR:
                    self._on_error(part, streams.decode_error(frame.body), now)
        except BadFrame as bad:
            part.stream.reconnect_later(f"slave {part.slave.name} sent a bad frame: {bad}", now)
            self.on_stream_lost(part)

    def _on_error(self, part: LanePart, error: streams.ErrorMessage, now: float) -> None:
        cls = streams.CODES[error.code]
        if cls is not None:
            raise cls(f"{self._name}: slave {part.slave.name} answered: {error.message}")
        part.stream.reconnect_later(error.message, now)
        self.on_stream_lost(part)

    def _is_owed(self) -> bool:
        """A slave does not answer, or does not bring what it was asked for; to wait until we are asked is no fault."""
        return any(not p.done and (p.stream.waits or not p.stream.welcomed) for p in self._parts)

    def _describe_waiting(self) -> str:
        return "; ".join(
            f"slave {p.slave.name} at {p.stream.address} "
            + ("is connected" if p.stream.welcomed else f"is not connected ({p.stream.why})")
            for p in self._parts
            if not p.done
        )

    def finish_part(self, part: LanePart) -> None:
        """Everything of this part was moved."""
        part.done = True
        part.stream.close(FLUSH_MS if self.kind == "pull" else 0)

    def _close_streams(self, stage: Stage[StagedChunk]) -> None:
        for part in self._parts:
            part.stream.close()
        stage.close()
        self._results.clear()
        self._context.term()  # when it returns, libzmq reads none of the caller's arrays any more
        self._waker.close()

    def _process_chunk(self, staged: StagedChunk) -> None:
        """Process a chunk; on the stage's thread, if it has one."""
        try:
            value = self.process_chunk(staged)
        except Exception as failure:  # noqa: BLE001  raised again on the caller's thread
            self._failure = failure
            self._waker.wake()
            return
        if self._in_place:
            self.on_processed(staged, value)  # at once: libzmq sends the chunk while the next one is read
        else:
            self._results.append((staged, value))
            self._waker.wake()

    @abstractmethod
    def process_chunk(self, staged: StagedChunk) -> int:
        """Encode and checksum, or check and copy; on the stage's thread."""

    @abstractmethod
    def on_processed(self, staged: StagedChunk, value: int) -> None:
        """Go on with a chunk; `value` is what `process_chunk` returned."""

    @abstractmethod
    def _moved_bytes(self) -> int: ...

    def on_stream_lost(self, part: LanePart) -> None:
        """The connection is lost; the next one resumes."""

    def after_frames(self, now: float) -> None:
        """Called at the end of each pass of the loop."""

    def on_welcome(self, part: LanePart, welcome: streams.Welcome, now: float) -> None:
        """The slave has accepted the stream."""

    def on_want(self, part: LanePart, chunks: tuple[Range, ...]) -> None:
        raise RemoteProtocolError(f"{self._name}: slave {part.slave.name} asked for {chunks[:1]}, but this is a pull")

    def on_chunk(self, part: LanePart, frame: Arrived, now: float) -> None:
        raise RemoteProtocolError(f"{self._name}: slave {part.slave.name} sent a chunk, but this is a push")


def _io_threads(grant: Grant) -> int:
    """A core for each lane that encrypts: CURVE works in libzmq's I/O threads, a connection in one of them."""
    lanes = max((len(slave.lanes) for slave in grant.slaves if slave.key), default=1)
    return max(1, min(lanes, available_cores()))
