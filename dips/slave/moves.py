"""Actions of the data flow, returned by its pure halves (receiver.py, sender.py) and carried out by flow.py.

Messages and wake-ups for the lanes (Say, Wake), refusals to count (FrameRefused) and events for the shard
(`FlowEvent`), as values, so that both halves can be tested without a socket, and so that nothing is called while a lock
is held.
"""

from __future__ import annotations

from dips.dataclass import dataclass
from dips.errors import StalePush
from dips.ids import PullId, PushId
from dips.wire import streams
from dips.wire.frame import Kind
from dips.wire.streams import StreamName


@dataclass(frozen=True, slots=True)
class Say:
    """Send one message (not a CHUNK) to one peer of one lane."""

    lane: int
    peer: bytes
    kind: Kind
    stream: int
    body: bytes


@dataclass(frozen=True, slots=True)
class Wake:
    """Wake a lane that can ask for more now."""

    lane: int


@dataclass(frozen=True, slots=True)
class Staged:
    """All ranges of the push are in its buffers and verified; they are no longer written."""

    push: PushId
    nbytes: int


@dataclass(frozen=True, slots=True)
class PushOver:
    """The push cannot be completed (ranges overlap or leave gaps, it stalled); its buffers are no longer written."""

    push: PushId
    reason: str


@dataclass(frozen=True, slots=True)
class FrameRefused:
    """Count a frame that was refused although it arrived as it was sent: its push is over, and it is not asked for
    again.
    """

    reason: str  # of REASONS


@dataclass(frozen=True, slots=True)
class Released:
    """The pull's source is no longer read, neither for a rank nor by libzmq. Returned once for each opened pull."""

    pull: PullId
    reason: str


@dataclass(frozen=True, slots=True)
class SourceMoved:
    """The former source of a pull is no longer read after `move_pull`. Not returned after Released."""

    pull: PullId


FlowEvent = Staged | PushOver | Released | SourceMoved  # events for the shard (`ports.Flow`)
Move = Say | Wake | FrameRefused | FlowEvent


def error_message(lane: int, peer: bytes, stream: int, code: str, text: str) -> Say:
    """Return the message that refuses a HELLO."""
    return Say(lane, peer, Kind.ERROR, stream, streams.encode_error(code, text))


class Tombstones:
    """The highest closed (incarnation, seq) of each cluster, which tells a closed transfer from one not open yet."""

    def __init__(self) -> None:
        self._highest: dict[str, tuple[int, int]] = {}

    def close(self, transfer: PushId | PullId) -> None:
        """Close this transfer of its cluster, and all before it."""
        self._highest[transfer.cluster] = max(self._highest_of(transfer.cluster), (transfer.inc, transfer.seq))

    def is_closed(self, transfer: PushId | PullId) -> bool:
        """Whether the transfer is over, even if it was never open here."""
        return (transfer.inc, transfer.seq) <= self._highest_of(transfer.cluster)

    def refuse_closed(self, transfer: PushId | PullId) -> None:
        """Raise StalePush if the transfer is over."""
        if self.is_closed(transfer):
            inc, seq = self._highest_of(transfer.cluster)
            raise StalePush(f"{transfer} is at or below the highest closed one of {transfer.cluster}: {inc}/{seq}")

    def explain_not_open(self, name: StreamName) -> tuple[str, str]:
        """Return (code, message) for the HELLO of a push or pull that is not open."""
        text = f"{name.kind} {name.cluster}/{name.inc} {name.seq} at slave {name.slave}"
        if self.is_closed(PushId(name.cluster, name.inc, name.seq)):
            return "stale_push", f"{text} is over"
        return "unknown", f"{text} is not open yet: try again"

    def _highest_of(self, cluster: str) -> tuple[int, int]:
        return self._highest.get(cluster, (-1, -1))
