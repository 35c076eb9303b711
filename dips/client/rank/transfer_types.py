"""The inputs and results of one rank's transfer. No torch, no socket."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dips.client.rank.fragments import FragmentGate
from dips.errors import DipsError
from dips.ids import VersionId
from dips.protocol.effects import Grant
from dips.protocol.heartbeats import remaining_s
from dips.transport.curve import KeyPair
from dips.transport.shares import Piece
from dips.wire.chunks import Range
from dips.wire.frame import Buffer

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


@dataclass(frozen=True, slots=True)
class LayerOrder:
    """The pieces to be moved, and how long to wait for a silent slave."""

    grant: Grant
    base: TransferIdentity
    pieces: Sequence[Piece]
    stall_s: float
    clock: Callable[[], float]
    held: VersionId | None = None  # pull: the version that the pieces hold, which updates may be added to
    gate: FragmentGate | None = None  # opens the pieces' fragments one after the other; None: all may move at once
