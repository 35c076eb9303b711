"""Lives of slaves: register until Hold, be lost, be in doubt (protocol.md rows 1, 18; why.md 1, 13, 23)."""

from __future__ import annotations

from itertools import islice

from dips.errors import Busy
from dips.ids import GENESIS, VersionId
from dips.protocol import durability, pulls, pushes, rollback, round
from dips.protocol.effects import (
    Abort,
    AbortVersion,
    CommitVersion,
    Exit,
    Failed,
    Hold,
    LoadVersion,
    Ping,
    Registered,
    Retire,
    SlaveOrder,
    Wait,
)
from dips.protocol.events import OrderAnswered, OrderFailed, SlaveRegistered, SlaveSilent
from dips.protocol.moves import RoundState, SlaveState
from dips.protocol.records import IncarnationGiven
from dips.protocol.world import OLD_LEDGER, Chorus, Slave, World

DEAF_ORDERS = 2  # in a row past their deadline: the slave does not hear us, whatever its beats say
EXIT_STALE = 75  # a later master exists; started again, this one would find itself above every term that was seen
EXIT_OLD_LEDGER = 78  # only a person can say which ledger is the true one
RETRY_S = 1.0
PROOF_RETRY_S = 0.25  # the other slaves register within a beat of a restart


def registered(w: World, event: SlaveRegistered) -> None:
    """Give the process its incarnation, and the next thing to do until it holds the head."""
    slave = w.slaves.get(event.slave)
    problem = _mismatch(w, event)
    if problem or slave is None:
        w.reply(
            event.req,
            problem or Failed("ConfigError", f"slave {event.slave!r}: this run places layers on {', '.join(w.slaves)}"),
        )
        return
    if leave := _from_the_future(w, event):
        w.reply(event.req, Failed("StaleTerm" if leave.code == EXIT_STALE else "StaleVersion", leave.reason))
        w.out.append(leave)
        return
    slave.registered = True
    lose(w, slave, "its process is a new one" if slave.nonce != event.nonce else "it registered again")
    _name(w, slave, event)
    slave.offer = rollback.offered(event)
    rollback.consider(w)
    order = _listen_first(w, slave) if slave.must_hear else _order_for(w, event)
    _enter(w, slave, event, order)
    genesis = tuple(w.row.genesis[layer] for layer in slave.layers)
    w.reply(event.req, Registered(w.term, slave.sinc, order, w.head, slave.layers, genesis, w.row.manifest))


def _mismatch(w: World, event: SlaveRegistered) -> Failed | None:
    if event.run != w.row.run:
        return Failed(
            "ConfigError", f"shared.run: this master serves {w.row.run!r}, the slave belongs to {event.run!r}"
        )
    return None


def _from_the_future(w: World, event: SlaveRegistered) -> Exit | None:
    """It has seen what this ledger does not know: stop before anything is decided on old knowledge (why.md 2, 4)."""
    if event.memory is not None and not _has_row(w, event.memory):
        seen = f"slave {event.slave} serves {event.memory}, which has no row in this ledger"
        return Exit(EXIT_OLD_LEDGER, f"{seen}: {OLD_LEDGER}")
    newest = max((v.round for v in rollback.offered(event)), default=0)
    if newest >= w.next_round:
        seen = f"slave {event.slave} holds a version of round {newest}, this ledger knows rounds below {w.next_round}"
        return Exit(EXIT_OLD_LEDGER, f"{seen}: {OLD_LEDGER}")
    if event.term_seen > w.term:
        seen = f"slave {event.slave} has seen term {event.term_seen}, above ours ({w.term})"
        return Exit(EXIT_STALE, f"{seen}: a later master exists, or {OLD_LEDGER}")
    return None


def _has_row(w: World, version: VersionId) -> bool:
    """Whether a version that a slave serves, and that so had a row, has one here; undone and very old ones have."""
    oldest = next(islice(w.versions, 1, None), None)  # after v0@r0, which is always kept
    return version in w.versions or version in w.undone or (oldest is not None and version.version < oldest.version)


def _name(w: World, slave: Slave, event: SlaveRegistered) -> None:
    if slave.nonce != event.nonce:
        slave.sinc, slave.nonce = slave.sinc + 1, event.nonce
        round.stop_waiting(w, slave.name)  # orders to its former life will never be answered to us
        w.record(IncarnationGiven("slave", slave.name, slave.sinc, event.nonce))
    slave.address, slave.lanes, slave.slots, slave.memory = event.address, event.lanes, event.slots, event.memory
    slave.key = event.key
    slave.deaf = 0


def _listen_first(w: World, slave: Slave) -> Wait:
    """Its Register comes through, but do our orders? (why.md 23)"""
    if not any(c.kind == "ping" and o.slave == slave.name for c, o in w.choruses.values()):
        w.order("ping", slave.sinc, {slave.name: Ping()}, w.options.timing.order_s)
    return Wait(RETRY_S, "it was deaf to orders: it must answer a Ping first")


def heard(w: World, chorus: Chorus) -> None:
    """It answered a Ping: its next Register may make it READY."""
    for name in chorus.answers:
        w.slaves[name].must_hear = False


def _order_for(w: World, event: SlaveRegistered) -> SlaveOrder:
    """What this slave does next on its way to the head."""
    if w.round is not None and w.round.state is RoundState.PERSISTING:
        return Wait(RETRY_S, f"whether round {w.round.number} becomes a version is being decided")
    if event.prepared is not None and event.prepared == w.head:
        return CommitVersion(w.head)
    if event.prepared is not None and not w.proven:
        return Wait(PROOF_RETRY_S, f"whether {event.prepared} has a row is known when all slaves have registered")
    if event.prepared is not None:
        return AbortVersion(event.prepared)
    if event.memory == w.head:
        return Hold()
    if w.head in event.complete or w.head == GENESIS:
        return LoadVersion(w.head)
    held = ", ".join(str(v) for v in event.complete) or "no snapshot"
    if w.rollback_waits:
        return Wait(RETRY_S, w.rollback_waits)
    return Wait(
        RETRY_S, f"the head {w.head} is not on its disk ({held}); {event.reason or 'restore its snapshot directory'}"
    )


def _enter(w: World, slave: Slave, event: SlaveRegistered, order: SlaveOrder) -> None:
    if not isinstance(order, Hold):
        reason = order.reason if isinstance(order, Wait) else f"told to {type(order).__name__} {order.version}"
        slave.become(SlaveState.RESTORING, reason)
        return
    slave.become(SlaveState.READY, f"serves {w.head}")
    w.note("slave_ready", slave=slave.name, sinc=slave.sinc, version=w.head)
    last = w.next_round - 1
    if last > w.head.round:  # it may hold pieces of a round that broke while it was away
        w.order(
            "done",
            last,
            {slave.name: Abort(last, "it left no version that stands")},
            w.options.timing.order_s,
        )
    slave.garbage = tuple(v for v in event.complete if v not in w.versions or w.versions[v].retired)


def clean(w: World) -> None:
    """What lies on disks and is in no row is deleted, when it is sure that this ledger has all rows."""
    laden = [slave for slave in w.ready_slaves() if slave.garbage]
    if not laden or not w.proven:
        return
    for slave in laden:
        w.order("done", w.head, {slave.name: Retire(slave.garbage)}, w.options.timing.order_s)
        slave.garbage = ()


def silent(w: World, event: SlaveSilent) -> None:
    slave = w.slaves.get(event.slave)
    if slave and slave.sinc == event.sinc:
        lose(w, slave, f"silent for {event.silent_s:.1f} s")


def lose(w: World, slave: Slave, reason: str) -> None:
    """Its slots, pins and open round are gone; once Persisted it is only in doubt, and the round goes on."""
    slave.offer, slave.garbage = None, ()
    if slave.state in (SlaveState.LOST, SlaveState.STARTING):
        return
    was_ready = slave.state is SlaveState.READY
    slave.become(SlaveState.LOST, reason)
    if not was_ready:
        return
    w.note("slave_lost", slave=slave.name, sinc=slave.sinc, reason=reason)
    in_doubt = _has_persisted(w, slave)
    round.stop_waiting(w, slave.name)
    if not in_doubt:
        round.skip(w, f"{slave.name} was lost: {reason}")
    round.drop_waiting(w, f"{slave.name} was lost: {reason}")
    pushes.drop_all(w, f"{slave.name} was lost: {reason}")
    pulls.close_all(w, f"{slave.name} was lost: {reason}")


def _has_persisted(w: World, slave: Slave) -> bool:
    """Its part of the version under way lies complete on its disk."""
    if w.round is None or w.round.state is not RoundState.PERSISTING:
        return False
    return not any(c.kind == "persist" and o.slave == slave.name for c, o in w.choruses.values())


def answered(w: World, event: OrderAnswered) -> Chorus | None:
    """Take an answer; return the chorus if it is complete by it."""
    found = w.choruses.get(event.number)
    slave = w.slaves.get(event.slave)
    if found is None or slave is None or slave.sinc != event.sinc or found[1].slave != event.slave:
        return None
    chorus, _ = found
    slave.deaf = 0
    del w.choruses[event.number]
    chorus.waiting.discard(event.slave)
    chorus.answers[event.slave] = event.answer
    return chorus if not chorus.waiting else None


def failed(w: World, event: OrderFailed) -> None:
    """An order was not carried out: say it again, give up its subject, or give up the slave."""
    found = w.choruses.get(event.number)
    slave = w.slaves.get(event.slave)
    if event.kind == "stale_term":
        w.out.append(Exit(EXIT_STALE, f"slave {event.slave} obeys a later master: {event.reason}"))
    if found is None or slave is None or slave.sinc != event.sinc or event.kind == "stale_term":
        return
    chorus, order = found
    if chorus.kind == "ping":
        del w.choruses[event.number]  # the next Register sends another; a refusal was an answer
        slave.must_hear = slave.must_hear and event.kind == "deaf"
        return
    if event.kind == "deaf":
        slave.deaf += 1
        if slave.deaf >= DEAF_ORDERS:
            slave.must_hear = True
            lose(w, slave, f"deaf: {slave.deaf} orders in a row past their deadline")
        else:
            w.out.append(order)
        return
    if chorus.kind == "apply" and event.reason.startswith(Busy.__name__) and _slow_readers(w):
        w.out.append(order)  # the bank of θ′ is free when they are done, at their deadlines at the latest (why.md 19)
        return
    if not round.disk_failed(w, slave, chorus, event):
        _give_up(w, slave, chorus, event)


def _slow_readers(w: World) -> bool:
    """Somebody still pulls a version older than the head."""
    return any(pull.version != w.head for pull in w.open_pulls())


def _give_up(w: World, slave: Slave, chorus: Chorus, event: OrderFailed) -> None:
    reason = f"{slave.name} refused: {event.reason}"
    if chorus.kind in ("open_push", "open_pull"):
        end = pushes.drop if chorus.kind == "open_push" else pulls.close
        cluster = w.cluster_of(chorus.subject)
        if cluster is not None:
            end(w, cluster, reason)
    elif chorus.kind in round.ROUND_ORDERS:
        round.skip(w, reason)
    elif chorus.kind == "persist_late":
        durability.failed_late(w, slave, chorus, event)
    elif chorus.kind == "commit":
        lose(w, slave, reason)  # a slave that will not flip holds another truth: it must register anew
    else:
        del w.choruses[event.number]
        w.note("order_refused", slave=slave.name, reason=event.reason)
