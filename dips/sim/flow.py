"""The lane of a simulated slave, in the place of the ROUTER socket under the real data flow (slave/flow.py).

Frames of ranks arrive as they were sent, and frames for a rank are passed to the rank's end of their connection.
Delays, losses and broken streams are simulated on the ranks' side (streams.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from dips.dataclass import dataclass
from dips.sim.loop import SimLoop
from dips.slave.sender import ChunkSend
from dips.transport.lane import Handler, Outgoing
from dips.transport.seal import Admit, KeyPair, Sessions
from dips.wire.frame import CHECKSUMS, Buffer, FrameGuard, Header, Kind, Range


class SimTracker:
    """The tracker of a body that libzmq sends without a copy."""

    __slots__ = ("done",)

    def __init__(self) -> None:
        self.done = False


class RankEnd(Protocol):
    """The rank's end of a connection."""

    def on_message(self, peer: bytes, kind: Kind, body: Buffer) -> None:
        """Process a message of the slave."""

    def carry_chunk(self, chunk: Range, body: Buffer, tracker: SimTracker) -> None:
        """Carry a chunk to the rank; `body` is read until the tracker is done."""


@dataclass(frozen=True, slots=True)
class FramePart:
    """A part of a message, as a frame of ZeroMQ has it."""

    buffer: Buffer


class SimLane:
    """Implements LanePort. All lanes count as encrypted: who sends a key is assumed to hold it."""

    sessions: Sessions | None = None

    def __init__(
        self,
        loop: SimLoop,
        touched: Callable[[], None],
        pause: Callable[[float], None],
        turn_s: float,
        index: int,
        host: str,
        port: int,
        stall_s: float,
        key: KeyPair | None,
        admit: Admit,
        most: int,
    ) -> None:
        """`touched` is called when a chunk arrives: bytes of a slot may change; `pause` lets other threads work.

        `turn_s` is between turns without frames.
        """
        self.loop, self.index, self.address = loop, index, f"{host}:{port}"
        self._touched, self._pause, self._turn_s, self._admit = touched, pause, turn_s, admit
        self._handler: Handler | None = None
        self._reading = False  # whether it passes a frame on
        self._ends: dict[bytes, RankEnd] = {}
        self._sent: list[SimTracker] = []  # of bodies that libzmq may still hold, and of some that it did
        self._looks = 0  # how many there are when those that are done are left out next

    def start(self, handler: Handler) -> None:
        self._handler = handler
        self._run_turns()

    def post_frame(self, frame: Outgoing) -> None:
        end, watch = self._ends.get(frame.peer), frame.watch
        if watch is None:
            if end is not None and isinstance(frame.header, Header):
                end.on_message(frame.peer, frame.header.kind, frame.body)
        elif end is None or not watch.still_wanted():
            watch.on_not_sent()
        else:
            assert isinstance(watch, ChunkSend)
            tracker = SimTracker()
            self._sent.append(tracker)
            if len(self._sent) > self._looks:
                self._sent = [sent for sent in self._sent if not sent.done]
                self._looks = 2 * len(self._sent)
            watch.on_sent(tracker)
            end.carry_chunk(watch.chunk, frame.body, tracker)

    def find_guard(self, peer: bytes) -> FrameGuard | None:
        return CHECKSUMS

    def wake(self) -> None:
        if not self._reading:  # else a turn follows anyway
            self.loop.call_soon(self._take_turn)

    def stop(self) -> None:
        """End the lane's thread; what other threads do meanwhile is done."""
        self._pause(0.0)

    def close(self) -> None:
        """Close all connections, so that libzmq holds no body any more."""
        self._ends.clear()
        for tracker in self._sent:
            tracker.done = True

    def _run_turns(self) -> None:
        self._take_turn()
        self.loop.call_later(self._turn_s, self._run_turns)

    def _take_turn(self) -> None:
        assert self._handler is not None
        self._handler.on_turn(self.index)

    @property
    def is_served(self) -> bool:
        """Whether the slave has begun to serve it."""
        return self._handler is not None

    # ---- for the ranks' ends -----------------------------------------------------------------------------------------

    def connect(self, peer: bytes, end: RankEnd, key: str) -> bool:
        """Open a connection; return False if it is refused, since its key is not admitted."""
        if not (self.is_served and self._admit(key)):
            return False
        self._ends[peer] = end
        return True

    def drop_connection(self, peer: bytes) -> None:
        """Close a connection; the slave notices when it next sends."""
        self._ends.pop(peer, None)

    def take_chunk(self, peer: bytes, header: bytes, body: Buffer) -> None:
        """Pass a chunk that has arrived to the slave, which may copy it into a slot."""
        self._touched()
        self.take_frame(peer, header, body)

    def take_frame(self, peer: bytes, header: bytes, body: Buffer) -> None:
        """Pass a frame that has arrived to the slave."""
        self.loop.deliver(self._on_frame, peer, header, body)

    def _on_frame(self, peer: bytes, header: bytes, body: Buffer) -> None:
        assert self._handler is not None
        self._reading = True
        self._handler.on_message(self.index, peer, [FramePart(header), FramePart(body)])  # type: ignore[list-item]
        self._reading = False
        self._take_turn()
