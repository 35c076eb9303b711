"""The sender's state of one open pull: the bytes that it is served from, its streams, and chunks in flight.

Pure bookkeeping under the sender's lock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain
from typing import Protocol

import numpy as np
import numpy.typing as npt

from dips.ids import PullId, VersionId
from dips.outer.updates import Update
from dips.transport.credit import MOST_BYTES, MOST_CHUNKS
from dips.transport.rate import Rate
from dips.wire.chunks import LayerLayout, Range
from dips.wire.streams import StreamName

Bytes = npt.NDArray[np.uint8]


class Tracker(Protocol):
    """Whether libzmq still reads a body that it sends without a copy."""

    @property
    def done(self) -> bool: ...


@dataclass(eq=False, slots=True)
class PullSource:
    """The bytes that a pull is served from, and the number of their chunks not yet released by libzmq."""

    views: dict[int, Bytes]
    in_flight: int = 0


@dataclass(eq=False, slots=True)
class OutStream:
    """The stream of one rank on one lane, in its present epoch."""

    pull: OutgoingPull
    lane: int
    peer: bytes
    epoch: int
    stream: int
    named: int  # bytes of the ranges in its HELLO
    parked: deque[Range] = field(default_factory=deque)  # asked for, and waiting until libzmq releases what was sent
    held: deque[tuple[Tracker, int, PullSource]] = field(default_factory=deque)  # libzmq may still read these
    queued: int = 0  # bytes asked for, not parked and not handed to libzmq
    jobs: int = 0  # chunks asked for, not parked and not handed to libzmq
    over: bool = False  # DONE, superseded by a later epoch, or unreachable
    updates: tuple[Update, ...] = ()  # contents of each of its chunks; none: parameters
    ranges: type[Range] = Range  # class of its chunks, whose `nbytes` are the bytes as encoded

    def unsent(self, more: Iterable[Range] = ()) -> tuple[int, int]:
        """Return (chunks, bytes) that are asked for, with `more`, and not sent: the rank counts each of them as in
        flight.
        """
        waiting = [chunk.nbytes for chunk in chain(self.parked, more)]
        return self.jobs + len(waiting), self.queued + sum(waiting)

    def has_room(self, nbytes: int) -> bool:
        """Whether libzmq may be given `nbytes` more: twice the credit, since it releases late what has arrived."""
        if self.jobs + len(self.held) >= 2 * MOST_CHUNKS:
            return False
        return self.queued + sum(n for _, n, _ in self.held) + nbytes <= 2 * MOST_BYTES

    def reap_sent(self) -> int:
        """Forget trackers that are done; return how many bytes they held."""
        freed = 0
        while self.held and self.held[0][0].done:
            _, nbytes, source = self.held.popleft()
            source.in_flight -= 1
            freed += nbytes
        return freed


@dataclass(eq=False, slots=True)
class OutgoingPull:
    """One open pull."""

    pull: PullId
    version: VersionId
    source: PullSource
    moved_at: float  # when a rank last asked, or libzmq released a chunk
    rate: Rate
    closed: str = ""  # the reason, once it is no longer served
    streams: list[OutStream] = field(default_factory=list)  # superseded ones too, while libzmq reads for them
    out: int = 0  # bytes that libzmq has sent
    chain: tuple[Update, ...] = ()  # the updates that led to the version, pinned as long as it is
    former: list[PullSource] = field(default_factory=list)  # earlier sources that still have chunks in flight

    def find_updates(self, held: str) -> tuple[Update, ...]:
        """Return the updates from the version that a rank holds to the pull's; () if they are not available."""
        begins = [str(update.parent) for update in self.chain]
        return self.chain[begins.index(held) :] if held in begins else ()

    @property
    def idle(self) -> bool:
        return not any(s.jobs or s.held for s in self.streams)

    @property
    def owed(self) -> bool:
        """Whether chunks were sent that a rank does not take; chunks not yet sent are not the rank's fault."""
        return not self.closed and any(s.held for s in self.streams)

    def refuse_hello(self, latest: OutStream | None, lane: int, name: StreamName) -> tuple[str, str] | None:
        """Return (code, message) if this HELLO may not join, else None; `latest` is the rank's newest stream."""
        if self.closed:
            return "stale_push", f"pull {self.pull} is over: {self.closed}"
        if name.version != str(self.version):
            return "stale_version", f"pull {self.pull} is open on {self.version}, got {name.version!r}"
        if name.lane != lane:
            return "invalid", f"{name} came on lane {lane}"
        if latest is not None and name.epoch <= latest.epoch:
            return "stale_push", f"epoch {name.epoch} of rank {name.rank} is over, {latest.epoch} is the last"
        return None


def cut_updates(layout: LayerLayout, updates: tuple[Update, ...], chunk: Range) -> bytes:
    """Return the body of a chunk: for each update the step sizes of the blocks that it touches, then its codes."""
    begin, end = layout.place_range(chunk)
    blocks, parts = layout.place_blocks(chunk), list[memoryview]()
    for update in updates:
        if update.steps:
            parts.append(update.steps[chunk.layer][blocks].view(np.uint8).data)
        parts.append(update.codes[chunk.layer][begin:end].view(np.uint8).data)
    return b"".join(parts)
