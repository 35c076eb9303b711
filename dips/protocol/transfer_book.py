"""All pushes and pulls that are open: what slaves hold a slot or a pin for, until when, and the number of that list.

Each stands at its cluster too (entities.py); here they are found without looking at every cluster. The number rises
with every change, so a heartbeat tells by it which list a slave has (heartbeats.py). Pure.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from dips.ids import PushId
from dips.protocol.entities import Pull, Push
from dips.protocol.timers import Timers


@dataclass
class TransferBook:
    """At most `slots` pushes, and at most one pull of each cluster."""

    pushes: dict[PushId, Push] = field(default_factory=dict)  # that hold a slot: opening up to folded, gated or dropped
    pulls: dict[str, Pull] = field(default_factory=dict)  # by cluster
    push_deadlines: Timers = field(default_factory=Timers)  # by cluster; of those that are not committed
    pull_deadlines: Timers = field(default_factory=Timers)  # by cluster
    pull_ranks: int = 0  # of all pulls
    number: int = 1  # of this list in this term

    def open_push(self, push: Push) -> None:
        """It takes a slot."""
        self.number += 1
        self.pushes[push.id] = push
        self.push_deadlines.set_timer(push.id.cluster, push.deadline)

    def commit_push(self, push: Push) -> None:
        """It keeps its slot, whatever becomes of its cluster: no deadline ends it any more."""
        self.push_deadlines.drop_timer(push.id.cluster)

    def close_push(self, push: Push) -> None:
        """Its slot is free, or part of the running mean."""
        if self.pushes.pop(push.id, None) is None:
            return
        self.number += 1
        if not push.committed:
            self.push_deadlines.drop_timer(push.id.cluster)

    def open_pull(self, pull: Pull) -> None:
        """A version is pinned for it."""
        cluster = pull.id.cluster
        assert cluster not in self.pulls
        self.number += 1
        self.pulls[cluster] = pull
        self.pull_ranks += pull.ranks
        self.pull_deadlines.set_timer(cluster, pull.deadline)

    def close_pull(self, pull: Pull) -> None:
        """Its pin ends."""
        self.number += 1
        del self.pulls[pull.id.cluster]
        self.pull_ranks -= pull.ranks
        self.pull_deadlines.drop_timer(pull.id.cluster)

    def keep_until(self, transfer: Push | Pull, deadline: float) -> None:
        """It has until `deadline`; a committed push has none."""
        transfer.deadline = deadline
        if isinstance(transfer, Pull):
            self.pull_deadlines.set_timer(transfer.id.cluster, deadline)
        elif not transfer.committed:
            self.push_deadlines.set_timer(transfer.id.cluster, deadline)

    def uncommitted_pushes(self) -> list[Push]:
        """Pushes that are opening or moving: they die with their cluster, their deadline or a slave."""
        return [push for push in self.pushes.values() if not push.committed]

    def shift_times(self, gap_s: float) -> None:
        """All deadlines are later by `gap_s`."""
        for push in self.pushes.values():
            push.deadline += gap_s
        for pull in self.pulls.values():
            pull.deadline += gap_s
        self.push_deadlines.shift_times(gap_s)
        self.pull_deadlines.shift_times(gap_s)

    def may_expire(self, now: float) -> bool:
        """Whether a deadline may have passed: asked after every event, so it passes over nothing that was forgotten."""
        pushes, pulls = self.push_deadlines.heap, self.pull_deadlines.heap
        return bool((pushes and pushes[0][0] <= now) or (pulls and pulls[0][0] <= now))

    def next_deadline(self) -> float:
        """When the first of them ends if nobody names it; inf if none can."""
        push, pull = self.push_deadlines.first_at(), self.pull_deadlines.first_at()
        return push if push < pull else pull
