"""All open pushes and pulls, for which slaves hold slots and pins: their deadlines, and the number of that list.

Each is referenced by its cluster too (entities.py); here they are found without visiting every cluster. The number
rises with every change, so that a heartbeat can name the list that a slave has (heartbeats.py). Pure.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from dips.ids import PushId
from dips.protocol.entities import Pull, Push
from dips.protocol.timers import Timers


@dataclass
class TransferBook:
    """At most `slots` pushes, and at most one pull of each cluster."""

    pushes: dict[PushId, Push] = field(default_factory=dict)  # that hold a slot: until folded, gated or dropped
    pulls: dict[str, Pull] = field(default_factory=dict)  # by cluster
    push_deadlines: Timers = field(default_factory=Timers)  # by cluster; of uncommitted pushes
    pull_deadlines: Timers = field(default_factory=Timers)  # by cluster
    pull_ranks: int = 0  # ranks of all pulls
    number: int = 1  # of this list in this term

    def open_push(self, push: Push) -> None:
        """Add a push, which takes a slot."""
        self.number += 1
        self.pushes[push.id] = push
        self.push_deadlines.set_timer(push.id.cluster, push.deadline)

    def commit_push(self, push: Push) -> None:
        """Remove a committed push's deadline: it keeps its slot, whatever happens to its cluster."""
        self.push_deadlines.drop_timer(push.id.cluster)

    def close_push(self, push: Push) -> None:
        """Remove a push: its slot is free, or part of the running sum."""
        if self.pushes.pop(push.id, None) is None:
            return
        self.number += 1
        if not push.committed:
            self.push_deadlines.drop_timer(push.id.cluster)

    def open_pull(self, pull: Pull) -> None:
        """Add a pull, for which a version is pinned."""
        cluster = pull.id.cluster
        assert cluster not in self.pulls
        self.number += 1
        self.pulls[cluster] = pull
        self.pull_ranks += pull.ranks
        self.pull_deadlines.set_timer(cluster, pull.deadline)

    def close_pull(self, pull: Pull) -> None:
        """Remove a pull and its pin."""
        self.number += 1
        del self.pulls[pull.id.cluster]
        self.pull_ranks -= pull.ranks
        self.pull_deadlines.drop_timer(pull.id.cluster)

    def keep_until(self, transfer: Push | Pull, deadline: float) -> None:
        """Set the deadline of a transfer; a committed push has none."""
        transfer.deadline = deadline
        if isinstance(transfer, Pull):
            self.pull_deadlines.set_timer(transfer.id.cluster, deadline)
        elif not transfer.committed:
            self.push_deadlines.set_timer(transfer.id.cluster, deadline)

    def uncommitted_pushes(self) -> list[Push]:
        """Return the pushes that are opening or moving: they end with their cluster, at their deadline, or with a lost
        slave.
        """
        return [push for push in self.pushes.values() if not push.committed]

    def shift_times(self, gap_s: float) -> None:
        """Shift all deadlines by `gap_s`."""
        for push in self.pushes.values():
            push.deadline += gap_s
        for pull in self.pulls.values():
            pull.deadline += gap_s
        self.push_deadlines.shift_times(gap_s)
        self.pull_deadlines.shift_times(gap_s)

    def may_expire(self, now: float) -> bool:
        """Whether a deadline may have passed; called after every event, so it reads only the tops of the heaps."""
        pushes, pulls = self.push_deadlines.heap, self.pull_deadlines.heap
        return bool((pushes and pushes[0][0] <= now) or (pulls and pulls[0][0] <= now))

    def next_deadline(self) -> float:
        """Return the earliest deadline of all transfers; inf if there is none."""
        push, pull = self.push_deadlines.first_at(), self.pull_deadlines.first_at()
        return push if push < pull else pull
