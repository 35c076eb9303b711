"""Snapshots, the contents of slaves' mirrors, and the consequences of a failing disk."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from dips.dataclass import replace
from dips.errors import FailedDisk
from dips.ids import VersionId
from dips.protocol.effects import Persist, Retire
from dips.protocol.entities import Fanout, Slave
from dips.protocol.enums import (
    DurabilityMode,
    DurabilityState,
    FanoutKind,
    PersistFailurePolicy,
    RoundState,
    SlaveState,
)
from dips.protocol.events import MirrorReport, MirrorReported, OrderFailed, Persisted
from dips.protocol.options import Options
from dips.protocol.records import VersionDurable, VersionsRetired
from dips.protocol.run_state import RunState

# ---- mirrors --------------------------------------------------------------------------------------------------------
# The contents of slaves' mirrors: which version each copies next, and which stay on every disk for a mirror's sake.
#
# A mirror is of use only if all other slaves offer the version that it holds. So the master names the version to copy,
# as it does for snapshots (docs/rationale.md#3): one target for all, the newest durable version; then the next one,
# when every working mirror holds it. The newest version in a mirror stays on every slave's disk until that mirror holds
# a newer one, so a lost disk costs no more than its mirror's lag. A mirror that fails, or whose slave is away, does not
# delay the others; no mirror delays a round.
#
# Unknown contents are not empty contents. While a slave's process has not listed its mirror, every version that the
# ledger had not retired when that process came may be in it, and stays: a former master kept it for that, or the
# process before copied it and was not heard any more.


def on_mirror_reported(run: RunState, event: MirrorReported) -> None:
    """Record that a mirror's contents or the reason of its failure changed."""
    slave = run.slaves.get(event.slave)
    if slave is None or slave.sinc != event.sinc:
        return
    failed_before = slave.mirror.reason if slave.mirror is not None else ""
    note_report(run, slave, event.report)
    if slave.state is SlaveState.READY:
        note_covered(slave)
    if event.report.reason and not failed_before:
        run.emit_note("mirror_fails", slave=slave.name, reason=event.report.reason)
    elif failed_before and not event.report.reason:
        run.emit_note("mirror_works_again", slave=slave.name)
    advance_target(run)


def note_report(run: RunState, slave: Slave, report: MirrorReport | None, anew: bool = False) -> None:
    """Record the report of a slave's mirror; None: it has no mirror. `anew`: from a process that had not reported."""
    if report is not None and report.unknown:
        last = slave.mirror
        if last is None or anew:
            last = replace(report, held=tuple(v for v in run.versions if _is_kept(run, v)))
        report = replace(last, reason=report.reason)
    slave.mirror = report
    run.roster.perhaps_behind[slave.name] = None
    count_mirror(run, slave)


def note_covered(slave: Slave) -> None:
    """Record the newest version in a serving slave's mirror, for `known_lag`; a failing mirror covers no version."""
    known = slave.mirror is not None and not slave.mirror.reason and not slave.mirror.unknown
    slave.covered = slave.mirrored[-1] if known and slave.mirrored else None


def known_lag(run: RunState, slave: Slave) -> int:
    """Return how many outer steps a slave's mirror lacked when the slave last served; 0 if unknown
    (docs/guides/operations.md#a-lost-disk).

    Reports of a slave that does not serve are not used: its process may have an old disk, or a stolen certificate.
    """
    return run.head.version - slave.covered.version if slave.covered in run.versions else 0


def count_mirror(run: RunState, slave: Slave) -> None:
    """Update the counts of versions kept for this slave's mirror, after its mirror or the lineage has changed."""
    stays = _stays_for(run, slave)
    for versions, change in ((slave.mirrored, -1), (stays, 1)):
        for version in versions:
            run.mirrored[version] = run.mirrored.get(version, 0) + change
            if not run.mirrored[version]:
                del run.mirrored[version]
    slave.mirrored = stays


def advance_target(run: RunState) -> None:
    """Name the newest durable version as the next to copy, unless some mirror still copies the present one."""
    target = run.mirror_target
    if target is not None and _is_kept(run, target) and _is_awaited(run, target):
        return
    newest = next((v.version for v in reversed(run.versions.values()) if v.durable and _is_kept(run, v.version)), None)
    if newest != target:
        run.mirror_target = newest
        run.roster.perhaps_behind = dict.fromkeys(run.slaves)


def _is_awaited(run: RunState, target: VersionId) -> bool:
    """Whether some working mirror has yet to copy this version."""
    behind = run.roster.perhaps_behind
    while behind:
        slave = run.slaves[next(iter(behind))]
        if slave.state is SlaveState.READY and _lacks(slave, target):
            return True
        del behind[slave.name]  # until it reports again, or is READY again
    return False


def mirrored_versions(run: RunState) -> tuple[VersionId, ...]:
    """Return the newest version of the lineage in each mirror, known or possible, oldest first; these stay on every
    disk.
    """
    return tuple(sorted(run.mirrored))


def wanted_versions(run: RunState) -> tuple[VersionId, ...]:
    """Return the versions that mirrors should hold; the last is to be copied, the others are not to be deleted."""
    if run.mirror_target is None:
        return ()
    older = (v for v in mirrored_versions(run) if v != run.mirror_target)
    return (*run.undone_kept, *older, run.mirror_target)


def _stays_for(run: RunState, slave: Slave) -> tuple[VersionId, ...]:
    """Return the newest offered version in this mirror; if its contents are unknown, all versions that may be in it."""
    if slave.mirror is None:
        return ()
    on_offer = sorted(v for v in slave.mirror.held if _is_kept(run, v))
    return tuple(on_offer if slave.mirror.unknown else on_offer[-1:])


def measure_lag(run: RunState, slave: Slave, now: float) -> tuple[str | None, int, float]:
    """Return (newest version in the slave's mirror or None, outer steps it lacks, seconds since it held the head)."""
    known = slave.mirrored and slave.mirror is not None and not slave.mirror.unknown
    newest = slave.mirrored[-1] if known else None
    version = newest.version if newest is not None else 0
    missing = [v for v in run.versions if v.version > version]
    since = run.committed_at.get(missing[0], run.started) if missing else now
    return str(newest) if newest is not None else None, run.head.version - version, now - since


def _is_kept(run: RunState, version: VersionId) -> bool:
    """Whether snapshots of the version are on offer: it is in the lineage and not retired. v0@r0 needs no mirror."""
    row = run.versions.get(version)
    return row is not None and not row.retired and version.version > 0


def _lacks(slave: Slave, target: VersionId) -> bool:
    """Whether a working mirror does not hold this version yet."""
    return slave.mirror is not None and not slave.mirror.reason and target not in slave.mirror.held


# ---- durability -----------------------------------------------------------------------------------------------------
# Snapshots, and the consequences of a failing disk (docs/rationale.md#1, #3, #21; docs/protocol.md#messages row 13,
# docs/protocol.md#memory).
#
# `durability: commit`: a version is on every disk before its row. The first snapshot that fails costs its round; if the
# next fails too, `on_persist_failure` decides. `degrade`: versions are announced with durable = false and their
# snapshots are tried after the flip, as always with `durability: async`; the first that succeeds on every slave ends
# this. `stop`: no round is opened and no push granted until a person has repaired the disk and started the master
# again; pulls go on. A slave never deletes a snapshot by itself: older ones are retired only when newer ones are
# complete on all slaves.


FAILURES = 2  # in a row: the first costs a round, the second shows that the disk does not recover by itself
RETRY_S = 30.0  # between two tries of a head's snapshot that failed after its commit


def row_waits_for_disks(run: RunState) -> bool:
    """Whether the next version's row must wait for every slave's disk."""
    return run.options.durability is DurabilityMode.COMMIT and run.durability.state is not DurabilityState.DEGRADED


def reserves_disk(run: RunState) -> bool:
    """Whether Apply reserves disk space before it computes; not while degraded, when the disk is known to be full."""
    return run.durability.state is not DurabilityState.DEGRADED


def on_snapshot_failed(run: RunState, reason: str) -> None:
    """Count a snapshot that failed or had no room; after FAILURES in a row change `state`."""
    d = run.durability
    d.failures += 1
    run.emit_note("persist_failed", head=run.head, in_a_row=d.failures, reason=reason)
    if d.failures < FAILURES or d.state is not DurabilityState.DURABLE:
        return
    if run.options.on_persist_failure is PersistFailurePolicy.STOP:
        d.state = DurabilityState.STOPPED
        d.reason = f"on_persist_failure: stop; repair the disk and start the master again: {reason}"
    else:
        d.state = DurabilityState.DEGRADED
        d.reason = f"versions are not durable until a snapshot succeeds: {reason}"
    run.emit_note(d.state, reason=reason)


def on_snapshot_written(run: RunState) -> None:
    """Record that a snapshot is complete on every disk."""
    d = run.durability
    d.failures, d.again_at = 0, 0.0
    if d.state is DurabilityState.DEGRADED:
        d.state, d.reason = DurabilityState.DURABLE, ""
        run.emit_note("durable_again", version=run.head)


# ---- after the flip -------------------------------------------------------------------------------------------------


def persist_head_if_due(run: RunState) -> None:
    """Order the head's snapshot if it has none, all slaves serve it, and no version is being made."""
    if run.flipping is not None or run.roster.missing or run.now < run.durability.again_at or not _lacks_snapshot(run):
        return
    if run.round is not None and run.round.state is not RoundState.COLLECTING:
        return
    run.durability.late_failed = ()
    run.durability.late = run.order_all(
        FanoutKind.PERSIST_LATE, run.head, Persist(run.head), run.options.timing.compute_s
    )


def retry_deadline(run: RunState) -> float:
    """Return when a failed snapshot of the head is tried again; inf if none failed."""
    return run.durability.again_at if run.durability.again_at > run.now and _lacks_snapshot(run) else inf


def _lacks_snapshot(run: RunState) -> bool:
    return run.durability.late is None and not run.versions[run.head].durable


def on_late_snapshot_answered(run: RunState, fanout: Fanout) -> None:
    """Record that every slave has answered: the version is durable, or its snapshot is tried again later."""
    d = run.durability
    assert d.late is fanout and fanout.subject == run.head
    d.late = None
    if d.late_failed:
        d.again_at = run.now + RETRY_S
        on_snapshot_failed(run, "; ".join(d.late_failed))
        retire_versions(run, partial=True)
        return
    digests = tuple((name, a.digest) for name, a in fanout.answers.items() if isinstance(a, Persisted))
    run.emit_record(VersionDurable(run.head, digests, run.now))
    run.versions[run.head] = replace(run.versions[run.head], durable=True)
    run.emit_note("version_durable", version=run.head)
    on_snapshot_written(run)
    retire_versions(run, partial=True)


def on_late_snapshot_failed(run: RunState, slave: Slave, fanout: Fanout, event: OrderFailed) -> None:
    """Record that one disk failed; others may still be writing, and a new snapshot begins when all have ended.

    A refusal for another reason is no failure of the disk: it is tried again later, and nothing is counted.
    """
    if not issubclass(event.error, FailedDisk):
        forget_late_snapshot(run)
        run.durability.again_at = run.now + RETRY_S
        run.emit_note("order_refused", slave=slave.name, reason=event.refusal)
        return
    run.durability.late_failed += (f"{slave.name} refused: {event.refusal}",)
    run.orders.remove_order(event.number)
    del fanout.waiting[slave.name]
    if not fanout.waiting:
        on_late_snapshot_answered(run, fanout)


def forget_late_snapshot(run: RunState) -> None:
    """Forget the head's late snapshot: a slave that was writing is lost, or the head has changed."""
    run.forget_orders(frozenset({FanoutKind.PERSIST_LATE}))
    run.durability.late, run.durability.late_failed = None, ()


# ---- what may go -----------------------------------------------------------------------------------------------------


def retire_versions(run: RunState, *, partial: bool = False) -> None:
    """Retire snapshots that are older than the newest few that are complete on every slave. The row comes first.

    The newest version that a slave's mirror holds is kept as well, and every `keep_every`-th version.
    With `partial`, when every slave serves the head and has tried to write it, versions that some slave lacks are
    retired too: no slave can meet the others at such a version any more, and where disks work they would pile up while
    one does not. Versions that were rolled back are retired when a later one is durable, or with `partial`, when a disk
    has no room.
    """
    advance_target(run)
    complete = [v.version for v in run.versions.values() if v.durable and not v.retired]
    stay = {*mirrored_versions(run), run.mirror_target, *_archived_versions(run.options, complete)}
    keep = run.options.keep_snapshots
    oldest_kept = complete[-keep:][0]  # v0@r0 is always complete
    old = tuple(
        v.version
        for v in run.versions.values()
        if not v.retired
        and v.version not in stay
        and 0 < v.version.version < run.head.version
        and (v.version.version < oldest_kept.version or (partial and not v.durable))
    )
    undone = tuple(v for v in run.undone_kept if partial or v.round < complete[-1].round)
    old = (*old, *undone)
    if not old:
        return
    run.emit_record(VersionsRetired(old))
    for version in undone:
        del run.undone_kept[version]
    for version in old:
        if version in run.versions:
            run.versions[version] = replace(run.versions[version], retired=True)
    run.forget_old_versions()
    run.order_all(FanoutKind.STANDALONE, run.head, Retire(old), run.options.timing.compute_s)


def _archived_versions(options: Options, complete: Sequence[VersionId]) -> Sequence[VersionId]:
    """Return the complete versions, oldest first, that are kept as archives: each `keep_every`-th, the newest
    `keep_most`.
    """
    if not options.keep_every:
        return ()
    return [v for v in complete if v.version % options.keep_every == 0][-options.keep_most :]
