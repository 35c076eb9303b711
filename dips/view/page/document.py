"""`/api/state`: the master's view of the run and what the page remembers, as one JSON document of bounded size. Pure.

Peers are listed up to a limit, those that ask for a look first; every text has its length and no control characters,
every number a few digits; what is left out is counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import StrEnum
from itertools import islice, pairwise
from statistics import median
from types import MappingProxyType
from typing import Any

from dips.plain import to_plain
from dips.protocol.enums import ClusterState, RoundResult, Severity, SlaveState
from dips.protocol.view import ClusterView, Concern, RunView, SlaveView
from dips.view.judging import lease_line, protocol_line, rank_severity, sort_concerns
from dips.view.page.curves import PUSH_COLUMNS, RUN_COLUMNS, Curve
from dips.view.page.memory import (
    NAME_CHARS,
    RUN_LANE,
    EndedRound,
    PageMemory,
    Span,
    clean_plain,
    clean_text,
    seconds_of,
)

FORMAT = 3  # of the document; a page that was loaded from another release says so
ROUNDS_DRAWN = 8  # newest, whose times the timeline covers
LEAST_DRAWN_S, MOST_DRAWN_S = 20.0, 86_400.0
MOST_LANES = 12  # of clusters
MOST_SPANS = 400  # drawn, the newest
MOST_EVENTS = 40
MOST_REJECTIONS = 16
MOST_REASONS = 32  # of refusals, words of the code
MOST_FROM = 24  # clusters named in one round
MOST_PEERS = 48  # clusters listed, and slaves
MOST_ENDS = 16  # slaves that a cluster moves bytes to or from
MOST_CONCERNS = 12
LATE_ROUNDS = 5.0  # a head older than so many usual rounds is late
LEAST_LATE_S = 60.0  # but no younger one
LEAST_ROUNDS = 3  # from which the usual time is known


class HealthLevel(StrEnum):
    """The word beside the big sign."""

    WELL = "well"
    WAITING = "waiting"  # nobody trains yet
    FINISHED = "finished"
    ATTENTION = "attention"  # it goes on, and something needs a look
    BROKEN = "broken"  # no version can be made


def make_state(
    view: RunView,
    memory: PageMemory,
    *,
    wall: float,
    rates: Mapping[str, tuple[float, float]] = MappingProxyType({}),
    refusals: Mapping[str, int] = MappingProxyType({}),
    options: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, Any]:
    """The whole document.

    wall     now, in Unix seconds
    rates    of each slave: bytes a second, in and out
    refusals  what the master's ports turned away since its start, by reason
    options  the run's configuration
    """
    head_age_s = None if memory.head_at is None else max(0.0, wall - memory.head_at)
    concerns = sort_concerns(iter([*view.concerns, *_find_old_concerns(view, memory, head_age_s)]))
    plain = {key: to_plain(getattr(view, key)) for key in SHOWN}
    return {
        "format": FORMAT,
        "at": seconds_of(wall),
        **clean_plain(plain),
        "head_age_s": seconds_of(head_age_s),
        "round": clean_plain(to_plain(view.round)) | {"pushes": len(view.round.pushes)},
        "health": _judge_health(view, concerns),
        "lines": [clean_text(line) for line in (lease_line(view.lease), protocol_line(view)) if line],
        "clusters": _list_clusters(view),
        "slaves": _list_slaves(view, rates),
        "timeline": _timeline(memory, wall),
        "history": [_round_row(r) for r in reversed(memory.rounds)],
        "events": [
            {"at": seconds_of(e.at), "severity": e.severity.value, "who": e.who, "what": e.what, "times": e.times}
            for e in islice(reversed(memory.events), MOST_EVENTS)
        ],
        "rejections": [
            {"who": r.who, "what": r.what, "why": r.why, "at": seconds_of(r.at), "times": r.times}
            for r in islice(reversed(memory.rejections.values()), MOST_REJECTIONS)
        ],
        "refusals": _refusals(refusals),
        "options": clean_plain(to_plain(options)),
        "curves": _curves(memory),
    }


SHOWN = (
    "run",
    "term",
    "uptime_s",
    "head",
    "progress",
    "finished",
    "rounds",
    "durability",
    "newest",
    "tuned",
    "ranges",
)


# ---- whether all is well --------------------------------------------------------------------------------------------


def _judge_health(view: RunView, concerns: list[Concern]) -> dict[str, Any]:
    live = sum(c.trains for c in view.clusters.values())
    count = sum(not c.reads for c in view.clusters.values())
    ready = sum(s.state is SlaveState.READY for s in view.slaves.values())
    level = _level_of(view, live, concerns)
    return {
        "level": level.value,
        "title": _title_of(level, view, len(concerns)),
        "detail": f"{live} of {count} clusters here, {ready} of {len(view.slaves)} slaves ready",
        "concerns": [clean_plain(to_plain(concern)) for concern in concerns[:MOST_CONCERNS]],
        "more": max(0, len(concerns) - MOST_CONCERNS),
    }


def _level_of(view: RunView, live: int, concerns: list[Concern]) -> HealthLevel:
    if concerns:
        return HealthLevel.BROKEN if concerns[0].severity is Severity.BROKEN else HealthLevel.ATTENTION
    if view.finished:
        return HealthLevel.FINISHED
    return HealthLevel.WELL if live else HealthLevel.WAITING


def _title_of(level: HealthLevel, view: RunView, concerns: int) -> str:
    match level:
        case HealthLevel.WELL:
            return "All is well"
        case HealthLevel.WAITING:
            return "Ready: no cluster trains yet"
        case HealthLevel.FINISHED:
            return f"The run is finished at {view.finished}"
        case HealthLevel.ATTENTION:
            goes_on = "Training goes on" if _is_trained(view) else "No cluster trains"
            goes_on = goes_on if view.finished is None else "The run is finished"
            return f"{goes_on}; {'one thing needs' if concerns == 1 else f'{concerns} things need'} a look"
        case HealthLevel.BROKEN:
            return "No new version can be made"


def _is_trained(view: RunView) -> bool:
    """Whether a cluster is here and not idle."""
    return any(c.state not in (ClusterState.IDLE, ClusterState.GONE) for c in view.clusters.values())


def _find_old_concerns(view: RunView, memory: PageMemory, head_age_s: float | None) -> Iterator[Concern]:
    """Find concerns that show only beside the rounds before."""
    if view.finished is not None:
        return
    if (late := _explain_lateness(view, memory, head_age_s)) is not None:
        yield Concern(Severity.ATTENTION, "head", late)
    last = memory.rounds[-1].round if memory.rounds else None
    if last is not None and last.kind == RoundResult.SKIPPED:
        yield Concern(Severity.ATTENTION, f"round {last.round}", f"skipped: {last.reason}")


def _explain_lateness(view: RunView, memory: PageMemory, head_age_s: float | None) -> str | None:
    """A head that is much older than the usual time between versions, while somebody is here."""
    made = [r.round.ended for r in memory.rounds if r.round.version is not None and r.round.ended is not None]
    if head_age_s is None or not any(c.trains for c in view.clusters.values()) or len(made) <= LEAST_ROUNDS:
        return None
    usual_s = median(b - a for a, b in pairwise(made))
    if head_age_s <= max(LEAST_LATE_S, LATE_ROUNDS * usual_s):
        return None
    return f"no new version for {head_age_s:.0f} s; usually it takes {usual_s:.0f} s"


# ---- peers ----------------------------------------------------------------------------------------------------------


def _list_clusters(view: RunView) -> dict[str, Any]:
    listed, rest = _cut_rows(view.clusters)
    ends: dict[str, list[dict[str, Any]]] = {name: [] for name in listed}
    for slave, s in view.slaves.items():
        for t in s.transfers:
            if t.cluster in ends and len(ends[t.cluster]) < MOST_ENDS:
                ends[t.cluster].append({"slave": slave, "push": t.push, "rate": t.bytes_per_s})
    return {
        "rows": [_cluster_row(name, view.clusters[name], ends[name]) for name in listed],
        "count": len(view.clusters),
        "live": sum(c.live for c in view.clusters.values()),
        "rest": {"count": len(rest), "tokens": sum(view.clusters[name].tokens_accepted for name in rest)},
    }


def _cluster_row(name: str, c: ClusterView, ends: list[dict[str, Any]]) -> dict[str, Any]:
    flags = [f"flagged, not gated: {said}" for _, said in sorted(c.differs.items())]
    lines = c.heartbeat.lines if c.heartbeat is not None else ()
    more = {"remarks": c.remarks, "flags": flags, "lines": lines, "ends": ends, "loss": c.loss, "live": c.live}
    return {"name": clean_text(name, NAME_CHARS), **_scalars_of(c), **clean_plain(to_plain(more))}


def _list_slaves(view: RunView, rates: Mapping[str, tuple[float, float]]) -> dict[str, Any]:
    listed, rest = _cut_rows(view.slaves)
    return {
        "rows": [_slave_row(name, view.slaves[name], rates.get(name)) for name in listed],
        "count": len(view.slaves),
        "ready": sum(s.state is SlaveState.READY for s in view.slaves.values()),
        "rest": {"count": len(rest)},
    }


def _slave_row(name: str, s: SlaveView, rates: tuple[float, float] | None) -> dict[str, Any]:
    known = rates if rates is not None and s.severity is not Severity.BROKEN else (None, None)
    mirror = clean_plain(to_plain(s.mirror))
    return {"name": clean_text(name, NAME_CHARS), **_scalars_of(s), "mirror": mirror, "rates": clean_plain([*known])}


def _scalars_of(peer: ClusterView | SlaveView) -> dict[str, Any]:
    """Its numbers and texts, and those of its heartbeat: lists are bounded by whoever wants them."""
    told = _drop_lists(to_plain(peer))
    return told | {"heartbeat": _drop_lists(to_plain(peer.heartbeat) or {})}


def _drop_lists(plain: Mapping[str, Any]) -> dict[str, Any]:
    return {key: clean_plain(value) for key, value in plain.items() if not isinstance(value, list | dict)}


def _cut_rows(peers: Mapping[str, ClusterView] | Mapping[str, SlaveView]) -> tuple[list[str], list[str]]:
    """Names to list, in their order, and the others; if there are too many, those that are well are left out first."""
    kept = sorted(peers, key=lambda name: (rank_severity(peers[name].severity), name))
    return sorted(kept[:MOST_PEERS]), kept[MOST_PEERS:]


# ---- rounds ---------------------------------------------------------------------------------------------------------


def _timeline(memory: PageMemory, wall: float) -> dict[str, Any]:
    """The last rounds and what the clusters did meanwhile; times in seconds before now."""
    begun = [r.round.opened for r in memory.rounds][-ROUNDS_DRAWN:]
    since = min([wall - LEAST_DRAWN_S, *begun])
    since = max(since, wall - MOST_DRAWN_S)
    spans = memory.spans.list_spans(since)
    lanes = list(dict.fromkeys(s.lane for s in reversed(spans) if s.lane != RUN_LANE))  # the busiest lately first
    shown = [RUN_LANE, *sorted(lanes[:MOST_LANES])]
    spans = [s for s in spans if s.lane in shown][-MOST_SPANS:]
    return {
        "from_s": seconds_of(wall - since),
        "lanes": [
            {"name": clean_text(lane), "spans": [_span_row(s, wall, since) for s in spans if s.lane == lane]}
            for lane in shown
        ],
        "more": max(0, len(lanes) - MOST_LANES),
    }


def _span_row(s: Span, wall: float, since: float) -> list[Any]:
    """[kind, seconds before now when it began, likewise ended or null, label, 1 if it led to nothing]."""
    begin = seconds_of(wall - max(s.begin, since))
    return [s.kind.value, begin, None if s.end is None else seconds_of(wall - s.end), s.label, int(s.broken)]


def _round_row(ended: EndedRound) -> dict[str, Any]:
    r = ended.round
    reason = f"undone: {r.undone}" if r.undone else r.reason
    told = [(o.push.cluster, o.kind.value, o.reason) for o in r.outcomes]
    return {
        "round": r.round,
        "kind": "undone" if r.undone else r.kind,
        "version": None if r.version is None else str(r.version),
        "reason": clean_text(reason),
        "at": seconds_of(r.ended),
        "phases": {kind: seconds_of(s) for kind, s in ended.phases.items()},
        "from": [[clean_text(part) for part in outcome] for outcome in told[:MOST_FROM]],
        "more": max(0, len(told) - MOST_FROM),
    }


def _refusals(refusals: Mapping[str, int]) -> list[list[Any]]:
    """[reason, how often], the most frequent first."""
    often = sorted(refusals.items(), key=lambda item: (-item[1], item[0]))
    return [[clean_text(reason), n] for reason, n in often[:MOST_REASONS]]


def _curves(memory: PageMemory) -> dict[str, Any]:
    """All points; a page that has this revision already is not sent them again."""
    curves = memory.curves
    return {
        "revision": curves.revision,
        "columns": {"run": RUN_COLUMNS, "cluster": PUSH_COLUMNS},
        "run": _points(curves.run),
        "clusters": [{"name": clean_text(name), "points": _points(c)} for name, c in curves.clusters.items()],
    }


def _points(curve: Curve) -> list[list[float | int | None]]:
    """[tokens, Unix seconds, a number for each column]."""
    return [[p.tokens, round(p.wall, 1), *clean_plain(list(p.values))] for p in curve.list_points()]
