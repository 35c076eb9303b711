"""A cluster is revoked in the middle of a push, for a moment or for good: what its agent and the others do."""

from __future__ import annotations

import threading
from functools import partial
from itertools import pairwise

import pytest

from dips.client.agent.membership import HEAL_S
from dips.ids import PushId
from dips.protocol.effects import Outcome
from dips.protocol.enums import OutcomeKind
from dips.protocol.options import DataOptions, Options, PenaltyOptions, TimingOptions
from dips.sim.agent import SimAgent
from dips.sim.observer import Observer
from dips.sim.scenario import ClusterShape, Scenario
from dips.sim.work import Frozen
from dips.sim.world import World
from tests.simulation.trial import Trial

HEARTBEAT_S, CALL_S = 1.5, 0.2  # a call's way to and fro, at most
REVOKED_AFTER_S = 20.0
REASON = "the certificate of cluster 'b' of run 'simulated' is revoked"


class Revocation(Observer):
    """Revokes b at its first push after REVOKED_AFTER_S, for `lasts_s`; notes what follows."""

    def __init__(self, world: World, lasts_s: float) -> None:
        self.world, self.lasts_s = world, lasts_s
        self.revoked_at = 0.0
        self.exits: list[tuple[float, str]] = []
        self.dropped: list[str] = []
        self.accepted: dict[str, list[float]] = {"a": [], "b": []}

    def push_begun(self, agent: SimAgent, push: PushId) -> None:
        world = self.world
        if agent.name == "b" and world.heap.now > REVOKED_AFTER_S and not self.revoked_at:
            self.revoked_at = world.heap.now
            world.authority.revoke("b")
            world.call_later(self.lasts_s, "b is enrolled again", partial(world.authority.enroll, "b"))

    def agent_exits(self, agent: SimAgent, reason: str) -> None:
        assert agent.name == "b" and REASON in reason
        self.exits.append((self.world.heap.now - self.revoked_at, reason))

    def push_dropped(self, agent: SimAgent, push: PushId) -> None:
        self.dropped.append(agent.name)

    def outcome_received(self, agent: SimAgent, frozen: Frozen, outcome: Outcome) -> None:
        if outcome.kind is OutcomeKind.ACCEPTED:
            self.accepted[agent.name].append(self.world.heap.now)


def played(seed: int, lasts_s: float) -> Revocation:
    timing = TimingOptions(window_s=1.0, heartbeat_s=HEARTBEAT_S, lease_heartbeats=5, hang_s=12.0, order_s=4.0)
    options = Options(penalty=PenaltyOptions(gates=()), data=DataOptions(ranges=20_000), timing=timing)
    shapes = (ClusterShape(2, 0.2), ClusterShape(2, 0.2))
    scenario = Scenario(shapes, slaves=2, layers=4, slots=2, pinned=1, inner_steps=10, options=options, lasts_s=60.0)
    world = World(seed, scenario)
    revocation = Revocation(world, lasts_s)
    result = Trial(world, patience=8.0).run([revocation])
    assert result.failure is None, result.failure.what
    assert revocation.revoked_at and "a" not in revocation.dropped
    assert max(after - before for before, after in pairwise(revocation.accepted["a"])) < 8.0, "a goes on"
    assert revocation.accepted["b"][-1] > revocation.revoked_at + lasts_s, "b takes part again"
    return revocation


@pytest.mark.parametrize("seed", range(2))
def test_who_is_revoked_ends_and_the_others_go_on(seed: int) -> None:
    """Two heartbeats at most; whoever starts it again is told at once, until it is enrolled."""
    (first, why), *others = played(seed, 20.0).exits
    assert first <= 2 * HEARTBEAT_S + HEAL_S + CALL_S and "may take part no more" in why
    assert others and not [reason for _, reason in others if "no more" in reason]


@pytest.mark.parametrize("seed", range(2))
def test_a_refusal_of_a_moment_ends_nobody(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A renewal that is half done: b rejoins under its agent.

    The world starts no thread: its processes look at their certificates, as real ones do apart, and a seed would not be
    the same each time.
    """
    monkeypatch.setattr(threading.Thread, "start", lambda thread: pytest.fail(f"{thread.name} is started"))
    assert not played(seed, HEAL_S - CALL_S).exits
