"""The simulated network of data, and the rank's ends of its streams: HELLO with rising epochs, until all is moved or it
gives up.

A transfer is ranks × slaves streams, each with HELLO, WANT, chunks and DONE as on the wire; the slave's end is real,
but for its lane (flow.py).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import count
from random import Random
from typing import Protocol

import numpy as np
import xxhash

from dips.dataclass import dataclass
from dips.ids import PullId, PushId, VersionId
from dips.protocol.effects import Grant, SlaveAddress
from dips.protocol.manifest import Manifest
from dips.protocol.rank_keys import KEY_CHARS
from dips.sim.flow import SimLane, SimTracker
from dips.sim.heap import Action, Gate, Heap, Timer
from dips.sim.sizes import Pair, SharedLinks
from dips.slave.ports import F32
from dips.wire.chunks import LayerLayout, put_pulled, split_chunks
from dips.wire.frame import (
    Buffer,
    Header,
    Kind,
    Range,
    StreamName,
    decode_error,
    decode_want,
    decode_welcome,
    encode_done,
    encode_hello,
    encode_ready,
    encode_want,
    make_message,
    pack_header,
    pulled_range_type,
    run_id,
)

# ---- keys -----------------------------------------------------------------------------------------------------------
# Keys of simulated lanes and ranks: names of a key's length. A party that sends a key is assumed to hold it.


LANE_KEY = "lane".ljust(KEY_CHARS, ".")  # key of all slaves, whose lanes are encrypted


def make_keys(attempt: str, ranks: int) -> tuple[str, ...]:
    """Return the keys of the ranks of one attempt of a cluster's trainer; each attempt has its own."""
    return tuple(f"{rank}.{attempt}".ljust(KEY_CHARS, ".") for rank in range(ranks))


# ---- pieces ---------------------------------------------------------------------------------------------------------


def rank_share(size: int, rank: int, ranks: int) -> slice:
    """Return the elements of a flat layer that one rank holds, as FSDP shards dimension 0."""
    return slice(size * rank // ranks, size * (rank + 1) // ranks)


def pieces_of(layout: LayerLayout, layers: Iterable[int], rank: int, ranks: int) -> list[Range]:
    """Return a rank's share of each layer as pieces of parameters, without empty ones."""
    found = []
    for (layer, param), field in layout.fields.items():
        if layer in layers:
            held = rank_share(layout.numel[layer], rank, ranks)
            begin, end = max(held.start, field.start), min(held.stop, field.start + field.numel)
            if begin < end:
                found.append(Range(layer, param, begin - field.start, end - begin))
    return found


# ---- data links -----------------------------------------------------------------------------------------------------
# The data links of parameters: their delay, and the chunks that they break, lose, hold back or deliver twice.
#
# A link between a cluster and a slave can be clogged (almost no bandwidth) or parted, in either direction for a time.


CLOG = 15.0  # factor of the delay on a clogged link


@dataclass
class SimLinks:
    """The faults of the data network: seconds, and shares of streams or chunks."""

    chunk_s: float = 0.05
    spread_s: float = 0.15
    broken_share: float = 0.05  # chunks whose stream breaks before they arrive
    corrupt_share: float = 0.02  # chunks that arrive with a wrong checksum: refused and requested again
    late_share: float = 0.05  # chunks that arrive a second time, `late_s` later
    late_s: float = 4.0
    held_share: float = 0.15  # pulled chunks that libzmq holds for up to `held_s` after they have left
    held_s: float = 4.0
    unheard_share: float = 0.02  # streams whose DONE is lost
    refused_share: float = 0.01  # pushes whose ranges the slave finds wrong
    epochs: int = 3  # streams that a rank tries before it gives up


STEADY = SimLinks(
    broken_share=0.0, corrupt_share=0.0, late_share=0.0, held_share=0.0, unheard_share=0.0, refused_share=0.0
)


class Lanes(Protocol):
    """Returns the present lane of a slave, and is notified of faults."""

    def lane_of(self, slave: str) -> SimLane | None: ...
    def frame_refused(self, why: str) -> None: ...
    def updates_landed(self, depth: int) -> None: ...


# ---- streams ---------------------------------------------------------------------------------------------------------


STALL_S = 2.0  # time without a byte after which a stream counts as broken
Carry = Callable[[str, Action], object]  # carries a message, by its description and what happens on its arrival
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
        for stream in self.streams:
            stream.drop_chunks()

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
        net: DataNetwork,
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
        self._lane: SimLane | None = None
        self._last_message_at = 0.0
        self._free_at = 0.0  # arrival of the last chunk in transit, if chunks are sent one after the other
        self._welcomed, self._told_ready = False, 0
        self._timer: Timer | None = None

    def begin_epoch(self) -> None:
        """Send HELLO with the next epoch, on a new connection."""
        if self._lane is not None:
            self._lane.drop_connection(self._peer)
        self.epoch += 1
        self.drop_chunks()
        self._last_message_at, self._welcomed = self.net.heap.now, False
        self._send_message(f"hello {self.label}", self._send_hello)
        if self._timer is None:
            self._watch_for_stall(self.net.stall_s)

    def on_message(self, peer: bytes, kind: Kind, body: Buffer) -> None:
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
    def _on_message(self, kind: Kind, body: Buffer) -> None:
        """Process WELCOME, WANT or DONE."""

    def carry_chunk(self, chunk: Range, body: Buffer, tracker: SimTracker) -> None:
        """Carry a chunk that the slave sends; a rank that pushes is sent none."""
        raise AssertionError(f"{self.label} is sent {chunk}")

    @abstractmethod
    def _give_up(self) -> None:
        """Process the final failure of the stream."""

    def _send_hello(self) -> None:
        lane = self._lane = self.net.lanes.lane_of(self.address.name)
        if lane is None:
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
        self._peer, self._stream = self._key.encode() + self.net.new_connection(), name.stream_id
        self._told_ready = self._ready
        if lane.connect(self._peer, self, self._key):
            self._tell_slave(Kind.HELLO, encode_hello(name, self.pieces, self._told_ready))
        else:
            self._on_break(self.epoch)

    def _tell_slave(self, kind: Kind, body: bytes) -> None:
        """Pass a message of this stream to the slave, at once."""
        assert self._lane is not None
        self._lane.take_frame(self._peer, *make_message(kind, self.net.run_id, self._stream, body))

    @property
    def _pair(self) -> Pair:
        return self.moving.cluster, self.address.name, self.kind == PushStream.kind

    def drop_chunks(self) -> None:
        """Take chunks of a former epoch, or of a stream that is over, off the links."""
        if self.net.shared is not None:
            self.net.shared.drop_chunks(self._pair, self)

    def _plan_chunk(self, nbytes: int) -> Carry:
        """Return what carries a chunk that leaves now, given its description and what happens when it has arrived."""
        if self.net.shared is not None:
            return partial(self.net.shared.carry, self._pair, nbytes, self)
        return partial(self.net.heap.call_later, self._chunk_delay())

    def _chunk_delay(self) -> float:
        """Return the time until a chunk that leaves now has arrived, if chunks have no sizes."""
        net, now = self.net, self.net.heap.now
        if net.serial_s is None:
            return net.chunk_delay(self.moving.cluster)
        self._free_at = max(now, self._free_at) + net.serial_s
        return self._free_at - now

    def _send_message(self, what: str, arrive: Action, carry: Carry | None = None) -> None:
        """Send a message if both directions of the link pass, since the receiver must have asked for it; else stall.

        carry  carries it; None: it is small, and takes a delay that is drawn
        """
        net, epoch, cluster = self.net, self.epoch, self.moving.cluster

        def pass_gate() -> None:
            self.moving.gate.pass_on(lambda: arrive() if self._is_current(epoch) else None)

        if self._link_passes():
            (carry or partial(net.heap.call_later, net.chunk_delay(cluster)))(what, pass_gate)
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
        if self._lane is not None:
            self._lane.drop_connection(self._peer)
        self.drop_chunks()

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
        if left_s <= 0.0 and (self._is_owed() or self.net.lanes.lane_of(self.address.name) is not self._lane):
            self._on_break(self.epoch)
        if not self.over:
            self._watch_for_stall(left_s if left_s > 0.0 else self.net.stall_s)


# ---- push stream -----------------------------------------------------------------------------------------------------
# Copies of chunks that the network kept may arrive much later: the slave must refuse them.


Spell = Callable[[int, Range], Buffer]  # (rank, chunk) → its body


class PushStream(SimStream):
    """The transfer of one rank's pieces to one slave."""

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
        lane = self.net.lanes.lane_of(self.address.name)
        if lane is None or lane is not self._lane:
            self._on_break(self.epoch)
        else:
            self._tell_slave(Kind.READY, encode_ready(ready))

    def _on_message(self, kind: Kind, body: Buffer) -> None:
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
        place = chunk.layer, chunk.param, chunk.offset
        header = pack_header(Header(Kind.CHUNK, net.run_id, self._stream, len(body), checksum, *place, self._dtype))
        what = f"chunk {self.label}"
        if broken:
            self._send_message(f"broken {what}", lambda: self._on_break(epoch))
        else:
            self._send_message(what, lambda: self._on_chunk(header, body), self._plan_chunk(len(body)))
        if late:
            delay_s = net.chunk_delay(self.moving.cluster) + links.late_s * rng.random()
            net.heap.call_later(delay_s, f"late {what}", lambda: self._arrive_again(peer, header, body))

    def _on_chunk(self, header: bytes, body: Buffer) -> None:
        lane = self.net.lanes.lane_of(self.address.name)
        if lane is None or lane is not self._lane:
            self._on_break(self.epoch)
            return
        self._last_message_at = self.net.heap.now
        self.moving.meter.nbytes += len(body)  # the last one may end the push
        lane.take_chunk(self._peer, header, body)

    def _arrive_again(self, peer: bytes, header: bytes, body: Buffer) -> None:
        """Deliver a copy that the network kept: its sender may be dead, and its receiver another process."""
        lane = self.net.lanes.lane_of(self.address.name)
        if lane is not None and lane.is_served:
            lane.take_chunk(peer, header, body)

    def _on_done(self) -> None:
        if self.net.rng.random() < self.net.links.unheard_share:
            self._on_break(self.epoch)
        else:
            self._end_stream()
            self.ended(True)

    def _give_up(self) -> None:
        self.ended(False)


# ---- pull stream -----------------------------------------------------------------------------------------------------
# A chunk's bytes are read when the last of them leaves the slave; libzmq may hold its buffer for longer.


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
        net: DataNetwork,
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

    def _on_message(self, kind: Kind, body: Buffer) -> None:
        assert kind is Kind.WELCOME, kind
        welcome = decode_welcome(body)
        self._ranges = pulled_range_type(welcome.dtype, welcome.depth)
        self._send_want(tuple(chunk for chunk in self._missing if self.moving.is_open(chunk.layer)))
        self._end_if_whole()

    def _send_want(self, chunks: tuple[Range, ...]) -> None:
        if chunks:
            self._tell_slave(Kind.WANT, encode_want(chunks))

    def carry_chunk(self, chunk: Range, body: Buffer, tracker: SimTracker) -> None:
        """Transfer one chunk: its bytes are read when the last of them has left."""
        net, epoch, lane = self.net, self.epoch, self._lane
        rng, links, what = net.rng, net.links, f"chunk {self.label}"
        broken, corrupt = rng.random() < links.broken_share, rng.random() < links.corrupt_share
        passes = self._link_passes()
        held_s = links.held_s * rng.random() if rng.random() < links.held_share else 0.0

        def leave_slave() -> None:
            arrived = bytes(body)
            if held_s:
                net.heap.call_later(held_s, f"libzmq lets go of a {what}", let_go)
            else:
                let_go()
            self.moving.gate.pass_on(lambda: arrive_at_rank(arrived) if self._is_current(epoch) else None)

        def let_go() -> None:
            tracker.done = True

        def arrive_at_rank(arrived: bytes) -> None:
            if broken or not passes or self.net.lanes.lane_of(self.address.name) is not lane:
                self._on_break(epoch)
            elif corrupt:
                net.lanes.frame_refused("checksum")
                self._send_want((chunk,))
            else:
                self._on_chunk(chunk, arrived)

        carry = self._plan_chunk(len(body)) if passes else partial(net.heap.call_later, STALL_S)
        carry(what, leave_slave)

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
            self._tell_slave(Kind.DONE, encode_done(sum(piece.nbytes for piece in self.pieces)))
            self._end_stream()
            if self.pieces and (depth := self._ranges(*self.pieces[0]).depth):
                self.net.lanes.updates_landed(depth)
            self.ended()

    def _give_up(self) -> None:
        self.pulled.whole = False
        self.ended()


# ---- transfer --------------------------------------------------------------------------------------------------------
# A transfer is ranks × slaves streams. Its owner may end it, stop it, or lose ranks of it.


class DataNetwork:
    """The data links between all clusters and slaves, with the shared data of both ends, and the transfers on them."""

    def __init__(
        self,
        heap: Heap,
        rng: Random,
        lanes: Lanes,
        run: str,
        manifest: Manifest,
        slowness: Mapping[str, float],
        stall_s: float,
    ) -> None:
        """Create the links; `slowness` is the factor of all delays on a cluster's link, by default 1."""
        self.heap, self.rng, self.lanes, self.slowness = heap, rng, lanes, slowness
        self.run, self.run_id, self.stall_s = run, run_id(run), stall_s
        self.manifest, self.layout = manifest, LayerLayout(manifest, range(len(manifest.layers)))
        self._connections = count(1)
        self._pieces: dict[tuple[tuple[int, ...], int, int], tuple[Range, ...]] = {}
        self.links = SimLinks()
        self.shared: SharedLinks | None = None  # links of a scenario with sizes; set by the world
        self.serial_s: float | None = (
            None  # time of a chunk if each stream sends one after the other; None: in parallel
        )
        self.chunk_bytes = 0  # largest chunk; set by the world
        self.meters: dict[str, list[Meter]] = {}  # transfers of each cluster, in order
        self._parted: dict[tuple[str, str], float] = {}  # (sender, receiver) → end of the partition
        self._clogged: dict[str, float] = {}  # cluster → end of the clogging

    def repair_links(self) -> None:
        """Remove all faults: no stream breaks any more."""
        self.links = STEADY
        self._parted.clear()
        self._clogged.clear()

    def part_link(self, sender: str, receiver: str, until: float) -> None:
        """Let nothing pass in this direction until the given time."""
        self._parted[sender, receiver] = until

    def clog_link(self, cluster: str, until: float) -> None:
        """Let almost nothing pass on the cluster's link until the given time."""
        self._clogged[cluster] = until

    def new_connection(self) -> bytes:
        """Return a new connection id, as ROUTER assigns them, never used twice."""
        return next(self._connections).to_bytes(5)

    def rank_pieces(self, layers: tuple[int, ...], rank: int, ranks: int) -> tuple[Range, ...]:
        """Return one rank's pieces of these layers."""
        key = (layers, rank, ranks)
        if key not in self._pieces:
            self._pieces[key] = tuple(pieces_of(self.layout, layers, rank, ranks))
        return self._pieces[key]

    def link_passes(self, sender: str, receiver: str) -> bool:
        return not self._parted or self._parted.get((sender, receiver), 0.0) <= self.heap.now

    def chunk_delay(self, cluster: str) -> float:
        clog = CLOG if self._clogged.get(cluster, 0.0) > self.heap.now else 1.0
        return (self.links.chunk_s + self.links.spread_s * self.rng.random()) * self.slowness.get(cluster, 1.0) * clog

    def begin_push(
        self,
        push: PushId,
        grant: Grant,
        spell: Spell,
        keys: tuple[str, ...],
        gate: Gate,
        fragments: int,
        done: Callable[[bool], None],
    ) -> SimTransfer:
        """Move all ranks' pieces to all slaves; `done` gets whether every stream received DONE."""
        moving = self._new_transfer(push.cluster, gate, fragments)
        ended: list[bool] = []

        def one_ended(ok: bool) -> None:
            ended.append(ok)
            if len(ended) == len(keys) * len(grant.slaves):
                moving.meter.ended = self.heap.now
                done(all(ended))

        wrong = self.rng.random() < self.links.refused_share
        for address in grant.slaves:
            for rank, key in enumerate(keys):
                stream = PushStream(self, moving, push, grant, address, rank, len(keys), key, spell, one_ended)
                if wrong and stream.pieces:  # one rank lists a piece twice
                    stream.pieces, wrong = stream.pieces + stream.pieces[:1], False
                stream.begin_epoch()
        return moving

    def begin_pull(
        self,
        pull: PullId,
        grant: Grant,
        keys: tuple[str, ...],
        gate: Gate,
        held: HeldVersion | None,
        fragments: int,
        done: Callable[[list[Pulled]], None],
    ) -> SimTransfer:
        """Send every rank its own pieces from all slaves; `done` gets the received data of each rank."""
        moving = self._new_transfer(pull.cluster, gate, fragments)
        landed = [Pulled(rank) for rank in range(len(keys))]
        left = [len(keys) * len(grant.slaves)]

        def one_ended() -> None:
            left[0] -= 1
            if left[0] == 0:
                moving.meter.ended = self.heap.now
                done(landed)

        for address in grant.slaves:
            for rank, key in enumerate(keys):
                PullStream(
                    self, moving, pull, grant, address, landed[rank], len(keys), key, one_ended, held
                ).begin_epoch()
        return moving

    def _new_transfer(self, cluster: str, gate: Gate, fragments: int) -> SimTransfer:
        meter = Meter(self.heap.now, 0, self.layout.nbytes)
        self.meters.setdefault(cluster, []).append(meter)
        return SimTransfer(cluster, meter, gate, fragments)
