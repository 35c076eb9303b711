"""The ranks' side of the simulated data flow: streams that are late, overtake each other, break, come back, or give up.

One transfer is ranks × slaves streams. Each carries its rank's pieces in chunks, so that there is a moment when half of
them is written. Chunks of a broken stream stay under way and may arrive long after: the slave must refuse them. A link
between a cluster and a slave can be clogged (almost no bandwidth) or parted, either way for a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random
from typing import Protocol

from dips.ids import PullId, PushId, VersionId
from dips.protocol.effects import Grant, SlaveAddress
from dips.sim.fiber import Gate
from dips.sim.flow import CHUNKS, Chunk, SimFlow, share
from dips.sim.heap import Heap
from dips.slave.ports import F32
from dips.wire.frame import Buffer

CLOG = 15.0  # times longer on a clogged link
STALL_S = 2.0  # without a byte: the stream counts as broken

Spell = Callable[[int, int, slice], Buffer]  # (rank, layer, place in it) → the body of that chunk


@dataclass
class Links:
    """How bad the data network is. Seconds and shares of streams."""

    chunk_s: float = 0.05
    spread_s: float = 0.15
    broken_share: float = 0.05  # of chunks whose stream breaks before they arrive
    corrupt_share: float = 0.02  # of chunks that arrive with a wrong checksum: refused, asked again
    late_share: float = 0.05  # of chunks that arrive a second time, `late_s` later
    late_s: float = 4.0
    unheard_share: float = 0.02  # of streams whose DONE is lost
    refused_share: float = 0.01  # of pushes whose ranges the slave finds wrong
    epochs: int = 3  # streams that a rank tries before it gives up


STEADY = Links(broken_share=0.0, corrupt_share=0.0, late_share=0.0, unheard_share=0.0, refused_share=0.0)


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


class Moving:
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
        self, heap: Heap, rng: Random, flows: Flows, sizes: Mapping[int, int], slowness: Mapping[str, float]
    ) -> None:
        """`slowness` says of a cluster how many times longer everything takes on its link; 1 for who is not named."""
        self.heap, self.rng, self.flows, self.sizes, self.slowness = heap, rng, flows, sizes, slowness
        self.links = Links()
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

    def passes(self, sender: str, receiver: str) -> bool:
        return self._parted.get((sender, receiver), 0.0) <= self.heap.now

    def chunk_delay(self, cluster: str) -> float:
        clog = CLOG if self._clogged.get(cluster, 0.0) > self.heap.now else 1.0
        return (self.links.chunk_s + self.links.spread_s * self.rng.random()) * self.slowness.get(cluster, 1.0) * clog

    def push(
        self, push: PushId, grant: Grant, spell: Spell, ranks: int, gate: Gate, done: Callable[[bool], None]
    ) -> Moving:
        """Move all ranks' pieces to all slaves; `done` hears whether every stream heard DONE."""
        moving = self._begun(push.cluster, gate)
        ended: list[bool] = []

        def one_ended(ok: bool) -> None:
            ended.append(ok)
            if len(ended) == ranks * len(grant.slaves):
                moving.meter.ended = self.heap.now
                done(all(ended))

        if self.rng.random() < self.links.refused_share:
            self._hear_refusal(push, grant)
        for address in grant.slaves:
            for rank in range(ranks):
                PushStream(self, moving, push, address, rank, ranks, spell, one_ended).begin()
        return moving

    def pull(self, pull: PullId, grant: Grant, ranks: int, gate: Gate, done: Callable[[list[Pulled]], None]) -> Moving:
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
                PullStream(self, moving, pull, address, landed[rank], ranks, one_ended).begin()
        return moving

    def _begun(self, cluster: str, gate: Gate) -> Moving:
        meter = Meter(self.heap.now, 0, 4 * sum(self.sizes.values()))
        self.meters.setdefault(cluster, []).append(meter)
        return Moving(cluster, meter, gate)

    def _hear_refusal(self, push: PushId, grant: Grant) -> None:
        slave = self.rng.choice(grant.slaves).name

        def refuse() -> None:
            flow = self.flows.flow(slave)
            if flow is not None:
                self.flows.frame_refused("ranges")
                flow.refuse(push, "its ranks' ranges overlap")

        self.heap.after(self.chunk_delay(push.cluster), f"{slave} refuses {push}", refuse)


class Stream:
    """What both directions share: epochs, and chunks that arrive, break, or vanish on a parted link."""

    def __init__(self, net: DataNetwork, moving: Moving, address: SlaveAddress, rank: int, label: str) -> None:
        self.net, self.moving, self.address, self.rank, self.label = net, moving, address, rank, label
        self.epoch = 0
        self.over = False

    def begin(self) -> None:
        """Say HELLO with the next epoch."""
        self.epoch += 1
        self._say(f"hello {self.label}", self._hello)

    def _hello(self) -> None:
        raise NotImplementedError

    def _give_up(self) -> None:
        raise NotImplementedError

    def _say(self, what: str, arrive: Callable[[], None]) -> None:
        """Both directions are needed: nothing travels that its receiver did not ask for."""
        net, epoch, cluster, slave = self.net, self.epoch, self.moving.cluster, self.address.name

        def arrives() -> None:
            self.moving.gate.pass_on(lambda: arrive() if self._lives(epoch) else None)

        if net.passes(cluster, slave) and net.passes(slave, cluster):
            net.heap.after(net.chunk_delay(cluster), what, arrives)
        else:
            net.heap.after(STALL_S, f"{what} stalls", lambda: self._broke(epoch))

    def _lives(self, epoch: int) -> bool:
        return self.epoch == epoch and not self.over and self.moving.runs(self.rank)

    def _broke(self, epoch: int) -> None:
        """The first chunk of an epoch that breaks breaks it; again with a higher one, or never."""
        if not self._lives(epoch):
            return
        if self.epoch < self.net.links.epochs:
            self.begin()
        else:
            self.over = True
            self._give_up()


class PushStream(Stream):
    """One rank's pieces on the way to one slave."""

    def __init__(
        self,
        net: DataNetwork,
        moving: Moving,
        push: PushId,
        address: SlaveAddress,
        rank: int,
        ranks: int,
        spell: Spell,
        ended: Callable[[bool], None],
    ) -> None:
        super().__init__(net, moving, address, rank, f"{push} rank {rank} → {address.name}")
        self.push, self.ended, self.spell = push, ended, spell
        self.places = _places(address.layers, net.sizes, rank, ranks)

    def _hello(self) -> None:
        flow = self.net.flows.flow(self.address.name)
        wanted = flow.hello(self.push, self.rank, self.address.sinc, self.epoch) if flow else None
        if wanted is None:
            self._broke(self.epoch)
        elif wanted:
            for number in wanted:
                self._chunk(number)
        else:  # its DONE was lost: all of it is there
            self._done()

    def _chunk(self, number: int) -> None:
        net, epoch = self.net, self.epoch
        rng, links = net.rng, net.links
        chunk: Chunk = {
            layer: (where, self.spell(self.rank, layer, where)) for layer, where in self.places[number].items()
        }
        broken, corrupt = rng.random() < links.broken_share, rng.random() < links.corrupt_share
        late = rng.random() < links.late_share
        what = f"chunk {self.label}"
        if corrupt:
            net.flows.frame_refused("checksum")
            self._say(f"corrupt {what}", lambda: self._chunk(number))  # refused, and asked again
        elif broken:
            self._say(f"broken {what}", lambda: self._broke(epoch))
        else:
            self._say(what, lambda: self._arrive(epoch, number, chunk))
        if late:
            delay = net.chunk_delay(self.moving.cluster) + links.late_s * rng.random()
            net.heap.after(delay, f"late {what}", lambda: self._arrive_again(epoch, number, chunk))

    def _arrive(self, epoch: int, number: int, chunk: Chunk) -> None:
        flow = self.net.flows.flow(self.address.name)
        if flow is None or not flow.write(self.push, self.rank, self.address.sinc, epoch, number, chunk):
            self._broke(epoch)
            return
        self.moving.meter.nbytes += sum(4 * (where.stop - where.start) for where, _ in chunk.values())
        opened = flow.pushes[self.push]
        if all((self.rank, n) in opened.here for n in range(CHUNKS)):
            self._done()

    def _arrive_again(self, epoch: int, number: int, chunk: Chunk) -> None:
        """A copy that the network kept: whoever sent it may be dead."""
        flow = self.net.flows.flow(self.address.name)
        if flow is not None and not flow.write(self.push, self.rank, self.address.sinc, epoch, number, chunk):
            self.net.flows.frame_refused("not asked for")

    def _done(self) -> None:
        flow = self.net.flows.flow(self.address.name)
        ok = flow is not None and flow.finish(self.push, self.rank, self.address.sinc, self.epoch)
        if not ok or self.net.rng.random() < self.net.links.unheard_share:
            self._broke(self.epoch)
        else:
            self.over = True
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


class PullStream(Stream):
    """One rank's pieces on their way from one slave."""

    def __init__(
        self,
        net: DataNetwork,
        moving: Moving,
        pull: PullId,
        address: SlaveAddress,
        pulled: Pulled,
        ranks: int,
        ended: Callable[[], None],
    ) -> None:
        super().__init__(net, moving, address, pulled.rank, f"{pull} rank {pulled.rank} ← {address.name}")
        self.pull, self.pulled, self.ended = pull, pulled, ended
        self.places = _places(address.layers, net.sizes, pulled.rank, ranks)
        self.missing = list(range(CHUNKS))

    def _hello(self) -> None:
        for number in self.missing:
            self._chunk(number)

    def _chunk(self, number: int) -> None:
        net, epoch = self.net, self.epoch
        rng, links = net.rng, net.links
        broken, corrupt = rng.random() < links.broken_share, rng.random() < links.corrupt_share
        what = f"chunk {self.label}"
        if corrupt:
            net.flows.frame_refused("checksum")
            self._say(f"corrupt {what}", lambda: self._chunk(number))
        elif broken:
            self._say(f"broken {what}", lambda: self._broke(epoch))
        else:
            self._say(what, lambda: self._arrive(epoch, number))

    def _arrive(self, epoch: int, number: int) -> None:
        if number not in self.missing:
            return
        if not self._take(number):
            self._broke(epoch)
            return
        self.missing.remove(number)
        if not self.missing:
            self.over = True
            self.ended()

    def _take(self, number: int) -> bool:
        flow = self.net.flows.flow(self.address.name)
        if flow is None or flow.sinc != self.address.sinc:
            return False
        got = [(layer, where, flow.read(self.pull, layer, where)) for layer, where in self.places[number].items()]
        if any(read is None for _, _, read in got) or (not got and self.pull not in flow.pulls):
            return False
        for layer, where, read in got:
            assert read is not None
            self.pulled.versions.append(read[0])
            self.pulled.pieces.append((layer, where, read[1]))
            self.moving.meter.nbytes += read[1].nbytes
        return True

    def _give_up(self) -> None:
        self.pulled.whole = False
        self.ended()


def _places(layers: tuple[int, ...], sizes: Mapping[int, int], rank: int, ranks: int) -> list[dict[int, slice]]:
    """Where a rank's pieces of a slave's layers lie, chunk by chunk; a piece without elements does not travel."""
    chunks: list[dict[int, slice]] = [{} for _ in range(CHUNKS)]
    for layer in layers:
        whole = share(sizes[layer], rank, ranks)
        for number in range(CHUNKS):
            part = share(whole.stop - whole.start, number, CHUNKS)
            if part.stop > part.start:
                chunks[number][layer] = slice(whole.start + part.start, whole.start + part.stop)
    return chunks
