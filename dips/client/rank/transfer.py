"""One rank's push or pull: its own bytes, directly to and from every slave of the grant.

A push sends HELLO to every slave at once (also without ranges: slaves wait for all ranks) and then the chunks that
they ask for. A pull asks the slaves in the grant's order, checks each chunk and copies it into the caller's arrays. All
sockets and threads are made for one transfer, in the calling process (no context is ever inherited by a fork), and
closed when the call returns: the arrays are the caller's again, also after an error. A lost connection is resumed. No
torch here.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import numpy as np
import xxhash

from dips.client.rank.fragments import FragmentGate
from dips.client.rank.lane_parts import LanePart
from dips.client.rank.transfer_loop import DEPTH, TRANSIT_BYTES, StagedChunk, TransferLoop
from dips.client.rank.transfer_types import (
    EncodeChunk,
    LayerOrder,
    Progress,
    TransferCancelled,
    TransferIdentity,
    TransferRate,
    TransferStats,
)
from dips.errors import RemoteProtocolError, UnavailableSlave
from dips.ids import VersionId
from dips.protocol.effects import Grant
from dips.transport.intake import Intake, LinkRate
from dips.transport.pool import Transit
from dips.transport.shares import Piece
from dips.transport.stream import Arrived
from dips.wire import bodies, streams
from dips.wire.chunks import Range, pulled_range_type, range_type
from dips.wire.frame import BadFrame, Buffer, Kind, check_body, pack_header

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
    order = LayerOrder(grant, base, pieces, stall_s, clock, gate=gate)
    return PushTransfer(order, encode).run(cancel or threading.Event(), progress)


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
    return PullTransfer(LayerOrder(grant, base, pieces, stall_s, clock, held, gate)).run(
        cancel or threading.Event(), progress
    )


class PushTransfer(TransferLoop):
    """The push direction: sends the chunks that slaves ask for."""

    kind = "push"

    def __init__(self, order: LayerOrder, encode: EncodeChunk | None) -> None:
        super().__init__(order)
        self._encode = encode or self._encode_elements
        self._ranges = range_type(self._codec.dtype)

    def _encode_elements(self, chunk: Range, view: memoryview) -> Buffer:
        return bodies.encode(self._codec, np.frombuffer(view, np.float32))

    def on_want(self, part: LanePart, chunks: tuple[Range, ...]) -> None:
        for chunk in chunks:
            view = part.share.view_chunk(chunk)
            if view is None:
                raise RemoteProtocolError(f"{self._name}: slave {part.slave.name} asks for {chunk}, not held here")
            if not self._put(StagedChunk(part, chunk, view, part.stream.id)):
                raise RemoteProtocolError(f"{self._name}: slave {part.slave.name} asks for more than {DEPTH} chunks")

    def process_chunk(self, staged: StagedChunk) -> int:
        staged.body = self._encode(staged.chunk, staged.view)
        return xxhash.xxh3_64_intdigest(staged.body)

    def on_processed(self, staged: StagedChunk, value: int) -> None:
        stream = staged.part.stream
        if staged.stream == stream.id and not staged.part.done:
            stream.post_frame(pack_header(stream.chunk_header(self._ranges(*staged.chunk), value)), staged.body)
            stream.flush_outbox()
            staged.part.posted += len(staged.body)

    def after_frames(self, now: float) -> None:
        """Offer fragments that have been frozen since the last pass."""
        for part in self._parts:
            if not part.done:
                part.stream.tell_ready()

    def _moved_bytes(self) -> int:
        return sum(p.nbytes if p.done else min(p.posted, p.nbytes) for p in self._parts)


class PullTransfer(TransferLoop):
    """The pull direction: asks for chunks in the order of the grant, and checks those that arrive."""

    kind = "pull"

    def __init__(self, order: LayerOrder) -> None:
        super().__init__(order)
        self._pool = Transit(TRANSIT_BYTES)
        self._link = LinkRate()

    def on_welcome(self, part: LanePart, welcome: streams.Welcome, now: float) -> None:
        kind = pulled_range_type(welcome.dtype, welcome.depth)
        if welcome.depth and self._order.held is None:
            raise BadFrame("message", "updates are offered to a rank that holds no version")
        if part.intake is None:
            part.ranges, ranges = kind, tuple(kind(*piece) for piece in part.share.ranges)
            ready = part.count_ready(self._order.gate)
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
            intake.release_pieces(part.count_ready(self._order.gate))
            if asking < CONCURRENT_STREAMS and not intake.idle:
                asking += not (intake.in_flight and now - intake.last_byte_at > SLOW_S)
                for unit in intake.ask_chunks(now, self._total):
                    part.stream.send_message(Kind.WANT, streams.encode_want(unit))
            part.stream.waits = (
                intake.in_flight > 0
            )  # also for a stream that is not asked any more, which then owes nothing

    def on_chunk(self, part: LanePart, frame: Arrived, now: float) -> None:
        chunk = part.intake.claim_chunk(frame.header, now) if part.intake is not None else None
        if chunk is None:
            return  # requested on a former connection, or never: ignored
        view = part.share.view_chunk(chunk)
        assert view is not None, chunk
        queued = self._put(StagedChunk(part, chunk, view, part.stream.id, frame))
        assert queued, "the queue is as deep as the pool"

    def process_chunk(self, staged: StagedChunk) -> int:
        assert staged.frame is not None
        try:
            check_body(staged.frame.header, staged.frame.body)
        except BadFrame:
            return 0
        bodies.put_pulled(staged.chunk, staged.frame.body, np.frombuffer(staged.view, np.float32))
        return 1

    def on_processed(self, staged: StagedChunk, value: int) -> None:
        intake = staged.part.intake
        assert intake is not None
        if not value:
            intake.mark_wrong(staged.chunk)
            return
        intake.mark_received(staged.chunk)
        if self._order.gate is not None:
            self._order.gate.record_arrived(staged.chunk.layer, staged.chunk.length)
        if intake.complete:
            staged.part.stream.send_message(Kind.DONE, streams.encode_done(intake.total))
            staged.part.stream.flush_outbox()
            self.finish_part(staged.part)

    def on_stream_lost(self, part: LanePart) -> None:
        part.stream.waits = False
        if part.intake is not None:
            part.intake.on_connection_lost()

    def _moved_bytes(self) -> int:
        return sum(p.intake.total - p.intake.left for p in self._parts if p.intake is not None)
