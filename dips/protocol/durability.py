"""Snapshots, and the consequences of a failing disk (docs/rationale.md#1, #3, #21; docs/protocol.md#messages row 13,
docs/protocol.md#memory).

`durability: commit`: a version is on every disk before its row. The first snapshot that fails costs its round; if the
next fails too, `on_persist_failure` decides. `degrade`: versions are announced with durable = false and their snapshots
are tried after the flip, as always with `durability: async`; the first that succeeds on every slave ends this. `stop`:
no round is opened and no push granted until a person has repaired the disk and started the master again; pulls go on. A
slave never deletes a snapshot by itself: older ones are retired only when newer ones are complete on all slaves.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from dips.dataclass import replace
from dips.errors import FailedDisk
from dips.ids import GENESIS, VersionId
from dips.protocol import mirrors
from dips.protocol.effects import Persist, Retire
from dips.protocol.entities import Fanout, Slave
from dips.protocol.enums import DurabilityMode, DurabilityState, FanoutKind, PersistFailurePolicy
from dips.protocol.events import OrderFailed, Persisted
from dips.protocol.moves import RoundState
from dips.protocol.options import Options
from dips.protocol.records import VersionDurable, VersionsRetired
from dips.protocol.run_state import RunState

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
    run.offers_changed()
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

    The newest version that a slave's mirror holds is kept as well, see mirrors.py, and every `keep_every`-th version.
    With `partial`, when every slave serves the head and has tried to write it, versions that some slave lacks are
    retired too: no slave can meet the others at such a version any more, and where disks work they would pile up while
    one does not. Versions that were rolled back are retired when a later one is durable, or with `partial`, when a disk
    has no room.
    """
    mirrors.advance_target(run)
    complete = [v.version for v in run.versions.values() if v.version.version > 0 and v.durable and not v.retired]
    stay = {*mirrors.mirrored_versions(run), run.mirror_target, *_archived_versions(run.options, complete)}
    keep = run.options.keep_snapshots
    oldest_kept = complete[-keep] if len(complete) >= keep else GENESIS
    old = tuple(
        v.version
        for v in run.versions.values()
        if not v.retired
        and v.version not in stay
        and 0 < v.version.version < run.head.version
        and (v.version.version < oldest_kept.version or (partial and not v.durable))
    )
    newest = complete[-1].round if complete else 0
    undone = tuple(v for v in run.undone_kept if partial or v.round < newest)
    old = (*old, *undone)
    if not old:
        return
    run.emit_record(VersionsRetired(old))
    run.offers_changed()
    for version in undone:
        del run.undone_kept[version]
    for version in old:
        if version in run.versions:
            run.versions[version] = replace(run.versions[version], retired=True)
        run.committed_at.pop(version, None)
    run.forget_old_versions()
    run.order_all(FanoutKind.STANDALONE, run.head, Retire(old), run.options.timing.compute_s)


def _archived_versions(options: Options, complete: Sequence[VersionId]) -> Sequence[VersionId]:
    """Return the complete versions, oldest first, that are kept as archives: each `keep_every`-th, the newest
    `keep_most`.
    """
    if not options.keep_every:
        return ()
    return [v for v in complete if v.version % options.keep_every == 0][-options.keep_most :]
