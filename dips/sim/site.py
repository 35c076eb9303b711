"""Where a simulated cluster runs: what stays while its agents and trainers come and go."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dips.protocol.events import ClusterLeft
from dips.sim.cluster import CALL_S, Agent

if TYPE_CHECKING:
    from dips.sim.world import World


class Site:
    """The machines of one cluster: their name, their ranks and their speed."""

    def __init__(self, world: World, name: str, ranks: int, step_s: float) -> None:
        self.world, self.name, self.ranks, self.step_s = world, name, ranks, step_s
        self.rng = world.chance.of(f"cluster/{name}")
        self.agent: Agent | None = None
        self.lives = 0
        self.diverged = 0  # pushes to come whose content is bad

    def start(self) -> None:
        """A new agent process; it starts its trainer."""
        if self.agent is None:
            self.lives += 1
            self.agent = Agent(self, f"{self.name}-{self.lives}")

    def crash(self) -> None:
        """Agent and trainer die together: torchrun has PR_SET_PDEATHSIG."""
        if self.agent is not None:
            self.agent.die()
            self.agent = None

    def leave(self) -> None:
        """The agent is told to stop: it says so once, and goes whether it is heard or not."""
        if self.agent is not None and self.agent.inc > 0:
            lost = sum(w.tokens for w in self.agent.carried)
            left = ClusterLeft(0, self.name, self.agent.inc, lost)
            self.world.network.call(self.name, "master", left, CALL_S, lambda _: None)
            self.crash()

    def crash_trainer(self) -> None:
        if self.agent is not None and self.agent.trainer is not None:
            self.agent.trainer_died()
