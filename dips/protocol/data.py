"""Data ranges (§4.2, docs/rationale.md#37): each is free, leased to one incarnation of a cluster, or consumed."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

from dips.printable import join_some
from dips.protocol.options import RANGES_HELD, DataOptions

# ---- intervals ------------------------------------------------------------------------------------------------------
# Adding, removing and finding a number take O(log n) comparisons for n intervals, which are in ascending order and
# never touch.


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
            begin = end
        made._append(begin, total)
        return made

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


# ---- data -----------------------------------------------------------------------------------------------------------
# Data ranges (§4.2, docs/rationale.md#37): each is free, leased to one incarnation of a cluster, or settled for good.
#
# A leased range stays leased while its cluster carries it unsettled. An accepted push settles its ranges as trained, a
# gated one as gated; when an incarnation ends, what it had leased and not settled is free again. The trained part of a
# range in settled pushes is kept, so that the next holder begins there. A range that was trained only by versions that
# were rolled back is undone: leased again with `requeue: undone`, behind the part that the lineage has, else never,
# since clusters still carry that work in their parameters. Range e·ranges + i is range i in epoch e, so nothing is
# trained twice under one number.
#
# A cluster holds at most RANGES_HELD ranges that are leased and not settled, or HELD_TIMES the ranges of its largest
# push, so that one that leases and does not train withholds few from the others. At that bound a cluster pushes, then
# asks again.


HELD_TIMES = 4  # one push's ranges under way, one's trained behind it, one's ahead, and one's to grow into


@dataclass(frozen=True, slots=True)
class BegunRange:
    """A data range of which a part is trained: the first `done` of its `of` samples, in the range's order.

    Samples are the units into which the training script cuts a range; a different `of` means a different cut.
    """

    number: int
    done: int
    of: int


Parts = tuple[tuple[int, BegunRange], ...]  # of one range: (round of the version, 0 if gated; part), oldest first


def newest_parts(parts: Parts, oldest: int) -> Parts:
    """Leave out all parts before the newest of a round below `oldest`."""
    return parts[max((place for place, (number, _) in enumerate(parts) if number < oldest), default=0) :]


@dataclass
class Lease:
    """The ranges of one incarnation of a cluster: its last answer, and all ranges that are not settled."""

    seq: int = 0
    answer: tuple[int, ...] = ()
    ranges: dict[int, None] = field(default_factory=dict)  # in the order of leasing


class RangeBook:
    """Holder and fate of each range. Ranges are leased in ascending order, freed ones first."""

    def __init__(
        self,
        options: DataOptions,
        settled: Intervals | None = None,
        leased: Iterable[tuple[str, int, int, tuple[int, ...]]] = (),
        undone: Iterable[int] = (),
        requeue: bool = False,
        begun: Iterable[BegunRange] = (),
        used: Mapping[str, int] | None = None,
        held: int = RANGES_HELD,
        parts: Iterable[tuple[int, BegunRange]] = (),
    ) -> None:
        """Build the book from the ledger's rows.

        leased  (cluster, incarnation, seq, ranges not settled) of each open lease, in the order of leasing
        used    ranges in the largest known push of each cluster
        held    ranges that each cluster may hold, whatever it used
        parts   of ranges, with the round that settled each in the lineage, in order; 0: a gated push did
        """
        self.per_epoch = options.ranges
        self.total = options.ranges * options.epochs
        self.settled = Intervals() if settled is None else settled.copy()  # a copy: in long runs there may be millions
        self._requeue = requeue
        undone = set(undone)
        self.undone = set[int]() if requeue else undone
        # Of ranges that are settled, too, as long as the version that did may be undone.
        self.parts: dict[int, Parts] = {}
        for round_number, part in parts:
            self._add_part(round_number, part)
        self.begun = {part.number: part for part in begun}  # settled in part
        if requeue:
            self._find_begun(number for number in self.parts if number not in self.settled)
        self._used, self._held = dict(used or {}), held
        self._leases: dict[tuple[str, int], Lease] = {}
        self.leased = 0  # ranges in all leases
        for cluster, inc, seq, ranges in leased:
            lease = self._leases.setdefault((cluster, inc), Lease())
            self._enter(lease, ranges)
            lease.seq, lease.answer = seq, ranges
        self._free = self.settled.gaps_below(self.total)
        for taken in (self.undone, *(lease.ranges for lease in self._leases.values())):
            self._take_all(taken)

    @property
    def free(self) -> int:
        return self._free.count

    def is_settled(self, epochs: int) -> bool:
        """Whether `epochs` epochs are settled: no range is free and none is leased."""
        return not self.free and not self.leased and self.per_epoch * epochs <= self.total

    def add_epochs(self, epochs: int) -> None:
        """Set the total number of epochs, not below the present one; the new ranges are free."""
        before, self.total = self.total, self.per_epoch * epochs
        self._free.append_numbers(before, self.total)

    def held_by(self, cluster: str, inc: int) -> tuple[int, ...]:
        lease = self._leases.get((cluster, inc))
        return tuple(lease.ranges) if lease else ()

    def lease_ranges(
        self, cluster: str, inc: int, seq: int, count: int, claims: Sequence[int] = ()
    ) -> tuple[tuple[int, ...], bool]:
        """Lease up to `count` ranges, or those of `claims` that are free; return them, and whether they are new.

        Fewer are returned at the limit of what the cluster may hold. A repeated request gets its first answer, not new.
        """
        lease = self._leases.setdefault((cluster, inc), Lease())
        if seq <= lease.seq:
            return lease.answer, False
        room = max(0, self.most_held(cluster) - len(lease.ranges))
        taken = (
            tuple(islice((r for r in claims if self._free.remove_number(r)), room))
            if claims
            else tuple(self._free.take_smallest() for _ in range(min(count, room, self.free)))
        )
        lease.seq, lease.answer = seq, taken
        self._enter(lease, taken)
        return taken, True

    def most_held(self, cluster: str) -> int:
        """Return how many ranges this cluster may hold; an ended incarnation holds at most those of one committed push
        besides.
        """
        return max(self._held, HELD_TIMES * self._used.get(cluster, 0))

    def is_exhausted(self, cluster: str, inc: int) -> bool:
        """Whether no range will ever be leased to this cluster again: none is free, and no other cluster holds any."""
        return not self.free and self.leased == len(self.held_by(cluster, inc))

    def why_wait(self, cluster: str, inc: int, seq: int) -> str:
        """Return which clusters must settle or free ranges before this new request is answered; empty if it is answered
        now.

        A cluster that holds ranges itself is answered at once and settles those first; otherwise two could wait for
        each other.
        """
        lease = self._leases.get((cluster, inc))
        if self.free or not self.leased or (lease is not None and (lease.ranges or seq <= lease.seq)):
            return ""
        holders = sorted({name for (name, _), other in self._leases.items() if other.ranges})
        return f"no data range is free: {self.leased} are leased by {join_some(holders)}"

    def note_used(self, cluster: str, count: int) -> None:
        """Record the number of ranges in an accepted push of the cluster."""
        self._used[cluster] = max(count, self._used.get(cluster, 0))

    def begun_of(self, ranges: Iterable[int]) -> tuple[BegunRange, ...]:
        """Return those of the ranges that are settled in part, with the part."""
        return tuple(self.begun[r] for r in ranges if r in self.begun)

    def settle_ranges(
        self, cluster: str, inc: int, ranges: Sequence[int], begun: BegunRange | None = None, round_number: int = 0
    ) -> None:
        """Settle ranges that a version of this round trained, or gated ones (0): they are never leased again in this
        lineage; of `begun` only a part is settled.

        Without `requeue: undone` a rollback does not change that part: clusters still carry that work in their
        parameters.
        """
        for number in ranges:
            self.settled.add_number(number)
            self.begun.pop(number, None)
            if not round_number:
                self.parts.pop(number, None)
        if begun is not None:
            self.begun[begun.number] = begun
            self._add_part(round_number, begun)
        lease = self._leases.get((cluster, inc))
        if lease:
            self._strike(lease, ranges)

    def undo_parts(self, after: int) -> None:
        """Forget the parts that versions of rounds after this one settled; `undo_ranges` follows."""
        self._keep_parts(lambda chain: tuple(entry for entry in chain if entry[0] <= after))
        if self._requeue:
            self._find_begun(self.begun)

    def undo_ranges(self, ranges: Iterable[int]) -> None:
        """Undo ranges of versions that were rolled back: with `requeue: undone` free them again, but for the part that
        the lineage has, else mark them as undone.
        """
        over = {number for number in ranges if self.settled.remove_number(number)}
        if self._requeue:
            self._free_all(over)
            self._find_begun((*self.begun, *over))
        else:
            self.undone |= over

    def forget_parts(self, ranges: Iterable[int], oldest: int) -> None:
        """Forget what no rollback asks for: the parts of these ranges, which are settled for good, and those before
        the newest of a round below `oldest`.
        """
        for number in ranges:
            self.parts.pop(number, None)
        self._keep_parts(lambda chain: newest_parts(chain, oldest))

    def release_lease(self, cluster: str, inc: int, keep: Sequence[int] = ()) -> None:
        """Free the ranges of an ended incarnation, except `keep`: those of its push that is not yet settled."""
        lease = self._leases.pop((cluster, inc), None)
        if lease is None:
            return
        kept = set(keep)
        freed = [r for r in lease.ranges if r not in kept]
        self._strike(lease, freed)
        self._free_all(freed)
        if keep:
            self._leases[cluster, inc] = lease

    def _add_part(self, round_number: int, part: BegunRange) -> None:
        chain = (*self.parts.get(part.number, ()), (round_number, part))
        self.parts[part.number] = newest_parts(chain, 1)  # no rollback takes back what a gated push settled: 0

    def _find_begun(self, ranges: Iterable[int]) -> None:
        """Take for the part of each of these ranges, which are not settled, the one that the lineage has."""
        self.begun = {number: self.parts[number][-1][1] for number in ranges if number in self.parts}

    def _keep_parts(self, choose: Callable[[Parts], Parts]) -> None:
        self.parts = {number: kept for number, chain in self.parts.items() if (kept := choose(chain))}

    def _enter(self, lease: Lease, ranges: Iterable[int]) -> None:
        before = len(lease.ranges)
        lease.ranges.update(dict.fromkeys(ranges))
        self.leased += len(lease.ranges) - before

    def _strike(self, lease: Lease, ranges: Iterable[int]) -> None:
        for number in ranges:
            if number in lease.ranges:
                del lease.ranges[number]
                self.leased -= 1

    def _take_all(self, ranges: Iterable[int]) -> None:
        for number in ranges:
            self._free.remove_number(number)

    def _free_all(self, ranges: Iterable[int]) -> None:
        for number in ranges:
            self._free.add_number(number)
