"""An operator takes a slave out of service without breaking a round: READY → DRAINING.

While it drains, no push or pull is admitted anywhere, since each needs every slave; what is open goes to its end. Then
the slave is DRAINING: it may be stopped and nothing is lost. It is READY again when its next process registers. A
master that restarts has forgotten it all.
"""

from __future__ import annotations

from dips.protocol.effects import Acknowledged, Failed, Pending, Refused
from dips.protocol.events import DrainAsked
from dips.protocol.moves import SlaveState
from dips.protocol.world import Slave, World

DRAINED = "drained: it may be stopped"


def asked(w: World, event: DrainAsked) -> None:
    """Legal for a slave that serves; a repetition hears how far it is."""
    slave = w.slaves.get(event.slave)
    if slave is None:
        w.reply(event.req, Failed("ConfigError", f"slave {event.slave!r} is none of this run: {', '.join(w.slaves)}"))
    elif slave.state is SlaveState.DRAINING:
        w.reply(event.req, Acknowledged())
    elif slave.state is not SlaveState.READY:
        w.reply(event.req, Refused(0.0, f"{slave.name} is {slave.state} ({slave.reason}): nothing is open on it"))
    else:
        if not slave.draining:
            slave.draining = True
            w.note("slave_drains", slave=slave.name, sinc=slave.sinc)
        settle(w)
        open_here = _open_on(w, slave)
        w.reply(event.req, Pending(f"{slave.name} waits for {open_here}") if open_here else Acknowledged())


def settle(w: World) -> None:
    """After every event: a slave that drains and has nothing open is drained; one that was lost drains no more."""
    for slave in w.slaves.values():
        if slave.draining and slave.state is not SlaveState.READY:
            slave.draining = False
        elif slave.draining and not _open_on(w, slave):
            slave.draining = False
            slave.become(SlaveState.DRAINING, DRAINED)
            w.note("slave_drained", slave=slave.name, sinc=slave.sinc)


def _open_on(w: World, slave: Slave) -> str:
    """What must end before it may be stopped; empty if nothing must."""
    if w.round is not None:
        return f"round {w.round.number} ({w.round.reason})"
    if w.waiting or w.flipping is not None:
        return "the next round" if w.waiting else "the flip to the new version"
    pushes, pulls = w.open_pushes(), w.open_pulls()
    if pushes or pulls:
        return f"{len(pushes)} pushes and {len(pulls)} pulls"
    orders = sum(order.slave == slave.name for _, order in w.choruses.values())
    return f"{orders} orders" if orders else ""
