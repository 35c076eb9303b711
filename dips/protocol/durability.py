"""Snapshots and what a broken disk costs (why.md 1, 3, 21; protocol.md row 13 and section 2).

`durability: commit`: a version is on every disk before its row. A snapshot that fails costs its round, once; if the
next fails too, `on_persist_failure` decides. `degrade`: versions are announced with durable = false, and their
snapshots are tried after the flip, as always with `durability: async`; the first that succeeds on every slave ends it.
`stop`: no round is opened any more and no push granted, until a person has mended the disk and started the master
again; pulls go on. A slave deletes nothing, whatever its disk says; only the newest versions that are complete on all
let older ones go.
"""

from __future__ import annotations

from dataclasses import replace

from dips.errors import FailedDisk
from dips.ids import GENESIS
from dips.protocol.effects import Persist, Retire
from dips.protocol.events import OrderFailed, Persisted
from dips.protocol.moves import RoundState
from dips.protocol.records import VersionDurable, VersionsRetired
from dips.protocol.world import Chorus, Slave, World

FAILURES = 2  # in a row: the first costs a round, the second says that the disk will not mend by itself
RETRY_S = 30.0  # between two tries of a head's snapshot that failed after its commit


def before_the_row(w: World) -> bool:
    """Whether the next version's row waits for every slave's disk."""
    return w.options.durability == "commit" and w.durability.state != "degraded"


def reserves(w: World) -> bool:
    """Whether Apply finds a full disk before it computes; in vain once it is known to be full."""
    return w.durability.state != "degraded"


def failed(w: World, reason: str) -> None:
    """A snapshot, or the room for it, was not to be had; see what follows in `state`."""
    d = w.durability
    d.failures += 1
    w.note("persist_failed", head=w.head, in_a_row=d.failures, reason=reason)
    if d.failures < FAILURES or d.state != "durable":
        return
    if w.options.on_persist_failure == "stop":
        d.state, d.reason = "stopped", f"on_persist_failure: stop; mend the disk and start the master again: {reason}"
    else:
        d.state, d.reason = "degraded", f"versions are not durable until a snapshot succeeds: {reason}"
    w.note(d.state, reason=reason)


def succeeded(w: World) -> None:
    """A snapshot lies complete on every disk."""
    d = w.durability
    d.failures, d.again_at = 0, 0.0
    if d.state == "degraded":
        d.state, d.reason = "durable", ""
        w.note("durable_again", version=w.head)


# ---- after the flip -------------------------------------------------------------------------------------------------


def persist_if_due(w: World) -> None:
    """Have the head's snapshot written if it has none: all slaves serve it, and none is making the next version."""
    if not _lacks_snapshot(w) or w.now < w.durability.again_at or w.flipping is not None or w.slaves_missing():
        return
    if w.round is not None and w.round.state is not RoundState.COLLECTING:
        return
    w.durability.late_failed = ()
    w.durability.late = w.order_all("persist_late", w.head, Persist(w.head), w.options.timing.compute_s)


def due_at(w: World) -> list[float]:
    """When to try again what failed."""
    return [w.durability.again_at] if _lacks_snapshot(w) and w.durability.again_at > w.now else []


def _lacks_snapshot(w: World) -> bool:
    return w.durability.late is None and not w.versions[w.head].durable


def persisted_late(w: World, chorus: Chorus) -> None:
    """Every slave has answered: the version is durable, or it stays as it is until the next try."""
    d = w.durability
    assert d.late is chorus and chorus.subject == w.head
    d.late = None
    if d.late_failed:
        d.again_at = w.now + RETRY_S
        failed(w, "; ".join(d.late_failed))
        retire(w, partial=True)
        return
    digests = tuple((name, a.digest) for name, a in chorus.answers.items() if isinstance(a, Persisted))
    w.record(VersionDurable(w.head, digests, w.now))
    w.versions[w.head] = replace(w.versions[w.head], durable=True)
    w.offers_changed()
    w.note("version_durable", version=w.head)
    succeeded(w)
    retire(w, partial=True)


def failed_late(w: World, slave: Slave, chorus: Chorus, event: OrderFailed) -> None:
    """One disk failed; the others may still be writing, and a new snapshot begins when all have ended.

    A slave that refuses for another reason says nothing of its disk: it is asked again later, and nothing is counted.
    """
    if not event.reason.startswith(FailedDisk.__name__):
        interrupt(w)
        w.durability.again_at = w.now + RETRY_S
        w.note("order_refused", slave=slave.name, reason=event.reason)
        return
    w.durability.late_failed += (f"{slave.name} refused: {event.reason}",)
    del w.choruses[event.number]
    chorus.waiting.discard(slave.name)
    if not chorus.waiting:
        persisted_late(w, chorus)


def interrupt(w: World) -> None:
    """A slave that was writing is gone, or the head is another: that snapshot is nobody's business any more."""
    w.forget_orders(frozenset({"persist_late"}))
    w.durability.late, w.durability.late_failed = None, ()


# ---- what may go -----------------------------------------------------------------------------------------------------


def retire(w: World, *, partial: bool = False) -> None:
    """Name the snapshots that may go: those older than the newest few that are complete on every slave. Row first.

    With `partial`, when every slave serves the head and has tried to write it, also those that some slave lacks: no
    slave can meet another at such a version any more, and where disks work they would pile up while one does not.
    """
    complete = [v.version for v in w.versions.values() if v.version.version > 0 and v.durable and not v.retired]
    keep = w.options.keep_snapshots
    oldest_kept = complete[-keep] if len(complete) >= keep else GENESIS
    old = tuple(
        v.version
        for v in w.versions.values()
        if not v.retired
        and 0 < v.version.version < w.head.version
        and (v.version.version < oldest_kept.version or (partial and not v.durable))
    )
    if not old:
        return
    w.record(VersionsRetired(old))
    w.offers_changed()
    for version in old:
        w.versions[version] = replace(w.versions[version], retired=True, shares=())
    w.forget_old_versions()
    w.order_all("done", w.head, Retire(old), w.options.timing.order_s)
