"""The rank's end of a push: sends the chunks that the slave asks for.

Copies of chunks that the network kept may arrive much later: the slave must refuse them.
"""

from __future__ import annotations

from collections.abc import Callable

import xxhash

from dips.ids import PushId
from dips.protocol.effects import Grant, SlaveAddress
from dips.sim.data_links import DataLinks
from dips.sim.streams import SimStream, SimTransfer
from dips.wire.frame import Buffer, Header, Kind, Range, decode_want

Spell = Callable[[int, Range], Buffer]  # (rank, chunk) → its body


class PushStream(SimStream):
    """The transfer of one rank's pieces to one slave."""

    kind = "push"

    def __init__(
        self,
        net: DataLinks,
        moving: SimTransfer,
        push: PushId,
        grant: Grant,
        address: SlaveAddress,
        rank: int,
        ranks: int,
        key: str,
        spell: Spell,
        ended: Callable[[bool], None],
    ) -> None:
        super().__init__(net, moving, push, address, "", rank, ranks, key)
        self.spell, self.ended, self._dtype = spell, ended, grant.codec.dtype

    def on_opened(self) -> None:
        """Tell the slave that it may ask for more, once it has accepted the stream."""
        if self._welcomed and not self.over and self._ready > self._told_ready:
            self._told_ready = ready = self._ready
            self._send_message(f"ready {self.label}", lambda: self._tell_ready(ready))

    def _tell_ready(self, ready: int) -> None:
        flow = self.net.flows.flow_of(self.address.name)
        if flow is None or flow is not self._flow:
            self._on_break(self.epoch)
        else:
            flow.take_ready(self._peer, self._stream, ready)

    def _on_message(self, kind: Kind, body: bytes) -> None:
        if kind is Kind.WELCOME:
            self.on_opened()
        elif kind is Kind.WANT:
            for chunk in decode_want(body):
                self._send_chunk(chunk)
        elif kind is Kind.DONE:
            self._on_done()

    def _send_chunk(self, chunk: Range) -> None:
        net, epoch, peer = self.net, self.epoch, self._peer
        rng, links = net.rng, net.links
        body = self.spell(self.rank, chunk)
        broken, corrupt = rng.random() < links.broken_share, rng.random() < links.corrupt_share
        late = rng.random() < links.late_share
        checksum = xxhash.xxh3_64_intdigest(body) ^ corrupt
        header = Header(
            Kind.CHUNK,
            net.run_id,
            self._stream,
            len(body),
            checksum,
            chunk.layer,
            chunk.param,
            chunk.offset,
            self._dtype,
        )
        what = f"chunk {self.label}"
        if broken:
            self._send_message(f"broken {what}", lambda: self._on_break(epoch))
        else:
            self._send_message(what, lambda: self._on_chunk(header, body), self._chunk_delay())
        if late:
            delay_s = net.chunk_delay(self.moving.cluster) + links.late_s * rng.random()
            net.heap.call_later(delay_s, f"late {what}", lambda: self._arrive_again(peer, header, body))

    def _on_chunk(self, header: Header, body: Buffer) -> None:
        flow = self.net.flows.flow_of(self.address.name)
        if flow is None or flow is not self._flow:
            self._on_break(self.epoch)
            return
        self._last_message_at = self.net.heap.now
        refused = flow.take_chunk(self._peer, header, body)
        if not refused:
            self.moving.meter.nbytes += len(body)
        elif refused != "body_checksum":  # that chunk is requested again; after any other refusal the stream is void
            self._on_break(self.epoch)

    def _arrive_again(self, peer: bytes, header: Header, body: Buffer) -> None:
        """Deliver a copy that the network kept: its sender may be dead, and its receiver another process."""
        flow = self.net.flows.flow_of(self.address.name)
        if flow is not None:
            flow.take_chunk(peer, header, body)

    def _on_done(self) -> None:
        if self.net.rng.random() < self.net.links.unheard_share:
            self._on_break(self.epoch)
        else:
            self._end_stream()
            self.ended(True)

    def _give_up(self) -> None:
        self.ended(False)
