"""The rank's end of a pull: requests chunks and keeps those that arrive.

A chunk's bytes are read when the last of them leaves the slave; libzmq may hold its buffer for longer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from dips.dataclass import dataclass
from dips.ids import PullId, VersionId
from dips.protocol.effects import Grant, SlaveAddress
from dips.sim.data_links import DataLinks
from dips.sim.flow import SimFlow, SimTracker
from dips.sim.streams import STALL_S, SimStream, SimTransfer
from dips.slave.ports import F32
from dips.slave.sender import ChunkSend
from dips.wire.chunks import put_pulled, split_chunks
from dips.wire.frame import Kind, Range, decode_welcome, pulled_range_type


@dataclass(frozen=True, slots=True)
class HeldVersion:
    """A version that the ranks hold, to which updates may be added."""

    version: VersionId
    theta: Mapping[int, F32]


class Pulled:
    """The data that one rank has received into host memory: pieces, and the versions that they were sent as."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.whole = True
        self.versions: list[VersionId] = []
        self.pieces: list[tuple[int, slice, F32]] = []


class PullStream(SimStream):
    """The transfer of one rank's pieces from one slave."""

    kind = "pull"

    def __init__(
        self,
        net: DataLinks,
        moving: SimTransfer,
        pull: PullId,
        grant: Grant,
        address: SlaveAddress,
        pulled: Pulled,
        ranks: int,
        key: str,
        ended: Callable[[], None],
        held: HeldVersion | None,
    ) -> None:
        named = "" if held is None else str(held.version)
        super().__init__(net, moving, pull, address, str(grant.version), pulled.rank, ranks, key, named)
        self._base = held
        self._ranges = Range  # type of its chunks' ranges: parameters or updates
        self.pulled, self.ended, self._granted = pulled, ended, grant.version
        self._missing = dict.fromkeys(split_chunks(self.pieces, net.chunk_bytes))

    def _is_owed(self) -> bool:
        return any(self.moving.is_open(chunk.layer) for chunk in self._missing)  # that was asked for

    def on_opened(self) -> None:
        """Request the chunks of the opened fragment."""
        if self._welcomed and not self.over:
            self._last_message_at = self.net.heap.now
            self._send_want(tuple(c for c in self._missing if c.layer % self.moving.fragments == self.moving.open - 1))

    def _on_message(self, kind: Kind, body: bytes) -> None:
        assert kind is Kind.WELCOME, kind
        welcome = decode_welcome(body)
        self._ranges = pulled_range_type(welcome.dtype, welcome.depth)
        self._send_want(tuple(chunk for chunk in self._missing if self.moving.is_open(chunk.layer)))
        self._end_if_whole()

    def _send_want(self, chunks: tuple[Range, ...]) -> None:
        flow = self._flow
        assert flow is not None
        for send, tracker in flow.take_want(self._peer, self._stream, chunks) if chunks else ():
            self._carry_chunk(flow, send, tracker)

    def _carry_chunk(self, flow: SimFlow, send: ChunkSend, tracker: SimTracker) -> None:
        """Transfer one chunk: its bytes are read when the last of them has left."""
        net, epoch = self.net, self.epoch
        rng, links, what = net.rng, net.links, f"chunk {self.label}"
        broken, corrupt = rng.random() < links.broken_share, rng.random() < links.corrupt_share
        passes = self._link_passes()
        held_s = links.held_s * rng.random() if rng.random() < links.held_share else 0.0

        def leave_slave() -> None:
            body = bytes(send.make_body())
            if held_s:
                net.heap.call_later(held_s, f"libzmq lets go of a {what}", let_go)
            else:
                let_go()
            self.moving.gate.pass_on(lambda: arrive_at_rank(body) if self._is_current(epoch) else None)

        def let_go() -> None:
            tracker.done = True
            flow.on_chunk_left()

        def arrive_at_rank(body: bytes) -> None:
            if broken or not passes or self.net.flows.flow_of(self.address.name) is not flow:
                self._on_break(epoch)
            elif corrupt:
                net.flows.frame_refused("checksum")
                self._send_want((send.chunk,))
            else:
                self._on_chunk(send.chunk, body)

        delay_s = self._chunk_delay() if passes else STALL_S
        net.heap.call_later(delay_s, what, leave_slave)

    def _on_chunk(self, chunk: Range, body: bytes) -> None:
        chunk = Range(*chunk)
        if chunk not in self._missing:
            return
        self._last_message_at = self.net.heap.now
        del self._missing[chunk]
        begin, end = self.net.layout.place_range(chunk)
        self.pulled.versions.append(self._granted)
        self.pulled.pieces.append((chunk.layer, slice(begin, end), self._read_chunk(chunk, body)))
        self.moving.meter.nbytes += len(body)
        self._end_if_whole()

    def _read_chunk(self, chunk: Range, body: bytes) -> F32:
        """Return a chunk's parameters; for updates, the held version with the updates added."""
        encoded, place = self._ranges(*chunk), slice(*self.net.layout.place_range(chunk))
        values = np.zeros(chunk.length, np.float32)
        if encoded.depth:
            assert self._base is not None
            values[:] = self._base.theta[chunk.layer][place]
        put_pulled(encoded, body, values)
        return values

    def _end_if_whole(self) -> None:
        if not self._missing:
            assert self._flow is not None
            self._flow.take_done(self._peer, self._stream)
            self._end_stream()
            if self.pieces and (depth := self._ranges(*self.pieces[0]).depth):
                self.net.flows.updates_landed(depth)
            self.ended()

    def _give_up(self) -> None:
        self.pulled.whole = False
        self.ended()
