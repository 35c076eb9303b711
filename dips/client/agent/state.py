"""What the agent's mind holds, and the small verbs by which it orders deeds; no decision is made here.

Layers, each knowing only those below: Life (this file), Talk (one push or pull from its question to its verdict),
Session (attempts of the trainer, the life at the master, data ranges, beats).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from dips.client.agent.account import NO_INCARNATION, Account, PastIncarnation, RangeQueue
from dips.client.agent.actions import STANDSTILL, Action, AskMaster, ClusterIdentity, RecordMark, StopTrainer, SyncPhase
from dips.client.agent.pace import Pace
from dips.client.agent.tally import Tally
from dips.client.ipc.messages import Answer, ErrorReply
from dips.errors import DipsError, treatment
from dips.ids import PullId, PushId, VersionId
from dips.protocol.effects import Grant, Progress
from dips.protocol.events import RangesRequested


class Life:
    """One life of the cluster at the master, the present attempt of its trainer, and the present talk."""

    def __init__(
        self,
        identity: ClusterIdentity,
        new_nonce: Callable[[], str],
        patience_s: float,
        pace: Pace,
        overlap: bool = False,
        former: PastIncarnation = NO_INCARNATION,
    ) -> None:
        """
        patience_s  how long a trainer waits for a master that does not answer, before it trains on
        overlap     the trainer trains on while its push moves, its window is open and its pull arrives
        former      the last life of an agent that died here
        """
        self._identity, self._new_nonce, self._patience_s, self._pace = identity, new_nonce, patience_s, pace
        self._out: list[Action] = []
        self._now = 0.0
        self.tally = Tally()
        self._starves = self._left = False  # the trainer waits for a data range; it said goodbye
        # this life at the master
        self.inc, self._nonce, self._term, self._manifest = 0, "", 0, ""
        self.account, self.ranges = Account(), RangeQueue()
        self.progress = Progress(0, 0, None)
        self._seq = self._ranges_seq = 0
        self._ranges_asked = False
        self._ranges_event = cast("RangesRequested | None", None)  # the last that was asked
        self._ended_at = cast("float | None", None)  # when the data ended before all of it was settled
        self._rest_again_at = 0.0  # the next try to push the rest
        self._sick = False  # the loss was not finite since the last freeze, and that was said
        self._claimed: tuple[int, ...] = ()  # ranges of a checkpoint that were asked for
        self.settled = 0  # pushes of this cluster that were accepted or gated, in all its lives
        self._former = former  # the life before, until the master says what he knows of it
        # the trainer
        self.attempt, self._alive, self._process = 0, False, ""  # the last names rank 0
        self._buried, self._started = set[str](), 0  # rank 0 of former attempts; the newest life that we started
        self.inner_steps = self.tokens = 0  # since the agent's start
        self.loss, self.base = 0.0, cast("VersionId | None", None)
        self._push_ranks = self._pull_ranks = 1
        self._moved, self._marked_at = (0, 0), 0.0  # of the present or last transfer: bytes, in all
        self._moving_since, self._bytes_per_s = 0.0, 0.0  # its grant; its mean rate
        # the talk
        self.phase, self.reason = SyncPhase.UNJOINED, "no trainer has attached yet"
        self._number = self._question = 0
        self._waiting, self._told = False, cast("Answer | None", None)
        self._stands_since = 0.0  # when rank 0 first asked for what it waits for
        self._accepted = 0  # seq of this life's last push that was
        self._frozen_by = 0  # the attempt whose progress the open push carries
        self._grant = cast("Grant | None", None)
        self._overlap = overlap
        self._cut = self._merge = False  # the ranks were told to freeze; the present pull is merged
        self._beat_moving = cast("PushId | PullId | None", None)  # what was moving when the last beat left
        self._halt = ""  # why the ranks should end the present transfer
        self._pull_due = self._resync = self._final_tried = False
        self._pull_failures, self._backoff_until = 0, 0.0
        self._unreachable_since = cast("float | None", None)
        self._failure = cast("ErrorReply | None", None)

    def _ask(self, event: object, delay_s: float = 0.0) -> None:
        self._question += 1
        self._last_ask = AskMaster("talk", self._question, event, delay_s)
        self._out.append(self._last_ask)

    def _stop(self, error: DipsError) -> None:
        self._failure = ErrorReply(type(error).__name__, str(error))
        self._out.append(StopTrainer(treatment(error).exit_code, f"{type(error).__name__}: {error}"))

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
        self._out.append(RecordMark(kind, fields))

    @property
    def alive(self) -> bool:
        """A trainer is attached."""
        return self._alive

    @property
    def devices(self) -> int:
        """Ranks of the present or last trainer that hold a part of the model."""
        return self._pull_ranks

    @property
    def fraction(self) -> float:
        """Accepted tokens of the run over its target, 0 to 1."""
        return self._fraction()

    def silent_s(self, now: float) -> float:
        """For how long the master has not answered; 0 while it does."""
        return 0.0 if self._unreachable_since is None else max(0.0, now - self._unreachable_since)

    def _trains_on(self) -> bool:
        """Whatever it waits for, its trainer does not stand still: it overlaps, and has parameters to train."""
        return self._overlap and self.base is not None and not self._resync

    def _cause(self) -> str:
        """What the cluster's time goes to now (tally.CAUSES)."""
        if not self._alive:
            return "ended" if self._left else "failure" if self.attempt else "start"
        if self._waiting and not self._trains_on():
            return STANDSTILL[self.phase]
        if self._starves:
            return "data"
        return "start" if self.base is None else "inner"

    def _flush(self) -> list[Action]:
        self.tally.turn(self._cause(), self._now)
        out, self._out = self._out, []
        return out
