"""The ranks' side of the simulated data flow: streams that are late, overtake each other, break, come back, or give up.

One transfer is ranks × slaves streams, each with HELLO, WANT, chunks and DONE as on the wire; the slave's end is real
(flow.py). What the network keeps of a broken stream may arrive long after: the slave must refuse it. A link between a
cluster and a slave can be clogged (almost no bandwidth) or parted, either way for a time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import count
from random import Random
from typing import Protocol

import numpy as np
import xxhash

from dips.ids import PullId, PushId, VersionId
from dips.protocol.effects import Grant, SlaveAddress
from dips.protocol.manifest import Manifest
from dips.sim.fiber import Gate
from dips.sim.flow import CHUNK_BYTES, SimFlow, SimTracker
from dips.sim.heap import Heap, Timer
from dips.slave.ports import F32
from dips.slave.sender import ChunkSend
from dips.wire import codecs
from dips.wire.chunks import Layout, Range, split
from dips.wire.frame import Buffer, Header, Kind, run_id
from dips.wire.streams import StreamName, decode_error, decode_want

CLOG = 15.0  # times longer on a clogged link
STALL_S = 2.0  # without a byte: the stream counts as broken

GIVEN_UP = frozenset({"refused", "ranges", "invalid"})  # codes of an ERROR after which a rank does not try again

Spell = Callable[[int, Range], Buffer]  # (rank, chunk) → its body


@dataclass
class SimLinks:
    """How bad the data network is. Seconds and shares of streams."""

    chunk_s: float = 0.05
    spread_s: float = 0.15
    broken_share: float = 0.05  # of chunks whose stream breaks before they arrive
    corrupt_share: float = 0.02  # of chunks that arrive with a wrong checksum: refused, asked again
    late_share: float = 0.05  # of chunks that arrive a second time, `late_s` later
    late_s: float = 4.0
    held_share: float = 0.15  # of pulled chunks that libzmq holds for up to `held_s` after they have left
    held_s: float = 4.0
    unheard_share: float = 0.02  # of streams whose DONE is lost
    refused_share: float = 0.01  # of pushes whose ranges the slave finds wrong
    epochs: int = 3  # streams that a rank tries before it gives up


STEADY = SimLinks(
    broken_share=0.0, corrupt_share=0.0, late_share=0.0, held_share=0.0, unheard_share=0.0, refused_share=0.0
)


@dataclass
class Meter:
    """What a cluster's present or last transfer has moved."""

    began: float
    nbytes: int = 0
    total: int = 0
    ended: float | None = None


class Flows(Protocol):
    """Finds the data flow that lives at a slave now, and hears of what went wrong."""

    def flow(self, slave: str) -> SimFlow | None: ...
    def frame_refused(self, why: str) -> None: ...


class SimTransfer:
    """One transfer under way: its owner may end it, stand still, or lose ranks of it."""

    def __init__(self, cluster: str, meter: Meter, gate: Gate) -> None:
        self.cluster, self.meter, self.gate = cluster, meter, gate
        self._over = False
        self._gone: list[int] = []

    def cancel(self) -> None:
        """Nothing more is sent or received; what is on its way arrives."""
        self._over = True

    def lose(self, rank: int) -> None:
        """A rank died; the others do not know it yet."""
        self._gone.append(rank)

    def runs(self, rank: int) -> bool:
        return not self._over and rank not in self._gone


class DataNetwork:
    """Starts transfers; holds the weather of all data links."""

    def __init__(
        self,
        heap: Heap,
        rng: Random,
        flows: Flows,
        run: str,
        manifest: Manifest,
        slowness: Mapping[str, float],
        stall_s: float,
    ) -> None:
        """`slowness` says of a cluster how many times longer everything takes on its link; 1 for who is not named."""
        self.heap, self.rng, self.flows, self.slowness = heap, rng, flows, slowness
        self.run, self.run_id, self.stall_s = run, run_id(run), stall_s
        self.manifest, self.layout = manifest, Layout(manifest, range(len(manifest.layers)))
        self._connections = count(1)
        self._pieces: dict[tuple[tuple[int, ...], int, int], tuple[Range, ...]] = {}
        self.links = SimLinks()
        self.meters: dict[str, list[Meter]] = {}  # of each cluster, its transfers in order
        self._parted: dict[tuple[str, str], float] = {}  # (sender, receiver) → until when nothing passes
        self._clogged: dict[str, float] = {}  # cluster → until when

    def mend(self) -> None:
        """No stream breaks any more."""
        self.links = STEADY
        self._parted.clear()
        self._clogged.clear()

    def part(self, sender: str, receiver: str, until: float) -> None:
        """Nothing passes in this direction until then."""
        self._parted[sender, receiver] = until

    def clog(self, cluster: str, until: float) -> None:
        """Its link passes almost nothing until then."""
        self._clogged[cluster] = until

    def connect(self) -> bytes:
        """A connection of its own, as ROUTER names it: never used twice."""
        return next(self._connections).to_bytes(5)

    def pieces(self, layers: tuple[int, ...], rank: int, ranks: int) -> tuple[Range, ...]:
        """What one rank holds of these layers."""
        key = (layers, rank, ranks)
        if key not in self._pieces:
            self._pieces[key] = tuple(pieces_of(self.layout, layers, rank, ranks))
        return self._pieces[key]

    def passes(self, sender: str, receiver: str) -> bool:
        return self._parted.get((sender, receiver), 0.0) <= self.heap.now

    def chunk_delay(self, cluster: str) -> float:
        clog = CLOG if self._clogged.get(cluster, 0.0) > self.heap.now else 1.0
        return (self.links.chunk_s + self.links.spread_s * self.rng.random()) * self.slowness.get(cluster, 1.0) * clog

    def push(
        self, push: PushId, grant: Grant, spell: Spell, ranks: int, gate: Gate, done: Callable[[bool], None]
    ) -> SimTransfer:
        """Move all ranks' pieces to all slaves; `done` hears whether every stream heard DONE."""
        moving = self._begun(push.cluster, gate)
        ended: list[bool] = []

        def one_ended(ok: bool) -> None:
            ended.append(ok)
            if len(ended) == ranks * len(grant.slaves):
                moving.meter.ended = self.heap.now
                done(all(ended))

        wrong = self.rng.random() < self.links.refused_share
        for address in grant.slaves:
            for rank in range(ranks):
                stream = PushStream(self, moving, push, grant, address, rank, ranks, spell, one_ended)
                if wrong and stream.pieces:  # one rank names a piece twice
                    stream.pieces, wrong = stream.pieces + stream.pieces[:1], False
                stream.begin()
        return moving

    def pull(
        self, pull: PullId, grant: Grant, ranks: int, gate: Gate, done: Callable[[list[Pulled]], None]
    ) -> SimTransfer:
        """Bring every rank its own pieces from all slaves; `done` hears what each rank has in its host memory."""
        moving = self._begun(pull.cluster, gate)
        landed = [Pulled(rank) for rank in range(ranks)]
        left = [ranks * len(grant.slaves)]

        def one_ended() -> None:
            left[0] -= 1
            if left[0] == 0:
                moving.meter.ended = self.heap.now
                done(landed)

        for address in grant.slaves:
            for rank in range(ranks):
                PullStream(self, moving, pull, grant, address, landed[rank], ranks, one_ended).begin()
        return moving

    def _begun(self, cluster: str, gate: Gate) -> SimTransfer:
        meter = Meter(self.heap.now, 0, self.layout.nbytes)
        self.meters.setdefault(cluster, []).append(meter)
        return SimTransfer(cluster, meter, gate)


class SimStream(ABC):
    """The rank's end of one stream: its epochs, and chunks that arrive, break, or vanish on a parted link."""

    kind = ""

    def __init__(
        self,
        net: DataNetwork,
        moving: SimTransfer,
        name: PushId | PullId,
        address: SlaveAddress,
        version: str,
        rank: int,
        ranks: int,
    ) -> None:
        self.net, self.moving, self.address, self.rank = net, moving, address, rank
        self.label = f"{self.kind} {name} rank {rank} at {address.name}"
        self.pieces = net.pieces(address.layers, rank, ranks)
        self.epoch = 0
        self.over = False
        self._transfer, self._version = name, version
        self._peer = b""
        self._stream = 0
        self._flow: SimFlow | None = None
        self._heard_at = 0.0
        self._timer: Timer | None = None

    def begin(self) -> None:
        """Say HELLO with the next epoch, on a new connection."""
        if self._flow is not None:
            self._flow.disconnect(self._peer)
        self.epoch += 1
        self._heard_at = self.net.heap.now
        self._say(f"hello {self.label}", self._hello)
        if self._timer is None:
            self._watch_for_stall(self.net.stall_s)

    def take(self, peer: bytes, kind: Kind, body: bytes) -> None:
        """A message of the slave arrives; one of an older connection, or of a stream that is over, says nothing."""
        if peer != self._peer or not self._lives(self.epoch):
            return
        self._heard_at = self.net.heap.now
        if kind is not Kind.ERROR:
            self._on_message(kind, body)
        elif decode_error(body).code in GIVEN_UP:
            self._finish()
            self._give_up()
        else:
            self._broke(self.epoch)

    @abstractmethod
    def _on_message(self, kind: Kind, body: bytes) -> None:
        """WELCOME, WANT or DONE."""

    @abstractmethod
    def _give_up(self) -> None:
        """The stream has failed for good."""

    def _hello(self) -> None:
        flow = self._flow = self.net.flows.flow(self.address.name)
        if flow is None:
            self._broke(self.epoch)
            return
        t, rank = self._transfer, self.rank
        slave, sinc = self.address.name, self.address.sinc
        name = StreamName(
            self.net.run, self.kind, t.cluster, t.inc, t.seq, rank, slave, sinc, self.epoch, self._version
        )
        self._peer, self._stream = self.net.connect(), name.id
        flow.hello(self._peer, self, name, self.pieces)

    def _say(self, what: str, arrive: Callable[[], None]) -> None:
        """Both directions are needed: nothing travels that its receiver did not ask for."""
        net, epoch, cluster = self.net, self.epoch, self.moving.cluster

        def arrives() -> None:
            self.moving.gate.pass_on(lambda: arrive() if self._lives(epoch) else None)

        if self._passes():
            net.heap.after(net.chunk_delay(cluster), what, arrives)
        else:
            net.heap.after(STALL_S, f"{what} stalls", lambda: self._broke(epoch))

    def _passes(self) -> bool:
        cluster, slave = self.moving.cluster, self.address.name
        return self.net.passes(cluster, slave) and self.net.passes(slave, cluster)

    def _lives(self, epoch: int) -> bool:
        return self.epoch == epoch and not self.over and self.moving.runs(self.rank)

    def _broke(self, epoch: int) -> None:
        """The first chunk of an epoch that breaks breaks it; again with a higher one, or never."""
        if not self._lives(epoch):
            return
        if self.epoch < self.net.links.epochs:
            self.begin()
        else:
            self._finish()
            self._give_up()

    def _finish(self) -> None:
        self.over = True
        if self._timer is not None:
            self._timer.cancel()
        if self._flow is not None:
            self._flow.disconnect(self._peer)

    def _watch_for_stall(self, delay_s: float) -> None:
        """A slave that dropped the transfer says nothing: without a message for `stall_s` the stream is begun anew."""
        self._timer = self.net.heap.after(delay_s, f"{self.label} waits", self._look)

    def _look(self) -> None:
        if self.over or not self.moving.runs(self.rank):
            return
        left_s = self._heard_at + self.net.stall_s - self.net.heap.now
        if left_s <= 0.0:
            self._broke(self.epoch)
        if not self.over:
            self._watch_for_stall(left_s if left_s > 0.0 else self.net.stall_s)


class PushStream(SimStream):
    """One rank's pieces on the way to one slave."""

    kind = "push"

    def __init__(
        self,
        net: DataNetwork,
        moving: SimTransfer,
        push: PushId,
        grant: Grant,
        address: SlaveAddress,
        rank: int,
        ranks: int,
        spell: Spell,
        ended: Callable[[bool], None],
    ) -> None:
        super().__init__(net, moving, push, address, "", rank, ranks)
        self.spell, self.ended, self._dtype = spell, ended, codecs.named(grant.codec).dtype

    def _on_message(self, kind: Kind, body: bytes) -> None:
        if kind is Kind.WANT:
            for chunk in decode_want(body):
                self._send(chunk)
        elif kind is Kind.DONE:
            self._done()

    def _send(self, chunk: Range) -> None:
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
            self._say(f"broken {what}", lambda: self._broke(epoch))
        else:
            self._say(what, lambda: self._arrive(header, body))
        if late:
            delay_s = net.chunk_delay(self.moving.cluster) + links.late_s * rng.random()
            net.heap.after(delay_s, f"late {what}", lambda: self._arrive_again(peer, header, body))

    def _arrive(self, header: Header, body: Buffer) -> None:
        flow = self.net.flows.flow(self.address.name)
        if flow is None or flow is not self._flow:
            self._broke(self.epoch)
            return
        self._heard_at = self.net.heap.now
        refused = flow.chunk(self._peer, header, body)
        if not refused:
            self.moving.meter.nbytes += len(body)
        elif refused != "body_checksum":  # that one is asked for again; any other: nobody wants this stream
            self._broke(self.epoch)

    def _arrive_again(self, peer: bytes, header: Header, body: Buffer) -> None:
        """A copy that the network kept: whoever sent it may be dead, and whoever takes it another process."""
        flow = self.net.flows.flow(self.address.name)
        if flow is not None:
            flow.chunk(peer, header, body)

    def _done(self) -> None:
        if self.net.rng.random() < self.net.links.unheard_share:
            self._broke(self.epoch)
        else:
            self._finish()
            self.ended(True)

    def _give_up(self) -> None:
        self.ended(False)


class Pulled:
    """What one rank has received into host memory: pieces, and the versions that they said they were of."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.whole = True
        self.versions: list[VersionId] = []
        self.pieces: list[tuple[int, slice, F32]] = []


class PullStream(SimStream):
    """One rank's pieces on their way from one slave."""

    kind = "pull"

    def __init__(
        self,
        net: DataNetwork,
        moving: SimTransfer,
        pull: PullId,
        grant: Grant,
        address: SlaveAddress,
        pulled: Pulled,
        ranks: int,
        ended: Callable[[], None],
    ) -> None:
        super().__init__(net, moving, pull, address, str(grant.version), pulled.rank, ranks)
        self.pulled, self.ended, self._granted = pulled, ended, grant.version
        self._missing = dict.fromkeys(split(self.pieces, CHUNK_BYTES))

    def _on_message(self, kind: Kind, body: bytes) -> None:
        assert kind is Kind.WELCOME, kind
        self._want(tuple(self._missing))
        self._end_if_whole()

    def _want(self, chunks: tuple[Range, ...]) -> None:
        flow = self._flow
        assert flow is not None
        for send, tracker in flow.want(self._peer, self._stream, chunks) if chunks else ():
            self._carry(flow, send, tracker)

    def _carry(self, flow: SimFlow, send: ChunkSend, tracker: SimTracker) -> None:
        """One chunk on its way: its bytes are read when the last of them has left."""
        net, epoch = self.net, self.epoch
        rng, links, what = net.rng, net.links, f"chunk {self.label}"
        broken, corrupt = rng.random() < links.broken_share, rng.random() < links.corrupt_share
        passes = self._passes()
        held_s = links.held_s * rng.random() if rng.random() < links.held_share else 0.0

        def leave() -> None:
            body = bytes(send.body)
            if held_s:
                net.heap.after(held_s, f"libzmq lets go of a {what}", let_go)
            else:
                let_go()
            self.moving.gate.pass_on(lambda: arrive(body) if self._lives(epoch) else None)

        def let_go() -> None:
            tracker.done = True
            flow.left()

        def arrive(body: bytes) -> None:
            if broken or not passes or self.net.flows.flow(self.address.name) is not flow:
                self._broke(epoch)
            elif corrupt:
                net.flows.frame_refused("checksum")
                self._want((send.chunk,))
            else:
                self._arrive(send.chunk, body)

        delay_s = net.chunk_delay(self.moving.cluster) if passes else STALL_S
        net.heap.after(delay_s, what, leave)

    def _arrive(self, chunk: Range, body: bytes) -> None:
        if chunk not in self._missing:
            return
        self._heard_at = self.net.heap.now
        del self._missing[chunk]
        begin, end = self.net.layout.place(chunk)
        self.pulled.versions.append(self._granted)
        self.pulled.pieces.append((chunk.layer, slice(begin, end), np.frombuffer(body, np.float32)))
        self.moving.meter.nbytes += len(body)
        self._end_if_whole()

    def _end_if_whole(self) -> None:
        if not self._missing:
            assert self._flow is not None
            self._flow.done(self._peer, self._stream)
            self._finish()
            self.ended()

    def _give_up(self) -> None:
        self.pulled.whole = False
        self.ended()


def share(size: int, rank: int, ranks: int) -> slice:
    """The elements of a flat layer that one rank holds, as FSDP shards dimension 0."""
    return slice(size * rank // ranks, size * (rank + 1) // ranks)


def pieces_of(layout: Layout, layers: Iterable[int], rank: int, ranks: int) -> list[Range]:
    """A rank's share of each layer, as pieces of parameters; one without elements does not travel."""
    found = []
    for (layer, param), field in layout.fields.items():
        if layer in layers:
            held = share(layout.numel[layer], rank, ranks)
            begin, end = max(held.start, field.start), min(held.stop, field.start + field.numel)
            if begin < end:
                found.append(Range(layer, param, begin - field.start, end - begin))
    return found
