"""The simulated data flow of one slave's process: streams of ranks write into open pushes and read from open pulls.

A stream is named (push or pull, rank, sinc, epoch), as on the wire. What must stay true: nothing is written into a push
that is closed or complete, nothing of an older epoch of a stream counts, and a chunk that is here is not taken again.
Delays, losses and broken streams are the business of the ranks' side (transfer.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from dips.ids import PullId, PushId, VersionId
from dips.protocol.heartbeats import Transfer
from dips.sim.fiber import Gate
from dips.sim.heap import Heap
from dips.slave.ports import F32, Arrays, FlowEvents
from dips.wire import codecs
from dips.wire.frame import Buffer

CHUNKS = 2  # of each rank at each slave: so there is a moment when half of its bytes are here
Chunk = Mapping[int, tuple[slice, Buffer]]  # layer → place in it, and the body


@dataclass
class OpenedPush:
    """A push that is received: `epochs` holds the newest stream of each rank, `done` the ranks that are through."""

    buffers: Arrays
    ranks: int
    codec: codecs.Codec
    epochs: dict[int, int] = field(default_factory=dict)
    here: set[tuple[int, int]] = field(default_factory=set)  # (rank, chunk)
    done: set[int] = field(default_factory=set)
    complete: bool = False


@dataclass
class OpenedPull:
    version: VersionId
    source: Arrays
    closing: bool = False
    former: list[Arrays] = field(default_factory=list)  # moved away from, with bytes in flight


def share(size: int, rank: int, ranks: int) -> slice:
    """The elements of a flat layer that one rank holds, as FSDP shards dimension 0."""
    return slice(size * rank // ranks, size * (rank + 1) // ranks)


class SimFlow:
    """Implements `dips.slave.ports.Flow`; `touched` is called whenever anything of it changes."""

    def __init__(self, heap: Heap, touched: Callable[[], None], gate: Gate, drain_s: float = 0.3) -> None:
        self._heap, self._gate = heap, gate
        self._touched = touched
        self._drain_s = drain_s
        self._events: FlowEvents | None = None
        self.alive = True
        self.sinc = 0
        self.pushes: dict[PushId, OpenedPush] = {}
        self.pulls: dict[PullId, OpenedPull] = {}

    # ---- what the shard orders -------------------------------------------------------------------------------------

    def start(self, sinc: int, events: FlowEvents) -> None:
        self.sinc, self._events = sinc, events

    def open_push(self, push: PushId, order: tuple[int, ...], buffers: Arrays, deadline_s: float, codec: str) -> None:
        opened = self.pushes[push] = OpenedPush(buffers, len(order), codecs.named(codec))
        self._later(deadline_s, f"deadline of {push}", lambda: self._push_stalled(push, opened))

    def reorder(self, push: PushId, places: tuple[int, ...]) -> None:
        """Here every stream has a link of its own: nobody stands in line."""

    def drop_push(self, push: PushId) -> None:
        self.pushes.pop(push, None)

    def open_pull(self, pull: PullId, version: VersionId, source: Arrays, deadline_s: float) -> None:
        opened = self.pulls[pull] = OpenedPull(version, source)
        self._later(deadline_s, f"deadline of {pull}", lambda: self._release(pull, opened, "deadline"))

    def move_pull(self, pull: PullId, source: Arrays) -> None:
        opened = self.pulls.get(pull)
        if opened is not None and not opened.closing:
            former, opened.source = opened.source, source
            opened.former.append(former)
            # What a slow reader asked before it was moved leaves as slowly as it reads.
            delay_s, what = 10.0 * self._drain_s, f"last bytes of {pull} from memory"
            self._later(delay_s, what, lambda: self._moved(pull, opened, former))

    def close_pull(self, pull: PullId) -> None:
        opened = self.pulls.get(pull)
        if opened is not None and not opened.closing:
            opened.closing = True
            self._later(self._drain_s, f"last bytes of {pull}", lambda: self._release(pull, opened, "closed"))

    def transfers(self) -> tuple[Transfer, ...]:
        pushes = [Transfer(p.cluster, p.inc, p.seq, True, len(o.done), o.ranks) for p, o in self.pushes.items()]
        return (*pushes, *(Transfer(p.cluster, p.inc, p.seq, False, 0, 1) for p in self.pulls))

    # ---- what the ranks' streams do --------------------------------------------------------------------------------

    def hello(self, push: PushId, rank: int, sinc: int, epoch: int) -> tuple[int, ...] | None:
        """A stream begins: the chunks that are wanted of it, or None. An older stream of the rank is fenced now."""
        opened = self.pushes.get(push)
        if not self.alive or opened is None or sinc != self.sinc or epoch <= opened.epochs.get(rank, 0):
            return None
        opened.epochs[rank] = epoch
        return tuple(chunk for chunk in range(CHUNKS) if (rank, chunk) not in opened.here)

    def write(self, push: PushId, rank: int, sinc: int, epoch: int, number: int, chunk: Chunk) -> bool:
        """A chunk arrives; True if it was asked for and is in the buffers now."""
        opened = self.pushes.get(push)
        if not self.alive or opened is None or not self.admits(opened, rank, sinc, epoch, number):
            return False
        self._touched()
        for layer, (where, body) in chunk.items():
            if layer in opened.buffers:
                with np.errstate(all="ignore"):  # a model that diverged
                    opened.codec.put(body, opened.buffers[layer][where])
        opened.here.add((rank, number))
        return True

    def admits(self, opened: OpenedPush, rank: int, sinc: int, epoch: int, number: int) -> bool:
        """A chunk counts if it is of the rank's newest stream, of this life of the slave, and was asked for."""
        return sinc == self.sinc and epoch == opened.epochs.get(rank) and (rank, number) not in opened.here

    def finish(self, push: PushId, rank: int, sinc: int, epoch: int) -> bool:
        """Are all ranges of a rank here: DONE? The last rank's freezes the push."""
        opened = self.pushes.get(push)
        if not self.alive or opened is None or sinc != self.sinc or epoch != opened.epochs.get(rank):
            return False
        self._touched()
        opened.done.add(rank)
        if len(opened.done) == opened.ranks and not opened.complete:
            opened.complete = True
            self._said().staged(push, sum(a.nbytes for a in opened.buffers.values()))
        return True

    def refuse(self, push: PushId, reason: str) -> None:
        """The ranks' ranges overlap or leave gaps: the push cannot be completed."""
        opened = self.pushes.get(push)
        if self.alive and opened is not None and not opened.complete:
            self._touched()
            del self.pushes[push]
            self._said().refused(push, reason)

    def read(self, pull: PullId, layer: int, where: slice) -> tuple[VersionId, F32] | None:
        """Bytes of an open pull, and the version whose bytes they are."""
        opened = self.pulls.get(pull)
        if not self.alive or opened is None or opened.closing or layer not in opened.source:
            return None
        return opened.version, opened.source[layer][where].copy()

    # ---- deadlines -------------------------------------------------------------------------------------------------

    def _push_stalled(self, push: PushId, opened: OpenedPush) -> None:
        if self.pushes.get(push) is opened and not opened.complete:
            del self.pushes[push]
            self._said().refused(push, "deadline of the push")

    def _release(self, pull: PullId, opened: OpenedPull, reason: str) -> None:
        if self.pulls.get(pull) is opened:
            del self.pulls[pull]
            self._said().released(pull, reason)

    def _moved(self, pull: PullId, opened: OpenedPull, former: Arrays) -> None:
        if self.pulls.get(pull) is opened:
            opened.former = [arrays for arrays in opened.former if arrays is not former]
            self._said().moved(pull)

    def _later(self, delay_s: float, what: str, action: Callable[[], None]) -> None:
        def due() -> None:
            if self.alive:
                self._touched()
                action()

        self._heap.after(delay_s, what, lambda: self._gate.pass_on(due))

    def _said(self) -> FlowEvents:
        assert self._events is not None, "the flow was not started"
        return self._events
