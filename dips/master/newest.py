"""The newest version, as its row in the ledger says: its loss, its age, whose work it holds. For showing only."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from dips.dataclass import dataclass, replace
from dips.protocol.records import Record, VersionCommitted, VersionDurable
from dips.protocol.view import NewestView
from dips.view.points import RoundHistory, mean_loss


@dataclass(frozen=True, slots=True)
class NewestVersion:
    """Times are Unix seconds; None: there is none yet."""

    committed: float | None = None
    durable: float | None = None  # when the newest durable version was committed
    clusters: int = 0  # that contributed to it
    loss: float | None = None

    @staticmethod
    def from_history(rounds: Iterable[RoundHistory]) -> NewestVersion:
        """From the ledger's last rounds, oldest first."""
        newest = NewestVersion()
        for r in rounds:
            if r.version is not None and r.undone is None:
                clusters = len({fold.push.cluster for fold in r.folds})
                durable = r.ended if r.durable else newest.durable
                newest = NewestVersion(r.ended, durable, clusters, mean_loss(r.folds))
        return newest

    def follow_records(self, records: Sequence[Record], wall: float) -> NewestVersion:
        """After these were written."""
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
    """Clocks are set back at times; no age is below 0."""
    return None if then is None else max(0.0, wall - then)
