"""A stranger who reaches every port and forges: a slave's name while that slave is heard, and orders of a later term.

Both would end a master that believed them: it would give way to a successor that is none, or its slaves would.
"""

from __future__ import annotations

from functools import partial
from typing import Any, cast

from dips.errors import Busy, UnavailableMaster, UnavailableSlave
from dips.protocol.claims import SILENT_HEARTBEATS
from dips.protocol.effects import Abort, Failed, Order
from dips.protocol.events import SlaveRegistered
from dips.sim.world import SlaveMachine, World
from dips.wire.messages import to_proto
from tests.simulation.checks import Invariant

FORGERIES = 8  # of each kind in a run, at any time
AHEAD = 100_000  # terms: more than begin, and than restores skip (1,000 each), while a forged order waits for its turn
ABSURD = 1 << 40  # a number of an order, and of a round


class ForgeryInvariant(Invariant):
    """What a stranger says changes nothing, and it is told why."""

    number = 5

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._rng = world.chance.generator_for("stranger")

    def plan(self) -> None:
        for forge in (self._register_as_slave, self._order_slave) * FORGERIES:
            at = self.world.scenario.quiet_at * self._rng.random()
            machine = self._rng.choice(list(self.world.machines.values()))
            self.world.call_later(at, "a stranger forges", partial(forge, machine))

    def _register_as_slave(self, machine: SlaveMachine) -> None:
        """From elsewhere, as another process; what it claims to have seen would end the master."""
        master, now = self.world.master.process, self.world.heap.now
        if master is None or master.stopped:
            return
        silent_s = SILENT_HEARTBEATS * self.world.options.timing.heartbeat_s
        if master.core._judge.slave_heard_s(machine.name, now) >= silent_s:
            return  # the name is free: from whom it may come, its certificate says
        run = master.coordinator._run.row.run
        forged = SlaveRegistered(
            0, machine.name, "a stranger's", run, "elsewhere:1", ("elsewhere:2",), master.coordinator.term + AHEAD,
            None, None, (), 1, "",
        )  # fmt: skip
        master.on_message(forged, partial(self._require_refusal, (Busy, UnavailableMaster)))
        self.world.monitor.rare_event_occurred("forged_register")

    def _order_slave(self, machine: SlaveMachine) -> None:
        """As if a later master were there."""
        process = machine.process
        if process is None or not process.shard.sinc:
            return
        shard = process.shard
        forged = Order(machine.name, shard.sinc, shard.term + AHEAD, ABSURD, Abort(ABSURD, "forged"), 1.0)
        process.take_order(cast(Any, to_proto(forged)), partial(self._require_refusal, (UnavailableSlave,)))
        self.world.monitor.rare_event_occurred("forged_order")

    def _require_refusal(self, errors: tuple[type[Exception], ...], answer: Any) -> None:
        told = isinstance(answer, Failed) and issubclass(answer.error, errors)
        self.require(told, f"a stranger was answered {answer}, expected {' or '.join(e.__name__ for e in errors)}")
