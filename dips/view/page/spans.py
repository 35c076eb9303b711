"""Spans of time for the timeline: windows, applies and persists of the run, pushes, waits and pulls of each cluster."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

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
