"""What the page remembers of what the Coordinator did: bounded, in memory, for showing, never for deciding.

`watch_step` sees each event and its effects; the times are the wall clock's, given by the caller. What lay before this
master's start comes from the ledger, by `recall_round`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dips.errors import Busy, Unavailable
from dips.page.curves import LossCurves
from dips.page.events import PageEvent, cluster_of_push, describe_note
from dips.page.spans import RUN_LANE, Span, SpanBook, SpanKind
from dips.page.text import NAME_CHARS, clean_text
from dips.protocol.effects import Effect, Failed, Note, Refused, Reply
from dips.protocol.enums import OutcomeKind, RoundResult
from dips.protocol.events import ClusterJoined, Event, PullFinished, PullRequested, PushRequested, SlaveRegistered
from dips.protocol.records import OutcomeRow, RolledBack, RoundEnded, VersionCommitted

EVENTS_KEPT = 64
ROUNDS_KEPT = 16
REJECTIONS_KEPT = 32  # by (who, what, why), the newest
VERDICTS_KEPT = 4096  # clusters whose last outcome is known
UNDO_KEPT = 1024  # versions whose tokens are known: no rollback goes farther


@dataclass(frozen=True, slots=True)
class RoundMemory:
    """One round that ended; times are Unix seconds."""

    round: int
    kind: str
    version: str | None
    reason: str
    begin: float
    end: float
    phases: Mapping[str, float]  # seconds, by SpanKind
    outcomes: tuple[tuple[str, str, str], ...]  # (cluster, kind, reason)


@dataclass(frozen=True, slots=True)
class Rejection:
    """Somebody's push did not count, or somebody was told no; so many times, last at `at`."""

    who: str
    what: str
    why: str
    at: float
    times: int = 1


@dataclass(frozen=True, slots=True)
class LastOutcome:
    """How a cluster's last push ended."""

    kind: str
    reason: str
    round: int
    at: float


class PageMemory:
    """Used by one thread: the master's loop."""

    def __init__(self) -> None:
        self.curves, self.spans = LossCurves(), SpanBook()
        self.events: deque[PageEvent] = deque(maxlen=EVENTS_KEPT)
        self.rounds: deque[RoundMemory] = deque(maxlen=ROUNDS_KEPT)
        self.rejections: dict[tuple[str, str, str], Rejection] = {}
        self.outcomes: dict[str, LastOutcome] = {}
        self.head_at: float | None = None  # when the head was made
        self._tokens = 0  # of the head's lineage
        self._made: deque[tuple[str, int]] = deque(maxlen=UNDO_KEPT)  # (version, tokens of its lineage)
        self._phases: dict[str, float] = {}  # of the open round: when each began
        self._seen: dict[type[Any], Callable[[Any, float], None]] = {
            Note: self._on_note,
            VersionCommitted: self._on_version,
            RoundEnded: self._on_round_ended,
            RolledBack: self._on_rolled_back,
        }

    # ---- what lay before ------------------------------------------------------------------------------------------

    def begin_lineage(self, tokens: int) -> None:
        """`tokens` of the head's lineage at the start."""
        self._tokens = tokens

    def recall_round(
        self, round_: RoundMemory, tokens: int | None, losses: Sequence[tuple[str, int, float | None]]
    ) -> None:
        """A round of the ledger, oldest first; `tokens` of its version's lineage, None if it made none that stands."""
        self.rounds.append(round_)
        self.spans.add_span(
            Span(RUN_LANE, SpanKind.ROUND, round_.begin, round_.end, f"r{round_.round}", tokens is None)
        )
        for cluster, kind, reason in round_.outcomes:
            self._keep_outcome(cluster, LastOutcome(kind, clean_text(reason), round_.round, round_.end))
        if tokens is not None and round_.version is not None:
            self.head_at = round_.end
            self._made.append((round_.version, tokens))
            self.curves.add_version(tokens, round_.end, losses)

    # ---- what happens ---------------------------------------------------------------------------------------------

    def watch_step(self, event: Event, effects: Sequence[Effect], wall: float) -> None:
        """The Coordinator took `event` and ordered `effects`."""
        match event:
            case PullRequested():
                if self.spans.open_kind(event.pull.cluster) is not SpanKind.PULL:
                    self.spans.begin_span(event.pull.cluster, SpanKind.PULL, wall)
            case PullFinished():
                self.spans.end_span(event.pull.cluster, wall, SpanKind.PULL, broken=not event.installed)
            case PushRequested():
                self.spans.end_span(event.push.cluster, wall, SpanKind.PULL)
        for effect in effects:
            if type(effect) in self._seen:
                self._seen[type(effect)](effect, wall)
            elif type(effect) is Reply and isinstance(effect.result, Failed | Refused):
                self._on_refused(event, effect.result, wall)

    def end_idle_lanes(self, busy: Mapping[str, SpanKind], wall: float) -> None:
        """End what no event ended: a pull past its deadline, a cluster that is gone. `busy`: what clusters do."""
        run = self.spans.open_kind(RUN_LANE)
        self.spans.end_others({**busy, **({RUN_LANE: run} if run is not None else {})}, wall)

    def _on_note(self, note: Note, wall: float) -> None:
        fields = dict(note.fields)
        if (line := describe_note(note.kind, fields, wall)) is not None:
            self._keep_event(line)
        cluster = cluster_of_push(fields.get("push", "")) or fields.get("cluster", "")
        match note.kind:
            case "push_granted":
                self.spans.begin_span(cluster, SpanKind.PUSH, wall)
            case "push_committed":
                self.spans.begin_span(cluster, SpanKind.WAIT, wall)
            case "push_dropped" | "cluster_gone":
                self.spans.end_span(cluster, wall, broken=True)
            case "claim_refused":
                self._keep_rejection(cluster, "push refused", fields.get("reason", ""), wall)
            case "round_opened":
                self._phases.clear()
                self._begin_phase(SpanKind.WINDOW, fields.get("round", ""), wall)
            case "round_applying":
                self._begin_phase(SpanKind.APPLY, fields.get("round", ""), wall)
            case "round_persisting":
                self._begin_phase(SpanKind.PERSIST, fields.get("round", ""), wall)

    def _keep_event(self, event: PageEvent) -> None:
        """What happens again and again is one line."""
        last = self.events[-1] if self.events else None
        if last is not None and (last.who, last.what) == (event.who, event.what):
            self.events[-1] = replace(event, times=last.times + 1)
        else:
            self.events.append(event)

    def _begin_phase(self, kind: SpanKind, number: str, wall: float) -> None:
        self._phases[kind] = wall
        self.spans.begin_span(RUN_LANE, kind, wall, f"r{number}")

    def _on_version(self, row: VersionCommitted, wall: float) -> None:
        self._tokens += sum(fold.tokens for fold in row.folds)
        self.head_at = wall
        self._made.append((str(row.version), self._tokens))
        self.curves.add_version(self._tokens, wall, [(f.push.cluster, f.tokens, f.loss) for f in row.folds])
        self._end_round(row.version.round, RoundResult.APPLIED, str(row.version), "", row.outcomes, wall)

    def _on_round_ended(self, row: RoundEnded, wall: float) -> None:
        self._end_round(row.round, row.kind, None, row.reason, row.outcomes, wall)

    def _end_round(
        self, number: int, kind: str, version: str | None, reason: str, outcomes: Sequence[OutcomeRow], wall: float
    ) -> None:
        self.spans.end_span(RUN_LANE, wall, broken=version is None)
        begun = list(self._phases.items())
        ends = [at for _, at in begun[1:]] + [wall]
        phases = {phase: end - at for (phase, at), end in zip(begun, ends, strict=False)}  # none of a recovered version
        told = tuple((o.push.cluster, str(o.kind), clean_text(o.reason)) for o in outcomes)
        begin = begun[0][1] if begun else wall
        self.rounds.append(RoundMemory(number, str(kind), version, clean_text(reason), begin, wall, phases, told))
        self._phases.clear()
        for o in outcomes:
            self._keep_outcome(o.push.cluster, LastOutcome(str(o.kind), clean_text(o.reason), number, wall))
            self.spans.end_span(o.push.cluster, wall, broken=o.kind is not OutcomeKind.ACCEPTED)
            if o.kind is not OutcomeKind.SKIPPED:  # whoever was judged pulls the head
                self.spans.begin_span(o.push.cluster, SpanKind.PULL, wall)

    def _on_rolled_back(self, row: RolledBack, wall: float) -> None:
        undone = {str(version) for version in row.undone}
        while self._made and self._made[-1][0] in undone:
            self._made.pop()
        self._tokens = self._made[-1][1] if self._made else 0
        self.curves.drop_above(self._tokens)
        self.head_at = wall

    def _on_refused(self, event: Event, result: Failed | Refused, wall: float) -> None:
        """Somebody who wanted to join, register or push may not."""
        if isinstance(result, Failed) and issubclass(result.error, Unavailable | Busy):
            return  # it is to ask again, and its state says so
        why = result.message if isinstance(result, Failed) else result.reason
        match event:
            case ClusterJoined():
                self._keep_rejection(event.cluster, "may not join", why, wall)
            case SlaveRegistered():
                self._keep_rejection(event.slave, "may not register", why, wall)
            case PushRequested() if isinstance(result, Failed):
                self._keep_rejection(event.push.cluster, "may not push", why, wall)

    def _keep_rejection(self, who: str, what: str, why: str, wall: float) -> None:
        key = (clean_text(who, NAME_CHARS), what, clean_text(why))
        before = self.rejections.pop(key, None)
        self.rejections[key] = Rejection(*key, wall, before.times + 1 if before is not None else 1)
        if len(self.rejections) > REJECTIONS_KEPT:
            del self.rejections[next(iter(self.rejections))]

    def _keep_outcome(self, cluster: str, outcome: LastOutcome) -> None:
        if cluster in self.outcomes or len(self.outcomes) < VERDICTS_KEPT:
            self.outcomes[cluster] = outcome
        if outcome.kind != OutcomeKind.ACCEPTED:
            self._keep_rejection(cluster, f"{outcome.kind} in round {outcome.round}", outcome.reason, outcome.at)
