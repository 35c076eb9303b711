"""The deciding part of a slave: takes orders, keeps its round, follows the order it gets when it registers.

Synchronous and deterministic: no thread, clock or socket. One owner calls it, in the daemon the order thread, in the
simulation the simulated world. What must stay true: an order is carried out once however often it comes; what bears
an old term, incarnation, round or seq changes nothing; a version is served only after its Commit; an order that fails
half-way poisons its round, and then only Abort is legal. It does not know how bytes move (Flow) or are kept (Disk).

The first order of a later round proves that the one before ended without a row (its Abort was lost): presumed abort.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dips.errors import Busy, CorruptManifest, LocalProtocolError, RemoteProtocolError, StaleVersion
from dips.ids import PushId
from dips.outer.versions import Versions
from dips.protocol import effects as e
from dips.protocol.events import Answer, Done, SlaveRegistered
from dips.protocol.heartbeats import SlaveHeartbeatAnswer
from dips.protocol.manifest import Manifest
from dips.slave.open_transfers import Opened, OpenTransfers, Report
from dips.slave.order_fences import OrderFences
from dips.slave.ports import Arrays, Disk, Flow, FlowEvents
from dips.slave.shard_registration import Followed, Read, Unfollowed, end_load, follow_order
from dips.slave.shard_round import ShardRound
from dips.slave.shard_snapshots import DiskWork, ShardSnapshots

# A load takes the place of what these are about.
NEED_A_VERSION = (e.OpenPush, e.Measure, e.Fold, e.Apply, e.Commit, e.OpenPull)


class Shard:
    """One slave's layers, and what may be done to them.

    `inbox` is where the data flow reports from its threads; its owner then calls `staged`, `refused` and `released`
    here, on the one thread that owns the shard. Without an inbox the flow calls the shard itself.
    """

    def __init__(self, name: str, versions: Versions, disk: Disk, flow: Flow, inbox: FlowEvents | None = None) -> None:
        self.name = name
        self.versions = versions
        self.reason = ""  # why this slave does not hold what it was ordered to hold
        self._manifest: Manifest | None = None  # the run's, once it was told
        self._disk = disk
        self._snapshots = ShardSnapshots(name, disk)
        self._flow = flow
        self.transfers = OpenTransfers(versions, flow, disk)
        self._inbox: FlowEvents = inbox or self.transfers
        self._fences = OrderFences(name)
        self.rounds = ShardRound(name, versions, disk, flow, self.transfers, self._snapshots)
        self._orders: dict[type, Callable[[Any, Opened], Answer]] = {
            e.OpenPush: self._open_push,
            e.Reorder: self._reorder_push,
            e.DropPush: self._drop_push,
            e.Measure: self.rounds.measure,
            e.Fold: self.rounds.fold,
            e.Apply: self.rounds.apply,
            e.Commit: self.rounds.commit,
            e.Abort: self.rounds.abort,
            e.OpenPull: self._open_pull,
            e.ClosePull: self._close_pull,
            e.AdmitProbe: self._admit_probe,
            e.Ping: self._answer_ping,
        }

    @property
    def term(self) -> int:
        return self._fences.term

    @property
    def sinc(self) -> int:
        """This incarnation's number, 0 before the first `on_registered`."""
        return self._fences.sinc

    @property
    def round(self) -> int | None:
        """The open round."""
        return self.rounds.number

    @property
    def poison(self) -> str | None:
        """Why only Abort of the open round is legal."""
        return self.rounds.poison

    @property
    def staged_pushes(self) -> tuple[PushId, ...]:
        """Pushes that are full and not measured: every heartbeat names them."""
        return self.transfers.staged_pushes()

    # ---- orders --------------------------------------------------------------------------------

    def execute_order(self, order: e.Order) -> Answer:
        """Carry out an order, or repeat the answer that it got before.

        Raises Stale… (fences), Busy (no slot, no bank; nothing changed: ask again), LocalProtocolError (illegal now),
        FailedDisk (no room, or it broke; nothing else changed), or whatever poisoned the round.
        """
        remembered = self._fences.admit_order(order)
        if remembered is not None:
            return remembered
        if isinstance(order.body, NEED_A_VERSION):
            self._require_loaded(order)
        answer = self._orders[type(order.body)](order.body, (order.term, order.number))
        self._fences.remember_answer(order, answer)
        return answer

    def has_answered(self, number: int) -> bool:
        """Whether an order with this number, in this term, has been carried out."""
        return self._fences.has_answered(number)

    def _open_push(self, order: e.OpenPush, opened: Opened) -> Answer:
        """Legal when a version is held, or to bring v0@r0; reserves a slot; above the tombstone; a repetition changes
        nothing.
        """
        if order.seed:
            self.transfers.drop_others(order.push)  # of a master that did not live to drop it
        elif self.versions.served_version is None:
            raise StaleVersion(f"{self.name} holds no version yet, so it opens no push")
        self.transfers.open_push(order, opened)
        return Done()

    def _reorder_push(self, order: e.Reorder, opened: Opened) -> Answer:
        """Always legal; a push that does not move here has nothing to be ordered."""
        self.transfers.reorder_push(order.push, order.places)
        return Done()

    def _drop_push(self, order: e.DropPush, opened: Opened) -> Answer:
        """Always legal; frees the slot, sets the tombstone."""
        self.transfers.drop_push(order.push)
        return Done()

    def begin_disk_order(self, order: e.Order) -> Answer | DiskWork:
        """Return what a Persist, a Retire or a KeepSeed does on any thread, or the answer that was given before.

        Persist is legal for what is prepared, or served. Until `end_disk_order` nothing may take θ and m away: Apply
        and Load are Busy (docs/protocol.md#memory). A disk that fails leaves θ′ as it is. Retire is legal for versions
        that this slave neither serves nor prepares nor loads; it deletes their snapshots. KeepSeed is legal for a push
        that is staged.
        """
        remembered = self._fences.admit_order(order)
        if remembered is not None:
            return remembered
        if isinstance(order.body, e.Retire):
            return self._begin_retire(order.body)
        if isinstance(order.body, e.KeepSeed):
            self.transfers.staged_push(order.body.push)
            return self._snapshots.begin_keeping(self.versions.slot_arrays(order.body.push))
        assert isinstance(order.body, e.Persist)
        self._require_loaded(order)
        return self._snapshots.begin_writing(order.body.version, *self._to_write(order.body))

    def end_disk_order(self, order: e.Order, answer: Answer | None) -> None:
        """The work has ended; `answer` is None if it failed. What a master with a successor ordered is forgotten."""
        if isinstance(order.body, e.Retire):
            self._snapshots.deleting = False
        elif isinstance(order.body, e.Persist):
            self._snapshots.writing = None
            self.versions.free_abandoned()
        if answer is not None and order.term == self.term:
            self._fences.remember_answer(order, answer)

    def _require_loaded(self, order: e.Order) -> None:
        """It came before this slave registered, and overtakes nothing: what it names is not here now."""
        if self.versions.loading is not None:
            raise Busy(f"{type(order.body).__name__} waits: {self.versions.loading} is being loaded")

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
        if order.version == self.versions.prepared and self.rounds.poison is not None:
            raise LocalProtocolError(f"Persist of {order.version}: {self.rounds.poison}; only Abort is legal")
        return self.versions.theta(order.version), self.versions.momentum(order.version)

    def _open_pull(self, order: e.OpenPull, opened: Opened) -> Answer:
        """Legal for a version that is held; pins it until the pull's readers are done."""
        self.transfers.open_pull(order, opened)
        return Done()

    def _close_pull(self, order: e.ClosePull, opened: Opened) -> Answer:
        """Always legal; the pin ends when the last byte in flight is gone."""
        self.transfers.close_pull(order.pull)
        return Done()

    def _admit_probe(self, order: e.AdmitProbe, opened: Opened) -> Answer:
        """Always legal; a cluster's later key replaces its former one."""
        self._flow.admit_probe(order.cluster, order.key)
        return Done()

    def _answer_ping(self, order: e.Ping, opened: Opened) -> Answer:
        return Done()

    def take_reports(self) -> list[Report]:
        """Return what is to be reported to the master since the last call, oldest first."""
        reports, self.transfers.reports = self.transfers.reports, []
        return reports

    def drop_unlisted(self, answer: SlaveHeartbeatAnswer) -> list[str]:
        """Drop what the master does not list as live and should know; return the names of what was dropped.

        An answer that says `register` lists nothing to go by; one of an old term changes nothing.
        """
        if answer.register or answer.live is None or answer.term < self.term:
            return []
        return self.transfers.drop_unlisted(answer.live.pushes, answer.live.pulls, (answer.term, answer.as_of))

    # ---- registration --------------------------------------------------------------------------------

    def make_registration(
        self, req: int, nonce: str, run: str, address: str, lanes: tuple[str, ...], key: str = ""
    ) -> SlaveRegistered:
        """Say what this slave holds; may raise OSError from the disk."""
        return SlaveRegistered(
            req=req,
            slave=self.name,
            nonce=nonce,
            run=run,
            address=address,
            lanes=lanes,
            term_seen=self.term,
            memory=self.versions.served_version,
            prepared=self.versions.prepared,
            complete=self._disk.complete_versions(),
            slots=self.versions.slots,
            reason=self.reason,
            key=key,
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
        RemoteProtocolError if the master gives it no place among its slaves.
        """
        if not 0 <= registered.place < registered.slaves:
            raise RemoteProtocolError(f"Registered: place {registered.place} of {registered.slaves} slaves")
        manifest = self.learn_manifest(registered)
        self._fences.see_term(registered.term, "Registered")
        self.transfers.place, self.transfers.slaves = registered.place, registered.slaves
        layers = {index: manifest.layers[index] for index in registered.layers}
        fields = {
            i: tuple(zip(x.param_offsets(), (p.numel for p in x.parameters), strict=True)) for i, x in layers.items()
        }
        averaged = frozenset(i for i, layer in layers.items() if layer.averaged)
        self.versions.allocate_banks({i: layer.numel for i, layer in layers.items()}, fields, averaged)
        if registered.sinc != self.sinc:
            self.transfers.drop_all()
            self._fences.sinc = registered.sinc
            self._flow.start(registered.sinc, self._inbox)

    def follow_order(self, order: e.SlaveOrder) -> Followed | Unfollowed | Read:
        """Do what the master said to a Register; a reason why not goes with the next one. Of a load return what reads
        the snapshot, on any thread: `end_load` follows.
        """
        followed = follow_order(self.rounds, order)
        return followed if callable(followed) else self._keep_reason(followed)

    def end_load(self, order: e.LoadVersion, error: Exception | None) -> Followed | Unfollowed:
        """The snapshot was read, or could not be; what was served before is served on then."""
        return self._keep_reason(end_load(self.rounds, order, error))

    def _keep_reason(self, followed: Followed | Unfollowed) -> Followed | Unfollowed:
        if isinstance(followed, Unfollowed):
            self.reason = followed.reason
        elif followed is not Followed.WAITS:
            self.reason = ""
        return followed
