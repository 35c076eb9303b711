"""The loop of one rank's transfer in either direction: streams, their reconnects, and a stage for the heavy work.

The calling thread owns everything but the stage, a thread that checksums and copies chunks if cores are available.
The directions handle the frames (transfer.py): a push sends the chunks that slaves ask for, a pull asks and receives.
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

TRANSIT_BYTES = 128 << 20  # requested and not yet in the caller's arrays, per rank's pull
POLL_MS = 50
DEPTH = TRANSIT_BYTES // 4096  # chunks queued between the polling thread and the stage
BATCH = 4  # frames read from one stream before more are requested: with more, the requests in flight would run out
FLUSH_MS = 500  # time for sending the DONE of a pull


@dataclass(eq=False, slots=True)
class StagedChunk:
    """A chunk in the stage: to be encoded and checksummed (push), or checked and copied (pull)."""

    part: LanePart
    chunk: Range
    view: memoryview  # in the caller's array
    stream: int  # push: the stream, with its epoch, that asked for it
    frame: Arrived | None = None  # pull: the frame that arrived: the frame that arrived
    body: Buffer = b""  # push: the encoded body, set by the stage


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
        # The stage's results: a chunk, with its checksum (push) or 1 if it is intact, else 0 (pull).
        self._results: deque[tuple[StagedChunk, int]] = deque()
        self._parts = list(open_parts(order, self.kind, self._codec, self._context))
        self._total = sum(part.nbytes for part in self._parts)
        self._failure: Exception | None = None  # error of the stage's thread
        self._more = False  # a batch was full: more frames may be there without a poll
        self._in_place = False  # the calling thread also does the stage's work

    def run(self, cancel: threading.Event, progress: Progress | None) -> TransferStats:
        """Move everything. Raises UnavailableSlave if a slave owes us something and nothing moves until the
        deadline.
        """
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
        self._results.clear()
        self._context.term()  # after this, libzmq no longer reads the caller's arrays
        self._waker.close()

    def _process_chunk(self, staged: StagedChunk) -> None:
        """Process a chunk, on the stage's thread if it has one."""
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
        """Encode and checksum, or check and copy; runs on the stage's thread."""

    @abstractmethod
    def on_processed(self, staged: StagedChunk, value: int) -> None:
        """Continue with a chunk; `value` is the result of `process_chunk`."""

    @abstractmethod
    def _moved_bytes(self) -> int: ...

    def on_stream_lost(self, part: LanePart) -> None:
        """Process the loss of a connection; the next connection resumes."""

    def after_frames(self, now: float) -> None:
        """Do the work at the end of each pass of the loop."""

    def on_welcome(self, part: LanePart, welcome: streams.Welcome, now: float) -> None:
        """Process the slave's acceptance of the stream."""

    def on_want(self, part: LanePart, chunks: tuple[Range, ...]) -> None:
        raise RemoteProtocolError(f"{self._name}: slave {part.slave.name} asked for {chunks[:1]}, but this is a pull")

    def on_chunk(self, part: LanePart, frame: Arrived, now: float) -> None:
        raise RemoteProtocolError(f"{self._name}: slave {part.slave.name} sent a chunk, but this is a push")


def _io_threads(grant: Grant) -> int:
    """Return one I/O thread per encrypted lane, at most the cores: libzmq encrypts a connection in one of these
    threads.
    """
    lanes = max((len(slave.lanes) for slave in grant.slaves if slave.key), default=1)
    return max(1, min(lanes, available_cores()))
