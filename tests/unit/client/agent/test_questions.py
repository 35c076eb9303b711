"""Questions to the master: which answers still count, and when a question is repeated."""

from __future__ import annotations

import pytest

from dips.client.agent.actions import Channel
from dips.client.agent.phases import SyncPhase
from dips.protocol.effects import (
    Pending,
)
from dips.protocol.events import (
    PushAborted,
)
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
