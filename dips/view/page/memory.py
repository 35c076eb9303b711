"""The page's memory of what the Coordinator did: bounded, in memory, for showing, never for deciding."""

from __future__ import annotations

import unicodedata
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from math import isfinite
from typing import Any

from dips.errors import Busy, Unavailable
from dips.ids import VersionId
from dips.printable import shorten
from dips.protocol.effects import Effect, Failed, Note, Refused, Reply
from dips.protocol.enums import ClusterCause, OutcomeKind, RoundResult, Severity
from dips.protocol.events import ClusterJoined, Event, PullFinished, PullRequested, PushRequested, SlaveRegistered
from dips.protocol.records import RolledBack, RoundEnded, VersionCommitted
from dips.view.page.curves import RunCurves
from dips.view.points import PointMaker, RoundHistory

# ---- text -----------------------------------------------------------------------------------------------------------
# Words and numbers from outside, bounded before they are shown: what a cluster says may be anything.


MOST_CHARS = 240  # of a reason or remark; the heartbeat's own limit
NAME_CHARS = 63  # of a cluster or slave
DIGITS = 6  # significant, of a number that is shown
MOST_SHOWN = 1e300  # larger numbers are not shown: with their difference, which overflows, a browser draws for ever
# Control and format characters: among the latter are those that turn the direction of what follows.
_HIDDEN = frozenset({"Cc", "Cf", "Co", "Cs", "Zl", "Zp"})


def clean_text(text: object, most: int = MOST_CHARS) -> str:
    """One line of visible characters, at most `most` of them."""
    line = str(text)[: most + 1]
    shown = line if line.isprintable() else "".join(" " if unicodedata.category(c) in _HIDDEN else c for c in line)
    return shorten(shown, most)


def clean_plain(value: Any) -> Any:
    """The same for what `to_plain` made: texts bounded, numbers with few digits; JSON has no NaN."""
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}") if abs(value) < MOST_SHOWN else None  # nor NaN
    if isinstance(value, str):
        return clean_text(value)
    if isinstance(value, Mapping):
        return {clean_text(key): clean_plain(item) for key, item in value.items()}
    return [clean_plain(item) for item in value] if isinstance(value, list) else value


def seconds_of(value: float | None) -> float | None:
    """A number of seconds to the hundredth."""
    return None if value is None or not isfinite(value) else round(value, 2)


# ---- events ---------------------------------------------------------------------------------------------------------
# The master's notes as lines for a person: its severity, about whom, and what happened.
#
# A kind without a line here is shown by its own words, so that a new one is never lost; ROUTINE is on the timeline.


ROUTINE = frozenset(
    {"push_granted", "push_committed", "round_opened", "round_applying", "round_persisting", "version_committed"}
) | {"version_durable"}


@dataclass(frozen=True, slots=True)
class PageEvent:
    at: float  # Unix seconds
    severity: Severity
    who: str
    what: str
    times: int = 1  # in a row


_GOOD, _PLAIN, _ATTENTION, _BROKEN = Severity.GOOD, Severity.PLAIN, Severity.ATTENTION, Severity.BROKEN
# kind → severity, the field that names who it is about, and the sentence
LINES: Mapping[str, tuple[Severity, str, str]] = {
    "cluster_joined": (_GOOD, "cluster", "joined at {head}"),
    "cluster_gone": (_ATTENTION, "cluster", "is gone: {reason}"),
    "cluster_readmitted": (_GOOD, "cluster", "was readmitted by an operator"),
    "cluster_diverged": (_ATTENTION, "cluster", "gave up a push that was not finite"),
    "push_gated": (_ATTENTION, "push", "push gated: {reason}"),
    "push_dropped": (_PLAIN, "push", "push dropped: {reason}"),
    "claim_refused": (_ATTENTION, "push", "push refused: {reason}"),
    "round_skipped": (_ATTENTION, "", "round {round} was skipped: {reason}"),
    "round_unchanged": (_ATTENTION, "", "round {round} changed nothing: each of its {gated} pushes was gated"),
    "rolled_back": (_BROKEN, "", "rolled back to {head}: {reason}"),
    "persist_failed": (_ATTENTION, "", "the snapshot of {head} failed: {reason}"),
    "degraded": (_BROKEN, "", "goes on without snapshots: {reason}"),
    "stopped": (_BROKEN, "", "stopped: {reason}"),
    "durable_again": (_GOOD, "", "{version} is on every disk again"),
    "slave_ready": (_GOOD, "slave", "serves {version}"),
    "slave_lost": (_BROKEN, "slave", "is lost: {reason}"),
    "slave_drains": (_PLAIN, "slave", "is being drained"),
    "slave_drained": (_PLAIN, "slave", "is drained"),
    "mirror_fails": (_ATTENTION, "slave", "mirror fails: {reason}"),
    "mirror_works_again": (_GOOD, "slave", "mirror works again"),
    "order_refused": (_ATTENTION, "slave", "refused an order: {reason}"),
    "run_finished": (_GOOD, "", "the run is finished at {version}: {reason}"),
    "run_extended": (_PLAIN, "", "an operator extended the run"),
    "blind": (_ATTENTION, "", "the master itself was held up for {gap_s} s"),
}


def describe_note(kind: str, fields: Mapping[str, str], at: float) -> PageEvent | None:
    """Return the line of a note; None for what happens in every round that goes well."""
    if kind in ROUTINE:
        return None
    known = {key: clean_text(value) for key, value in fields.items()}
    if kind not in LINES:
        told = ", ".join(f"{key} {value}" for key, value in known.items())
        return PageEvent(at, _PLAIN, "", clean_text(f"{kind.replace('_', ' ')}: {told}"))
    severity, who, sentence = LINES[kind]
    if kind == "cluster_gone" and known.get("cause") == ClusterCause.LEFT:
        severity, sentence = _PLAIN, "left"
    name = cluster_of_push(known.get(who, "")) if who == "push" else known.get(who, "")
    return PageEvent(at, severity, name, clean_text(sentence.format_map(_OrDash(known))))


def cluster_of_push(push: str) -> str:
    """`west/3#17` → `west`."""
    return push.partition("/")[0]


class _OrDash(dict[str, str]):
    """A field that a note does not have is shown as a dash."""

    def __missing__(self, key: str) -> str:
        return "–"


# ---- spans ----------------------------------------------------------------------------------------------------------


SPANS_KEPT = 1024  # that are over, the newest
MOST_OPEN = 4096  # at once; what is more is not drawn

RUN_LANE = ""  # no cluster has this name


class SpanKind(StrEnum):
    """The kinds of bars on the timeline."""

    ROUND = "round"  # of a master before: its parts are not known
    WINDOW = "window"
    APPLY = "apply"
    PERSIST = "persist"
    PUSH = "push"
    WAIT = "wait"  # committed, until its round ends
    PULL = "pull"


@dataclass(frozen=True, slots=True)
class Span:
    """`begin` and `end` are Unix seconds; `end` None: it goes on. `broken`: it led to nothing."""

    lane: str
    kind: SpanKind
    begin: float
    end: float | None
    label: str
    broken: bool = False


class SpanBook:
    """One span may be open in a lane at a time: whatever begins ends the one before."""

    def __init__(self) -> None:
        self._open: dict[str, Span] = {}
        self._done: deque[Span] = deque(maxlen=SPANS_KEPT)

    def begin_span(self, lane: str, kind: SpanKind, at: float, label: str = "") -> None:
        self.end_span(lane, at)
        if len(self._open) < MOST_OPEN:
            self._open[lane] = Span(lane, kind, at, None, label)

    def end_span(self, lane: str, at: float, kind: SpanKind | None = None, *, broken: bool = False) -> None:
        """End what is open in a lane, if it is of this kind; None: of any."""
        span = self._open.get(lane)
        if span is not None and (kind is None or span.kind is kind):
            del self._open[lane]
            self._done.append(Span(lane, span.kind, span.begin, max(at, span.begin), span.label, broken))

    def add_span(self, span: Span) -> None:
        """One that is over, from elsewhere."""
        self._done.append(span)

    def open_kind(self, lane: str) -> SpanKind | None:
        span = self._open.get(lane)
        return span.kind if span is not None else None

    def end_others(self, lanes: Mapping[str, SpanKind], at: float) -> None:
        """End what is open in a lane that is not busy so: nothing told us how it ended."""
        for lane in [lane for lane, span in self._open.items() if lanes.get(lane) is not span.kind]:
            self.end_span(lane, at)

    def list_spans(self, since: float) -> list[Span]:
        """Those that had not ended by `since`, oldest first, the open ones last."""
        return [s for s in self._done if s.end is None or s.end >= since] + list(self._open.values())


# ---- memory ---------------------------------------------------------------------------------------------------------
# `watch_step` sees each event and its effects; the times are the wall clock's, given by the caller. What lay before
# this master's start comes from the ledger, by `recall_round`.


EVENTS_KEPT = 64
ROUNDS_KEPT = 16
REJECTIONS_KEPT = 32  # by (who, what, why), the newest


@dataclass(frozen=True, slots=True)
class EndedRound:
    """One round that ended, and how long its phases took."""

    round: RoundHistory
    phases: Mapping[str, float]  # seconds, by SpanKind


@dataclass(frozen=True, slots=True)
class Rejection:
    """A rejected push or request, with its count and last time `at`."""

    who: str
    what: str
    why: str
    at: float
    times: int = 1


class PageMemory:
    """Used by one thread: the master's loop."""

    def __init__(self) -> None:
        self.curves, self.spans = RunCurves(), SpanBook()
        self.events: deque[PageEvent] = deque(maxlen=EVENTS_KEPT)
        self.rounds: deque[EndedRound] = deque(maxlen=ROUNDS_KEPT)
        self.rejections: dict[tuple[str, str, str], Rejection] = {}
        self.head_at: float | None = None  # when the head was made
        self._points = PointMaker()
        self._phases: dict[str, float] = {}  # of the open round: when each began
        self._seen: dict[type[Any], Callable[[Any, float], None]] = {
            Note: self._on_note,
            VersionCommitted: self._on_version,
            RoundEnded: self._on_round_ended,
            RolledBack: self._on_rolled_back,
        }

    # ---- what lay before ------------------------------------------------------------------------------------------

    def begin_lineage(self, version: VersionId, tokens: int) -> None:
        """Rounds follow that go on from this version."""
        self._points.begin(version, tokens)

    def recall_round(self, r: RoundHistory) -> None:
        """A round of the ledger, oldest first."""
        if r.ended is None:
            return
        self.spans.add_span(
            Span(RUN_LANE, SpanKind.ROUND, r.opened, r.ended, f"r{r.round}", r.version is None or r.undone is not None)
        )
        self._keep_round(r, {})

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
        """Keep an event; one that repeats the last is counted on its line."""
        last = self.events[-1] if self.events else None
        if last is not None and (last.who, last.what) == (event.who, event.what):
            self.events[-1] = replace(event, times=last.times + 1)
        else:
            self.events.append(event)

    def _begin_phase(self, kind: SpanKind, number: str, wall: float) -> None:
        self._phases[kind] = wall
        self.spans.begin_span(RUN_LANE, kind, wall, f"r{number}")

    def _on_version(self, row: VersionCommitted, wall: float) -> None:
        tokens = sum(fold.tokens for fold in row.folds)
        opened, phases = self._end_phases(wall, broken=False)
        made = RoundHistory(
            row.version.round, RoundResult.APPLIED, "", opened, wall, row.version, row.parent, tokens, row.step,
            row.delta_norm, row.clipped, row.folds, row.outcomes,
        )  # fmt: skip
        self._end_round(made, phases, wall)

    def _on_round_ended(self, row: RoundEnded, wall: float) -> None:
        opened, phases = self._end_phases(wall, broken=True)
        ended = RoundHistory(row.round, row.kind, row.reason, opened, wall, None, None, 0, outcomes=row.outcomes)
        self._end_round(ended, phases, wall)

    def _end_phases(self, wall: float, *, broken: bool) -> tuple[float, Mapping[str, float]]:
        """When the round was opened, and how long each of its phases took; none of a recovered version."""
        self.spans.end_span(RUN_LANE, wall, broken=broken)
        begun = list(self._phases.items())
        self._phases.clear()
        ends = [at for _, at in begun[1:]] + [wall]
        return begun[0][1] if begun else wall, {phase: e - at for (phase, at), e in zip(begun, ends, strict=False)}

    def _end_round(self, r: RoundHistory, phases: Mapping[str, float], wall: float) -> None:
        self._keep_round(r, phases)
        for o in r.outcomes:
            self.spans.end_span(o.push.cluster, wall, broken=o.kind is not OutcomeKind.ACCEPTED)
            if o.kind is not OutcomeKind.SKIPPED:  # whoever was judged pulls the head
                self.spans.begin_span(o.push.cluster, SpanKind.PULL, wall)

    def _keep_round(self, r: RoundHistory, phases: Mapping[str, float]) -> None:
        self.rounds.append(EndedRound(r, phases))
        point = self._points.make_point(r)
        for o in r.outcomes:
            if o.kind is not OutcomeKind.ACCEPTED:
                self._keep_rejection(o.push.cluster, f"{o.kind} in round {r.round}", o.reason, r.ended or 0.0)
        if point is not None and r.undone is None:
            self.curves.add_round(point)
            self.head_at = self.head_at if r.version is None else r.ended

    def _on_rolled_back(self, row: RolledBack, wall: float) -> None:
        for i, ended in enumerate(self.rounds):
            if ended.round.version in row.undone:
                self.rounds[i] = replace(ended, round=replace(ended.round, undone=row.reason))
        self.curves.drop_above(self._points.go_back(row.head) or 0)
        self.head_at = wall

    def _on_refused(self, event: Event, result: Failed | Refused, wall: float) -> None:
        """Keep the refusal of a join, a registration or a push."""
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
