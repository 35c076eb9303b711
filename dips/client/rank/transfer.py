"""One rank's push or pull: its own bytes, straight to and from every slave of the grant.

A push says HELLO to every slave at once (with no ranges too: slaves wait for all ranks) and sends what it is asked. A
pull asks the slaves in the order of the grant, checks each chunk and copies it into the caller's arrays. Everything is
made for one transfer, in the calling process (no context is ever inherited by a fork), and gone when the call returns:
the arrays are the caller's again, also after an error. A broken connection is resumed. No torch here.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import numpy as np
import xxhash

from dips.client.rank.transfer_loop import (
    DEPTH,
    TRANSIT_BYTES,
    LayerOrder,
    Part,
    Progress,
    StagedChunk,
    TransferCancelled,
    TransferIdentity,
    TransferLoop,
    TransferRate,
    TransferStats,
)
from dips.errors import RemoteProtocolError
from dips.protocol.effects import Grant
from dips.transport.intake import Intake
from dips.transport.pool import Transit
from dips.transport.shares import Piece
from dips.transport.stream import Arrived
from dips.wire import streams
from dips.wire.chunks import Range
from dips.wire.frame import BadFrame, Buffer, Kind, check_body, pack

__all__ = [
    "Encode",
    "Piece",
    "Progress",
    "TransferCancelled",
    "TransferIdentity",
    "TransferRate",
    "TransferStats",
    "pull",
    "push",
]

Encode = Callable[[Range, memoryview], Buffer]  # a chunk and its elements in the caller's array → its body

ASKERS = 2  # slaves that a rank pulls from at once: the next begins while the last one drains
SLOW_S = 1.0  # silence after which the next slave is asked too


def push(
    grant: Grant,
    base: TransferIdentity,
    pieces: Sequence[Piece],
    *,
    stall_s: float = 30.0,
    cancel: threading.Event | None = None,
    progress: Progress | None = None,
    encode: Encode | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> TransferStats:
    """Bring `pieces` to the slaves of the grant; return when every slave has all of this rank's bytes.

    The arrays must not change until this returns. Legal after the push was granted; every rank calls it, also one
    that holds nothing. Under a grant in a lossy codec the pieces hold differences to the grant's base.

    encode  makes the body of each chunk, on another thread where cores are to be had, the same whenever it is asked
            again; None: the codec does
    Errors  UnavailableSlave: deadline passed, or a slave gave the push up. StaleIncarnation: a slave was restarted.
            StalePush: the push is over. LocalProtocolError: all ranks together do not hold each element exactly once.
            TransferCancelled.
    """
    return PushTransfer(LayerOrder(grant, base, pieces, stall_s, clock), encode).run(
        cancel or threading.Event(), progress
    )


def pull(
    grant: Grant,
    base: TransferIdentity,
    pieces: Sequence[Piece],
    *,
    stall_s: float = 30.0,
    cancel: threading.Event | None = None,
    progress: Progress | None = None,
    first_epoch: int = 1,
    clock: Callable[[], float] = time.monotonic,
) -> TransferStats:
    """Fill `pieces` with the grant's version; return when every element is there, checked.

    After an error the arrays hold anything. A pull may come in several calls, one after the other, each with other
    pieces and a `first_epoch` above the last one's `TransferStats.last_epoch`.
    Errors  as for push, and StaleVersion: the pull is open on another version.
    """
    return PullTransfer(LayerOrder(grant, base, pieces, stall_s, clock, first_epoch)).run(
        cancel or threading.Event(), progress
    )


class PushTransfer(TransferLoop):
    """Sends what it is asked."""

    kind = "push"

    def __init__(self, order: LayerOrder, encode: Encode | None) -> None:
        super().__init__(order)
        self._encode = encode or self._as_they_are

    def _as_they_are(self, chunk: Range, view: memoryview) -> Buffer:
        return self._codec.encode(np.frombuffer(view, np.float32))

    def want(self, part: Part, chunks: tuple[Range, ...]) -> None:
        for chunk in chunks:
            view = part.share.view(chunk)
            if view is None:
                raise RemoteProtocolError(f"{self._what}: slave {part.slave.name} asks for {chunk}, not held here")
            if not self._put(StagedChunk(part, chunk, view, part.stream.id)):
                raise RemoteProtocolError(f"{self._what}: slave {part.slave.name} asks for more than {DEPTH} chunks")

    def heavy(self, job: StagedChunk) -> int:
        job.body = self._encode(job.chunk, job.view)
        return xxhash.xxh3_64_intdigest(job.body)

    def result(self, job: StagedChunk, value: int) -> None:
        stream = job.part.stream
        if job.stream == stream.id and not job.part.done:
            stream.post(pack(stream.header(self._codec.range(*job.chunk), value)), job.body)
            stream.flush()
            job.part.posted += len(job.body)

    def _moved(self) -> int:
        return sum(p.nbytes if p.done else min(p.posted, p.nbytes) for p in self._parts)


class PullTransfer(TransferLoop):
    """Asks, in the order of the grant, and checks what comes."""

    kind = "pull"

    def __init__(self, order: LayerOrder) -> None:
        super().__init__(order)
        self._pool = Transit(TRANSIT_BYTES)

    def welcome(self, part: Part, welcome: streams.Welcome, now: float) -> None:
        if part.intake is None:
            part.intake = Intake(part.share.ranges, welcome.chunk_bytes, self._pool, now)

    def advance(self, now: float) -> None:
        """Ask the first ASKERS slaves that have something to give; who is late is overtaken."""
        asking = 0
        for part in self._parts:
            intake = part.intake
            if part.done or intake is None or not part.stream.welcomed or asking == ASKERS:
                continue
            if not (intake.in_flight and now - intake.heard_at > SLOW_S):
                asking += 1
            for unit in intake.ask(now, self._total):
                part.stream.say(Kind.WANT, streams.encode_want(unit))
            part.stream.waits = intake.in_flight > 0

    def chunk(self, part: Part, frame: Arrived, now: float) -> None:
        chunk = part.intake.claim(frame.header, now) if part.intake is not None else None
        if chunk is None:
            return  # it was asked before the connection broke, or never: changes nothing
        view = part.share.view(chunk)
        assert view is not None, chunk
        assert self._put(StagedChunk(part, chunk, view, part.stream.id, frame)), "the queue is as deep as the pool"

    def heavy(self, job: StagedChunk) -> int:
        assert job.frame is not None
        try:
            check_body(job.frame.header, job.frame.body)
        except BadFrame:
            return 0
        np.copyto(np.frombuffer(job.view, np.uint8), np.frombuffer(job.frame.body, np.uint8))
        return 1

    def result(self, job: StagedChunk, value: int) -> None:
        intake = job.part.intake
        assert intake is not None
        if not value:
            intake.wrong(job.chunk)
            return
        intake.here(job.chunk)
        if intake.complete:
            job.part.stream.say(Kind.DONE, streams.encode_done(intake.total))
            job.part.stream.flush()
            self.finish(job.part)

    def broke(self, part: Part) -> None:
        part.stream.waits = False
        if part.intake is not None:
            part.intake.lost()

    def _moved(self) -> int:
        return sum(p.intake.total - p.intake.left for p in self._parts if p.intake is not None)
