"""Handlers of slaves' incarnations: registration until Hold, loss, doubt (docs/protocol.md#messages rows 1, 18;
docs/rationale.md#1, #13, #23).
"""

from __future__ import annotations

from dips.errors import Busy, ConfigError, RemoteProtocolError, StaleTerm, StaleVersion, UnresponsiveSlave
from dips.ids import GENESIS
from dips.protocol import durability, push_pull, rollback, round, seeding, transfers
from dips.protocol.claims import SILENT_HEARTBEATS, find_absurd_register, find_protocol_mismatch, newest_protocol
from dips.protocol.effects import (
    Abort,
    AbortVersion,
    Apply,
    CommitVersion,
    Exit,
    Failed,
    Fold,
    Hold,
    KeepSeed,
    LoadVersion,
    Measure,
    OpenPull,
    OrderBody,
    Persist,
    Ping,
    Registered,
    RegisterLater,
    Retire,
    SlaveOrder,
)
from dips.protocol.entities import Fanout, Slave
from dips.protocol.enums import ClusterCause, FanoutKind, Role, RoundState, SlaveCause, SlaveState
from dips.protocol.events import (
    Answer,
    Folded,
    Measured,
    ModelKept,
    OrderAnswered,
    OrderFailed,
    Persisted,
    Pinned,
    Prepared,
    SlaveRegistered,
    SlaveSilent,
)
from dips.protocol.rank_keys import KEY_CHARS, is_key
from dips.protocol.records import IncarnationGiven, lies_in
from dips.protocol.round import ROUND_ORDERS, skip_round, skip_waiting_pushes
from dips.protocol.run_state import OLD_LEDGER, RunState

UNANSWERED_ORDERS = 2  # in a row past their deadline: orders do not reach the slave, though its heartbeats arrive
EXIT_STALE = 75  # a later master exists; if restarted, this one would take a term above all others
EXIT_OLD_LEDGER = 78  # only a person can decide which ledger is the right one
RETRY_S = 1.0
PROOF_RETRY_S = 0.25  # the other slaves register within a heartbeat of a restart
ANSWERS: dict[type, type] = {Measure: Measured, Fold: Folded, Apply: Prepared, Persist: Persisted}  # that are read


def on_slave_registered(run: RunState, event: SlaveRegistered) -> None:
    """Give the process its incarnation, and its next order until it holds the head."""
    slave = run.slaves.get(event.slave)
    problem = _find_mismatch(run, event)
    if problem or slave is None:
        run.reply_to(
            event.req,
            problem or Failed(ConfigError, _why_unknown(run, event.slave)),
        )
        return
    if taken := _find_rival(run, slave, event):
        run.reply_to(event.req, taken)
        return
    if leave := _from_the_future(run, event):
        run.reply_to(event.req, Failed(StaleTerm if leave.code == EXIT_STALE else StaleVersion, leave.reason))
        run.out.append(leave)
        return
    anew = slave.nonce != event.nonce
    durability.note_report(run, slave, event.mirror, anew)
    lose_slave(run, slave, SlaveCause.REGISTERS, "its process is a new one" if anew else "it registered again")
    _take_process(run, slave, event, anew)
    slave.offer, slave.unread = rollback.offered_versions(event), frozenset(event.unread)
    rollback.note_offer(run, slave)
    rollback.consider_rollback(run)
    order = _ping_first(run, slave) if slave.needs_ping else _order_for(run, event)
    _enter_state(run, slave, event, order)
    genesis = tuple(run.row.genesis[layer] for layer in slave.layers)
    manifest = "" if event.manifest_digest == run.manifest.digest else run.row.manifest
    answer = Registered(
        run.term, slave.sinc, order, run.head, slave.layers, genesis, manifest, slave.place, len(run.slaves)
    )
    run.reply_to(event.req, answer)


def _why_unknown(run: RunState, name: str) -> str:
    version = dict(run.row.removed).get(name)
    since = f", which is not in this run since the rebalance of {version}" if version else ""
    return f"slave: expected {' or '.join(run.slaves)}, got {name!r}{since}; start it by its name in the run file"


def _find_mismatch(run: RunState, event: SlaveRegistered) -> Failed | None:
    if mismatch := find_protocol_mismatch(run.protocol, event):
        return mismatch
    if event.run != run.row.run:
        return Failed(ConfigError, f"shared.run: expected {run.row.run!r}, got {event.run!r}; name that run's master")
    if event.key and not is_key(event.key):
        return Failed(RemoteProtocolError, f"key of slave {event.slave}: expected {KEY_CHARS} characters of Z85")
    return find_absurd_register(event, run.term, run.next_round)


def _find_rival(run: RunState, slave: Slave, event: SlaveRegistered) -> Failed | None:
    """Return an error if another process with the same name was heard just now; the request is not used, its term
    included.

    A slave that starts again in its directory names the former process there: since it holds the directory, that one
    has ended. A slave that starts elsewhere is accepted as soon as that process has been silent for SILENT_HEARTBEATS.
    """
    if slave.nonce in (event.nonce, event.former_nonce):
        return None
    silent_s = SILENT_HEARTBEATS * run.options.timing.heartbeat_s
    if event.rival_heard_s >= silent_s:
        return None
    taken = f"got {slave.name}, which a live process has as incarnation {slave.sinc}"
    return Failed(Busy, f"slave: expected a name that is free, {taken}; stop that process, or wait until it has ended")


def _from_the_future(run: RunState, event: SlaveRegistered) -> Exit | None:
    """Return an Exit if the slave has seen what this ledger lacks: no decision may be made on an old copy
    (docs/rationale.md#2, #4).
    """
    if event.memory is not None and not run.has_row(event.memory):
        seen = f"slave {event.slave} serves {event.memory}, which has no row in this ledger"
        return Exit(EXIT_OLD_LEDGER, f"{seen}: {_advise_on_ledger(run)}")
    held = sorted(rollback.offered_versions(event).union(event.unread))
    missed = [v for v in held if lies_in(v.round, run.unknown_rounds)]
    if missed:
        seen = f"slave {event.slave} holds {missed[-1]}, which was made after the mirror of the ledger was last written"
        return Exit(EXIT_OLD_LEDGER, f"{seen}: {OLD_LEDGER}")
    if newer := [v for v in held if v.round >= run.next_round]:
        seen = f"slave {event.slave} holds {newer[-1]}, this ledger knows rounds below {run.next_round}"
        return Exit(EXIT_OLD_LEDGER, f"{seen}: {_advise_on_ledger(run)}")
    if event.term_seen > run.term:
        seen = f"slave {event.slave} has seen term {event.term_seen}, above ours ({run.term})"
        return Exit(EXIT_STALE, f"{seen}: a later master exists, or {OLD_LEDGER}")
    return None


def _advise_on_ledger(run: RunState) -> str:
    """Return advice to a person: the ledger is an old copy, or new beside the directory of a former run."""
    former = "; if this run is new, and that slave's directory of a former one: empty that directory"
    return OLD_LEDGER + (former if run.head == GENESIS else "")


def _take_process(run: RunState, slave: Slave, event: SlaveRegistered, anew: bool) -> None:
    if anew:
        slave.sinc, slave.nonce, slave.drained = run.next_incarnation(slave.sinc), event.nonce, False
        push_pull.stop_waiting_for(run, slave.name)  # its former incarnation will never answer its orders
        run.emit_record(IncarnationGiven(Role.SLAVE, slave.name, slave.sinc, event.nonce))
    slave.address, slave.lanes, slave.memory = event.address, event.lanes, event.memory
    slave.key, slave.unseeded, slave.newest_protocol = event.key, event.unseeded, newest_protocol(event)
    slave.unanswered = 0
    run.roster.follow_register(slave, event.slots, run.slaves)


def _ping_first(run: RunState, slave: Slave) -> RegisterLater:
    """Order a Ping to a slave whose registrations arrive, to check that orders reach it (docs/rationale.md#23)."""
    if not any(run.orders.orders_of(slave.name, FanoutKind.PING)):
        run.fan_out(FanoutKind.PING, slave.sinc, {slave.name: Ping()}, run.options.timing.order_s)
    return RegisterLater(RETRY_S, "it was unresponsive to orders: it must answer a Ping first")


def on_ping_answered(run: RunState, fanout: Fanout) -> None:
    """Record that a slave answered a Ping: its next Register may make it READY."""
    for name in fanout.answers:
        run.slaves[name].needs_ping = False


def _order_for(run: RunState, event: SlaveRegistered) -> SlaveOrder:
    """Return the slave's next step on its way to the head."""
    if run.round is not None:  # it is persisting: any other is skipped when a slave is away
        return RegisterLater(RETRY_S, f"whether round {run.round.number} becomes a version is being decided")
    if event.prepared == run.head:
        return CommitVersion(run.head)
    if event.prepared is not None:
        if run.is_proven:
            return AbortVersion(event.prepared)
        return RegisterLater(
            PROOF_RETRY_S, f"whether {event.prepared} has a row is known when all slaves have registered"
        )
    if rollback.lacks_common_version(run):
        look_for = rollback.versions_to_bring_back(run, run.slaves[event.slave])
        reasons = (run.rollback_waits, event.reason)
        return RegisterLater(RETRY_S, "; ".join(why for why in reasons if why), look_for)
    if event.memory == run.head:
        return Hold()
    if run.head == GENESIS and event.unseeded:
        return RegisterLater(RETRY_S, "; ".join(why for why in (seeding.WAITS, event.reason) if why))
    if run.head in (*event.complete, *event.unread) or run.head == GENESIS:
        return LoadVersion(run.head)  # a load verifies what it reads
    return RegisterLater(RETRY_S, "; ".join(why for why in (run.rollback_waits, event.reason) if why))


def _lacks_head(run: RunState, event: SlaveRegistered) -> bool:
    """Whether the slave holds the head neither on its disk nor in memory, so that an operator must restore it."""
    return run.head not in (*event.complete, *event.unread, GENESIS) and event.memory != run.head


def _enter_state(run: RunState, slave: Slave, event: SlaveRegistered, order: SlaveOrder) -> None:
    if not isinstance(order, Hold):
        cause, reason = SlaveCause.LOADS, f"ordered to {type(order).__name__}"
        if isinstance(order, RegisterLater):
            cause, reason = (SlaveCause.LACKS_HEAD if _lacks_head(run, event) else SlaveCause.AWAITS), order.reason
        else:
            reason = f"{reason} {order.version}"
        run.set_slave_state(slave, SlaveState.RESTORING, cause, reason)
        return
    run.set_slave_state(slave, SlaveState.READY, SlaveCause.SERVES, f"serves {run.head}")
    durability.note_covered(slave)
    if slave.drained:  # it was lost meanwhile, and may be stopped at any time
        run.roster.draining[slave.name] = None
    run.emit_note("slave_ready", slave=slave.name, sinc=slave.sinc, version=run.head)
    last = run.next_round - 1
    if last > run.head.round:  # it may hold parts of a round that was skipped while it was away
        run.fan_out(
            FanoutKind.STANDALONE,
            last,
            {slave.name: Abort(last, "it left no version that stands")},
            run.options.timing.order_s,
        )
    recovery = run.seed.recovery if run.seed is not None else None
    wanted = None if recovery is None else recovery.version  # it is on the disk already, and has no row yet
    if garbage := tuple(v for v in (*event.complete, *event.unread) if not run.is_kept(v) and v != wanted):
        run.roster.garbage[slave.name] = garbage


def delete_garbage(run: RunState) -> None:
    """Retire versions on disks that have no row, once it is certain that this ledger has all rows."""
    if not run.is_proven:
        return
    for name, garbage in run.roster.garbage.items():
        run.fan_out(FanoutKind.STANDALONE, run.head, {name: Retire(garbage)}, run.options.timing.compute_s)
    run.roster.garbage.clear()


def on_slave_silent(run: RunState, event: SlaveSilent) -> None:
    """Lose a slave whose lease has run out."""
    slave = run.slaves.get(event.slave)
    if slave and slave.sinc == event.sinc:
        lose_slave(run, slave, SlaveCause.SILENT, f"silent for {event.silent_s:.1f} s")


def lose_slave(run: RunState, slave: Slave, cause: SlaveCause, reason: str) -> None:
    """Drop a lost slave's slots and pins and skip the round; after its Persist the round goes on, for its part is on
    disk.
    """
    slave.offer = None
    run.roster.follow_offer(slave)
    if slave.state in (SlaveState.LOST, SlaveState.AWAITED):
        return
    was_ready = slave.state is SlaveState.READY
    run.set_slave_state(slave, SlaveState.LOST, cause, reason)
    if not was_ready:
        return
    run.emit_note("slave_lost", slave=slave.name, sinc=slave.sinc, reason=reason)
    in_doubt = _has_persisted(run, slave)
    durability.advance_target(run)  # the others' mirrors go on without it
    push_pull.stop_waiting_for(run, slave.name)
    if not in_doubt:
        skip_round(run, f"{slave.name} was lost: {reason}")
    skip_waiting_pushes(run, f"{slave.name} was lost: {reason}")
    push_pull.drop_all_pushes(run, f"{slave.name} was lost: {reason}")
    push_pull.close_all_pulls(run, f"{slave.name} was lost: {reason}")
    if run.seed is not None and slave.name in run.seed.slaves:  # it serves the model already: a former transfer's
        seeding.drop_seed(run, f"{slave.name} was lost: {reason}")


def _has_persisted(run: RunState, slave: Slave) -> bool:
    """Whether the slave's part of the version being persisted is complete on its disk."""
    if run.round is None or run.round.state is not RoundState.PERSISTING:
        return False
    return not any(run.orders.orders_of(slave.name, FanoutKind.PERSIST))


def take_answer(run: RunState, event: OrderAnswered) -> Fanout | None:
    """Record an answer; return the fanout if it is complete now. An answer of a wrong kind counts as a refusal."""
    found = run.orders.find_order(event.number)
    slave = run.slaves.get(event.slave)
    if found is None or slave is None or slave.sinc != event.sinc or found[1].slave != event.slave:
        return None
    if wrong := _find_wrong_answer(found[1].body, event.answer):
        on_order_failed(run, OrderFailed(event.slave, event.sinc, event.number, RemoteProtocolError, wrong))
        return None
    fanout, _ = run.orders.remove_order(event.number)
    slave.unanswered = 0
    del fanout.waiting[event.slave]
    fanout.answers[event.slave] = event.answer
    return fanout if not fanout.waiting else None


def _find_wrong_answer(body: OrderBody, answer: Answer) -> str:
    """Describe an answer that does not have the result that the order asks for; empty if it has, or if none is read."""
    expected = ANSWERS.get(type(body))
    if isinstance(body, KeepSeed) and body.version is not None:
        expected = ModelKept
    elif isinstance(body, OpenPull) and body.momentum:
        expected = Pinned
    given = type(answer).__name__
    if expected is not None and not isinstance(answer, expected):
        return f"expected {expected.__name__} in answer to {type(body).__name__}, got {given}"
    asked = body.version if isinstance(body, Apply | Persist) else None
    if asked is not None and isinstance(answer, Prepared | Persisted) and answer.version != asked:
        return f"expected {given} of {asked}, got one of {answer.version}"
    return ""


def on_order_failed(run: RunState, event: OrderFailed) -> None:
    """Handle a failed order: repeat it, give up its subject, or give up the slave."""
    found = run.orders.find_order(event.number)
    slave = run.slaves.get(event.slave)
    if stale_term := issubclass(event.error, StaleTerm):
        run.out.append(Exit(EXIT_STALE, f"slave {event.slave} obeys a later master: {event.reason}"))
    if found is None or slave is None or slave.sinc != event.sinc or stale_term:
        return
    fanout, order = found
    unresponsive = issubclass(event.error, UnresponsiveSlave)
    if fanout.kind is FanoutKind.PING:
        run.orders.remove_order(event.number)  # the next Register sends another; a refusal counts as an answer
        slave.needs_ping = unresponsive
        return
    if unresponsive:
        slave.unanswered += 1
        if slave.unanswered >= UNANSWERED_ORDERS:
            slave.needs_ping = True
            reason = f"unresponsive: {slave.unanswered} orders in a row past their deadline"
            lose_slave(run, slave, SlaveCause.UNRESPONSIVE, reason)
            push_pull.stop_waiting_for(run, slave.name)  # also for one that did not serve: its drain would never end
        else:
            run.out.append(order)
        return
    if fanout.kind is FanoutKind.APPLY and issubclass(event.error, Busy) and _slow_readers(run):
        # the bank of θ′ is free when they are done, at their deadlines at the latest (docs/rationale.md#19)
        run.out.append(order)
        return
    if not round.on_disk_failed(run, slave, fanout, event):
        _give_up(run, slave, fanout, event)


def _slow_readers(run: RunState) -> bool:
    """Whether a version older than the head is still being pulled."""
    return any(pull.version != run.head for pull in run.transfers.pulls.values())


def _give_up(run: RunState, slave: Slave, fanout: Fanout, event: OrderFailed) -> None:
    reason = f"{slave.name} refused: {event.refusal}"
    if fanout.kind in (FanoutKind.OPEN_PUSH, FanoutKind.OPEN_PULL):
        cluster = run.cluster_of(fanout.subject)
        if cluster is not None and fanout.kind is FanoutKind.OPEN_PUSH:
            push_pull.drop_push(run, cluster, reason)
        elif cluster is not None:
            transfers.close_pull(run, cluster, ClusterCause.PULL_ENDED, reason)
    elif fanout.kind in ROUND_ORDERS:
        skip_round(run, reason)
    elif fanout.kind in (FanoutKind.OPEN_SEED, FanoutKind.KEEP_SEED):
        seeding.drop_seed(run, reason)
    elif fanout.kind is FanoutKind.PERSIST_LATE:
        durability.on_late_snapshot_failed(run, slave, fanout, event)
    elif fanout.kind is FanoutKind.COMMIT:
        # The slave was believed to be able to commit; its state is unknown, so it must register again.
        lose_slave(run, slave, SlaveCause.REFUSED, reason)
    else:
        run.orders.remove_order(event.number)
        run.emit_note("order_refused", slave=slave.name, reason=event.refusal)
