"""The way of one push or pull: asked, granted, moved, finished, settled; and what the trainer is told meanwhile.

A talk has a phase; which answer of the master is legal in which phase, and who takes it up, is a table (ANSWERS).
Rank 0 opens a talk with a question of a new number and repeats it until the verdict is there. A talk whose trainer
died, or was told to train on because the master is out of reach, goes on to its end without it, so that what is
committed is settled.

Must stay true: progress is cut when a push is granted, and settled, given back or lost exactly once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from dips.client.agent.actions import SyncPhase
from dips.client.agent.state import Life
from dips.client.ipc.messages import (
    Answer,
    AskAgain,
    Over,
    PullMoved,
    PullNow,
    PullWanted,
    PushMoved,
    PushNow,
    PushWanted,
    TrainOn,
)
from dips.ids import PullId, PushId
from dips.protocol.effects import (
    Acknowledged,
    Committed,
    Dropped,
    Finished,
    Grant,
    Outcome,
    Refused,
)
from dips.protocol.events import PullFinished, PullRequested, PushAborted, PushFinished, PushRequested, RoundAwaited

PULL_TRIES = 3  # a pull that fails so often in a row is given up, unless the trainer cannot train without it
STAND_S = 1.0  # slots that are free are reserved in milliseconds; for others no trainer stands still
RETRY_S = 0.5  # before a failed pull is asked for anew
AGAIN_S = 1.0  # before a push is, whose slot was not to be had: its slave is gone, and not back within a step


class Talk(Life):
    """One talk at a time, with rank 0 on one side and the master on the other."""

    def _talk(self, q: PushWanted | PushMoved | PullWanted | PullMoved) -> Answer:
        if q.number > self._number:
            if isinstance(q, PushWanted) and self._reserving():
                self._take(q.number)  # it asks again, after it trained on for a while; it has stood its time
            elif isinstance(q, PushWanted | PullWanted) and self.phase is not SyncPhase.RESTING:
                # The last talk is still being settled; a trainer that has parameters need not wait for one who is away.
                away = isinstance(q, PushWanted) and self._unreachable_since is not None
                return self._train_on(self.reason, again=True) if away else AskAgain(self.reason)
            else:
                self._take(q.number)
                self._stands_since = self._now
                self._open(q)
        verdict = self._verdict()
        if isinstance(verdict, AskAgain) and self.phase is SyncPhase.ASKING_PUSH and self._stands_long():
            self._waiting = False  # nobody is asked for less because of it: what is granted waits for the next look
            return TrainOn(self.reason, self._pace.soon, self._fraction())
        return verdict

    def _take(self, number: int) -> None:
        """Rank 0 waits for the verdict on this question."""
        self._number, self._waiting, self._told = number, True, None

    def _reserving(self) -> bool:
        """A push is asked for, or granted, and the ranks were not yet told to freeze."""
        return self.phase is SyncPhase.ASKING_PUSH or (self.phase is SyncPhase.PUSHING and not self._cut)

    def _stands_long(self) -> bool:
        """For one slot a trainer stands still once; for a master that does not answer not at all."""
        in_vain = self._unreachable_since is not None or self._now - self._stands_since >= STAND_S
        return not self._overlap and in_vain

    def _open(self, q: PushWanted | PushMoved | PullWanted | PullMoved) -> None:
        if isinstance(q, PushMoved) and self.phase is SyncPhase.PUSHING and q.seq == self._seq:
            self._push_moved(q)
        elif isinstance(q, PullMoved) and self.phase is SyncPhase.PULLING and q.seq == self._seq:
            self._pull_moved(q)
        elif isinstance(q, PullWanted):
            self._pull_due = True
            self._rest("a pull is wanted")
        elif self.phase is not SyncPhase.RESTING:
            pass  # what was moved belongs to a talk that is over; the present one will tell
        elif isinstance(q, PushMoved | PullMoved) or self._pull_due or self.progress.finished:
            self._rest("the transfer was ended meanwhile")
        elif self._now < self._backoff_until:
            self._tell(self._train_on(self.reason, again=True))
        elif (steps := self._pace.look_in(self._now)) and not q.demanded:
            self._tell(TrainOn(self.reason, steps, self._fraction()))
        else:
            self._ask_push()

    def _verdict(self) -> Answer:
        if self._told:
            return self._told
        if self.phase is SyncPhase.PUSHING and self._grant:
            self._freeze()
            return PushNow(self.inc, self._seq, self._grant, self._accepted)
        if self.phase is SyncPhase.PULLING and self._grant:
            return PullNow(self.inc, self._seq, self._grant, self._fraction(), self._accepted, self._merge)
        return AskAgain(self.reason, self._pace.soon)

    def _freeze(self) -> None:
        """Cut the progress where the ranks freeze the model: all that they did before is counted, nothing after it."""
        if self._cut:
            return
        self._cut, self._frozen_by, self._sick = True, self.attempt, False
        self.account.freeze()
        if self._overlap:
            self._pace.cut(self._now)
        self._begin_moving()
        self._mark("push_begin", seq=self._seq, base=str(self.base), tokens=self.account.frozen.tokens)

    def _moving_id(self) -> PushId | PullId | None:
        """The push or pull that the ranks are moving now."""
        if self.phase is SyncPhase.PUSHING:
            return self._push_id()
        return self._pull_id() if self.phase is SyncPhase.PULLING else None

    def _rest(self, reason: str, again: bool = False, delay_s: float = 0.0) -> None:
        """The talk is over; a trainer that waits is given the pull that it needs, or its verdict."""
        self.phase, self.reason, self._grant = SyncPhase.RESTING, reason, None
        self._want_final()
        if self._waiting and self._pull_due:
            self._ask_pull(delay_s)
        elif self._waiting:
            self._conclude(reason, again)

    def _want_final(self) -> None:
        """A finished run's last version is worth one pull."""
        finished = self.progress.finished
        if finished and self.base != finished and not self._final_tried:
            self._pull_due = self._final_tried = True

    def _conclude(self, reason: str, again: bool = False) -> None:
        if self.progress.finished:
            self._tell(Over(f"the run is finished with {self.progress.finished}", self._fraction()))
        else:
            self._tell(self._train_on(reason, again))

    def _train_on(self, reason: str, again: bool = False) -> TrainOn:
        """Look `again` at the next boundary; else this talk was a push or a pull, and the pace begins anew."""
        if again:
            return TrainOn(reason, 1, self._fraction())
        if not self._overlap:  # there the pace began anew when the push was frozen
            self._pace.cut(self._now)
        return TrainOn(reason, max(1, self._pace.look_in(self._now)), self._fraction())

    def _tell(self, verdict: Answer) -> None:
        self._told, self._waiting = verdict, False

    def _push_moved(self, q: PushMoved) -> None:
        self._mark("push_end", seq=q.seq, ok=q.ok, nbytes=q.nbytes, reason=q.reason)
        if not q.ok:
            self._give_back()
            self._abort(f"its push failed: {q.reason}")
            self._tell(self._train_on(self.reason))
            return
        self._have_moved(q.nbytes, q.nbytes)
        self.tally.moved["push"] += q.nbytes
        self.phase, self.reason = SyncPhase.FINISHING, "its push waits to be committed"
        p = self.account.frozen
        self._ask(PushFinished(0, self._push_id(), p.tokens, p.inner_steps, p.ranges, p.loss))

    def _pull_moved(self, q: PullMoved) -> None:
        assert self._grant
        version = self._grant.version
        self._mark("pull_end", seq=q.seq, version=str(version), installed=q.installed, nbytes=q.nbytes, reason=q.reason)
        if q.installed:
            self._have_moved(q.nbytes, q.nbytes)
            self.tally.moved["pull"] += q.nbytes
            self.base, self._resync, self._pull_due, self._pull_failures = version, False, False, 0
            if not q.merged:
                self.ranges.take_back_unserved(self.account.lose_carried())  # work that the pull has overwritten
            self.reason = f"trains on {version}"
        else:
            if q.torn:
                self.base = None  # it has no parameters of the run, until a pull succeeds
                self._mark("torn", seq=q.seq)
            self._pull_failed(f"its pull failed: {q.reason}")
        self._close_pull(q.installed)
        self._want_final()
        if not self._pull_due:  # it need not stand still while the pull is being closed
            self._conclude(self.reason)

    def _pull_failed(self, reason: str) -> None:
        """Try again, but for ever only if the trainer cannot train with what it has."""
        self._pull_failures, self.reason = self._pull_failures + 1, reason
        self._pull_due = self._resync or self.base is None or self._pull_failures < PULL_TRIES
        if not self._pull_due:
            self._pull_failures = 0

    def _push_granted(self, grant: Grant) -> None:
        self.phase, self.reason, self._grant = SyncPhase.PUSHING, "its push is moving", grant
        self._mark_inner()
        self._cut = False

    def _refused(self, result: Refused) -> None:
        if self.phase is SyncPhase.ASKING_PULL:
            self._pull_failed(f"its pull was refused: {result.reason}")
            self._rest(self.reason, delay_s=result.retry_after_s)
            return
        self._backoff_until = self._now + result.retry_after_s
        self._rest(result.reason, again=True)

    def _committed(self, _: Committed) -> None:
        self.phase, self.reason = SyncPhase.AWAITING, "its push is committed, the window is open"
        self._mark("window_begin", seq=self._seq)
        self._ask(RoundAwaited(0, self._push_id()))

    def _outcome(self, result: Outcome) -> None:
        if self.phase is SyncPhase.AWAITING:
            self._mark("window_end", seq=self._seq)
        self._mark("outcome", outcome=result.kind, version=str(result.version), seq=self._seq, reason=result.reason)
        self.tally.turn(self._cause(), self._now)
        self.tally.updated(result.update_s)
        self._progressed(result.progress)
        if result.kind == "skipped":
            self._give_back()
            self._rest(f"its round was skipped: {result.reason}")
            return
        self.account.settle(result.kind)
        self.settled += 1
        self._accepted = self._seq if result.kind == "accepted" else self._accepted
        self._pull_due = self._waiting
        if result.pull is None:
            self._rest(f"its push was {result.kind}")
        elif self._waiting:
            self._pull_granted(result.pull, after_push=True)
        else:
            self._close_pull(False)

    def _dropped(self, result: Dropped) -> None:
        if self.phase is SyncPhase.ASKING_PULL:
            self._pull_failed(f"its pull was dropped: {result.reason}")
        if self.phase is SyncPhase.AWAITING:
            self._mark("window_end", seq=self._seq)
        if self.phase in (SyncPhase.ASKING_PUSH, SyncPhase.FINISHING, SyncPhase.AWAITING):
            self._mark("outcome", outcome="dropped", version="", seq=self._seq, reason=result.reason)
        self._give_back()
        if self.phase is SyncPhase.ASKING_PUSH:
            self._backoff_until = self._now + AGAIN_S
        self._rest(result.reason, again=self.phase is SyncPhase.ASKING_PUSH, delay_s=RETRY_S)

    def _pull_granted(self, grant: Grant, after_push: bool = False) -> None:
        if not self._waiting:  # the trainer was told to train on, or died
            self._close_pull(False)
            return
        self.phase, self.reason, self._grant = SyncPhase.PULLING, f"pulls {grant.version}", grant
        self._merge = self._overlap and after_push and not self._resync and not self.progress.finished
        self._begin_moving()
        self._mark("pull_begin", seq=self._seq, version=str(grant.version))

    def _closed(self, _: Acknowledged | Dropped) -> None:
        self._rest(self.reason, delay_s=RETRY_S)

    def _finished(self, result: Finished) -> None:
        self.progress = replace(self.progress, finished=result.version)
        if self.phase is SyncPhase.ASKING_PULL:
            self._pull_due, self._final_tried = False, True
        self._give_back()
        self._rest("the run is finished")

    def _give_back(self) -> None:
        """The open push came to nothing; its portion is carried on by the trainer that earned it, or lost with it."""
        if self._alive and self._frozen_by == self.attempt and not self._resync:
            self.account.give_back()
        else:
            self.ranges.take_back_unserved(self.account.lose_frozen())

    def _ask_push(self) -> None:
        assert self.base is not None
        if not self._overlap:
            self._pace.stood_still()
        self._seq, self._moved = self._seq + 1, (0, 0)
        self.phase, self.reason = SyncPhase.ASKING_PUSH, "it asks for a push"
        self._ask(PushRequested(0, self._push_id(), self.base, self._push_ranks))

    def _ask_pull(self, delay_s: float = 0.0) -> None:
        self._seq, self._moved = self._seq + 1, (0, 0)
        self.phase, self.reason = SyncPhase.ASKING_PULL, self.reason or "it asks for a pull"
        self._ask(PullRequested(0, self._pull_id(), self._pull_ranks), delay_s)

    def _close_pull(self, installed: bool) -> None:
        self.phase, self._grant = SyncPhase.CLOSING, None
        self._ask(PullFinished(0, self._pull_id(), installed))

    def _abort(self, reason: str) -> None:
        self.phase, self.reason, self._grant = SyncPhase.ABORTING, reason, None
        self._ask(PushAborted(0, self._push_id(), reason))


# Which answer is legal in which phase, and who takes it up. Pending is legal everywhere: the same is asked again.
ANSWERS: Mapping[tuple[SyncPhase, type], Callable[..., None]] = {
    (SyncPhase.ASKING_PUSH, Grant): Talk._push_granted,
    (SyncPhase.ASKING_PUSH, Refused): Talk._refused,
    (SyncPhase.ASKING_PUSH, Dropped): Talk._dropped,
    (SyncPhase.ASKING_PUSH, Finished): Talk._finished,
    (SyncPhase.FINISHING, Committed): Talk._committed,
    (SyncPhase.FINISHING, Outcome): Talk._outcome,
    (SyncPhase.FINISHING, Dropped): Talk._dropped,
    (SyncPhase.FINISHING, Finished): Talk._finished,
    (SyncPhase.AWAITING, Outcome): Talk._outcome,
    (SyncPhase.AWAITING, Dropped): Talk._dropped,
    (SyncPhase.AWAITING, Finished): Talk._finished,
    (SyncPhase.ABORTING, Acknowledged): Talk._closed,
    (SyncPhase.ASKING_PULL, Grant): Talk._pull_granted,
    (SyncPhase.ASKING_PULL, Refused): Talk._refused,
    (SyncPhase.ASKING_PULL, Dropped): Talk._dropped,
    (SyncPhase.ASKING_PULL, Finished): Talk._finished,
    (SyncPhase.CLOSING, Acknowledged): Talk._closed,
    (SyncPhase.CLOSING, Dropped): Talk._closed,
}
