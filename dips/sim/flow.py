"""The simulated data flow of one slave's process: the real receiver and sender on a simulated network.

The work that the daemon does with ZeroMQ lanes and stages (slave/flow.py) is done here at once: a frame that arrives is
claimed, checked and copied in one event, and messages of receiver and sender are passed to the rank's end of the
stream. Delays, losses and broken streams are simulated on the ranks' side (streams.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from math import inf
from typing import Protocol

from dips.codecs import Codec
from dips.ids import PullId, PushId, VersionId
from dips.outer.updates import Update
from dips.protocol.heartbeats import Transfer
from dips.sim.loop import SimLoop
from dips.slave.admission import Admission, Keyring
from dips.slave.ports import Arrays, FlowEvent, FrameRefused, Move, Released, Say, Wake
from dips.slave.receiver import Receiver
from dips.slave.sender import ChunkSend, Sender
from dips.transport.intake import FLOOR_BYTES, Transit
from dips.wire.chunks import LayerLayout
from dips.wire.frame import BadFrame, Buffer, Header, Kind, Range, StreamName

TRANSIT_CHUNKS = 12  # chunks requested at once: few, so that the pool is exhausted at times
CONCURRENT_STREAMS = 4
TICK_S = 0.4  # interval of checks of stalls and rates while frames arrive
DRAIN_S = 0.05  # until a closed or moved pull is checked again


class RankEnd(Protocol):
    """The rank's end of a connection."""

    def on_message(self, peer: bytes, kind: Kind, body: bytes) -> None:
        """Process a message of the slave."""


class SimTracker:
    """The tracker of a body that libzmq sends without a copy."""

    __slots__ = ("done",)

    def __init__(self) -> None:
        self.done = False


class SimFlow:
    """Implements `dips.slave.ports.Flow`; `touched` is called whenever bytes of a slot or a version may change."""

    def __init__(
        self,
        loop: SimLoop,
        run: str,
        slave: str,
        layout: LayerLayout,
        stall_s: float,
        chunk_bytes: int,
        touched: Callable[[], None],
        frame_refused: Callable[[str], None],
    ) -> None:
        self._loop, self._touched, self._frame_refused = loop, touched, frame_refused
        self.receiver = Receiver(
            1, chunk_bytes, Transit(TRANSIT_CHUNKS * max(chunk_bytes, FLOOR_BYTES)), CONCURRENT_STREAMS, stall_s
        )
        self.sender = Sender(chunk_bytes, stall_s, loop.time)
        self.receiver.set_layers(layout)
        self.sender.set_layers(layout)
        self._keyring = Keyring()
        self._admission = Admission(run, slave, self.receiver, self.sender, self._keyring)
        self._on_event: Callable[[FlowEvent], None] | None = None
        self._ends: dict[bytes, RankEnd] = {}
        self._ticked_at = 0.0
        self._timer: asyncio.TimerHandle | None = None

    # ---- orders of the shard -------------------------------------------------------------------------------------

    def start(self, sinc: int, on_event: Callable[[FlowEvent], None]) -> None:
        self._on_event = on_event
        self._admission.start(sinc)

    def open_push(
        self,
        push: PushId,
        places: tuple[int, ...],
        buffers: Arrays,
        deadline_s: float,
        codec: Codec,
        keys: tuple[str, ...] = (),
    ) -> None:
        self._keyring.open_transfer(push, keys, len(places))
        self.receiver.open_push(push, places, buffers, deadline_s, self._loop.time(), codec)
        self._plan_tick()

    def reorder_push(self, push: PushId, places: tuple[int, ...]) -> None:
        self.receiver.reorder_push(push, places)

    def drop_push(self, push: PushId) -> None:
        self._keyring.close_transfer(push)
        self.receiver.drop_push(push)

    def open_pull(
        self,
        pull: PullId,
        version: VersionId,
        source: Arrays,
        chain: tuple[Update, ...] = (),
        keys: tuple[str, ...] = (),
    ) -> None:
        self._keyring.open_transfer(pull, keys)
        self.sender.open_pull(pull, version, source, self._loop.time(), chain)
        self._plan_tick()

    def move_pull(self, pull: PullId, source: Arrays) -> None:
        self.sender.move_pull(pull, source)
        self._loop.call_later(DRAIN_S, self._run_tick)

    def close_pull(self, pull: PullId) -> None:
        self._keyring.close_transfer(pull)
        self.sender.close_pull(pull, "closed")
        self._loop.call_later(DRAIN_S, self._run_tick)

    def admit_probe(self, cluster: str, key: str) -> None:
        self._keyring.admit_probe(cluster, key, self._loop.time())

    def list_transfers(self) -> tuple[Transfer, ...]:
        return self.receiver.list_transfers() + self.sender.list_transfers()

    # ---- calls of the ranks' streams --------------------------------------------------------------------------------

    def begin_stream(
        self, peer: bytes, end: RankEnd, name: StreamName, pieces: tuple[Range, ...], ready: int, key: str
    ) -> bool:
        """Begin a stream on a new connection; return False if the connection is refused, since its key is unknown."""
        if not self._keyring.admits(key, self._loop.time()):
            return False
        self._ends[peer] = end
        now = self._loop.time()
        self._do_moves(self._admission.on_hello(0, peer, name.stream_id, name, pieces, now, ready, key))
        self._run_turn()
        return True

    def take_ready(self, peer: bytes, stream: int, ready: int) -> None:
        """Process a READY: a rank says that more ranges of its push may be asked for."""
        try:
            self._do_moves(self.receiver.on_ready(0, peer, stream, ready))
        except BadFrame as bad:
            self._frame_refused(bad.reason)
        self._run_turn()

    def drop_connection(self, peer: bytes) -> None:
        """Close a rank's connection; the slave notices when it next sends."""
        self._ends.pop(peer, None)

    def take_chunk(self, peer: bytes, header: Header, body: Buffer) -> str:
        """Process a chunk that arrives; return why it was refused, "" if it was copied."""
        self._touched()
        try:
            moves = self.receiver.stage_chunk(self.receiver.claim_chunk(0, peer, header, body, self._loop.time()))
        except BadFrame as bad:
            self._frame_refused(bad.reason)
            self._run_turn()  # a wrong chunk is missing again: request it
            return bad.reason
        self._do_moves(moves)
        self._run_turn()
        return ""

    def take_want(self, peer: bytes, stream: int, chunks: tuple[Range, ...]) -> list[tuple[ChunkSend, SimTracker]]:
        """Process a rank's request for chunks; each is read from the source until its tracker is done."""
        try:
            sends = self.sender.on_want(0, peer, stream, chunks, self._loop.time())
        except BadFrame as bad:
            self._frame_refused(bad.reason)
            return []
        assert len(sends) == len(chunks), "a stream of this model has too few chunks for one to be parked"
        trackers = [(send, SimTracker()) for send in sends]
        for send, tracker in trackers:
            send.on_sent(tracker)
        self._plan_tick()
        return trackers

    def take_done(self, peer: bytes, stream: int) -> None:
        """Note that a rank has received everything."""
        self.sender.on_done(0, peer, stream)

    def on_chunk_left(self) -> None:
        """Note that the last byte of a chunk has left."""
        self._loop.deliver(self._let_chunk_go)

    def _let_chunk_go(self) -> None:
        self._run_turn()
        if self._ticked_at < self._loop.time() and self.sender.is_draining:
            self._loop.call_later(DRAIN_S, self._run_tick)

    # ---- time ------------------------------------------------------------------------------------------------------

    def _run_turn(self) -> None:
        """Request the chunks that may be requested after each frame, and end streams that are over at intervals."""
        now = self._loop.time()
        asked = self.receiver.plan_wants(0, now)
        self._do_moves(asked)
        if now - self._ticked_at >= TICK_S:
            self._run_tick()
        elif asked:
            self._plan_tick()  # bytes are owed now: a rank that is silent from here on stalls

    def _run_tick(self) -> None:
        now = self._ticked_at = self._loop.time()
        self._do_moves(self.receiver.tick(now))
        self._do_moves(self.sender.tick(now))
        self._plan_tick()

    def _plan_tick(self) -> None:
        now, timer = self._loop.time(), self._timer
        due = min(self.receiver.next_deadline(now), self.sender.next_deadline())
        if due == inf or (timer is not None and timer.when() <= due):
            return  # later deadlines are planned when this one is due
        if timer is not None:
            timer.cancel()
        self._timer = self._loop.call_later(max(0.0, due - now) + 0.001, self._run_due)

    def _run_due(self) -> None:
        self._timer = None
        self._run_tick()
        self._run_turn()

    # ---- messages of receiver and sender -----------------------------------------------------------------------------

    def _do_moves(self, moves: list[Move]) -> None:
        for move in moves:
            if isinstance(move, Wake):
                pass  # every frame is followed by a turn
            elif isinstance(move, Say):
                end = self._ends.get(move.peer)
                if end is not None:
                    end.on_message(move.peer, move.kind, move.body)
            elif isinstance(move, FrameRefused):
                self._frame_refused(move.reason)
            else:
                if isinstance(move, Released):
                    self._keyring.close_transfer(move.pull)
                self._report_event(move)

    def _report_event(self, event: FlowEvent) -> None:
        self._touched()
        assert self._on_event is not None, "start() comes before any stream"
        self._on_event(event)
