"""Data ranges: served one by one, and to whom they belong."""

from __future__ import annotations

import pytest

from dips.client.agent.state import Channel
from dips.client.ipc.messages import AskAgain, RangeGiven, RangesEnded, RangeWanted
from dips.protocol.effects import Finished, Joined, Ranges
from dips.protocol.enums import ClusterStanding
from dips.protocol.events import RangesRequested
from tests.unit.client.agent.play import NONE_YET, V1, Play


@pytest.fixture
def play() -> Play:
    return Play()


def test_a_data_range_is_to_be_had_between_join_and_pull(play: Play) -> None:
    """A trainer of a new incarnation gets ranges of that incarnation, and nothing that it trains before its pull uses
    them up.
    """
    play.begin(ranges=(5,))
    play.send(RangeWanted(1, 1))
    play.answer_heartbeat(ClusterStanding.GONE)
    play.reply(Joined(3, 2, V1, NONE_YET, ()))
    want = RangeWanted(1, 2)
    assert isinstance(play.send(want), AskAgain)
    assert play.asked(RangesRequested, Channel.RANGES).inc == 2
    play.reply(Ranges((8,), False), Channel.RANGES)
    assert play.send(want) == RangeGiven(8)
    play.reply(Ranges((), True), Channel.RANGES)
    assert play.send(RangeWanted(1, 3)) == RangeGiven(8)
    assert play.s.account.carried.ranges == ()


def test_ranges_end_when_none_is_left(play: Play) -> None:
    """Ranges are leased before they run out; the end is reported when the last is used up."""
    play.begin()
    want = RangeWanted(1, 1)
    assert isinstance(play.send(want), AskAgain)
    play.reply(Ranges((1, 2), False), Channel.RANGES)
    assert play.send(want) == RangeGiven(1)
    assert play.send(RangeWanted(1, 2)) == RangeGiven(2)
    assert play.asked(RangesRequested, Channel.RANGES).seq == 2
    play.reply(Ranges((), True), Channel.RANGES)
    assert play.send(RangeWanted(1, 3)) == RangesEnded("no data range is left to lease", False, unsettled=True)
    assert play.s.account.carried.ranges == (1, 2)


def test_ranges_of_a_former_incarnation_are_not_trained(play: Play) -> None:
    """They were leased to it and are free again: another cluster may have them."""
    play.begin()
    play.send(RangeWanted(1, 1))
    old = play.asks[Channel.RANGES]
    play.answer_heartbeat(ClusterStanding.GONE)
    play.reply(Joined(3, 2, V1, NONE_YET, ()))
    play.do(play.core.on_reply(old, Ranges((5, 6), False), play.now))
    assert isinstance(play.send(RangeWanted(1, 1)), AskAgain)
    assert play.asked(RangesRequested, Channel.RANGES) == RangesRequested(0, "west", 2, 1, 2, ())
    play.do(play.core.on_reply(old, Ranges((5, 6), False), play.now))
    assert isinstance(play.send(RangeWanted(1, 1)), AskAgain)


def test_a_finished_run_gives_no_range(play: Play) -> None:
    """The master says so where ranges are asked for, too."""
    play.begin()
    play.send(RangeWanted(1, 1))
    play.reply(Finished(V1), Channel.RANGES)
    assert play.send(RangeWanted(1, 1)) == RangesEnded(f"the run is finished with {V1}", True)
