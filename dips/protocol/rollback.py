"""Rollback (docs/protocol.md#messages row 19; docs/rationale.md#1, #2, #22, #26): the head becomes an older version, by
a row of the ledger.

A slave that is away may come back with the head, so the master waits for all: only when each slave has named the
versions that it offers since this master started, and one of them lacks the head, the head becomes the newest version
of the lineage that every slave offers. The row comes first, then LoadVersion. If there is no such version, the run
waits, with the reason in its status; clusters train on. It also waits if the rollback would go more than
`most_rollback` outer steps beyond the known lag of the mirror of a slave that lacks the head
(docs/guides/operations.md#a-lost-disk), until an operator runs `dips rollback` or the slave comes back with its data.
Snapshots of undone versions stay on the disks until a later version is durable.

The run also waits if a newer version is offered by all slaves but those that have it on their disk, not read yet, or in
a working mirror: these read or fetch it first. A slave verifies its newest snapshots before it registers and its
archives only when they are wanted, and a disk may lack a version below newer ones. No slave serves meanwhile; all
register again and again, and each time report what is on their disk. An archive that an operator rolls back to is read
in the same way.

Undone versions keep their rows and their names. Their tokens are subtracted; their data ranges are undone, since
clusters carry that work in their parameters. Penalty statistics stay: they are measurements of clusters, which a lost
disk does not make untrue; a reset would only open a warm-up without scores.
"""

from __future__ import annotations

from dips.errors import ConfigError
from dips.ids import GENESIS, VersionId
from dips.printable import join_some
from dips.protocol import durability, push_pull
from dips.protocol.effects import Acknowledged, Pending, Refused, Result
from dips.protocol.entities import Slave
from dips.protocol.enums import OutcomeKind, SlaveCause, SlaveState
from dips.protocol.events import RollbackAsked, SlaveRegistered
from dips.protocol.records import RolledBack, VersionRow
from dips.protocol.round import finish_if_due, skip_round, skip_waiting_pushes
from dips.protocol.run_state import RunState, in_order, offers_genesis


def offered_versions(event: SlaveRegistered) -> frozenset[VersionId]:
    """Return all versions that this slave could serve: from memory, prepared, or from its disk."""
    return frozenset(v for v in (event.memory, event.prepared, *event.complete) if v is not None)


def note_offer(run: RunState, slave: Slave) -> None:
    """Update the slaves that lack the head, after a slave named what it offers or the head changed."""
    run.roster.follow_offer(slave)
    if slave.offer is not None and not _can_offer(run, slave, run.head) and run.head not in slave.unread:
        run.roster.lacking[slave.name] = None
    else:
        run.roster.lacking.pop(slave.name, None)


def consider_rollback(run: RunState) -> None:
    """Roll back if all slaves have named what they offer and one of them lacks the head.

    Beyond the mirror's lag and `most_rollback` steps only an operator decides; otherwise one old disk, or one stolen
    certificate, would be enough.
    """
    lacking = [s.name for s in in_order(run.slaves, run.roster.lacking)]
    waited, run.rollback_waits, run.rollback_steps = run.rollback_waits, "", 0
    if not (lacking or run.rollback_asked) or run.round is not None:
        return  # a round that is being persisted ends first: its row decides what the head is
    if run.is_rebalanced:
        return  # its row has retired all older versions; this master ends, and the next one decides
    why = f"{join_some(lacking)} cannot offer {run.head}" if lacking else f"back to {run.rollback_asked}, as asked"
    for slave in run.ready_slaves():
        if slave.offer is None:
            _ask_offer(run, slave, f"{why}: what does it offer?")
    unasked = [s.name for s in in_order(run.slaves, run.roster.unasked)]
    if unasked:
        run.rollback_waits = f"{why}; not yet heard from: {join_some(unasked)}"
        return
    if run.rollback_asked is not None:
        asked, run.rollback_asked = run.rollback_asked, None
        kept = asked in run.versions and not run.versions[asked].retired
        if kept and _do_all_offer(run, asked):
            _roll_back(run, asked, f"an operator asked for it; {why}" if lacking else "an operator asked for it")
            return
        if kept and all(_can_offer(run, s, asked) or asked in s.unread for s in run.slaves.values()):
            run.rollback_asked = asked
            _wait_for_disks(run, f"{why}: {asked} is read on the disks and verified first")
            return
    if not lacking:
        return
    head = _newest_common(run)
    wanted = _within_reach(run, head)
    if head is None or wanted is not None:
        lacks = "no version" if head is None else f"no version after {head}"
        remedy = "restore a snapshot directory" if wanted is None else f"{wanted} is {_describe_reach(run, wanted)}"
        _wait_for_disks(run, f"{lacks} is offered by every slave: {_describe_offers(run)}; {remedy}")
        return
    steps, lag = run.head.version - head.version, max(durability.known_lag(run, run.slaves[name]) for name in lacking)
    if steps <= lag + run.options.most_rollback:
        _roll_back(run, head, why)
        return
    run.rollback_steps = steps
    beyond = f" beyond the {lag} that its mirror lagged" if lag else ""
    run.rollback_waits = (
        f"{why}: all offer {head} at most, {steps} outer steps back, and master.most_rollback is "
        f"{run.options.most_rollback}{beyond}; start that slave with its true directory, or say `dips rollback {head}`"
    )
    if run.rollback_waits != waited:  # the slave asks again each second
        run.emit_note("rollback_waits", head=run.head, offered=head, steps=steps, reason=why)


def answer_asked(run: RunState, event: RollbackAsked) -> Result:
    """Legal any time, for an older version that is on offer; a repetition is answered with what it waits for."""
    version = event.version
    if version == run.head:
        run.rollback_asked = None  # this withdraws a request while it waits
        return Acknowledged()
    row = run.versions.get(version)
    if row is None and not run.has_row(version):
        raise ConfigError(f"{version} is no version of this run; the head is {run.head}")
    if row is None or row.retired or (version == GENESIS and not offers_genesis(run.versions.values())):
        kept = [str(v.version) for v in run.versions.values() if not v.retired and v.version != GENESIS]
        gone = "was rolled back, and no version is named twice" if version in run.undone else "is on no disk any more"
        return Refused(0.0, f"{version} {gone}; there are {', '.join(kept)}, and the head is the last of them")
    if run.rollback_asked != version:
        run.rollback_asked = version
        _stop_all(run, f"an operator rolls back to {version}")
    consider_rollback(run)
    if run.head == version:
        return Acknowledged()
    if run.rollback_asked == version:
        return Pending(run.rollback_waits)
    return Refused(0.0, f"not every slave offers {version}: {_describe_offers(run)}")


def _stop_all(run: RunState, reason: str) -> None:
    """End all rounds, pushes and pulls, none of which has a place in the lineage after the rollback."""
    skip_round(run, reason)
    skip_waiting_pushes(run, reason)
    push_pull.drop_all_pushes(run, reason)
    push_pull.close_all_pulls(run, reason)


def _do_all_offer(run: RunState, version: VersionId) -> bool:
    return all(_can_offer(run, slave, version) for slave in run.slaves.values())


def lacks_common_version(run: RunState) -> bool:
    """Whether all slaves have named what they offer, and no version, or none that is new enough, is offered by all."""
    return bool(run.rollback_waits) and not run.roster.unasked and not run.rollback_steps


def versions_to_bring_back(run: RunState, slave: Slave) -> tuple[VersionId, ...]:
    """Return the versions that this slave should read, or look for in its mirror, meanwhile."""
    wanted = run.rollback_asked or _within_reach(run, _newest_common(run))
    return () if wanted is None or _can_offer(run, slave, wanted) else (wanted,)


def _newest_common(run: RunState) -> VersionId | None:
    kept = (v.version for v in reversed(run.versions.values()) if not v.retired)
    return next((v for v in kept if _do_all_offer(run, v)), None)


def _within_reach(run: RunState, common: VersionId | None) -> VersionId | None:
    """Return the newest version after `common` that every slave offers, has not read yet, or has in its mirror. A
    failing mirror counts only if there is no `common`.
    """

    def is_near(slave: Slave, version: VersionId) -> bool:
        mirror = slave.mirror
        mirrored = mirror is not None and version in mirror.held and (common is None or not mirror.reason)
        return mirrored or version in slave.unread

    newer = [
        v.version for v in run.versions.values() if not v.retired and v.version.version > (common or GENESIS).version
    ]
    slaves = run.slaves.values()
    return next((v for v in reversed(newer) if all(_can_offer(run, s, v) or is_near(s, v) for s in slaves)), None)


def _can_offer(run: RunState, slave: Slave, version: VersionId) -> bool:
    assert slave.offer is not None
    if version == GENESIS:
        return version == run.head or offers_genesis(run.versions.values())
    return version in slave.offer


def _describe_offers(run: RunState) -> str:
    def describe(slave: Slave) -> str:
        read = ", ".join(map(str, sorted(slave.offer or ()))) or "nothing"
        return f"{slave.name}: {read}{f' ({len(slave.unread)} more are not read)' if slave.unread else ''}"

    return "; ".join(map(describe, run.slaves.values()))


def _describe_reach(run: RunState, wanted: VersionId) -> str:
    fetch = any(not _can_offer(run, s, wanted) and wanted not in s.unread for s in run.slaves.values())
    return "brought back from mirrors" if fetch else "read on the disks and verified first"


def _wait_for_disks(run: RunState, reason: str) -> None:
    """Have all slaves register again and again until they offer a common version."""
    run.rollback_waits = reason
    for slave in run.ready_slaves():
        _ask_offer(run, slave, reason)


def _ask_offer(run: RunState, slave: Slave, reason: str) -> None:
    """Ask what a slave offers: it serves on, and the answer to its next heartbeat orders it to register."""
    run.set_slave_state(slave, SlaveState.RESTORING, SlaveCause.OFFERS, reason)
    push_pull.stop_waiting_for(run, slave.name)


def _roll_back(run: RunState, head: VersionId, reason: str) -> None:
    undone = [v for v in run.versions.values() if v.version.version > head.version]
    run.emit_record(RolledBack(head, tuple(v.version for v in undone), reason, run.now))
    run.ranges.undo_parts(head.round)
    for row in undone:
        del run.versions[row.version]
        run.committed_at.pop(row.version, None)
        run.step_norms.pop(row.version, None)
        run.undone[row.version] = row
        if not row.retired:
            run.undone_kept[row.version] = None
        _undo_shares(run, row)
    move_head(run, head, f"the head is {head} again")
    if run.finished not in run.versions:
        run.finished = None
    run.emit_note("rolled_back", head=head, undone=",".join(str(v.version) for v in undone), reason=reason)
    finish_if_due(run)  # with `requeue: none` no range may be left for a push that would end the run


def move_head(run: RunState, head: VersionId, reason: str) -> None:
    """Make a version that is on the disks the head; slaves that serve another one register again, and load it."""
    run.head = head
    for slave in run.slaves.values():
        durability.count_mirror(run, slave)
        note_offer(run, slave)
    durability.advance_target(run)
    for slave in run.ready_slaves():
        if slave.memory != head:
            _ask_offer(run, slave, reason)


def _undo_shares(run: RunState, row: VersionRow) -> None:
    run.tokens_accepted -= row.tokens
    for name, tokens, ranges in row.shares:
        run.ranges.undo_ranges(ranges)
        cluster = run.clusters.get(name)
        if cluster is None:
            continue
        cluster.counts[OutcomeKind.ACCEPTED] -= 1
        cluster.counts["undone"] += 1
        cluster.tokens[OutcomeKind.ACCEPTED] -= tokens
        cluster.tokens["undone"] += tokens
