"""What must always be true of versions: their bytes, their rows, and where they are kept (invariants 1, 2, 3, 7)."""

from __future__ import annotations

from dips.ids import GENESIS, VersionId
from dips.outer.pool import F32, Arrays
from dips.outer.versions import Versions
from dips.protocol.records import (
    LedgerState,
    Record,
    RolledBack,
    VersionCommitted,
    VersionDurable,
    VersionsRetired,
)
from dips.sim.agent import SimAgent
from dips.sim.world import World
from tests.simulation.checks import Invariant
from tests.simulation.reference import LineageReference


def whole_bank(arrays: Arrays) -> F32:
    """All of a bank, whose layers are cut out of one piece of memory."""
    whole = next(iter(arrays.values())).base
    assert whole is not None
    return whole


class LineageInvariant(Invariant):
    """One content per version name: what slaves serve, pin or keep, and what clusters install, is the reference's."""

    number = 1

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.reference = LineageReference(world.genesis, world.scenario.parameters, world.scenario.pull_codec)
        # By slave, what was last found to be the reference's: of which version, which banks, and all their bytes.
        self._found: dict[str, tuple[VersionId, Arrays, Arrays, F32, bytes, F32, bytes]] = {}

    def record_written(self, record: Record) -> None:
        if isinstance(record, VersionCommitted):
            self.require(record.version not in self.reference.versions, f"a second row for {record.version}")
            self.reference.commit(record, [self.world.books.frozen[f.push].content for f in record.folds])
            for name, machine in self.world.machines.items():
                snapshot = machine.disk.files.get(record.version)
                if snapshot is not None and snapshot.whole:
                    for layer, expected in self._expected(record.version, machine.layers):
                        found = (snapshot.theta[layer].tobytes(), snapshot.momentum[layer].tobytes())
                        self.require(
                            found == expected, f"{name}'s snapshot of {record.version} differs from the reference's"
                        )

    def after_event(self) -> None:
        for machine in self.world.looked_at:
            process = machine.process
            memory = process.versions.served_version if process is not None else None
            if process is None or memory is None:
                continue
            self._is_served(machine.name, process.versions, memory, machine.layers)
            for pull, version, sources in process.flow._sender.list_sources():
                for layer, (expected_theta, _) in self._expected(version, machine.layers):
                    for source in sources:
                        if source.views[layer].tobytes() != expected_theta:
                            self.fail(f"{machine.name}: the source of {pull} moved under it")

    def pull_installed(self, agent: SimAgent) -> None:
        assert agent.base is not None
        for layer, (theta, _) in self._expected(agent.base, tuple(agent.theta)):
            self.require(
                agent.pulled_theta[layer].tobytes() == theta,
                f"{agent.name} installed another {agent.base} than the reference's",
            )

    def _is_served(self, name: str, versions: Versions, version: VersionId, layers: tuple[int, ...]) -> None:
        """Compare what a slave serves, layer by layer; at once if nothing of its banks moved since that was done."""
        theta, momentum = versions.theta(version), versions.momentum(version)
        found = self._found.get(name)
        if (
            found is not None
            and found[1] is theta
            and found[2] is momentum
            and found[0] == version
            and found[3].tobytes() == found[4]
            and found[5].tobytes() == found[6]
        ):
            return
        expected = self._expected(version, layers)
        for layer, content in expected:
            if (theta[layer].tobytes(), momentum[layer].tobytes()) != content:
                self.fail(f"{name} serves another {version} than the reference's (layer {layer})")
        if expected:
            banks = whole_bank(theta), whole_bank(momentum)
            self._found[name] = (version, theta, momentum, banks[0], banks[0].tobytes(), banks[1], banks[1].tobytes())

    def _expected(self, version: VersionId, layers: tuple[int, ...]) -> list[tuple[int, tuple[bytes, bytes]]]:
        content = self.reference.versions.get(version)
        return (
            [(layer, content.bytes_of[layer]) for layer in layers] if content else []
        )  # without a row: CommitInvariant's business


class CommitInvariant(Invariant):
    """A version is served, or announced to a cluster, if and only if its row is durable."""

    number = 2

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.rows = {GENESIS}
        self.head = GENESIS

    def record_written(self, record: Record) -> None:
        if isinstance(record, VersionCommitted):
            self.world.look_everywhere()
            self.rows.add(record.version)
            self.head = record.version
        elif isinstance(record, RolledBack):
            self.require(record.head in self.rows, f"rolled back to {record.head}, which has no row")
            self.head = record.head

    def master_restored(self, state: LedgerState) -> None:
        head = state.versions[-1].version
        self.require(head == self.head, f"a new master starts at {head}, the newest durable row is {self.head}")

    def after_event(self) -> None:
        for machine in self.world.looked_at:
            process = machine.process
            if process is None:
                continue
            memory, head = process.versions.served_version, self.head
            if memory is not None and memory is not head and memory not in self.rows:
                self.fail(f"{machine.name} serves {memory}, which has no row")
            for pull, version, _ in process.flow._sender.list_sources():
                if version is not head and version not in self.rows:
                    self.fail(f"{machine.name} opened {pull} on {version}, which has no row")
            if memory is not head and process.holds and memory != head and process.versions.prepared != head:
                disk = machine.disk
                kept = self.head == GENESIS or self.head in disk.good_versions or self.head in disk.harmed
                self.require(kept, f"{machine.name} neither holds the head {self.head} nor is in doubt about it")

    def version_received(self, agent: SimAgent, version: VersionId, whence: str) -> None:
        self.require(version in self.rows, f"{agent.name} was sent {version} by {whence}, which has no row")


class DurableInvariant(Invariant):
    """Every disk holds a whole snapshot of the newest durable version of the lineage until a newer one is durable.

    Excepted is exactly a snapshot that rotted on this disk, or that its directory lost when an old copy was put back:
    then the head may go back by a row (RolledBack), and what that row undoes is no longer of the lineage.
    """

    number = 3

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.durable = [GENESIS]  # of the lineage, oldest first

    @property
    def newest(self) -> VersionId:
        return self.durable[-1]

    def record_written(self, record: Record) -> None:
        if isinstance(record, VersionDurable) or (isinstance(record, VersionCommitted) and record.durable):
            self.durable.append(record.version)
        elif isinstance(record, VersionsRetired):
            self._mirrors_stay_useful(record)
        elif isinstance(record, RolledBack):
            self._no_further_than_mirrors(record)
            self.durable = [v for v in self.durable if v not in record.undone]

    def _mirrors_stay_useful(self, record: VersionsRetired) -> None:
        """A mirror that holds a version on offer holds one after others were retired, too: it lies on all disks.

        Also while a new process of that slave cannot list its mirror: not known is not nothing. Not one whose copy has
        just ended: the master hears of it by a heartbeat, which may be late (seed 132). What was undone is of no use.
        """
        heard_before = self.world.heap.now - self.world.options.timing.lease_s
        offered = self.world.books.offered_versions
        for machine in self.world.machines.values():
            if (mirror := machine.mirror) is None:
                continue
            held = [v for v in self.durable if v in offered and v in mirror.files]
            known = any(mirror.copied_at[v] < heard_before for v in held)
            left = [v for v in held if v not in record.versions]
            self.require(
                not known or bool(left),
                f"{', '.join(map(str, held))} was retired, and {machine.name}'s mirror holds nothing newer",
            )

    def _no_further_than_mirrors(self, record: RolledBack) -> None:
        """A lost disk costs what its mirror lags behind: whatever the laggard holds is on all other disks, too.

        A copy that has rotted in the mirror is none.
        """
        machines = self.world.machines.values()
        held = [
            [v for v, copy in m.mirror.files.items() if v in self.durable and copy.good] if m.mirror is not None else []
            for m in machines
        ]
        if not all(held):
            return
        oldest = min(max(versions) for versions in held)
        excused = any(oldest in m.disk.harmed and oldest not in m.disk.files for m in machines) or any(
            not s.good for m in machines for v, s in m.disk.files.items() if v == oldest
        )
        self.require(
            record.head.version >= oldest.version or excused,
            f"rolled back to {record.head}, every mirror holds {oldest} or a newer one",
        )

    def after_event(self) -> None:
        newest = self.newest
        if newest is GENESIS:
            return  # the initial model is on every disk
        for machine in self.world.looked_at:
            snapshot = machine.disk.files.get(newest)
            if (snapshot is None or not snapshot.good) and newest not in machine.disk.harmed:
                self.fail(f"{machine.name}'s disk has no whole {newest}")


class AuthorityInvariant(Invariant):
    """Every lineage ends in the initial model: each row's parent is the head before it, each round is a new one.

    A rollback goes to a version that may still be offered; to the initial model only as long as no durable version was
    retired: an empty directory is not the beginning of the run.
    """

    number = 7

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.head = GENESIS
        self.lineage = [GENESIS]
        self.durable: set[VersionId] = set()
        self.retired: set[VersionId] = set()

    def record_written(self, record: Record) -> None:
        if isinstance(record, VersionCommitted):
            self.require(
                record.parent == self.head, f"{record.version} has the parent {record.parent}, the head is {self.head}"
            )
            follows = record.version.version == self.head.version + 1 and record.version.round > self.head.round
            self.require(follows, f"{record.version} cannot follow {self.head}")
            self.head = record.version
            self.lineage.append(record.version)
            if record.durable:
                self.durable.add(record.version)
        elif isinstance(record, VersionDurable):
            self.durable.add(record.version)
        elif isinstance(record, VersionsRetired):
            self.retired.update(record.versions)
        elif isinstance(record, RolledBack):
            kept = self.lineage.index(record.head) + 1 if record.head in self.lineage else 0
            self.require(
                kept > 0 and tuple(self.lineage[kept:]) == record.undone,
                f"rolled back to {record.head} and undid {record.undone}, the lineage is {self.lineage}",
            )
            gone = self.retired.intersection(self.lineage)
            self.require(record.head not in gone, f"rolled back to {record.head}, which was retired")
            anew = record.head == GENESIS and bool(gone & self.durable)
            self.require(not anew, f"the run begins anew, though it had {', '.join(map(str, sorted(gone)))}")
            del self.lineage[kept:]
            self.head = record.head
