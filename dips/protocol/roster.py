"""The slaves by what is asked about all of them after every event: who is not READY, who drains, who is to be heard.

What stands here as a set of names is nowhere else, but for `missing`, `unasked` and what is kept for grants: those
follow the slaves' own records (entities.py), through the methods of RunState. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from dips.ids import VersionId
from dips.protocol.effects import SlaveAddress
from dips.protocol.entities import Slave
from dips.protocol.moves import SlaveState

NAMED = 8  # slaves in a reason: of a thousand, the first are as good as all

Names = dict[str, None]  # a set that keeps its order


@dataclass
class Roster:
    """Sets of names; `slaves` is the run's own record of each."""

    missing: Names  # not READY
    unregistered: Names  # since this master started
    unasked: Names  # whose offer is not known
    lacking: Names = field(default_factory=dict)  # whose offer is known, and has no head in it: see rollback.py
    draining: Names = field(default_factory=dict)  # to be out of service when nothing is open on them
    garbage: dict[str, tuple[VersionId, ...]] = field(default_factory=dict)  # on disks of READY ones, and in no row
    perhaps_behind: Names = field(default_factory=dict)  # no other's mirror lacks what is to be copied: see mirrors.py
    addresses: tuple[SlaveAddress, ...] = ()  # of all, for grants; empty: some have changed
    slots: int = 0  # of the one that has fewest, of those that have registered

    @classmethod
    def of_names(cls, names: Iterable[str]) -> Roster:
        """None has registered yet."""
        missing = dict.fromkeys(names)
        return cls(missing, dict(missing), dict(missing))

    def follow_state(self, slave: Slave) -> None:
        """Its state has changed."""
        if slave.state is SlaveState.READY:
            self.missing.pop(slave.name, None)
            self.perhaps_behind[slave.name] = None
        else:
            self.missing[slave.name] = None
            self.garbage.pop(slave.name, None)

    def follow_offer(self, slave: Slave) -> None:
        """It has named what it offers, or that does not hold any more."""
        if slave.offer is None:
            self.unasked[slave.name] = None
            self.lacking.pop(slave.name, None)
        else:
            self.unasked.pop(slave.name, None)

    def follow_register(self, slave: Slave, slots: int, slaves: Mapping[str, Slave]) -> None:
        """It has registered with so many slots, perhaps as another process, at another place."""
        before, slave.slots = slave.slots, slots
        first = slave.name in self.unregistered
        self.unregistered.pop(slave.name, None)
        self.addresses = ()
        if first:
            self.slots = min(self.slots, slots) if self.slots else slots
        elif before == self.slots or slots < before:  # it had the fewest, or may have them now
            self.slots = min(s.slots for s in slaves.values() if s.name not in self.unregistered)

    def list_addresses(self, slaves: Mapping[str, Slave]) -> tuple[SlaveAddress, ...]:
        """Where ranks find all slaves."""
        if not self.addresses:
            self.addresses = tuple(SlaveAddress(s.name, s.sinc, s.lanes, s.layers, s.key) for s in slaves.values())
        return self.addresses


def in_order(slaves: Mapping[str, Slave], names: Iterable[str]) -> list[Slave]:
    """The slaves with these names, in the order of the placement."""
    return sorted((slaves[name] for name in names), key=lambda slave: slave.place)


def name_some(names: Sequence[str]) -> str:
    """Names for a reason, the first of them if they are many."""
    rest = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + rest
