"""The simulated cluster: the shipped agent on a loop of the world's time, torchrun, and the machines of both."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, cast

from dips.client.agent.account import NO_INCARNATION, PastIncarnation
from dips.client.agent.agent import CALLS, Agent
from dips.client.agent.core import AgentCore
from dips.client.agent.state import Actions, AgentSettings, AgentState, AskMaster, ClusterIdentity
from dips.client.ipc.messages import Answer, Question, Stepped
from dips.errors import Denied, Diverged, StaleIncarnation
from dips.identity.names import PeerRole
from dips.ids import PullId, PushId, VersionId
from dips.protocol.effects import Finished, Grant, Joined, Outcome
from dips.protocol.heartbeats import OWN_PACE, ClusterHeartbeatAnswer
from dips.sim.heap import ChangeSignal, Gate, Wait
from dips.sim.loop import SimLog, SimLoop
from dips.sim.network import Network, ShownCall, SimAuthority, SimTlsSource
from dips.sim.ports import TrainerAgent, TrainerWorld
from dips.sim.scenario import Site
from dips.sim.trainer import SimTrainer
from dips.sim.work import Frozen, Work
from dips.slave.ports import F32

# ---- calls to the master --------------------------------------------------------------------------------------------


class SimMasterLink:
    """The calls of an agent or a slave to the master, in the place of `MasterLink` and `SlaveServiceLink`."""

    def __init__(
        self, network: Network, loop: SimLoop, tls: SimTlsSource, name: str, question_s: float | None = None
    ) -> None:
        """`question_s` is the deadline of an agent's question; None: as shipped, by its kind."""
        self._network, self._loop, self._tls, self._name = network, loop, tls, name
        self._question_s = question_s

    async def ask_master(self, event: object) -> Any:
        """Send a question and return the reply; raises as `call_master` does."""
        return await self.call_master(event, self._question_s or CALLS[type(event)][1])

    async def call_master(self, message: object, deadline_s: float) -> Any:
        """Send a message and return the reply. Raises UnavailableMaster if none comes in time, or the master's
        error.
        """
        call = ShownCall(message, self._tls.read_current().cert)
        return await self._network.ask_master(self._loop, self._name, call, deadline_s)

    send_heartbeat = call_master


# ---- agent ----------------------------------------------------------------------------------------------------------
# The daemon's Agent (client/agent/agent.py) on a loop of the world's time, around the real core. Replaced are its
# connection to the master, the training command, and the sockets of its ranks: a trainer calls `handle_message`.
#
# Beside it the world keeps its own record of every inner step, with which the client's account is compared.


TERMINATED, KILLED = 143, 137  # exit codes of a command that SIGTERM or SIGKILL has ended
RETRY_S = 2.0  # longest pause before a master that did not answer is asked again
MAX_RESTARTS = 1000  # restarts of the training command, so that drawn failures never end a cluster for good


class ClusterObserver:
    """The hooks that a cluster calls; each does nothing by default."""

    def version_received(self, agent: SimAgent, version: VersionId, whence: str) -> None:
        """Called when a cluster received a version; `whence` is the message that named it."""

    def outcome_received(self, agent: SimAgent, frozen: Frozen, outcome: Outcome) -> None:
        """Called when a cluster received the outcome of a push."""

    def push_dropped(self, agent: SimAgent, push: PushId) -> None:
        """Called when a cluster learned that a push was dropped."""

    def trainer_stepped(self, agent: SimAgent) -> None:
        """Called when a trainer takes an inner step."""

    def push_begun(self, agent: SimAgent, push: PushId) -> None:
        """Called when the ranks of a cluster begin to push."""

    def push_moved(self, agent: SimAgent, push: PushId, moved: bool) -> None:
        """Called when a push is over; `moved`: every rank received DONE from every slave."""

    def pull_begun(self, agent: SimAgent, pull: PullId) -> None:
        """Called when the ranks of a cluster begin to pull."""

    def pull_installed(self, agent: SimAgent) -> None:
        """Called when all ranks of a cluster have copied the pulled version."""

    def pull_ended(self, agent: SimAgent, installed: bool, attempt: int) -> None:
        """Called when a pull is over; `attempt` counts consecutive failed pulls, including this one."""

    def pull_merged(self, agent: SimAgent, kept: bool) -> None:
        """Called when a pull under overlap is in a model that has trained on since its push was frozen.

        kept  the training since then was merged; False: it was not finite and is lost
        """

    def trainer_died(self, agent: SimAgent, rank: bool) -> None:
        """Called when a trainer is dead; `rank`: one rank died first. The agent may not have noticed yet."""

    def agent_exits(self, agent: SimAgent, reason: str) -> None:
        """Called when an agent ends by itself."""


class AgentWorld(TrainerWorld, Protocol):
    """The parts of the world that an agent needs."""

    network: Network
    authority: SimAuthority

    @property
    def monitor(self) -> ClusterObserver: ...


class AgentGate(Gate):
    """The gate of an agent's machine, which stops the agent's process, too."""

    def __init__(self, loop: SimLoop) -> None:
        super().__init__()
        self._loop = loop

    def close(self) -> None:
        super().close()
        self._loop.stop_process()

    def open(self) -> None:
        super().open()
        self._loop.continue_process()


class WatchedAgentCore(AgentCore):
    """The core of a simulated agent: the observers learn what the master has answered."""

    agent: SimAgent

    def on_reply(self, ask: AskMaster, result: Any, now: float) -> Actions:
        if self.awaits_answer(ask):
            self.agent.watch_reply(ask, result)
        return super().on_reply(ask, result, now)

    def on_heartbeat_reply(self, inc: int, answer: ClusterHeartbeatAnswer, now: float) -> Actions:
        self.agent.meets, self.agent.answered_at = answer.push_in_s != OWN_PACE, now
        return super().on_heartbeat_reply(inc, answer, now)


class SimAgent:
    """One agent process, with the trainer that it keeps running."""

    def __init__(
        self,
        world: AgentWorld,
        site: Site,
        process: str,
        former: PastIncarnation,
        exits: Callable[[SimAgent], None],
        replaces: bool,
    ) -> None:
        """Start an agent.

        former    the last incarnation of an agent that died here
        exits     called when this agent ends by itself
        replaces  an operator starts it elsewhere in place of one that may wake again (--take-over)
        """
        self.world, self.site, self.name, self.process = world, site, site.name, process
        settings = self.world.scenario
        self._exits = exits
        self._nonces = 0
        identity = ClusterIdentity(settings.run, self.name, settings.config_digest)
        pace = site.make_pace(settings.inner_steps)
        heartbeat_s, ranges = world.options.timing.heartbeat_s, settings.ranges_at_once
        timing = AgentSettings(
            identity,
            heartbeat_s,
            RETRY_S,
            site.overlap,
            MAX_RESTARTS,
            ranges,
            take_over=replaces,
            fragments=site.fragments,
        )
        rng = world.chance.generator_for(f"agent/{process}")
        self.core = WatchedAgentCore(timing, pace, self._make_nonce, rng, former)
        self.core.agent = self
        self.left = former  # the incarnation saved on its disk
        self.loop = SimLoop(world.heap, world.chance.generator_for(f"loop/{process}"), self.name)
        self.gate = AgentGate(self.loop)  # closed while the whole machine is stopped
        self.alive = True
        self.leaves = False  # SIGTERM has arrived
        self.consumed = 0  # tokens since the last Joined, by the world's count
        self.outcome_at = self.world.heap.now  # time of its last Outcome, or of its trainer's start
        self.answered_at = self.world.heap.now  # time of its last answered heartbeat, or of its start
        self.meets = False  # it pushes together with others, when the master plans
        self.finished: VersionId | None = None  # the last version, which it holds after the end of the run
        self._changed = ChangeSignal(world.heap)  # wakes rank 0
        self._waking: asyncio.Task[None] | None = None  # waits for the agent's next change
        self.torchrun = SimTorchrun(world, site, self, self.loop)
        log: Any = SimLog(self.loop.fail)
        with self.loop.running():
            tls = SimTlsSource(world.authority, self.name, PeerRole.CLUSTER, self.loop.time)
            master = SimMasterLink(world.network, self.loop, tls, self.name, settings.calls.question_s)
            self.agent = Agent(
                0.0, self.core, master, cast(Any, self), log, save=self._save_incarnation, start=self.torchrun.launch
            )
        run = self.agent.run(["the training command"], {})
        self.loop.create_task(run).add_done_callback(self._on_end)

    # ---- start and end ---------------------------------------------------------------------------------------------

    @property
    def state(self) -> AgentState:
        return self.core.state

    @property
    def progress(self) -> float:
        """The run's progress, as the outer loop reports it to the script."""
        return self.core.state.fraction

    @property
    def inc(self) -> int:
        return self.state.membership.inc

    @property
    def trainer(self) -> SimTrainer | None:
        return self.torchrun.trainer

    @property
    def base(self) -> VersionId | None:
        return self.trainer.base if self.trainer else None

    @property
    def theta(self) -> dict[int, F32]:
        return self.trainer.theta if self.trainer else {}

    @property
    def pulled_theta(self) -> dict[int, F32]:
        """The last pulled θ, unchanged."""
        return self.trainer.pulled_theta if self.trainer else {}

    @property
    def held_versions(self) -> list[VersionId | None]:
        return self.trainer.held_versions if self.trainer else []

    def kill_agent(self) -> None:
        """Kill the agent by SIGKILL; torchrun dies with it (PR_SET_PDEATHSIG)."""
        self.alive = False
        self.loop.kill()
        self.torchrun.end("its agent ended")

    def terminate_agent(self) -> None:
        """End the agent by SIGTERM: it stops the trainer, sends Leave once, and exits whether or not that arrives."""
        self.leaves = True
        self.loop.deliver_signal(self.agent.terminate)

    def _on_end(self, run: asyncio.Task[int]) -> None:
        if not run.cancelled():
            run.result()  # an error of it ends the simulation
            self.world.call_later(0.0, f"{self.name} exits", self._exit)

    def _exit(self) -> None:
        """Exit; raise AssertionError unless it was told to, or fenced, denied or diverged."""
        stop = self.state.stop
        if not self.alive:
            return
        if stop is not None:
            if stop.error is None or not issubclass(stop.error, StaleIncarnation | Denied | Diverged):
                raise AssertionError(f"the agent of {self.name} stops: {stop.reason}")
            self.world.trace.add_line(self.world.heap.now, f"{self.name} exits: {stop.reason}")
            self.world.monitor.agent_exits(self, stop.reason)
        self._exits(self)

    def on_trainer_start(self) -> None:
        self.outcome_at = self.world.heap.now

    def on_trainer_failed(self, trainer: SimTrainer) -> None:
        """Note that a trainer ends, since the agent has answered with an error."""
        self.world.call_later(0.0, f"{self.name}'s trainer gives up", partial(self.torchrun.give_up, trainer))

    def on_hang_up(self, attempt: int) -> None:
        """Process the end of the connection of this attempt's rank 0; a newer one may be there already."""
        if self.alive and attempt:
            self._perform(self.core.on_hang_up(attempt, self.world.heap.now))

    def on_trainer_end(self) -> None:
        """Note that the training script has ended."""
        self.finished = self.state.membership.progress.finished

    def _make_nonce(self) -> str:
        self._nonces += 1
        return f"{self.process}.{self._nonces}"

    # ---- the trainer's reports, for the world's record and the observers -----------------------------------------

    def record_step(self) -> None:
        self.world.monitor.trainer_stepped(self)

    def record_work(self, work: Work) -> None:
        self.consumed += work.tokens
        self.world.books.record_work(work)

    def record_push(self, push: PushId) -> None:
        self.world.monitor.push_begun(self, push)

    def record_push_end(self, push: PushId, moved: bool) -> None:
        self.world.monitor.push_moved(self, push, moved)

    def record_pull(self, pull: PullId) -> None:
        self.world.monitor.pull_begun(self, pull)

    def record_install(self) -> None:
        self.world.monitor.pull_installed(self)

    def record_merge(self, kept: bool) -> None:
        self.world.monitor.pull_merged(self, kept)

    def record_pull_end(self, installed: bool, attempt: int) -> None:
        self.world.monitor.pull_ended(self, installed, attempt)

    # ---- rank 0 ----------------------------------------------------------------------------------------------------

    def handle_message(self, message: Question | Stepped) -> Answer | None:
        answer, actions = self.core.on_message(message, self.world.heap.now)
        self._perform(actions)
        return answer

    def next_change(self, at_most_s: float) -> Wait:
        """Wait until the core has changed, at most `at_most_s`."""
        if self._waking is None or self._waking.done():
            self._waking = self.loop.create_task(self._wake_rank(self.agent.next_change()))
        return self._changed.wait_for_change(at_most_s, f"{self.name} polls")

    async def _wake_rank(self, change: asyncio.Event) -> None:
        await change.wait()
        if self._changed.awaited:
            self.world.call_later(0.0, f"{self.name} wakes rank 0", self._changed.wake_waiters)

    def _perform(self, actions: Actions) -> None:
        with self.loop.running():
            self.agent.perform_actions(actions)

    # ---- what the agent does, for the world's record ---------------------------------------------------------------

    def _save_incarnation(self, past: PastIncarnation) -> None:
        self.left = past

    def record_mark(self, kind: str, **fields: Any) -> None:
        """Follow the agent's timeline."""
        if kind == "joined":
            self.consumed = self.state.account.lost  # lost by its former incarnation and not reported
            if self.trainer is not None:
                self.trainer.in_hand.lose_work("its incarnation ended")  # overwritten by the pull that follows
                self.trainer.range = None  # leased to its former incarnation
        elif kind == "incarnation_ended" and self.trainer is not None:
            self.trainer.in_hand.lose_work("its incarnation ended")
        elif kind == "outcome":
            self.outcome_at = self.world.heap.now
            if fields["outcome"] == "dropped":
                seq = int(str(fields["push"]).rpartition("#")[2])
                self.world.monitor.push_dropped(self, PushId(self.name, self.inc, seq))

    def watch_reply(self, ask: AskMaster, answer: Any) -> None:
        """Let the observers see what the master has answered."""
        if isinstance(answer, Grant | Joined | Finished):
            version = answer.head if isinstance(answer, Joined) else answer.version
            self.world.monitor.version_received(self, version, type(answer).__name__)
        elif isinstance(answer, Outcome):
            if answer.version is not None:
                self.world.monitor.version_received(self, answer.version, "Outcome")
            self.world.monitor.outcome_received(self, self.world.books.frozen[ask.event.push], answer)  # type: ignore[attr-defined]


# ---- torchrun --------------------------------------------------------------------------------------------------------


class TorchrunAgent(TrainerAgent, Protocol):
    """The parts of its agent that torchrun needs."""

    name: str

    def on_trainer_start(self) -> None: ...
    def on_hang_up(self, attempt: int) -> None: ...


class SimTorchrun:
    """The training command, as the agent launches it: at most one trainer at a time; a dead one is replaced."""

    pid = 0

    def __init__(self, world: TrainerWorld, site: Site, agent: TorchrunAgent, loop: SimLoop) -> None:
        self._world, self._site, self._agent, self._loop = world, site, agent, loop
        self._launch = 0  # the present or last launch
        self._code: int | None = None  # exit code of the last launch; None: it runs
        self._over = asyncio.Event()
        self.trainer: SimTrainer | None = None

    async def launch(self, command: Sequence[str], environment: Mapping[str, str]) -> SimTorchrun:
        """Start the training command, which takes a while except for the first time."""
        number = int(environment["DIPS_ATTEMPT"])
        await asyncio.sleep(1.5 * self._site.rng.random() if number > 1 else 0.0)
        self._launch, self._code, self._over = number, None, asyncio.Event()
        self.start()
        return self

    def start(self, restart: int = 0) -> None:
        """Start the trainer; `restart` counts the restarts of the ranks by this torchrun."""
        if self._code is None and self.trainer is None:
            self._agent.on_trainer_start()
            self.trainer = SimTrainer(self._world, self._site, self._agent, self._launch, restart)

    async def wait(self) -> int:
        """Wait for the end of the launch; return its exit code."""
        await self._over.wait()
        assert self._code is not None
        return self._code

    async def end_within(self, grace_s: float) -> int:
        """End the launch by SIGTERM, which its ranks follow at once."""
        self.end("its agent has stopped it")
        return TERMINATED

    def last_lines(self, most: int) -> tuple[str, ...]:
        """Return nothing: a simulated trainer prints nothing."""
        return ()

    async def kill_leftovers(self, give_up: Callable[[Sequence[int]], bool]) -> int:
        """Do nothing: nothing is left."""
        return 0

    async def find_cause(self) -> str:
        """Return nothing: a simulated trainer prints nothing."""
        return ""

    def end(self, cause: str, code: int = KILLED) -> None:
        """Kill everything by SIGKILL."""
        self._code = code
        if self.trainer is not None:
            self._lose_trainer(cause)

    def crash(self) -> None:
        """End torchrun; its agent notices at once, and decides whether it is launched again."""
        self.end("its trainer died")
        self._loop.deliver(self._over.set)

    def give_up(self, trainer: SimTrainer) -> None:
        """End torchrun if this is the present trainer, which has ended with an error."""
        if self.trainer is trainer:
            self.crash()

    def on_dead_rank(self, rank: int) -> None:
        """Process a rank's death: torchrun restarts all ranks, or ends if it has done so too often."""
        trainer = self.trainer
        assert trainer is not None
        if trainer.restart >= self._site.restarts:
            self.crash()
            return
        self._lose_trainer("its trainer died")
        rng = self._world.chance.generator_for(f"torchrun/{self._site.name}")
        # The end of rank 0's connection is noticed at once, or only after its successor has connected.
        seen_s = 0.0 if rng.random() < 0.5 else 4.0 * rng.random()
        hang_up = partial(self._agent.gate.pass_on, partial(self._agent.on_hang_up, trainer.attempt))
        self._world.call_later(seen_s, f"rank 0 of {self._site.name} is gone", hang_up)
        self._start_later(0.3 + 1.5 * rng.random(), trainer.restart + 1)

    def _lose_trainer(self, cause: str) -> None:
        trainer, self.trainer = self.trainer, None
        assert trainer is not None
        trainer.kill_ranks()
        trainer.in_hand.lose_work(cause)

    def _start_later(self, delay_s: float, restart: int) -> None:
        launch = self._launch

        def start() -> None:
            if self._launch == launch:
                self.start(restart)

        self._world.call_later(
            delay_s, f"{self._site.name} restarts its trainer", partial(self._agent.gate.pass_on, start)
        )


# ---- cluster ---------------------------------------------------------------------------------------------------------

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
        self._wanted = False  # it is to start as soon as the present agent has left

    @property
    def live_agents(self) -> list[SimAgent]:
        """All agent processes that may still act."""
        return [*self.zombies, self.agent] if self.agent else list(self.zombies)

    def start(self) -> None:
        """Start a new agent process, which starts its trainer."""
        self._wanted = self.agent is not None and self.agent.leaves
        if self.agent is None and not self.gone:
            self.lives += 1
            process, replaces = f"{self.name}-{self.lives}", bool(self.zombies)
            self.agent = SimAgent(self.world, self.site, process, self.left, self._on_agent_exit, replaces)

    def crash(self) -> None:
        """Kill agent and trainer together: torchrun has PR_SET_PDEATHSIG."""
        if self.agent is not None:
            self._end_agent(self.agent)

    def close(self) -> None:
        """End all processes, when the run is over."""
        for agent in self.live_agents:
            agent.loop.kill()

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
        """Stop the agent by SIGTERM."""
        if self.agent is not None and not self.agent.gate.closed:
            self.agent.terminate_agent()

    def abandon_agent(self) -> SimAgent | None:
        """Stop all processes by SIGSTOP for so long that another agent is started elsewhere; they may wake later."""
        agent, self.agent, self.left = self.agent, None, NO_INCARNATION
        if agent is not None:
            agent.gate.close()
            self.zombies.append(agent)
        return agent

    def _on_agent_exit(self, agent: SimAgent) -> None:
        """Process an agent that ended: it has left the run, was fenced, or its name is taken."""
        if agent in self.zombies:
            agent.kill_agent()
            self.zombies.remove(agent)
        elif agent is self.agent:
            self._end_agent(agent)
            if not agent.leaves or self._wanted:
                self.world.call_later(RESTART_S, f"{self.name} starts again", self.start)

    def crash_trainer(self) -> None:
        """Kill torchrun; the agent notices at once."""
        if self.agent is not None and self.agent.trainer is not None and not self.agent.trainer.over:
            self.world.monitor.trainer_died(self.agent, False)
            self.agent.torchrun.crash()

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
