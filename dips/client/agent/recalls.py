"""The trainer's progress in its data ranges, and recalling ranges from it.

Must stay true: a range is used up when all its samples are in the carried progress; lost samples are served again, from
the point where settled pushes end.
"""

from __future__ import annotations

from collections.abc import Iterable

from dips.client.agent.state import AgentState
from dips.protocol.data import BegunRange


def use_ranges(s: AgentState, left: Iterable[int], begun: BegunRange | None) -> None:
    """Count all served ranges but `left` as used up, and `begun` as partly trained.

    Ranges leased to a former incarnation, or taken back meanwhile, are not counted.
    """
    s.range_requests.by_step = True
    for used in s.ranges.finish_ranges(left):
        s.account.use_up(used)
    if begun is not None and begun.number in s.ranges.served:
        s.account.begin_range(begun)


def lose_work(s: AgentState) -> None:
    """Drop the progress since the last freeze and serve its ranges to the running trainer again."""
    lost = s.account.carried.inner_steps > 0
    s.ranges.take_back_unserved(s.account.lose_carried())
    if lost and s.range_requests.by_step and s.ranges.served:
        s.ranges.recall_ranges()
        count_recall(s)


def count_recall(s: AgentState) -> None:
    """Tell the trainer, with the next answers, to forget its ranges."""
    s.range_requests.recalls += s.range_requests.by_step
