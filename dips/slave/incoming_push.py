"""One open push as its receiver knows it: which ranks bring what, over which streams, and how far it is.

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
    """A push: gathering HELLOs → moving → frozen; refused from the first two; over when dropped."""

    GATHERING = "waits for HELLOs"
    MOVING = "moving"
    FROZEN = "staged"
    REFUSED = "refused"
    OVER = "dropped"


@dataclass(eq=False, slots=True)
class InStream:
    """One rank's stream on one lane; its epochs come and go, its chunks stay."""

    push: IncomingPush
    rank: int
    lane: int
    pieces: tuple[Range, ...]
    intake: Intake
    epoch: int
    stream: int
    peer: bytes
    ready: int  # so many of its pieces may be asked for

    def is_slow(self, now: float) -> bool:
        """It was asked, and nothing comes."""
        return self.intake.in_flight > 0 and now - self.intake.last_byte_at > SLOW_S

    def done_message(self) -> Say:
        """Tell the rank that all of it is here."""
        return Say(self.lane, self.peer, Kind.DONE, self.stream, streams.encode_done(self.intake.total))


@dataclass(eq=False, slots=True)
class IncomingPush:
    """One open push."""

    push: PushId
    places: dict[int, int]  # rank → its place in the line of all pushes
    targets: Arrays  # layer → its buffer; empty once nothing may be written
    codec: Codec
    total: int  # bytes that travel; until all ranks are here, as if they cut no block in two
    gather_s: float  # so long after a HELLO the next one is waited for
    moved_at: float  # when a byte last came, or a rank for the first time
    rate: Rate
    phase: PushPhase = PushPhase.GATHERING
    reason: str = ""
    code: str = "refused"  # told to ranks whose HELLO comes after its refusal
    copying: int = 0  # threads that may be writing into a target
    streams: dict[tuple[int, int], InStream] = field(default_factory=dict)  # (rank, lane)

    @property
    def live(self) -> bool:
        return self.phase in (PushPhase.GATHERING, PushPhase.MOVING)

    @property
    def ranges(self) -> int:
        """How many its HELLOs have named."""
        return sum(len(stream.pieces) for stream in self.streams.values())

    @property
    def received_bytes(self) -> int:
        """Bytes in their place."""
        return sum(s.intake.total - s.intake.left for s in self.streams.values())

    @property
    def is_whole(self) -> bool:
        """Whether every rank's stream has brought all of its ranges."""
        return all(s.intake.complete for s in self.streams.values())

    def silent_since(self) -> float | None:
        """Since when ranks owe us something and nothing came; None while nothing is owed.

        Nobody owes anything before all ranks are here, while it waits for its turn or for room in the pool, or for
        what is here and being checked.
        """
        owing = [s.intake.last_byte_at for s in self.streams.values() if s.intake.in_flight]
        return max(self.moved_at, *owing) if owing and self.phase is PushPhase.MOVING else None

    def over_at(self, stall_s: float) -> float:
        """When it ends unless something comes: by a stall, or because the last ranks do not follow the first."""
        if self.phase is PushPhase.GATHERING:
            return self.moved_at + self.gather_s if self.streams else inf
        silent_since = self.silent_since()
        return inf if silent_since is None else silent_since + stall_s

    def refuse_hello(
        self, lane: int, name: StreamName, pieces: tuple[Range, ...], misfit: str | None
    ) -> tuple[str, str] | None:
        """Code and message if this HELLO may not join, else None.

        misfit  why its ranges are not of the layers that are held here
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
        """Say where the ranges of all ranks overlap, leave gaps or lie outside; [] if each element has one owner."""
        claims: dict[str, list[Range]] = {}
        for (rank, _), stream in sorted(self.streams.items()):
            outside = layout.describe_outside(stream.pieces)
            if outside:
                return [f"rank {rank}: {outside}"]
            claims.setdefault(f"rank {rank}", []).extend(stream.pieces)
        return describe_uncovered(layout, claims)

    def describe_missing(self) -> str:
        """Say what has not come, for a person."""
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
    """A chunk that was asked for and came; its checksum is still to be believed."""

    stream: InStream
    chunk: Range
    header: Header
    body: Buffer
