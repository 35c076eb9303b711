"""A compact set of integers as disjoint intervals. Pure.

Adding, removing and finding a number take O(log n) comparisons for n intervals, which are in ascending order and never
touch.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field


@dataclass
class Intervals:
    """A set of integers: interval i holds the numbers from begins[i] to below ends[i]."""

    begins: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    count: int = 0  # of numbers in the set

    @classmethod
    def of(cls, numbers: Iterable[int]) -> Intervals:
        """Build a set of these numbers; ascending input is the cheapest."""
        made = cls()
        for number in numbers:
            made.add_number(number)
        return made

    def copy(self) -> Intervals:
        """Return an independent copy."""
        return Intervals(list(self.begins), list(self.ends), self.count)

    def gaps_below(self, total: int) -> Intervals:
        """Return the numbers of 0 … total − 1 that are not in this set."""
        made, begin = Intervals(), 0
        for taken, end in zip(self.begins, self.ends, strict=True):
            made._append(begin, min(taken, total))
            begin = max(begin, end)
        made._append(begin, total)
        return made

    def __contains__(self, number: int) -> bool:
        i = bisect_right(self.begins, number) - 1
        return i >= 0 and number < self.ends[i]

    def __iter__(self) -> Iterator[int]:
        for begin, end in zip(self.begins, self.ends, strict=True):
            yield from range(begin, end)

    def add_number(self, number: int) -> None:
        """Add a number. Idempotent."""
        i = bisect_right(self.begins, number)  # where an interval that begins with it would stand
        if i and number < self.ends[i - 1]:
            return
        self.count += 1
        joins_left = i > 0 and self.ends[i - 1] == number
        joins_right = i < len(self.begins) and self.begins[i] == number + 1
        if joins_left and joins_right:
            self.ends[i - 1] = self.ends.pop(i)
            del self.begins[i]
        elif joins_left:
            self.ends[i - 1] = number + 1
        elif joins_right:
            self.begins[i] = number
        else:
            self.begins.insert(i, number)
            self.ends.insert(i, number + 1)

    def remove_number(self, number: int) -> bool:
        """Remove a number; return whether it was in the set."""
        i = bisect_left(self.ends, number + 1)  # the first interval that does not end before it
        if i == len(self.ends) or self.begins[i] > number:
            return False
        self.count -= 1
        begin, end = self.begins[i], self.ends[i]
        if begin == number and end == number + 1:
            del self.begins[i], self.ends[i]
        elif begin == number:
            self.begins[i] = number + 1
        else:
            self.ends[i] = number
            if number + 1 < end:
                self.begins.insert(i + 1, number + 1)
                self.ends.insert(i + 1, end)
        return True

    def take_smallest(self) -> int:
        """Remove and return the smallest number; the set must not be empty."""
        number = self.begins[0]
        self.remove_number(number)
        return number

    def append_numbers(self, begin: int, end: int) -> None:
        """Add begin … end − 1, all of which must be above every number in the set."""
        if self.ends and self.ends[-1] == begin < end:
            self.ends[-1] = end
            self.count += end - begin
        else:
            self._append(begin, end)

    def _append(self, begin: int, end: int) -> None:
        if begin < end:
            self.begins.append(begin)
            self.ends.append(end)
            self.count += end - begin
