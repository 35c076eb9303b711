"""What ranks agree on when they meet over a transfer: the same one on all, no failure anywhere, all of it done."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import pytest

from dips.client.rank.fragments import FragmentGate
from dips.client.rank.shard_transfer import (
    BackgroundTransfer,
    MovedBytes,
    ReportProgress,
    TransferRequest,
    TransferThread,
)
from dips.client.rank.transfer import TransferCancelled, TransferIdentity, TransferRate, TransferStats
from dips.errors import ConfigError, UnavailableSlave
from dips.ids import GENESIS
from dips.protocol.effects import Grant

SEQ = 5


class TwoRanks:
    """The collective of a job of two, of which the other rank always contributes the same."""

    def __init__(self, seq: int = SEQ, well: bool = True, done: bool = True) -> None:
        self._other = [seq, -seq, int(well), int(done), 0]

    def all_min(self, numbers: Sequence[int]) -> list[int]:
        return [min(pair) for pair in zip(numbers, self._other, strict=True)]


def begin(
    ranks: TwoRanks, thread: TransferThread, report_progress: ReportProgress = lambda *_: ""
) -> BackgroundTransfer:
    grant = Grant(GENESIS, (), 30.0)
    request = TransferRequest(grant, TransferIdentity("r", "c", 1, SEQ, 0), report_progress)
    moved, gate = MovedBytes(100, 100), FragmentGate(((0,),), ())
    return BackgroundTransfer(thread, request, ranks, moved, gate)  # type: ignore[arg-type]


def moves_until_cancelled(cancel: threading.Event) -> TransferStats:
    assert cancel.wait(10), "it was not cancelled"
    raise TransferCancelled("cancelled")


@pytest.mark.parametrize("seq", [SEQ - 1, SEQ + 1])
def test_ranks_in_different_transfers_give_up(seq: int) -> None:
    """Another seq on another rank, lower or higher: nothing of either counts, even if both have moved all."""
    result = begin(TwoRanks(seq), TransferThread(None)).wait(0.01)
    assert (result.ok, result.reason, result.nbytes) == (False, "another rank failed", 100)


def test_ranks_in_the_same_transfer_agree() -> None:
    """The same seq, no failure, all done."""
    result = begin(TwoRanks(), TransferThread(None)).poll()
    assert result is not None and (result.ok, result.reason) == (True, "")


def test_a_rank_that_is_done_waits_for_the_others() -> None:
    """Nothing is installed before every rank has everything."""
    assert begin(TwoRanks(done=False), TransferThread(None)).poll() is None


def test_for_how_long_a_rank_has_moved_all_of_its_own() -> None:
    """Nothing while it moves, nor if it moves nothing."""
    go = threading.Event()
    thread = TransferThread(lambda _: go.wait(10))
    assert thread.idle_s == 0.0
    go.set()
    thread.join(10)
    first = thread.idle_s
    assert 0.0 < first < thread.idle_s < 10.0
    assert TransferThread(None).idle_s == 0.0


def test_a_failure_elsewhere_cancels_this_rank() -> None:
    """It would wait for its own bytes until its deadline otherwise."""
    thread = TransferThread(moves_until_cancelled)
    result = begin(TwoRanks(well=False, done=False), thread).wait(0.01)
    assert (result.ok, result.reason, thread.done) == (False, "another rank failed", True)


def test_ranks_that_wait_meet_once_in_a_poll_or_at_the_end() -> None:
    """Each meeting is a collective and a message to the agent, as long as training is paused."""
    reported: list[tuple[int, int]] = []

    def report(moved: int, total: int, idle_s: float) -> str:
        reported.append((moved, total))
        return ""

    thread = TransferThread(lambda _: time.sleep(0.2))
    assert begin(TwoRanks(), thread, report).wait(10.0).ok
    assert reported == [(0, 100)]


def test_the_agent_may_end_a_transfer() -> None:
    """With its reason, in the answer to a report of progress: its push has been dropped, or its lease is over."""
    thread = TransferThread(moves_until_cancelled)
    result = begin(TwoRanks(done=False), thread, lambda *_: "the push was dropped").wait(0.01)
    assert (result.ok, result.reason, thread.done) == (False, "Unavailable: the push was dropped", True)


def test_a_fragment_that_cannot_move_ends_those_before_it() -> None:
    """A model that is not finite any more: what has begun to move of the push is cancelled here and on all ranks."""
    thread, grant = TransferThread(moves_until_cancelled), Grant(GENESIS, (), 30.0)
    request = TransferRequest(grant, TransferIdentity("r", "c", 1, SEQ, 0), lambda *_: "")
    ranks, moved, gate = TwoRanks(), MovedBytes(100, 100), FragmentGate(((0,), (1,)), ())
    told = lambda number: f"fragment {number} is not finite"  # noqa: E731
    transfer = BackgroundTransfer(thread, request, ranks, moved, gate, prepare_fragment=told)  # type: ignore[arg-type]
    result = transfer.wait(10.0)
    assert (result.ok, result.reason, result.diverged) == (False, "fragment 1 is not finite", True)
    assert thread.done and gate.open == 1


@pytest.mark.parametrize(("own", "before", "after"), [(25, (0, 100), (20, 80)), (0, (0, 100), (0, 100))])
def test_what_all_ranks_have_moved_is_estimated_from_one(
    own: int, before: tuple[int, int], after: tuple[int, int]
) -> None:
    """A quarter of the job moves a quarter of what is left of it as updates; a rank without bytes sees nothing move."""
    moved = MovedBytes(100, own)
    assert moved.of_all_ranks() == before
    if own:
        moved.record_rate(TransferRate(5, 20, 1.0))
    assert moved.of_all_ranks() == after


def test_the_reason_is_this_ranks_own_if_it_has_one() -> None:
    """The first failure is reported, not the cancellation that follows it."""

    def fails(_: threading.Event) -> TransferStats:
        raise UnavailableSlave("ps1 is gone")

    result = begin(TwoRanks(), TransferThread(fails)).wait(10)
    assert (result.ok, result.reason) == (False, "UnavailableSlave: ps1 is gone")


def test_an_unforeseen_error_is_raised_after_the_ranks_have_agreed() -> None:
    """The other ranks have been through the same collective by then, so none of them hangs in it."""

    def fails(_: threading.Event) -> TransferStats:
        raise ZeroDivisionError("a bug")

    with pytest.raises(ZeroDivisionError, match="a bug"):
        begin(TwoRanks(), TransferThread(fails)).wait(10)


def test_what_no_next_transfer_mends_ends_the_job() -> None:
    """A push of more ranges than a slave keeps would be refused each time, and its cluster train for itself alone."""

    def fails(_: threading.Event) -> TransferStats:
        raise ConfigError("ps1 keeps fewer ranges")

    with pytest.raises(ConfigError, match="ps1 keeps fewer ranges"):
        begin(TwoRanks(), TransferThread(fails)).wait(10)


class FailsBetweenLooks(TransferThread):
    """A thread that fails after whatever is looked at first."""

    looks = 0

    def __init__(self) -> None:
        super().__init__(None)

    def _look(self) -> bool:
        self.looks += 1
        return self.looks > 1

    @property
    def done(self) -> bool:
        return self._look()

    @property  # type: ignore[override]
    def error(self) -> BaseException | None:
        return UnavailableSlave("ps1 is gone") if self._look() else None

    @error.setter
    def error(self, value: BaseException | None) -> None:
        pass


def test_a_thread_that_fails_while_it_is_looked_at_is_not_taken_for_done() -> None:
    """Its end is looked at before its error: what has ended had its error by then."""
    thread = FailsBetweenLooks()
    result = begin(TwoRanks(), thread)._agree_on_result(0.0)
    assert result is None or not result.ok
