"""What must always be true of waiting for a slot: whoever asks later does not go first (invariant 12)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from dips.ids import PushId
from dips.protocol.admission import MOST_LEAD
from dips.protocol.enums import ClusterStanding
from dips.protocol.events import Event, PushAborted, PushRequested
from dips.protocol.records import LedgerState
from dips.protocol.run_state import RunState
from dips.sim.master import MasterProcess
from dips.sim.world import World
from tests.simulation.checks import Invariant

_WATCHED = frozenset({PushRequested, PushAborted})


@dataclass
class _Wait:
    """A cluster from its first request for a slot to its push; counted by what is seen from outside the queue."""

    inc: int
    since: float
    asked_at: float
    punctual_s: float  # from its last request: until then nobody may call it late
    overtaken_by: set[PushId] = field(default_factory=set)  # while it was punctual
    stood_behind: set[PushId] = field(default_factory=set)  # of those: they held a slot when it asked again


class QueueInvariant(Invariant):
    """A live cluster that asks at every boundary finds its slot taken by few that asked after it.

    By the MOST_LEAD that its place may be passed by, and by one for each slot that was lent and not given back in time.
    What is recorded is who asked when, and whose push was opened; of the queue itself nothing is believed.
    """

    number = 12

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.waits: dict[str, _Wait] = {}
        self.began: dict[PushId, float] = {}  # open pushes → when their cluster first asked
        self.waits_s: dict[str, list[float]] = {}  # cluster → how long it waited, each time

    def master_restored(self, state: LedgerState) -> None:
        self.waits.clear()
        self.began.clear()

    def after_step(self, process: MasterProcess, event: Event) -> None:
        if type(event) not in _WATCHED or not process.presides:
            return
        run = process.coordinator.capture_state()
        assert isinstance(run, RunState)
        if isinstance(event, PushRequested):
            self._asked(run, event)
        elif isinstance(event, PushAborted):
            self.waits.pop(event.push.cluster, None)

    def _asked(self, run: RunState, event: PushRequested) -> None:
        if not run.is_proven:
            return  # nothing was answered: it asks from here on when the slaves have registered
        name, now = event.push.cluster, self.world.heap.now
        cluster = run.clusters.get(name)
        if run.cluster_standing(name, event.push.inc) is not ClusterStanding.LIVE or cluster is None or run.finished:
            self.waits.pop(name, None)
            return
        if event.push in self.began:
            return  # a repetition: its push is open
        wait = self.waits.get(name)
        if wait is None or wait.inc != event.push.inc:
            wait = _Wait(event.push.inc, now, now, 0.0)
        if cluster.push is not None and cluster.push.id == event.push:
            self._admitted(event.push, wait)
        elif cluster.push is None and not (run.penalty.penalty_row(name).quarantined or name in run.quarantined):
            self._refused(run, event, wait)

    def _admitted(self, push: PushId, wait: _Wait) -> None:
        now = self.world.heap.now
        self.waits.pop(push.cluster, None)
        self.began[push] = wait.since
        self.waits_s.setdefault(push.cluster, []).append(now - wait.since)
        for other in self.waits.values():
            if other.since < wait.since and now <= other.asked_at + other.punctual_s:
                other.overtaken_by.add(push)

    def _refused(self, run: RunState, event: PushRequested, wait: _Wait) -> None:
        now, held = self.world.heap.now, set(run.transfers.pushes)
        self.began = {push: since for push, since in self.began.items() if push in held}
        wait.stood_behind |= wait.overtaken_by & held
        wait.asked_at, wait.punctual_s = now, event.step_s + run.options.timing.busy_retry_s
        self.waits[event.push.cluster] = wait
        allowed = MOST_LEAD + self.world.scenario.slots
        if len(wait.stood_behind) > allowed:
            self.fail(
                f"{event.push.cluster} waits for a slot since {wait.since:.1f} and has stood behind"
                f" {', '.join(map(str, sorted(wait.stood_behind)))}, which asked later: {allowed} may"
            )

    def waited(self) -> Iterator[tuple[str, float]]:
        """(cluster, seconds) of every wait, those that have not ended too."""
        for name, times in self.waits_s.items():
            yield from ((name, s) for s in times)
        yield from ((name, self.world.heap.now - wait.since) for name, wait in self.waits.items())
