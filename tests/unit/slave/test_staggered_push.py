"""A push whose ranks offer their ranges one after the other: what is not ready is not asked for, and not owed."""

from __future__ import annotations

import numpy as np
import pytest

from dips.slave.ports import RankMoved, Staged, Wake
from dips.wire.frame import BadFrame, Range
from tests.unit.slave.test_receiver import PUSH, VALUES, N, ReceiverStory, kinds, name

QUARTERS = [Range(0, 0, i * N // 4, N // 4) for i in range(4)]
HANDS = (QUARTERS[0], QUARTERS[2]), (QUARTERS[1], QUARTERS[3])  # of the ranks: two ranges each


class StaggeredStory(ReceiverStory):
    """Two ranks that offer one of their two ranges at first."""

    def hello_first(self, rank: int, ready: int = 1, epoch: int = 1) -> list[str]:
        return kinds(self.receiver.on_hello(0, b"%d" % rank, name(rank, epoch), HANDS[rank], 0.0, ready))

    def offer(self, rank: int, ready: int = 2, epoch: int = 1) -> list[str]:
        return kinds(self.receiver.on_ready(0, b"%d" % rank, name(rank, epoch).stream_id, ready))

    def bring_asked(self, now: float = 0.0) -> list[Range]:
        """Bring what is asked for, until nothing more is."""
        asked = []
        while wanted := self.wants(now):
            for peer, chunk in wanted:
                self.moves = self.bring(int(peer), chunk, now=now)
                asked.append(chunk)
        return asked


@pytest.fixture
def story() -> StaggeredStory:
    story = StaggeredStory()
    for rank in range(2):
        story.hello_first(rank)
    return story


def test_only_what_is_ready_is_asked_for(story):
    """Each rank's first quarter; with its turn over nobody is asked, nothing is owed, and no room is held."""
    assert {chunk.offset // (N // 4) for chunk in story.bring_asked()} == {0, 1}
    assert not np.array_equal(story.buffer, VALUES)
    assert not story.receiver.tick(1e9)
    assert story.pool.used_bytes == 0


def test_a_push_is_staged_when_the_last_range_is_here(story):
    """However late it becomes ready, and in whatever order the ranks offer."""
    story.bring_asked()
    assert story.offer(1) == ["Wake"]
    story.bring_asked(1000.0)
    assert story.offer(0) == ["Wake"]
    story.bring_asked(2000.0)
    staged = story.moves[story.moves.index(Staged(PUSH, 4 * N))]
    assert staged.ranks == (RankMoved(0, 2 * N, 0.0, 2000.0), RankMoved(1, 2 * N, 0.0, 1000.0))
    assert np.array_equal(story.buffer, VALUES)


def test_what_is_offered_and_not_brought_is_owed(story):
    """Once it is asked for, silence counts as ever."""
    story.bring_asked()
    story.offer(0)
    assert story.wants(1000.0)
    assert not story.receiver.tick(1009.9)
    assert "PushOver" in kinds(story.receiver.tick(1010.0))


def test_who_has_nothing_to_bring_holds_no_turn(story):
    """One turn, two ranks: the second is asked although the first is not done with its push."""
    ((peer, chunk),) = story.wants()
    assert peer == b"1"
    assert Wake(0) in story.bring(1, chunk)
    assert {peer for peer, _ in story.wants()} == {b"0"}


def test_a_hello_after_a_break_tells_what_is_ready_by_then(story):
    """Offers of the old connection are not lost with it, and a smaller number takes nothing back."""
    story.bring_asked()
    assert story.hello_first(1, ready=2, epoch=2) == ["WELCOME"]
    assert [chunk.offset // (N // 4) for _, chunk in story.wants()][:1] == [3]
    story.hello_first(1, ready=0, epoch=3)
    assert [chunk.offset // (N // 4) for _, chunk in story.wants()][:1] == [3]


def test_an_offer_may_come_before_all_ranks_are_here():
    """It is kept until they are."""
    story = StaggeredStory()
    story.hello_first(0)
    story.offer(0)
    story.hello_first(1, ready=0)
    assert {chunk.offset // (N // 4) for chunk in story.bring_asked()} == {0, 2}


def test_offers_that_are_wrong_are_refused(story):
    """More ranges than the HELLO named, and a stream that nobody knows; a repetition changes nothing."""
    with pytest.raises(BadFrame, match="3 ranges are ready, the HELLO named 2"):
        story.offer(0, ready=3)
    with pytest.raises(BadFrame, match="no stream"):
        story.offer(0, epoch=9)
    story.bring_asked()
    story.offer(0, ready=1)
    assert not story.wants()
