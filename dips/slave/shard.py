"""One slave's layers, and the effects of its master's orders on them: fences, transfers, the round, registration."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import field
from enum import Enum
from math import isfinite

from dips.codecs import Codec
from dips.dataclass import dataclass
from dips.errors import (
    Busy,
    BusyDisk,
    Corrupt,
    CorruptManifest,
    DipsError,
    FailedDisk,
    LocalProtocolError,
    RemoteProtocolError,
    Stale,
    StaleIncarnation,
    StalePush,
    StaleTerm,
    StaleVersion,
    UnavailableSlave,
    UnreadSnapshot,
)
from dips.ids import GENESIS, PullId, PushId, VersionId, reads_only
from dips.outer.versions import Versions
from dips.protocol import effects as e
from dips.protocol.claims import MOST_TERMS_AHEAD
from dips.protocol.effects import Abort, Apply, Commit, Fold, Measure, OpenPull, OpenPush, RankKeys
from dips.protocol.events import Answer, Done, Folded, Measured, ModelKept, Persisted, Pinned, Prepared, SlaveRegistered
from dips.protocol.heartbeats import SlaveHeartbeatAnswer
from dips.protocol.manifest import BYTES_PER_PARAMETER, Manifest
from dips.protocol.order import MAX_RANKS, places_for_slave
from dips.slave.ports import (
    Arrays,
    Disk,
    DiskWork,
    Flow,
    FlowEvent,
    PushOver,
    Read,
    Released,
    Report,
    ShardWork,
    SlaveIdentity,
    SourceMoved,
    Staged,
    Standing,
    Tombstones,
)

# ---- open transfers --------------------------------------------------------------------------------------------------
# The open pushes and pulls of a slave: slots, staged pushes, readers, and tombstones of closed transfers.
#
# What must stay true: no slot without a live push, no pin without a live pull; a closed transfer is never opened again
# (one tombstone for each cluster, for pushes and for pulls); a slot is freed only after the flow has stopped writing
# into it, a pin ends only with the flow's Released, and the bank of a slow reader that is moved to a file is free only
# after its SourceMoved. It does not know rounds.


NO_KEYS = RankKeys(())
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
    staged: dict[PushId, None] = field(default_factory=dict)  # staged and not measured: every heartbeat names them

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
            self._remove_push(push)

    def _remove_push(self, push: PushId) -> None:
        del self.pushes[push]
        self.staged.pop(push, None)

    def drop_others(self, push: PushId) -> None:
        """Drop every open push of the same sender but this one."""
        for other in [p for p in self.pushes if p.cluster == push.cluster and p != push]:
            self.drop_push(other)

    def forget_push(self, push: PushId) -> None:
        """Forget a push that was folded, or half folded: its slot is free or acc, and it cannot be opened again."""
        self.closed_pushes.close(push)
        if push in self.versions.open_pushes:
            self.versions.free_slot(push)
        self._remove_push(push)

    def staged_push(self, push: PushId) -> Receiving:
        """Return a staged push; raise StalePush if it is not open, LocalProtocolError if it still moves."""
        if push not in self.pushes:
            raise StalePush(f"push {push} is not open; open: {', '.join(map(str, self.pushes)) or 'none'}")
        known = self.pushes[push]
        if known.nbytes is None:
            raise LocalProtocolError(f"push {push} is still moving; it was never reported staged")
        return known

    def mark_measured(self, push: PushId, number: int) -> None:
        """Record that a staged push was measured in a round."""
        self.pushes[push].measured = number
        self.staged.pop(push, None)

    def forget_measures(self) -> None:
        """Forget which pushes were measured: the round is over."""
        for known in self.pushes.values():
            known.measured = None
        self.staged = {push: None for push, known in self.pushes.items() if known.nbytes is not None}

    # ---- pulls --------------------------------------------------------------------------------

    def open_pull(self, order: OpenPull, opened: Opened) -> Done | Pinned:
        """Pin a version and serve it; a pull that is already open on that version stays as it is.

        Raise StalePush if it is open on another: a new master does not know what the old one granted.
        """
        pull = order.pull
        momentum = self._find_momentum(order.version) if order.momentum else None
        answer = Done() if momentum is None else Pinned(momentum[1])
        if pull in self.pulls:
            pinned = self.versions.held.version_read_by(pull)
            if pinned != order.version:
                raise StalePush(f"{pull} is open on {pinned}, not {order.version}")
            self.pulls[pull] = opened
            return answer
        self.closed_pulls.refuse_closed(pull)
        if momentum is None:
            source = self._pin_version(pull, order.version)
        else:
            source = momentum[0]
            self.versions.held.pin_file(pull, order.version)
        try:
            chain = self.versions.pin_updates(pull, order.version) if momentum is None else ()
            self.flow.open_pull(pull, order.version, source, chain, order.keys)
        except BaseException:
            self.versions.unpin_version(pull)
            raise
        self.pulls[pull] = opened
        return answer

    def _find_momentum(self, version: VersionId) -> tuple[Arrays, tuple[str, ...]]:
        """Return m of a snapshot, which memory has of the served version alone, and changes, with the digests."""
        found = self.disk.map_momentum(version)
        if found is not None:
            return found
        self._refuse_unread(version)
        raise StaleVersion(f"m of {version} is asked for, and no snapshot of it is on the disk")

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
                self._refuse_unread(version)
                raise
        self.versions.held.pin_file(pull, version)
        return source

    def _refuse_unread(self, version: VersionId) -> None:
        """Raise UnreadSnapshot if a snapshot is on the disk and nobody has read it; FailedDisk if that is not known."""
        try:
            unread = self.disk.unread_versions()
        except OSError as error:
            raise FailedDisk(f"whether {version} is on the disk cannot be told: {error}") from error
        if version in unread:
            raise UnreadSnapshot(f"{version} on the disk must be read and verified first") from None

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
            if pull not in self.pulls and not self.closed_pulls.is_closed(pull):
                self.open_pull(OpenPull(pull, order.version, ranks.keys), opened)

    def close_pull(self, pull: PullId) -> None:
        """Stop serving a pull and set the tombstone; the pin ends with the flow's Released."""
        self.closed_pulls.close(pull)
        if self.pulls.pop(pull, None) is not None:
            self.flow.close_pull(pull)

    def on_flow_event(self, event: FlowEvent) -> None:
        """Record an event of the data flow; one for a push that was dropped meanwhile changes nothing."""
        match event:
            case Staged(push, nbytes):
                known = self.pushes.get(push)
                if known is not None and known.nbytes is None:
                    known.nbytes = nbytes
                    self.staged[push] = None
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


# ---- shard round ----------------------------------------------------------------------------------------------------
# The outer step of one shard: the open round, from its first Measure to its Commit or Abort.
#
# What must stay true: a version is served only after its Commit; an order that fails half-way poisons its round, and
# then only Abort is legal. The first order of a later round proves that the former one ended without a row (its Abort
# was lost): presumed abort. Synchronous; it does not know fences and repetitions (Shard).
#
# `ShardSnapshots` tracks the shard's disk work meanwhile. Disk space for a snapshot is reserved before anything is
# computed, and released when its version will not be written. While a version is written on another thread, its θ and m
# must stay: those of a round that is aborted meanwhile stay until the writer has noticed.


class ShardRound:
    """The open round of one shard, and its base and prepared versions."""

    def __init__(
        self,
        name: str,
        versions: Versions,
        disk: Disk,
        flow: Flow,
        transfers: OpenTransfers,
        snapshots: ShardSnapshots,
    ) -> None:
        self.versions = versions
        self.number: int | None = None  # None between rounds
        self.poison: str | None = None  # why only Abort of it is legal
        self._name, self._disk, self._flow = name, disk, flow
        self._transfers, self._snapshots = transfers, snapshots
        self._last = 0

    def measure(self, order: Measure) -> Answer:
        """Legal for a staged push when θ is at the order's version and nothing is prepared; begins the round."""
        self._enter_round(order.round)
        if self.versions.served_version != order.version:
            raise StaleVersion(f"expected to measure against {self.versions.served_version}, got {order.version}")
        self._transfers.staged_push(order.push)
        with self._poison_on_error(f"Measure of {order.push}"):
            found = self.versions.measure_push(order.push)
        self._transfers.mark_measured(order.push, order.round)
        return Measured(found.layer_sq, all(map(isfinite, found.layer_sq)), found.layer_dot, found.digest)

    def fold(self, order: Fold) -> Answer:
        """Legal once for a push measured in this round; frees its slot."""
        self._enter_round(order.round)
        known = self._transfers.staged_push(order.push)
        if known.measured != order.round:
            raise LocalProtocolError(f"push {order.push} was not measured in round {order.round}")
        with self._poison_on_error(f"Fold of {order.push}"):
            self._flow.drop_push(order.push)
            try:
                return Folded(self.versions.fold_push(order.push, order.weight, order.layer_weights))
            finally:
                self._transfers.forget_push(order.push)

    def apply(self, order: Apply) -> Answer:
        """Legal when something is folded; computes θ′, m′ beside θ, m. Busy while readers use the bank of θ′.

        Disk space for the snapshot is reserved first, so that a full disk is found while nothing is lost.
        """
        self._enter_round(order.round)
        memory = self.versions.served_version
        if memory is None or order.version != VersionId(memory.version + 1, order.round):
            raise LocalProtocolError(f"Apply of {order.version} in round {order.round} cannot follow {memory}")
        if not self.versions.folded:
            raise LocalProtocolError(f"Apply of {order.version}: no push is folded in round {order.round}")
        self._snapshots.require_idle(f"Apply of {order.version}")
        if order.reserve:
            self._snapshots.reserve_room(order.version, 2 * BYTES_PER_PARAMETER * self.versions.numel)  # θ and m
        self._transfers.move_old_readers()
        with self._poison_on_error(f"Apply of {order.version}"):
            made = self.versions.prepare_version(order.version, order.step)
        return Prepared(order.version, made.layer_sq, made.digest)

    def abort(self, order: Abort) -> None:
        """Abandon a round that has no ledger row; a round older than the open one is over already, and is ignored."""
        memory = self.versions.served_version
        if memory is not None and memory != GENESIS and memory.round == order.round:
            raise LocalProtocolError(f"Abort of round {order.round}, which is committed as {memory}")
        if self.number is None or order.round >= self.number:
            self.end_round()
        self._last = max(self._last, order.round)

    def _enter_round(self, round_: int) -> None:
        """Enter `round_`; a later one than the open one presumes that one aborted, unless it is in doubt."""
        if self.versions.prepared is not None:
            raise LocalProtocolError(
                f"round {round_}: {self.versions.prepared} is prepared, neither committed nor aborted"
            )
        if round_ < self._last or (round_ == self._last and self.number is None):
            raise Stale(f"round {round_} is over; the last one at {self._name} was {self._last}")
        if round_ != self.number:
            self.end_round()
            self.number = self._last = round_
        if self.poison is not None:
            raise LocalProtocolError(f"round {round_}: {self.poison}; only Abort is legal")

    def end_round(self) -> None:
        """Forget the open round and its prepared version: presumed abort."""
        self._snapshots.release_room(unless=self.versions.served_version)
        if self.versions.prepared is not None:
            self._snapshots.give_up(self.versions.prepared)
        self.versions.abort_round(written=self._snapshots.writing)
        self._transfers.forget_measures()
        self.number = self.poison = None

    def flip_version(self, version: VersionId) -> None:
        """Serve the prepared version. Idempotent."""
        if self.versions.served_version == version:
            return
        if self.versions.prepared != version:
            raise StaleVersion(
                f"Commit of {version}: {self._name} serves {self.versions.served_version}, "
                f"prepared is {self.versions.prepared}"
            )
        self._snapshots.require_idle(f"Commit of {version}", unless=version)
        self.versions.flip_version(version)
        self.end_round()
        self._transfers.move_old_readers()  # now, so that the next Apply finds its bank free

    def begin_load(self, version: VersionId) -> Read:
        """Return the function that reads a version's snapshot, for any thread; drops every push and closes every pull.

        The former version is served until `end_load`; orders that need one version or the other are Busy meanwhile.
        """
        if self._snapshots.writing in (None, self.versions.prepared):
            self.end_round()  # the writer of what is prepared may stop; the load is tried again
        self._snapshots.require_idle(f"Load of {version}")
        self._transfers.drop_all()
        self._transfers.move_old_readers()
        theta, momentum = self.versions.begin_load(version)
        return lambda: self._disk.read_snapshot(version, theta, momentum)

    @contextmanager
    def _poison_on_error(self, what: str) -> Iterator[None]:
        """Poison the round on an exception, which may have left work half done; Busy is raised before any work."""
        try:
            yield
        except Busy:
            raise
        except Exception as error:
            self.poison = f"{what} failed: {error!r}"
            if isinstance(error, DipsError):
                raise
            raise LocalProtocolError(f"{self._name}: {self.poison}") from error


class ShardSnapshots:
    """The disk work of one shard; at most one snapshot has space reserved, at most one is written beside orders."""

    def __init__(self, name: str, disk: Disk) -> None:
        self._name, self._disk = name, disk
        self._reserved: VersionId | None = None
        self.writing: VersionId | None = None  # on another thread
        self.deleting = False  # on another thread
        self._wanted = True  # whether the snapshot being written is still wanted

    def reserve_room(self, version: VersionId, nbytes: int) -> None:
        """Reserve disk space for `nbytes` of θ and m; raise FailedDisk if there is none, BusyDisk while some is being
        freed.
        """
        if self._reserved != version:
            self.release_room()
        try:
            self._disk.reserve_room(version, nbytes)
        except OSError as error:
            if self.deleting:
                raise BusyDisk(
                    f"the snapshot of {version} waits for the room of those that are being deleted"
                ) from error
            raise FailedDisk(f"{self._name} has no room for the snapshot of {version}: {error}") from error
        self._reserved = version

    def release_room(self, unless: VersionId | None = None) -> None:
        """Release reserved space, unless it is for a version that still waits for its snapshot."""
        if self._reserved is not None and self._reserved != unless:
            self._disk.release_room(self._reserved)
            self._reserved = None

    def require_idle(self, what: str, unless: VersionId | None = None) -> None:
        """Raise BusyDisk while a snapshot is being written, unless it is of the version `unless`."""
        if self.writing is not None and self.writing != unless:
            raise BusyDisk(f"{what} waits: the snapshot of {self.writing} is being written")

    def begin_writing(self, version: VersionId, theta: Arrays, momentum: Arrays) -> DiskWork:
        """Return the function that writes a snapshot into its reserved space and returns its digest.

        `writing` names the version meanwhile; the caller sets it to None at the end.
        """
        assert self.writing is None, "orders to the disk come one after another"
        if self._reserved == version:
            self._reserved = None
        self.writing, self._wanted = version, True

        def write_snapshot() -> Answer:
            return Persisted(version, self._disk.write_snapshot(version, theta, momentum, lambda: self._wanted))

        return self._work_on_disk(f"write the snapshot of {version}", write_snapshot)

    def give_up(self, version: VersionId) -> None:
        """Stop the writer of a version that will not exist; it notices soon."""
        if self.writing == version:
            self._wanted = False

    def begin_deleting(self, versions: tuple[VersionId, ...]) -> DiskWork:
        """Return the function that deletes snapshots; `deleting` is True meanwhile."""
        self.deleting = True
        return self._work_on_disk("delete snapshots", lambda: self._disk.delete_snapshots(versions))

    def begin_reading(self, version: VersionId) -> DiskWork:
        """Return the function that reads and verifies a snapshot; a damaged one is not offered any more."""

        def read_snapshot() -> None:
            self._disk.complete_versions((version,))

        return self._work_on_disk(f"read {version}", read_snapshot)

    def begin_keeping(self, theta: Arrays) -> DiskWork:
        """Return the function that writes v0@r0 durably, if the digests agree."""
        return self._work_on_disk("write the first model", lambda: self._disk.keep_initial(theta))

    def begin_keeping_model(self, version: VersionId, theta: Arrays, digests: tuple[str, ...]) -> DiskWork:
        """Return the function that writes a recovered version durably, with m of the newest snapshot."""

        def keep_model() -> Answer:
            return ModelKept(*self._disk.keep_model(version, theta, digests))

        return self._work_on_disk(f"write {version}", keep_model)

    def _work_on_disk(self, what: str, work: Callable[[], Answer | None]) -> DiskWork:
        def run() -> Answer:
            try:
                return work() or Done()
            except OSError as error:
                raise FailedDisk(f"{self._name} cannot {what}: {error}") from error

        return run


# ---- shard ----------------------------------------------------------------------------------------------------------
# One slave's layers, and the effects of its master's orders on them: fences, orders, registration.
#
# Synchronous and deterministic: no thread, clock or socket. One owner calls it, in the daemon the shard's thread, in
# the simulation the simulated world. What must stay true: an order is carried out once however often it comes; an order
# with an old term, incarnation, round or seq changes nothing; a version is served only after its Commit; an order that
# fails half-way poisons its round, and then only Abort is legal. It does not know how bytes move (Flow) or are kept
# (Disk). The rounds are in ShardRound, the pushes and pulls in OpenTransfers.
#
# The first order of a later round proves that the former one ended without a row (its Abort was lost): presumed abort.


# A load replaces the version that these refer to.
NEED_A_VERSION = (e.OpenPush, e.Measure, e.Fold, e.Apply, e.Commit, e.OpenPull)
REMEMBERED = 4096  # answers of a term, and unanswered orders; more than a master ever has open at one slave


class Followed(Enum):
    """The result of following an order of a registration."""

    SERVES = "it was told Hold"
    WAITS = "there was nothing to do: register again later"
    DONE = "it holds something else now: register again at once"


@dataclass(frozen=True, slots=True)
class Unfollowed:
    """The order of a registration could not be followed."""

    reason: str


class Shard:
    """One slave's layers, and the operations on them.

    `on_flow_event` is called by the data flow, on its threads, and calls `transfers.on_flow_event` on the one thread
    that owns the shard; without it the flow calls the latter itself. `prepare` is called with the master's answer to
    each Register before anything of it is used: it may refuse, for good.
    """

    def __init__(
        self,
        name: str,
        versions: Versions,
        disk: Disk,
        flow: Flow,
        on_flow_event: Callable[[FlowEvent], None] | None = None,
        prepare: Callable[[e.Registered], None] = lambda registered: None,
    ) -> None:
        self.name = name
        self.versions = versions
        self.reason = ""  # why this slave does not hold what it was ordered to hold
        self.fences = OrderFences(name)
        self.transfers = OpenTransfers(versions, flow, disk)
        self._manifest: Manifest | None = None  # the run's, once it is known
        self._disk, self._flow, self._prepare = disk, flow, prepare
        self._on_flow_event = on_flow_event or self.transfers.on_flow_event
        self._snapshots = ShardSnapshots(name, disk)
        self.rounds = ShardRound(name, versions, disk, flow, self.transfers, self._snapshots)

    @property
    def term(self) -> int:
        return self.fences.term

    @property
    def sinc(self) -> int:
        """This incarnation's number, 0 before the first `on_registered`."""
        return self.fences.sinc

    def take_standing(self) -> Standing:
        """Return the state of the shard for a heartbeat."""
        held, staged = self.versions, tuple(self.transfers.staged)
        serves = bool(self.transfers.pushes or self.transfers.pulls)
        return Standing(self.sinc, self.term, held.served_version, staged, held.used_bytes, held.limit_bytes, serves)

    def take_reports(self) -> list[Report]:
        """Return the reports for the master since the last call, oldest first."""
        reports, self.transfers.reports = self.transfers.reports, []
        return reports

    def perform_work(self, work: ShardWork) -> object:
        """Call the method that the slave's core asks for, one of those below."""
        return getattr(self, work.method)(*work.arguments)

    # ---- orders --------------------------------------------------------------------------------

    def execute_order(self, order: e.Order) -> Answer:
        """Carry out an order, or repeat the answer that it got before.

        Raises Stale… (fences), Busy (no slot, no bank; nothing changed: ask again), LocalProtocolError (illegal now),
        FailedDisk (no space, or it broke; nothing else changed), or the error that poisoned the round.
        """
        remembered = self.fences.admit_order(order)
        if remembered is not None:
            return remembered
        if isinstance(order.body, NEED_A_VERSION):
            self._require_loaded(order)
        answer = self._carry_out(order.body, (order.term, order.number))
        self.fences.remember_answer(order, answer)
        return answer

    def _carry_out(self, order: e.OrderBody, opened: Opened) -> Answer:
        """Carry out an order that needs no disk. Orders without a remark here are always legal."""
        match order:
            case e.OpenPush():
                self._open_push(order, opened)
            case e.Reorder():  # ignored for a push that does not move here
                self.transfers.reorder_push(order.push, order.places)
            case e.DropPush():  # frees the slot and sets the tombstone
                self.transfers.drop_push(order.push)
            case e.Measure():
                return self.rounds.measure(order)
            case e.Fold():
                return self.rounds.fold(order)
            case e.Apply():
                return self.rounds.apply(order)
            case e.Commit():  # legal for what is prepared or served already
                self.rounds.flip_version(order.version)
                self.transfers.open_pulls(order, opened)
            case e.Abort():
                self.rounds.abort(order)
            case e.OpenPull():  # legal for a version that is held; pins it until the pull's readers are done
                return self.transfers.open_pull(order, opened)
            case e.ClosePull():  # the pin ends when the last byte in flight is gone
                self.transfers.close_pull(order.pull)
            case e.AdmitProbe():  # a cluster's later key replaces its former one
                self._flow.admit_probe(order.cluster, order.key)
            case e.Ping():
                pass
            case e.Persist() | e.Retire() | e.KeepSeed():
                raise AssertionError(f"{type(order).__name__} is not carried out here: begin_disk_order")
        return Done()

    def _open_push(self, order: e.OpenPush, opened: Opened) -> None:
        """Legal when a version is held, or to seed a model; reserves a slot; above the tombstone. Idempotent."""
        if order.seed:
            self.transfers.drop_others(order.push)  # of a master that did not live to drop it
        elif self.versions.served_version is None:
            raise StaleVersion(f"{self.name} holds no version yet, so it opens no push")
        self.transfers.open_push(order, opened)

    def _require_loaded(self, order: e.Order) -> None:
        """Raise Busy while a version is loaded: the order came before this slave registered, and what it names is not
        here.
        """
        if self.versions.loading is not None:
            raise Busy(f"{type(order.body).__name__} waits: {self.versions.loading} is being loaded")

    # ---- orders to the disk --------------------------------------------------------------------

    def begin_disk_order(self, order: e.Order) -> Answer | DiskWork:
        """Return the disk work of a Persist, a Retire, a KeepSeed, or an OpenPull that `execute_order` has refused as
        UnreadSnapshot, for any thread; or the remembered answer.

        Persist is legal for the prepared or served version. Until `end_disk_order` θ and m must stay: Apply and Load
        are Busy (docs/protocol.md#memory). A disk that fails leaves θ′ as it is. Retire is legal for versions that this
        slave neither serves nor prepares nor loads; it deletes their snapshots. KeepSeed is legal for a push that is
        staged.
        """
        remembered = self.fences.admit_order(order)
        if remembered is not None:
            return remembered
        if isinstance(order.body, e.Retire):
            return self._begin_retire(order.body)
        if isinstance(order.body, e.OpenPull):
            return self._snapshots.begin_reading(order.body.version)
        if isinstance(order.body, e.KeepSeed):
            self.transfers.staged_push(order.body.push)
            theta, version = self.versions.slot_arrays(order.body.push), order.body.version
            if version is not None:
                return self._snapshots.begin_keeping_model(version, theta, order.body.digests)
            return self._snapshots.begin_keeping(theta)
        assert isinstance(order.body, e.Persist)
        self._require_loaded(order)
        return self._snapshots.begin_writing(order.body.version, *self._to_write(order.body))

    def end_disk_order(self, order: e.Order, result: Answer | Exception) -> Answer:
        """Record the end of disk work: return its answer, or raise its error.

        The answer to an order of a master that has a successor is not remembered.
        """
        if isinstance(order.body, e.Retire):
            self._snapshots.deleting = False
        elif isinstance(order.body, e.Persist):
            self._snapshots.writing = None
            self.versions.free_abandoned()
        if isinstance(result, Exception):
            raise result
        if isinstance(order.body, e.OpenPull):  # refused if what was read is damaged
            return self.execute_order(order)
        if order.term == self.term:
            self.fences.remember_answer(order, result)
        return result

    def _begin_retire(self, order: e.Retire) -> DiskWork:
        held = {self.versions.served_version, self.versions.prepared, self.versions.loading}
        needed = sorted(version for version in order.versions if version in held)
        if needed:
            raise LocalProtocolError(
                f"Retire names {', '.join(map(str, needed))}, which {self.name} serves, prepares or loads"
            )
        return self._snapshots.begin_deleting(order.versions)

    def _to_write(self, order: e.Persist) -> tuple[Arrays, Arrays]:
        held = (self.versions.prepared, self.versions.served_version)
        if order.version not in held:
            raise LocalProtocolError(f"Persist of {order.version}: prepared is {held[0]}, served {held[1]}")
        return self.versions.theta(order.version), self.versions.momentum(order.version)

    # ---- registration --------------------------------------------------------------------------

    def make_registration(self, identity: SlaveIdentity, look_for: tuple[VersionId, ...] = ()) -> SlaveRegistered:
        """Return the Register that describes what this slave holds, after those of `look_for` were read; may raise
        OSError from the disk.
        """
        return SlaveRegistered(
            req=0,
            slave=self.name,
            nonce=identity.nonce,
            run=identity.run,
            address=identity.address,
            lanes=identity.lanes,
            term_seen=self.term,
            memory=self.versions.served_version,
            prepared=self.versions.prepared,
            complete=self._disk.complete_versions(look_for),
            unread=self._disk.unread_versions(),
            slots=self.versions.slots,
            reason=self.reason,
            key=identity.key,
            manifest_digest=self._manifest.digest if self._manifest else "",
            unseeded=not self._disk.holds_initial(),
        )

    def learn_manifest(self, registered: e.Registered) -> Manifest:
        """Return the run's manifest, which comes with the first answer; raise CorruptManifest if it cannot be read."""
        if registered.manifest:
            self._manifest = Manifest.from_json(registered.manifest)
        if self._manifest is None:
            raise CorruptManifest("the master sent no manifest, and this slave knows none")
        return self._manifest

    def on_registered(self, registered: e.Registered) -> None:
        """Take the incarnation, the term and, the first time, the layers: memory is allocated here.

        Raises StaleTerm for the answer of an old master, CorruptManifest if the manifest cannot be read,
        RemoteProtocolError if the master gives it no place among its slaves, and errors of `prepare`.
        """
        self._prepare(registered)
        if not 0 <= registered.place < registered.slaves:
            raise RemoteProtocolError(f"Registered: place {registered.place} of {registered.slaves} slaves")
        manifest = self.learn_manifest(registered)
        self.fences.see_term(registered.term, "Registered")
        self.transfers.place, self.transfers.slaves = registered.place, registered.slaves
        layers = {index: manifest.layers[index] for index in registered.layers}
        fields = {
            i: tuple(zip(x.param_offsets(), (p.numel for p in x.parameters), strict=True)) for i, x in layers.items()
        }
        averaged = frozenset(i for i, layer in layers.items() if layer.averaged)
        self.versions.allocate_banks({i: layer.numel for i, layer in layers.items()}, fields, averaged)
        if registered.sinc != self.sinc:
            self.transfers.drop_all()
            self.fences.sinc = registered.sinc
            self._flow.start(registered.sinc, self._on_flow_event)

    def follow_order(self, order: e.SlaveOrder) -> Followed | Unfollowed | Read:
        """Follow the order in the answer to a Register; if it fails, the reason goes with the next Register and nothing
        changes.

        For a load, return the function that reads the snapshot, on any thread, since that takes as long as the disk
        does; `end_load` must follow.
        """
        if isinstance(order, e.RegisterLater):
            return Followed.WAITS
        if isinstance(order, e.Hold):
            self.reason = ""
            return Followed.SERVES
        try:
            read = self._follow_version(order)
        except (Busy, Corrupt, Stale, OSError) as error:
            return self._keep_reason(order, error)
        if read is not None:
            return read
        self.reason = ""
        return Followed.DONE

    def _follow_version(self, order: e.LoadVersion | e.CommitVersion | e.AbortVersion) -> Read | None:
        prepared, memory = self.versions.prepared, self.versions.served_version
        if isinstance(order, e.AbortVersion):
            if memory == order.version:
                # The Commit was being carried out when this slave registered, and the master has rolled the version
                # back since: it must learn which version is served here now, and will order a load (seed 64).
                raise StaleVersion(f"{order.version} is committed and served here, and was to be aborted")
            if prepared == order.version:
                self.rounds.end_round()
        elif prepared == order.version:
            self.rounds.flip_version(order.version)
        elif memory == order.version:
            self.rounds.end_round()
        elif isinstance(order, e.CommitVersion):
            raise StaleVersion(f"{order.version} is neither prepared nor served here, and was to be committed")
        else:
            return self.rounds.begin_load(order.version)
        return None

    def end_load(self, order: e.LoadVersion, error: Exception | None) -> Followed | Unfollowed:
        """Serve the version whose snapshot was read; if it could not be, the former version is still served."""
        self.versions.end_load(error is None)
        if error is None:
            self.reason = ""
            return Followed.DONE
        if not isinstance(error, Corrupt | OSError):
            raise error
        return self._keep_reason(order, error)

    def _keep_reason(self, order: e.LoadVersion | e.CommitVersion | e.AbortVersion, error: Exception) -> Unfollowed:
        self.reason = f"{type(order).__name__} {order.version}: {error}"
        return Unfollowed(self.reason)

    def drop_unlisted(self, answer: SlaveHeartbeatAnswer) -> list[str]:
        """Drop transfers that the master does not list as live and should know; return their names.

        An answer that says `register` has no usable list; one of an old term changes nothing.
        """
        if answer.register or answer.live is None or answer.term < self.term:
            return []
        return self.transfers.drop_unlisted(answer.live.pushes, answer.live.pulls, (answer.term, answer.as_of))


class OrderFences:
    """Refuses outdated orders and makes repeated ones harmless; it does not know what an order does.

    There are three fences: the master's term (highest seen), this slave's incarnation, and the order's number, under
    which the answer is remembered. An order that is Busy or being carried out has no answer yet, however many later
    orders have. A term rises only with the answer to this slave's own Register, since the slave chose whom it asked; an
    order of a later term is sent again until then.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self.term = 0
        self.sinc = 0  # 0: not yet registered
        self._answers: OrderedDict[int, tuple[e.OrderBody, Answer]] = OrderedDict()
        self._forgotten = -1  # the highest number whose answer is no longer remembered
        self._begun: OrderedDict[int, None] = OrderedDict()  # numbers of admitted orders without an answer

    def see_term(self, term: int, whose: str) -> None:
        """Record a master's term; raise StaleTerm if it has a successor, RemoteProtocolError if it is absurd."""
        if term < self.term:
            raise StaleTerm(f"{whose} bears term {term}; {self._name} has seen term {self.term}")
        if term > self.term + MOST_TERMS_AHEAD:
            most = self.term + MOST_TERMS_AHEAD  # believing it would lock out the true master for ever
            raise RemoteProtocolError(f"{whose} bears term {term}; {self._name} expected at most {most}")
        if term > self.term:
            self.term = term
            self._answers, self._begun, self._forgotten = OrderedDict(), OrderedDict(), -1

    def admit_order(self, order: e.Order) -> Answer | None:
        """Return None for a new order, or the remembered answer; raise if the order is not for this incarnation."""
        what = f"order {order.number} ({type(order.body).__name__})"
        if order.slave != self._name:
            raise RemoteProtocolError(f"{what} is for {order.slave}, and came to {self._name}")
        if order.term > self.term:  # otherwise anyone who reaches our port could lock out the true master
            raise UnavailableSlave(f"{what} bears term {order.term}; {self._name} follows it as soon as it registers")
        self.see_term(order.term, what)
        if order.sinc != self.sinc:
            raise StaleIncarnation(f"{what} is for incarnation {order.sinc} of {self._name}, this is {self.sinc}")
        if order.number in self._answers:
            body, answer = self._answers[order.number]
            if body != order.body:
                raise LocalProtocolError(f"{what} was {body} before and is {order.body} now")
            return answer
        if order.number <= self._forgotten and order.number not in self._begun:
            raise Stale(f"{what} is older than the last {REMEMBERED} answers of term {self.term}")
        self._begun[order.number] = None
        if len(self._begun) > REMEMBERED:
            self._begun.popitem(last=False)
        return None

    def has_answered(self, number: int) -> bool:
        """Whether the answer of an order of this term is remembered."""
        return number in self._answers

    def remember_answer(self, order: e.Order, answer: Answer) -> None:
        """Remember the answer for repetitions."""
        self._begun.pop(order.number, None)
        self._answers[order.number] = (order.body, answer)
        if len(self._answers) > REMEMBERED:
            number, _ = self._answers.popitem(last=False)
            self._forgotten = max(self._forgotten, number)
