"""How far the trainer has trained the data ranges that it was given, and how those are taken back from it.

Must stay true: a range is used up when each of its samples is in what is carried; what is lost is served again, from
where settled pushes end.
"""

from __future__ import annotations

from collections.abc import Iterable

from dips.client.agent.state import AgentState
from dips.protocol.data import BegunRange


def use_ranges(s: AgentState, left: Iterable[int], begun: BegunRange | None) -> None:
    """Samples of `left` are still to be trained, the other ranges are used up.

    Ranges that were leased to a former incarnation, or taken back meanwhile, are not this trainer's any more.
    """
    s.range_requests.by_step = True
    for used in s.ranges.finish_ranges(left):
        s.account.use_up(used)
    if begun is not None and begun.number in s.ranges.served:
        s.account.begin_range(begun)


def lose_work(s: AgentState) -> None:
    """What was trained since the last freeze is lost, and its trainer lives: it is given those ranges again."""
    lost = s.account.carried.inner_steps > 0
    s.ranges.take_back_unserved(s.account.lose_carried())
    if lost and s.range_requests.by_step and s.ranges.served:
        s.ranges.recall_ranges()
        count_recall(s)


def count_recall(s: AgentState) -> None:
    """The trainer must forget what it has of its ranges: the next answers say so."""
    s.range_requests.recalls += s.range_requests.by_step
