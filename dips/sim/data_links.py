"""The data links of parameters: the pieces they carry, their delay, the chunks that they break, lose or hold back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import count
from random import Random
from typing import Protocol

from dips.protocol.manifest import Manifest
from dips.protocol.rank_keys import KEY_CHARS
from dips.sim.flow import SimFlow
from dips.sim.heap import Heap
from dips.wire.chunks import LayerLayout
from dips.wire.frame import Range, run_id

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
# The streams on the links are in streams.py.


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


class Flows(Protocol):
    """Returns the present data flow of a slave, and is notified of faults."""

    def flow_of(self, slave: str) -> SimFlow | None: ...
    def frame_refused(self, why: str) -> None: ...
    def updates_landed(self, depth: int) -> None: ...


class DataLinks:
    """The data links between all clusters and slaves, with the shared data of both ends."""

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
        """Create the links; `slowness` is the factor of all delays on a cluster's link, by default 1."""
        self.heap, self.rng, self.flows, self.slowness = heap, rng, flows, slowness
        self.run, self.run_id, self.stall_s = run, run_id(run), stall_s
        self.manifest, self.layout = manifest, LayerLayout(manifest, range(len(manifest.layers)))
        self._connections = count(1)
        self._pieces: dict[tuple[tuple[int, ...], int, int], tuple[Range, ...]] = {}
        self.links = SimLinks()
        self.serial_s: float | None = (
            None  # time of a chunk if each stream sends one after the other; None: in parallel
        )
        self.chunk_bytes = 0  # largest chunk; set by the world
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
