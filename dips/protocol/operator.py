"""Operators' requests: quarantine, readmission, other options and targets, draining; each one's row of the audit.

REQUESTS is the table: what carries a request out, and how its row of the ledger spells it. `apply` checks the request
before it changes anything, emits the records of the change and returns the answer; it raises ConfigError if the request
names something that cannot be. Rollback and seeding, which wait for slaves, have modules of their own.

The shell passes the caller (the name in its certificate) and the wall-clock time. The row is emitted before the answer,
so no change is acknowledged that the ledger does not have. A repetition of a pending request that changes nothing makes
no row. Requests that change nothing share one budget of rows, requests that the shell denied another, so that neither
can fill the ledger nor displace the rows of real changes.

Effects that last:

* A cluster that an operator has quarantined goes on training and pulling; all its pushes are gated and do not change
  the penalty's statistics, so it continues where it was when it is readmitted (docs/architecture.md#penalty).
* The ledger keeps changed options and targets, so every later master has them. A changed option takes effect with the
  next decision: a round that is being applied ends with the numbers of its Apply, and these are in the version's row.
  The run file, and the digest that clusters compare, keep the initial values. Clusters learn targets from the answers
  to their heartbeats, from which `outer.progress` is computed.
* A run that has been finalised speaks a newer protocol for good (releases.py): the releases from before it, the
  master's too, cannot take part any more.
* While slaves drain, one or all, no push or pull is admitted, since each needs every slave; open ones go on to their
  end. Then, and when the head is on every disk, such a slave is DRAINING and may be stopped without loss. It is READY
  again when its next process registers.
  The request is not kept over a restart of the master.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, fields
from typing import Any

from dips.dataclass import dataclass, replace
from dips.errors import ConfigError, UnavailableMaster
from dips.printable import join_some
from dips.protocol import events, rebalancing, rollback, seeding
from dips.protocol.effects import (
    Acknowledged,
    Extended,
    Failed,
    Pending,
    RebalancePlanned,
    Refused,
    Reply,
    Result,
    Tuned,
)
from dips.protocol.entities import AuditBudget, Slave
from dips.protocol.enums import SlaveCause, SlaveState
from dips.protocol.options import Options, Targets
from dips.protocol.records import (
    ClusterQuarantined,
    ClusterReadmitted,
    OperatorActed,
    OptionsTuned,
    ProtocolRaised,
    RunExtended,
)
from dips.protocol.releases import PROTOCOL
from dips.protocol.round import find_reached
from dips.protocol.run_state import RunState
from dips.protocol.tunable import complete_changes, describe_changes, tune_options

MOST_TEXT = 300  # characters of a caller, of arguments or of an outcome
MOST_REASON = 200  # characters of an operator's reason, which is in the status and in each gated push's outcome
REPLACEMENT = "�"
DRAINED = "drained: it may be stopped"
TARGET_KEYS = tuple(field.name for field in fields(Targets))
FRACTIONS = frozenset({"wall_s"})  # the other targets are whole numbers


def on_operator_asked(run: RunState, event: events.OperatorAsked) -> None:
    """Legal any time; carries the request out and emits its row before its answer."""
    kind, begin = REQUESTS[type(event.request)], len(run.out)
    result = _carry_out(run, event.request)
    changed = any(not isinstance(effect, Reply) for effect in run.out[begin:])
    repeated = isinstance(result, Pending | RebalancePlanned) and not changed  # the first row has it
    arguments = kind.spell(event.request)
    if arguments and not repeated:  # a request that names nothing only reads
        outcome, refused = _describe_result(result)
        row = OperatorActed(event.caller, kind.action, arguments, outcome, refused, event.wall)
        _emit_row(run, row, None if changed else run.idle_rows)
    run.reply_to(event.req, result)


def on_request_asked(run: RunState, event: events.OperatorRequest) -> None:
    """Carry out a request that leaves no audit row: the sender is no operator, or the run is not audited."""
    run.reply_to(event.req, _carry_out(run, event))


def on_operator_reported(run: RunState, event: events.OperatorReported) -> None:
    """Record a call that the shell refused, or a change that the shell made by itself (an edited run file)."""
    row = OperatorActed(event.caller, event.action, event.arguments, event.outcome, event.refused, event.wall)
    _emit_row(run, row, run.denied_rows if event.refused else None)


def _carry_out(run: RunState, request: events.OperatorRequest) -> Result:
    kind = REQUESTS[type(request)]
    if kind.changes_ledger and (unproven := run.find_unproven()):
        return unproven
    asks_it = isinstance(request, events.RebalanceAsked)
    if kind.changes_ledger and run.is_rebalanced and not asks_it:  # while its row is written
        return Failed(UnavailableMaster, "the run is rebalanced, and this master ends: ask the next one")
    try:
        return kind.apply(run, request)
    except ConfigError as error:
        return Failed(ConfigError, str(error))


def _emit_row(run: RunState, row: OperatorActed, budget: AuditBudget | None) -> None:
    """Record the row with its texts cut to their limits, unless its budget has no room."""
    if budget is not None and not budget.take_row(run.now):
        return
    passed_over = sum(rows.take_passed_over() for rows in (run.idle_rows, run.denied_rows, run.read_rows))
    caller, action, arguments, outcome = map(cut_text, (row.caller, row.action, row.arguments, row.outcome))
    run.emit_record(OperatorActed(caller, action, arguments, outcome, row.refused, row.wall, passed_over))


def cut_text(text: str, most: int = MOST_TEXT) -> str:
    """Cut to `most` characters; replace those that are not printable (cursor movements, bidirectional controls)."""
    return "".join(c if c.isprintable() else REPLACEMENT for c in text[:most])


def _describe_result(result: Result) -> tuple[str, bool]:
    """Return (outcome in words, whether it was refused)."""
    match result:
        case Refused() | Failed():
            return f"refused: {result.reason if isinstance(result, Refused) else result.message}", True
        case Pending():
            return f"begun: {result.reason}", False
        case _:
            return "done", False


# ---- quarantine ----------------------------------------------------------------------------------------------------


def _quarantine(run: RunState, event: events.QuarantineAsked) -> Result:
    """Gate all pushes of a cluster that has joined once; a repetition changes the reason at most."""
    _check_known(run, event.cluster)
    reason = cut_text(event.reason, MOST_REASON) or "no reason was given"
    if reason != run.quarantined.get(event.cluster):
        run.quarantined[event.cluster] = reason
        run.emit_record(ClusterQuarantined(event.cluster, reason, run.now))
        run.emit_note("cluster_quarantined", cluster=event.cluster, reason=reason)
    return Acknowledged()


def _readmit(run: RunState, event: events.ReadmissionAsked) -> Result:
    """End an operator's quarantine and the gate's; refused for a cluster in neither, which keeps its statistics."""
    _check_known(run, event.cluster)
    by_operator = run.quarantined.pop(event.cluster, None) is not None
    by_gate = run.penalty.penalty_row(event.cluster).quarantined
    if by_operator:
        run.emit_record(ClusterQuarantined(event.cluster, "", run.now))
        run.emit_note("cluster_released", cluster=event.cluster)
    if by_gate:
        row = run.penalty.readmit_cluster(event.cluster)
        run.emit_record(ClusterReadmitted(row, run.next_round - 1, run.now))
        run.emit_note("cluster_readmitted", cluster=event.cluster, warm_left=row.warm_left)
    return Acknowledged() if by_operator or by_gate else Refused(0.0, f"{event.cluster} is not quarantined")


def _check_known(run: RunState, cluster: str) -> None:
    if cluster not in run.clusters:
        raise ConfigError(f"cluster {cluster!r} has never joined; known: {', '.join(run.clusters) or 'none yet'}")


# ---- options and targets -------------------------------------------------------------------------------------------


def _tune(run: RunState, event: events.TuningAsked) -> Result:
    """Change options; a repetition changes nothing and is answered with the present values."""
    changes = complete_changes(event.changes)
    options = tune_options(run.options, changes)
    _check_momentum(run, options)
    named = {change.key: change for change in changes}
    if options != run.options or not named.keys().isdisjoint(run.refused_changes):
        run.options = options
        run.refused_changes = {key: why for key, why in run.refused_changes.items() if key not in named}
        run.penalty.change_options(options.penalty)
        run.tuned |= named
        run.emit_record(OptionsTuned(changes, run.now))
        run.emit_note("options_tuned", changes=describe_changes(changes))
    return Tuned(tuple(run.tuned.values()))


def _check_momentum(run: RunState, options: Options) -> None:
    """Refuse momentum 0: through m, updates give back what rounding leaves over (docs/protocol.md#updates)."""
    if run.options.outer.momentum and not options.outer.momentum:
        raise ConfigError("outer.momentum: 0 would lose what updates carry over in m; expected a number above 0")


def _extend(run: RunState, event: events.ExtensionAsked) -> Result:
    """Change targets. A finished run continues: the ledger row of the new targets also revokes its end. A repetition
    changes nothing."""
    targets = _change_targets(run.targets, event)
    if targets == run.targets and not run.finished:
        return Extended(targets, None)
    if refusal := _find_refusal(run, targets):
        return Refused(0.0, refusal)
    resumed, run.finished = run.finished, None
    run.targets = targets
    run.ranges.add_epochs(targets.epochs)
    run.emit_record(RunExtended(targets, resumed, run.now))
    run.emit_note("run_extended", **asdict(targets), resumed=resumed or "no")
    return Extended(targets, resumed)


def _change_targets(present: Targets, event: events.ExtensionAsked) -> Targets:
    """Return the changed targets; raise ConfigError on an unknown key or an impossible value."""
    for change in event.changes:
        if change.key not in TARGET_KEYS:
            raise ConfigError(f"expected one of {', '.join(TARGET_KEYS)}, got {change.key!r:.80}")
        if change.key not in FRACTIONS and change.value != int(change.value):
            raise ConfigError(f"{change.key}: expected a whole number, got {change.value:g}")
        value: Any = change.value if change.key in FRACTIONS else int(change.value)
        present = replace(present, **{change.key: value})
    return present


def _find_refusal(run: RunState, targets: Targets) -> str:
    """Return why these cannot be the run's targets; empty if they can."""
    if run.targets.tokens and not targets.tokens:
        return "tokens: 0 would put outer.progress, and learning rates with it, back to their beginning"
    if targets.epochs < run.targets.epochs:
        return f"epochs: expected at least the present {run.targets.epochs}, got {targets.epochs}"
    if targets.epochs > run.targets.epochs and not run.ranges.per_epoch:
        return "epochs: this run leases no data (shared.data.ranges is 0): clusters bring their own"
    key, end = find_reached(run, targets)
    so_far = f"{run.tokens_accepted:,} tokens and {run.head.version:,} outer steps so far"
    return f"then the run would end at once: {end} ({so_far}): {key} must be larger" if end else ""


# ---- draining ------------------------------------------------------------------------------------------------------


def _drain(run: RunState, event: events.DrainAsked) -> Result:
    """Take a slave that is READY out of service; a repetition is answered with what is still open on it."""
    slave = run.slaves.get(event.slave)
    if slave is None:
        raise ConfigError(f"slave {event.slave!r} is none of this run: {', '.join(run.slaves)}")
    if slave.state is SlaveState.DRAINING:
        return Acknowledged()
    if slave.state is not SlaveState.READY:
        if not run.versions[run.head].durable:
            return Pending(_why_kept(run, slave))
        return Refused(0.0, f"{slave.name} is {slave.state} ({slave.reason}): nothing is open on it")
    _begin_drain(run, slave)
    settle_drains(run)
    open_here = _open_on(run, slave)
    return Pending(f"{slave.name} waits for {open_here}") if open_here else Acknowledged()


def _drain_all(run: RunState, _: events.DrainAllAsked) -> Result:
    """Take every slave that is READY out of service, for one outage; nothing is open on the others."""
    serving = run.ready_slaves()
    for slave in serving:
        _begin_drain(run, slave)
    settle_drains(run)
    waits = {slave.name: reason for slave in serving if (reason := _open_on(run, slave))}
    if waits:
        return Pending(f"{', '.join(waits)}: waiting for {next(iter(waits.values()))}")
    away = [slave for slave in run.slaves.values() if slave.state is not SlaveState.DRAINING]
    if away and not run.versions[run.head].durable:
        return Pending("; ".join(_why_kept(run, slave) for slave in away))
    if any(slave.state is SlaveState.DRAINING for slave in run.slaves.values()):
        return Acknowledged()
    return Refused(0.0, "no slave serves: nothing is open on any")


def _why_kept(run: RunState, slave: Slave) -> str:
    """Return why a slave that does not serve should not be stopped while the head is not on every disk."""
    return f"{slave.name} is {slave.state} ({slave.reason}), and {run.head} may be in its memory alone"


def _begin_drain(run: RunState, slave: Slave) -> None:
    if slave.name not in run.roster.draining:
        run.roster.draining[slave.name] = None
        run.emit_note("slave_drains", slave=slave.name, sinc=slave.sinc)


def settle_drains(run: RunState) -> None:
    """Finish drains after every event: a slave with nothing open is drained; a lost slave no longer drains."""
    for slave in [run.slaves[name] for name in run.roster.draining]:
        if slave.state is not SlaveState.READY:
            del run.roster.draining[slave.name]
        elif not _open_on(run, slave):
            del run.roster.draining[slave.name]
            slave.drained = True
            run.set_slave_state(slave, SlaveState.DRAINING, SlaveCause.DRAINED, DRAINED)
            run.emit_note("slave_drained", slave=slave.name, sinc=slave.sinc)


def _open_on(run: RunState, slave: Slave) -> str:
    """Return what must end before the slave may be stopped; empty if nothing must."""
    if run.round is not None:
        return f"round {run.round.number} ({run.explain_round(run.round)})"
    if run.waiting or run.flipping is not None:
        return "the next round" if run.waiting else "the flip to the new version"
    pushes, pulls = run.transfers.pushes, run.transfers.pulls
    if pushes or pulls:
        return f"{len(pushes)} pushes and {len(pulls)} pulls"
    if orders := sum(1 for _ in run.orders.orders_of(slave.name)):
        return f"{orders} orders"
    if run.versions[run.head].durable:
        return ""
    why = run.durability.reason
    return f"{run.head} to be on every disk{f': {why}' if why else ''}"


# ---- protocol ------------------------------------------------------------------------------------------------------

HEARD = frozenset({SlaveState.READY, SlaveState.RESTORING, SlaveState.DRAINING})


def _finalise(run: RunState, event: events.FinaliseAsked) -> Result:
    """Make the run speak the next protocol, for good; a repetition changes nothing."""
    if event.protocol == run.protocol:
        return Acknowledged()
    if event.protocol != run.protocol + 1 or event.protocol > PROTOCOL:
        speaks = f"this run speaks {run.protocol}, its master up to {PROTOCOL}"
        raise ConfigError(f"protocol: expected the next one, got {event.protocol}; {speaks}")
    if holdouts := find_holdouts(run, event.protocol):
        return Refused(0.0, explain_holdouts(holdouts, event.protocol))
    run.protocol = event.protocol
    run.emit_record(ProtocolRaised(event.protocol, run.now))
    run.emit_note("protocol_raised", protocol=event.protocol)
    return Acknowledged()


def find_holdouts(run: RunState, protocol: int) -> list[str]:
    """Name who is not known to speak a protocol: of all slaves, without which there is no round, and live clusters."""
    away = [s for s in run.slaves.values() if s.state not in HEARD or s.newest_protocol < protocol]
    older = [c for c in run.clusters.values() if c.live and c.newest_protocol < protocol]
    return [*(f"slave {s.name}" for s in away), *(f"cluster {c.name}" for c in older)]


def explain_holdouts(holdouts: Sequence[str], protocol: int) -> str:
    """Say for whom `dips finalise` waits."""
    return f"not known to speak {protocol}: {join_some(holdouts)}; upgrade them first"


# ---- the table -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RequestKind:
    """One kind of request: its word in the audit, what carries it out, and its arguments in words.

    changes_ledger  it waits until slaves have proven that this ledger is no old copy
    """

    action: str
    apply: Callable[[RunState, Any], Result]
    spell: Callable[[Any], str]
    changes_ledger: bool = True


REQUESTS: dict[type, RequestKind] = {
    events.QuarantineAsked: RequestKind("quarantine", _quarantine, lambda e: f"{e.cluster} --reason {e.reason!r}"),
    events.ReadmissionAsked: RequestKind("readmit", _readmit, lambda e: e.cluster),
    events.TuningAsked: RequestKind("tune", _tune, lambda e: describe_changes(e.changes)),
    events.ExtensionAsked: RequestKind(
        "extend", _extend, lambda e: " ".join(f"{c.key}={c.value:.15g}" for c in e.changes)
    ),
    events.DrainAsked: RequestKind("drain", _drain, lambda e: e.slave, changes_ledger=False),
    events.DrainAllAsked: RequestKind("drain", _drain_all, lambda _: "all slaves", changes_ledger=False),
    events.RollbackAsked: RequestKind("rollback", rollback.answer_asked, lambda e: str(e.version)),
    events.FinaliseAsked: RequestKind("finalise", _finalise, lambda e: f"protocol {e.protocol}"),
    events.RebalanceAsked: RequestKind(
        "rebalance", rebalancing.answer_asked, lambda e: f"to {', '.join(e.slaves)}, by the host of {e.slave}"
    ),
    events.RecoverAsked: RequestKind("recover", seeding.answer_recovery, lambda e: f"from {e.source}"),
    events.SeedAsked: RequestKind("seed", seeding.answer_asked, lambda e: f"process {e.seeder}", changes_ledger=False),
}
