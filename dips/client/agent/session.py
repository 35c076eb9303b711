"""What the agent decides: attempts of the trainer, the cluster's life at the master, data ranges, beats.

Must stay true: what an older attempt, incarnation, question or term says changes nothing; a trainer that has no
parameters of the run, or whose life at the master ended, pulls before anything that it earns counts. Pure: no socket,
clock, task or file; `hear` takes what rank 0 says, `answered`, `failed`, `hindered` and `beat_answered` what comes of
asking the master, and each returns the deeds to do.
"""

from __future__ import annotations

from dataclasses import replace

from dips.client.agent.account import NO_INCARNATION, NOTHING, Account, PastIncarnation, RangeQueue
from dips.client.agent.actions import ACTIVITY, Action, AskMaster, SendHeartbeat, SyncPhase
from dips.client.agent.checkpoints import Checkpoints
from dips.client.agent.outer_sync import AGAIN_S, ANSWERS
from dips.client.ipc.messages import (
    Answer,
    AskAgain,
    Attach,
    Attached,
    Bye,
    ErrorReply,
    Halt,
    Heard,
    LossHeard,
    Message,
    Notice,
    PullMoved,
    PullWanted,
    PushMoved,
    PushWanted,
    RangeGiven,
    RangesEnded,
    RangeWanted,
    Resume,
    SaveWanted,
    Stepped,
    TransferProgress,
)
from dips.errors import DipsError, LocalProtocolError, Stale, StaleIncarnation
from dips.protocol.effects import Dropped, Finished, Joined, Pending, Ranges, Refused, Result
from dips.protocol.enums import Activity, ClusterStanding, TrainerState
from dips.protocol.events import ClusterJoined, ClusterLeft
from dips.protocol.heartbeats import ClusterHeartbeat, ClusterHeartbeatAnswer

ASK_AGAIN_S = 0.05  # after Pending; the master holds the question open itself
MARK_EVERY_S = 0.5  # inner steps on the timeline, at most so often
END_S = 600.0  # at the end of the data, the last push is tried for so long


class Session(Checkpoints):
    """The agent's mind; see `Life.__init__` for what it is made from."""

    def hear(self, message: Message, now: float) -> tuple[Answer | None, list[Action]]:
        """Take a word of rank 0; the answer is None for notices, and Wait if the same is to be asked again."""
        self._now = now
        answer = self._attach(message) if isinstance(message, Attach) else self._known(message)
        return answer, self._flush()

    def trainer_gone(self, reason: str, now: float) -> list[Action]:
        """The trainer died or lost its line: its progress since the last freeze is lost, its open transfer is ended."""
        self._now = now
        if self._alive:
            self._bury(reason)
        return self._flush()

    def answered(self, number: int, result: Result, now: float) -> list[Action]:
        """Take the master's answer to question `number`; answers to questions that no longer stand are passed over."""
        self._now, self._unreachable_since = now, None
        if isinstance(result, Ranges) and number == -self._ranges_seq:
            self._ranges_asked = False
            # named ranges that are not to be had say nothing about those that are
            self.ranges.lease(result.ranges, result.exhausted and not self._claimed)
        elif number < 0 and number == -self._ranges_seq:
            self._ranges_again(result)
        elif number == self._question:
            self._take_up(result)
        return self._flush()

    def failed(self, number: int, error: DipsError, now: float) -> list[Action]:
        """The master refused question `number` with an error other than Unavailable and Busy, which are asked again."""
        self._now = now
        if number not in (self._question, -self._ranges_seq):
            return self._flush()
        if number < 0:
            self._ranges_asked = False
        if isinstance(error, StaleIncarnation):
            if number > 0:
                self.phase, self.reason = SyncPhase.UNSURE, str(error)
            self._out.append(SendHeartbeat())  # the beat says whether this life is gone or fenced
        elif isinstance(error, Stale) and number > 0 and self.phase is not SyncPhase.JOINING:
            self._dropped(Dropped(str(error)))
        else:
            self._stop(error)
        return self._flush()

    def hindered(self, reason: str, now: float) -> list[Action]:
        """The master does not answer; after `patience_s` the trainer trains on, the talk goes on without it.

        For a slot it does not wait at all (talk.py).
        """
        self._now = now
        if self._unreachable_since is None:
            self._unreachable_since = now
        if self._told is None:
            self.reason = reason
        stands_in_vain = self._waiting and not self._overlap and self.base is not None and not self._resync
        moved = self.phase in (SyncPhase.FINISHING, SyncPhase.AWAITING, SyncPhase.ASKING_PULL)
        if self._unreachable() and stands_in_vain and moved:
            self._pull_due = False
            self._tell(self._train_on(reason))
        return self._flush()

    def beat(self) -> ClusterHeartbeat | None:
        """What to tell the judge of liveness now; None before the first join."""
        if self.inc == 0:
            return None
        begun = TrainerState.TRAINING if self.base is not None else TrainerState.STARTING
        trainer = begun if self._alive else TrainerState.DEAD
        standing = self._alive and not self._told and not self._trains_on()
        activity = ACTIVITY.get(self.phase, Activity.INNER) if standing else Activity.INNER
        self._beat_moving = self._moving_id()
        return ClusterHeartbeat(
            self._identity.cluster,
            self.inc,
            trainer,
            activity if self._alive else Activity.IDLE,
            self.attempt,
            self.inner_steps,
            self.account.unsettled,
            self.account.lost,
            self.loss,
            self.base,
            *self._moved,
            self._bytes_per_s,
            self._pace.aligned_steps,
            self._pace.step_s,
            self._pace.since_push,
            self.account.consumed,
        )

    def beat_answered(self, inc: int, answer: ClusterHeartbeatAnswer, now: float) -> list[Action]:
        """Take the answer to a beat of incarnation `inc`."""
        self._now = now
        if inc != self.inc or answer.term < self._term or self.phase is SyncPhase.JOINING:
            return self._flush()
        self._term, self._unreachable_since = answer.term, None
        self._progressed(answer.progress)
        self._pace.told(answer.push_in_s, now)
        if answer.standing is ClusterStanding.LIVE:
            self._notice_drop(answer)
        if answer.standing is ClusterStanding.FENCED:
            self._stop(StaleIncarnation(f"{self._identity.cluster}/{inc} is fenced by a newer life of the cluster"))
        elif answer.standing is ClusterStanding.GONE:
            self._rejoin()
        elif self.phase is SyncPhase.UNSURE:
            self._give_back()
            self._rest("the master took up this life again")
        return self._flush()

    def _notice_drop(self, answer: ClusterHeartbeatAnswer) -> None:
        """A transfer that was moving when the beat left, and that the master no longer lists, leads nowhere."""
        moving = self._moving_id()
        if moving is not None and moving == self._beat_moving and moving not in (answer.push, answer.pull):
            self._halt = f"the master has dropped {moving}"

    def leave(self) -> ClusterLeft | None:
        """The last word to the master; None if it never heard of us."""
        if self.inc == 0 or self.phase is SyncPhase.JOINING:
            return None
        return ClusterLeft(0, self._identity.cluster, self.inc, self.account.consumed)

    def _attach(self, q: Attach) -> Answer:
        if q.process != self._process:
            # torchrun on several hosts counts its restarts on each: only our own lives are older or newer by number.
            if q.process in self._buried or 0 < q.life < self._started:
                return ErrorReply("StaleIncarnation", f"attempt {q.life}.{q.restart} is over, a newer one has begun")
            self._begin_attempt(q)
        if self._failure:
            return self._failure
        if self.inc == 0 or self.phase is SyncPhase.JOINING:
            return AskAgain(self.reason)
        return Attached(self.attempt, self._fraction())

    def _begin_attempt(self, q: Attach) -> None:
        if self._alive:
            self._bury("a new attempt began")
        self._buried.add(self._process)
        self.attempt, self._alive, self._process = self.attempt + 1, True, q.process
        self._started = max(self._started, q.life)
        self._number, self.base, self._pull_failures = 0, None, 0
        self._cut = False
        self._waiting, self._told, self._resync = False, None, False
        self._starves = self._left = False
        self._push_ranks, self._pull_ranks = q.push_ranks, q.pull_ranks
        self._pace.cut(self._now)
        self.ranges.exhausted, self._ended_at, self._rest_again_at = False, None, 0.0
        self._mark("trainer_attached", attempt=self.attempt, life=q.life, restart=q.restart)
        if self.phase is SyncPhase.UNJOINED or q.manifest != self._manifest:
            self._manifest = q.manifest
            self._join("its model is not yet compared with the run's")

    def _known(self, message: Message) -> Answer | None:
        attempt = getattr(message, "attempt", None)
        if attempt != self.attempt or not self._alive:
            notice = isinstance(message, Notice)
            over = f"attempt {attempt} is over, the newest is {self.attempt}"
            return None if notice else ErrorReply("StaleIncarnation", over)
        if self._failure:
            return self._failure
        match message:
            case Stepped():
                self._stepped(message)
            case LossHeard():
                self._loss_heard(message)
            case TransferProgress(nbytes=nbytes, total=total):
                self._have_moved(nbytes, total)
                return Halt(self._halt) if self._halt else Heard()
            case PushWanted() | PushMoved() | PullWanted() | PullMoved():
                return self._talk(message)
            case RangeWanted():
                answer = self._range(message)
                self._starves = isinstance(answer, AskAgain)
                return answer
            case SaveWanted():
                return self._save()
            case Resume():
                return self._resume(message)
            case Bye():
                self._bury("it is done")
                self._left = True
                return Heard()
            case _:
                return ErrorReply("RemoteProtocolError", f"{type(message).__name__} is not a word of rank 0")
        return None

    def _stepped(self, notice: Stepped) -> None:
        self.inner_steps += 1
        self._pace.stepped(self._now)
        self.tokens += notice.tokens
        self.tally.earn(notice.tokens, self._now)
        self.loss = self.loss if notice.loss is None else notice.loss
        self.account.earn(notice.tokens, notice.loss)
        self._look_at_loss(notice.finite)
        if self._resync:  # its pull will overwrite this work
            self.account.lose_carried()
        if self._now - self._marked_at >= MARK_EVERY_S:
            self._mark_inner()

    def _loss_heard(self, notice: LossHeard) -> None:
        if notice.losses:
            self.loss = notice.loss_sum / notice.losses
        self.account.learn(notice.loss_sum, notice.losses)
        self._look_at_loss(notice.finite)

    def _look_at_loss(self, finite: bool) -> None:
        if not finite and not self._sick:
            self._sick = True
            self._mark("loss_not_finite", attempt=self.attempt, inner_steps=self.inner_steps)

    def _range(self, q: RangeWanted) -> Answer:
        """The next data range: one that was leased and not used up, else the master is asked for more."""
        book = self.ranges
        if q.count != book.asked:
            used = book.finish(q.count)
            if used is not None and self._resync:
                book.take_back_unserved((used,))  # what was trained on it will be overwritten
            elif used is not None:
                self.account.use_up(used)
        given = None if self.progress.finished else book.serve()
        if not book.waiting and not book.exhausted and not self._ranges_asked and self._joined_in():
            self._ask_ranges()
        if given is not None:
            self._ended_at = None
            return RangeGiven(given)
        if self.progress.finished:
            return RangesEnded(f"the run is finished with {self.progress.finished}", True)
        if book.exhausted and not self._ranges_asked:
            return self._end_of_data()
        return AskAgain("the master is asked for data ranges")

    def _end_of_data(self) -> Answer:
        """No range is left: have the rest pushed, so that every range is settled with what was trained on it.

        A rest that cannot be settled for END_S, because no slot is to be had or the master is away, is given up.
        """
        if self.account.frozen == NOTHING and self.account.carried == NOTHING:
            return RangesEnded("no data range is left to lease", False)
        if self._ended_at is None:
            self._ended_at = self._now
        if self._now - self._ended_at >= END_S:
            rest = f"{self.account.unsettled} tokens since the last push could not be settled in {END_S:g} s"
            self._mark("rest_given_up", attempt=self.attempt, tokens=self.account.unsettled, reason=self.reason)
            return RangesEnded(f"no data range is left to lease; {rest}: {self.reason}", False)
        ours = self.phase in (SyncPhase.RESTING, SyncPhase.PUSHING, SyncPhase.PULLING)  # else it is the master's turn
        if not ours or self._now < max(self._backoff_until, self._rest_again_at) or self._unreachable_since is not None:
            return AskAgain(self.reason)
        self._rest_again_at = self._now + AGAIN_S
        return RangesEnded("no data range is left to lease", False, unsettled=True)

    def _bury(self, reason: str) -> None:
        self._alive = self._waiting = False
        self._told = None
        self._mark_inner()
        self.ranges.take_back(self.account.lose_carried())
        self._mark("trainer_gone", attempt=self.attempt, reason=reason, tokens_lost=self.account.lost)
        if self.phase in (SyncPhase.ASKING_PUSH, SyncPhase.PUSHING):
            self._give_back()
            self._abort(reason)
        elif self.phase in (SyncPhase.ASKING_PULL, SyncPhase.PULLING):
            self._close_pull(False)

    def _take_up(self, result: Result) -> None:
        if isinstance(result, Pending):
            self.reason = result.reason
            self._out.append(replace(self._last_ask, delay_s=ASK_AGAIN_S))
            return
        taker = ANSWERS.get((self.phase, type(result)))
        if self.phase is SyncPhase.JOINING and isinstance(result, Joined):
            self._joined(result)
        elif taker is not None:
            taker(self, result)
        else:
            self._stop(LocalProtocolError(f"while {self.phase} the master answered {result!r}"))

    def _join(self, reason: str) -> None:
        if self._joined_in():  # the life that ends by this
            self._former, self.account = PastIncarnation(self.inc, self.account.consumed), Account()
        self._nonce = self._new_nonce()
        self.phase, self.reason, self._grant = SyncPhase.JOINING, reason, None
        i = self._identity
        self._ask(ClusterJoined(0, i.cluster, self._nonce, i.run, self._manifest, i.config_digest))

    def _joined(self, result: Joined) -> None:
        if result.term < self._term:
            self._join("a master answered that has a successor")
            return
        # The master tells of the life right before this one. If that was not ours (two agents, an answer to Join that
        # got lost), we don't know what he has of ours: tokens that he never heard of stay untold, none is told twice.
        former, self._former = self._former, NO_INCARNATION
        ours = result.inc == former.inc + 1
        self._term, self.inc = result.term, result.inc
        self.account.lose_carried()
        # What the master has not accounted for of the former life (beats that it never heard, or heard and died
        # without writing them down) is told under this one;
        # a push whose Outcome never came is lost here, and may be accepted there.
        unheard = max(0, former.consumed - result.accounted) if ours else 0
        self.account, self.ranges = Account(lost=self.account.lost + unheard), RangeQueue()
        self.ranges.lease(result.ranges, False)
        self.settled, self._claimed = result.settled, ()
        self._seq = self._ranges_seq = self._accepted = 0
        self._ranges_asked, self._pull_due = False, True
        self._resync = self.base is not None  # what it trained under its former life is overwritten
        self._progressed(result.progress)
        self._mark("joined", inc=result.inc, head=str(result.head))
        self._rest(f"joined as {self._identity.cluster}/{self.inc}")

    def _rejoin(self) -> None:
        """The lease ran out: what was unsettled is lost (the master has freed its ranges); begin a new life."""
        self.account.lose_carried()
        self.account.lose_frozen()
        self._mark("life_ended", inc=self.inc, tokens_lost=self.account.lost)
        self._join("its lease at the master ran out: it joins again")

    def _ranges_again(self, result: Result) -> None:
        if isinstance(result, Finished):
            self._ranges_asked = False
            self.progress = replace(self.progress, finished=result.version)
            return
        delay_s = result.retry_after_s if isinstance(result, Refused) else ASK_AGAIN_S
        assert self._ranges_event is not None
        self._out.append(AskMaster("ranges", -self._ranges_seq, self._ranges_event, delay_s))

    @property
    def lived(self) -> PastIncarnation:
        """What the next agent must know if this one dies now."""
        if self._joined_in():
            return PastIncarnation(self.inc, self.account.consumed)
        return PastIncarnation(self._former.inc, self._former.consumed + self.account.consumed)

    def _joined_in(self) -> bool:
        return self.inc > 0 and self.phase is not SyncPhase.JOINING
