"""Error feedback of lossy pushes: the base of differences, and the rounding error that later pushes still owe.

One rank's share, over the pieces that it pushes. A push goes through

    freeze_push         host buffer = (θ_local − θ_base) + owed     (granted in fp32: θ_local + owed; then owed = 0)
    encode_chunk        each chunk when it is asked for; which ones is recorded
    settle_last_push    accepted: owed = difference − what its chunks decode to; skipped, dropped, gated: as before

So what a codec rounds away is sent with the next push, and a push that was not applied loses nothing: its progress is
still in θ_local, what was owed before it is still owed (docs/rationale.md#38). The debt ends with the cluster's
incarnation, with the trainer's process, and with a rollback of the lineage: another θ has no such debt.

Costs 8 B for each parameter that the rank pushes, beside the 4 B of the host buffer: base and owed. Nothing is computed
in fp32 runs: there is no Feedback then. No torch, no socket; one thread, but for `encode`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from dips.codecs import Codec
from dips.dataclass import replace
from dips.ids import VersionId
from dips.transport.shares import F32, Piece, Share
from dips.wire import bodies
from dips.wire.chunks import Range
from dips.wire.frame import Buffer

ADOPTED = -1  # after a checkpoint was loaded, the incarnation is not known here until the next transfer


class Feedback:
    """Base and owed of one rank; `pieces` lie in its host buffer, which holds what was pulled or what is pushed."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self._host = [piece.array for piece in pieces]
        self._base = [np.zeros_like(array) for array in self._host]
        self._owed = [np.zeros_like(array) for array in self._host]
        self._frozen_at = Share(pieces)
        self._owed_at = Share([replace(piece, array=owed) for piece, owed in zip(pieces, self._owed, strict=True)])
        self._version: VersionId | None = None  # of `_base`; None while a part of it is of another version
        self._taken: VersionId | None = None  # whose values `_base` has, but for
        self._lacking: set[int] = set()  # these pieces
        self._inc = 0  # the incarnation that owes
        self._codec = Codec.FP32
        self._seq = 0  # the push that is frozen in the host buffer, until its Outcome is known; 0: none
        self._sent: dict[Range, None] = {}  # its chunks, as they were asked for
        self._contained = False  # what is owed is still in the model: accepted, and nothing installed since

    def settle_last_push(self, inc: int, accepted: int) -> None:
        """Settle the last push, before anything overwrites the host buffer; a repetition changes nothing.

        inc       the cluster's incarnation: a new one owes nothing
        accepted  seq of the last push of this incarnation that was accepted; any other was gated or not applied
        """
        if self._inc == ADOPTED:
            self._inc = inc
        if inc != self._inc:
            self._inc = inc
            self._clear_owed()
        elif self._seq and accepted == self._seq:
            self._settle_accepted()
        self._seq = 0

    def has_base(self, base: VersionId | None) -> bool:
        """Whether differences to `base` can be computed."""
        return base is not None and base == self._version

    def restore_base(self) -> VersionId | None:
        """Put the base into the host buffer, for updates to be added to; return its version, None if there is none."""
        if self._version is not None:
            for host, base in zip(self._host, self._base, strict=True):
                np.copyto(host, base)
        return self._version

    def freeze_push(self, seq: int, codec: Codec, numbers: Iterable[int] | None = None) -> None:
        """Turn θ_local in the host buffer into what push `seq` carries in `codec`. Reads 3 floats an element.

        numbers  the pieces that are frozen now, others of the same push later or before; None: all
        """
        if seq != self._seq:  # the first that is frozen of it
            if self._contained:
                self._clear_owed()
            self._seq, self._sent, self._codec = seq, {}, codec
        with np.errstate(all="ignore"):  # a diverged model is left to the gate
            for number in range(len(self._host)) if numbers is None else numbers:
                host, base, owed = self._host[number], self._base[number], self._owed[number]
                if self._codec.lossy:
                    host -= base
                host += owed

    def encode_chunk(self, chunk: Range, view: memoryview) -> Buffer:
        """Encode one chunk of the frozen push, identically if it is asked for again. Runs on the transfer's thread."""
        self._sent[chunk] = None
        return bodies.encode(self._codec, np.frombuffer(view, np.float32))

    def set_base(self, version: VersionId, numbers: Iterable[int] | None = None) -> None:
        """Take `version`, which the host buffer and the model hold, as the base of the next differences.

        numbers  the pieces that hold it; there is no base until all others have been named, too; None: all
        """
        if self._version is not None and version != self._version and version.version <= self._version.version:
            self._clear_owed()  # the lineage was rolled back
        every = set(range(len(self._host)))
        held = every if numbers is None else set(numbers)
        for number in held:
            np.copyto(self._base[number], self._host[number])
        self._lacking = (self._lacking if version == self._taken else every) - held
        self._taken, self._version, self._contained = version, None if self._lacking else version, False

    def checkpoint_arrays(self) -> tuple[Sequence[F32], Sequence[F32]]:
        """(base, owed) for a checkpoint: this rank's own arrays, to be copied before the next transfer."""
        return self._base, self._owed

    def restore_debt(self, version: VersionId, base: Sequence[F32], owed: Sequence[F32]) -> None:
        """Take what a checkpoint owed as owed by the present incarnation, whichever that is."""
        for mine, theirs in zip((*self._base, *self._owed), (*base, *owed), strict=True):
            np.copyto(mine, theirs)
        self._taken, self._lacking = version, set()
        self._version, self._contained, self._seq, self._inc = version, False, 0, ADOPTED

    def _settle_accepted(self) -> None:
        """The frozen push is part of a version: from now on only what its chunks rounded away is owed."""
        self._contained = True
        if not self._codec.lossy:
            self._clear_owed()
            return
        for chunk in self._sent:
            difference, owed = self._chunk_elements(self._frozen_at, chunk), self._chunk_elements(self._owed_at, chunk)
            brought = bodies.decode(self._codec, bodies.encode(self._codec, difference), chunk.length)
            np.subtract(difference, brought, out=owed)

    @staticmethod
    def _chunk_elements(share: Share, chunk: Range) -> F32:
        view = share.view_chunk(chunk)
        assert view is not None, f"{chunk} was sent and is not held here"
        return np.frombuffer(view, np.float32)

    def _clear_owed(self) -> None:
        """Owe nothing from now on."""
        for owed in self._owed:
            owed.fill(0)
