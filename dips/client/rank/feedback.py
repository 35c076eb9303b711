"""What lossy pushes still owe: the base that differences are to, and the error feedback that its Outcome settles.

One rank's share of it, over what the rank speaks for. The life of a push:

    freeze   host buffer = (θ_local − θ_base) + owed       (granted in fp32: θ_local + owed, which owes nothing after)
    encode   each chunk as it is asked for; what was asked is remembered
    hear     Outcome accepted: owed = difference − what its chunks stand for; skipped, dropped, gated: as before

So what a codec rounds away is sent with the next push, and a push that came to nothing loses nothing: its progress is
still in θ_local, what was owed before it is still owed (why.md 38). What is owed ends with the cluster's life at the
master, with the trainer's process, and with a lineage that went back: another θ owes nothing to it.

Costs 8 B for each parameter that the rank pushes, beside the 4 B of the host buffer: base and owed. Nothing is computed
in fp32 runs: there is no Feedback then. No torch, no socket; one thread, but for `encode`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from dips.ids import VersionId
from dips.transport.shares import F32, Piece, Share
from dips.wire import codecs
from dips.wire.chunks import Range
from dips.wire.frame import Buffer

ADOPTED = -1  # the life that a checkpoint was taken up in is not known here until it transfers


class Feedback:
    """Base and owed of one rank; `pieces` lie in its host buffer, which holds what was pulled or what is pushed."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self._host = [piece.array for piece in pieces]
        self._base = [np.zeros_like(array) for array in self._host]
        self._owed = [np.zeros_like(array) for array in self._host]
        self._frozen_at = Share(pieces)
        self._owed_at = Share([replace(piece, array=owed) for piece, owed in zip(pieces, self._owed, strict=True)])
        self._version: VersionId | None = None  # that `_base` holds
        self._inc = 0  # the life that owes
        self._codec = codecs.FP32
        self._seq = 0  # the push that is frozen in the host buffer, until its Outcome is heard; 0: none
        self._sent: dict[Range, None] = {}  # its chunks, as they were asked for
        self._contained = False  # what is owed is still in the model: accepted, and nothing installed since

    def hear(self, inc: int, accepted: int) -> None:
        """Settle the last push, before anything overwrites the host buffer; again changes nothing.

        inc       the cluster's life at the master: another than before owes nothing
        accepted  seq of the last push of this life that was accepted; any other came to nothing, or is gated
        """
        if self._inc == ADOPTED:
            self._inc = inc
        if inc != self._inc:
            self._inc = inc
            self._forget()
        elif self._seq and accepted == self._seq:
            self._settle()
        self._seq = 0

    def holds(self, base: VersionId | None) -> bool:
        """Whether differences to `base` can be made."""
        return base is not None and base == self._version

    def freeze(self, seq: int, codec: str) -> None:
        """Turn θ_local in the host buffer into what push `seq` carries in `codec`. Reads 3 floats an element."""
        if self._contained:
            self._forget()
        self._seq, self._sent, self._codec = seq, {}, codecs.named(codec)
        with np.errstate(all="ignore"):  # a model that diverged: the gate's business
            for host, base, owed in zip(self._host, self._base, self._owed, strict=True):
                if self._codec.lossy:
                    host -= base
                host += owed

    def encode(self, chunk: Range, view: memoryview) -> Buffer:
        """Spell one chunk of the frozen push; asked again it is the same. On the transfer's own thread."""
        self._sent[chunk] = None
        return self._codec.encode(np.frombuffer(view, np.float32))

    def installed(self, version: VersionId) -> None:
        """The host buffer holds `version`, and so does the model: the next differences are to it."""
        if self._version is not None and version != self._version and version.version <= self._version.version:
            self._forget()  # the lineage went back
        for host, base in zip(self._host, self._base, strict=True):
            np.copyto(base, host)
        self._version, self._contained = version, False

    def saved(self) -> tuple[Sequence[F32], Sequence[F32]]:
        """(base, owed) for a checkpoint: this rank's own, to be copied before the next transfer."""
        return self._base, self._owed

    def resume(self, version: VersionId, base: Sequence[F32], owed: Sequence[F32]) -> None:
        """A checkpoint is taken up: what it owed is owed by the present life, whichever that is."""
        for mine, theirs in zip((*self._base, *self._owed), (*base, *owed), strict=True):
            np.copyto(mine, theirs)
        self._version, self._contained, self._seq, self._inc = version, False, 0, ADOPTED

    def _settle(self) -> None:
        """The frozen push is in a version: only what its chunks did not bring is owed from now on."""
        self._contained = True
        if not self._codec.lossy:
            self._forget()
            return
        for chunk in self._sent:
            difference, owed = self._elements(self._frozen_at, chunk), self._elements(self._owed_at, chunk)
            np.subtract(difference, self._codec.decode(self._codec.encode(difference), chunk.length), out=owed)

    @staticmethod
    def _elements(share: Share, chunk: Range) -> F32:
        view = share.view(chunk)
        assert view is not None, f"{chunk} was sent and is not held here"
        return np.frombuffer(view, np.float32)

    def _forget(self) -> None:
        """Nothing is owed."""
        for owed in self._owed:
            owed.fill(0)
