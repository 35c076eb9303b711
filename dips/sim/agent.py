"""A simulated agent: a shell around the real core (client/agent/core.py), and its calls to the master."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from dips.client.agent.account import NO_INCARNATION, PastIncarnation
from dips.client.agent.core import AgentCore
from dips.client.agent.restarts import EndAgent, LaunchCommand
from dips.client.agent.state import (
    Actions,
    AgentSettings,
    AgentState,
    AskMaster,
    Channel,
    ClusterIdentity,
    RecordMark,
    SaveIncarnation,
    SendHeartbeat,
    StopTrainer,
)
from dips.client.ipc.messages import Answer, Question, Stepped
from dips.errors import Denied, DipsError, Diverged, StaleIncarnation, UnavailableMaster
from dips.ids import PullId, PushId, VersionId
from dips.protocol.effects import Failed, Finished, Grant, Joined, Outcome
from dips.protocol.heartbeats import OWN_PACE, ClusterHeartbeatAnswer
from dips.sim.heap import ChangeSignal, Fiber, Gate, Heap, Story, Wait, sleep
from dips.sim.network import Network
from dips.sim.ports import TrainerAgent, TrainerWorld
from dips.sim.scenario import Site
from dips.sim.trainer import SimTrainer
from dips.sim.work import Frozen, Work
from dips.slave.ports import F32

# ---- master client --------------------------------------------------------------------------------------------------


CALL_S = 2.0  # deadline of a question


class Asker(Protocol):
    """The receiver of replies and errors."""

    def on_reply(self, ask: AskMaster, answer: Any) -> None: ...
    def on_error(self, ask: AskMaster, error: DipsError) -> None: ...
    def on_heartbeat_reply(self, inc: int, answer: ClusterHeartbeatAnswer) -> None: ...
    def on_heartbeat_error(self, error: DipsError) -> None: ...


class SimMasterClient:
    """Sends one question at a time in each channel; a newer one replaces an older one."""

    def __init__(self, heap: Heap, network: Network, name: str, gate: Gate, asker: Asker) -> None:
        self._heap, self._network, self._name, self._gate, self._asker = heap, network, name, gate, asker
        self._asking: dict[Channel, Fiber] = {}

    def ask_master(self, ask: AskMaster) -> None:
        older = self._asking.get(ask.channel)
        if older is not None:
            older.kill()
        self._asking[ask.channel] = Fiber(self._carry_question(ask), self._gate)

    def send_heartbeat(self, action: SendHeartbeat) -> None:
        """Send a heartbeat; its answer is processed when the agent's machine runs."""
        inc = action.heartbeat.inc

        def on_answer(answer: Any) -> None:
            self._gate.pass_on(partial(self._take_heartbeat_answer, inc, answer))

        self._network.call_host(self._name, "master", action.heartbeat, action.deadline_s, on_answer)

    def kill_client(self) -> None:
        for fiber in self._asking.values():
            fiber.kill()

    def _carry_question(self, ask: AskMaster) -> Story:
        if ask.delay_s:
            yield sleep(self._heap, ask.delay_s, f"{self._name} asks")
        answer = yield partial(self._network.call_host, self._name, "master", ask.event, CALL_S)
        error = error_of(answer)
        if error is None:
            self._asker.on_reply(ask, answer)
        else:
            self._asker.on_error(ask, error)

    def _take_heartbeat_answer(self, inc: int, answer: Any) -> None:
        error = error_of(answer)
        if error is None:
            self._asker.on_heartbeat_reply(inc, answer)
        else:
            self._asker.on_heartbeat_error(error)


def error_of(answer: Any) -> DipsError | None:
    """Return the error that a call to the master would have raised; None if it would have returned."""
    if answer is None:
        return UnavailableMaster("the master does not answer")
    if isinstance(answer, Failed):
        return answer.error(answer.message)
    return None


# ---- agent ----------------------------------------------------------------------------------------------------------
# A simulated agent: a shell around the real core (client/agent/core.py), like the daemon (client/agent/agent.py).
#
# The shell sends questions and heartbeats to the master, serves rank 0 and runs the training command. Beside it the
# world keeps its own record of every inner step, with which the client's account is compared.


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

    @property
    def monitor(self) -> ClusterObserver: ...


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
        self.core = AgentCore(timing, pace, self._make_nonce, world.chance.generator_for(f"agent/{process}"), former)
        self.left = former  # the incarnation saved on its disk
        self.gate = Gate()  # closed while the whole machine is stopped
        self.alive = True
        self.consumed = 0  # tokens since the last Joined, by the world's count
        self.outcome_at = self.world.heap.now  # time of its last Outcome, or of its trainer's start
        self.meets = False  # it pushes together with others, when the master plans
        self.finished: VersionId | None = None  # the last version, which it holds after the end of the run
        self._master = SimMasterClient(world.heap, world.network, self.name, self.gate, self)
        self._changed = ChangeSignal(world.heap)  # wakes rank 0
        self._clock = Fiber(self._keep_time(), self.gate)
        self.torchrun = SimTorchrun(world, site, self, self.core.plan_first_launch())
        self.torchrun.start()

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
        self._clock.kill()
        self._master.kill_client()
        self.torchrun.end("its agent ended")

    def on_trainer_start(self) -> None:
        self.outcome_at = self.world.heap.now

    def on_command_end(self, before: LaunchCommand, reason: str) -> LaunchCommand | None:
        """Process a crash of the training command; return its next launch, None if this agent ends instead."""
        self._do_actions(self.core.on_trainer_gone(reason, self.world.heap.now))
        plan = self.core.plan_next_launch(before, code=137)
        if isinstance(plan, EndAgent):
            self.world.call_later(0.0, f"{self.name} exits", partial(self._exits, self))
            return None
        return plan

    def on_hang_up(self, attempt: int) -> None:
        """Process the end of the connection of this attempt's rank 0; a newer one may be there already."""
        if self.alive and attempt:
            self._do_actions(self.core.on_hang_up(attempt, self.world.heap.now))

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
        self._do_actions(actions)
        return answer

    def next_change(self, at_most_s: float) -> Wait:
        """Wait until the core has changed, at most `at_most_s`."""
        return self._changed.wait_for_change(at_most_s, f"{self.name} polls")

    # ---- the master ------------------------------------------------------------------------------------------------

    def _do_actions(self, actions: Actions) -> None:
        for action in actions:
            match action:
                case AskMaster():
                    self._master.ask_master(action)
                case SendHeartbeat():
                    self._master.send_heartbeat(action)
                case SaveIncarnation(past):
                    self.left = past
                case RecordMark():
                    self._on_mark(action)
                case StopTrainer():
                    self._on_stop(action)
        if actions and self._changed.awaited:  # not at once, since the caller has not finished
            self.world.call_later(0.0, f"{self.name} wakes rank 0", self._changed.wake_waiters)

    def _on_mark(self, mark: RecordMark) -> None:
        if mark.kind == "joined":
            self.consumed = self.state.account.lost  # lost by its former incarnation and not reported
            if self.trainer is not None:
                self.trainer.in_hand.lose_work("its incarnation ended")  # overwritten by the pull that follows
                self.trainer.range = None  # leased to its former incarnation
        elif mark.kind == "incarnation_ended" and self.trainer is not None:
            self.trainer.in_hand.lose_work("its incarnation ended")
        elif mark.kind == "outcome":
            self.outcome_at = self.world.heap.now
            if mark.fields["outcome"] == "dropped":
                seq = int(str(mark.fields["push"]).rpartition("#")[2])
                self.world.monitor.push_dropped(self, PushId(self.name, self.inc, seq))

    def _on_stop(self, stop: StopTrainer) -> None:
        """Exit because the core cannot continue; raise AssertionError unless it was fenced, denied or diverged."""
        if not self.alive:
            return
        if stop.error is None or not issubclass(stop.error, StaleIncarnation | Denied | Diverged):
            raise AssertionError(f"the agent of {self.name} stops: {stop.reason}")
        self.world.trace.add_line(self.world.heap.now, f"{self.name} exits: {stop.reason}")
        self.world.monitor.agent_exits(self, stop.reason)
        self._exits(self)

    def on_error(self, ask: AskMaster, error: DipsError) -> None:
        self._do_actions(self.core.on_error(ask, error, self.world.heap.now))

    def on_reply(self, ask: AskMaster, answer: Any) -> None:
        if self.core.awaits_answer(ask):
            if isinstance(answer, Grant | Joined | Finished):
                version = answer.head if isinstance(answer, Joined) else answer.version
                self.world.monitor.version_received(self, version, type(answer).__name__)
            elif isinstance(answer, Outcome):
                if answer.version is not None:
                    self.world.monitor.version_received(self, answer.version, "Outcome")
                self.world.monitor.outcome_received(self, self.world.books.frozen[ask.event.push], answer)  # type: ignore[attr-defined]
        self._do_actions(self.core.on_reply(ask, answer, self.world.heap.now))

    # ---- heartbeats ------------------------------------------------------------------------------------------------

    def _keep_time(self) -> Story:
        """Call the core whenever one of its deadlines is due."""
        while True:
            now, heartbeat_s = self.world.heap.now, self.world.options.timing.heartbeat_s
            due = min(self.core.next_deadline(), now + heartbeat_s)
            yield sleep(self.world.heap, max(0.0, due - now), f"heartbeat of {self.name}")
            self._do_actions(self.core.tick(self.world.heap.now))

    def on_heartbeat_reply(self, inc: int, answer: ClusterHeartbeatAnswer) -> None:
        if self.alive:
            self.meets = answer.push_in_s != OWN_PACE
            self._do_actions(self.core.on_heartbeat_reply(inc, answer, self.world.heap.now))

    def on_heartbeat_error(self, error: DipsError) -> None:
        if self.alive:
            self._do_actions(self.core.on_heartbeat_error(error, self.world.heap.now))


# ---- torchrun --------------------------------------------------------------------------------------------------------


class TorchrunAgent(TrainerAgent, Protocol):
    """The parts of its agent that torchrun needs."""

    name: str

    def on_trainer_start(self) -> None: ...
    def on_command_end(self, before: LaunchCommand, reason: str) -> LaunchCommand | None: ...
    def on_hang_up(self, attempt: int) -> None: ...


class SimTorchrun:
    """Runs at most one trainer at a time; a dead one is replaced after a while."""

    def __init__(self, world: TrainerWorld, site: Site, agent: TorchrunAgent, launch: LaunchCommand) -> None:
        self._world, self._site, self._agent = world, site, agent
        self._launch = launch  # the present or last launch
        self._ended = False
        self.trainer: SimTrainer | None = None

    def start(self, restart: int = 0) -> None:
        """Start the trainer; `restart` counts the restarts of the ranks by this torchrun."""
        if not self._ended and self.trainer is None:
            self._agent.on_trainer_start()
            self.trainer = SimTrainer(self._world, self._site, self._agent, self._launch.launch, restart)

    def end(self, cause: str) -> None:
        """Kill everything by SIGKILL, for good."""
        self._ended = True
        if self.trainer is not None:
            self._lose_trainer(cause)

    def crash(self, reason: str) -> None:
        """End torchrun; its agent notices at once, and decides whether it is launched again."""
        self._lose_trainer("its trainer died")
        launch = self._agent.on_command_end(self._launch, reason)
        if launch is not None:
            self._launch = launch
            self._start_later(launch.delay_s + 1.5 * self._site.rng.random(), 0)

    def on_dead_rank(self, rank: int) -> None:
        """Process a rank's death: torchrun restarts all ranks, or ends if it has done so too often."""
        trainer = self.trainer
        assert trainer is not None
        if trainer.restart >= self._site.restarts:
            self.crash(f"rank {rank} died")
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
        start = partial(self._agent.gate.pass_on, partial(self.start, restart))
        self._world.call_later(delay_s, f"{self._site.name} restarts its trainer", start)


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
