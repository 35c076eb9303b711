"""Moves this rank's bytes of one push or pull, and agrees with the other ranks on what came of it (why.md 7, 25).

The transfer runs in a thread of its own; meanwhile the ranks meet at least every `poll_s` to say how far they are, so
no collective waits for anybody outside the cluster, and the first rank that fails ends it for all. The host buffer is
allocated once and holds either what was frozen or what was pulled; nobody writes into it while a transfer runs.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from dips.client.parallel import HostMemory, StreamedMemory
from dips.client.rank import transfer
from dips.client.rank.background_transfer import (
    BackgroundTransfer,
    StreamedTransfer,
    ThreadedTransfer,
    TransferResult,
    TransferThread,
    do_nothing,
)
from dips.client.rank.collectives import JobCollectives
from dips.client.rank.feedback import Feedback
from dips.client.rank.transfer import Piece, TransferIdentity, TransferStats
from dips.errors import LocalProtocolError
from dips.ids import VersionId
from dips.protocol.effects import Grant
from dips.protocol.manifest import BYTES_PER_PARAMETER
from dips.protocol.order import slaves_for_worker
from dips.wire import codecs

# Takes bytes moved and in all, over all ranks as far as this one can tell; returns why to give up, "" to go on.
Share = Callable[[int, int], str]


class ShardTransfer:
    """This rank's share of every transfer of the job."""

    def __init__(self, memory: HostMemory, voice: JobCollectives, stall_s: float, codec: str = "fp32") -> None:
        """`codec` is the run's: a lossy one takes 8 B more for each parameter that this rank pushes."""
        self._voice, self._stall_s = voice, stall_s
        self._memory = memory
        self._feedback = None if codec == "fp32" else Feedback(memory.pieces)
        self.rank, self.ranks = voice.numbered(bool(memory.pieces))  # among those that move bytes, in both directions
        pulled, *pushed = voice.total([_travels(c, memory.pieces) for c in ("fp32", *codecs.CODECS)])
        self._bytes = {("pull", "fp32"): pulled, **{("push", c): n for c, n in zip(codecs.CODECS, pushed, strict=True)}}

    def push(
        self, grant: Grant, base: TransferIdentity, share: Share, accepted: int = 0, keep: bool = False
    ) -> BackgroundTransfer:
        """Freeze what this rank speaks for and bring it to the slaves; all ranks call it.

        accepted  seq of the last push of this life whose Outcome was that; it settles what lossy pushes owe
        keep      remember the shard as it is now, for a `merge`; 4 B more for each parameter of this rank's shard
        Errors    LocalProtocolError, the same on all ranks: the model's memory was replaced since it was laid out
        """
        self._check_places()
        feedback = self._feedback
        if feedback is not None:
            feedback.hear(base.inc, accepted)
        if grant.codec != "fp32" and (feedback is None or not feedback.holds(grant.base)):
            job = TransferThread(None)
            job.halt(f"{grant.codec} was granted for differences to {grant.base}, not held here")
            return ThreadedTransfer(job, base.seq, 0, self._voice, lambda: "")
        self._memory.gather()
        if keep:
            self._memory.keep()
        move: Callable[..., TransferStats] = partial(transfer.push, encode=self._memory.encode)
        if feedback is not None:
            feedback.freeze(base.seq, grant.codec)
            move = partial(transfer.push, encode=feedback.encode)
        release = self._memory.release if isinstance(self._memory, StreamedMemory) else do_nothing
        total = self._bytes["push", grant.codec]
        return self._begin(move, self._memory.pieces, total, grant, base, share, release)

    def _check_places(self) -> None:
        heard = [words.decode() for words in self._voice.gather(self._memory.replaced().encode())]
        lost = [f"rank {rank}: {name}" for rank, name in enumerate(heard) if name]
        if lost:
            raise LocalProtocolError(
                f"{lost[0]}: the model's parameters were replaced after OuterLoop was made, so what it would push is "
                "not what is trained: call fully_shard first, then OuterLoop (as well as to(device) and "
                "load_state_dict(assign=True))"
            )

    def pull(self, grant: Grant, base: TransferIdentity, share: Share, accepted: int = 0) -> BackgroundTransfer:
        """Bring this rank's pieces of the version into host memory, and no further. `accepted` as for push.

        With a memory of one layer the version is installed when this is finished, or the model may be torn.
        """
        self._memory.finish()  # what came before leaves the host memory
        if isinstance(self._memory, StreamedMemory):
            return StreamedTransfer(partial(self._stream, self._memory, grant, base, share))
        if self._feedback is not None:
            self._feedback.hear(base.inc, accepted)
        return self._begin(transfer.pull, self._memory.pieces, self._bytes["pull", "fp32"], grant, base, share)

    def install(self, version: VersionId) -> None:
        """Copy what was pulled on all ranks into the model's own memory; moments of optimizers stay as they are.

        With `install: lazy` that is only begun: `stepped` and `finish` see to its end. Collective: what is
        replicated came once per cluster, and is handed on here.
        """
        if isinstance(self._memory, StreamedMemory):
            return  # layer by layer, while it was pulled
        self._landed(version)
        self._memory.install()

    def merge(self, version: VersionId) -> bool:
        """Bring what was pulled into a model that has trained on: θ_local ← θ_version + (θ_local − θ_pushed).

        Legal after a push that was kept (why.md 36). If either of the two is not finite on any rank, the sum would
        never be finite again: the version is installed as it is, on all ranks, and this returns False. Collective, as
        `install`.
        """
        self._landed(version)
        (finite,) = self._voice.least([int(self._memory.merge_is_finite())])
        if finite:
            self._memory.merge()
        else:
            self._memory.install()
        return bool(finite)

    def stepped(self) -> None:
        """An inner step was taken; what an install through the forward has left is installed."""
        self._memory.stepped()

    def finish(self) -> None:
        """Have what was pulled in the model, all of it."""
        self._memory.finish()

    @property
    def torn(self) -> bool:
        """An install broke off: the model is of two versions."""
        return self._memory.torn

    def _landed(self, version: VersionId) -> None:
        """The pieces hold `version`: differences are to it from now on, and each rank is given its whole shard."""
        if self._feedback is not None:
            self._feedback.installed(version)
        self._memory.spread()

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

    def _stream(
        self, memory: StreamedMemory, grant: Grant, base: TransferIdentity, share: Share, poll_s: float
    ) -> TransferResult:
        """Pull and install one layer after the other, each on all ranks or on none."""
        total, before, epoch = self._bytes["pull", "fp32"], 0, [1]
        ends_at = time.monotonic() + grant.deadline_s

        def move(*words: Any, **options: Any) -> TransferStats:
            stats = transfer.pull(*words, first_epoch=epoch[0], **options)
            epoch[0] = stats.last_epoch + 1
            return stats

        for layer in memory.layers:
            rest = replace(grant, deadline_s=max(0.0, ends_at - time.monotonic()))
            pieces, nbytes = memory.pieces_of(layer), BYTES_PER_PARAMETER * memory.numel(layer)
            begun = self._begin(move, pieces, nbytes, rest, base, partial(_further, share, before, total))
            moved = begun.finish(poll_s)
            if not moved.ok:
                return replace(moved, nbytes=total, torn=layer > 0)
            memory.install_layer(layer)
            before += nbytes
        return TransferResult(True, "", total)

    def _begin(
        self,
        move: Callable[..., TransferStats],
        pieces: Sequence[Piece],
        total: int,
        grant: Grant,
        base: TransferIdentity,
        share: Share,
        after: Callable[[], None] = do_nothing,
    ) -> BackgroundTransfer:
        """Move `pieces`, this rank's share of `total` bytes over all ranks; `after` is called when it is over."""
        if base.rank >= len(grant.order):  # asked for by a former attempt of the trainer, with fewer ranks
            order = (slaves_for_worker(r, len(grant.slaves)) for r in range(self.ranks))
            grant = replace(grant, order=tuple(order))
        own = max(1, sum(codecs.named(grant.codec).range(*p.range).nbytes for p in pieces))
        seen = [0]

        def work(cancel: threading.Event) -> TransferStats:
            return move(
                grant,
                base,
                pieces,
                stall_s=self._stall_s,
                cancel=cancel,
                progress=lambda moved: seen.__setitem__(0, moved.nbytes),
            )

        job = TransferThread(work if pieces else None)
        return ThreadedTransfer(job, base.seq, total, self._voice, lambda: share(seen[0] * total // own, total), after)


def _further(share: Share, before: int, total: int, moved: int, _: int) -> str:
    """Share how far a pull is that moves layer by layer, of which `before` bytes are here."""
    return share(before + moved, total)


def _travels(codec: str, pieces: Sequence[Piece]) -> int:
    """Bytes of these pieces on the wire."""
    return sum(codecs.named(codec).range(*piece.range).nbytes for piece in pieces)
