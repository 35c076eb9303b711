"""A simulated slave: a machine with a disk, and a process around the real Shard that dies and is started anew.

Orders are carried out one after another, each takes its time, and its effect stands at the end of that time; a crash in
between may leave a torn snapshot. What the daemon's app does with real sockets is done here with the simulated network.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from dips.errors import Busy, DipsError
from dips.ids import VersionId
from dips.outer import twins
from dips.outer.crew import Crew
from dips.outer.versions import Versions
from dips.protocol.effects import (
    Apply,
    Commit,
    Failed,
    Fold,
    LoadVersion,
    Measure,
    Order,
    Persist,
    Registered,
    RegisterLater,
)
from dips.protocol.events import OrderAnswered, PushRefused, PushStaged
from dips.protocol.heartbeats import SlaveHeartbeat, SlaveHeartbeatAnswer
from dips.protocol.options import Options
from dips.sim.disk import SimDisk
from dips.sim.fiber import Fiber, Gate, Story, sleep
from dips.sim.flow import SimFlow
from dips.sim.heap import Chance, Heap
from dips.sim.network import Network
from dips.sim.scenario import Scenario
from dips.slave.ports import F32
from dips.slave.shard import Shard

CALL_S = 2.0
WORK_S: dict[type, float] = {
    Measure: 0.03,
    Fold: 0.03,
    Apply: 0.06,
    Persist: 0.15,
    Commit: 0.02,
}  # of an order, at most double
LOAD_S = 0.3
BUSY_S = 0.3  # between two tries of an order that found a pool full


class SlaveObserver:
    """The hooks that a slave calls; each does nothing by default."""

    def registered(self, process: SlaveProcess, answer: Registered) -> None:
        """A slave was answered."""

    def before_order(self, process: SlaveProcess, order: Order) -> None:
        """A slave is about to carry out an order."""

    def after_order(self, process: SlaveProcess, order: Order) -> None:
        """It has carried it out."""

    def slave_crashed(self, process: SlaveProcess) -> None:
        """A slave's process is about to die."""

    def occurred(self, what: str) -> None:
        """Something rare happened that has no hook of its own; coverage counts it by this name."""


class SlaveWorld(Protocol):
    """What a slave needs of the world around it."""

    heap: Heap
    chance: Chance
    network: Network
    scenario: Scenario
    options: Options
    genesis: dict[int, F32]
    touched: dict[str, SlaveMachine]

    @property
    def monitor(self) -> SlaveObserver: ...
    @property
    def master_is_deceived(self) -> bool: ...


class SlaveMachine:
    """Where a slave lives: its name, its disk, and the process if there is one."""

    def __init__(self, world: SlaveWorld, name: str, layers: tuple[int, ...]) -> None:
        self.world, self.name, self.layers = world, name, layers
        self.rng = world.chance.of(f"slave/{name}")
        genesis = {layer: world.genesis[layer] for layer in layers}
        self.disk = SimDisk(genesis, world.chance.of(f"disk/{name}"), lambda: world.monitor.occurred("snapshot"))
        self.process: SlaveProcess | None = None
        self.lives = 0
        self._touched = world.touched
        world.network.attach(name, self)

    def touch(self) -> None:
        """Something of it may have changed since the invariants last looked."""
        self._touched[self.name] = self

    def start(self) -> None:
        if self.process is None:
            self.touch()
            self.lives += 1
            self.process = SlaveProcess(self, f"{self.name}-{self.lives}")

    def crash(self) -> None:
        """SIGKILL: memory is gone; what was being written may be torn, whole, or not begun."""
        self.touch()
        process, self.process = self.process, None
        if process is not None:
            process.die()

    def receive(self, sender: str, message: Any, answer: Callable[[Any], None]) -> None:
        if self.process is not None and isinstance(message, Order):
            process = self.process
            process.gate.pass_on(lambda: process.ordered(message, answer))


class SlaveProcess:
    """One life of a slave."""

    def __init__(self, machine: SlaveMachine, nonce: str) -> None:
        self.machine, self.world, self.name, self.nonce = machine, machine.world, machine.name, nonce
        settings = self.world.scenario
        self.gate = Gate()  # closed while it is stopped
        self.flow = SimFlow(self.world.heap, machine.touch, self.gate)
        self.versions = Versions(Crew(twins), settings.slots, settings.pinned)
        self.shard = Shard(self.name, self.versions, machine.disk, self.flow)
        self.alive = True
        self.holds = False  # told Hold by the present master, as far as we know
        self._queue: deque[tuple[Order, Callable[[Any], None], float]] = deque()
        self._busy = False
        self._registering: Fiber | None = None
        self._register()
        self._beats = Fiber(self._beat(), self.gate)

    def die(self) -> None:
        self.world.monitor.slave_crashed(self)
        self.alive = self.flow.alive = False
        self._beats.kill()
        if self._registering is not None:
            self._registering.kill()
        if self._busy and isinstance(self._queue[0][0].body, Persist):
            self._die_writing(self._queue[0][0].body.version)

    def _die_writing(self, version: VersionId) -> None:
        if self.shard.versions.prepared != version:
            return
        theta, momentum = self.versions.theta(version), self.versions.momentum(version)
        fate = self.machine.rng.random()
        if fate < 0.4:
            self.machine.disk.tear(version, theta, momentum)
        elif fate < 0.7 and not self.machine.disk.full:
            self.machine.disk.write(version, theta, momentum)

    # ---- orders ----------------------------------------------------------------------------------------------------

    def ordered(self, order: Order, answer: Callable[[Any], None]) -> None:
        """Queue an order behind those that came before it."""
        if not self.alive:
            return
        self._queue.append((order, answer, self.world.heap.now + order.deadline_s))
        if not self._busy:
            self._next()

    def _next(self) -> None:
        self._busy = bool(self._queue)
        if self._busy:
            body = self._queue[0][0].body
            work_s = WORK_S.get(type(body), 0.0) * (self.machine.disk.slowness if isinstance(body, Persist) else 1.0)
            self._later(work_s * (1.0 + self.machine.rng.random()), f"{self.name} works", self._carry_out)

    def _carry_out(self) -> None:
        order, answer, deadline = self._queue[0]
        self.machine.touch()
        if order.number in self.shard._fences._answers:
            self.world.monitor.occurred("answer_lost")
        self.world.monitor.before_order(self, order)
        result = self._execute(order)
        self.world.monitor.after_order(self, order)
        if isinstance(result, Failed) and issubclass(result.error, Busy) and self.world.heap.now + BUSY_S < deadline:
            self._later(BUSY_S, f"{self.name} is busy", self._carry_out)  # a reader or a slot will end: wait for it
            return
        self._queue.popleft()
        self.report()
        answer(result)
        self._next()

    def _execute(self, order: Order) -> OrderAnswered | Failed:
        try:
            return OrderAnswered(self.name, order.sinc, order.number, self.shard.execute(order))
        except DipsError as error:
            return Failed(type(error), str(error))

    # ---- what the data flow says -----------------------------------------------------------------------------------

    def report(self) -> None:
        """Tell the master what was staged or refused; a lost Staged is repeated by the beats."""
        for report in self.shard.take_reports():
            event = (
                PushRefused(self.name, self.shard.sinc, report.push, report.reason)
                if report.reason
                else PushStaged(self.name, self.shard.sinc, report.push, report.nbytes)
            )
            self.world.network.call(self.name, "master", event, CALL_S, lambda _: None)

    # ---- beats -----------------------------------------------------------------------------------------------------

    def _beat(self) -> Story:
        while True:
            yield sleep(self.world.heap, self.world.options.timing.beat_s, f"beat of {self.name}")
            self.report()
            shard, versions = self.shard, self.versions
            if shard.sinc == 0:
                continue
            beat = SlaveHeartbeat(
                self.name, shard.sinc, shard.term, versions.memory, shard.staged_pushes, self.flow.transfers(),
                versions.used_bytes, versions.limit_bytes, 0, 0, 0.0, 0.0,
            )  # fmt: skip
            deadline_s = self.world.options.timing.beat_s
            heard = partial(self._heard, shard.sinc)
            self.world.network.call(self.name, "master", beat, deadline_s, partial(self._pass, heard))

    def _pass(self, heard: Callable[[Any], None], answer: Any) -> None:
        self.gate.pass_on(lambda: heard(answer))

    def _heard(self, sinc: int, answer: Any) -> None:
        if not self.alive or not isinstance(answer, SlaveHeartbeatAnswer) or sinc != self.shard.sinc:
            return
        if answer.register or answer.term > self.shard.term:
            self._register()  # also with a master of a lower term: so it hears which one was seen
        elif answer.term == self.shard.term:
            self.machine.touch()
            self.shard.heal(answer)
            self.report()

    # ---- registration ----------------------------------------------------------------------------------------------

    def _register(self) -> None:
        if self._registering is None:
            self.holds = False
            self._registering = Fiber(self._until_hold(), self.gate)

    def _until_hold(self) -> Story:
        """Register, do as told, register again, until Hold."""
        yield sleep(self.world.heap, 0.1, f"{self.name} registers")
        settings = self.world.scenario
        while True:
            question = self.shard.registration(0, self.nonce, settings.run, f"{self.name}:1", (f"{self.name}:2",))
            answer = yield partial(self.world.network.call, self.name, "master", question, CALL_S)
            if not isinstance(answer, Registered):
                yield sleep(self.world.heap, 0.5, f"{self.name} registers again")
                continue
            if answer.term < self.shard.term:
                continue
            self.world.monitor.registered(self, answer)
            self.machine.touch()
            self.shard.welcome(answer)
            if isinstance(answer.order, LoadVersion):
                yield sleep(self.world.heap, LOAD_S, f"{self.name} loads {answer.order.version}")
            self.machine.touch()
            if self.shard.follow(answer.order):
                break
            if isinstance(answer.order, RegisterLater):
                yield sleep(self.world.heap, answer.order.retry_after_s, f"{self.name} waits to register")
            self.report()
        self.holds = not self.world.master_is_deceived  # what a deceived master takes for the head need not be it
        self.machine.touch()
        self._registering = None
        self.report()

    def _later(self, delay_s: float, what: str, action: Callable[[], None]) -> None:
        due = partial(self.gate.pass_on, lambda: action() if self.alive else None)
        self.world.heap.after(delay_s, what, due)
