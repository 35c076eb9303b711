"""A simulated cluster runs the shipped agent: how its processes end, and what its master learns of it."""

from __future__ import annotations

from dips.protocol.options import DataOptions, Options, PenaltyOptions
from dips.protocol.records import ClusterEnded, IncarnationGiven, Record
from dips.sim.observer import Observer
from dips.sim.scenario import ClusterShape, Scenario
from dips.sim.world import World

LASTS_S, AT_S = 60.0, 20.0


class Incarnations(Observer):
    """Incarnations of cluster b, as the ledger has them: when each began, and when and why it ended."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.began: list[float] = []
        self.ended: list[tuple[float, str]] = []

    def record_written(self, record: Record) -> None:
        now = self._world.heap.now
        if isinstance(record, IncarnationGiven) and record.name == "b":
            self.began.append(now)
        elif isinstance(record, ClusterEnded) and record.cluster == "b":
            self.ended.append((now, record.reason))


def make_world() -> tuple[World, Incarnations]:
    options = Options(penalty=PenaltyOptions(gates=()), data=DataOptions(ranges=20_000))
    shapes = (ClusterShape(2, 0.2), ClusterShape(2, 0.2))
    scenario = Scenario(shapes, slaves=1, layers=2, slots=2, pinned=1, inner_steps=10, options=options, lasts_s=LASTS_S)
    world = World(3, scenario)
    return world, Incarnations(world)


def test_an_agent_that_gets_sigterm_leaves_the_run_at_once() -> None:
    """Its trainer ends first, then the master is told; nobody starts it again."""
    world, seen = make_world()
    cluster = world.clusters["b"]
    world.call_later(AT_S, "SIGTERM", cluster.leave_run)
    world.run([seen])
    assert len(seen.began) == len(seen.ended) == 1
    assert seen.ended[0][0] - AT_S < 1.0, seen.ended
    assert cluster.agent is None


def test_an_agent_that_is_started_while_another_leaves_follows_it() -> None:
    """Its directory is locked until then (`agent.pid`)."""
    world, seen = make_world()
    cluster = world.clusters["b"]
    world.call_later(AT_S, "SIGTERM", cluster.leave_run)
    world.call_later(AT_S, "another is started", cluster.start)
    world.run([seen])
    assert len(seen.began) == 2 and seen.began[1] > seen.ended[0][0]
    assert cluster.agent is not None and cluster.agent.inc == 2


def test_a_killed_agent_tells_nobody() -> None:
    """The master learns of it by silence, and takes its successor in."""
    world, seen = make_world()
    cluster = world.clusters["b"]
    world.call_later(AT_S, "SIGKILL", cluster.crash)
    world.run([seen])
    assert len(seen.began) == len(seen.ended) == 1
    assert seen.ended[0][0] - AT_S > world.options.timing.lease_s - world.options.timing.heartbeat_s - 1.0
