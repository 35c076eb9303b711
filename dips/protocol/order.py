"""The order of asking: a schedule in which no two workers, of one cluster or of several, meet at a slave in a turn
(§3.1, Figure 5).

A single transfer follows a rotation: worker w begins at slave w mod S and goes on by one slave each turn. With no more
workers than slaves, no two ever meet; with more, each slave has at most ⌈W/S⌉ at once.

Several transfers at once share one line before each slave (`make_lines`), since their remaining bytes and their links
differ. The lines come from a schedule that always serves as many pairs as it can, those with the most work left first:
an edge colouring if all pairs are equal. The lines are an order of asking and no barrier: a late worker is overtaken.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence

from dips.dataclass import dataclass

Lines = tuple[tuple[int, ...], ...]  # the workers of each slave, in the order in which it asks them

LEAST_SHARE = 0.5  # of its own rate: a worker begins at a slave only if this much of the slave's link is free
MAX_RANKS = 65_536  # speaking ranks of one transfer
MOST_PAIRS = 128  # of workers and slaves that are matched; with more, a rotation, since the decision must not take long
_EPSILON = 1e-9


def slaves_for_worker(worker: int, slaves: int) -> tuple[int, ...]:
    """Return the slaves in the order in which `worker` turns to them."""
    return tuple((worker + turn) % slaves for turn in range(slaves))


def places_for_slave(slave: int, slaves: int, first: int, workers: int) -> tuple[int, ...]:
    """Return the turn of each of `workers` workers, from `first` on, in the line before `slave`. Places of several
    transfers are comparable: the smallest is asked first, whichever transfer it belongs to.
    """
    return tuple((slave - worker) % slaves for worker in range(first, first + workers))


def lowest_free(taken: Iterable[tuple[int, int]], workers: int) -> int:
    """Return the lowest number from which `workers` consecutive numbers are in no (first, workers) of `taken`, which
    have no number in common.
    """
    first = 0
    for begin, count in sorted(taken):
        if first + workers <= begin:
            break
        first = begin + count
    return first


@dataclass(frozen=True, slots=True)
class Worker:
    """One speaking rank of a transfer, and its remaining work."""

    seconds: tuple[float, ...]  # to each slave: remaining bytes over the pair's rate; 0: nothing is left
    fill: float  # share of a slave's link that it uses, in (0, 1]


def make_lines(workers: Sequence[Worker], slaves: int) -> Lines:
    """Return the line before each slave, every worker once in each; workers with nothing left for it are last.

    Cost: a matching for each turn, W·S pairs in all, at most MOST_PAIRS of them; more are placed by a rotation.
    """
    turns = plan_turns(workers, slaves)
    line = [[turn.worker for turn in turns if turn.slave == s] for s in range(slaves)]
    idle = [[w for w in range(len(workers)) if workers[w].seconds[s] <= 0] for s in range(slaves)]
    return tuple((*line[s], *idle[s]) for s in range(slaves))


@dataclass(frozen=True, slots=True)
class Turn:
    """One pair of the schedule, in seconds from now."""

    begin: float
    end: float
    worker: int
    slave: int
    share: float  # of the slave's link


def plan_turns(workers: Sequence[Worker], slaves: int) -> list[Turn]:
    """Return the schedule from which the lines are made, in order of beginning."""
    return _Schedule(workers, slaves).play_turns()


class _Schedule:
    """List scheduling: a pair begins when both are free, those with the most work left first, and runs to its end."""

    def __init__(self, workers: Sequence[Worker], slaves: int) -> None:
        self._workers = workers
        self._pending = [{s for s in range(slaves) if w.seconds[s] > 0} for w in workers]
        self._busy = [False] * len(workers)
        self._room = [1.0] * slaves  # share of the slave's link that is free
        self._running: list[tuple[float, int]] = []  # (end, index in _turns)
        self._turns: list[Turn] = []

    def play_turns(self) -> list[Turn]:
        now = 0.0
        while True:
            while pairs := self._match_pairs():
                for worker, slave in pairs:
                    self._begin_turn(worker, slave, now)
            if not self._running:
                return self._turns
            now = self._running[0][0]
            while self._running and self._running[0][0] <= now + _EPSILON:
                turn = self._turns[heapq.heappop(self._running)[1]]
                self._busy[turn.worker] = False
                self._room[turn.slave] += turn.share

    def _begin_turn(self, worker: int, slave: int, now: float) -> None:
        fill, seconds = self._workers[worker].fill, self._workers[worker].seconds[slave]
        share = min(fill, self._room[slave])
        self._pending[worker].discard(slave)
        self._busy[worker] = True
        self._room[slave] -= share
        self._turns.append(Turn(now, now + seconds * fill / share, worker, slave, share))
        heapq.heappush(self._running, (self._turns[-1].end, len(self._turns) - 1))

    def _match_pairs(self) -> list[tuple[int, int]]:
        """Match free workers and slaves that begin now, each in one pair."""
        near = {
            w: [s for s in sorted(slaves) if LEAST_SHARE * self._workers[w].fill <= self._room[s] + _EPSILON]
            for w, slaves in enumerate(self._pending)
            if not self._busy[w]
        }
        load = {("w", w): sum(self._workers[w].seconds[s] for s in self._pending[w]) for w in near}
        for s in range(len(self._room)):
            waits = [worker for worker, slaves in zip(self._workers, self._pending, strict=True) if s in slaves]
            load["s", s] = sum(worker.seconds[s] * worker.fill for worker in waits)
        edges: dict[Node, list[Node]] = {node: [] for node in load}
        for w, slaves in near.items():
            for s in slaves:
                edges["w", w].append(("s", s))
                edges["s", s].append(("w", w))
        return [(node[1], mate[1]) for node, mate in heaviest_first(edges, load).items() if node[0] == "w"]


Node = tuple[str, int]  # ("w", worker) or ("s", slave)


def heaviest_first(edges: Mapping[Node, Sequence[Node]], load: Mapping[Node, float]) -> dict[Node, Node]:
    """Return a matching, from both sides, that leaves no node free in favour of a lighter one on its side.

    So a node that is busy to the last turn of every schedule is busy in this turn too; where all pairs are equal, this
    makes the number of turns that of the busiest node (König).
    """
    mates: dict[Node, Node] = {}
    settled: set[Node] = set()  # only used for membership tests
    for node in sorted(load, key=lambda n: (-load[n], n)):
        if edges[node] and node not in mates:
            _cover_node(node, edges, mates, settled)
        settled.add(node)
    return mates


def _cover_node(node: Node, edges: Mapping[Node, Sequence[Node]], mates: dict[Node, Node], settled: set[Node]) -> None:
    """Match `node` along an alternating path that ends at a free node, or else at the mate of a lighter node."""
    came: dict[Node, Node] = {}  # node of the other side → the node from which it was reached
    walk, lighter = [node], None
    for here in walk:
        for other in edges[here]:
            if other in came:
                continue
            came[other] = here
            if other not in mates:
                _flip_path(other, came, mates)
                return
            mate = mates[other]
            if lighter is None and mate not in settled:
                lighter = other
            walk.append(mate)
    if lighter is not None:
        del mates[mates[lighter]]
        _flip_path(lighter, came, mates)


def _flip_path(end: Node | None, came: Mapping[Node, Node], mates: dict[Node, Node]) -> None:
    """Match each node of the path's side anew, back from `end` to the free node with which the path began."""
    while end is not None:
        here = came[end]
        mates[end], mates[here], end = here, end, mates.get(here)
