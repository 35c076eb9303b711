"""The rank's end of a stream: sends HELLO with rising epochs, until all is moved or the rank gives up.

A transfer is ranks × slaves streams, each with HELLO, WANT, chunks and DONE as on the wire; the slave's end is real
(flow.py). push_stream.py and pull_stream.py handle the messages of the two directions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from dips.ids import PullId, PushId
from dips.protocol.effects import SlaveAddress
from dips.sim.data_links import DataLinks
from dips.sim.fiber import Gate
from dips.sim.flow import SimFlow
from dips.sim.heap import Timer
from dips.wire.frame import Kind, StreamName, decode_error

STALL_S = 2.0  # time without a byte after which a stream counts as broken
GIVEN_UP = frozenset({"refused", "ranges", "invalid", "denied"})  # codes of an ERROR after which a rank gives up


@dataclass
class Meter:
    """The bytes moved by a cluster's present or last transfer."""

    began: float
    nbytes: int = 0
    total: int = 0
    ended: float | None = None


class SimTransfer:
    """One transfer in progress: its owner may end it, stop it, or lose ranks of it."""

    def __init__(self, cluster: str, meter: Meter, gate: Gate, fragments: int = 1) -> None:
        self.cluster, self.meter, self.gate = cluster, meter, gate
        self.fragments, self.open = fragments, 1  # layers of the first `open` fragments may move
        self.streams: list[SimStream] = []
        self._over = False
        self._gone: list[int] = []

    def cancel(self) -> None:
        """End the transfer: nothing more is sent or received; messages in transit still arrive."""
        self._over = True

    def open_next(self) -> None:
        """Open the next fragment, so that its layers may move."""
        self.open += 1
        for stream in self.streams:
            stream.on_opened()

    def is_open(self, layer: int) -> bool:
        """Return whether a layer may move; layers are dealt to fragments in turn."""
        return layer % self.fragments < self.open

    def lose_rank(self, rank: int) -> None:
        """Note that a rank died; the others do not know it yet."""
        self._gone.append(rank)

    def rank_runs(self, rank: int) -> bool:
        return not self._over and rank not in self._gone


class SimStream(ABC):
    """The rank's end of one stream: its epochs, and chunks that arrive, break, or are lost on a parted link."""

    kind = ""

    def __init__(
        self,
        net: DataLinks,
        moving: SimTransfer,
        name: PushId | PullId,
        address: SlaveAddress,
        version: str,
        rank: int,
        ranks: int,
        key: str,
        held: str = "",
    ) -> None:
        self.net, self.moving, self.address, self.rank, self._key = net, moving, address, rank, key
        self.label = f"{self.kind} {name} rank {rank} at {address.name}"
        pieces = net.rank_pieces(address.layers, rank, ranks)
        self.pieces = tuple(sorted(pieces, key=lambda piece: piece.layer % moving.fragments))
        moving.streams.append(self)
        self.epoch = 0
        self.over = False
        self._transfer, self._version, self._held = name, version, held
        self._peer = b""
        self._stream = 0
        self._flow: SimFlow | None = None
        self._last_message_at = 0.0
        self._free_at = 0.0  # arrival of the last chunk in transit, if chunks are sent one after the other
        self._welcomed, self._told_ready = False, 0
        self._timer: Timer | None = None

    def begin_epoch(self) -> None:
        """Send HELLO with the next epoch, on a new connection."""
        if self._flow is not None:
            self._flow.drop_connection(self._peer)
        self.epoch += 1
        self._last_message_at, self._welcomed = self.net.heap.now, False
        self._send_message(f"hello {self.label}", self._send_hello)
        if self._timer is None:
            self._watch_for_stall(self.net.stall_s)

    def on_message(self, peer: bytes, kind: Kind, body: bytes) -> None:
        """Process a message of the slave; messages of an older connection, or of a stream that is over, are ignored."""
        if peer != self._peer or not self._is_current(self.epoch):
            return
        self._last_message_at = self.net.heap.now
        if kind is not Kind.ERROR:
            self._welcomed = self._welcomed or kind is Kind.WELCOME
            self._on_message(kind, body)
        elif decode_error(body).code in GIVEN_UP:
            self._end_stream()
            self._give_up()
        else:
            self._on_break(self.epoch)

    def on_opened(self) -> None:
        """Process the opening of a fragment: more layers may move."""

    @property
    def _ready(self) -> int:
        if self.moving.open >= self.moving.fragments:
            return len(self.pieces)
        return sum(self.moving.is_open(piece.layer) for piece in self.pieces)

    @abstractmethod
    def _on_message(self, kind: Kind, body: bytes) -> None:
        """Process WELCOME, WANT or DONE."""

    @abstractmethod
    def _give_up(self) -> None:
        """Process the final failure of the stream."""

    def _send_hello(self) -> None:
        flow = self._flow = self.net.flows.flow_of(self.address.name)
        if flow is None:
            self._on_break(self.epoch)
            return
        t, rank = self._transfer, self.rank
        slave, sinc = self.address.name, self.address.sinc
        name = StreamName(
            self.net.run,
            self.kind,
            t.cluster,
            t.inc,
            t.seq,
            rank,
            slave,
            sinc,
            self.epoch,
            self._version,
            held=self._held,
        )
        self._peer, self._stream, self._told_ready = self.net.new_connection(), name.stream_id, self._ready
        if not flow.begin_stream(self._peer, self, name, self.pieces, self._told_ready, self._key):
            self._on_break(self.epoch)

    def _chunk_delay(self) -> float:
        """Return the time until a chunk that leaves now has arrived."""
        net, now = self.net, self.net.heap.now
        if net.serial_s is None:
            return net.chunk_delay(self.moving.cluster)
        self._free_at = max(now, self._free_at) + net.serial_s
        return self._free_at - now

    def _send_message(self, what: str, arrive: Callable[[], None], delay_s: float | None = None) -> None:
        """Send a message if both directions of the link pass, since the receiver must have asked for it; else stall."""
        net, epoch, cluster = self.net, self.epoch, self.moving.cluster

        def pass_gate() -> None:
            self.moving.gate.pass_on(lambda: arrive() if self._is_current(epoch) else None)

        if self._link_passes():
            net.heap.call_later(net.chunk_delay(cluster) if delay_s is None else delay_s, what, pass_gate)
        else:
            net.heap.call_later(STALL_S, f"{what} stalls", lambda: self._on_break(epoch))

    def _link_passes(self) -> bool:
        cluster, slave = self.moving.cluster, self.address.name
        return self.net.link_passes(cluster, slave) and self.net.link_passes(slave, cluster)

    def _is_current(self, epoch: int) -> bool:
        return self.epoch == epoch and not self.over and self.moving.rank_runs(self.rank)

    def _on_break(self, epoch: int) -> None:
        """Break the epoch at its first failure; begin the next epoch, or give up."""
        if not self._is_current(epoch):
            return
        if self.epoch < self.net.links.epochs:
            self.begin_epoch()
        else:
            self._end_stream()
            self._give_up()

    def _end_stream(self) -> None:
        self.over = True
        if self._timer is not None:
            self._timer.cancel()
        if self._flow is not None:
            self._flow.drop_connection(self._peer)

    def _is_owed(self) -> bool:
        """Return whether the slave owes an answer to HELLO, or requested chunks."""
        return not self._welcomed

    def _watch_for_stall(self, delay_s: float) -> None:
        """Begin a new epoch if a slave that owes bytes is silent for `stall_s`, or is another process now."""
        self._timer = self.net.heap.call_later(delay_s, f"{self.label} waits", self._check_stall)

    def _check_stall(self) -> None:
        if self.over or not self.moving.rank_runs(self.rank):
            return
        left_s = self._last_message_at + self.net.stall_s - self.net.heap.now
        if left_s <= 0.0 and (self._is_owed() or self.net.flows.flow_of(self.address.name) is not self._flow):
            self._on_break(self.epoch)
        if not self.over:
            self._watch_for_stall(left_s if left_s > 0.0 else self.net.stall_s)
