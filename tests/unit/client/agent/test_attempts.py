"""Attempts of the training job: each begins anew, and the one before is over."""

from __future__ import annotations

from itertools import count

import pytest

from dips.client.ipc.messages import (
    AskAgain,
    Attached,
    Detach,
    ErrorReply,
    Noted,
    PullWanted,
    PushMoved,
    RangeGiven,
    RangeWanted,
    Stepped,
)
from dips.dataclass import replace
from dips.ids import GENESIS
from dips.protocol.effects import Acknowledged
from dips.protocol.enums import OutcomeKind
from dips.protocol.events import PullFinished, PullRequested, PushAborted
from tests.unit.client.agent.play import V1, Play, outcome


@pytest.fixture
def play() -> Play:
    return Play()


def test_trainer_dies_while_pushing(play: Play) -> None:
    """Its open push is aborted, its tokens are lost, its ranges are served to the next attempt."""
    play.begin(ranges=(5, 6, 7))
    play.send(RangeWanted(1, 1))
    play.step(2)
    play.send(RangeWanted(1, 2))
    play.push_until_granted()
    play.do(play.core.on_trainer_gone("torchrun was killed", 1.0))
    assert play.asked(PushAborted).push.seq == 2
    assert play.s.account.lost == 20 and play.s.account.unsettled_tokens == 0
    play.reply(Acknowledged())
    assert isinstance(play.send(play.attach(launch=2, pid=8)), Attached)
    assert play.s.trainer.attempt == 2
    assert [play.send(RangeWanted(2, n)) for n in (1, 2, 3)] == [RangeGiven(5), RangeGiven(6), RangeGiven(7)]
    play.check_consumed(20)


@pytest.mark.parametrize(("kind", "lost", "accepted"), [(OutcomeKind.ACCEPTED, 0, 20), (OutcomeKind.SKIPPED, 20, 0)])
def test_trainer_dies_after_committing(play: Play, kind: OutcomeKind, lost: int, accepted: int) -> None:
    """A committed push survives its trainer; the next attempt pulls when its fate is known."""
    play.begin(ranges=(5,))
    play.send(RangeWanted(1, 1))
    play.step(2)
    play.push_until_committed()
    play.do(play.core.on_trainer_gone("torchrun was killed", 1.0))
    assert play.send(play.attach(launch=2, pid=8)) == Attached(2, 0.0)
    want = PullWanted(2, next(play.number))
    assert isinstance(play.send(want), AskAgain)
    play.reply(outcome(kind, V1 if kind is OutcomeKind.ACCEPTED else None, pull=kind is OutcomeKind.ACCEPTED))
    if kind is OutcomeKind.ACCEPTED:
        assert not play.asked(PullFinished).installed
        play.reply(Acknowledged())
    assert isinstance(play.send(want), AskAgain)
    play.asked(PullRequested)
    assert (play.s.account.lost, play.s.account.accepted) == (lost, accepted)


def test_a_new_restart_of_torchrun_is_a_new_attempt(play: Play) -> None:
    """torchrun restarts its ranks by itself: the old attempt's push is aborted, its words change nothing."""
    play.begin()
    play.step(1)
    verdict = play.push_until_granted()
    assert isinstance(play.send(play.attach(restart=1, pid=9)), Attached)
    play.asked(PushAborted)
    late = play.send(PushMoved(1, 99, verdict.seq, True, "", 1))
    assert isinstance(late, ErrorReply) and late.error == "StaleIncarnation"
    assert play.send(Stepped(1, 1000, None)) is None
    play.check_consumed(10)
    older = play.send(play.attach(restart=0, pid=7))
    assert isinstance(older, ErrorReply) and older.error == "StaleIncarnation"


@pytest.mark.parametrize("detaches", [True, False])
def test_a_process_that_begins_anew_is_a_new_attempt(play: Play, detaches: bool) -> None:
    """A second OuterLoop of one process, after the first was closed or left open: it pulls, and counts from there."""
    play.begin()
    play.step(2)
    if detaches:
        assert play.send(Detach(1)) == Noted()
    again = replace(play.attach(), process="7/2")
    assert play.s.trainer.alive is not detaches
    assert play.send(again) == Attached(2, 0.0) and play.s.trainer.base is None and play.s.pace.since_push == 0
    play.number = count(1)  # it numbers its own questions
    play.pull(GENESIS)
    assert play.send(Stepped(2, 10, 2.0)) is None
    play.check_consumed(30)


def test_rank_0_moves_to_another_host(play: Play) -> None:
    """torchrun counts restarts on each host: what counts less, started by others, is newer all the same."""
    play.begin()
    assert isinstance(play.send(play.attach(restart=2, pid=9)), Attached)
    assert isinstance(play.send(play.attach(launch=0, restart=0, pid=8)), Attached)
    assert play.s.trainer.attempt == 3
    for process in (7, 9):  # they were rank 0 before
        assert isinstance(play.send(play.attach(restart=2, pid=process)), ErrorReply)
    assert isinstance(play.send(play.attach(launch=2, pid=10)), Attached)
    assert isinstance(play.send(play.attach(launch=1, pid=11)), ErrorReply)


def test_the_end_of_an_older_connection_ends_no_newer_attempt(play: Play) -> None:
    """torchrun restarted its ranks, and only then is the old rank 0's connection seen to be gone."""
    play.begin()
    play.send(play.attach(restart=1, pid=9))
    play.do(play.core.on_hang_up(1, play.now))
    assert play.s.trainer.alive and play.s.trainer.attempt == 2
    play.do(play.core.on_hang_up(2, play.now))
    assert not play.s.trainer.alive
