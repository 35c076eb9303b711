"""The lineage: versions from v0@r0 to the head, oldest first, and which of them may become the head again.

A rollback undoes the versions after its target. So the tokens and ranges of a version are kept as long as an older one
is on offer, even if its own snapshots are retired: a mirror that lags, or an archived version, keeps an old one on
offer while newer ones are retired.
"""

from __future__ import annotations

from collections.abc import Iterable

from dips.ids import GENESIS, VersionId
from dips.protocol.records import VersionRow


def offers_genesis(lineage: Iterable[VersionRow]) -> bool:
    """Whether v0@r0, the initial model that every slave has, may be the head: until a version that all slaves had is
    retired.

    After that, a slave that has only v0@r0 has lost its directory, for which the run must not begin anew. Versions are
    forgotten only after that, so a gap after v0@r0 means the same.
    """
    rows = [row for row in lineage if row.version != GENESIS]
    return not any(row.retired and row.durable for row in rows) and (not rows or rows[0].parent == GENESIS)


def oldest_offered(lineage: Iterable[VersionRow]) -> VersionId:
    """Return the oldest version that may still become the head; shares of older versions are not needed any more."""
    rows = tuple(lineage)
    if offers_genesis(rows):
        return GENESIS
    return next((row.version for row in rows if row.version != GENESIS and not row.retired), rows[-1].version)
