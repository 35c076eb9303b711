"""The open pushes and pulls of a slave: slots, staged pushes, readers, and tombstones of closed transfers.

What must stay true: no slot without a live push, no pin without a live pull; a closed transfer is never opened again
(one tombstone for each cluster, for pushes and for pulls); a slot is freed only after the flow has stopped writing into
it, a pin ends only with the flow's Released, and the bank of a slow reader that is moved to a file is free only after
its SourceMoved. It does not know rounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field

from dips.codecs import Codec
from dips.dataclass import dataclass
from dips.errors import LocalProtocolError, RemoteProtocolError, StalePush, StaleVersion, UnreadSnapshot
from dips.ids import PullId, PushId, VersionId, reads_only
from dips.outer.versions import Versions
from dips.protocol.effects import Commit, OpenPull, OpenPush, RankKeys
from dips.protocol.order import MAX_RANKS, places_for_slave
from dips.slave.ports import Arrays, Disk, Flow, FlowEvent, PushOver, Released, SourceMoved, Staged, Tombstones

NO_KEYS = RankKeys(())
Report = Staged | PushOver  # reports for the master
Opened = tuple[int, int]  # (term, number) of the order that opened a transfer


@dataclass(slots=True)
class Receiving:
    """An open push, which is moving or waits here until it is folded."""

    opened: Opened
    codec: Codec
    base: VersionId | None  # initial contents of the slot, if differences are added to it
    nbytes: int | None = None  # None while it moves, its bytes once it is staged
    measured: int | None = None  # the round in which it was measured against the served version


@dataclass(slots=True)
class OpenTransfers:
    """All open transfers of one slave, pushes in order of opening."""

    versions: Versions
    flow: Flow
    disk: Disk
    place: int = 0  # of this slave among all of the run
    slaves: int = 1  # of the run
    pushes: dict[PushId, Receiving] = field(default_factory=dict)
    pulls: dict[PullId, Opened] = field(default_factory=dict)
    closed_pushes: Tombstones = field(default_factory=Tombstones)
    closed_pulls: Tombstones = field(default_factory=Tombstones)
    reports: list[Report] = field(default_factory=list)  # reports that were not yet sent to the master

    def staged_pushes(self) -> tuple[PushId, ...]:
        """Return the pushes that are staged and not measured: every heartbeat names them."""
        return tuple(p for p, r in self.pushes.items() if r.nbytes is not None and r.measured is None)

    # ---- pushes --------------------------------------------------------------------------------

    def open_push(self, order: OpenPush, opened: Opened) -> None:
        """Reserve a slot and let it fill; an open push stays as it is, and is reported again if it is staged.

        A lossy push's slot is initialised with θ of its base, so the base needs no pin, and a flip meanwhile need not
        wait. Raise StalePush if the push is open with another codec or base: a new master does not know what the old
        one granted.
        """
        push = order.push
        if push in self.pushes:
            known = self.pushes[push]
            if (known.codec, known.base) != (order.codec, order.base):
                raise StalePush(f"{push} is open as {known.codec} on {known.base}, not {order.codec} on {order.base}")
            known.opened = opened
            if known.nbytes is not None:
                self.reports.append(Staged(push, known.nbytes))
            return
        self.closed_pushes.refuse_closed(push)
        if not 1 <= order.ranks <= MAX_RANKS:
            raise RemoteProtocolError(f"OpenPush {push}: expected 1 to {MAX_RANKS} ranks, got {order.ranks}")
        buffers = self.versions.open_slot(push, order.base)
        try:
            places = places_for_slave(self.place, self.slaves, order.first, order.ranks)
            self.flow.open_push(push, places, buffers, order.deadline_s, order.codec, order.keys)
        except BaseException:
            self.versions.free_slot(push)
            raise
        self.pushes[push] = Receiving(opened, order.codec, order.base)

    def reorder_push(self, push: PushId, places: tuple[int, ...]) -> None:
        """Change the order of asking while the push moves; ignored for a push that is staged or not open."""
        known = self.pushes.get(push)
        if known is not None and known.nbytes is None:
            self.flow.reorder_push(push, places)

    def drop_push(self, push: PushId) -> None:
        """Free the slot and set the tombstone, also for a push that was never open: its OpenPush may still be on its
        way.
        """
        self.closed_pushes.close(push)
        if push in self.pushes:
            self.flow.drop_push(push)
            self.versions.free_slot(push)
            del self.pushes[push]

    def drop_others(self, push: PushId) -> None:
        """Drop every open push of the same sender but this one."""
        for other in [p for p in self.pushes if p.cluster == push.cluster and p != push]:
            self.drop_push(other)

    def forget_push(self, push: PushId) -> None:
        """Forget a push that was folded, or half folded: its slot is free or acc, and it cannot be opened again."""
        self.closed_pushes.close(push)
        if push in self.versions.open_pushes:
            self.versions.free_slot(push)
        del self.pushes[push]

    def staged_push(self, push: PushId) -> Receiving:
        """Return a staged push; raise StalePush if it is not open, LocalProtocolError if it still moves."""
        if push not in self.pushes:
            raise StalePush(f"push {push} is not open; open: {', '.join(map(str, self.pushes)) or 'none'}")
        known = self.pushes[push]
        if known.nbytes is None:
            raise LocalProtocolError(f"push {push} is still moving; it was never reported staged")
        return known

    def forget_measures(self) -> None:
        """Forget which pushes were measured, when θ is about to change or the round is over."""
        for known in self.pushes.values():
            known.measured = None

    # ---- pulls --------------------------------------------------------------------------------

    def open_pull(self, order: OpenPull, opened: Opened) -> None:
        """Pin a version and serve it; a pull that is already open on that version stays as it is."""
        pull = order.pull
        pinned = self.versions.held.pins.get(pull)
        if pull in self.pulls and pinned == order.version:
            self.pulls[pull] = opened
            return
        self.closed_pulls.refuse_closed(pull)
        source = self._pin_version(pull, order.version)
        try:
            chain = self.versions.pin_updates(pull, order.version)
            self.flow.open_pull(pull, order.version, source, chain, order.keys)
        except BaseException:
            self.versions.unpin_version(pull)
            raise
        self.pulls[pull] = opened

    def _pin_version(self, pull: PullId, version: VersionId) -> Arrays:
        """Pin a version in memory, or an older one in its snapshot file, so that a late reader needs no bank.

        Who only reads gets the file if there is one: however slow it is, no outer step ever waits for its bank.
        """
        memory = self.versions.served_version
        if memory and reads_only(pull.cluster) and (source := self.disk.map_theta(version)) is not None:
            self.versions.held.pin_file(pull, version)
            return source
        try:
            return self.versions.held.pin_version(pull, version)
        except StaleVersion:
            if memory is None or version.version >= memory.version:
                raise
            source = self.disk.map_theta(version)
            if source is None:
                if version in self.disk.unread_versions():
                    raise UnreadSnapshot(f"{version} on the disk must be read and verified first") from None
                raise
        self.versions.held.pin_file(pull, version)
        return source

    def move_old_readers(self) -> None:
        """Move the readers of older versions beyond the pinned ones to their snapshot files, the oldest first.

        A version whose snapshot is deleted, or was never written (v0@r0), keeps its bank as long as it has readers.
        """
        excess = self.versions.held.excess_versions
        for version in self.versions.held.older_versions if excess else ():
            source = self.disk.map_theta(version) if excess else None
            if source is None:
                continue
            excess -= 1
            for pull in self.versions.held.move_readers(version):
                self.flow.move_pull(pull, source)

    def open_pulls(self, order: Commit, opened: Opened) -> None:
        """Open the pulls of a Commit; those that are open or closed already are skipped, since a Commit may be
        repeated.

        Raise RemoteProtocolError if it has keys for another number of pulls than it names.
        """
        if order.keys and len(order.keys) != len(order.pulls):
            raise RemoteProtocolError(f"Commit: keys of {len(order.keys)} pulls for {len(order.pulls)}")
        for pull, ranks in zip(order.pulls, order.keys or [NO_KEYS] * len(order.pulls), strict=True):
            known = pull in self.pulls or pull in self.versions.held.pins
            if not known and not self.closed_pulls.is_closed(pull):
                self.open_pull(OpenPull(pull, order.version, ranks.keys), opened)

    def close_pull(self, pull: PullId) -> None:
        """Stop serving a pull and set the tombstone; the pin ends with the flow's Released."""
        self.closed_pulls.close(pull)
        if self.pulls.pop(pull, None) is not None:
            self.flow.close_pull(pull)

    # ---- both --------------------------------------------------------------------------------

    def on_flow_event(self, event: FlowEvent) -> None:
        """Record an event of the data flow; one for a push that was dropped meanwhile changes nothing."""
        match event:
            case Staged(push, nbytes):
                known = self.pushes.get(push)
                if known is not None and known.nbytes is None:
                    known.nbytes = nbytes
                    self.reports.append(event)
            case PushOver(push):
                if push in self.pushes:
                    self.drop_push(push)
                    self.reports.append(event)
            case Released(pull):
                self.pulls.pop(pull, None)
                self.versions.unpin_version(pull)
            case SourceMoved(pull):
                self.versions.held.on_reader_moved(pull)

    def drop_unlisted(self, live_pushes: Sequence[PushId], live_pulls: Sequence[PullId], as_of: Opened) -> list[str]:
        """Drop transfers that are not live and were opened by an order that the list knows; return their names."""
        live = {*live_pushes, *live_pulls}
        pushes = [p for p, known in self.pushes.items() if known.opened <= as_of and p not in live]
        pulls = [p for p, opened in self.pulls.items() if opened <= as_of and p not in live]
        for push in pushes:
            self.drop_push(push)
        for pull in pulls:
            self.close_pull(pull)
        return [*map(str, pushes), *map(str, pulls)]

    def drop_all(self) -> None:
        """Drop every push and close every pull, before another version or another incarnation."""
        for push in list(self.pushes):
            self.drop_push(push)
        for pull in list(self.pulls):
            self.close_pull(pull)
