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
from heapq import heapify, heappop, heappush
from math import inf
from operator import itemgetter

from dips.dataclass import dataclass
from dips.sim.heap import Action, Heap, Timer

ARRIVED_S = 1e-6  # chunks that are due within it arrive together: times are rounded
LEAST_RATE = 1e-6  # bytes per second, of a flow for which rounded sums leave nothing
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
    settles_s: float = 0.0  # until links are shared anew after a transfer has begun or ended: many do so together
    short: float = 1.0  # share of their usual time that short orders and transactions take


Pair = tuple[str, str, bool]  # cluster, slave, and whether it is up to the slave
Link = tuple[str, bool]  # of a cluster or slave, in one direction


def share_fairly(flows: Iterable[Pair], rates: Mapping[Link, float]) -> dict[Pair, float]:
    """Return the max-min fair rate of each flow, by progressive filling; `rates` are those of the links.

    The link whose equal shares are the least fixes its flows' rates; what they leave on other links is for the rest.
    Cost: (flows + links) × log links: as flows are fixed a link's equal share only rises, so a heap's stale one comes
    too early and is put back.
    """
    waiting: dict[Link, list[Pair]] = {}
    for flow in flows:
        for link in _links_of(flow):
            waiting.setdefault(link, []).append(flow)
    number = {link: len(waits) for link, waits in waiting.items()}  # of flows that are not fixed
    left = {link: rates[link] for link in waiting}
    tightest = [(left[link] / count, i, link) for i, (link, count) in enumerate(number.items())]
    heapify(tightest)
    shares: dict[Pair, float] = {}
    while tightest:
        share, i, link = heappop(tightest)
        if not number[link]:
            continue
        present = left[link] / number[link]
        if present > share:
            heappush(tightest, (present, i, link))
            continue
        share = max(LEAST_RATE, share)
        for flow in waiting[link]:
            if flow not in shares:
                shares[flow] = share
                for shared in _links_of(flow):
                    left[shared] -= share
                    number[shared] -= 1
    return shares


def _links_of(flow: Pair) -> tuple[Link, Link]:
    cluster, slave, up = flow
    return (cluster, up), (slave, up)


class LinkUse:
    """The bytes that one direction of a slave's link moved, and its peak as a monitor sees it: a mean over SAMPLE_S."""

    def __init__(self, keeps: bool = False) -> None:
        """`keeps`: the bytes of every sample in which something moved."""
        self.nbytes = 0.0
        self.samples: dict[int, float] | None = {} if keeps else None
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
                if self.samples is not None:
                    self.samples |= dict.fromkeys(range(first + 1, last), rate * SAMPLE_S)
            self._add(last, rate * (end - last * SAMPLE_S))

    def _add(self, sample: int, nbytes: float) -> None:
        if sample != self._sample:
            self._peak, self._sample, self._sampled = self.peak, sample, 0.0
        self._sampled += nbytes
        if self.samples is not None:
            self.samples[sample] = self.samples.get(sample, 0.0) + nbytes


class SlaveUse:
    """A slave's account: seconds of work by order, bytes each way, and the seconds in which anything went on."""

    def __init__(self, keeps: bool) -> None:
        """`keeps`: the rates of its link, sample by sample."""
        self.work_s: dict[str, float] = {}
        self.links = {up: LinkUse(keeps) for up in (True, False)}  # up: received; down: sent
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
    """A chunk on its way or waiting for it: its bytes, and what happens when they have arrived."""

    owner: object  # the stream that it belongs to
    nbytes: float
    what: str
    arrive: Action


@dataclass(eq=False)
class PairFlow:
    """The chunks that a pair moves, in order, the first of them at the pair's present rate."""

    pair: Pair
    chunks: deque[MovingChunk]
    rate: float = 0.0  # bytes per second
    left: float = 0.0  # bytes of the first chunk when the rate was set
    due: float = inf  # when it arrives at this rate


class SharedLinks:
    """Moves chunks over the links of clusters and slaves, and keeps account of what each slave did.

    Rates change only where a pair begins or ends to move something, and then those of its direction; between such
    moments each arrival costs its own pair alone.
    """

    def __init__(self, heap: Heap, sizes: Sizes, slaves: Iterable[str]) -> None:
        self._heap, self._sizes = heap, sizes
        self.use = {slave: SlaveUse(keeps=number == 0) for number, slave in enumerate(slaves)}
        self._rates: dict[Link, float] = {(slave, up): sizes.slave for slave in self.use for up in (True, False)}
        for cluster, rate in sizes.clusters.items():
            self._rates |= {(cluster, True): rate.up, (cluster, False): rate.down}
        self._ways = {up: _Way() for up in (True, False)}

    def carry(self, pair: Pair, nbytes: int, owner: object, what: str, arrive: Action) -> None:
        """Move a simulated chunk of `nbytes`, after what this pair has under way; then call `arrive`."""
        chunk, way = MovingChunk(owner, nbytes * self._sizes.byte_stands_for, what, arrive), self._ways[pair[2]]
        flow = way.flows.get(pair)
        if flow is not None:
            flow.chunks.append(chunk)
            return
        way.flows[pair] = PairFlow(pair, deque([chunk]), left=chunk.nbytes)
        self.use[pair[1]].begin(self._heap.now)
        self._plan_sharing(way)

    def drop_chunks(self, pair: Pair, owner: object) -> None:
        """Take a stream's chunks off the links, since its connection is closed; they arrive now, where none waits."""
        way = self._ways[pair[2]]
        flow = way.flows.get(pair)
        if flow is None or all(chunk.owner is not owner for chunk in flow.chunks):
            return
        self._advance(way)
        first = flow.chunks[0]
        for chunk in [chunk for chunk in flow.chunks if chunk.owner is owner]:
            flow.chunks.remove(chunk)
            self._heap.call_later(0.0, chunk.what, chunk.arrive)
        if not flow.chunks:
            self._end_flow(way, flow)
        elif flow.chunks[0] is not first:
            flow.left, flow.due = flow.chunks[0].nbytes, inf  # it stands until links are shared anew
        self._plan_sharing(way)

    def note_work(self, slave: str, order: type, seconds: float) -> None:
        """Note a slave's work, which begins now."""
        use = self.use[slave]
        use.work_s[order.__name__] = use.work_s.get(order.__name__, 0.0) + seconds
        use.begin(self._heap.now)
        self._heap.call_later(seconds, f"{slave} has worked", lambda: use.end(self._heap.now))

    def _plan_sharing(self, way: _Way) -> None:
        if not way.planned:  # once for all chunks that begin or end until then
            way.planned = True
            self._heap.call_later(self._sizes.settles_s, "links are shared", lambda: self._share_links(way))

    def _share_links(self, way: _Way) -> None:
        way.planned = False
        self._advance(way)
        shares, now = share_fairly(way.flows, self._rates), self._heap.now
        way.sums.clear()
        for pair, flow in way.flows.items():
            flow.rate = shares[pair]
            flow.due = now + max(0.0, flow.left) / flow.rate
            way.sums[pair[1]] = way.sums.get(pair[1], 0.0) + flow.rate
        way.arrivals = [(flow.due, number, flow) for number, flow in enumerate(way.flows.values())]
        heapify(way.arrivals)
        self._plan_arrival(way)

    def _advance(self, way: _Way) -> None:
        """Move what the present rates have moved since they were set."""
        since, now = way.since, self._heap.now
        way.since = now
        if now == since:
            return
        for flow in way.flows.values():
            if flow.due < inf:
                flow.left = (flow.due - now) * flow.rate
        for slave, rate in way.sums.items():
            self.use[slave].links[way is self._ways[True]].move(since, now, rate)

    def _plan_arrival(self, way: _Way) -> None:
        if way.timer is not None:
            way.timer.cancel()
            way.timer = None
        if way.arrivals:
            way.timer = self._heap.call_at(way.arrivals[0][0], "chunks arrive", lambda: self._on_arrival(way))

    def _on_arrival(self, way: _Way) -> None:
        """Let all chunks arrive that are due, in the order in which their pairs began."""
        now, arrived = self._heap.now, list[tuple[int, PairFlow]]()
        while way.arrivals and way.arrivals[0][0] <= now + ARRIVED_S:
            due, number, flow = heappop(way.arrivals)
            if due == flow.due:  # else its chunks were dropped
                arrived.append((number, flow))
        for number, flow in sorted(arrived, key=itemgetter(0)):
            chunk = flow.chunks.popleft()
            self._heap.call_later(0.0, chunk.what, chunk.arrive)
            if flow.chunks:
                flow.due += flow.chunks[0].nbytes / flow.rate
                heappush(way.arrivals, (flow.due, number, flow))
            else:
                self._end_flow(way, flow)
                self._plan_sharing(way)
        self._plan_arrival(way)

    def _end_flow(self, way: _Way, flow: PairFlow) -> None:
        del way.flows[flow.pair]
        flow.due = inf
        self.use[flow.pair[1]].end(self._heap.now)


class _Way:
    """The flows of one direction, up to the slaves or down from them."""

    def __init__(self) -> None:
        self.flows: dict[Pair, PairFlow] = {}
        self.sums: dict[str, float] = {}  # bytes per second at each slave, since `since`
        self.since = 0.0
        self.arrivals: list[tuple[float, int, PairFlow]] = []  # a heap: when the first chunk of each flow arrives
        self.timer: Timer | None = None  # of the next arrival
        self.planned = False  # whether rates will be computed anew
