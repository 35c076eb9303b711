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
from math import inf

import numpy as np
import numpy.typing as npt

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
Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]


def share_fairly(ends: Integers, rates: Floats) -> Floats:
    """Return the max-min fair rate of each flow, by progressive filling.

    ends   (flows, 2): the numbers of the two links that each passes
    rates  (links,): bytes per second of each

    A link on which none of the flows would get less elsewhere fixes their rates; what they leave on other links is for
    the rest. Cost: flows + links for each of the few steps in which such links are found.
    """
    shares, left, links = np.zeros(len(ends)), rates.astype(np.float64), len(rates)
    waiting = np.arange(len(ends))  # flows whose rates are not fixed
    while waiting.size:
        passed = ends[waiting]
        number = np.bincount(passed.ravel(), minlength=links)
        equal = np.maximum(LEAST_RATE, left / np.maximum(1, number))
        most = equal[passed].min(axis=1)  # of each flow, by the tighter of its links
        least = np.full(links, inf)
        np.minimum.at(least, passed, most[:, None])
        fixed = (least >= equal)[passed].any(axis=1)
        shares[waiting[fixed]] = most[fixed]
        left -= np.bincount(passed[fixed].ravel(), weights=most[fixed].repeat(2), minlength=links)
        waiting = waiting[~fixed]
    return shares


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
    row: int = -1  # in the columns of its direction; -1 until links are shared


class SharedLinks:
    """Moves chunks over the links of clusters and slaves, and keeps account of what each slave did.

    Rates change only where a pair begins or ends to move something, and then those of its direction; between such
    moments an arrival costs a look at the times of all pairs, as an array.
    """

    def __init__(self, heap: Heap, sizes: Sizes, slaves: Iterable[str], lasts_s: float = inf) -> None:
        """`lasts_s`: of the run, after whose end nothing counts."""
        self._heap, self._sizes, self._lasts_s = heap, sizes, lasts_s
        self.use = {slave: SlaveUse(keeps=number == 0) for number, slave in enumerate(slaves)}
        ups = dict.fromkeys(self.use, sizes.slave) | {name: rate.up for name, rate in sizes.clusters.items()}
        downs = ups | {name: rate.down for name, rate in sizes.clusters.items()}
        self._numbers = {name: number for number, name in enumerate(ups)}  # of links; those of slaves come first
        self._ways = {up: _Way(up, rates, len(self.use)) for up, rates in ((True, ups), (False, downs))}

    def carry(self, pair: Pair, nbytes: int, owner: object, what: str, arrive: Action) -> None:
        """Move a simulated chunk of `nbytes`, after what this pair has under way; then call `arrive`."""
        chunk, way = MovingChunk(owner, nbytes * self._sizes.byte_stands_for, what, arrive), self._ways[pair[2]]
        flow = way.flows.get(pair)
        if flow is not None:
            flow.chunks.append(chunk)
            return
        way.flows[pair] = PairFlow(pair, deque([chunk]))
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
        elif flow.chunks[0] is not first and flow.row >= 0:
            way.left[flow.row], way.due[flow.row] = flow.chunks[0].nbytes, inf  # it stands until links are shared anew
        self._plan_sharing(way)

    def note_work(self, slave: str, order: type, seconds: float) -> None:
        """Note a slave's work, which begins now."""
        use = self.use[slave]
        use.work_s[order.__name__] = use.work_s.get(order.__name__, 0.0) + min(seconds, self._lasts_s - self._heap.now)
        use.begin(self._heap.now)
        self._heap.call_later(seconds, f"{slave} has worked", lambda: use.end(self._heap.now))

    def end_run(self) -> None:
        """Count what has moved since links were last shared: a transfer may begin hours before the end."""
        for way in self._ways.values():
            self._advance(way)

    def _plan_sharing(self, way: _Way) -> None:
        if not way.planned:  # once for all chunks that begin or end until then
            way.planned = True
            self._heap.call_later(self._sizes.settles_s, "links are shared", lambda: self._share_links(way))

    def _share_links(self, way: _Way) -> None:
        way.planned = False
        self._advance(way)
        way.renew_rows(self._numbers)
        way.rate = share_fairly(way.ends, way.rates)
        way.due = self._heap.now + np.maximum(0.0, way.left) / way.rate
        way.sums = np.asarray(np.bincount(way.ends[:, 1], way.rate, len(self.use)), np.float64)
        self._plan_arrival(way)

    def _advance(self, way: _Way) -> None:
        """Move what the present rates have moved since they were set."""
        since, now = way.since, min(self._heap.now, self._lasts_s)
        way.since = now
        if now == since:
            return
        moving = way.due < inf
        way.left[moving] = (way.due[moving] - now) * way.rate[moving]
        for use, rate in zip(self.use.values(), way.sums.tolist(), strict=True):
            if rate:
                use.links[way.up].move(since, now, rate)

    def _plan_arrival(self, way: _Way) -> None:
        if way.timer is not None:
            way.timer.cancel()
            way.timer = None
        first = way.due.min(initial=inf)
        if first < inf:
            way.timer = self._heap.call_at(float(first), "chunks arrive", lambda: self._on_arrival(way))

    def _on_arrival(self, way: _Way) -> None:
        """Let all chunks arrive that are due, in the order in which their pairs began."""
        for row in np.flatnonzero(way.due <= self._heap.now + ARRIVED_S).tolist():
            flow = way.rows[row]
            chunk = flow.chunks.popleft()
            self._heap.call_later(0.0, chunk.what, chunk.arrive)
            if flow.chunks:
                way.due[row] += flow.chunks[0].nbytes / way.rate[row]
            else:
                self._end_flow(way, flow)
                self._plan_sharing(way)
        self._plan_arrival(way)

    def _end_flow(self, way: _Way, flow: PairFlow) -> None:
        del way.flows[flow.pair]
        if flow.row >= 0:
            way.due[flow.row] = inf
        self.use[flow.pair[1]].end(self._heap.now)


class _Way:
    """The flows of one direction, up to the slaves or down from them, in columns; a flow that begins gets its row as
    links are shared, one that ends loses it then.
    """

    def __init__(self, up: bool, rates: Mapping[str, float], slaves: int) -> None:
        self.up, self.rates = up, np.array(list(rates.values()))
        self.flows: dict[Pair, PairFlow] = {}
        self.rows: list[PairFlow] = []
        self.ends: Integers = np.zeros((0, 2), np.int64)  # the links that each passes: cluster's and slave's
        self.rate: Floats = np.zeros(0)  # bytes per second
        self.left: Floats = np.zeros(0)  # bytes of the first chunk when the rates were set
        self.due: Floats = np.zeros(0)  # when it arrives at this rate; inf: none moves
        self.sums: Floats = np.zeros(slaves)  # bytes per second at each slave, since `since`
        self.since = 0.0
        self.timer: Timer | None = None  # of the next arrival
        self.planned = False  # whether rates will be computed anew

    def renew_rows(self, numbers: Mapping[str, int]) -> None:
        """Give each flow a row, in the order in which they began; `numbers` are those of the links."""
        rows = list(self.flows.values())
        begun = next((i for i, flow in enumerate(rows) if flow.row < 0), len(rows))
        kept = np.array([flow.row for flow in rows[:begun]], np.int64)
        fresh = [(numbers[flow.pair[0]], numbers[flow.pair[1]]) for flow in rows[begun:]]
        self.ends = np.concatenate([self.ends[kept], np.array(fresh, np.int64).reshape(-1, 2)])
        self.left = np.concatenate([self.left[kept], [flow.chunks[0].nbytes for flow in rows[begun:]]])
        for row, flow in enumerate(rows):
            flow.row = row
        self.rows = rows
