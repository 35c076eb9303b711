"""The agent's mind, played: rank 0 on one side, the master on the other, and a clock that the test holds."""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from typing import Any, TypeVar

import pytest

from dips.client.agent.account import NO_INCARNATION, PastIncarnation
from dips.client.agent.actions import (
    Action,
    AskMaster,
    ClusterIdentity,
    RecordMark,
    SendHeartbeat,
    StopTrainer,
    SyncPhase,
)
from dips.client.agent.pace import Pace
from dips.client.agent.session import Session
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
    Over,
    PullMoved,
    PullNow,
    PullWanted,
    PushMoved,
    PushNow,
    PushWanted,
    RangeGiven,
    RangesEnded,
    RangeWanted,
    Stepped,
    TrainOn,
    TransferProgress,
)
from dips.errors import CorruptManifest, StaleIncarnation, StalePush
from dips.ids import GENESIS, PushId, VersionId
from dips.protocol.effects import (
    Acknowledged,
    Committed,
    Dropped,
    Finished,
    Grant,
    Joined,
    Outcome,
    Pending,
    Progress,
    Ranges,
    Refused,
    Result,
)
from dips.protocol.enums import ClusterStanding
from dips.protocol.events import (
    ClusterJoined,
    ClusterLeft,
    PullFinished,
    PullRequested,
    PushAborted,
    PushFinished,
    PushRequested,
    RangesRequested,
    RoundAwaited,
)
from dips.protocol.heartbeats import ClusterHeartbeatAnswer

H = 64
V1 = VersionId(1, 1)
NONE_YET = Progress(0, 1000, None)
E = TypeVar("E")


def grant(version: VersionId = GENESIS) -> Grant:
    return Grant(version, (), ((),), 60.0)


class Play:
    """One session, what it last asked the master, and everything that it marked."""

    def __init__(self, overlap: bool = False, former: PastIncarnation = NO_INCARNATION) -> None:
        nonces = count(1)
        self.s = Session(
            ClusterIdentity("run", "west", "digest"),
            lambda: f"nonce{next(nonces)}",
            patience_s=10.0,
            pace=Pace(steps=H),
            overlap=overlap,
            former=former,
        )
        self.now = 0.0
        self.asks: dict[str, AskMaster] = {}
        self.marks: list[tuple[str, dict[str, Any]]] = []
        self.stops: list[StopTrainer] = []
        self.hurries = 0
        self.number = count(1)

    def do(self, deeds: list[Action]) -> None:
        for deed in deeds:
            match deed:
                case AskMaster():
                    self.asks[deed.channel] = deed
                case RecordMark(kind, fields):
                    self.marks.append((kind, dict(fields)))
                case StopTrainer():
                    self.stops.append(deed)
                case SendHeartbeat():
                    self.hurries += 1

    def say(self, message: Message) -> Answer | None:
        answer, deeds = self.s.hear(message, self.now)
        self.do(deeds)
        return answer

    def asked(self, kind: type[E], channel: str = "talk") -> E:
        event = self.asks[channel].event
        assert isinstance(event, kind), f"expected {kind.__name__}, the session asked {event}"
        return event

    def master(self, result: Result, channel: str = "talk") -> None:
        self.do(self.s.answered(self.asks[channel].number, result, self.now))

    def step(self, times: int = 1, tokens: int = 10) -> None:
        for _ in range(times):
            assert self.say(Stepped(self.s.attempt, tokens, 2.0)) is None

    def want_push(self) -> PushWanted:
        """Demanded, since these stories are about pushes; when one is due is test_pace.py's."""
        return PushWanted(self.s.attempt, next(self.number), demanded=True)

    def attach(self, life: int = 1, restart: int = 0, pid: int = 7) -> Attach:
        return Attach(life, restart, str(pid), '{"format":1,"layers":[]}', 1, 2)

    def begin(self, inc: int = 1, ranges: tuple[int, ...] = ()) -> None:
        """Attach, join and pull v0@r0."""
        assert isinstance(self.say(self.attach()), AskAgain)
        self.asked(ClusterJoined)
        self.master(Joined(3, inc, GENESIS, NONE_YET, ranges))
        assert isinstance(self.say(self.attach()), Attached)
        self.pull(GENESIS)

    def pull(self, version: VersionId, installed: bool = True) -> Answer | None:
        want = PullWanted(self.s.attempt, next(self.number))
        self.say(want)
        pull = self.asked(PullRequested).pull
        self.master(grant(version))
        assert self.say(want) == PullNow(pull.inc, pull.seq, grant(version), self.s._fraction(), self.s._accepted)
        moved = PullMoved(self.s.attempt, next(self.number), pull.seq, installed, "", 100)
        answer = self.say(moved)
        assert self.asked(PullFinished) == PullFinished(0, pull, installed)
        self.master(Acknowledged())
        return answer

    def push_until_granted(self) -> PushNow:
        want = self.want_push()
        assert isinstance(self.say(want), AskAgain)
        self.asked(PushRequested)
        self.master(grant())
        verdict = self.say(want)
        assert isinstance(verdict, PushNow)
        return verdict

    def push_until_committed(self) -> PushMoved:
        verdict = self.push_until_granted()
        moved = PushMoved(self.s.attempt, next(self.number), verdict.seq, True, "", 100)
        assert isinstance(self.say(moved), AskAgain)
        self.asked(PushFinished)
        self.master(Committed())
        self.asked(RoundAwaited)
        assert isinstance(self.say(moved), AskAgain)
        return moved

    def beat(self, standing: str) -> None:
        beat = self.s.beat()
        assert beat is not None
        answer = ClusterHeartbeatAnswer(3, 10.0, ClusterStanding(standing), None, None, NONE_YET)
        self.do(self.s.beat_answered(beat.inc, answer, self.now))

    def adds_up(self, consumed: int) -> None:
        assert self.s.account.consumed == consumed


@pytest.fixture
def play() -> Play:
    return Play()


def outcome(kind: str, version: VersionId | None = V1, pull: bool = True) -> Outcome:
    return Outcome(kind, version, "", grant(V1) if pull else None, Progress(40, 1000, None))


def test_whole_round(play: Play) -> None:
    """A push is asked, moved, committed, accepted; its pull is installed; the tokens are settled once."""
    play.begin()
    play.step(4)
    moved = play.push_until_committed()
    play.master(outcome("accepted"))
    verdict = play.say(moved)
    assert isinstance(verdict, PullNow) and verdict.grant.version == V1 and verdict.progress == 0.04
    told = play.say(PullMoved(1, next(play.number), verdict.seq, True, "", 9))
    assert told == TrainOn("trains on v1@r1", H, 0.04)
    assert play.s.base == V1
    assert (play.s.account.accepted, play.s.account.unsettled) == (40, 0)
    kinds = [kind for kind, _ in play.marks]
    wanted = ["push_begin", "push_end", "window_begin", "window_end", "outcome", "pull_begin", "pull_end"]
    assert [k for k in kinds if k in wanted][-7:] == wanted


def test_a_torn_model_pulls_until_it_succeeds(play: Play) -> None:
    """A streamed install that broke off leaves nothing to train with: no verdict but another pull [invariant 6]."""
    play.begin()
    moved = play.push_until_committed()
    play.master(outcome("accepted"))
    verdict = play.say(moved)
    for attempt in range(6):  # more than PULL_TRIES
        assert isinstance(verdict, PullNow), attempt
        told = PullMoved(1, next(play.number), verdict.seq, False, "ps1 is gone", 9, True)
        assert isinstance(play.say(told), AskAgain) and play.s.base is None
        assert play.asked(PullFinished).installed is False
        play.master(Acknowledged())
        play.asked(PullRequested)
        play.master(grant(V1))
        verdict = play.say(told)
    assert isinstance(verdict, PullNow)
    assert isinstance(play.say(PullMoved(1, next(play.number), verdict.seq, True, "", 9)), TrainOn)
    assert play.s.base == V1


def test_time_is_told_by_cause(play: Play) -> None:
    """Slot, push, window, update and pull are told apart; a trainer that died is the cluster's own failure."""
    play.begin()
    begun = play.now
    play.step(4)
    play.now += 10
    verdict = play.push_until_granted()  # at once
    play.now += 3
    moved = PushMoved(play.s.attempt, next(play.number), verdict.seq, True, "", 100)
    play.say(moved)
    play.master(Committed())
    play.asked(RoundAwaited)
    play.now += 5
    play.master(replace(outcome("accepted"), update_s=2.0))
    verdict = play.say(moved)
    play.now += 4
    play.say(PullMoved(1, next(play.number), verdict.seq, True, "", 9))
    play.now += 7
    play.do(play.s.trainer_gone("killed", play.now))
    play.now += 6
    spent = play.s.tally.spent(play.now)
    told = {cause: seconds for cause, seconds in spent.items() if seconds and cause not in ("start", "join")}
    assert told == {"inner": 17, "push": 3, "window": 3, "update": 2, "pull": 4, "failure": 6}
    assert sum(told.values()) == play.now - begun
    assert play.s.tally.moved == {"push": 100, "pull": 100 + 9}


def test_push_is_told_what_was_earned_up_to_its_freeze(play: Play) -> None:
    """FinishPush carries tokens, inner steps, mean loss and used-up ranges since the last settled freeze."""
    play.begin(ranges=(5, 6))
    assert play.say(RangeWanted(1, 1)) == RangeGiven(5)
    play.step(3)
    assert play.say(RangeWanted(1, 2)) == RangeGiven(6)
    play.step(1)
    play.push_until_granted()
    play.say(PushMoved(1, next(play.number), 2, True, "", 1))
    asked = play.asked(PushFinished)
    assert (asked.tokens, asked.inner_steps, asked.ranges, asked.loss) == (40, 4, (5,), 2.0)


@pytest.mark.parametrize("answer", [outcome("skipped", None, pull=False), Dropped("its round died")])
def test_a_round_that_breaks_gives_the_progress_back(play: Play, answer: Result) -> None:
    """Skipped or dropped: the cluster trains on, and the next push carries both portions."""
    play.begin()
    play.step(2)
    moved = play.push_until_committed()
    play.master(answer)
    told = play.say(moved)
    assert isinstance(told, TrainOn) and told.steps == H
    play.step(2)
    verdict = play.push_until_granted()
    play.say(PushMoved(1, next(play.number), verdict.seq, True, "", 1))
    assert play.asked(PushFinished).tokens == 40
    play.adds_up(40)


def test_gated_settles_and_pulls(play: Play) -> None:
    """A gated push's tokens never come back, and its cluster pulls like the others."""
    play.begin()
    play.step(2)
    moved = play.push_until_committed()
    play.master(outcome("gated"))
    assert isinstance(play.say(moved), PullNow)
    assert (play.s.account.gated, play.s.account.unsettled) == (20, 0)


@pytest.mark.parametrize(("kind", "settles"), [("accepted", True), ("gated", False), ("skipped", False)])
def test_the_next_transfer_is_told_what_was_accepted(play: Play, kind: str, settles: bool) -> None:
    """Before a host buffer is overwritten every rank knows whether what it froze is in a version (error feedback)."""
    play.begin()
    moved = play.push_until_committed()
    seq = moved.seq
    play.master(outcome(kind, None if kind == "skipped" else V1, pull=kind != "skipped"))
    told = play.say(moved)
    verdict = told if isinstance(told, PullNow) else play.push_until_granted()
    assert verdict.accepted == (seq if settles else 0)


def test_an_outcome_that_the_trainer_did_not_wait_for_is_told_with_its_next_push(play: Play) -> None:
    """It trained on while the master was away; what it froze lies in the host buffer until the next freeze."""
    play.begin()
    moved = play.push_until_committed()
    play.do(play.s.hindered("no answer", 1.0))
    play.now = 20.0
    play.do(play.s.hindered("no answer", play.now))
    assert isinstance(play.say(moved), TrainOn)
    play.master(outcome("accepted"))
    play.asked(PullFinished)
    play.master(Acknowledged())
    assert play.push_until_granted().accepted == moved.seq


def test_a_new_life_has_no_accepted_push(play: Play) -> None:
    """Its seq begins anew, so the old life's numbers must settle nothing [invariant 5]."""
    play.begin()
    moved = play.push_until_committed()
    play.master(outcome("accepted"))
    old = play.say(moved)
    assert isinstance(old, PullNow) and old.accepted == moved.seq
    play.beat("gone")
    play.master(Joined(3, 2, V1, NONE_YET, ()))
    failed = PullMoved(1, next(play.number), old.seq, False, "the pull is over", 1)
    play.say(failed)
    play.master(grant(V1))
    verdict = play.say(failed)
    assert isinstance(verdict, PullNow) and (verdict.inc, verdict.accepted) == (2, 0)


def test_busy_trains_on_and_asks_again_at_a_later_boundary(play: Play) -> None:
    """Refused: train on; until the time is over every question is answered at once, without the master."""
    play.begin()
    play.step()
    want = play.want_push()
    play.say(want)
    play.master(Refused(2.0, "all 2 slots are in use"))
    assert play.say(want) == TrainOn("all 2 slots are in use", 1, 0.0)
    before = play.asks["talk"].number
    assert play.say(play.want_push()) == TrainOn("all 2 slots are in use", 1, 0.0)
    assert play.asks["talk"].number == before
    play.now = 2.0
    assert isinstance(play.say(play.want_push()), AskAgain)
    assert play.asked(PushRequested).push.seq == 3


def test_pending_asks_the_same_again(play: Play) -> None:
    """Pending: the very same question goes out again."""
    play.begin()
    play.step()
    play.say(play.want_push())
    first = play.asks["talk"]
    play.master(Pending("the slaves are reserving a slot"))
    assert play.asks["talk"].event == first.event and play.asks["talk"].number == first.number


def test_a_failed_transfer_is_aborted_and_its_progress_carried(play: Play) -> None:
    """A rank that could not push ends the push for all; the trainer does not wait for the abort."""
    play.begin()
    play.step(2)
    verdict = play.push_until_granted()
    told = play.say(PushMoved(1, next(play.number), verdict.seq, False, "UnavailableSlave: gone", 0))
    assert isinstance(told, TrainOn) and told.steps == H
    assert "UnavailableSlave" in play.asked(PushAborted).reason
    play.master(Acknowledged())
    assert play.s.phase is SyncPhase.RESTING and play.s.account.carried.tokens == 20


def test_a_push_that_the_master_has_dropped_is_halted(play: Play) -> None:
    """A beat that left while the push moved, answered without it, ends it; one from before the grant does not."""
    play.begin()
    play.step()
    assert play.s.beat() is not None
    verdict = play.push_until_granted()
    nothing = ClusterHeartbeatAnswer(3, 10.0, ClusterStanding.LIVE, None, None, NONE_YET)
    moving = TransferProgress(play.s.attempt, 10, 100)
    play.do(play.s.beat_answered(play.s.inc, nothing, play.now))
    assert play.say(moving) == Heard()
    assert play.s.beat() is not None
    play.do(play.s.beat_answered(play.s.inc, replace(nothing, push=PushId("west", 1, verdict.seq)), play.now))
    assert play.say(moving) == Heard()
    assert play.s.beat() is not None
    play.do(play.s.beat_answered(play.s.inc, nothing, play.now))
    assert isinstance(play.say(moving), Halt)
    moved = PushMoved(play.s.attempt, next(play.number), verdict.seq, False, "the master has dropped it", 10)
    assert isinstance(play.say(moved), TrainOn)
    play.master(Acknowledged())
    play.adds_up(10)
    play.push_until_granted()
    assert play.say(moving) == Heard()


def test_a_beat_tells_the_rate_of_the_present_or_last_transfer(play: Play) -> None:
    """Bytes over the time since the grant, while they move and after; a transfer shorter than a beat counts too."""
    play.begin()
    play.step()
    play.now = 10.0
    verdict = play.push_until_granted()
    play.now = 12.0
    play.say(TransferProgress(play.s.attempt, 100, 400))
    beat = play.s.beat()
    assert beat is not None and (beat.bytes_moved, beat.bytes_total, beat.bytes_per_s) == (100, 400, 50.0)
    play.now = 14.0
    play.say(PushMoved(play.s.attempt, next(play.number), verdict.seq, True, "", 400))
    play.now = 60.0
    beat = play.s.beat()
    assert beat is not None and (beat.bytes_moved, beat.bytes_per_s) == (400, 100.0)


def test_a_failed_pull_is_tried_three_times_then_given_up(play: Play) -> None:
    """A cluster that has parameters trains on with them when its pull fails three times."""
    play.begin()
    play.step(2)
    moved = play.push_until_committed()
    play.master(outcome("accepted"))
    verdict = play.say(moved)
    for attempt in range(3):
        assert isinstance(verdict, PullNow)
        said = PullMoved(1, next(play.number), verdict.seq, False, "torn", 0)
        verdict = play.say(said)
        play.master(Acknowledged())
        if attempt < 2:
            assert play.asked(PullRequested).pull.seq == 3 + attempt
            play.master(grant(V1))
            verdict = play.say(said)
    assert isinstance(verdict, TrainOn) and play.s.base == GENESIS


def test_a_trainer_without_parameters_pulls_until_it_has_them(play: Play) -> None:
    """The first pull is never given up."""
    play.say(play.attach())
    play.master(Joined(3, 1, GENESIS, NONE_YET, ()))
    play.say(play.attach())
    want = PullWanted(1, next(play.number))
    play.say(want)
    for _ in range(6):
        play.master(Refused(2.0, "waits for slave ps0"))
        assert isinstance(play.say(want), AskAgain)
        assert play.asks["talk"].delay_s == 2.0
    play.master(grant())
    assert isinstance(play.say(want), PullNow)


def test_trainer_dies_while_pushing(play: Play) -> None:
    """Its open push is aborted, its tokens are lost, its ranges are served to the next attempt."""
    play.begin(ranges=(5, 6, 7))
    play.say(RangeWanted(1, 1))
    play.step(2)
    play.say(RangeWanted(1, 2))
    play.push_until_granted()
    play.do(play.s.trainer_gone("torchrun was killed", 1.0))
    assert play.asked(PushAborted).push.seq == 2
    assert play.s.account.lost == 20 and play.s.account.unsettled == 0
    play.master(Acknowledged())
    assert isinstance(play.say(play.attach(life=2, pid=8)), Attached)
    assert play.s.attempt == 2
    assert [play.say(RangeWanted(2, n)) for n in (1, 2, 3)] == [RangeGiven(5), RangeGiven(6), RangeGiven(7)]
    play.adds_up(20)


@pytest.mark.parametrize(("kind", "lost", "accepted"), [("accepted", 0, 20), ("skipped", 20, 0)])
def test_trainer_dies_after_committing(play: Play, kind: str, lost: int, accepted: int) -> None:
    """A committed push survives its trainer; the next attempt pulls when its fate is known."""
    play.begin(ranges=(5,))
    play.say(RangeWanted(1, 1))
    play.step(2)
    play.push_until_committed()
    play.do(play.s.trainer_gone("torchrun was killed", 1.0))
    assert play.say(play.attach(life=2, pid=8)) == Attached(2, 0.0)
    want = PullWanted(2, next(play.number))
    assert isinstance(play.say(want), AskAgain)
    play.master(outcome(kind, V1 if kind == "accepted" else None, pull=kind == "accepted"))
    if kind == "accepted":
        assert not play.asked(PullFinished).installed
        play.master(Acknowledged())
    assert isinstance(play.say(want), AskAgain)
    play.asked(PullRequested)
    assert (play.s.account.lost, play.s.account.accepted) == (lost, accepted)


def test_a_new_restart_of_torchrun_is_a_new_attempt(play: Play) -> None:
    """torchrun restarts its ranks by itself: the old attempt's push is aborted, its words change nothing."""
    play.begin()
    play.step(1)
    verdict = play.push_until_granted()
    assert isinstance(play.say(play.attach(restart=1, pid=9)), Attached)
    play.asked(PushAborted)
    late = play.say(PushMoved(1, 99, verdict.seq, True, "", 1))
    assert isinstance(late, ErrorReply) and late.error == "StaleIncarnation"
    assert play.say(Stepped(1, 1000, None)) is None
    play.adds_up(10)
    older = play.say(play.attach(restart=0, pid=7))
    assert isinstance(older, ErrorReply) and older.error == "StaleIncarnation"


def test_what_the_master_has_of_another_life_is_not_taken_for_ours(play: Play) -> None:
    """Between our lives 1 and 3 somebody else lived: nothing of life 1 is told again (seeds 86 and 233)."""
    play.begin()
    play.step(3)
    play.beat("gone")
    play.master(Joined(3, 3, V1, NONE_YET, (), accounted=0))
    assert play.s.account.lost == 0


@pytest.mark.parametrize(
    ("inc", "lost", "why"),
    [(2, 20, "the master knows of 30 of its 50 tokens"), (3, 0, "another agent lived between, elsewhere")],
)
def test_what_the_agent_before_consumed_is_told_by_the_next(inc: int, lost: int, why: str) -> None:
    """It died, and so did the master that had heard its beats: the next one in its directory tells what is missing."""
    play = Play(former=PastIncarnation(1, 50))
    assert isinstance(play.say(play.attach()), AskAgain)
    play.asked(ClusterJoined)
    assert play.s.lived == PastIncarnation(1, 50)
    play.master(Joined(3, inc, V1, NONE_YET, (), accounted=30))
    assert play.s.account.lost == lost, why
    assert play.s.lived == PastIncarnation(inc, lost)


def test_a_pipelines_loss_comes_from_another_rank(play: Play) -> None:
    """Rank 0 tells steps without one; what it heard at the look is the loss of the push that follows."""
    play.begin()
    for _ in range(2):
        play.say(Stepped(1, 10, None))
    assert play.say(LossHeard(1, 5.0, 2)) is None
    assert play.s.loss == 2.5
    verdict = play.push_until_granted()
    play.say(PushMoved(1, next(play.number), verdict.seq, True, "", 100))
    finished = play.asked(PushFinished)
    assert (finished.loss, finished.tokens, finished.inner_steps) == (2.5, 20, 2)
    assert play.say(LossHeard(1, 0.0, 0, finite=False)) is None
    assert [kind for kind, _ in play.marks].count("loss_not_finite") == 1


def test_rank_0_moves_to_another_host(play: Play) -> None:
    """torchrun counts restarts on each host: what counts less, started by others, is newer all the same."""
    play.begin()
    assert isinstance(play.say(play.attach(restart=2, pid=9)), Attached)
    assert isinstance(play.say(play.attach(life=0, restart=0, pid=8)), Attached)
    assert play.s.attempt == 3
    for process in (7, 9):  # they were rank 0 before
        assert isinstance(play.say(play.attach(restart=2, pid=process)), ErrorReply)
    assert isinstance(play.say(play.attach(life=2, pid=10)), Attached)
    assert isinstance(play.say(play.attach(life=1, pid=11)), ErrorReply)


def test_gone_joins_again_and_pulls_before_anything_counts(play: Play) -> None:
    """The lease ran out: what was unsettled is lost, a new life begins with a new nonce, the trainer pulls the head."""
    play.begin(ranges=(5,))
    play.say(RangeWanted(1, 1))
    play.step(3)
    play.beat("live")
    play.step(1)
    play.beat("gone")
    assert play.asked(ClusterJoined).nonce == "nonce2"
    play.master(Joined(3, 2, V1, NONE_YET, (), accounted=30))
    assert play.s.account.lost == 10  # the master wrote off the 30 that it was told
    play.step(2)
    assert play.s.account.lost == 30
    want = play.want_push()
    play.say(want)
    assert play.asked(PullRequested).pull.inc == 2
    play.master(grant(V1))
    verdict = play.say(want)
    assert isinstance(verdict, PullNow)
    play.say(PullMoved(1, next(play.number), verdict.seq, True, "", 1))
    play.step(1)
    assert play.s.account.carried.tokens == 10
    left = play.s.leave()
    assert left == ClusterLeft(0, "west", 2, 40)


def test_a_data_range_is_to_be_had_between_join_and_pull(play: Play) -> None:
    """A trainer of a new life gets ranges of that life, and nothing that it trains before its pull uses them up."""
    play.begin(ranges=(5,))
    play.say(RangeWanted(1, 1))
    play.beat("gone")
    play.master(Joined(3, 2, V1, NONE_YET, ()))
    want = RangeWanted(1, 2)
    assert isinstance(play.say(want), AskAgain)
    assert play.asked(RangesRequested, "ranges").inc == 2
    play.master(Ranges((8,), False), "ranges")
    assert play.say(want) == RangeGiven(8)
    play.master(Ranges((), True), "ranges")
    assert play.say(RangeWanted(1, 3)) == RangeGiven(8)
    assert play.s.account.carried.ranges == ()


def test_fenced_stops_with_75(play: Play) -> None:
    """Only a new process joins again: two agents would fence each other for ever."""
    play.begin()
    play.beat("fenced")
    assert [stop.code for stop in play.stops] == [75]
    failure = play.say(play.want_push())
    assert isinstance(failure, ErrorReply) and "fenced" in failure.message


def test_stale_incarnation_waits_for_the_beat(play: Play) -> None:
    """A question of a life that is not live says nothing about why; the next beat does, and it is hurried."""
    play.begin()
    play.step()
    want = play.want_push()
    play.say(want)
    play.do(play.s.failed(play.asks["talk"].number, StaleIncarnation("west/1 is gone"), 1.0))
    assert play.hurries == 1 and isinstance(play.say(want), AskAgain)
    play.beat("gone")
    play.asked(ClusterJoined)


def test_stale_push_trains_on(play: Play) -> None:
    """A seq that the master has closed is dropped; its progress is carried."""
    play.begin()
    play.step()
    want = play.want_push()
    play.say(want)
    play.do(play.s.failed(play.asks["talk"].number, StalePush("expected a seq above 9"), 1.0))
    assert isinstance(play.say(want), TrainOn)
    assert play.s.account.carried.tokens == 10


def test_wrong_model_is_told_to_the_trainer_and_stops(play: Play) -> None:
    """A manifest that differs ends agent and trainer with the master's list of differences."""
    play.say(play.attach())
    error = CorruptManifest("this model is not the run's: norm.weight: expected shape (4,), got (8,)")
    play.do(play.s.failed(play.asks["talk"].number, error, 0.0))
    assert play.say(play.attach()) == ErrorReply("CorruptManifest", str(error))
    assert play.stops[0].code == 65


def test_answers_to_old_questions_change_nothing(play: Play) -> None:
    """A grant that comes after the push was aborted is passed over."""
    play.begin()
    play.step()
    play.say(play.want_push())
    old = play.asks["talk"].number
    play.do(play.s.trainer_gone("killed", 0.0))
    play.asked(PushAborted)
    assert play.s.answered(old, grant(), 1.0) == []
    assert play.s.phase is SyncPhase.ABORTING


def test_an_unreachable_master_holds_nobody_who_asks_for_a_push(play: Play) -> None:
    """The trainer trains on from the first failure; the question goes on, and the look after its grant freezes."""
    play.begin()
    play.step()
    want = play.want_push()
    assert isinstance(play.say(want), AskAgain)
    play.do(play.s.hindered("no answer", 0.0))
    assert play.say(want) == TrainOn("no answer", 1, 0.0)
    play.step()
    assert play.say(play.want_push()) == TrainOn("no answer", 1, 0.0)
    assert play.s.account.carried.tokens == 20
    play.now = 60.0
    play.do(play.s.hindered("no answer", 60.0))
    play.master(grant())
    assert isinstance(play.say(play.want_push()), PushNow)
    assert play.s.account.frozen.tokens == 20


def test_who_was_told_to_train_on_does_not_wait_for_an_absent_master_to_close_the_last_talk(play: Play) -> None:
    """It pulled, and the answer to FinishPull is lost with the master: the next push waits for him, the trainer not."""
    play.begin()
    moved = play.push_until_committed()
    play.master(outcome("accepted"))
    verdict = play.say(moved)
    assert isinstance(verdict, PullNow)
    play.say(PullMoved(1, next(play.number), verdict.seq, True, "", 9))
    play.step()
    assert isinstance(play.say(play.want_push()), AskAgain), "he answers: it is a matter of milliseconds"
    play.do(play.s.hindered("no answer", 0.0))
    assert isinstance(play.say(play.want_push()), TrainOn)
    play.master(Acknowledged())
    play.step()
    assert play.push_until_granted().seq == 3


def test_unreachable_master_after_commit_settles_later(play: Play) -> None:
    """The trainer trains on; the Outcome that comes later settles the push, and its pull is closed unread."""
    play.begin()
    play.step(2)
    moved = play.push_until_committed()
    play.do(play.s.hindered("no answer", 0.0))
    play.now = 10.0
    play.do(play.s.hindered("no answer", 10.0))
    assert isinstance(play.say(moved), TrainOn)
    play.step(1)
    play.master(outcome("accepted"))
    assert not play.asked(PullFinished).installed
    play.master(Acknowledged())
    assert (play.s.account.accepted, play.s.account.carried.tokens) == (20, 10)
    play.push_until_granted()


def test_finished_pulls_the_last_version_and_is_over(play: Play) -> None:
    """The run is over: the trainer gets the final model, then Over."""
    play.begin()
    play.step()
    want = play.want_push()
    play.say(want)
    play.master(Finished(V1))
    play.asked(PullRequested)
    play.master(grant(V1))
    verdict = play.say(want)
    assert isinstance(verdict, PullNow)
    over = play.say(PullMoved(1, next(play.number), verdict.seq, True, "", 1))
    assert isinstance(over, Over) and play.s.base == V1
    assert isinstance(play.say(RangeWanted(1, 1)), RangesEnded)


def test_ranges_end_when_none_is_left(play: Play) -> None:
    """Ranges are leased before they run out; the end is told when the last is used up."""
    play.begin()
    want = RangeWanted(1, 1)
    assert isinstance(play.say(want), AskAgain)
    play.master(Ranges((1, 2), False), "ranges")
    assert play.say(want) == RangeGiven(1)
    assert play.say(RangeWanted(1, 2)) == RangeGiven(2)
    assert play.asked(RangesRequested, "ranges").seq == 2
    play.master(Ranges((), True), "ranges")
    assert play.say(RangeWanted(1, 3)) == RangesEnded("no data range is left to lease", False, unsettled=True)
    assert play.s.account.carried.ranges == (1, 2)


def test_goodbye_loses_what_was_not_pushed(play: Play) -> None:
    """Tokens after the last push are told as lost when the cluster leaves."""
    play.begin()
    play.step(3)
    play.say(Bye(1))
    assert play.s.leave() == ClusterLeft(0, "west", 1, 30)


def test_a_slot_that_is_long_in_coming_holds_nobody_up(play: Play) -> None:
    """A slave that does not answer costs the asker a second: it trains on, and freezes when the grant is there."""
    play.begin()
    play.step(4)
    want = play.want_push()
    assert isinstance(play.say(want), AskAgain)
    play.now += 1.0
    told = play.say(want)
    assert isinstance(told, TrainOn) and told.steps == 1
    play.step(3)
    assert isinstance(play.say(play.want_push()), TrainOn), "the question at the master is the same: no second stand"
    play.master(grant())
    play.step(1)
    assert isinstance(play.say(play.want_push()), PushNow)
    assert play.s.account.frozen.inner_steps == 8
    play.say(PushMoved(1, next(play.number), 2, True, "", 1))
    assert play.asked(PushFinished).inner_steps == 8


def test_a_grant_that_comes_while_it_trains_is_taken_at_the_next_look(play: Play) -> None:
    """What is trained until then goes with the push."""
    play.begin()
    play.step(1)
    want = play.want_push()
    play.say(want)
    play.now += 1.0
    assert isinstance(play.say(want), TrainOn)
    play.master(grant())
    play.step(5)
    assert isinstance(play.say(play.want_push()), PushNow)
    assert play.s.account.frozen.inner_steps == 6


def test_a_push_dropped_while_it_is_opened_is_asked_for_again_soon(play: Play) -> None:
    """A slave was lost: the first boundary after a second asks anew, not after another H; none before stands still."""
    play.begin()
    play.step(1)
    want = play.want_push()
    play.say(want)
    play.master(Dropped("ps1 was lost"))
    assert play.say(want) == TrainOn("ps1 was lost", 1, 0.0)
    play.step(1)
    assert play.say(play.want_push()) == TrainOn("ps1 was lost", 1, 0.0)
    play.now += 1.0
    play.step(1)
    assert play.push_until_granted().seq == 3
    assert play.s.account.frozen.inner_steps == 3
