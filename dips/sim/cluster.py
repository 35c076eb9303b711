"""A simulated agent: the doing part around the client's real mind (client/session.py), as client/agent.py is.

It asks the master what the session orders, again until there is an answer; it beats, serves rank 0 and keeps a trainer
going. Beside it the world keeps its own books of every inner step: what the account of the client is compared with.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from dips import errors
from dips.client.agent.account import PastIncarnation
from dips.client.agent.actions import (
    Actions,
    AskMaster,
    Channel,
    RecordMark,
    SaveIncarnation,
    SendHeartbeat,
    StopTrainer,
)
from dips.client.agent.core import AgentCore
from dips.client.agent.pace import Pace
from dips.client.agent.state import AgentSettings, ClusterIdentity
from dips.client.ipc.messages import Answer, Question, Stepped
from dips.errors import DipsError, UnavailableMaster
from dips.ids import PushId, VersionId
from dips.protocol.beats import ClusterBeatAnswer
from dips.protocol.effects import Failed, Finished, Grant, Joined, Outcome
from dips.sim.fiber import Fiber, Gate, Resume, Story, Wait, sleep
from dips.sim.trainer import Trainer
from dips.sim.work import Work
from dips.slave.ports import F32

if TYPE_CHECKING:
    from dips.sim.site import Site

CALL_S = 2.0  # deadline of one question
RETRY_S = 2.0  # the longest pause before a master that did not answer is asked again


class Agent:
    """One process of the agent, with the trainer that it keeps alive."""

    def __init__(self, site: Site, process: str, former: PastIncarnation) -> None:
        self.site, self.world, self.name, self.process = site, site.world, site.name, process
        settings = self.world.settings
        self._nonces = 0
        identity = ClusterIdentity(settings.run, self.name, settings.config_digest)
        rng = self.world.chance.of(f"agent/{process}")
        timing = AgentSettings(identity, self.world.options.timing.beat_s, RETRY_S)
        self.core = AgentCore(timing, Pace(steps=settings.inner_steps), self._nonce, rng, former)
        self.left = former  # behind, on its disk
        self.gate = Gate()  # closed while the whole machine is stopped
        self.alive = True
        self.term = 0
        self.consumed = 0  # tokens since the last Joined, by the world's own count
        self.outcome_at = self.world.heap.now  # when it last heard an Outcome, or its trainer began
        self.finished: VersionId | None = None  # the run is over and it holds its last version
        self._lives = 0
        self._asking: dict[Channel, Fiber] = {}
        self._waiting: list[Resume] = []  # rank 0 waits for a change
        self._beats = Fiber(self._beat(), self.gate)
        self.trainer: Trainer | None = None
        self._start_trainer()

    # ---- lives -----------------------------------------------------------------------------------------------------

    @property
    def inc(self) -> int:
        return self.core.state.membership.inc

    @property
    def base(self) -> VersionId | None:
        return self.trainer.base if self.trainer else None

    @property
    def theta(self) -> dict[int, F32]:
        return self.trainer.theta if self.trainer else {}

    @property
    def held(self) -> list[VersionId | None]:
        return self.trainer.held if self.trainer else []

    def die(self) -> None:
        """SIGKILL of the agent: torchrun dies with it (PR_SET_PDEATHSIG)."""
        self.alive = False
        self._beats.kill()
        for fiber in self._asking.values():
            fiber.kill()
        if self.trainer is not None:
            self.trainer.kill()
            self._lose(self.trainer, "its agent ended")

    def trainer_died(self, reason: str, rank: bool = False) -> None:
        """torchrun has ended all ranks; it is started again."""
        self.world.watch.trainer_died(self, rank)
        trainer, self.trainer = self.trainer, None
        assert trainer is not None
        trainer.kill()
        self._lose(trainer, "its trainer died")
        self._do(self.core.on_trainer_gone(reason, self.world.heap.now))
        delay_s = 0.5 + 2.0 * self.site.rng.random()
        self.world.later(delay_s, f"{self.name} restarts its trainer", partial(self.gate.pass_on, self._start_trainer))

    def ended(self) -> None:
        """The training script is through."""
        self.finished = self.core.state.membership.progress.finished

    def _start_trainer(self) -> None:
        if self.alive and self.trainer is None:
            self._lives += 1
            self.outcome_at = self.world.heap.now
            self.trainer = Trainer(self, self._lives)

    def _nonce(self) -> str:
        self._nonces += 1
        return f"{self.process}.{self._nonces}"

    # ---- the world's own books -------------------------------------------------------------------------------------

    def earned(self, work: Work) -> None:
        self.consumed += work.tokens

    def overwritten(self, trainer: Trainer) -> None:
        """A pull has taken the place of everything that the trainer did."""
        self._lose(trainer, "a pull overwrote it")

    @staticmethod
    def _lose(trainer: Trainer, cause: str) -> None:
        for work in trainer.works:
            work.lost = cause
        trainer.works, trainer.used = [], []

    # ---- rank 0 ----------------------------------------------------------------------------------------------------

    def hear(self, message: Question | Stepped) -> Answer | None:
        answer, actions = self.core.on_message(message, self.world.heap.now)
        self._do(actions)
        return answer

    def next_change(self, at_most_s: float) -> Wait:
        """Wait until the session has done something, or so long."""

        def begin(resume: Resume) -> None:
            timer = self.world.heap.after(at_most_s, f"{self.name} polls", lambda: over(None))

            def over(value: Any) -> None:
                if over in self._waiting:
                    self._waiting.remove(over)
                    timer.cancel()
                    resume(value)

            self._waiting.append(over)

        return begin

    # ---- the master ------------------------------------------------------------------------------------------------

    def _do(self, actions: Actions) -> None:
        for action in actions:
            match action:
                case AskMaster():
                    self._start_asking(action)
                case RecordMark():
                    self._marked(action)
                case SendHeartbeat():
                    self._send_heartbeat(action)
                case SaveIncarnation(past):
                    self.left = past
                case StopTrainer():
                    self._stopped(action)
        if actions and self._waiting:  # not at once: whoever changed it is still at work
            self.world.later(0.0, f"{self.name} wakes rank 0", self._wake)

    def _wake(self) -> None:
        for resume in list(self._waiting):
            resume(None)

    def _marked(self, mark: RecordMark) -> None:
        if mark.kind == "joined":
            self.consumed = self.core.state.account.lost  # what its former life lost and did not tell
            if self.trainer is not None:
                self._lose(self.trainer, "its life at the master ended")  # the pull that follows overwrites it
                self.trainer.range = None  # leased to its former life
        elif mark.kind == "life_ended" and self.trainer is not None:
            self._lose(self.trainer, "its life at the master ended")
        elif mark.kind == "outcome":
            self.outcome_at = self.world.heap.now
            if mark.fields["outcome"] == "dropped":
                self.world.watch.dropped(self, PushId(self.name, self.inc, int(str(mark.fields["seq"]))))

    def _stopped(self, stop: StopTrainer) -> None:
        """The session cannot go on: ours was fenced, or something is broken that must never break."""
        if not self.alive:
            return
        if not stop.reason.startswith("StaleIncarnation"):
            raise AssertionError(f"the agent of {self.name} stops: {stop.reason}")
        self.world.trace.add(self.world.heap.now, f"{self.name} exits: {stop.reason}")
        self.world.watch.agent_exits(self, stop.reason)
        self.site.exits(self)

    def _start_asking(self, ask: AskMaster) -> None:
        older = self._asking.get(ask.channel)
        if older is not None:
            older.kill()
        self._asking[ask.channel] = Fiber(self._carry(ask), self.gate)

    def _carry(self, ask: AskMaster) -> Story:
        yield sleep(self.world.heap, ask.delay_s, f"{self.name} asks")
        answer = yield partial(self.world.network.call, self.name, "master", ask.event, CALL_S)
        error = _error(answer)
        if error is not None:
            self._do(self.core.on_error(ask, error, self.world.heap.now))
        else:
            self._hear_answer(ask, answer)

    def _hear_answer(self, ask: AskMaster, answer: Any) -> None:
        if self.core.awaits(ask):
            if isinstance(answer, Grant | Joined | Finished):
                self.world.watch.told(self, answer)
            elif isinstance(answer, Outcome):
                self.world.watch.outcome(self, self.world.books.frozen[ask.event.push], answer)  # type: ignore[attr-defined]
        self._do(self.core.on_reply(ask, answer, self.world.heap.now))

    # ---- beats -----------------------------------------------------------------------------------------------------

    def _beat(self) -> Story:
        """Call the core whenever something is due."""
        while True:
            due = self.core.next_deadline()
            beat_s = self.world.options.timing.beat_s
            yield sleep(self.world.heap, max(0.0, min(due - self.world.heap.now, beat_s)), f"heartbeat of {self.name}")
            self._do(self.core.tick(self.world.heap.now))

    def _send_heartbeat(self, action: SendHeartbeat) -> None:
        inc = action.heartbeat.inc

        def on_answer(answer: Any) -> None:
            self.gate.pass_on(lambda: self._take_heartbeat_answer(inc, answer))

        self.world.network.call(self.name, "master", action.heartbeat, action.deadline_s, on_answer)

    def _take_heartbeat_answer(self, inc: int, answer: Any) -> None:
        if not self.alive:
            return
        now = self.world.heap.now
        if isinstance(answer, ClusterBeatAnswer):
            self._do(self.core.on_heartbeat_reply(inc, answer, now))
        else:
            self._do(self.core.on_heartbeat_error(_error(answer) or UnavailableMaster("no answer"), now))


def _error(answer: Any) -> DipsError | None:
    if answer is None:
        return UnavailableMaster("the master does not answer")
    if isinstance(answer, Failed):
        found: DipsError = getattr(errors, answer.error, DipsError)(answer.message)
        return found
    return None
