"""Error feedback of lossy pushes: the base of differences, and the rounding error owed to later pushes.

Covers the pieces that this rank pushes. A push goes through

    freeze_push         host buffer = (θ_local − θ_base) + owed     (granted in fp32: θ_local + owed; then owed = 0)
    encode_chunk        encodes each chunk when a slave asks for it, and records the chunk
    settle_last_push    accepted: owed = difference − decoded chunks; skipped, dropped, gated: owed stays

So the codec's rounding error is sent with the next push, and a push that was not applied loses nothing: its progress is
still in θ_local, and the former error is still owed (docs/rationale.md#38). The debt is dropped with the cluster's
incarnation, with the trainer's process, and with a rollback of the lineage: another θ has no such debt. Where the run
has come further again before this cluster pulls, no number tells it: one push's rounding error then goes to another θ.

Costs 8 B per parameter that the rank pushes, for base and owed, beside the 4 B of the host buffer. fp32 runs have no
Feedback. No torch, no socket; single-threaded, except for `encode_chunk`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from dips.codecs import Codec
from dips.dataclass import replace
from dips.ids import VersionId
from dips.wire.chunks import F32, Piece, Share, decode_body, encode_body
from dips.wire.frame import Buffer, Range

ADOPTED = -1  # a checkpoint was loaded: the incarnation is unknown here until the next transfer


class Feedback:
    """Base and owed of one rank; `pieces` are views of its host buffer, which holds the pulled or pushed parameters."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self._host = [piece.array for piece in pieces]
        self._base = [np.zeros_like(array) for array in self._host]
        self._owed = [np.zeros_like(array) for array in self._host]
        self._frozen_at = Share(pieces)
        self._owed_at = Share([replace(piece, array=owed) for piece, owed in zip(pieces, self._owed, strict=True)])
        self._version: VersionId | None = None  # version of `_base`; None: none, or parts are of another version
        self._taken: VersionId | None = None  # version of `_base` except for the pieces in `_lacking`
        self._lacking: set[int] = set()  # numbers of pieces that `_base` does not have at `_taken`
        self._inc = 0  # the incarnation that owes
        self._codec = Codec.FP32
        self._seq = 0  # the push frozen in the host buffer, until its Outcome is known; 0: none
        self._sent: dict[Range, None] = {}  # the frozen push's chunks that slaves have asked for
        self._contained = False  # the owed error is still in the model: accepted, and nothing installed since

    def settle_last_push(self, inc: int, accepted: int) -> None:
        """Settle the last push, before the host buffer is overwritten. Idempotent.

        inc       the cluster's incarnation: a new one owes nothing
        accepted  seq of the last accepted push of this incarnation; any other push was gated or not applied
        """
        if self._inc == ADOPTED:
            self._inc = inc
        if inc != self._inc:
            self._inc = inc
            self._clear_owed()
        elif self._seq and accepted == self._seq:
            self._settle_accepted()
        self._seq = 0

    def settle_result(self, inc: int, accepted: int) -> None:
        """Settle the last push if it is push `accepted` of incarnation `inc`, before the next transfer says so."""
        if self._seq and (inc, accepted) == (self._inc, self._seq):
            self.settle_last_push(inc, accepted)

    def has_base(self, base: VersionId | None) -> bool:
        """Return whether differences to `base` can be computed."""
        return base is not None and base == self._version

    def restore_base(self) -> VersionId | None:
        """Copy the base into the host buffer, so that updates can be added; return its version, None if there
        is none.
        """
        if self._version is not None:
            for host, base in zip(self._host, self._base, strict=True):
                np.copyto(host, base)
        return self._version

    def freeze_push(self, seq: int, codec: Codec, numbers: Iterable[int] | None = None) -> None:
        """Turn θ_local in the host buffer into the values of push `seq` in `codec`. Reads 3 floats per element.

        numbers  the pieces frozen now, others of the same push before or later; None: all
        """
        if seq != self._seq:  # the first pieces of this push
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
        """Encode one chunk of the frozen push, identically each time. Runs on the transfer's thread."""
        self._sent[chunk] = None
        return encode_body(self._codec, np.frombuffer(view, np.float32))

    def set_base(self, version: VersionId, numbers: Iterable[int] | None = None) -> None:
        """Make `version`, held by the host buffer and the model, the base of the next differences.

        numbers  the pieces that hold it; there is no base until all others have been passed, too; None: all
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
        """Return (base, owed) for a checkpoint: this rank's own arrays, to be copied before the next transfer. Nothing
        is owed that the checkpoint's model contains.
        """
        return self._base, [np.zeros_like(owed) for owed in self._owed] if self._contained else self._owed

    def restore_debt(self, version: VersionId, base: Sequence[F32], owed: Sequence[F32]) -> None:
        """Restore base and debt of a checkpoint; the debt is owed by the present incarnation."""
        for mine, theirs in zip((*self._base, *self._owed), (*base, *owed), strict=True):
            np.copyto(mine, theirs)
        self._taken, self._lacking = version, set()
        self._version, self._contained, self._seq, self._inc = version, False, 0, ADOPTED

    def _settle_accepted(self) -> None:
        """Note that the frozen push is part of a version: from now on only the rounding error of its chunks is owed."""
        self._contained = True
        if not self._codec.lossy:
            self._clear_owed()
            return
        for chunk in self._sent:
            difference, owed = self._chunk_elements(self._frozen_at, chunk), self._chunk_elements(self._owed_at, chunk)
            brought = decode_body(self._codec, encode_body(self._codec, difference), chunk.length)
            np.subtract(difference, brought, out=owed)

    @staticmethod
    def _chunk_elements(share: Share, chunk: Range) -> F32:
        view = share.view_chunk(chunk)
        assert view is not None, f"{chunk} was sent and is not held here"
        return np.frombuffer(view, np.float32)

    def _clear_owed(self) -> None:
        """Set the owed error to zero."""
        for owed in self._owed:
            owed.fill(0)
