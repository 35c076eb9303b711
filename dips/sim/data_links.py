"""The links on which parameters travel: how slow they are, and what they break, lose, hold back or bring twice.

A link between a cluster and a slave can be clogged (almost no bandwidth) or parted, either way for a time. What travels
on them is the business of the streams (streams.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count
from random import Random
from typing import Protocol

from dips.protocol.manifest import Manifest
from dips.sim.flow import SimFlow
from dips.sim.heap import Heap
from dips.sim.pieces import pieces_of
from dips.wire.chunks import LayerLayout, Range
from dips.wire.frame import run_id

CLOG = 15.0  # times longer on a clogged link


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


class Flows(Protocol):
    """Finds the present data flow of a slave, and is notified of what went wrong."""

    def flow_of(self, slave: str) -> SimFlow | None: ...
    def frame_refused(self, why: str) -> None: ...
    def updates_landed(self, depth: int) -> None: ...


class DataLinks:
    """The data links between all clusters and slaves, and what ranks and slaves must agree on to use them."""

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
        self.manifest, self.layout = manifest, LayerLayout(manifest, range(len(manifest.layers)))
        self._connections = count(1)
        self._pieces: dict[tuple[tuple[int, ...], int, int], tuple[Range, ...]] = {}
        self.links = SimLinks()
        self.serial_s: float | None = None  # of a chunk, one behind the other on each stream
        self.chunk_bytes = 0  # at most, of a chunk; the world says it
        self._parted: dict[tuple[str, str], float] = {}  # (sender, receiver) → until when nothing passes
        self._clogged: dict[str, float] = {}  # cluster → until when

    def repair_links(self) -> None:
        """No stream breaks any more."""
        self.links = STEADY
        self._parted.clear()
        self._clogged.clear()

    def part_link(self, sender: str, receiver: str, until: float) -> None:
        """Nothing passes in this direction until then."""
        self._parted[sender, receiver] = until

    def clog_link(self, cluster: str, until: float) -> None:
        """Its link passes almost nothing until then."""
        self._clogged[cluster] = until

    def new_connection(self) -> bytes:
        """A connection of its own, as ROUTER names it: never used twice."""
        return next(self._connections).to_bytes(5)

    def rank_pieces(self, layers: tuple[int, ...], rank: int, ranks: int) -> tuple[Range, ...]:
        """What one rank holds of these layers."""
        key = (layers, rank, ranks)
        if key not in self._pieces:
            self._pieces[key] = tuple(pieces_of(self.layout, layers, rank, ranks))
        return self._pieces[key]

    def link_passes(self, sender: str, receiver: str) -> bool:
        return not self._parted or self._parted.get((sender, receiver), 0.0) <= self.heap.now

    def chunk_delay(self, cluster: str) -> float:
        clog = CLOG if self._clogged.get(cluster, 0.0) > self.heap.now else 1.0
        return (self.links.chunk_s + self.links.spread_s * self.rng.random()) * self.slowness.get(cluster, 1.0) * clog
