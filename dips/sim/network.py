"""The simulated networks: of data (below), and of control, where a question and its answer can be late, lost or twice.

A call ends exactly once: with the first answer before its deadline, or with None. A message is delivered to the process
that runs on the host at that moment, so it may outlive its sender and reach a successor: the fences
(docs/architecture.md#invariants) must handle this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import count
from random import Random
from typing import Any, Protocol

from dips.protocol.manifest import Manifest
from dips.protocol.rank_keys import KEY_CHARS
from dips.sim.flow import SimFlow
from dips.sim.heap import Chance, Heap, Timer
from dips.wire.chunks import LayerLayout
from dips.wire.frame import Range, run_id

Answer = Callable[[Any], None]


class NetworkObserver:
    """The hooks that a network calls; each does nothing by default."""

    def cut_off(self, sender: str, receiver: str, both: bool) -> None:
        """Called when a message is lost on a parted link; `both`: the other direction is parted, too."""

    def passes_again(self, sender: str, receiver: str) -> None:
        """Called when the first message passes a link that was parted."""


class SimHost(Protocol):
    """A named host on which a process may run."""

    def on_message(self, sender: str, message: Any, answer: Answer) -> None:
        """Take a question; call `answer` once, now or later, or never. A dead host does nothing."""


@dataclass
class Weather:
    """The faults of the network: seconds, and shares of messages."""

    delay_s: float = 0.02
    spread_s: float = 0.05
    slow_share: float = 0.03  # messages that take up to `slow_s` more, so that messages overtake each other
    slow_s: float = 3.0
    lost_share: float = 0.03
    doubled_share: float = 0.05


CLOGGED_S = 6.0

CLEAR = Weather(slow_share=0.0, lost_share=0.0, doubled_share=0.0)


class Call:
    """One question in progress, as its sender sees it."""

    __slots__ = ("_done", "timer")

    def __init__(self, done: Answer) -> None:
        self._done: Answer | None = done
        self.timer: Timer | None = None  # timer of the deadline

    def end_call(self, answer: Any) -> None:
        """End the call with the first answer; later answers, or answers after the deadline, are ignored."""
        done, self._done = self._done, None
        if self.timer is not None:
            self.timer.alive = False
        if done is not None:
            done(answer)


class Network:
    """Delivers messages between hosts, with the faults of `weather`."""

    def __init__(self, heap: Heap, chance: Chance, monitor: NetworkObserver) -> None:
        self._heap = heap
        self._rng = chance.generator_for("network")
        self.weather = Weather()
        self._hosts: dict[str, SimHost] = {}
        self._cut: dict[tuple[str, str], float] = {}  # (sender, receiver) → end of the partition
        self._clogged: dict[str, float] = {}  # name → end of the clogging, in both directions
        self._monitor = monitor

    def attach_host(self, name: str, host: SimHost) -> None:
        self._hosts[name] = host

    def cut_link(self, sender: str, receiver: str, until: float) -> None:
        """Let nothing pass in this direction until the given time: partitions may be one-way."""
        self._cut[sender, receiver] = until

    def clog_host(self, name: str, until: float) -> None:
        """Delay the host's messages by random times up to CLOGGED_S until the given time."""
        self._clogged[name] = until

    def repair_links(self) -> None:
        """Repair all links: nothing is lost or doubled any more."""
        self._cut = dict.fromkeys(self._cut, self._heap.now)
        self._clogged.clear()
        self.weather = CLEAR

    def call_host(self, sender: str, receiver: str, message: Any, deadline_s: float, done: Answer) -> None:
        """Send a question; `done` gets the answer, or None at the deadline."""
        call = Call(done)
        call.timer = self._heap.call_later(deadline_s, "deadline of a call", lambda: call.end_call(None))

        def deliver_message() -> None:
            self._hosts[receiver].on_message(sender, message, send_reply)

        def send_reply(answer: Any) -> None:
            self._send_message(receiver, sender, "answer", lambda: call.end_call(answer))

        self._send_message(sender, receiver, "question", deliver_message)

    def _send_message(self, sender: str, receiver: str, what: str, arrive: Callable[[], None]) -> None:
        draw, weather = self._rng.random, self.weather
        # Always drawn, so that a change of one share does not affect the others.
        fate, slow, spread = draw(), draw(), draw()
        lost, doubled = fate < weather.lost_share, fate > 1.0 - weather.doubled_share
        now = self._heap.now
        if self._cut and self._cut.get((sender, receiver), 0.0) > now:
            self._monitor.cut_off(sender, receiver, self._cut.get((receiver, sender), 0.0) > now)
            return
        if lost:
            return
        if self._cut and self._cut.pop((sender, receiver), None) is not None:
            self._monitor.passes_again(sender, receiver)
        delay_s = _delay_s(weather, slow, spread)
        clogs = self._clogged
        clogged = clogs and (clogs.get(sender, 0.0) > now or clogs.get(receiver, 0.0) > now)
        label = f"{what} {sender} → {receiver}"
        self._heap.call_later(delay_s + CLOGGED_S * draw() if clogged else delay_s, label, arrive)
        if doubled:  # uses the same numbers reversed: the copy of a fast message is slow
            copy_s = _delay_s(weather, 1.0 - slow, 1.0 - spread)
            self._heap.call_later(copy_s + CLOGGED_S if clogged else copy_s, label, arrive)


def _delay_s(weather: Weather, slow: float, spread: float) -> float:
    """Return a delay; `slow` and `spread` are drawn from 0 to 1, and `slow` below its share adds to the delay."""
    delay_s = weather.delay_s + weather.spread_s * spread
    return delay_s + weather.slow_s * slow / weather.slow_share if slow < weather.slow_share else delay_s


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
