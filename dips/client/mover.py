"""Moves this rank's bytes of one push or pull, and agrees with the other ranks on what came of it (why.md 7, 25).

The transfer runs in a thread of its own; meanwhile the ranks meet at least every `poll_s` to say how far they are, so
no collective waits for anybody outside the cluster, and the first rank that fails ends it for all. The host buffer is
allocated once and holds either what was frozen or what was pulled; nobody writes into it while a transfer runs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from dips.client import transfer
from dips.client.feedback import Feedback
from dips.client.parallel import HostMemory
from dips.client.transfer import Base, Piece, Stats
from dips.client.voice import Voice
from dips.errors import DipsError, LocalProtocolError, Unavailable
from dips.ids import VersionId
from dips.protocol.effects import Grant
from dips.wire import codecs

# Takes bytes moved and in all, over all ranks as far as this one can tell; returns why to give up, "" to go on.
Share = Callable[[int, int], str]


@dataclass(frozen=True, slots=True)
class Moved:
    """What all ranks agreed on: every one of them moved all of its bytes, or the transfer failed."""

    ok: bool
    reason: str  # as this rank saw it
    nbytes: int  # over all ranks


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

    def push(self, grant: Grant, base: Base, share: Share, accepted: int = 0, keep: bool = False) -> Underway:
        """Freeze what this rank speaks for and bring it to the slaves; all ranks call it.

        accepted  seq of the last push of this life whose Outcome was that; it settles what lossy pushes owe
        keep      remember the shard as it is now, for a `merge`; 4 B more for each parameter of this rank's shard
        """
        feedback = self._feedback
        if feedback is not None:
            feedback.hear(base.inc, accepted)
        if grant.codec != "fp32" and (feedback is None or not feedback.holds(grant.base)):
            job = _Job(None)
            job.halt(f"{grant.codec} was granted for differences to {grant.base}, not held here")
            return Underway(job, base.seq, 0, self._voice, lambda: "")
        self._memory.gather()
        if keep:
            self._memory.keep()
        move: Callable[..., Stats] = transfer.push
        if feedback is not None:
            feedback.freeze(base.seq, grant.codec)
            move = partial(transfer.push, encode=feedback.encode)
        return self._begin("push", move, grant, base, share)

    def pull(self, grant: Grant, base: Base, share: Share, accepted: int = 0) -> Underway:
        """Bring this rank's pieces of the version into host memory, and no further. `accepted` as for push."""
        if self._feedback is not None:
            self._feedback.hear(base.inc, accepted)
        return self._begin("pull", transfer.pull, grant, base, share)

    def install(self, version: VersionId) -> None:
        """Copy what was pulled on all ranks into the model's own memory; moments of optimizers stay as they are.

        Collective: what is replicated came once per cluster, and is handed on here.
        """
        if self._feedback is not None:
            self._feedback.installed(version)
        self._memory.spread()
        self._memory.install()

    def merge(self, version: VersionId) -> None:
        """Bring what was pulled into a model that has trained on: θ_local ← θ_version + (θ_local − θ_pushed).

        Legal after a push that was kept (why.md 36). Collective, as `install`.
        """
        if self._feedback is not None:
            self._feedback.installed(version)
        self._memory.spread()
        self._memory.merge()

    def saved(self) -> dict[str, torch.Tensor]:
        """What this rank owes by lossy pushes, and the base that they are to; empty in fp32 runs."""
        if self._feedback is None:
            return {}
        parts = zip(("base", "owed"), self._feedback.saved(), strict=True)
        return {name: torch.cat([torch.from_numpy(a) for a in arrays]) for name, arrays in parts if arrays}

    def resume(self, version: VersionId, saved: Mapping[str, torch.Tensor]) -> None:
        """Take up what `saved` gave; raise LocalProtocolError if it is of another layout or of another codec."""
        if self._feedback is None:
            return
        mine = self._feedback.saved()
        sizes = [a.size for a in mine[0]]
        if any(name not in saved or saved[name].numel() != sum(sizes) for name in ("base", "owed") if sizes):
            raise LocalProtocolError("the checkpoint was saved by another layout of ranks, or without a lossy codec")
        base, owed = ([t.numpy() for t in saved[n].split(sizes)] if sizes else [] for n in ("base", "owed"))
        self._feedback.resume(version, base, owed)

    def _begin(self, kind: str, move: Callable[..., Stats], grant: Grant, base: Base, share: Share) -> Underway:
        total, pieces = self._bytes[kind, grant.codec], self._memory.pieces
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
        return Underway(job, base.seq, total, self._voice, lambda: share(seen[0] * total // own, total))


class Underway:
    """A transfer that moves in its thread; the ranks look at it together."""

    def __init__(self, job: _Job, seq: int, total: int, voice: Voice, tell: Callable[[], str]) -> None:
        self._job, self._seq, self._total, self._voice, self._tell = job, seq, total, voice, tell

    def finish(self, poll_s: float) -> Moved:
        """Stand still until it is over; the ranks meet at least every `poll_s`."""
        while (moved := self.look(poll_s)) is None:
            pass
        return moved

    def look(self, wait_s: float = 0.0) -> Moved | None:
        """What came of it, or None while it moves; waits for its end for at most `wait_s`. Collective."""
        job = self._job
        job.wait(wait_s)
        job.halt(self._tell())
        # The same transfer on all ranks (seq both ways), all of them well, all of them done.
        low, high, well, done = self._voice.least([self._seq, -self._seq, int(job.error is None), int(job.done)])
        if not well or low != -high:
            job.cancel()
            return Moved(False, job.reason, self._total)
        return Moved(True, "", self._total) if done else None

    def cancel(self) -> None:
        """End it on this rank, whatever the others do."""
        self._job.cancel()


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


def _travels(codec: str, pieces: Sequence[Piece]) -> int:
    """Bytes of these pieces on the wire."""
    return sum(codecs.named(codec).range(*piece.range).nbytes for piece in pieces)
