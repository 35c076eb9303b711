"""The receiver's state of one open push: its ranks, their ranges and streams, and its progress.

Pure bookkeeping under the receiver's lock.
"""

from __future__ import annotations

from dataclasses import field
from enum import Enum
from math import inf

from dips.codecs import Codec
from dips.dataclass import dataclass
from dips.ids import PushId
from dips.slave.moves import Say
from dips.slave.ports import Arrays
from dips.transport.intake import Intake
from dips.transport.rate import Rate
from dips.wire import streams
from dips.wire.chunks import LayerLayout, Range, describe_uncovered
from dips.wire.frame import Buffer, Header, Kind
from dips.wire.streams import StreamName

SLOW_S = 1.0  # silence after which a stream that was asked loses its turn to others


class PushPhase(Enum):
    """Phases of a push: gathering HELLOs → moving → frozen; refused from the first two; over when dropped."""

    GATHERING = "waits for HELLOs"
    MOVING = "moving"
    FROZEN = "staged"
    REFUSED = "refused"
    OVER = "dropped"


@dataclass(eq=False, slots=True)
class InStream:
    """One rank's stream on one lane; chunks are kept when a reconnect raises the epoch."""

    push: IncomingPush
    rank: int
    lane: int
    pieces: tuple[Range, ...]
    intake: Intake
    epoch: int
    stream: int
    peer: bytes
    ready: int  # number of its pieces that may be asked for

    def is_slow(self, now: float) -> bool:
        """Whether the stream was asked and no byte has come for SLOW_S."""
        return self.intake.in_flight > 0 and now - self.intake.last_byte_at > SLOW_S

    def done_message(self) -> Say:
        """Return the message that tells the rank that all its bytes are here."""
        return Say(self.lane, self.peer, Kind.DONE, self.stream, streams.encode_done(self.intake.total))


@dataclass(eq=False, slots=True)
class IncomingPush:
    """One open push."""

    push: PushId
    places: dict[int, int]  # rank → its place in the line of all pushes
    targets: Arrays  # layer → its buffer; empty when nothing may be written any more
    codec: Codec
    total: int  # encoded bytes; until all ranks are here, as if no rank cut a block in two
    gather_s: float  # longest wait after a HELLO for the next one
    moved_at: float  # when the last byte came, or a rank for the first time
    rate: Rate
    phase: PushPhase = PushPhase.GATHERING
    reason: str = ""
    code: str = "refused"  # error code for ranks whose HELLO comes after its refusal
    copying: int = 0  # threads that may be writing into a target
    streams: dict[tuple[int, int], InStream] = field(default_factory=dict)  # (rank, lane)

    @property
    def live(self) -> bool:
        return self.phase in (PushPhase.GATHERING, PushPhase.MOVING)

    @property
    def ranges(self) -> int:
        """Number of ranges in its HELLOs."""
        return sum(len(stream.pieces) for stream in self.streams.values())

    @property
    def received_bytes(self) -> int:
        """Bytes that are in place."""
        return sum(s.intake.total - s.intake.left for s in self.streams.values())

    @property
    def is_whole(self) -> bool:
        """Whether every rank's stream has brought all of its ranges."""
        return all(s.intake.complete for s in self.streams.values())

    def silent_since(self) -> float | None:
        """Return the time of the last byte while ranks owe bytes; None while they owe none. Ranks owe nothing before
        all of them are here, while the push waits for its turn or for room in the pool, or for chunks that have arrived
        and are being checked.
        """
        owing = [s.intake.last_byte_at for s in self.streams.values() if s.intake.in_flight]
        return max(self.moved_at, *owing) if owing and self.phase is PushPhase.MOVING else None

    def over_at(self, stall_s: float) -> float:
        """Return when the push ends unless bytes come: by a stall, or because the last ranks have not come."""
        if self.phase is PushPhase.GATHERING:
            return self.moved_at + self.gather_s if self.streams else inf
        silent_since = self.silent_since()
        return inf if silent_since is None else silent_since + stall_s

    def refuse_hello(
        self, lane: int, name: StreamName, pieces: tuple[Range, ...], misfit: str | None
    ) -> tuple[str, str] | None:
        """Return (code, message) if this HELLO may not join, else None.

        misfit  why its ranges do not match the layers held here
        """
        if self.phase is PushPhase.REFUSED:
            return self.code, f"push {self.push} was refused: {self.reason}"
        if name.rank not in self.places or name.lane != lane or name.version:
            return "invalid", f"push {self.push} has ranks {sorted(self.places)}, got {name} on lane {lane}"
        known = self.streams.get((name.rank, lane))
        if known is None:
            return ("ranges", f"rank {name.rank}: {misfit}") if misfit else None
        if name.epoch <= known.epoch:
            return "stale_push", f"epoch {name.epoch} of rank {name.rank} is over, {known.epoch} is the last"
        if pieces != known.pieces:
            return "invalid", f"rank {name.rank} names other ranges than before its connection broke"
        return None

    def find_problems(self, layout: LayerLayout) -> list[str]:
        """Describe where the ranges of all ranks overlap, leave gaps or are outside; [] if each element has one."""
        claims: dict[str, list[Range]] = {}
        for (rank, _), stream in sorted(self.streams.items()):
            outside = layout.describe_outside(stream.pieces)
            if outside:
                return [f"rank {rank}: {outside}"]
            claims.setdefault(f"rank {rank}", []).extend(stream.pieces)
        return describe_uncovered(layout, claims)

    def describe_missing(self) -> str:
        """Describe the missing ranks or bytes, for people."""
        silent = sorted(set(self.places) - {rank for rank, _ in self.streams})
        if silent:
            return f"ranks {silent} never said HELLO"
        return ", ".join(
            f"rank {rank} brought {s.intake.total - s.intake.left} of {s.intake.total} bytes"
            for (rank, _), s in sorted(self.streams.items())
            if not s.intake.complete
        )


@dataclass(frozen=True, slots=True)
class ClaimedChunk:
    """A chunk that was asked for and came; its checksum is not yet verified."""

    stream: InStream
    chunk: Range
    header: Header
    body: Buffer
