"""The contents of slaves' mirrors: which version each copies next, and which stay on every disk for a mirror's sake.

A mirror is of use only if all other slaves offer the version that it holds. So the master names the version to copy, as
it does for snapshots (docs/rationale.md#3): one target for all, the newest durable version; then the next one, when
every working mirror holds it. The newest version in a mirror stays on every slave's disk until that mirror holds a
newer one, so a lost disk costs no more than its mirror's lag. A mirror that fails, or whose slave is away, does not
delay the others; no mirror delays a round.

Unknown contents are not empty contents. While a slave's process has not listed its mirror, every version that the
ledger had not retired when that process came may be in it, and stays: a former master kept it for that, or the process
before copied it and was not heard any more.
"""

from __future__ import annotations

from dips.dataclass import replace
from dips.ids import VersionId
from dips.protocol.entities import Slave
from dips.protocol.events import MirrorReport, MirrorReported
from dips.protocol.moves import SlaveState
from dips.protocol.run_state import RunState


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
    return str(newest) if newest is not None else None, run.head.version - version, max(0.0, now - since)


def _is_kept(run: RunState, version: VersionId) -> bool:
    """Whether snapshots of the version are on offer: it is in the lineage and not retired. v0@r0 needs no mirror."""
    row = run.versions.get(version)
    return row is not None and not row.retired and version.version > 0


def _lacks(slave: Slave, target: VersionId) -> bool:
    """Whether a working mirror does not hold this version yet."""
    return slave.mirror is not None and not slave.mirror.reason and target not in slave.mirror.held
