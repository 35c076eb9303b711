"""Questions to the master: which answers still count, and when a question is repeated."""

from __future__ import annotations

import pytest

from dips.client.agent.state import AskMaster, Channel, SyncPhase
from dips.client.ipc.messages import RangeWanted
from dips.errors import UnavailableMaster
from dips.protocol.effects import Committed, Pending
from dips.protocol.enums import ClusterStanding
from dips.protocol.events import PushAborted
from tests.unit.client.agent.play import Play, grant


@pytest.fixture
def play() -> Play:
    return Play()


def test_pending_asks_the_same_again(play: Play) -> None:
    """Pending: the very same question goes out again."""
    play.begin()
    play.step()
    play.send(play.want_push())
    first = play.asks[Channel.SYNC]
    play.reply(Pending("the slaves are reserving a slot"))
    assert play.asks[Channel.SYNC].event == first.event and play.asks[Channel.SYNC].number == first.number


def test_answers_to_old_questions_change_nothing(play: Play) -> None:
    """A grant that comes after the push was aborted is passed over."""
    play.begin()
    play.step()
    play.send(play.want_push())
    old = play.asks[Channel.SYNC]
    play.do(play.core.on_trainer_gone("killed", 0.0))
    play.asked(PushAborted)
    assert play.core.on_reply(old, grant(), 1.0) == []
    assert play.s.sync.phase is SyncPhase.ABORTING


def fail(play: Play, ask: AskMaster) -> AskMaster:
    """The master does not answer `ask`; return its repetition."""
    play.do(play.core.on_error(ask, UnavailableMaster("no answer"), play.now))
    return play.asks[ask.channel]


def test_a_question_is_repeated_after_pauses_that_double(play: Play) -> None:
    """The same question under the same number, never later than `retry_s`, as long as the master does not answer."""
    play.send(play.attach())
    first = ask = play.asks[Channel.SYNC]
    for longest_s in (0.2, 0.4, 0.8, 1.0, 1.0):
        ask = fail(play, ask)
        assert (ask.event, ask.number) == (first.event, first.number)
        assert longest_s / 2 <= ask.delay_s <= longest_s
    play.reply(Pending("it is starting"))
    assert fail(play, play.asks[Channel.SYNC]).delay_s <= 0.2, "it had answered: the pauses begin anew"


def test_a_heartbeat_that_is_answered_ends_the_pause(play: Play) -> None:
    """The master is back: what waits for that is asked at once, what waits for another reason is not."""
    play.begin()
    play.step()
    play.send(play.want_push())
    paused = fail(play, play.asks[Channel.SYNC])
    assert paused.delay_s > 0
    play.answer_heartbeat(ClusterStanding.LIVE)
    assert play.asks[Channel.SYNC].delay_s == 0 and play.asks[Channel.SYNC].number == paused.number
    play.reply(Pending("the slaves are reserving a slot"))
    waiting = play.asks[Channel.SYNC]
    play.answer_heartbeat(ClusterStanding.LIVE)
    assert play.asks[Channel.SYNC] is waiting


def test_a_question_that_no_longer_stands_is_not_repeated(play: Play) -> None:
    """Its failure says that the master is away, and nothing else."""
    play.begin()
    play.step()
    play.send(play.want_push())
    old = play.asks[Channel.SYNC]
    play.do(play.core.on_trainer_gone("killed", 0.0))
    assert isinstance(fail(play, old).event, PushAborted)
    assert play.s.membership.unreachable_since == 0.0


def test_a_reply_that_is_not_legal_stops_the_agent(play: Play) -> None:
    """A bug of ours or of the master: nothing is guessed, in neither channel."""
    play.begin()
    play.send(play.want_push())
    play.reply(Committed())
    assert [stop.code for stop in play.stops] == [70]
    other = Play()
    other.begin()
    other.send(RangeWanted(1, 1))
    other.reply(Committed(), Channel.RANGES)
    assert [stop.code for stop in other.stops] == [70]
