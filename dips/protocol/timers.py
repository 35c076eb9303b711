"""Times by name, of which the earliest is known at once: deadlines, and whatever else is due one day. Pure.

A heap that forgets lazily: an entry whose time is not its name's any more is passed over when it comes to the top, and
the heap is built anew when most of its entries are such. So a time is set, moved or dropped in O(log n).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from math import inf

STALE_KEPT = 16  # entries beyond twice the names: fewer are not worth a new heap


@dataclass
class Timers:
    """At most one time for each name; -inf is a time too, inf is none."""

    at: dict[str, float] = field(default_factory=dict)
    # Made of `at`, and tidied up by who only looks: no part of a state that is compared or kept (codec.py).
    heap: list[tuple[float, str]] = field(default_factory=list, compare=False, metadata={"derived": True})

    def set_timer(self, name: str, at: float) -> None:
        """Give a name its time, in the place of the one that it had."""
        if self.at.get(name) == at:
            return
        self.at[name] = at
        heappush(self.heap, (at, name))
        if len(self.heap) > 2 * len(self.at) + STALE_KEPT:
            self.build_derived()

    def drop_timer(self, name: str) -> None:
        """Forget a name; nothing for one that has no time."""
        self.at.pop(name, None)

    def first_at(self) -> float:
        """The earliest time of all; inf if there is none."""
        heap, at = self.heap, self.at
        while heap:
            when, name = heap[0]
            if at.get(name) == when:
                return when
            heappop(heap)
        return inf

    def take_first(self) -> str:
        """Forget and return the name with the earliest time; there must be one."""
        self.first_at()  # puts its entry on top
        name = heappop(self.heap)[1]
        del self.at[name]
        return name

    def take_due(self, now: float) -> list[str]:
        """Forget and return the names whose time has come, earliest first."""
        due = list[str]()
        if not self.heap or self.heap[0][0] > now:
            return due  # asked after every event; an entry that is forgotten is never later than what it hides
        while self.first_at() <= now:
            due.append(self.take_first())
        return due

    def shift_times(self, gap_s: float) -> None:
        """All are later by `gap_s`."""
        self.replace_times({name: at + gap_s for name, at in self.at.items()})

    def replace_times(self, times: Mapping[str, float]) -> None:
        """These, and no others."""
        self.at = dict(times)
        self.build_derived()

    def clear_timers(self) -> None:
        """Forget all."""
        self.replace_times({})

    def build_derived(self) -> None:
        """Make the heap of the times."""
        self.heap = [(at, name) for name, at in self.at.items()]
        heapify(self.heap)
