"""Indexes of the slaves by what is looked up after every event: which are not READY, which drain, which have to be
heard.

The sets of names here exist nowhere else, except `missing`, `unasked` and the addresses for grants, which follow the
slaves' own records (entities.py) through the methods of RunState. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from dips.ids import VersionId
from dips.protocol.effects import SlaveAddress
from dips.protocol.entities import Slave
from dips.protocol.moves import SlaveState

NAMED = 8  # slaves that a reason names: with a thousand, the first are enough

Names = dict[str, None]  # an ordered set


@dataclass
class Roster:
    """Sets of names of slaves; the run's `slaves` has the record of each."""

    missing: Names  # not READY
    unregistered: Names  # since this master started
    unasked: Names  # whose offer is unknown
    lacking: Names = field(default_factory=dict)  # whose offer is known and does not contain the head: see rollback.py
    draining: Names = field(default_factory=dict)  # asked to be drained, with something still open on them
    garbage: dict[str, tuple[VersionId, ...]] = field(default_factory=dict)  # on disks of READY slaves, without a row
    perhaps_behind: Names = field(default_factory=dict)  # whose mirrors may lack the target: see mirrors.py
    addresses: tuple[SlaveAddress, ...] = ()  # of all slaves, for grants; empty: to be computed anew
    slots: int = 0  # the fewest slots of any registered slave

    @classmethod
    def of_names(cls, names: Iterable[str]) -> Roster:
        """Return the roster of slaves of which none has registered yet."""
        missing = dict.fromkeys(names)
        return cls(missing, dict(missing), dict(missing))

    def follow_state(self, slave: Slave) -> None:
        """Update the sets after a slave's state has changed."""
        if slave.state is SlaveState.READY:
            self.missing.pop(slave.name, None)
            self.perhaps_behind[slave.name] = None
        else:
            self.missing[slave.name] = None
            self.garbage.pop(slave.name, None)

    def follow_offer(self, slave: Slave) -> None:
        """Update the sets after a slave's offer became known or invalid."""
        if slave.offer is None:
            self.unasked[slave.name] = None
            self.lacking.pop(slave.name, None)
        else:
            self.unasked.pop(slave.name, None)

    def follow_register(self, slave: Slave, slots: int, slaves: Mapping[str, Slave]) -> None:
        """Update slots and addresses after a slave has registered, perhaps as another process, at another address."""
        before, slave.slots = slave.slots, slots
        first = slave.name in self.unregistered
        self.unregistered.pop(slave.name, None)
        self.addresses = ()
        if first:
            self.slots = min(self.slots, slots) if self.slots else slots
        elif before == self.slots or slots < before:  # it had the fewest, or may have them now
            self.slots = min(s.slots for s in slaves.values() if s.name not in self.unregistered)

    def list_addresses(self, slaves: Mapping[str, Slave]) -> tuple[SlaveAddress, ...]:
        """Return the addresses of all slaves, for ranks."""
        if not self.addresses:
            self.addresses = tuple(SlaveAddress(s.name, s.sinc, s.lanes, s.layers, s.key) for s in slaves.values())
        return self.addresses


def in_order(slaves: Mapping[str, Slave], names: Iterable[str]) -> list[Slave]:
    """Return the slaves with these names, in the order of the placement."""
    return sorted((slaves[name] for name in names), key=lambda slave: slave.place)


def name_some(names: Sequence[str]) -> str:
    """Join names for a message, only the first of them if there are many."""
    rest = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + rest
