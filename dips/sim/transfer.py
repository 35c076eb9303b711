"""The ranks' side of the simulated data flow: streams that are late, break, come back with a higher epoch, or give up.

One push is ranks × slaves streams. Each carries its rank's pieces in two chunks, so that there is a moment when half of
them is written. Chunks of a broken stream stay under way and may arrive long after: the slave must refuse them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random
from typing import Protocol

from dips.ids import PullId, PushId, VersionId
from dips.protocol.effects import Grant, SlaveAddress
from dips.sim.flow import SimFlow, share
from dips.sim.heap import Heap
from dips.slave.ports import F32


@dataclass
class Links:
    """How bad the data network is. Seconds and shares of streams."""

    chunk_s: float = 0.15
    spread_s: float = 0.5
    broken_share: float = 0.06  # of streams that break between their chunks
    late_share: float = 0.05  # of chunks that arrive a second time, `late_s` later
    late_s: float = 4.0
    refused_share: float = 0.01  # of pushes whose ranges the slave finds wrong
    epochs: int = 2  # streams that a rank tries before it gives up


@dataclass
class Meter:
    """What a cluster's present or last transfer has moved: what its beats say."""

    began: float
    nbytes: int = 0
    ended: float | None = None

    def rate(self, now: float, beat_s: float) -> float:
        """Bytes/s; 0 once it is over for longer than a beat."""
        if self.ended is not None and now - self.ended > beat_s:
            return 0.0
        return self.nbytes / max((self.ended or now) - self.began, 1e-3)


STEADY = Links(broken_share=0.0, late_share=0.0, refused_share=0.0)


class Flows(Protocol):
    """Finds the data flow that lives at a slave now."""

    def flow(self, slave: str) -> SimFlow | None: ...


class DataNetwork:
    """Starts transfers; holds the weather of all data links."""

    def __init__(
        self, heap: Heap, rng: Random, flows: Flows, sizes: Mapping[int, int], slowness: Mapping[str, float]
    ) -> None:
        """`slowness` says of a cluster how many times longer everything takes on its link; 1 for who is not named."""
        self.heap, self.rng, self.flows, self.sizes, self.slowness = heap, rng, flows, sizes, slowness
        self.links = Links()
        self.meters: dict[str, list[Meter]] = {}  # of each cluster, its transfers in order

    def mend(self) -> None:
        """No stream breaks any more."""
        self.links = STEADY

    def chunk_delay(self, cluster: str) -> float:
        return (self.links.chunk_s + self.links.spread_s * self.rng.random()) * self.slowness.get(cluster, 1.0)

    def push(
        self, push: PushId, grant: Grant, content: Mapping[int, F32], ranks: int, done: Callable[[bool], None]
    ) -> None:
        """Move all ranks' pieces to all slaves; `done` hears whether every stream heard DONE."""
        ended: list[bool] = []
        meter = self._metered(push.cluster)

        def one_ended(ok: bool) -> None:
            ended.append(ok)
            if len(ended) == ranks * len(grant.slaves):
                meter.ended = self.heap.now
                done(all(ended))

        if self.rng.random() < self.links.refused_share:
            self._hear_refusal(push, grant)
        for address in grant.slaves:
            for rank in range(ranks):
                PushStream(self, push, address, rank, ranks, content, one_ended).begin()

    def pull(self, pull: PullId, grant: Grant, ranks: int, done: Callable[[list[Pulled]], None]) -> None:
        """Bring every rank its own pieces from all slaves; `done` hears what each rank has in its host memory."""
        landed = [Pulled(rank) for rank in range(ranks)]
        left = [ranks * len(grant.slaves)]
        meter = self._metered(pull.cluster)

        def one_ended() -> None:
            left[0] -= 1
            if left[0] == 0:
                meter.ended = self.heap.now
                done(landed)

        for address in grant.slaves:
            for rank in range(ranks):
                PullStream(self, pull, address, landed[rank], ranks, one_ended).begin()

    def _metered(self, cluster: str) -> Meter:
        self.meters.setdefault(cluster, []).append(Meter(self.heap.now))
        return self.meters[cluster][-1]

    def rate(self, cluster: str, beat_s: float) -> float:
        """What a beat says: bytes/s of the present or just ended transfer, 0 if there is none."""
        meters = self.meters.get(cluster)
        return meters[-1].rate(self.heap.now, beat_s) if meters else 0.0

    def _hear_refusal(self, push: PushId, grant: Grant) -> None:
        slave = self.rng.choice(grant.slaves).name

        def refuse() -> None:
            flow = self.flows.flow(slave)
            if flow is not None:
                flow.refuse(push, "its ranks' ranges overlap")

        self.heap.after(self.chunk_delay(push.cluster), f"{slave} refuses {push}", refuse)


class PushStream:
    """One rank's pieces on the way to one slave."""

    def __init__(
        self,
        net: DataNetwork,
        push: PushId,
        address: SlaveAddress,
        rank: int,
        ranks: int,
        content: Mapping[int, F32],
        ended: Callable[[bool], None],
    ) -> None:
        self.net, self.push, self.address, self.rank, self.ended = net, push, address, rank, ended
        self.label = f"{push} rank {rank} → {address.name}"
        self.halves = _halves(address.layers, net.sizes, rank, ranks, content)
        self.epoch = 0

    def begin(self) -> None:
        """Say HELLO with the next epoch."""
        self.epoch += 1
        epoch = self.epoch

        def hello() -> None:
            flow = self.net.flows.flow(self.address.name)
            if flow is None or not flow.hello(self.push, self.rank, self.address.sinc, epoch):
                self._broke()
            else:
                self._chunk(epoch, 0)

        self.net.heap.after(self.net.chunk_delay(self.push.cluster), f"hello {self.label}", hello)

    def _chunk(self, epoch: int, half: int) -> None:
        net = self.net
        broken, late = net.rng.random() < net.links.broken_share, net.rng.random() < net.links.late_share

        def arrive() -> None:
            flow = net.flows.flow(self.address.name)
            if flow is None or not flow.write(self.push, self.rank, self.address.sinc, epoch, self.halves[half]):
                self._broke()
                return
            net.meters[self.push.cluster][-1].nbytes += sum(values.nbytes for _, values in self.halves[half].values())
            if half == 0:
                self._chunk(epoch, 1)
            else:
                self.ended(flow.finish(self.push, self.rank, self.address.sinc, epoch))

        def arrive_again() -> None:
            flow = net.flows.flow(self.address.name)
            if flow is not None:
                flow.write(self.push, self.rank, self.address.sinc, epoch, self.halves[half])

        delay = net.chunk_delay(self.push.cluster)
        if late:
            net.heap.after(delay + net.links.late_s * net.rng.random(), f"late chunk {self.label}", arrive_again)
        net.heap.after(delay, f"chunk {self.label}", self._broke if broken else arrive)

    def _broke(self) -> None:
        if self.epoch < self.net.links.epochs:
            self.begin()
        else:
            self.ended(False)


class Pulled:
    """What one rank has received into host memory: pieces, and the versions that they said they were of."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.whole = True
        self.versions: list[VersionId] = []
        self.pieces: list[tuple[int, slice, F32]] = []


class PullStream:
    """One rank's pieces on their way from one slave."""

    def __init__(
        self,
        net: DataNetwork,
        pull: PullId,
        address: SlaveAddress,
        pulled: Pulled,
        ranks: int,
        ended: Callable[[], None],
    ) -> None:
        self.net, self.pull, self.address, self.pulled, self.ended = net, pull, address, pulled, ended
        self.label = f"{pull} rank {pulled.rank} ← {address.name}"
        whole = [(layer, share(net.sizes[layer], pulled.rank, ranks)) for layer in address.layers]
        self.halves = [[(layer, half) for layer, where in whole for half in [_cut(where)[i]]] for i in (0, 1)]
        self.epoch = 0

    def begin(self) -> None:
        self.epoch += 1
        self._chunk(0)

    def _chunk(self, half: int) -> None:
        net = self.net
        broken = net.rng.random() < net.links.broken_share

        def arrive() -> None:
            if not self._take(half):
                self._broke()
            elif half == 0:
                self._chunk(1)
            else:
                self.ended()

        delay = net.chunk_delay(self.pull.cluster)
        net.heap.after(delay, f"chunk {self.label}", self._broke if broken else arrive)

    def _take(self, half: int) -> bool:
        flow = self.net.flows.flow(self.address.name)
        if flow is None or flow.sinc != self.address.sinc:
            return False
        for layer, where in self.halves[half]:
            got = flow.read(self.pull, layer, where)
            if got is None:
                return False
            self.pulled.versions.append(got[0])
            self.pulled.pieces.append((layer, where, got[1]))
            self.net.meters[self.pull.cluster][-1].nbytes += got[1].nbytes
        return True

    def _broke(self) -> None:
        if self.epoch < self.net.links.epochs:
            self.begin()
        else:
            self.pulled.whole = False
            self.ended()


def _cut(where: slice) -> tuple[slice, slice]:
    middle = (where.start + where.stop) // 2
    return slice(where.start, middle), slice(middle, where.stop)


def _halves(
    layers: tuple[int, ...], sizes: Mapping[int, int], rank: int, ranks: int, content: Mapping[int, F32]
) -> list[dict[int, tuple[slice, F32]]]:
    """A rank's pieces of a slave's layers as two chunks."""
    cuts = {layer: _cut(share(sizes[layer], rank, ranks)) for layer in layers}
    return [{layer: (cuts[layer][i], content[layer][cuts[layer][i]]) for layer in layers} for i in (0, 1)]
