"""A pull: installed, failed, torn, and the last one of a finished run."""

from __future__ import annotations

import pytest

from dips.client.agent.membership import build_heartbeat
from dips.client.agent.state import Channel
from dips.client.ipc.messages import AskAgain, Over, PullMoved, PullNow, PullWanted, RangesEnded, RangeWanted, TrainOn
from dips.ids import GENESIS
from dips.protocol.effects import Acknowledged, Finished, Joined, Refused
from dips.protocol.enums import OutcomeKind, TrainerState
from dips.protocol.events import PullFinished, PullRequested
from tests.unit.client.agent.play import NONE_YET, V1, Play, grant, outcome


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


def test_what_an_older_pull_brought_is_not_taken_for_the_present_one(play: Play) -> None:
    """A report under an old seq changes nothing: the ranks are answered with the pull that is granted."""
    play.begin()
    moved = play.push_until_committed()
    play.reply(outcome(OutcomeKind.ACCEPTED))
    verdict = play.send(moved)
    assert isinstance(verdict, PullNow)
    asked = play.asks[Channel.SYNC]
    assert play.send(PullMoved(1, next(play.number), verdict.seq - 1, True, "", 9)) == verdict
    assert play.s.trainer.base == GENESIS and play.asks[Channel.SYNC] is asked


def test_a_failed_pull_tears_nothing_unless_the_ranks_say_so(play: Play) -> None:
    """Installed on no rank: the base stays and is pushed from. Torn: there is no base, and the agent reports so."""
    for torn in (False, True):
        play = Play()
        play.begin()
        moved = play.push_until_committed()
        play.reply(outcome(OutcomeKind.ACCEPTED))
        verdict = play.send(moved)
        assert isinstance(verdict, PullNow)
        play.send(PullMoved(1, next(play.number), verdict.seq, False, "ps1 is gone", 9, torn))
        heartbeat = build_heartbeat(play.s)
        assert heartbeat is not None
        assert play.s.trainer.base == (None if torn else GENESIS)
        assert heartbeat.trainer is (TrainerState.STARTING if torn else TrainerState.TRAINING)
        assert ("torn" in [kind for kind, _ in play.marks]) == torn
