"""Moves this rank's bytes of one push or pull, and agrees with the other ranks on what came of it (why.md 7, 25).

The transfer runs in a thread of its own; meanwhile the ranks meet at least every `poll_s` to say how far they are, so
no collective waits for anybody outside the cluster, and the first rank that fails ends it for all. The host buffer is
allocated once and holds either what was frozen or what was pulled; nobody writes into it while a transfer runs.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from dips.client import transfer
from dips.client.feedback import Feedback
from dips.client.parallel import HostMemory, StreamedMemory
from dips.client.transfer import Base, Piece, Stats
from dips.client.voice import Voice
from dips.errors import DipsError, Unavailable
from dips.ids import VersionId
from dips.protocol.effects import Grant
from dips.protocol.manifest import BYTES_PER_PARAMETER
from dips.protocol.order import slaves_for_worker
from dips.wire import codecs

# Takes bytes moved and in all, over all ranks as far as this one can tell; returns why to give up, "" to go on.
Share = Callable[[int, int], str]


@dataclass(frozen=True, slots=True)
class Moved:
    """What all ranks agreed on: every one of them moved all of its bytes, or the transfer failed."""

    ok: bool
    reason: str  # as this rank saw it
    nbytes: int  # over all ranks
    torn: bool = False  # a pull that failed after its first layer was installed


class Mover:
    """This rank's share of every transfer of the job."""

    def __init__(self, memory: HostMemory, voice: Voice, poll_s: float, stall_s: float, codec: str = "fp32") -> None:
        """`codec` is the run's: a lossy one takes 8 B more for each parameter that this rank pushes."""
        self._voice, self._poll_s, self._stall_s = voice, poll_s, stall_s
        self._memory = memory
        self._feedback = None if codec == "fp32" else Feedback(memory.pieces)
        self.rank, self.ranks = voice.numbered(bool(memory.pieces))  # among those that move bytes, in both directions
        pulled, *pushed = voice.total([_travels(c, memory.pieces) for c in ("fp32", *codecs.CODECS)])
        self._bytes = {("pull", "fp32"): pulled, **{("push", c): n for c, n in zip(codecs.CODECS, pushed, strict=True)}}

    def push(self, grant: Grant, base: Base, share: Share, accepted: int = 0) -> Moved:
        """Freeze what this rank speaks for and bring it to the slaves; all ranks call it.

        accepted  seq of the last push of this life whose Outcome was that; it settles what lossy pushes owe
        """
        feedback = self._feedback
        if feedback is not None:
            feedback.hear(base.inc, accepted)
        if grant.codec != "fp32" and (feedback is None or not feedback.holds(grant.base)):
            return Moved(False, f"{grant.codec} was granted for differences to {grant.base}, not held here", 0)
        self._memory.gather()
        move: Callable[..., Stats] = partial(transfer.push, encode=self._memory.encode)
        if feedback is not None:
            feedback.freeze(base.seq, grant.codec)
            move = partial(transfer.push, encode=feedback.encode)
        moved = self._together(move, self._memory.pieces, self._bytes["push", grant.codec], grant, base, share)
        if isinstance(self._memory, StreamedMemory):
            self._memory.release()
        return moved

    def pull(self, grant: Grant, base: Base, share: Share, accepted: int = 0) -> Moved:
        """Bring this rank's pieces of the version into host memory, and no further. `accepted` as for push.

        With a memory of one layer the version is installed when this returns, or the model may be torn.
        """
        if isinstance(self._memory, StreamedMemory):
            return self._stream(self._memory, grant, base, share)
        if self._feedback is not None:
            self._feedback.hear(base.inc, accepted)
        return self._together(transfer.pull, self._memory.pieces, self._bytes["pull", "fp32"], grant, base, share)

    def install(self, version: VersionId) -> None:
        """Copy what was pulled on all ranks into the model's own memory; moments of optimizers stay as they are.

        Collective: what is replicated came once per cluster, and is handed on here.
        """
        if isinstance(self._memory, StreamedMemory):
            return  # layer by layer, while it was pulled
        if self._feedback is not None:
            self._feedback.installed(version)
        self._memory.spread()
        self._memory.install()

    def _stream(self, memory: StreamedMemory, grant: Grant, base: Base, share: Share) -> Moved:
        """Pull and install one layer after the other, each on all ranks or on none."""
        total, before, epoch = self._bytes["pull", "fp32"], 0, [1]
        ends_at = time.monotonic() + grant.deadline_s

        def move(*words: Any, **options: Any) -> Stats:
            stats = transfer.pull(*words, first_epoch=epoch[0], **options)
            epoch[0] = stats.last_epoch + 1
            return stats

        for layer in memory.layers:
            rest = replace(grant, deadline_s=max(0.0, ends_at - time.monotonic()))
            pieces, nbytes = memory.pieces_of(layer), BYTES_PER_PARAMETER * memory.numel(layer)
            moved = self._together(move, pieces, nbytes, rest, base, partial(_further, share, before, total))
            if not moved.ok:
                return replace(moved, nbytes=total, torn=layer > 0)
            memory.install_layer(layer)
            before += nbytes
        return Moved(True, "", total)

    def _together(
        self,
        move: Callable[..., Stats],
        pieces: Sequence[Piece],
        total: int,
        grant: Grant,
        base: Base,
        share: Share,
    ) -> Moved:
        """Move `pieces`, this rank's share of `total` bytes over all ranks, until all are done or one has failed."""
        if base.rank >= len(grant.order):  # asked for by a former attempt of the trainer, with fewer ranks
            order = (slaves_for_worker(r, len(grant.slaves)) for r in range(self.ranks))
            grant = replace(grant, order=tuple(order))
        own = max(1, sum(codecs.named(grant.codec).range(*p.range).nbytes for p in pieces))
        seen = [0]

        def work(cancel: threading.Event) -> Stats:
            return move(
                grant,
                base,
                pieces,
                stall_s=self._stall_s,
                cancel=cancel,
                progress=lambda moved: seen.__setitem__(0, moved.nbytes),
            )

        job = _Job(work if pieces else None)
        while True:
            job.wait(self._poll_s)
            job.halt(share(seen[0] * total // own, total))
            # The same transfer on all ranks (seq both ways), all of them well, all of them done.
            low, high, well, done = self._voice.least([base.seq, -base.seq, int(job.error is None), int(job.done)])
            if not well or low != -high:
                job.cancel()
                return Moved(False, job.reason, total)
            if done:
                return Moved(True, "", total)


class _Job:
    """One transfer in a thread; an error that nobody foresaw is raised where the ranks have agreed to give up."""

    def __init__(self, work: Callable[[threading.Event], Stats] | None) -> None:
        self.error: BaseException | None = None
        self._cancel = threading.Event()
        self._thread: threading.Thread | None = None
        if work is not None:
            self._thread = threading.Thread(target=self._run, args=(work,), name="dips-transfer", daemon=True)
            self._thread.start()

    @property
    def done(self) -> bool:
        return self._thread is None or not self._thread.is_alive()

    @property
    def reason(self) -> str:
        return f"{type(self.error).__name__}: {self.error}" if self.error else "another rank failed"

    def wait(self, timeout_s: float) -> None:
        if self._thread is not None:
            self._thread.join(timeout_s)

    def halt(self, reason: str) -> None:
        """Count the transfer as failed for `reason`, unless that is empty or it has failed already."""
        if reason and self.error is None:
            self.error = Unavailable(reason)

    def cancel(self) -> None:
        """End the transfer and wait for its end; raise its error if it is none of Di-PS's."""
        own = self.error
        self._cancel.set()
        if self._thread is not None:
            self._thread.join()
        if own is not None and not isinstance(own, DipsError):
            raise own
        self.error = own  # that it was cancelled is no reason

    def _run(self, work: Callable[[threading.Event], Stats]) -> None:
        try:
            work(self._cancel)
        except BaseException as error:  # noqa: BLE001 (raised by cancel(), in the rank's own thread)
            self.error = error


def _further(share: Share, before: int, total: int, moved: int, _: int) -> str:
    """Share how far a pull is that moves layer by layer, of which `before` bytes are here."""
    return share(before + moved, total)


def _travels(codec: str, pieces: Sequence[Piece]) -> int:
    """Bytes of these pieces on the wire."""
    return sum(codecs.named(codec).range(*piece.range).nbytes for piece in pieces)
