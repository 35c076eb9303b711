"""The record of an emulated run: the ledger's versions, the gates' decisions, and the slaves' state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from statistics import mean
from types import MappingProxyType

import numpy as np

from dips.ids import GENESIS, PushId, VersionId
from dips.protocol.effects import Note
from dips.protocol.enums import OutcomeKind
from dips.protocol.records import OutcomeRow, Record, RoundEnded, VersionCommitted
from dips.sim.observer import Observer
from dips.sim.world import World

NO_GATE = "none"  # rejected by no gate: not finite, without tokens, or quarantined by an operator


@dataclass(slots=True)
class Emulated:
    """The results of a run."""

    loss: float = float("nan")  # of the last version, on validation data
    first_loss: float = float("nan")  # of the first version
    finished: bool = False  # all tokens were accepted within the time
    tokens: int = 0  # accepted
    lasted_s: float = 0.0  # duration in virtual time
    versions: int = 0
    clipped: int = 0
    gated: int = 0
    readmitted: int = 0  # quarantines that the operator lifted
    head: VersionId = GENESIS
    staleness: list[int] = field(default_factory=list)  # of each accepted push
    shares: dict[str, int] = field(default_factory=dict)  # accepted tokens by cluster
    steps: dict[str, int] = field(default_factory=dict)  # inner steps by cluster
    cosines: list[float] = field(default_factory=list)  # of each outer step's gradient to the momentum before it
    outcomes: list[tuple[PushId, bool]] = field(default_factory=list)  # of each settled push, whether it was accepted
    gates: dict[str, tuple[str, str]] = field(default_factory=dict)  # (gate, reason) of each rejected push
    usual_loss: dict[str, float] = field(
        default_factory=dict
    )  # share by which a cluster's loss is usually above the others'

    @property
    def diverged(self) -> bool:
        """Whether the last loss is not below the first, or not a number."""
        return not self.loss < self.first_loss

    @property
    def effective_clusters(self) -> float:
        """The effective number of clusters, 1/Σshare²."""
        total = sum(self.shares.values())
        return 1.0 / sum((tokens / total) ** 2 for tokens in self.shares.values()) if total else 0.0

    @property
    def mean_staleness(self) -> float:
        return mean(self.staleness) if self.staleness else 0.0

    @property
    def mean_cosine(self) -> float:
        return mean(self.cosines) if self.cosines else 0.0


@dataclass(frozen=True, slots=True)
class GateCount:
    """Counts of the gates' decisions on bad and on healthy pushes."""

    bad: int  # bad pushes after the first of each cluster
    bad_gated: int
    healthy: int  # pushes of clusters that have no fault, or have not had one yet
    healthy_gated: int
    recovered_after: int | None  # gated pushes of the slowest cluster before one was accepted again; None: none was
    healthy_of: Mapping[str, int] = field(default_factory=dict)  # of `healthy`, by cluster
    gated_by: Mapping[str, Mapping[str, int]] = field(default_factory=dict)  # of `healthy_gated`, by cluster and gate
    first_reasons: Mapping[str, str] = field(default_factory=dict)  # reason of each cluster's first gated healthy push

    @classmethod
    def of_run(
        cls,
        outcomes: Iterable[tuple[PushId, bool]],
        bad_pushes: Mapping[str, list[PushId]],
        gates: Mapping[str, tuple[str, str]] = MappingProxyType({}),
    ) -> GateCount:
        settled = list(outcomes)
        firsts = {pushes[0] for pushes in bad_pushes.values() if pushes}
        bad = {push for pushes in bad_pushes.values() for push in pushes}
        fates = [accepted for push, accepted in settled if push in bad - firsts]
        healthy = list(_until_first_bad(settled, bad))
        wrong = [push for push, accepted in healthy if not accepted]
        gated_by: dict[str, Counter[str]] = {}
        reasons: dict[str, str] = {}
        for push in wrong:
            gate, reason = gates.get(str(push), (NO_GATE, ""))
            gated_by.setdefault(push.cluster, Counter())[gate] += 1
            reasons.setdefault(push.cluster, reason)
        return cls(
            len(fates), fates.count(False), len(healthy), len(wrong),
            _recovery(settled, {cluster: set(pushes) for cluster, pushes in bad_pushes.items() if pushes}),
            Counter(push.cluster for push, _ in healthy), gated_by, reasons,
        )  # fmt: skip


def _until_first_bad(settled: list[tuple[PushId, bool]], bad: set[PushId]) -> Iterator[tuple[PushId, bool]]:
    seen: set[str] = set()
    for push, accepted in settled:
        if push in bad:
            seen.add(push.cluster)
        if push.cluster not in seen:
            yield push, accepted


def _recovery(settled: list[tuple[PushId, bool]], bad: Mapping[str, set[PushId]]) -> int | None:
    """Return the most pushes gated after a cluster's last bad push; None if one was not accepted again."""
    slowest = 0
    for cluster, pushes in bad.items():
        own = [(push, accepted) for push, accepted in settled if push.cluster == cluster]
        last = max((i for i, (push, _) in enumerate(own) if push in pushes), default=-1)
        after = next((i for i, (_, accepted) in enumerate(own[last + 1 :]) if accepted), None)
        if after is None:
            return None
        slowest = max(slowest, after)
    return slowest


class RunAccount(Observer):
    """An observer that fills an Emulated from a world, and ends the world with the run."""

    def __init__(self, world: World, result: Emulated) -> None:
        self._world, self._result, self._finished = world, result, False

    def record_written(self, record: Record) -> None:
        if isinstance(record, VersionCommitted):
            self._result.versions += 1
            self._result.clipped += record.clipped
            for fold in record.folds:
                self._result.staleness.append(record.parent.version - fold.base.version)
                shares = self._result.shares
                shares[fold.push.cluster] = shares.get(fold.push.cluster, 0) + fold.tokens
                self._result.tokens += fold.tokens
            self._result.head = record.version
            self._note_cosine(record)
        if isinstance(record, VersionCommitted | RoundEnded):
            shifts = ((row.cluster, row.loss_shift) for row in record.penalty if row.loss is not None)
            self._result.usual_loss |= dict(shifts)
            self._note_outcomes(record.outcomes)

    def note_logged(self, note: Note) -> None:
        if note.kind == "push_gated":
            fields = dict(note.fields)
            self._result.gates[fields["push"]] = (fields["gate"] or NO_GATE, fields["reason"])
        self._finished = self._finished or note.kind == "run_finished"

    def time_passed(self) -> None:
        if self._finished and all(
            m.process is not None and m.process.versions.served_version == self._result.head
            for m in self._world.machines.values()
        ):
            self._result.finished = True
            self._world.stop()

    def _note_outcomes(self, outcomes: tuple[OutcomeRow, ...]) -> None:
        for outcome in outcomes:
            if outcome.kind in (OutcomeKind.ACCEPTED, OutcomeKind.GATED):
                accepted = outcome.kind is OutcomeKind.ACCEPTED
                self._result.outcomes.append((outcome.push, accepted))
                self._result.gated += not accepted

    def _note_cosine(self, record: VersionCommitted) -> None:
        """Record the cosine of b·g = m′ − a·m to m, over all slaves; both exist until the flip, which follows
        the row.
        """
        dot = g_sq = m_sq = 0.0
        for machine in self._world.machines.values():
            if machine.process is None or machine.process.versions.prepared != record.version:
                return
            before = machine.process.versions.momentum(record.parent)
            after = machine.process.versions.momentum(record.version)
            for layer, m in before.items():
                g = after[layer] - np.float32(record.step.a) * m
                dot, g_sq, m_sq = dot + float(g @ m), g_sq + float(g @ g), m_sq + float(m @ m)
        if g_sq > 0 and m_sq > 0:  # before the first step the momentum is 0
            self._result.cosines.append(dot / (g_sq * m_sq) ** 0.5)
