"""The newest version by its row in the ledger: its loss, its age, the clusters in it. For display only."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from dips.dataclass import dataclass, replace
from dips.protocol.records import Record, VersionCommitted, VersionDurable
from dips.protocol.view import NewestView
from dips.view.points import RoundHistory, mean_loss


@dataclass(frozen=True, slots=True)
class NewestVersion:
    """Times, loss and contributors of the newest version; times are Unix seconds, None if there is none yet."""

    committed: float | None = None
    durable: float | None = None  # time of commit of the newest durable version
    clusters: int = 0  # number of clusters that contributed to it
    loss: float | None = None

    @staticmethod
    def from_history(rounds: Iterable[RoundHistory]) -> NewestVersion:
        """Build it from the ledger's last rounds, oldest first."""
        newest = NewestVersion()
        for r in rounds:
            if r.version is not None and r.undone is None:
                clusters = len({fold.push.cluster for fold in r.folds})
                durable = r.ended if r.durable else newest.durable
                newest = NewestVersion(r.ended, durable, clusters, mean_loss(r.folds))
        return newest

    def follow_records(self, records: Sequence[Record], wall: float) -> NewestVersion:
        """Return the newest version after these records were written."""
        newest = self
        for record in records:
            if isinstance(record, VersionCommitted):
                clusters = len({fold.push.cluster for fold in record.folds})
                durable = wall if record.durable else newest.durable
                newest = NewestVersion(wall, durable, clusters, mean_loss(record.folds))
            elif isinstance(record, VersionDurable):
                newest = replace(newest, durable=newest.committed)
        return newest

    def view(self, wall: float) -> NewestView:
        return NewestView(_age_of(self.committed, wall), _age_of(self.durable, wall), self.clusters, self.loss)


def _age_of(then: float | None, wall: float) -> float | None:
    """Return the age, at least 0, since clocks may be set back."""
    return None if then is None else max(0.0, wall - then)
