"""Times by name with fast access to the earliest, for deadlines and other due times. Pure.

A heap with lazy deletion: an entry whose time is no longer its name's is skipped when it comes to the top, and the heap
is rebuilt when most of its entries are such. So setting, moving or dropping a time takes O(log n).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from math import inf

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
        if not self.heap or self.heap[0][0] > now:
            return due  # called after every event; a stale entry is never later than the one that it hides
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

    def clear_timers(self) -> None:
        """Drop all times."""
        self.replace_times({})

    def build_derived(self) -> None:
        """Rebuild the heap from the times."""
        self.heap = [(at, name) for name, at in self.at.items()]
        heapify(self.heap)
