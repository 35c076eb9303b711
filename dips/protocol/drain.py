"""Draining: an operator takes a slave out of service without breaking a round, READY → DRAINING.

While a slave drains, no push or pull is admitted, since each needs every slave; open ones go on to their end. Then the
slave is DRAINING and may be stopped without loss. It is READY again when its next process registers. The request is not
kept over a restart of the master.
"""

from __future__ import annotations

from dips.errors import ConfigError
from dips.protocol import window
from dips.protocol.effects import Acknowledged, Failed, Pending, Refused
from dips.protocol.entities import Slave
from dips.protocol.enums import SlaveCause
from dips.protocol.events import DrainAsked
from dips.protocol.moves import SlaveState
from dips.protocol.run_state import RunState

DRAINED = "drained: it may be stopped"


def on_drain_asked(run: RunState, event: DrainAsked) -> None:
    """Legal for a slave that is READY; a repetition is answered with what is still open on it."""
    slave = run.slaves.get(event.slave)
    if slave is None:
        run.reply_to(
            event.req, Failed(ConfigError, f"slave {event.slave!r} is none of this run: {', '.join(run.slaves)}")
        )
    elif slave.state is SlaveState.DRAINING:
        run.reply_to(event.req, Acknowledged())
    elif slave.state is not SlaveState.READY:
        run.reply_to(event.req, Refused(0.0, f"{slave.name} is {slave.state} ({slave.reason}): nothing is open on it"))
    else:
        if slave.name not in run.roster.draining:
            run.roster.draining[slave.name] = None
            run.emit_note("slave_drains", slave=slave.name, sinc=slave.sinc)
        settle_drains(run)
        open_here = _open_on(run, slave)
        run.reply_to(event.req, Pending(f"{slave.name} waits for {open_here}") if open_here else Acknowledged())


def settle_drains(run: RunState) -> None:
    """Finish drains after every event: a slave with nothing open is drained; a lost slave no longer drains."""
    if not run.roster.draining:
        return
    for slave in [run.slaves[name] for name in run.roster.draining]:
        if slave.state is not SlaveState.READY:
            del run.roster.draining[slave.name]
        elif not _open_on(run, slave):
            del run.roster.draining[slave.name]
            run.set_slave_state(slave, SlaveState.DRAINING, SlaveCause.DRAINED, DRAINED)
            run.emit_note("slave_drained", slave=slave.name, sinc=slave.sinc)


def _open_on(run: RunState, slave: Slave) -> str:
    """Return what must end before the slave may be stopped; empty if nothing must."""
    if run.round is not None:
        return f"round {run.round.number} ({window.explain_round(run, run.round)})"
    if run.waiting or run.flipping is not None:
        return "the next round" if run.waiting else "the flip to the new version"
    pushes, pulls = run.transfers.pushes, run.transfers.pulls
    if pushes or pulls:
        return f"{len(pushes)} pushes and {len(pulls)} pulls"
    orders = sum(1 for _ in run.orders.orders_of(slave.name))
    return f"{orders} orders" if orders else ""
