"""One run of real models in virtual time: the real Coordinator, ledger, agent cores, data flow and outer step.

Events are planned by the run's tokens: clusters join, leave and are killed when a share of the tokens is accepted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from dips.codecs import Codec
from dips.ids import VersionId
from dips.outer import kernels
from dips.protocol.enums import LayerUnit
from dips.protocol.options import DataOptions, Options, StopOptions
from dips.sim.observer import Observer
from dips.sim.scenario import ClusterShape, Scenario
from dips.sim.world import World
from dips.slave.ports import F32
from dips.study.account import Emulated, GateCount, RunAccount
from dips.study.fleet import LINK_S, Fleet, FleetCluster
from dips.study.learner import LearnedModel, Recipe
from dips.study.operator import MendingOperator
from dips.study.task import Task

CHUNK_BYTES = 1 << 16
HEARTBEAT_S = 4.0  # in virtual time, in which an inner step takes about one second
HANG_S = 10_000.0
SLOTS_MORE = 1  # more slots than clusters, so that no cluster waits for a slot
PATIENCE = 4.0  # the run ends after this many times its duration without gated pushes, finished or not
LEAST_S = 300.0  # least time of a run, for joining, pulling and ending
PINNED = 2  # older versions kept by slaves
RANGES = 1 << 20  # more than any study's inner steps, each of which takes one


def emulate(
    task: Task,
    fleet: Fleet,
    recipe: Recipe,
    steps: int,
    seed: int,
    options: Options | None = None,
    pull_codec: Codec = Codec.FP32,
    layers: LayerUnit = LayerUnit.BLOCK,
) -> tuple[Emulated, GateCount]:
    """Train until the tokens of `steps` inner steps are accepted, in virtual time; equal arguments give equal bits."""
    torch.set_num_threads(1)
    faults = {n: m.fault for n, m in zip(fleet.names, fleet.members, strict=True) if m.fault is not None}
    model = LearnedModel(task, recipe, seed, fleet.names, faults, fleet.due_steps(steps), layers)
    result, tokens = Emulated(first_loss=model.evaluate(model.genesis)), steps * task.tokens
    options = replace(options or Options(), stop=StopOptions(tokens=tokens), data=DataOptions(ranges=RANGES))
    scenario = make_scenario(fleet, options, LEAST_S + PATIENCE * steps / fleet.step_rate, pull_codec)
    world = World(seed, scenario, model, kernels)
    operator = MendingOperator(world, model.is_mended)
    world.run([RunAccount(world, result), _Comings(world, fleet, result, tokens), operator])
    result.lasted_s, result.steps = world.heap.now, model.steps
    result.readmitted = operator.readmitted
    result.loss = model.evaluate(_read_head(world, result.head))
    return result, GateCount.of_run(result.outcomes, model.bad_pushes, result.gates)


class _Comings(Observer):
    """An observer that lets clusters join, leave and fail at planned shares of the run."""

    def __init__(self, world: World, fleet: Fleet, result: Emulated, tokens: int) -> None:
        self._world, self._result, self._tokens = world, result, tokens
        self._plan: list[tuple[float, str, Callable[[], None]]] = []  # shares of the run, descending
        for name, member in zip(fleet.names, fleet.members, strict=True):
            self._plan += self._plan_member(name, member)
        self._plan.sort(key=lambda planned: -planned[0])

    def time_passed(self) -> None:
        while self._plan and self._result.tokens >= self._plan[-1][0] * self._tokens:
            _, what, action = self._plan.pop()
            self._world.call_later(0.0, what, action)

    def _plan_member(self, name: str, member: FleetCluster) -> list[tuple[float, str, Callable[[], None]]]:
        cluster = self._world.clusters[name]

        def fail() -> None:
            cluster.crash()
            self._world.call_later(member.down_s, f"{name} starts again", cluster.start)

        planned = [
            (member.joins, f"{name} joins", cluster.start, member.joins > 0),
            (member.leaves, f"{name} leaves", cluster.leave_run, member.leaves < 1),
            (member.returns, f"{name} comes back", cluster.start, member.returns < 1),
            (member.fails, f"{name} is killed", fail, member.fails < 1),
        ]
        return [(share, what, action) for share, what, action, wanted in planned if wanted]


def make_scenario(fleet: Fleet, options: Options, lasts_s: float, pull_codec: Codec) -> Scenario:
    """Return the scenario of a fleet, in which only planned failures happen."""
    timing = replace(options.timing, heartbeat_s=HEARTBEAT_S, hang_s=HANG_S)
    held = max(1, options.data.ranges * options.data.epochs)  # no limit: each inner step takes a range
    return Scenario(
        tuple(_make_shape(fleet, member) for member in fleet.members),
        slaves=2, layers=4, slots=len(fleet.members) + SLOTS_MORE, pinned=PINNED, inner_steps=fleet.inner_steps,
        options=replace(options, timing=timing, ranges_held=held), lasts_s=lasts_s, ranges_at_once=fleet.inner_steps,
        chunk_bytes=CHUNK_BYTES, pull_codec=pull_codec, run="study",
    )  # fmt: skip


def _make_shape(fleet: Fleet, member: FleetCluster) -> ClusterShape:
    return ClusterShape(
        1, member.step_s, member.link_s / LINK_S, fleet.inner_steps if fleet.pace == "aligned" else 0, fleet.overlap,
        fleet.fragments, member.jitter, member.straggles, late=member.joins > 0,
    )  # fmt: skip


def _read_head(world: World, head: VersionId) -> dict[int, F32]:
    """Return θ of the last version; in a run that ran out of time a slave may still serve the one before."""
    found: dict[int, F32] = {}
    for machine in world.machines.values():
        assert machine.process is not None
        versions = machine.process.versions
        held = head if head in (versions.served_version, versions.prepared) else versions.served_version
        assert held is not None
        found |= dict(versions.theta(held))
    return found
