"""The lineage: versions from v0@r0 to the head, oldest first; which of them may become the head again.

A rollback undoes what came after the version it goes back to. So the tokens and ranges of a version are kept for as
long as an older one is on offer, also if its own snapshots are retired: a mirror that lags, or an archived version,
keeps an old one on offer while newer ones go.
"""

from __future__ import annotations

from collections.abc import Iterable

from dips.ids import GENESIS, VersionId
from dips.protocol.records import VersionRow


def offers_genesis(lineage: Iterable[VersionRow]) -> bool:
    """v0@r0 is the initial model, which every slave has: it is offered until a version that all had is retired.

    From then on a slave that has nothing else has lost its directory, and the run must not begin anew for that.
    Versions are forgotten only after that, so a gap behind v0@r0 says the same.
    """
    rows = [row for row in lineage if row.version != GENESIS]
    return not any(row.retired and row.durable for row in rows) and (not rows or rows[0].parent == GENESIS)


def oldest_offered(lineage: Iterable[VersionRow]) -> VersionId:
    """The oldest version that may still become the head; whoever is older needs no shares any more."""
    rows = tuple(lineage)
    if offers_genesis(rows):
        return GENESIS
    return next((row.version for row in rows if row.version != GENESIS and not row.retired), rows[-1].version)
