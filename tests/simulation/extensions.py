"""An operator who extends runs that end, before it and after, while everything fails."""

from __future__ import annotations

from dips.ids import VersionId
from dips.protocol.events import ExtensionAsked, TargetChange
from dips.protocol.options import Targets
from dips.protocol.records import LedgerState, Record, RolledBack, RunExtended, RunFinished, VersionCommitted
from dips.sim.observer import Observer
from dips.sim.world import World
from tests.simulation.checks import Invariant

TRIES = 4  # of a run that has an end, at any time until faults stop
FARTHER = (0, 6)  # versions above the head: no more than are there is refused
FEWEST = 6  # versions of a run worth the name
DOWN_S = 2.0  # until the agents of a run that goes on are started again, at most


class ExtendingOperator(Observer):
    """Asks the master of a run that ends by its versions; starts the agents again if it was finished."""

    def __init__(self, world: World) -> None:
        self.world, self._rng = world, world.chance.generator_for("operator")
        self.answers: list[object] = []
        self._finished: VersionId | None = None

    def plan(self) -> None:
        for _ in range(TRIES if self.world.options.stop.versions else 0):
            at = self.world.scenario.quiet_at * self._rng.random()
            self.world.call_later(at, "the operator extends the run", self._ask_master)

    def _ask_master(self) -> None:
        process = self.world.master.process
        if process is not None:
            head = int(process.coordinator.build_view(self.world.heap.now).head.split("@")[0][1:])
            change = TargetChange("versions", max(FEWEST, head + self._rng.randint(*FARTHER)))
            process.on_message(ExtensionAsked(0, (change,)), self.answers.append)

    def record_written(self, record: Record) -> None:
        if isinstance(record, RunFinished):
            self._finished = record.version
        elif isinstance(record, RunExtended):
            self.world.monitor.rare_event_occurred("extended" if record.resumed is None else "resumed")
            self._start_agents(record.resumed is not None)
        elif isinstance(record, RolledBack):
            self._start_agents(self._finished in record.undone)

    def _start_agents(self, goes_on: bool) -> None:
        """The agents of a finished run have ended; one that goes on needs new ones."""
        if not goes_on:
            return
        self._finished = None
        for cluster in self.world.clusters.values():
            cluster.crash()
            self.world.call_later(DOWN_S * self._rng.random(), f"{cluster.name} starts again", cluster.start)


class TargetsInvariant(Invariant):
    """A finished run makes no version until it is extended; a new master knows every extension."""

    number = 2

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.targets: Targets | None = None
        self.finished = False

    def record_written(self, record: Record) -> None:
        if isinstance(record, RunExtended):
            self.targets, self.finished = record.targets, False
        elif isinstance(record, RunFinished):
            self.finished = True
        elif isinstance(record, RolledBack):
            self.finished = False
        elif isinstance(record, VersionCommitted):
            self.require(not self.finished, f"{record.version} was made by a run that is finished")

    def master_restored(self, state: LedgerState) -> None:
        self.require(state.row.targets == self.targets, f"a new master has {state.row.targets}, not {self.targets}")
