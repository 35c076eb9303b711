"""What must always be true of a master's memory: a master that starts now would know the same (invariant 2)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from dips.ids import GENESIS
from dips.master.runtime import FLUSH_S
from dips.protocol.coordinator import Coordinator
from dips.protocol.events import Event
from dips.protocol.records import Record, RolledBack, VersionRow
from dips.protocol.run_state import RunState, oldest_offered
from dips.sim.master import MasterProcess
from dips.sim.world import World
from tests.simulation.checks import Invariant

Compared = tuple[str, Any, Any]  # what it is, in memory, in a master that reads the ledger now


class LedgerMemoryInvariant(Invariant):
    """After each rollback, and when a master dies, what it knows of the ledger is what the ledger says, field by field.

    While nothing is on its way to the disk: what a master has decided and not written, a successor need not know. But
    one that is stopped by SIGTERM writes it first, unless its disk is full, or that takes FLUSH_S.
    """

    number = 2

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._due = False

    def record_written(self, record: Record) -> None:
        self._due = self._due or isinstance(record, RolledBack)

    def before_step(self, master: MasterProcess, event: Event) -> None:
        if self._due and master.presides and master.all_is_written:
            self._due = False
            self._compare(master, "rolled back")

    def master_died(self, process: MasterProcess, rows: bool, written: bool) -> None:
        machine = process.machine
        if process.trusted and machine.process is None and process not in machine.zombies and process.all_is_written:
            self._compare(process, "died")

    def master_stopped(self, process: MasterProcess) -> None:
        waited_s = self.world.heap.now - process.stopping_since
        excused = process.machine.disk.full or waited_s >= FLUSH_S - 1e-6
        self.require(process.all_is_written or excused, "a master that was stopped has not written all it decided")

    def _compare(self, master: MasterProcess, when: str) -> None:
        state = master.ledger.read_state()
        read = Coordinator(state, self.world.manifest, self.world.options, self.world.heap.now)._run
        for what, held, known in memory_differences(master.coordinator._run, read):
            self.fail(f"a master that {when} has {what} {held!r:.200}, its ledger says {known!r:.200}")


def memory_differences(held: RunState, read: RunState) -> Iterator[Compared]:
    """What a master has in memory, and is not what it would read of its ledger."""
    for what, one, other in (*_of_versions(held, read), *_of_data(held, read), *_of_clusters(held, read)):
        if one != other:
            yield what, one, other


def _of_versions(held: RunState, read: RunState) -> Iterator[Compared]:
    yield "the head", held.head, read.head
    yield "the next round", held.next_round, read.next_round
    yield "accepted tokens", held.tokens_accepted, read.tokens_accepted
    yield "the end", held.finished, read.finished
    yield "targets", held.targets, read.targets
    yield "options", held.options, read.options
    yield "the quarantined", held.quarantined, read.quarantined
    one, other = _remembered(held), _remembered(read)
    for what in ("parent", "tokens", "durable", "retired"):
        yield f"versions, {what}", *({v.version: getattr(v, what) for v in rows} for rows in (one, other))


def _remembered(run: RunState) -> list[VersionRow]:
    """The lineage, less what may be forgotten at any time: versions older than all that are on offer."""
    oldest = oldest_offered(run.versions.values())
    return [row for v, row in run.versions.items() if v == GENESIS or v.version >= oldest.version]


def _of_data(held: RunState, read: RunState) -> Iterator[Compared]:
    yield "settled ranges", held.ranges.settled, read.ranges.settled
    yield "undone ranges", held.ranges.undone, read.ranges.undone
    yield "begun ranges", dict(held.ranges.begun), dict(read.ranges.begun)
    yield "leases", _leases(held), _leases(read)


def _leases(run: RunState) -> Mapping[str, list[int]]:
    """Of those who live: what was held when an incarnation ended comes free as its last push is settled."""
    live = {(cluster.name, cluster.inc) for cluster in run.clusters.values() if cluster.live}
    leases = {key: sorted(lease.ranges) for key, lease in run.ranges._leases.items() if lease.ranges}
    return {name: ranges for (name, inc), ranges in leases.items() if (name, inc) in live}


def _of_clusters(held: RunState, read: RunState) -> Iterator[Compared]:
    yield "clusters", sorted(held.clusters), sorted(read.clusters)
    for name, cluster in held.clusters.items():
        known = read.clusters[name]
        for what in ("inc", "live", "settled", "last_tokens"):
            yield f"{name}'s {what}", getattr(cluster, what), getattr(known, what)
        present = cluster.live and cluster.push is not None and cluster.push.committed  # it comes again
        yield f"{name}'s pushes of former incarnations", cluster.in_window - present, known.in_window
        for what in ("accepted", "gated", "undone"):
            yield f"{name}'s pushes {what}", cluster.counts[what], known.counts[what]
            yield f"{name}'s tokens {what}", cluster.tokens[what], known.tokens[what]
        yield f"{name}'s statistics", held.penalty.penalty_row(name), read.penalty.penalty_row(name)
