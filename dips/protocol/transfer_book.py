"""All open pushes and pulls, for which slaves hold slots and pins, and their deadlines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from math import inf

from dips.ids import PushId
from dips.protocol.entities import Pull, Push
from dips.protocol.heartbeats import LEAST_BYTES_PER_S
from dips.protocol.options import TimingOptions

# ---- timers ----------------------------------------------------------------------------------------------------------
# A heap with lazy deletion: an entry whose time is no longer its name's is skipped when it comes to the top, and the
# heap is rebuilt when most of its entries are such. So setting, moving or dropping a time takes O(log n).


STALE_KEPT = 16  # entries beyond twice the names: fewer are not worth a new heap


@dataclass
class Timers:
    """Times by name, at most one each; -inf is a time too, inf means none."""

    at: dict[str, float] = field(default_factory=dict)
    # Made from `at`, and tidied up on reads: not part of a state that is compared or kept (codec.py).
    heap: list[tuple[float, str]] = field(default_factory=list, compare=False, metadata={"derived": True})

    def set_timer(self, name: str, at: float) -> None:
        """Set or replace the time of a name."""
        if self.at.get(name) == at:
            return
        self.at[name] = at
        heappush(self.heap, (at, name))
        if len(self.heap) > 2 * len(self.at) + STALE_KEPT:
            self.build_derived()

    def drop_timer(self, name: str) -> None:
        """Drop the time of a name, if it has one."""
        self.at.pop(name, None)

    def first_at(self) -> float:
        """Return the earliest time; inf if there is none."""
        heap, at = self.heap, self.at
        while heap:
            when, name = heap[0]
            if at.get(name) == when:
                return when
            heappop(heap)
        return inf

    def take_first(self) -> str:
        """Drop and return the name with the earliest time; there must be one."""
        self.first_at()  # puts its entry on top
        name = heappop(self.heap)[1]
        del self.at[name]
        return name

    def take_due(self, now: float) -> list[str]:
        """Drop and return the names whose time has come, earliest first."""
        due = list[str]()
        while self.first_at() <= now:
            due.append(self.take_first())
        return due

    def shift_times(self, gap_s: float) -> None:
        """Shift all times by `gap_s`."""
        self.replace_times({name: at + gap_s for name, at in self.at.items()})

    def replace_times(self, times: Mapping[str, float]) -> None:
        """Replace all times."""
        self.at = dict(times)
        self.build_derived()

    def build_derived(self) -> None:
        """Rebuild the heap from the times."""
        self.heap = [(at, name) for name, at in self.at.items()]
        heapify(self.heap)


# ---- deadlines ------------------------------------------------------------------------------------------------------
# Deadlines of transfers: how long one may be open without progress reported by its cluster (docs/rationale.md#19, #31).
# Pure.
#
# A deadline is three times the whole model over the cluster's measured bandwidth, which heartbeats report; `transfer_s`
# for a cluster that has not moved a byte yet. It bounds how long a pin or slot is held and must not end an honest
# transfer, so it is counted from the cluster's last report of the transfer (transfers.py); a rank counts it from the
# last byte.


SLACK = 3.0  # docs/rationale.md#19: a link shared by two more transfers than when it was measured
NEWEST_SHARE = 0.3  # weight of the newest heartbeat in the running mean: one that saw half a transfer must not decide
REPORTED_CHANGE = 0.05  # of bandwidth, beyond which it is told again: half of what windows wait for a late push
BITS = 8


def transfer_deadline_s(nbytes: int, bytes_per_s: float | None, timing: TimingOptions) -> float:
    """Return the seconds for which a transfer of `nbytes` may be silent; `transfer_s` while its rate is unknown."""
    known = max(timing.least_transfer_s, SLACK * nbytes / bytes_per_s) if bytes_per_s else timing.transfer_s
    return max(known, timing.lease_s)  # a cluster may miss as many heartbeats as its lease allows


def too_slow(bytes_per_s: float | None, measured_s_ago: float, timing: TimingOptions) -> str:
    """Return why a push may not begin on this link, with the numbers; empty if it may.

    A measurement older than `transfer_s` no longer counts: the push may begin, and measures the link anew.
    """
    bps = BITS * (bytes_per_s or 0.0)
    if not bps or bps >= timing.min_push_bps or measured_s_ago >= timing.transfer_s:
        return ""
    return f"its link moves {bps / 1e6:.4g} Mbit/s, a push needs min_push_bps = {timing.min_push_bps / 1e6:.4g} Mbit/s"


@dataclass
class Bandwidth:
    """Running mean of a cluster's bandwidth as its heartbeats report it, in bytes/s; None before the first."""

    mean: float | None = None
    reported: float = 0.0

    def measure_rate(self, bytes_per_s: float) -> float | None:
        """Add a heartbeat's rate (0: nothing moves); return the mean if it has changed enough to be reported, else
        None.
        """
        if bytes_per_s < LEAST_BYTES_PER_S:
            return None
        self.mean = bytes_per_s if self.mean is None else self.mean + NEWEST_SHARE * (bytes_per_s - self.mean)
        if abs(self.mean - self.reported) <= REPORTED_CHANGE * self.reported:
            return None
        self.reported = self.mean
        return self.mean


# ---- transfer book --------------------------------------------------------------------------------------------------
# All open pushes and pulls, for which slaves hold slots and pins: their deadlines, and the number of that list.
#
# Each is referenced by its cluster too (entities.py); here they are found without visiting every cluster. The number
# rises with every change, so that a heartbeat can name the list that a slave has (heartbeats.py). Pure.


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

    def next_deadline(self) -> float:
        """Return the earliest deadline of all transfers; inf if there is none."""
        return min(self.push_deadlines.first_at(), self.pull_deadlines.first_at())
