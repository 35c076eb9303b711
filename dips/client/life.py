"""What the agent's mind holds, and the small verbs by which it orders deeds; no decision is made here.

Layers, each knowing only those below: Life (this file), Talk (one push or pull from its question to its verdict),
Session (attempts of the trainer, the life at the master, data ranges, beats).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from dips.client.account import Account, RangeQueue
from dips.client.deeds import Ask, Deed, Identity, Mark, Phase, Stop
from dips.client.local import Answer, Failure
from dips.errors import DipsError, treatment
from dips.ids import PullId, PushId, VersionId
from dips.protocol.effects import Grant, Progress


class Life:
    """One life of the cluster at the master, the present attempt of its trainer, and the present talk."""

    def __init__(self, identity: Identity, new_nonce: Callable[[], str], patience_s: float) -> None:
        """`patience_s`: how long a trainer waits for a master that does not answer, before it trains on."""
        self._identity, self._new_nonce, self._patience_s = identity, new_nonce, patience_s
        self._out: list[Deed] = []
        self._now = 0.0
        # this life at the master
        self.inc, self._nonce, self._term, self._manifest = 0, "", 0, ""
        self.account, self.ranges = Account(), RangeQueue()
        self.progress = Progress(0, 0, None)
        self._seq = self._ranges_seq = 0
        self._ranges_asked = False
        self._former = 0  # tokens consumed in the life before, until the master says what he knows of them
        # the trainer
        self.attempt, self._alive, self._key = 0, False, (0, 0, 0)
        self.inner_steps = self.tokens = 0  # since the agent's start
        self.loss, self.base = 0.0, cast("VersionId | None", None)
        self._push_ranks = self._pull_ranks = 1
        self._moved, self._marked_at = (0, 0), 0.0  # of the present or last transfer: bytes, in all
        self._moving_since, self._bytes_per_s = 0.0, 0.0  # its grant; its mean rate
        # the talk
        self.phase, self.reason = Phase.UNJOINED, "no trainer has attached yet"
        self._number = self._question = 0
        self._waiting, self._told = False, cast("Answer | None", None)
        self._accepted = 0  # seq of this life's last push that was
        self._frozen_by = 0  # the attempt whose progress the open push carries
        self._grant = cast("Grant | None", None)
        self._beat_moving = cast("PushId | PullId | None", None)  # what was moving when the last beat left
        self._halt = ""  # why the ranks should end the present transfer
        self._pull_due = self._resync = self._final_tried = False
        self._pull_failures, self._backoff_until = 0, 0.0
        self._unreachable_since = cast("float | None", None)
        self._failure = cast("Failure | None", None)

    def _ask(self, event: object, delay_s: float = 0.0) -> None:
        self._question += 1
        self._last_ask = Ask("talk", self._question, event, delay_s)
        self._out.append(self._last_ask)

    def _stop(self, error: DipsError) -> None:
        self._failure = Failure(type(error).__name__, str(error))
        self._out.append(Stop(treatment(error).exit_code, f"{type(error).__name__}: {error}"))

    def _unreachable(self) -> bool:
        """The master has not answered for longer than a trainer waits."""
        return self._unreachable_since is not None and self._now - self._unreachable_since >= self._patience_s

    def _progressed(self, progress: Progress) -> None:
        if progress.tokens >= self.progress.tokens or progress.finished:
            self.progress = progress

    def _fraction(self) -> float:
        p = self.progress
        return min(1.0, p.tokens / p.tokens_target) if p.tokens_target else 0.0

    def _push_id(self) -> PushId:
        return PushId(self._identity.cluster, self.inc, self._seq)

    def _pull_id(self) -> PullId:
        return PullId(self._identity.cluster, self.inc, self._seq)

    def _begin_moving(self) -> None:
        """A transfer was granted."""
        self._moved, self._halt, self._moving_since = (0, 0), "", self._now

    def _have_moved(self, nbytes: int, total: int) -> None:
        """So much of it has moved, over all ranks."""
        self._moved = (nbytes, total)
        self._bytes_per_s = nbytes / max(self._now - self._moving_since, 1e-3)

    def _mark_inner(self) -> None:
        self._marked_at = self._now
        self._mark("inner", attempt=self.attempt, inner_steps=self.inner_steps, tokens=self.tokens, loss=self.loss)

    def _mark(self, kind: str, **fields: object) -> None:
        self._out.append(Mark(kind, fields))

    def _flush(self) -> list[Deed]:
        out, self._out = self._out, []
        return out
