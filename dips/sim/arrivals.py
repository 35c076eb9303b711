"""A world that replays the arrivals of another run: which pushes were made, and which round took them.

Each cluster pushes after as many inner steps as in the other run, and the commits of a round are held back from the
master until all are there; they are delivered together, in the other run's order. Everything else is the world's own.
So the results of another run can be computed again, and compared bit for bit.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

from dips.client.agent.account import Pace
from dips.ids import PushId, VersionId
from dips.outer.kernel_pool import Kernels
from dips.protocol.effects import Pending
from dips.protocol.enums import OutcomeKind
from dips.protocol.events import PushFinished
from dips.protocol.heartbeats import ClusterHeartbeat
from dips.protocol.records import FoldRow, OutcomeRow, Record, RoundEnded, VersionCommitted
from dips.sim.model import SimModel
from dips.sim.network import Answer, SimHost
from dips.sim.observer import Observer
from dips.sim.scenario import Scenario
from dips.sim.site import Site
from dips.sim.world import World

NEVER = 1 << 30  # inner steps, and seconds of a step, of a cluster without further pushes
PATIENCE_S = 1.0  # a commit before its turn is answered Pending after this time, and repeated
SETTLED_HEARTBEATS = 1.5  # least time for which a commit is held: until its push is staged on every slave, and a
# heartbeat has reported its tokens. Otherwise the master would let it wait, and others would overtake it
NO_RATE = 0.0  # reported for every link: by its rate a held commit would be late, and would keep no window open


@dataclass(frozen=True, slots=True)
class Arrival:
    """One push that a round of the other run has settled."""

    cluster: str
    tokens: int
    inner_steps: int
    base: VersionId | None = None  # None: unknown, since the ledger does not record it for gated pushes


class SettledRound(Protocol):
    """A round as a ledger records it (RoundHistory, VersionCommitted)."""

    @property
    def folds(self) -> tuple[FoldRow, ...]: ...
    @property
    def outcomes(self) -> tuple[OutcomeRow, ...]: ...


def read_arrivals(rounds: Iterable[SettledRound]) -> list[tuple[Arrival, ...]]:
    """Return the pushes of each round, in the order of folding, then the gated ones; skipped rounds are omitted."""
    read = []
    for each in rounds:
        folded = [Arrival(f.push.cluster, f.tokens, f.inner_steps, f.base) for f in each.folds]
        gated = [o for o in each.outcomes if o.kind is OutcomeKind.GATED]
        read.append((*folded, *(Arrival(o.push.cluster, o.tokens, o.inner_steps) for o in gated)))
    return [pushes for pushes in read if pushes]


def find_settled(record: VersionCommitted | RoundEnded) -> list[str]:
    """Return the clusters whose pushes a round has settled; empty for a skipped round."""
    return [o.push.cluster for o in record.outcomes if o.kind is not OutcomeKind.SKIPPED]


class PlannedPace(Pace):
    """A pace by which a push is due after the number of inner steps that is first in `plan`."""

    def __init__(self, plan: deque[int]) -> None:
        super().__init__(steps=1)
        self._plan = plan

    def look_in(self, now: float) -> int:
        """Return the inner steps until the push is due; 0: it is due."""
        return max(0, self._plan[0] - self.since_push) if self._plan else NEVER


@dataclass
class PlannedSite(Site):
    """A cluster whose pushes are known in advance."""

    plan: deque[int] = field(default_factory=deque)  # inner steps of the pushes that are not settled yet

    def make_pace(self, inner_steps: int) -> Pace:
        return PlannedPace(self.plan)

    def draw_step_s(self) -> float:
        return super().draw_step_s() if self.plan else float(NEVER)


class ArrivalWorld(World):
    """A world whose clusters make the pushes of `rounds`, and whose rounds take those pushes."""

    def __init__(
        self, seed: int, scenario: Scenario, rounds: Sequence[tuple[Arrival, ...]], model: SimModel, kernels: Kernels
    ) -> None:
        self._rounds = rounds
        super().__init__(seed, scenario, model, kernels)
        self.door = _Door(self, self.master, rounds)
        self.network.attach_host("master", self.door)

    def make_site(self, number: int) -> Site:
        site = super().make_site(number)
        own = (push.inner_steps for pushes in self._rounds for push in pushes if push.cluster == site.name)
        return PlannedSite(**vars(site), plan=deque(own))


class _Door(Observer):
    """Receives messages for the master's machine, and holds commits until all of their round are there."""

    def __init__(self, world: World, master: SimHost, rounds: Iterable[tuple[Arrival, ...]]) -> None:
        self._world, self._master = world, master
        self._rounds = deque(tuple(push.cluster for push in pushes) for pushes in rounds)
        self._held: dict[str, tuple[PushFinished, Answer]] = {}  # the newest commit of each cluster
        self._came: dict[PushId, float] = {}  # when each commit first came
        self._passed: set[PushId] = set()
        self._taken = False  # the commits of the present round were delivered
        self._settled_s = SETTLED_HEARTBEATS * world.options.timing.heartbeat_s

    def on_message(self, sender: str, message: Any, answer: Answer) -> None:
        """Deliver or hold a message, as a SimHost."""
        if isinstance(message, ClusterHeartbeat):
            message = replace(message, bytes_per_s=NO_RATE)
        if not isinstance(message, PushFinished) or message.push in self._passed:
            self._master.on_message(sender, message, answer)
            return
        self._held[sender] = message, answer
        self._came.setdefault(message.push, self._world.heap.now)
        self._world.call_later(PATIENCE_S, "a commit waits for its turn", partial(self._put_off, message, answer))
        self._world.call_later(self._settled_s, "a commit may come", self._let_in)

    def record_written(self, record: Record) -> None:
        """Release the next round's commits when a round is settled."""
        settled = find_settled(record) if isinstance(record, VersionCommitted | RoundEnded) else []
        if not settled:
            return
        for name in settled:
            site = self._world.clusters[name].site
            assert isinstance(site, PlannedSite)
            site.plan.popleft()
        self._rounds.popleft()
        self._taken = False
        self._world.call_later(0.0, "the next round's commits", self._let_in)

    def _let_in(self) -> None:
        """Deliver all commits of a round at once: the window that the first one opens takes the others."""
        if self._taken or not self._rounds or not all(map(self._is_settled, self._rounds[0])):
            return
        self._taken = True
        for name in self._rounds[0]:
            message, answer = self._held.pop(name)
            self._passed.add(message.push)
            self._master.on_message(name, message, answer)

    def _is_settled(self, cluster: str) -> bool:
        held = self._held.get(cluster)
        return held is not None and self._world.heap.now >= self._came[held[0].push] + self._settled_s

    def _put_off(self, message: PushFinished, answer: Answer) -> None:
        if message.push not in self._passed:
            answer(Pending("its turn has not come"))
