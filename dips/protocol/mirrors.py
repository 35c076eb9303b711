"""What the slaves' mirrors hold: which version each copies next, and which stay on every disk for their sake.

A mirror is of use only if the version that it holds is offered by all other slaves too. So the master names what is
copied, as it names what is persisted (docs/rationale.md#3): one target for all, the newest durable version; the next
one when every mirror that works holds it. The newest version that a mirror holds stays on every slave's disk until that
mirror holds a newer one: then a lost disk costs what its mirror lags behind, and no more. A mirror that fails, or whose
slave is away, holds up no other; nothing here holds up a round.

"Not known" is not "nothing". A process that could not list its mirror yet leaves what this master heard last; if it has
heard nothing, whatever the ledger has not retired may lie there, since a former master kept it for that, and stays.
"""

from __future__ import annotations

from dips.dataclass import replace
from dips.ids import VersionId
from dips.protocol.entities import Slave
from dips.protocol.events import MirrorReport, MirrorReported
from dips.protocol.moves import SlaveState
from dips.protocol.run_state import RunState


def on_mirror_reported(run: RunState, event: MirrorReported) -> None:
    """A mirror holds something else than before, or fails for another reason."""
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


def note_report(run: RunState, slave: Slave, report: MirrorReport | None) -> None:
    """A slave's mirror holds this; None: it has none."""
    if report is not None and report.unknown:
        last = slave.mirror or replace(report, held=tuple(v for v in run.versions if _is_kept(run, v)))
        report = replace(last, reason=report.reason)
    slave.mirror = report
    run.roster.perhaps_behind[slave.name] = None
    count_mirror(run, slave)


def note_covered(slave: Slave) -> None:
    """It serves, so this word of its mirror is its own; one that fails covers nothing, however little it lags."""
    known = slave.mirror is not None and not slave.mirror.reason and not slave.mirror.unknown
    slave.covered = slave.mirrored[-1] if known and slave.mirrored else None


def known_lag(run: RunState, slave: Slave) -> int:
    """How many outer steps its mirror lacked when last it served, as it told then; 0 if that is not known
    (docs/guides/operations.md#a-lost-disk).

    What a process says that does not serve is not believed here: it may have an old disk, or a stolen certificate.
    """
    return run.head.version - slave.covered.version if slave.covered in run.versions else 0


def count_mirror(run: RunState, slave: Slave) -> None:
    """Its mirror, or the lineage, has changed: count anew what stays for its sake."""
    stays = _stays_for(run, slave)
    for versions, change in ((slave.mirrored, -1), (stays, 1)):
        for version in versions:
            run.mirrored[version] = run.mirrored.get(version, 0) + change
            if not run.mirrored[version]:
                del run.mirrored[version]
    slave.mirrored = stays


def advance_target(run: RunState) -> None:
    """Name the newest durable version as the next to copy, unless some mirror is still busy with the present one."""
    target = run.mirror_target
    if target is not None and _is_kept(run, target) and _is_awaited(run, target):
        return
    newest = next((v.version for v in reversed(run.versions.values()) if v.durable and _is_kept(run, v.version)), None)
    if newest != target:
        run.mirror_target = newest
        run.roster.perhaps_behind = dict.fromkeys(run.slaves)


def _is_awaited(run: RunState, target: VersionId) -> bool:
    """Whether some mirror is still to copy it."""
    behind = run.roster.perhaps_behind
    while behind:
        slave = run.slaves[next(iter(behind))]
        if slave.state is SlaveState.READY and _lacks(slave, target):
            return True
        del behind[slave.name]  # until it reports again, or is READY again
    return False


def mirrored_versions(run: RunState) -> tuple[VersionId, ...]:
    """The newest version of the lineage that each mirror holds or may hold, oldest first: they stay on every disk."""
    return tuple(sorted(run.mirrored))


def wanted_versions(run: RunState) -> tuple[VersionId, ...]:
    """What mirrors are to hold; the last one is to be copied, the others are not to be deleted."""
    if run.mirror_target is None:
        return ()
    older = (v for v in mirrored_versions(run) if v != run.mirror_target)
    return (*run.undone_kept, *older, run.mirror_target)


def _stays_for(run: RunState, slave: Slave) -> tuple[VersionId, ...]:
    """The newest version that lies in this mirror and is on offer; of an unknown one all that may be that."""
    if slave.mirror is None:
        return ()
    on_offer = sorted(v for v in slave.mirror.held if _is_kept(run, v))
    return tuple(on_offer if slave.mirror.unknown else on_offer[-1:])


def measure_lag(run: RunState, slave: Slave, now: float) -> tuple[str | None, int, float]:
    """The newest version in a mirror, the outer steps that it lacks, and the seconds since it held the head."""
    known = slave.mirrored and slave.mirror is not None and not slave.mirror.unknown
    newest = slave.mirrored[-1] if known else None
    version = newest.version if newest is not None else 0
    missing = [v for v in run.versions if v.version > version]
    since = run.committed_at.get(missing[0], run.started) if missing else now
    return str(newest) if newest is not None else None, run.head.version - version, max(0.0, now - since)


def _is_kept(run: RunState, version: VersionId) -> bool:
    """Whether its snapshots are on offer: in the lineage and not retired; v0@r0 needs no mirror."""
    row = run.versions.get(version)
    return row is not None and not row.retired and version.version > 0


def _lacks(slave: Slave, target: VersionId) -> bool:
    """Whether a mirror that works does not hold it yet."""
    return slave.mirror is not None and not slave.mirror.reason and target not in slave.mirror.held
