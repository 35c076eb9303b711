"""Rollback (docs/protocol.md#messages row 19; docs/rationale.md#1, #2, #22, #26): the head becomes an older version, by
a row of the ledger.

A slave that is away may come back with the head, so all are waited for: only when each has named what it offers since
this master started, and one of them lacks the head, the head becomes the newest version of the lineage that every slave
offers. Row first, then Load. If there is none the run waits, with the reason in its status; clusters train on.

What is undone keeps its rows and its names. Its tokens go back; its data ranges are undone, since clusters carry that
work in their parameters. Penalty statistics stay: they are what clusters were measured to be, and losing a disk makes
none of it untrue; resetting them would only open a warm-up, in which nobody is scored.
"""

from __future__ import annotations

from dips.ids import GENESIS, VersionId
from dips.protocol import durability, flip, mirrors
from dips.protocol.entities import Slave
from dips.protocol.enums import OutcomeKind
from dips.protocol.events import SlaveRegistered
from dips.protocol.moves import SlaveState
from dips.protocol.records import RolledBack, VersionRow, VersionsRetired
from dips.protocol.roster import in_order, name_some
from dips.protocol.run_state import RunState


def offered_versions(event: SlaveRegistered) -> frozenset[VersionId]:
    """Everything that this slave could serve: from memory, from what it prepared, from its disk."""
    return frozenset(v for v in (event.memory, event.prepared, *event.complete) if v is not None)


def note_offer(run: RunState, slave: Slave) -> None:
    """It has named what it offers, or the head is another."""
    run.roster.follow_offer(slave)
    if slave.offer is not None and not _can_offer(run, slave, run.head):
        run.roster.lacking[slave.name] = None
    else:
        run.roster.lacking.pop(slave.name, None)


def consider_rollback(run: RunState) -> None:
    """A slave has named what it offers: roll back if one of them lacks the head and all have named theirs."""
    lacking = [s.name for s in in_order(run.slaves, run.roster.lacking)]
    run.rollback_waits = ""
    if not lacking or run.round is not None:
        return  # a round that is being written down ends first: its row says what the head is
    for slave in run.ready_slaves():
        if slave.offer is None:
            _ask_offer(run, slave, f"{name_some(lacking)} cannot offer {run.head}: what does it offer?")
    unasked = [s.name for s in in_order(run.slaves, run.roster.unasked)]
    if unasked:
        run.rollback_waits = f"{name_some(lacking)} cannot offer {run.head}; not yet heard from: {name_some(unasked)}"
        return
    kept = [v.version for v in reversed(run.versions.values()) if not v.retired]
    head = next((v for v in kept if all(_can_offer(run, s, v) for s in run.slaves.values())), None)
    if head is None:
        run.rollback_waits = (
            f"no version is offered by every slave: {_describe_offers(run)}; "
            "restore a snapshot directory and start its slave again"
        )
        return
    _roll_back(run, head, f"{name_some(lacking)} cannot offer {run.head}")


def _can_offer(run: RunState, slave: Slave, version: VersionId) -> bool:
    """v0@r0 is the initial model, which every slave has; it is offered until a version that all had is retired.

    From then on a slave that has nothing else has lost its directory, and the run must not begin anew for that.
    """
    assert slave.offer is not None
    if version == GENESIS:
        return version == run.head or not any(v.retired and v.durable for v in run.versions.values())
    return version in slave.offer


def _describe_offers(run: RunState) -> str:
    return "; ".join(
        f"{s.name}: {', '.join(map(str, sorted(s.offer or ()))) or 'nothing'}" for s in run.slaves.values()
    )


def _ask_offer(run: RunState, slave: Slave, reason: str) -> None:
    """It serves on; the answer to its next heartbeat orders it to register."""
    run.set_slave_state(slave, SlaveState.RESTORING, reason)
    flip.stop_waiting_for(run, slave.name)


def _roll_back(run: RunState, head: VersionId, reason: str) -> None:
    undone = [v for v in run.versions.values() if v.version.version > head.version]
    run.emit_record(RolledBack(head, tuple(v.version for v in undone), reason, run.now))
    if garbage := tuple(v.version for v in undone if not v.retired):
        run.emit_record(VersionsRetired(garbage))  # deleted when their slave serves the head: slaves.py, at Hold
    durability.forget_late_snapshot(run)
    for row in undone:
        del run.versions[row.version]
        run.committed_at.pop(row.version, None)
        run.step_norms.pop(row.version, None)
        run.undone[row.version] = row
        _undo_shares(run, row)
    run.head = head
    for slave in run.slaves.values():
        mirrors.count_mirror(run, slave)
        note_offer(run, slave)
    mirrors.advance_target(run)
    if run.finished is not None and run.finished not in run.versions:
        run.finished = None
    for slave in run.ready_slaves():
        if slave.memory != head:
            _ask_offer(run, slave, f"the head is {head} again")
    run.emit_note("rolled_back", head=head, undone=",".join(str(v.version) for v in undone), reason=reason)


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
