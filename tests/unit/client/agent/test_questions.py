"""Questions to the master: which answers still count, and when a question is repeated."""

from __future__ import annotations

import pytest

from dips.client.agent.state import AskMaster, Channel, SyncPhase
from dips.client.ipc.messages import AskAgain, RangeWanted
from dips.errors import RemoteProtocolError, StaleIncarnation, StalePush, UnavailableMaster
from dips.protocol.effects import Committed, Finished, Pending, Refused
from dips.protocol.enums import ClusterStanding
from dips.protocol.events import PushAborted
from tests.unit.client.agent.play import V1, Play, grant


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
    again = play.asks[Channel.SYNC]
    assert again is not first and (again.event, again.number) == (first.event, first.number)


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


def test_an_answer_counts_once(play: Play) -> None:
    """What answers a question closes it: the same answer again, or a failure after it, changes nothing."""
    play.begin()
    play.step()
    play.send(play.want_push())
    granted = play.asks[Channel.SYNC]
    play.reply(grant())
    play.do(play.core.on_reply(granted, grant(), play.now))
    assert not play.stops and play.s.sync.phase is SyncPhase.PUSHING
    other = Play(pace_steps=1)
    other.begin()
    other.step()
    other.send(other.look_for_push())
    dropped = other.asks[Channel.SYNC]
    other.do(other.core.on_error(dropped, StalePush("expected a seq above 9"), other.now))
    other.do(other.core.on_error(dropped, UnavailableMaster("no answer"), other.now))
    assert other.asks[Channel.SYNC] is dropped, "nothing is asked again"


def test_a_refusal_that_no_push_can_bring_stops_the_agent(play: Play) -> None:
    """Only of a push or pull is it said that it is stale; any other refusal is a bug, and not tried again."""
    play.send(play.attach())
    play.do(play.core.on_error(play.asks[Channel.SYNC], StalePush("expected a seq above 9"), play.now))
    assert len(play.stops) == 1
    other = Play()
    other.begin()
    other.send(other.want_push())
    other.do(other.core.on_error(other.asks[Channel.SYNC], RemoteProtocolError("ranks: expected 1"), other.now))
    assert len(other.stops) == 1


def test_a_question_about_ranges_is_asked_again(play: Play) -> None:
    """Others hold what is left, or the master refuses for some time: the same question, at once or after that time."""
    play.begin()
    play.send(RangeWanted(1, 1))
    first = play.asks[Channel.RANGES]
    play.reply(Pending("other clusters hold 3 ranges"), Channel.RANGES)
    again = play.asks[Channel.RANGES]
    assert again is not first and again.number == first.number
    play.reply(Refused(7.0, "not now"), Channel.RANGES)
    assert (play.asks[Channel.RANGES].number, play.asks[Channel.RANGES].delay_s) == (first.number, 7.0)
    play.reply(Finished(V1), Channel.RANGES)
    assert not play.core.awaits_answer(first)


def test_ranges_that_are_refused_to_an_incarnation(play: Play) -> None:
    """Stale: a heartbeat is hurried, which says why, and the next question is a new one. Else it is a bug."""
    play.begin()
    want = RangeWanted(1, 1)
    play.send(want)
    asked, sent = play.asks[Channel.RANGES], len(play.heartbeats)
    play.do(play.core.on_error(asked, StaleIncarnation("west/1 is gone"), play.now))
    assert len(play.heartbeats) == sent + 1 and not play.stops
    assert isinstance(play.send(want), AskAgain) and play.asks[Channel.RANGES].number > asked.number
    play.do(play.core.on_error(play.asks[Channel.RANGES], RemoteProtocolError("count: expected 1 to 64"), play.now))
    assert len(play.stops) == 1
