"""The state of the whole run, its indexes, and the methods by which handlers order, record and reply."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice, takewhile
from math import ceil, inf

from dips.codecs import Codec
from dips.dataclass import replace
from dips.errors import StaleIncarnation, UnavailableMaster
from dips.ids import GENESIS, PullId, PushId, VersionId
from dips.printable import join_some
from dips.protocol.admission import SlotQueue
from dips.protocol.data import RangeBook
from dips.protocol.effects import Effect, Failed, Grant, Note, Order, OrderBody, Progress, Reply, Result, SlaveAddress
from dips.protocol.entities import (
    AuditBudget,
    Bodies,
    Cluster,
    Durability,
    Fanout,
    ProbeAdmission,
    Push,
    Rebalance,
    Round,
    Seed,
    Slave,
    Subject,
)
from dips.protocol.enums import (
    ClusterCause,
    ClusterStanding,
    ClusterState,
    FanoutKind,
    RequeuePolicy,
    RoundResult,
    RoundState,
    SlaveCause,
    SlaveState,
)
from dips.protocol.manifest import BYTES_PER_PARAMETER, Manifest
from dips.protocol.options import Options
from dips.protocol.penalty import Penalty
from dips.protocol.records import LedgerState, Record, VersionRow, lies_in
from dips.protocol.transfer_book import Timers, TransferBook, transfer_deadline_s
from dips.protocol.tunable import restore_tuned

# ---- lineage --------------------------------------------------------------------------------------------------------
# The lineage: versions from v0@r0 to the head, oldest first, and which of them may become the head again.
#
# A rollback undoes the versions after its target. So the tokens and ranges of a version are kept as long as an older
# one is on offer, even if its own snapshots are retired: a mirror that lags, or an archived version, keeps an old one
# on offer while newer ones are retired.


def offers_genesis(lineage: Iterable[VersionRow]) -> bool:
    """Whether v0@r0, the initial model that every slave has, may be the head: until a version that all slaves had is
    retired.

    After that, a slave that has only v0@r0 has lost its directory, for which the run must not begin anew. Versions are
    forgotten only after that, so a gap after v0@r0 means the same.
    """
    rows = [row for row in lineage if row.version != GENESIS]
    return not any(row.retired and row.durable for row in rows) and (not rows or rows[0].parent == GENESIS)


def oldest_offered(lineage: Iterable[VersionRow]) -> VersionId:
    """Return the oldest version that may still become the head; shares of older versions are not needed any more."""
    rows = tuple(lineage)
    if offers_genesis(rows):
        return GENESIS
    return next((row.version for row in rows if row.version != GENESIS and not row.retired), rows[-1].version)


# ---- order book -----------------------------------------------------------------------------------------------------
# Unanswered orders to slaves by their number, and their fanouts. Pure.
#
# What must stay true: a fanout is in the book as long as one of its orders is; answers to forgotten orders are ignored.
# The cost of an answer does not depend on the number of open orders.


@dataclass
class OrderBook:
    """All open orders of one term."""

    orders: dict[int, tuple[Fanout, Order]] = field(default_factory=dict)
    fanouts: dict[FanoutKind, dict[int, Fanout]] = field(default_factory=dict)  # by the number of their first order
    last_number: int = 0

    def give_order(self, fanout: Fanout, slave: str, sinc: int, term: int, body: OrderBody, deadline_s: float) -> Order:
        """Number one order of a fanout and add it as unanswered."""
        self.last_number = number = self.last_number + 1
        order = Order(slave, sinc, term, number, body, deadline_s)
        self.orders[number] = (fanout, order)
        fanout.waiting[slave] = number
        fanout.unanswered += 1
        if not fanout.first:
            fanout.first = number
        if fanout.unanswered == 1:
            self.fanouts.setdefault(fanout.kind, {})[fanout.first] = fanout
        return order

    def find_order(self, number: int) -> tuple[Fanout, Order] | None:
        """Return (fanout, order) of the open order with this number; None if it is not open."""
        return self.orders.get(number)

    def remove_order(self, number: int) -> tuple[Fanout, Order]:
        """Remove an order, so that its answer is ignored; its fanout still waits."""
        fanout, _ = found = self.orders.pop(number)
        fanout.unanswered -= 1
        if not fanout.unanswered:
            del self.fanouts[fanout.kind][fanout.first]
        return found

    def forget_fanouts(self, kinds: frozenset[FanoutKind], subject: Subject | None = None) -> None:
        """Remove all orders of these kinds, about `subject` or about anything."""
        for kind in sorted(kinds):
            for fanout in list(self.fanouts.get(kind, {}).values()):
                if subject is None or fanout.subject == subject:
                    for number in fanout.waiting.values():
                        if number in self.orders:
                            self.remove_order(number)

    def orders_of(self, slave: str, *kinds: FanoutKind) -> Iterator[int]:
        """Iterate over the numbers of the open orders to one slave, of these kinds or of any."""
        for kind in kinds or tuple(self.fanouts):
            for fanout in self.fanouts.get(kind, {}).values():
                if (number := fanout.waiting.get(slave, 0)) in self.orders:  # numbers begin with 1
                    yield number


# ---- roster ---------------------------------------------------------------------------------------------------------
# Indexes of the slaves by what is looked up after every event: which are not READY, which drain, which have to be
# heard.
#
# The sets of names here exist nowhere else, except `missing`, `unasked` and the addresses for grants, which follow the
# slaves' own records (entities.py) through the methods of RunState. Pure.


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
    perhaps_behind: Names = field(default_factory=dict)  # whose mirrors may lack the target: see durability.py
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
        slave.slots = slots
        self.unregistered.pop(slave.name, None)
        self.addresses = ()
        self.slots = min(s.slots for s in slaves.values() if s.name not in self.unregistered)

    def list_addresses(self, slaves: Mapping[str, Slave]) -> tuple[SlaveAddress, ...]:
        """Return the addresses of all slaves, for ranks."""
        if not self.addresses:
            self.addresses = tuple(SlaveAddress(s.name, s.sinc, s.lanes, s.layers, s.key) for s in slaves.values())
        return self.addresses


def in_order(slaves: Mapping[str, Slave], names: Iterable[str]) -> list[Slave]:
    """Return the slaves with these names, in the order of the placement."""
    return sorted((slaves[name] for name in names), key=lambda slave: slave.place)


# ---- run state ------------------------------------------------------------------------------------------------------
# The state of the whole run, and the methods by which handlers order, record and reply.
#
# Only `Coordinator.step` changes it, through the functions of slaves.py, clusters.py, push_pull.py and round.py.
# `now` is the time of the present step; `out` collects the step's effects in their order.


OLD_LEDGER = "this ledger is an old copy: put the newest one back, or see `dips-master recover`"
MET_SHOWN = 20  # versions of this term for which `dips status` shows how many clusters were in them


class RunState:
    """The state of the whole run as the master sees it."""

    protocol = 1  # that the run speaks; a journal of the release that had one only has no field of it

    def __init__(self, state: LedgerState, manifest: Manifest, options: Options, now: float) -> None:
        options, tuned, self.refused_changes = restore_tuned(options, state.tuned)
        self.row, self.manifest, self.options, self.term = state.row, manifest, options, state.term
        self.protocol = state.row.protocol
        self.tuned = tuned  # by key, already in the options; `refused_changes` explains the ledger's that are not
        self.quarantined = dict(state.quarantined)  # reasons of operators' quarantines, by cluster: see operator.py
        self.idle_rows, self.denied_rows, self.read_rows = (AuditBudget(now) for _ in range(3))  # see operator.py
        self.now = self.started = now
        self.out: list[Effect] = []
        self.slaves = {name: Slave(name, layers, i, since=now) for i, (name, layers) in enumerate(state.row.placement)}
        for peer in state.slaves:
            if peer.name in self.slaves:
                self.slaves[peer.name].sinc, self.slaves[peer.name].nonce = peer.inc, peer.nonce
        self.clusters = {
            peer.name: Cluster(
                peer.name,
                peer.inc,
                peer.nonce,
                peer.frozen_digest,
                settled=peer.tokens_settled,
                accounted=peer.tokens_accounted,
            )
            for peer in state.clusters
        }
        self.roster = Roster.of_names(self.slaves)
        self.next_pushes = Timers()  # of clusters in training: see follow_cluster
        for peer in state.clusters:
            cluster = self.clusters[peer.name]
            cluster.moving = not cluster.reads
            resting = ClusterState.TRAINING if cluster.moving else ClusterState.IDLE
            cluster.state = ClusterState.GONE if peer.ended else resting
            cluster.cause = ClusterCause.ENDED if peer.ended else ClusterCause.RECALLED
            cluster.reason, cluster.since = "its incarnation ended" if peer.ended else "known from the ledger", now
            self.follow_cluster(cluster)
        self._restore_outcomes(state)
        self._restore_totals(state)
        self.versions: dict[VersionId, VersionRow] = {  # the lineage, in order
            v.version: v for v in state.versions
        }
        self.step_norms: dict[VersionId, float] = {}  # of this term: ‖θ − parent's θ‖ of each version; 0: unknown
        self.committed_at: dict[VersionId, float] = {}  # of versions of this term in the lineage
        self.undone: dict[VersionId, VersionRow] = {v.version: v for v in state.undone}
        self.head = state.versions[-1].version
        self.next_round = state.next_round
        self.unknown_rounds, self.incarnations_above = state.unknown_rounds, state.incarnations_above
        self.tokens_accepted = sum(v.tokens for v in state.versions)  # by the lineage
        self.tokens_in_window = 0  # of pushes that are committed and not settled
        self.finished = state.finished
        requeue = options.requeue is RequeuePolicy.UNDONE
        self.targets = state.row.targets or options.targets
        data = replace(options.data, epochs=self.targets.epochs)
        used: dict[str, int] = {}
        for name, _, ranges in (share for v in state.versions for share in v.shares):
            used[name] = max(len(ranges), used.get(name, 0))
        self.ranges = RangeBook(
            data,
            state.settled,
            state.leased,
            state.undone_ranges,
            requeue,
            state.begun,
            used,
            options.ranges_held,
            state.parts,
        )
        self.forget_old_versions()
        genesis_norm = sum(state.row.genesis_norms)
        self.penalty = Penalty(options.penalty, state.penalty, state.history, genesis_norm)
        self.round: Round | None = None
        self.opened_at: float | None = None  # when the last window opened
        self.slot_queue = SlotQueue()
        self.waiting: list[Push] = []  # committed pushes that no round has taken yet
        self.flipping: Fanout | None = None
        self.durability = Durability()
        self.undone_kept = {v.version: None for v in state.undone if not v.retired}  # still on disks: see rollback.py
        self.rollback_waits = ""  # the reason, while some slave cannot offer the head
        self.rollback_steps = 0  # steps that a rollback would undo which waits for an operator; 0: none waits
        self.rollback_asked: VersionId | None = None  # by an operator in this term, until it is the head
        self.mirror_target: VersionId | None = None  # version that every mirror should hold next
        self.mirrored: dict[VersionId, int] = {}  # versions kept for mirrors → for how many: see durability.py
        self.met = deque[tuple[int, int]](maxlen=MET_SHOWN)  # of the newest versions: (pushes in it, live clusters)
        self.closed_at = now  # when the last window closed
        self.update_s = 0.0  # from there to the last flip; 0 if the round left θ unchanged
        self.counts = {**dict.fromkeys(map(str, RoundResult), 0), **dict(state.rounds)}
        self.seed: Seed | None = None
        self.seeds = 0  # number of seeds in this term, for the names of their pushes
        self.failed_seed: tuple[str, str] | None = None  # (nonce of its process, reason), until it asks again
        self.rebalance: Rebalance | None = None
        self.former_slaves = {peer.name: peer.inc for peer in state.slaves if peer.name not in self.slaves}
        self.orders = OrderBook()
        self.transfers = TransferBook()
        self.probes: dict[str, ProbeAdmission] = {}  # by cluster: see clusters.py

    def forget_old_versions(self) -> None:
        """Limit the lineage to v0@r0, the newest `lineage_kept` versions, and those on offer. The ledger has all.

        Versions that a rollback may undo stay as well, with their shares: all that are newer than the oldest on offer.
        """
        oldest = oldest_offered(self.versions.values())
        older = list(takewhile(lambda version: version.version < oldest.version, islice(self.versions, 1, None)))
        settled = [number for v in older for _, _, ranges in self.versions[v].shares for number in ranges]
        self.ranges.forget_parts(settled, oldest.round)
        for version in older:
            if self.versions[version].shares:
                self.versions[version] = replace(self.versions[version], shares=())
        for version in older[: max(0, len(self.versions) - 1 - self.options.lineage_kept)]:
            del self.versions[version]
            self.step_norms.pop(version, None)
            self.committed_at.pop(version, None)

    def _restore_outcomes(self, state: LedgerState) -> None:
        for outcome, version in state.outcomes:
            cluster = self.clusters.get(outcome.push.cluster)
            if cluster:
                cluster.last_outcome = outcome
            if cluster and cluster.inc == outcome.push.inc:
                cluster.outcome, cluster.outcome_version = outcome, version
                cluster.seq_high = outcome.push.seq
        for row in state.penalty:
            if row.tokens and row.cluster in self.clusters:
                self.clusters[row.cluster].last_tokens = row.tokens[-1]

    def _restore_totals(self, state: LedgerState) -> None:
        for t in state.totals:
            cluster = self.clusters.get(t.cluster)
            if cluster:
                cluster.in_window = t.lost
                cluster.counts = {
                    "accepted": t.accepted, "gated": t.gated, "skipped": t.skipped, "undone": t.undone,
                }  # fmt: skip
                cluster.tokens = {
                    "accepted": t.tokens_accepted, "gated": t.tokens_gated,
                    "lost": t.tokens_lost, "undone": t.tokens_undone,
                }  # fmt: skip

    def next_incarnation(self, present: int) -> int:
        """Return a number above `present`; after a ledger was restored, above all that may have been given since its
        copy.
        """
        return max(present, self.incarnations_above) + 1

    # ---- effects ----

    def emit_record(self, record: Record) -> None:
        self.out.append(record)

    def reply_to(self, req: int, result: Result) -> None:
        self.out.append(Reply(req, result))

    def emit_note(self, kind: str, **fields: object) -> None:
        self.out.append(Note(kind, tuple((key, str(value)) for key, value in fields.items())))

    def fan_out(
        self,
        kind: FanoutKind,
        subject: Subject,
        bodies: Bodies,
        deadline_s: float,
    ) -> Fanout:
        """Give each named slave its order; the continuation of `kind` runs when all have answered."""
        fanout = Fanout(kind, subject)
        for name, body in bodies.items():
            sinc = self.slaves[name].sinc
            self.out.append(self.orders.give_order(fanout, name, sinc, self.term, body, deadline_s))
        return fanout

    def replace_order(self, number: int, body: OrderBody) -> None:
        """Replace an order that a slave refused by another; the fanout goes on."""
        fanout, old = self.orders.orders[number]
        sinc = self.slaves[old.slave].sinc
        self.out.append(self.orders.give_order(fanout, old.slave, sinc, self.term, body, old.deadline_s))
        self.orders.remove_order(number)

    def order_all(self, kind: FanoutKind, subject: Subject, body: OrderBody, deadline_s: float) -> Fanout:
        """Give every READY slave the same order."""
        return self.fan_out(kind, subject, {s.name: body for s in self.ready_slaves()}, deadline_s)

    def has_encrypted_lanes(self) -> bool:
        """Whether some slave's lanes are encrypted."""
        return any(slave.key for slave in self.slaves.values())

    def forget_orders(self, kinds: frozenset[FanoutKind], subject: Subject | None = None) -> None:
        """Remove orders of these kinds, so that their answers are ignored."""
        self.orders.forget_fanouts(kinds, subject)

    # ---- states and their indexes ----

    def set_slave_state(self, slave: Slave, state: SlaveState, cause: SlaveCause, reason: str) -> None:
        """Set a slave's state with its cause and a reason in words."""
        slave.set_state(state, cause, reason, self.now)
        self.roster.follow_state(slave)

    def set_cluster_state(self, cluster: Cluster, state: ClusterState, cause: ClusterCause, reason: str) -> None:
        """Set a cluster's state with its cause and a reason in words."""
        cluster.set_state(state, cause, reason, self.now)
        self.follow_cluster(cluster)

    def follow_cluster(self, cluster: Cluster) -> None:
        """Update when a training cluster's next push is expected; to be called when its state, pace or link changes."""
        if cluster.state is not ClusterState.TRAINING or not cluster.moving:
            self.next_pushes.drop_timer(cluster.name)
            return
        due = -inf  # unknown, so it may come at once
        if cluster.requested_at is not None and (interval_s := cluster.push_interval_s) is not None:
            due = cluster.requested_at + interval_s + self.moving_s(cluster)  # paces count between requests
        self.next_pushes.set_timer(cluster.name, due)

    def count_tokens_in_window(self, cluster: Cluster, push: Push, times: int) -> None:
        """Add a committed push's tokens to the sums, or with `times` -1 subtract those of one that is settled."""
        cluster.tokens_in_window += times * push.tokens
        self.tokens_in_window += times * push.tokens

    # ---- queries ----

    def cluster_standing(self, name: str, inc: int) -> ClusterStanding:
        cluster = self.clusters.get(name)
        if cluster is None or inc > cluster.inc:
            return ClusterStanding.GONE
        if inc < cluster.inc:
            return ClusterStanding.FENCED
        return ClusterStanding.LIVE if cluster.live else ClusterStanding.GONE

    @property
    def is_rebalanced(self) -> bool:
        """Whether a rebalance is valid, for whose row this master ends."""
        return self.rebalance is not None and self.rebalance.valid

    @property
    def is_proven(self) -> bool:
        """Whether enough slaves have registered to show if this ledger is an old copy (docs/rationale.md#2, #4).

        All of them, since the one that serves a version without a row may come last; after a lease those that have
        registered. In a first term the ledger cannot be a copy: any one slave is enough.
        """
        away = self.roster.unregistered
        if not away:
            return True
        waited = self.term == 1 or self.now - self.started >= self.options.timing.lease_s
        return waited and len(away) < len(self.slaves)

    def find_unproven(self) -> Failed | None:
        """Return the answer to a question that must wait until slaves have registered; None once the ledger is
        proven.
        """
        if self.is_proven:
            return None
        away = join_some([s.name for s in in_order(self.slaves, self.roster.unregistered)])
        return Failed(UnavailableMaster, f"not yet registered: {away}; slaves know if this ledger is old")

    def live_cluster(self, req: int, name: str, inc: int) -> Cluster | None:
        """Return the cluster if this incarnation of it is live; else answer the question with StaleIncarnation.

        Before enough slaves have registered it is answered with UnavailableMaster: an old copy of the ledger would not
        know leases and incarnations that exist, and a cluster would end for that.
        """
        if unproven := self.find_unproven():
            self.reply_to(req, unproven)
            return None
        stand = self.cluster_standing(name, inc)
        if stand is ClusterStanding.LIVE:
            return self.clusters[name]
        present = self.clusters[name].inc if name in self.clusters else 0
        self.reply_to(
            req, Failed(StaleIncarnation, f"{name}/{inc} is {stand}; the present incarnation is {name}/{present}")
        )
        return None

    def ready_slaves(self) -> list[Slave]:
        return [s for s in self.slaves.values() if s.state is SlaveState.READY]

    def offers_changed(self) -> None:
        """Mark all slaves' offers as unknown: a version is new. A retired one may stay: nobody asks for it."""
        for slave in self.slaves.values():
            slave.offer = None
            self.roster.follow_offer(slave)

    def slaves_missing(self) -> list[Slave]:
        return in_order(self.slaves, self.roster.missing)

    def why_missing(self) -> str:
        """Return which slaves cannot take anything new, and why; empty if all can."""
        if not self.roster.missing and not self.roster.draining:
            return ""
        missing = [f"{s.name} ({s.state}: {s.reason})" for s in self.slaves_missing()]
        drained = [s for s in in_order(self.slaves, self.roster.draining) if s.state is SlaveState.READY]
        return join_some(missing + [f"{s.name} (it drains)" for s in drained])

    def why_held(self) -> str:
        """Return why no push may begin although all slaves could take one; empty if it may."""
        return f"the rebalance to {join_some(self.rebalance.slaves)}" if self.rebalance is not None else ""

    def explain_round(self, r: Round) -> str:
        """Describe what the round does and waits for, for people."""
        return f"{r.state}: {self.describe_round(r)}"

    def describe_round(self, r: Round) -> str:
        """Describe the round beyond its state: the commits and the time left of an open window, else its reason."""
        if r.state is not RoundState.COLLECTING:
            return r.reason
        late = f", not before {self.head} is on every disk" if self.durability.late is not None else ""
        return f"{r.count} committed, closes in {max(0.0, r.closes - self.now):.1f} s{late}"

    def make_grant(self, version: VersionId, deadline_s: float, first: int = 0) -> Grant:
        """Return the grant of a transfer; `first` ranks of other transfers have their turns before its own."""
        slaves = self.roster.list_addresses(self.slaves)
        return Grant(version, slaves, deadline_s, first=first)

    @property
    def model_bytes(self) -> int:
        """Bytes that a push or pull moves, at most."""
        return self.manifest.numel * BYTES_PER_PARAMETER

    def push_bytes(self, codec: Codec) -> int:
        """Bytes that a push in this codec moves."""
        return ceil(self.manifest.numel * codec.element_bytes)

    def transfer_s(self, cluster: Cluster) -> float:
        """Return how long a push or pull of this cluster may be silent, by the whole model over the cluster's link."""
        return transfer_deadline_s(self.model_bytes, cluster.bytes_per_s, self.options.timing)

    def moving_s(self, cluster: Cluster, codec: Codec | None = None) -> float:
        """Return the estimated time in which a push of this cluster moves, None: in the run's codec, as from the head;
        0 while its bandwidth is unknown.
        """
        return self.push_bytes(codec or self.options.codec) / cluster.bytes_per_s if cluster.bytes_per_s else 0.0

    def read_progress(self) -> Progress:
        return Progress(self.tokens_accepted, self.targets.tokens, self.finished)

    def is_kept(self, version: VersionId) -> bool:
        """Whether snapshots of this version should stay on the disks."""
        row = self.versions.get(version)
        return version in self.undone_kept if row is None else not row.retired

    def has_row(self, version: VersionId) -> bool:
        """Whether the ledger has a row of this version: in the lineage, undone, or too old to be in memory.

        A version that a restored copy lacked has none, however old it is.
        """
        if lies_in(version.round, self.unknown_rounds):
            return False
        oldest = next(islice(self.versions, 1, None), None)  # after v0@r0, which is always kept
        known = version in self.versions or version in self.undone
        return known or (oldest is not None and GENESIS.version < version.version < oldest.version)

    def is_ancestor(self, version: VersionId) -> bool:
        return version in self.versions

    def cluster_of(self, transfer: object) -> Cluster | None:
        """Return the cluster whose present push or pull has this name; None if it is over."""
        cluster = self.clusters.get(transfer.cluster) if isinstance(transfer, PushId | PullId) else None
        if cluster is None:
            return None
        present = cluster.push if isinstance(transfer, PushId) else cluster.pull
        return cluster if present and present.id == transfer else None

    def moved_since(self, base: VersionId | None) -> float:
        """Return an upper bound of ‖θ − θ_base‖, summed over layers; 0 if a part of it is unknown."""
        moved, version = 0.0, self.head
        while version != base:
            if not (step := self.step_norms.get(version, 0.0)):
                return 0.0
            moved, version = moved + step, self.versions[version].parent
        return moved

    def staleness_of(self, base: VersionId | None) -> int | None:
        """Return the outer steps that θ has had since `base`; None if it is unknown or no ancestor."""
        return self.head.version - base.version if base and self.is_ancestor(base) else None
