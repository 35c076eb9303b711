"""Assignment of a rank's pieces to the lanes of the slaves that hold their layers, one stream per lane. No torch."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import zmq

from dips.client.rank.fragments import FragmentGate
from dips.client.rank.transfer_types import LayerOrder
from dips.codecs import Codec
from dips.errors import LocalProtocolError
from dips.protocol.effects import SlaveAddress
from dips.protocol.order import slaves_for_worker
from dips.transport.intake import Intake
from dips.transport.shares import Share, check_piece, deal_pieces
from dips.transport.stream import Stream
from dips.wire.chunks import Range, encode_ranges
from dips.wire.streams import StreamName

FIRST_EPOCH = 1  # epoch of a new stream; each reconnect raises it


@dataclass(eq=False, slots=True)
class LanePart:
    """This rank's share at one lane of one slave."""

    slave: SlaveAddress
    share: Share
    nbytes: int  # of the share, on the wire
    stream: Stream
    ends: tuple[int, ...]  # number of its ranges in the first fragment, in the first two, …
    intake: Intake | None = None  # pull: from the first WELCOME on
    posted: int = 0  # push: bytes that were sent
    done: bool = False
    ranges: type[Range] = Range  # pull: of its chunks, parameters or updates, as the slave said

    def count_ready(self, gate: FragmentGate | None) -> int:
        """Return the number of its ranges that may move now."""
        return self.ends[-1] if gate is None else _count_open(self.ends, gate)


def check_order(order: LayerOrder, name: str) -> None:
    """Raise LocalProtocolError unless the grant has a slave for each piece, and this rank a key if lanes are
    encrypted.
    """
    for piece in order.pieces:
        check_piece(piece)
    held = {layer for slave in order.grant.slaves for layer in slave.layers}
    if order.base.keys is None and (asking := [slave.name for slave in order.grant.slaves if slave.key]):
        raise LocalProtocolError(f"{name}: the lanes of {', '.join(asking)} are encrypted, and this rank has no key")
    if strays := sorted({p.layer for p in order.pieces} - held):
        raise LocalProtocolError(f"{name}: no slave of the grant holds layers {strays}")


def open_parts(
    order: LayerOrder, kind: str, codec: Codec, context: zmq.Context[zmq.Socket[bytes]]
) -> Iterator[LanePart]:
    """Open the streams of a transfer, in the order of the grant; a push has one to every lane, even without pieces."""
    grant, base, rng = order.grant, order.base, random.Random()
    version = str(grant.version) if kind == "pull" else ""
    held = str(order.held or "")
    for index in slaves_for_worker(grant.first + base.rank, len(grant.slaves)):
        slave = grant.slaves[index]
        held_here = [p for p in order.pieces if p.layer in slave.layers and p.length]
        groups = [held_here] if order.gate is None else order.gate.group_pieces(held_here)
        dealt = [deal_pieces(group, len(slave.lanes)) for group in groups]  # every lane has its part of each fragment
        for lane in range(len(slave.lanes)):
            share = Share([piece for hands in dealt for piece in hands[lane]])
            ends = tuple(accumulate(len(hands[lane]) for hands in dealt))
            name = StreamName(
                base.run, kind, base.cluster, base.inc, base.seq, base.rank, slave.name, slave.sinc,
                FIRST_EPOCH, version, lane, held,
            )  # fmt: skip
            keys = (base.keys, slave.key) if base.keys is not None and slave.key else None
            ready = None if order.gate is None or kind == "pull" else partial(_count_open, ends, order.gate)
            stream = Stream(context, slave.lanes[lane], name, share.ranges, order.stall_s, rng, keys, ready)
            stream.waits = False
            if share.nbytes or kind == "push":
                nbytes = sum(piece.nbytes for piece in encode_ranges(codec.dtype, share.ranges))
                yield LanePart(slave, share, nbytes, stream, ends)


def _count_open(ends: tuple[int, ...], gate: FragmentGate) -> int:
    return ends[gate.open - 1]
