"""A pull: installed, failed, torn, and the last one of a finished run."""

from __future__ import annotations

import pytest

from dips.client.agent.membership import build_heartbeat
from dips.client.agent.push_pull import RETRY_S
from dips.client.agent.state import Channel, SyncPhase
from dips.client.ipc.messages import AskAgain, Over, PullMoved, PullNow, PullWanted, RangesEnded, RangeWanted, TrainOn
from dips.ids import GENESIS, VersionId
from dips.protocol.effects import Acknowledged, Dropped, Finished, Joined, Progress, Refused
from dips.protocol.enums import OutcomeKind, TrainerState
from dips.protocol.events import PullFinished, PullRequested
from tests.unit.client.agent.play import NONE_YET, V1, Play, grant, outcome

V2 = VersionId(2, 2)


@pytest.fixture
def play() -> Play:
    return Play()


def test_a_torn_model_pulls_until_it_succeeds(play: Play) -> None:
    """A streamed install that broke off leaves nothing to train with: no verdict but another pull [invariant 6]."""
    play.begin()
    moved = play.push_until_committed()
    play.reply(outcome(OutcomeKind.ACCEPTED))
    verdict = play.send(moved)
    for attempt in range(6):  # more than PULL_TRIES
        assert isinstance(verdict, PullNow), attempt
        answer = PullMoved(1, next(play.number), verdict.seq, False, "ps1 is gone", 9, True)
        assert isinstance(play.send(answer), AskAgain) and play.s.trainer.base is None
        assert play.asked(PullFinished).installed is False
        play.reply(Acknowledged())
        play.asked(PullRequested)
        play.reply(grant(V1))
        verdict = play.send(answer)
    assert isinstance(verdict, PullNow)
    assert isinstance(play.send(PullMoved(1, next(play.number), verdict.seq, True, "", 9)), TrainOn)
    assert play.s.trainer.base == V1


def test_a_failed_pull_is_tried_three_times_then_given_up(play: Play) -> None:
    """A cluster that has parameters trains on with them when its pull fails three times."""
    play.begin()
    play.step(2)
    moved = play.push_until_committed()
    play.reply(outcome(OutcomeKind.ACCEPTED))
    verdict = play.send(moved)
    for attempt in range(3):
        assert isinstance(verdict, PullNow)
        said = PullMoved(1, next(play.number), verdict.seq, False, "torn", 0)
        verdict = play.send(said)
        play.reply(Acknowledged())
        if attempt < 2:
            assert play.asked(PullRequested).pull.seq == 3 + attempt
            play.reply(grant(V1))
            verdict = play.send(said)
    assert isinstance(verdict, TrainOn) and play.s.trainer.base == GENESIS


@pytest.mark.parametrize("why", ["refused", "the master is away", "it broke"])
def test_a_pull_that_the_script_wants_is_not_given_up(play: Play, why: str) -> None:
    """`outer.pull()`, or a checkpoint that is overtaken: the model holds what the script has loaded, and not the
    version that pushes would be taken for differences to.
    """
    play.begin()
    play.step(2)
    want = PullWanted(1, next(play.number))
    for play.now in (10.0, 30.0, 50.0, 70.0):
        assert isinstance(play.send(want), AskAgain), play.now
        if why == "the master is away":
            play.lose_master(play.now)
        elif why == "refused":
            play.reply(Refused(2.0, "waits for ps1"))
        else:
            play.reply(grant(V1))
            order = play.send(want)
            assert isinstance(order, PullNow)
            want = PullMoved(1, next(play.number), order.seq, False, "ps1 is gone", 0)
            play.send(want)
            play.reply(Acknowledged())
    play.asked(PullRequested)
    play.reply(grant(V1))
    order = play.send(want)
    assert isinstance(order, PullNow) and not order.merge
    play.send(PullMoved(1, next(play.number), order.seq, True, "", 9))
    assert play.s.trainer.base == V1 and play.s.account.lost == 20
    play.reply(Acknowledged())
    play.step()
    play.push_until_accepted()


def test_the_failures_of_a_pull_that_was_given_up_do_not_count_for_the_next(play: Play) -> None:
    """It is tried three times, too."""
    play.begin()
    for times in (3, 2):
        play.step()
        moved = play.push_until_committed()
        play.reply(outcome(OutcomeKind.ACCEPTED))
        order = play.send(moved)
        for _ in range(times):
            assert isinstance(order, PullNow)
            failed = PullMoved(1, next(play.number), order.seq, False, "ps1 is gone", 0)
            play.send(failed)
            play.reply(Acknowledged())
            if play.s.sync.pull_due:
                play.reply(grant(V1))
            order = play.send(failed)
    assert isinstance(order, PullNow), "after two failures"


def test_a_trainer_without_parameters_pulls_until_it_has_them(play: Play) -> None:
    """The first pull is never given up."""
    play.send(play.attach())
    play.reply(Joined(3, 1, GENESIS, NONE_YET, ()))
    play.send(play.attach())
    want = PullWanted(1, next(play.number))
    play.send(want)
    for _ in range(6):
        play.reply(Refused(2.0, "waits for slave ps0"))
        assert isinstance(play.send(want), AskAgain)
        assert play.asks[Channel.SYNC].delay_s == 2.0
    play.reply(grant())
    assert isinstance(play.send(want), PullNow)


def test_a_slave_that_nobody_started_is_named_in_the_log(play: Play) -> None:
    """The first pull is refused again and again: one line says what everything waits for."""
    play.send(play.attach())
    play.reply(Joined(3, 1, GENESIS, NONE_YET, ()))
    play.send(play.attach())
    play.send(PullWanted(1, next(play.number)))
    for now in range(20):
        play.reply(Refused(1.0, "waits for s1 (awaited)"))
        play.do(play.core.tick(float(now)))
    waits = [fields["reason"] for kind, fields in play.marks if kind == "waits"]
    assert waits == ["its pull was refused: waits for s1 (awaited)"]


def test_finished_pulls_the_last_version_and_is_over(play: Play) -> None:
    """The run is over: the trainer gets the final model, then Over."""
    play.begin()
    play.step()
    want = play.want_push()
    play.send(want)
    play.reply(Finished(V1))
    play.asked(PullRequested)
    play.reply(grant(V1))
    verdict = play.send(want)
    assert isinstance(verdict, PullNow)
    over = play.send(PullMoved(1, next(play.number), verdict.seq, True, "", 1))
    assert isinstance(over, Over) and play.s.trainer.base == V1
    assert isinstance(play.send(RangeWanted(1, 1)), RangesEnded)


def test_a_run_that_goes_on_ends_a_second_time(play: Play) -> None:
    """`dips set` has it go on while its last version is pulled: at the next end the trainer would have been told that
    it is over, and kept an older version."""
    play.begin()
    for end in (V1, V2):
        play.step()
        play.s.update_progress(Progress(1000, 1000, end))
        want = play.want_push()
        play.send(want)
        play.asked(PullRequested)
        play.reply(grant(end))
        verdict = play.send(want)
        assert isinstance(verdict, PullNow) and verdict.grant.version == end
        play.s.update_progress(Progress(1000, 2000, None if end == V1 else end))
        answer = play.send(PullMoved(1, next(play.number), verdict.seq, True, "", 1))
        assert isinstance(answer, TrainOn if end == V1 else Over)
        play.reply(Acknowledged())


def test_what_an_older_pull_brought_is_not_taken_for_the_present_one(play: Play) -> None:
    """A report under an old seq changes nothing: the ranks are answered with the pull that is granted."""
    play.begin()
    verdict = play.push_until_accepted()
    asked = play.asks[Channel.SYNC]
    assert play.send(PullMoved(1, next(play.number), verdict.seq - 1, True, "", 9)) == verdict
    assert play.s.trainer.base == GENESIS and play.asks[Channel.SYNC] is asked


def test_a_failed_pull_tears_nothing_unless_the_ranks_say_so(play: Play) -> None:
    """Installed on no rank: the base stays and is pushed from. Torn: there is no base, and the agent reports so."""
    for torn in (False, True):
        play = Play()
        play.begin()
        verdict = play.push_until_accepted()
        play.send(PullMoved(1, next(play.number), verdict.seq, False, "ps1 is gone", 9, torn))
        heartbeat = build_heartbeat(play.s)
        assert heartbeat is not None
        assert play.s.trainer.base == (None if torn else GENESIS)
        assert heartbeat.trainer is (TrainerState.STARTING if torn else TrainerState.TRAINING)
        assert ("torn" in [kind for kind, _ in play.marks]) == torn


def test_a_pull_that_is_dropped_is_asked_for_again(play: Play) -> None:
    """After a pause, with a new seq; three times in a row if the trainer can do without."""
    play.send(play.attach())
    play.reply(Joined(3, 1, GENESIS, NONE_YET, ()))
    play.send(play.attach())
    want = PullWanted(1, next(play.number))
    play.send(want)
    for seq in range(2, 7):
        play.reply(Dropped("ps1 was lost"))
        assert play.asks[Channel.SYNC].delay_s == RETRY_S and play.asked(PullRequested).pull.seq == seq
        answer = play.send(want)
        assert isinstance(answer, AskAgain) and answer.reason == "ps1 was lost"
    play.reply(grant())
    verdict = play.send(want)
    assert isinstance(verdict, PullNow)
    play.send(PullMoved(1, next(play.number), verdict.seq, True, "", 9))
    play.reply(Acknowledged())
    moved = play.push_until_committed()
    play.reply(outcome(OutcomeKind.ACCEPTED))
    play.send(moved)
    said = PullMoved(1, next(play.number), play.s.sync.seq, False, "gone", 0)
    play.send(said)
    play.reply(Acknowledged())
    for _ in range(2):
        play.asked(PullRequested)
        play.reply(Dropped("ps1 was lost"))
    assert isinstance(play.send(said), TrainOn) and play.s.trainer.base == GENESIS


def test_a_last_version_that_cannot_be_pulled_any_more(play: Play) -> None:
    """The run ended while a pull was asked for: the trainer is told so, and nothing more is asked."""
    play.send(play.attach())
    play.reply(Joined(3, 1, GENESIS, NONE_YET, ()))
    play.send(play.attach())
    want = PullWanted(1, next(play.number))
    play.send(want)
    asked = play.asks[Channel.SYNC]
    play.reply(Finished(V1))
    assert isinstance(play.send(want), Over) and play.asks[Channel.SYNC] is asked


def test_a_run_that_ends_during_a_pull_is_pulled_once_more(play: Play) -> None:
    """What is being installed is not the last version: the trainer waits for that one."""
    play.begin()
    verdict = play.push_until_accepted()
    play.s.update_progress(Progress(1000, 1000, V2))
    said = PullMoved(1, next(play.number), verdict.seq, True, "", 9)
    assert isinstance(play.send(said), AskAgain)
    play.reply(Acknowledged())
    play.asked(PullRequested)
    play.reply(grant(V2))
    last = play.send(said)
    assert isinstance(last, PullNow) and last.grant.version == V2
    assert isinstance(play.send(PullMoved(1, next(play.number), last.seq, True, "", 9)), Over)


def test_a_pull_that_nobody_waits_for_is_closed(play: Play) -> None:
    """The trainer trains on, since the master was away, or is gone: slaves need not keep the version for it."""
    play.begin()
    play.step()
    verdict = play.push_until_accepted()
    said = PullMoved(1, next(play.number), verdict.seq, False, "ps1 is gone", 0)
    play.send(said)
    play.reply(Acknowledged())
    play.asked(PullRequested)
    play.lose_master(1.0)
    play.lose_master(20.0)
    assert isinstance(play.send(said), TrainOn)
    play.reply(grant(V1))
    closed = play.asked(PullFinished)
    assert (closed.pull.seq, closed.installed, play.s.sync.phase) == (3, False, SyncPhase.CLOSING)

    dying = Play()
    dying.send(dying.attach())
    dying.reply(Joined(3, 1, GENESIS, NONE_YET, ()))
    dying.send(dying.attach())
    dying.send(PullWanted(1, next(dying.number)))
    dying.do(dying.core.on_trainer_gone("killed", dying.now))
    assert not dying.asked(PullFinished).installed
