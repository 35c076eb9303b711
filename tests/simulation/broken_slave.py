"""Rules of the slaves, broken from outside: each function returns what stands where (sabotage.py)."""

from __future__ import annotations

from typing import Any, cast
from weakref import WeakSet

from dips.codecs import ITEM_BYTES, Codec
from dips.ids import PullId, PushId, VersionId
from dips.outer.updates import Update
from dips.protocol.effects import Apply, Fold, Order, Registered
from dips.protocol.events import Answer, Folded
from dips.sim.disk import SimDisk
from dips.slave.flow import ZmqFlow
from dips.slave.ports import Arrays, Released, SourceMoved, Tombstones
from dips.slave.receiver import Receiver
from dips.slave.sender import OutgoingPull, Sender
from dips.slave.shard import Opened, OpenTransfers, OrderFences, Shard, ShardRound
from dips.wire.chunks import LayerLayout, put_body
from dips.wire.frame import BadFrame, Buffer, Header

Patch = tuple[Any, str, Any]  # (owner, name, what stands there instead)


def flip_on_prepared() -> list[Patch]:
    honest = ShardRound.apply

    def apply(self: ShardRound, order: Apply) -> Answer:
        answer = honest(self, order)
        self.flip_version(order.version)
        return answer

    return [(ShardRound, "apply", apply)]


def refold_on_retry() -> list[Patch]:
    honest_admit, honest_fold = OrderFences.admit_order, ShardRound.fold
    kept: dict[tuple[int, PushId], Any] = {}

    def admit(self: OrderFences, order: Order) -> Answer | None:
        remembered = honest_admit(self, order)
        return None if isinstance(order.body, Fold) else remembered

    def fold(self: ShardRound, order: Fold) -> Answer:
        key = (id(self), order.push)
        if key not in kept:
            arrays = self.versions._open[order.push].arrays if order.push in self.versions._open else {}
            kept[key] = {layer: a.copy() for layer, a in arrays.items()}
            return honest_fold(self, order)
        acc, memory = self.versions._acc, self.versions.served_version
        if acc is None or memory is None:
            return honest_fold(self, order)
        theta = self.versions.theta(memory)
        for layer, theta_j in kept[key].items():
            acc.arrays[layer] += order.weight * (theta[layer] - theta_j)
        return Folded(tuple(1.0 for _ in theta))

    return [(OrderFences, "admit_order", admit), (ShardRound, "fold", fold)]


def unpin_at_send() -> list[Patch]:
    honest = ZmqFlow.open_pull

    def open_pull(self: ZmqFlow, pull: PullId, version: VersionId, source: Arrays, *more: Any) -> None:
        honest(self, pull, version, source, *more)
        cast(Any, self._lanes[0]).loop.call_later(0.0, self._on_event, Released(pull, "sent"))

    return [(ZmqFlow, "open_pull", open_pull)]


def update_from_anywhere() -> list[Patch]:
    def find_updates(self: OutgoingPull, held: str) -> tuple[tuple[Update, ...], tuple[VersionId | None, ...]]:
        last = self.chain[-1:] if held else ()
        return last, tuple(update.version for update in last)

    return [(OutgoingPull, "find_updates", find_updates)]


def free_at_move() -> list[Patch]:
    honest = ZmqFlow.move_pull

    def move_pull(self: ZmqFlow, pull: PullId, source: Arrays) -> None:
        honest(self, pull, source)
        cast(Any, self._lanes[0]).loop.call_later(0.0, self._on_event, SourceMoved(pull))

    return [(ZmqFlow, "move_pull", move_pull)]


def close_pulls_once() -> list[Patch]:
    honest = Sender.close_all
    closed: WeakSet[Sender] = WeakSet()

    def close_all(self: Sender, reason: str) -> None:
        if self not in closed:
            closed.add(self)
            honest(self, reason)

    return [(Sender, "close_all", close_all)]


def keep_local() -> list[Patch]:
    honest = SimDisk.write_snapshot

    def write(self: SimDisk, version: VersionId, theta: Arrays, momentum: Arrays, is_wanted: Any) -> str:
        self.delete_snapshots(self.complete_versions())
        return honest(self, version, theta, momentum, is_wanted)

    return [(SimDisk, "write_snapshot", write)]


def accept_old_stream() -> list[Patch]:
    honest_hello, honest_claim = Receiver.on_hello, Receiver.claim_chunk
    kept: dict[tuple[int, int], tuple[LayerLayout, Arrays, Codec]] = {}  # what each stream once wrote into

    def hello(self: Receiver, lane: int, peer: bytes, name: Any, pieces: Any, now: float, *ready: int) -> Any:
        push = self._pushes.get(PushId(name.cluster, name.inc, name.seq))
        if push is not None and push.targets and self._layout is not None:
            kept[id(self), name.stream_id] = (self._layout, push.targets, push.codec)
        return honest_hello(self, lane, peer, name, pieces, now, *ready)

    def claim(self: Receiver, lane: int, peer: bytes, header: Header, body: Buffer, now: float, *guard: Any) -> Any:
        try:
            return honest_claim(self, lane, peer, header, body, now, *guard)
        except BadFrame:
            if (id(self), header.stream) in kept:
                layout, targets, codec = kept[id(self), header.stream]
                begin = layout.fields[header.layer, header.param].start + header.offset
                of_codes = header.length - ITEM_BYTES * codec.count_blocks(1)  # chunks here are one block at most
                length = 8 * of_codes // codec.bits
                put_body(codec, body, targets[header.layer][begin : begin + length])
            raise

    return [(Receiver, "on_hello", hello), (Receiver, "claim_chunk", claim)]


def offers_without_ledger() -> list[Patch]:
    honest = Shard.on_registered

    def welcome(self: Shard, registered: Registered) -> None:
        honest(self, registered)
        complete = self._disk.complete_versions()
        if self.versions.served_version is None and complete:
            newest = max(complete)
            self._disk.read_snapshot(newest, *self.versions.begin_load(newest))
            self.versions.end_load(True)

    return [(Shard, "on_registered", welcome)]


def leak_slot() -> list[Patch]:
    def refuse_closed(self: Tombstones, transfer: PushId | PullId) -> None:
        """No tombstone."""

    def heal(self: OpenTransfers, live_pushes: Any, live_pulls: Any, as_of: Opened) -> list[str]:
        return []

    return [(Tombstones, "refuse_closed", refuse_closed), (OpenTransfers, "drop_unlisted", heal)]
