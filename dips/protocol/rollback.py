"""Rollback (protocol.md row 19; why.md 1, 2, 22, 26): the head becomes an older version, by a row of the ledger.

It is never hasty. A slave that is away may come back with the head, so all are waited for; only when each has said in
this life of the master what it offers, and one of them offers no head, the head becomes the newest version of the
lineage that every slave offers. Row first, then Load. If there is none nothing is invented: the run waits, and says
for whom; clusters train on.

What is undone keeps its rows and its names. Its tokens go back; its data ranges are undone, since clusters carry that
work in their parameters. Penalty statistics stay: they are what clusters were measured to be, and losing a disk makes
none of it untrue; resetting them would only open a warm-up, in which nobody is scored.
"""

from __future__ import annotations

from dips.ids import GENESIS, VersionId
from dips.protocol import durability, round
from dips.protocol.events import SlaveRegistered
from dips.protocol.moves import SlaveState
from dips.protocol.records import RolledBack, VersionRow, VersionsRetired
from dips.protocol.world import Slave, World


def offered(event: SlaveRegistered) -> frozenset[VersionId]:
    """Everything that this slave could serve: from memory, from what it prepared, from its disk."""
    return frozenset(v for v in (event.memory, event.prepared, *event.complete) if v is not None)


def consider(w: World) -> None:
    """A slave has said what it offers: roll back if one of them lacks the head and all have spoken."""
    lacking = [s.name for s in w.slaves.values() if s.offer is not None and not _offers(w, s, w.head)]
    w.rollback_waits = ""
    if not lacking or w.round is not None:
        return  # a round that is being written down ends first: its row says what the head is
    for slave in w.ready_slaves():
        if slave.offer is None:
            _ask(w, slave, f"{', '.join(lacking)} cannot offer {w.head}: what does it offer?")
    unheard = [s.name for s in w.slaves.values() if s.offer is None]
    if unheard:
        w.rollback_waits = f"{', '.join(lacking)} cannot offer {w.head}; not yet heard: {', '.join(unheard)}"
        return
    kept = [v.version for v in reversed(w.versions.values()) if not v.retired]
    head = next((v for v in kept if all(_offers(w, s, v) for s in w.slaves.values())), None)
    if head is None:
        w.rollback_waits = f"no version is offered by every slave: {_offers_told(w)}; restore a snapshot directory"
        return
    _roll_back(w, head, f"{', '.join(lacking)} cannot offer {w.head}")


def _offers(w: World, slave: Slave, version: VersionId) -> bool:
    """v0@r0 is the initial model, which every slave has; it is offered until a version that all had is retired.

    From then on a slave that has nothing else has lost its directory, and the run must not begin anew for that.
    """
    assert slave.offer is not None
    if version == GENESIS:
        return version == w.head or not any(v.retired and v.durable for v in w.versions.values())
    return version in slave.offer


def _offers_told(w: World) -> str:
    return "; ".join(f"{s.name}: {', '.join(map(str, sorted(s.offer or ()))) or 'nothing'}" for s in w.slaves.values())


def _ask(w: World, slave: Slave, reason: str) -> None:
    """It serves on, and its next beat is answered: register."""
    slave.become(SlaveState.RESTORING, reason)
    round.stop_waiting(w, slave.name)


def _roll_back(w: World, head: VersionId, reason: str) -> None:
    undone = [v for v in w.versions.values() if v.version.version > head.version]
    w.record(RolledBack(head, tuple(v.version for v in undone), reason, w.now))
    if garbage := tuple(v.version for v in undone if not v.retired):
        w.record(VersionsRetired(garbage))  # deleted when their slave serves the head: slaves.py, at Hold
    durability.interrupt(w)
    for row in undone:
        del w.versions[row.version]
        w.undone[row.version] = row
        _undo_shares(w, row)
    w.head = head
    if w.finished is not None and w.finished not in w.versions:
        w.finished = None
    for slave in w.ready_slaves():
        if slave.memory != head:
            _ask(w, slave, f"the head is {head} again")
    w.note("rolled_back", head=head, undone=",".join(str(v.version) for v in undone), reason=reason)


def _undo_shares(w: World, row: VersionRow) -> None:
    w.tokens_accepted -= row.tokens
    for name, tokens, ranges in row.shares:
        w.ranges.undo(ranges)
        cluster = w.clusters.get(name)
        if cluster is None:
            continue
        cluster.counts["accepted"] -= 1
        cluster.counts["undone"] += 1
        cluster.tokens["accepted"] -= tokens
        cluster.tokens["undone"] += tokens
