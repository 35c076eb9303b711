"""Sizes of a simulated run: links that transfers share by their rates, and the seconds of a slave's work.

A scenario with Sizes moves the same few elements as any other, but each byte stands for many of a real model. Chunks
between a cluster and a slave follow one another, as on a TCP connection; pairs that share a cluster's or a slave's
link share its rate fairly (max-min: nobody can get more without taking it from somebody who has no more). Both
directions of a link are independent. Work of a slave takes what `Sizes.work_s` says of its order.

Known limits: rates do not change and latencies are those of the simulated network; a slave's work is not slowed by its
transfers, nor by work beside it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import field

from dips.dataclass import dataclass
from dips.sim.heap import Action, Heap, Timer

ARRIVED_S = 1e-6  # a chunk with less left to send has arrived: times are rounded
SAMPLE_S = 10.0


@dataclass(frozen=True)
class SimLinkRate:
    """Bytes per second of a link: up to the slaves, down to the cluster."""

    up: float
    down: float


@dataclass(frozen=True)
class Sizes:
    """The sizes and rates of a scenario."""

    byte_stands_for: float  # bytes of the real model that one byte of a simulated chunk stands for
    clusters: Mapping[str, SimLinkRate]
    slave: float  # bytes per second of each slave's link, in each direction
    work_s: Mapping[type, float] = field(default_factory=dict)  # least time of a slave's order, by its class


Pair = tuple[str, str, bool]  # cluster, slave, and whether it is up to the slave
Link = tuple[str, bool]  # of a cluster or slave, in one direction


def share_fairly(flows: Iterable[Pair], rates: Mapping[Link, float]) -> dict[Pair, float]:
    """Return the max-min fair rate of each flow, by progressive filling; `rates` are those of the links.

    The link whose equal shares are the least fixes its flows' rates; what they leave on other links is for the rest.
    Cost: links² + 2 × flows.
    """
    left = dict(rates)
    waiting: dict[Link, dict[Pair, None]] = {}
    for flow in flows:
        for link in _links_of(flow):
            waiting.setdefault(link, {})[flow] = None
    shares: dict[Pair, float] = {}
    while waiting:
        tightest = min(waiting, key=lambda link: left[link] / len(waiting[link]))
        share = max(0.0, left[tightest] / len(waiting[tightest]))
        for flow in list(waiting[tightest]):
            shares[flow] = share
            for link in _links_of(flow):
                left[link] -= share
                del waiting[link][flow]
                if not waiting[link]:
                    del waiting[link]
    return shares


def _links_of(flow: Pair) -> tuple[Link, Link]:
    cluster, slave, up = flow
    return (cluster, up), (slave, up)


class LinkUse:
    """The bytes that one direction of a slave's link moved, and its peak as a monitor sees it: a mean over SAMPLE_S."""

    def __init__(self) -> None:
        self.nbytes = 0.0
        self._peak = 0.0
        self._sample, self._sampled = 0, 0.0  # number of the present sample, and its bytes so far

    @property
    def peak(self) -> float:
        """Bytes per second."""
        return max(self._peak, self._sampled / SAMPLE_S)

    def move(self, begin: float, end: float, rate: float) -> None:
        """Note bytes that moved at a constant rate; calls are in the order of time."""
        self.nbytes += rate * (end - begin)
        first, last = int(begin / SAMPLE_S), int(end / SAMPLE_S)
        self._add(first, rate * (min(end, (first + 1) * SAMPLE_S) - begin))
        if last > first:
            if last > first + 1:
                self._peak = max(self._peak, rate)
            self._add(last, rate * (end - last * SAMPLE_S))

    def _add(self, sample: int, nbytes: float) -> None:
        if sample != self._sample:
            self._peak, self._sample, self._sampled = self.peak, sample, 0.0
        self._sampled += nbytes


class SlaveUse:
    """A slave's account: seconds of work by order, bytes each way, and the seconds in which anything went on."""

    def __init__(self) -> None:
        self.work_s: dict[str, float] = {}
        self.links = {True: LinkUse(), False: LinkUse()}  # up: received; down: sent
        self._busy_s = 0.0
        self._doing = 0
        self._since = 0.0

    def begin(self, now: float) -> None:
        """Note the begin of a transfer or of work; several may go on at once."""
        if not self._doing:
            self._since = now
        self._doing += 1

    def end(self, now: float) -> None:
        self._doing -= 1
        if not self._doing:
            self._busy_s += now - self._since

    def busy_s(self, now: float) -> float:
        """Return the seconds in which anything went on."""
        return self._busy_s + (now - self._since if self._doing else 0.0)


@dataclass(eq=False)
class MovingChunk:
    """A chunk on its way: the bytes that are left, and what happens when there are none."""

    owner: object  # the stream that it belongs to
    left: float
    what: str
    arrive: Action


class SharedLinks:
    """Moves chunks over the links of clusters and slaves, and keeps account of what each slave did."""

    def __init__(self, heap: Heap, sizes: Sizes, slaves: Iterable[str]) -> None:
        self._heap, self._sizes = heap, sizes
        self.use = {slave: SlaveUse() for slave in slaves}
        self._rates: dict[Link, float] = {(slave, up): sizes.slave for slave in self.use for up in (True, False)}
        for cluster, rate in sizes.clusters.items():
            self._rates |= {(cluster, True): rate.up, (cluster, False): rate.down}
        self._queues: dict[Pair, deque[MovingChunk]] = {}  # of pairs that move something, each in order
        self._shares: dict[Pair, float] = {}  # bytes per second of each, since `_since`
        self._sums: dict[Link, float] = {(slave, up): 0.0 for slave in self.use for up in (True, False)}
        self._since = 0.0
        self._timer: Timer | None = None  # of the next arrival
        self._planned = False  # whether the shares are computed anew with the present moment's last event

    def carry(self, pair: Pair, nbytes: int, owner: object, what: str, arrive: Action) -> None:
        """Move a simulated chunk of `nbytes`, after what this pair has under way; then call `arrive`."""
        chunk = MovingChunk(owner, nbytes * self._sizes.byte_stands_for, what, arrive)
        queue = self._queues.get(pair)
        if queue is not None:
            queue.append(chunk)
            return
        self._queues[pair] = deque([chunk])
        self.use[pair[1]].begin(self._heap.now)
        self._plan_sharing()

    def drop_chunks(self, pair: Pair, owner: object) -> None:
        """Take a stream's chunks off the links, since its connection is closed; they arrive now, where none waits."""
        queue = self._queues.get(pair)
        if queue is None or all(chunk.owner is not owner for chunk in queue):
            return
        self._advance()
        for chunk in [chunk for chunk in queue if chunk.owner is owner]:
            queue.remove(chunk)
            self._heap.call_later(0.0, chunk.what, chunk.arrive)
        if not queue:
            self._end_pair(pair)
        self._plan_sharing()

    def note_work(self, slave: str, order: type, seconds: float) -> None:
        """Note a slave's work, which begins now."""
        use = self.use[slave]
        use.work_s[order.__name__] = use.work_s.get(order.__name__, 0.0) + seconds
        use.begin(self._heap.now)
        self._heap.call_later(seconds, f"{slave} has worked", lambda: use.end(self._heap.now))

    def _plan_sharing(self) -> None:
        if not self._planned:  # once for all chunks that begin or end now
            self._planned = True
            self._heap.call_later(0.0, "links are shared", self._share_links)

    def _share_links(self) -> None:
        self._planned = False
        self._advance()
        self._shares = share_fairly(self._queues, self._rates)
        self._sums = dict.fromkeys(self._sums, 0.0)
        for (_, slave, up), share in self._shares.items():
            self._sums[slave, up] += share
        self._plan_arrival()

    def _advance(self) -> None:
        """Move what the present shares have moved since they were last looked at."""
        since, now = self._since, self._heap.now
        self._since = now
        if now == since:
            return
        for pair, share in self._shares.items():
            if (queue := self._queues.get(pair)) is not None:
                queue[0].left -= (now - since) * share
        for (slave, up), rate in self._sums.items():
            if rate:
                self.use[slave].links[up].move(since, now, rate)

    def _plan_arrival(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        left_s = [
            max(0.0, queue[0].left) / self._shares[pair] for pair, queue in self._queues.items() if pair in self._shares
        ]
        self._timer = self._heap.call_later(min(left_s), "chunks arrive", self._on_arrival) if left_s else None

    def _on_arrival(self) -> None:
        self._advance()
        for pair, share in self._shares.items():
            queue = self._queues.get(pair)
            if queue is not None and queue[0].left <= share * ARRIVED_S:
                chunk = queue.popleft()
                self._heap.call_later(0.0, chunk.what, chunk.arrive)
                if not queue:
                    self._end_pair(pair)
                    self._plan_sharing()
        if not self._planned:
            self._plan_arrival()

    def _end_pair(self, pair: Pair) -> None:
        del self._queues[pair]
        self.use[pair[1]].end(self._heap.now)
