"""The world's record of inner steps: each uses up a data range and some tokens, and is settled or lost once."""

from __future__ import annotations

from dataclasses import field
from functools import cached_property

from dips.codecs import Codec
from dips.data.steps import Part
from dips.dataclass import dataclass
from dips.ids import GENESIS, PushId, VersionId
from dips.protocol.records import Record, RolledBack, RoundEnded, VersionCommitted, VersionsRetired
from dips.slave.ports import F32


@dataclass(eq=False)
class Work:
    """One inner step. `lost` says why its effect was lost; empty while it is not."""

    cluster: str
    data_range: int
    tokens: int
    lost: str = ""
    parts: tuple[Part, ...] = ()  # its samples of ranges, if the scenario counts samples


@dataclass(eq=False)
class Use:
    """A data range that a trainer has used up; the same range may be leased and used again after it was undone."""

    data_range: int
    settled: bool = False


@dataclass
class WorkInHand:
    """The work of a trainer since its last install: the next push contains it, if it is not settled by then."""

    works: list[Work] = field(default_factory=list)
    used: list[Use] = field(default_factory=list)
    _frozen: tuple[int, int] = (0, 0)  # how many of both are in the push frozen last

    def freeze_work(self, books: Books) -> tuple[tuple[Work, ...], tuple[Use, ...]]:
        """Cut the work for a push; return the work and uses that it contains."""
        self._frozen = (len(self.works), len(self.used))
        works = tuple(work for work in self.works if id(work) not in books.settled)
        return works, tuple(use for use in self.used if not use.settled)

    def lose_work(self, cause: str, frozen_only: bool = False) -> None:
        """Mark the work as lost: all of it, or only the part that the last push has frozen."""
        works, used = self._frozen if frozen_only else (len(self.works), len(self.used))
        for work in self.works[:works]:
            work.lost = cause
        del self.works[:works], self.used[:used]
        self._frozen = (0, 0)


@dataclass(frozen=True)
class Frozen:
    """The intended content of a cluster's push, with which the ledger's rows are compared."""

    push: PushId
    base: VersionId
    content: dict[int, F32]  # content of a slot when all of it has arrived
    work: tuple[Work, ...]
    uses: tuple[Use, ...]
    diverged: bool = False  # its content is bad deliberately
    codec: Codec = Codec.FP32

    @property
    def ranges(self) -> tuple[int, ...]:
        """The data ranges used up by then and not settled."""
        return tuple(use.data_range for use in self.uses)

    @cached_property
    def tokens(self) -> int:
        """The tokens that it consumed."""
        return sum(w.tokens for w in self.work)


@dataclass
class Books:
    """All work and freezes of a world, and their settlement by the ledger."""

    work: list[Work] = field(default_factory=list)
    consumed: dict[str, int] = field(default_factory=dict)  # cluster → tokens of all its work
    frozen: dict[PushId, Frozen] = field(default_factory=dict)  # the newest freeze under each name
    settled: dict[int, str] = field(default_factory=dict)  # id of the work → outcome and push in which it was settled
    made: dict[PushId, VersionId] = field(default_factory=dict)  # the version that contains each push
    lineage: list[VersionId] = field(default_factory=lambda: [GENESIS])  # oldest first; the last is the head
    retired: set[VersionId] = field(default_factory=set)  # never offered again, though still on disks perhaps

    def record_work(self, work: Work) -> None:
        """Record an inner step."""
        self.work.append(work)
        self.consumed[work.cluster] = self.consumed.get(work.cluster, 0) + work.tokens

    def on_record(self, record: Record) -> None:
        """Process a durable record: follow the lineage, and settle accepted and gated pushes."""
        match record:
            case VersionCommitted():
                self.lineage.append(record.version)
                self.made.update((fold.push, record.version) for fold in record.folds)
                self._settle_round(record)
            case RoundEnded():
                self._settle_round(record)
            case RolledBack():
                self.lineage = [v for v in self.lineage if v not in record.undone]
            case VersionsRetired():
                self.retired.update(record.versions)
            case _:
                pass  # not about work or versions

    def _settle_round(self, ended: VersionCommitted | RoundEnded) -> None:
        for outcome in ended.outcomes:
            if outcome.kind != "skipped":
                frozen = self.frozen[outcome.push]
                self.settled.update(dict.fromkeys(map(id, frozen.work), f"{outcome.kind} in {outcome.push}"))
                for use in frozen.uses:
                    use.settled = True

    @property
    def head(self) -> VersionId:
        return self.lineage[-1]

    @property
    def offered_versions(self) -> list[VersionId]:
        """The versions of the lineage that slaves may be asked for, except the initial one, which they always have."""
        return [v for v in self.lineage[1:] if v not in self.retired]
