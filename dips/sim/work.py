"""Inner steps as things that can be counted: each uses up a data range and some tokens, and meets one fate."""

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
    """One inner step. `lost` says why the process that held its effect holds it no more; empty while it does."""

    cluster: str
    data_range: int
    tokens: int
    lost: str = ""
    parts: tuple[Part, ...] = ()  # samples of ranges that it trained, if the scenario counts them


@dataclass(eq=False)
class Use:
    """One data range that a trainer has used up; the same range may be leased and used again when it was undone."""

    data_range: int
    settled: bool = False


@dataclass
class WorkInHand:
    """What a trainer has done since its last install: the next push carries it, if it is not settled by then."""

    works: list[Work] = field(default_factory=list)
    used: list[Use] = field(default_factory=list)
    _frozen: tuple[int, int] = (0, 0)  # so many of both are in the push that was frozen last

    def freeze_work(self, books: Books) -> tuple[tuple[Work, ...], tuple[Use, ...]]:
        """Cut for a push; return what it carries."""
        self._frozen = (len(self.works), len(self.used))
        works = tuple(work for work in self.works if id(work) not in books.settled)
        return works, tuple(use for use in self.used if not use.settled)

    def lose_work(self, cause: str, frozen_only: bool = False) -> None:
        """It is gone, or overwritten: all of it, or only what the last push has frozen."""
        works, used = self._frozen if frozen_only else (len(self.works), len(self.used))
        for work in self.works[:works]:
            work.lost = cause
        del self.works[:works], self.used[:used]
        self._frozen = (0, 0)


@dataclass(frozen=True)
class Frozen:
    """What a cluster meant to push: the truth that the ledger's rows are compared with."""

    push: PushId
    base: VersionId
    content: dict[int, F32]  # what a slot holds when all of it has arrived
    work: tuple[Work, ...]
    uses: tuple[Use, ...]
    diverged: bool = False  # its content is bad on purpose
    codec: Codec = Codec.FP32

    @property
    def ranges(self) -> tuple[int, ...]:
        """Used up by then, and not settled."""
        return tuple(use.data_range for use in self.uses)

    @cached_property
    def tokens(self) -> int:
        """Consumed by it."""
        return sum(w.tokens for w in self.work)


@dataclass
class Books:
    """All that was ever done and frozen in one world, and what the ledger has settled of it."""

    work: list[Work] = field(default_factory=list)
    consumed: dict[str, int] = field(default_factory=dict)  # cluster → tokens of all its work
    frozen: dict[PushId, Frozen] = field(default_factory=dict)  # the newest freeze under each name
    settled: dict[int, str] = field(default_factory=dict)  # id of the work → where the ledger settled it
    made: dict[PushId, VersionId] = field(default_factory=dict)  # the version that a push is in
    lineage: list[VersionId] = field(default_factory=lambda: [GENESIS])  # oldest first; the last is the head
    retired: set[VersionId] = field(default_factory=set)  # never offered again, though a disk may still have them

    def record_work(self, work: Work) -> None:
        """An inner step was taken."""
        self.work.append(work)
        self.consumed[work.cluster] = self.consumed.get(work.cluster, 0) + work.tokens

    def on_record(self, record: Record) -> None:
        """A record is durable: follow the lineage, and settle what it accepted or gated."""
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
                pass  # it says nothing of work or versions

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
        """Versions of the lineage that slaves may still be asked for, but the initial one, which they always have."""
        return [v for v in self.lineage[1:] if v not in self.retired]
