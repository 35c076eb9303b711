"""A simulated cluster: its agents start, crash, are stopped and taken for dead, and are restarted."""

from __future__ import annotations

from dips.client.agent.account import NO_INCARNATION
from dips.sim.agent import CALL_S, AgentWorld, SimAgent
from dips.sim.scenario import Site

RESTART_S = 2.0  # until an agent that exited by itself is restarted


class SimCluster:
    """One cluster of the run; `site` describes its machines."""

    def __init__(self, world: AgentWorld, site: Site) -> None:
        self.world, self.site, self.name = world, site, site.name
        self.agent: SimAgent | None = None
        self.left = NO_INCARNATION  # the incarnation that the last agent saved where the next one starts
        self.zombies: list[SimAgent] = []  # agents that are stopped and taken for dead; each has a successor
        self.lives = 0
        self.gone = False  # gone for good: it is not started again

    @property
    def live_agents(self) -> list[SimAgent]:
        """All agent processes that may still act."""
        return [*self.zombies, self.agent] if self.agent else list(self.zombies)

    def start(self) -> None:
        """Start a new agent process, which starts its trainer."""
        if self.agent is None and not self.gone:
            self.lives += 1
            process, replaces = f"{self.name}-{self.lives}", bool(self.zombies)
            self.agent = SimAgent(self.world, self.site, process, self.left, self._on_agent_exit, replaces)

    def crash(self) -> None:
        """Kill agent and trainer together: torchrun has PR_SET_PDEATHSIG."""
        if self.agent is not None:
            self._end_agent(self.agent)

    def crash_for_good(self) -> None:
        """Kill all processes of the cluster, including those taken for dead."""
        self.gone = True
        self.crash()
        for zombie in self.zombies:
            zombie.kill_agent()
        self.zombies.clear()

    def _end_agent(self, agent: SimAgent) -> None:
        agent.kill_agent()
        self.agent, self.left = None, agent.left

    def leave_run(self) -> None:
        """Stop the agent: it sends Leave once, and exits whether or not that arrives."""
        agent = self.agent
        left = agent.core.leave_run() if agent is not None and not agent.gate.closed else None
        if agent is not None and left is not None:
            self.world.network.call_host(self.name, "master", left, CALL_S, lambda _: None)
            self.crash()

    def abandon_agent(self) -> SimAgent | None:
        """Stop all processes by SIGSTOP for so long that another agent is started elsewhere; they may wake later."""
        agent, self.agent, self.left = self.agent, None, NO_INCARNATION
        if agent is not None:
            agent.gate.close()
            self.zombies.append(agent)
        return agent

    def _on_agent_exit(self, agent: SimAgent) -> None:
        """Process an agent that ended by itself: it was fenced, or its name is taken."""
        if agent in self.zombies:
            agent.kill_agent()
            self.zombies.remove(agent)
        elif agent is self.agent:
            self._end_agent(agent)
            self.world.call_later(RESTART_S, f"{self.name} starts again", self.start)

    def crash_trainer(self) -> None:
        """Kill torchrun; the agent notices at once."""
        if self.agent is not None and self.agent.trainer is not None and not self.agent.trainer.over:
            self.world.monitor.trainer_died(self.agent, False)
            self.agent.torchrun.crash("its trainer crashed")

    def crash_rank(self, rank: int, seen_s: float) -> None:
        """Kill one rank; torchrun notices after `seen_s` and ends the others."""
        agent = self.agent
        trainer = agent.trainer if agent is not None else None
        if agent is None or trainer is None or trainer.over or agent.gate.closed:
            return
        trainer.lose_rank(rank % self.site.ranks)

        def notice_crash() -> None:
            if agent.alive and agent.trainer is trainer:
                self.world.monitor.trainer_died(agent, True)
                agent.torchrun.on_dead_rank(rank % self.site.ranks)

        self.world.call_later(seen_s, f"{self.name}: torchrun ends all ranks", lambda: agent.gate.pass_on(notice_crash))

    def hang_trainer(self, seconds: float) -> None:
        """Stop the trainer for a while; its agent keeps sending heartbeats."""
        trainer = self.agent.trainer if self.agent is not None else None
        if trainer is not None:
            trainer.gate.close()
            self.world.call_later(seconds, f"the trainer of {self.name} goes on", trainer.gate.open)
