"""The simulated data flow of one slave's process: streams of ranks write into open pushes and read from open pulls.

A stream is named (push or pull, rank, sinc, epoch), as on the wire. What must stay true: nothing is written into a push
that is closed or complete, and nothing of an older epoch of a stream counts. Delays, losses and broken streams are the
business of the ranks' side (transfer.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from dips.ids import PullId, PushId, VersionId
from dips.protocol.beats import Transfer
from dips.sim.heap import Heap
from dips.slave.ports import F32, Arrays, FlowEvents


@dataclass
class OpenedPush:
    """A push that is received: `epochs` holds the newest stream of each rank, `done` the ranks that are through."""

    buffers: Arrays
    ranks: int
    epochs: dict[int, int] = field(default_factory=dict)
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
    """Implements `dips.slave.ports.Flow`."""

    def __init__(self, heap: Heap, drain_s: float = 0.3) -> None:
        self._heap = heap
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
        assert codec == "fp32", f"the simulated ranks push parameters, not {codec}"
        opened = self.pushes[push] = OpenedPush(buffers, len(order))
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

    def hello(self, push: PushId, rank: int, sinc: int, epoch: int) -> bool:
        """A stream begins; True if it may write. An older stream of the same rank is fenced from now on."""
        opened = self.pushes.get(push)
        if not self.alive or opened is None or sinc != self.sinc or epoch <= opened.epochs.get(rank, 0):
            return False
        opened.epochs[rank] = epoch
        return True

    def write(self, push: PushId, rank: int, sinc: int, epoch: int, pieces: dict[int, tuple[slice, F32]]) -> bool:
        """Chunks arrive; True if they were asked for and are in the buffers now."""
        opened = self.pushes.get(push)
        if not self.alive or opened is None or not self.admits(opened, rank, sinc, epoch):
            return False
        for layer, (where, values) in pieces.items():
            if layer in opened.buffers:
                opened.buffers[layer][where] = values
        return True

    def admits(self, opened: OpenedPush, rank: int, sinc: int, epoch: int) -> bool:
        """A chunk counts if it is of the rank's newest stream, of this life of the slave, and was asked for."""
        return sinc == self.sinc and epoch == opened.epochs.get(rank) and rank not in opened.done

    def finish(self, push: PushId, rank: int, sinc: int, epoch: int) -> bool:
        """All ranges of a rank are here: DONE. The last rank's DONE freezes the push."""
        opened = self.pushes.get(push)
        if not self.alive or opened is None or sinc != self.sinc or epoch != opened.epochs.get(rank):
            return False
        opened.done.add(rank)
        if len(opened.done) == opened.ranks and not opened.complete:
            opened.complete = True
            self._said().staged(push, sum(a.nbytes for a in opened.buffers.values()))
        return True

    def refuse(self, push: PushId, reason: str) -> None:
        """The ranks' ranges overlap or leave gaps: the push cannot be completed."""
        opened = self.pushes.get(push)
        if self.alive and opened is not None and not opened.complete:
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
        self._heap.after(delay_s, what, lambda: action() if self.alive else None)

    def _said(self) -> FlowEvents:
        assert self._events is not None, "the flow was not started"
        return self._events
