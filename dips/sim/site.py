"""Where a simulated cluster runs: what stays while its agents and trainers come and go."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dips.client.agent.account import NO_INCARNATION
from dips.sim.cluster import CALL_S, Agent

if TYPE_CHECKING:
    from dips.sim.world import World

RESTART_S = 2.0  # until an agent that exited on its own account is started again


class Site:
    """The machines of one cluster: their name, their ranks and their speed."""

    def __init__(self, world: World, name: str, ranks: int, step_s: float) -> None:
        self.world, self.name, self.ranks, self.step_s = world, name, ranks, step_s
        self.rng = world.chance.of(f"cluster/{name}")
        self.agent: Agent | None = None
        self.left = NO_INCARNATION  # by the last agent, on the disk of the machine where the next one starts
        self.zombies: list[Agent] = []  # stopped, and taken for dead: each has a successor
        self.lives = 0
        self.diverged = 0  # pushes to come whose content is bad

    @property
    def agents(self) -> list[Agent]:
        """Every agent process that may still do something."""
        return [*self.zombies, self.agent] if self.agent else list(self.zombies)

    def start(self) -> None:
        """A new agent process; it starts its trainer."""
        if self.agent is None:
            self.lives += 1
            self.agent = Agent(self, f"{self.name}-{self.lives}", self.left)

    def crash(self) -> None:
        """Agent and trainer die together: torchrun has PR_SET_PDEATHSIG."""
        if self.agent is not None:
            self._end(self.agent)

    def _end(self, agent: Agent) -> None:
        agent.die()
        self.agent, self.left = None, agent.left

    def leave(self) -> None:
        """The agent is told to stop: it says so once, and goes whether it is heard or not."""
        agent = self.agent
        left = agent.core.leave() if agent is not None and not agent.gate.closed else None
        if agent is not None and left is not None:
            self.world.network.call(self.name, "master", left, CALL_S, lambda _: None)
            self.crash()

    def abandon(self) -> Agent | None:
        """SIGSTOP of everything, for so long that another is started in its place, elsewhere; it may wake later."""
        agent, self.agent, self.left = self.agent, None, NO_INCARNATION
        if agent is not None:
            agent.gate.close()
            self.zombies.append(agent)
        return agent

    def exits(self, agent: Agent) -> None:
        """An agent goes on its own account: it was fenced."""
        if agent in self.zombies:
            agent.die()
            self.zombies.remove(agent)
        elif agent is self.agent:
            self._end(agent)
            self.world.later(RESTART_S, f"{self.name} starts again", self.start)

    def crash_trainer(self) -> None:
        """torchrun ends, and the agent sees it at once."""
        if self.agent is not None and self.agent.trainer is not None and not self.agent.trainer.over:
            self.agent.trainer_died("its trainer crashed")

    def crash_rank(self, rank: int, seen_s: float) -> None:
        """One rank dies; torchrun needs a while to end the others."""
        agent = self.agent
        trainer = agent.trainer if agent is not None else None
        if agent is None or trainer is None or trainer.over or agent.gate.closed:
            return
        trainer.lose_rank(rank % self.ranks)

        def seen() -> None:
            if agent.alive and agent.trainer is trainer:
                agent.trainer_died(f"rank {rank % self.ranks} died", rank=True)

        self.world.later(seen_s, f"{self.name}: torchrun ends all ranks", lambda: agent.gate.pass_on(seen))

    def hang(self, seconds: float) -> None:
        """The trainer stands still; its agent beats on."""
        trainer = self.agent.trainer if self.agent is not None else None
        if trainer is not None:
            trainer.gate.close()
            self.world.later(seconds, f"the trainer of {self.name} goes on", trainer.gate.open)
