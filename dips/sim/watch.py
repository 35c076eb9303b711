"""Who looks at the world: the hooks that every part of it calls, and the base of all invariants.

An invariant reads the world and changes nothing in it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from dips.ids import PullId, PushId, VersionId
from dips.protocol.effects import Note, Order, Outcome, Registered
from dips.protocol.events import Event
from dips.protocol.records import LedgerState, Record
from dips.sim.work import Frozen

if TYPE_CHECKING:
    from dips.sim.cluster import Agent
    from dips.sim.master import MasterProcess
    from dips.sim.slave import SlaveProcess
    from dips.sim.world import World


class Violation(Exception):
    """An invariant does not hold."""

    def __init__(self, invariant: Invariant, what: str) -> None:
        super().__init__(f"[{invariant.number}] {type(invariant).__name__}: {what}")
        self.number = invariant.number


class Listener:
    """The hooks; a subclass overrides those that it needs, and only those are called."""

    def after_event(self) -> None:
        """The machines in `world.looked_at` may have changed."""

    def time_passed(self) -> None:
        """A few events later: what only time can break is looked at."""

    def recorded(self, record: Record) -> None:
        """A record is durable."""

    def restored(self, state: LedgerState) -> None:
        """A master starts from this."""

    def told_version(self, agent: Agent, version: VersionId, whence: str) -> None:
        """A cluster was told a version."""

    def outcome(self, agent: Agent, frozen: Frozen, outcome: Outcome) -> None:
        """A cluster heard what became of a push."""

    def stepped(self, agent: Agent) -> None:
        """A trainer takes an inner step."""

    def installed(self, agent: Agent) -> None:
        """All ranks of a cluster copied what they pulled."""

    def granted(self, agent: Agent, push: PushId) -> None:
        """The ranks of a cluster begin to push."""

    def push_moved(self, agent: Agent, push: PushId, moved: bool) -> None:
        """They have ended; `moved` if every one of them heard DONE."""

    def pulling(self, agent: Agent, pull: PullId) -> None:
        """The ranks of a cluster begin to pull."""

    def pulled(self, agent: Agent, installed: bool, attempt: int) -> None:
        """A pull is over."""

    def dropped(self, agent: Agent, push: PushId) -> None:
        """A cluster heard that a push came to nothing."""

    def agent_exits(self, agent: Agent, reason: str) -> None:
        """An agent goes on its own account."""

    def met(self, row: str) -> None:
        """Something happened that is counted; see coverage.py."""

    def trainer_died(self, agent: Agent, rank: bool) -> None:
        """A trainer is dead; `rank`: one rank of it died first."""

    def slave_crashed(self, process: SlaveProcess) -> None:
        """A slave's process is about to die."""

    def master_died(self, process: MasterProcess, rows: bool, written: bool) -> None:
        """A master's process died, perhaps over the row of a version."""

    def cut_off(self, sender: str, receiver: str, both: bool) -> None:
        """A message vanished on a parted link."""

    def passes_again(self, sender: str, receiver: str) -> None:
        """The first message passes a link that was parted."""

    def order_leaves(self, order: Order) -> None:
        """A master sends an order."""

    def before_order(self, process: SlaveProcess, order: Order) -> None:
        """A slave is about to carry out an order."""

    def after_order(self, process: SlaveProcess, order: Order) -> None:
        """It has."""

    def registered(self, process: SlaveProcess, answer: Registered) -> None:
        """A slave was answered."""

    def before_step(self, master: MasterProcess, event: Event) -> None:
        """A Coordinator is about to take an event."""

    def after_step(self, master: MasterProcess, event: Event) -> None:
        """It has."""

    def beat_read(self, role: str, name: str, life: int) -> None:
        """A master read a beat."""

    def judged(self, verdict: Event) -> None:
        """A judge said that somebody is silent."""

    def noted(self, note: Note) -> None:
        """A Coordinator told the log."""

    def at_rest(self) -> None:
        """The run is over: nothing has failed for long."""


HOOKS = tuple(name for name in vars(Listener) if not name.startswith("_"))


class Invariant(Listener):
    """One thing that must always be true; `number` is that of protocol.md section 4."""

    number = 0

    def __init__(self, world: World) -> None:
        self.world = world

    def require(self, holds: bool, what: str) -> None:
        if not holds:
            self.fail(what)

    def fail(self, what: str) -> None:
        """Say it here where `what` is costly and asked after every event."""
        raise Violation(self, what)


class Watch:
    """Calls every listener's hooks."""

    def __init__(self, listeners: Sequence[Listener]) -> None:
        self._hooks: dict[str, list[Callable[..., None]]] = {
            hook: [getattr(l, hook) for l in listeners if getattr(type(l), hook) is not getattr(Listener, hook)]
            for hook in HOOKS
        }

    def _call(self, hook: str, *details: Any) -> None:
        for look in self._hooks[hook]:
            look(*details)

    def after_event(self) -> None:
        for look in self._hooks["after_event"]:
            look()

    def time_passed(self) -> None:
        self._call("time_passed")

    def recorded(self, records: Sequence[Record]) -> None:
        for record in records:
            self._call("recorded", record)

    def restored(self, state: LedgerState) -> None:
        self._call("restored", state)

    def told(self, agent: Agent, told: Any) -> None:
        """A cluster hears of a version by a Grant, a Joined or a Finished."""
        version = told.head if hasattr(told, "head") else told.version
        self._call("told_version", agent, version, type(told).__name__)

    def outcome(self, agent: Agent, frozen: Frozen, outcome: Outcome) -> None:
        if outcome.version is not None:
            self._call("told_version", agent, outcome.version, "Outcome")
        self._call("outcome", agent, frozen, outcome)

    def stepped(self, agent: Agent) -> None:
        self._call("stepped", agent)

    def installed(self, agent: Agent) -> None:
        self._call("installed", agent)

    def granted(self, agent: Agent, push: PushId) -> None:
        self._call("granted", agent, push)

    def push_moved(self, agent: Agent, push: PushId, moved: bool) -> None:
        self._call("push_moved", agent, push, moved)

    def pulling(self, agent: Agent, pull: PullId) -> None:
        self._call("pulling", agent, pull)

    def pulled(self, agent: Agent, installed: bool, attempt: int) -> None:
        self._call("pulled", agent, installed, attempt)

    def dropped(self, agent: Agent, push: PushId) -> None:
        self._call("dropped", agent, push)

    def agent_exits(self, agent: Agent, reason: str) -> None:
        self._call("agent_exits", agent, reason)

    def met(self, row: str) -> None:
        self._call("met", row)

    def trainer_died(self, agent: Agent, rank: bool) -> None:
        self._call("trainer_died", agent, rank)

    def slave_crashed(self, process: SlaveProcess) -> None:
        self._call("slave_crashed", process)

    def master_died(self, process: MasterProcess, rows: bool, written: bool) -> None:
        self._call("master_died", process, rows, written)

    def cut_off(self, sender: str, receiver: str, both: bool) -> None:
        self._call("cut_off", sender, receiver, both)

    def passes_again(self, sender: str, receiver: str) -> None:
        self._call("passes_again", sender, receiver)

    def order_leaves(self, order: Order) -> None:
        self._call("order_leaves", order)

    def registered(self, process: SlaveProcess, answer: Registered) -> None:
        self._call("registered", process, answer)

    def beat_read(self, role: str, name: str, life: int) -> None:
        self._call("beat_read", role, name, life)

    def judged(self, verdict: Event) -> None:
        self._call("judged", verdict)

    def noted(self, note: Note) -> None:
        self._call("noted", note)

    def at_rest(self) -> None:
        self._call("at_rest")

    def before_order(self, process: SlaveProcess, order: Order) -> None:
        self._call("before_order", process, order)

    def after_order(self, process: SlaveProcess, order: Order) -> None:
        self._call("after_order", process, order)

    def before_step(self, master: MasterProcess, event: Event) -> None:
        self._call("before_step", master, event)

    def after_step(self, master: MasterProcess, event: Event) -> None:
        self._call("after_step", master, event)
