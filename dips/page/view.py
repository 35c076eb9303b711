"""`/api/state`: what the master knows and the page remembers, as one JSON document of bounded size. Pure.

A status is what `dips status --json` shows. Every list has its most, every text its length and no control characters,
every number a few digits; what is left out is counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from types import MappingProxyType
from typing import Any

from dips.page.curves import LossCurve
from dips.page.health import judge_health
from dips.page.links import list_links
from dips.page.memory import PageMemory
from dips.page.peers import list_clusters, list_slaves
from dips.page.rates import SeenTransfer
from dips.page.spans import RUN_LANE, Span
from dips.page.text import NAME_CHARS, clean_text, number_of, seconds_of

FORMAT = 1  # of the document; the page comes with it
ROUNDS_DRAWN = 8  # newest, whose times the timeline covers
LEAST_DRAWN_S, MOST_DRAWN_S = 20.0, 86_400.0
MOST_LANES = 12  # of clusters
MOST_SPANS = 400  # drawn, the newest
MOST_EVENTS = 40
MOST_REJECTIONS = 16
MOST_REASONS = 32  # of refusals, words of the code
MOST_FROM = 24  # clusters named in one round


def make_state(
    status: Mapping[str, Any],
    memory: PageMemory,
    *,
    rates: Mapping[str, tuple[float, float]],
    seen: Mapping[tuple[str, str], SeenTransfer],
    heartbeat_s: float,
    wall: float,
    refusals: Mapping[str, int] = MappingProxyType({}),
) -> dict[str, Any]:
    """The whole document.

    rates  of each slave: bytes a second, in and out
    seen   the last transfer between a cluster and a slave that a heartbeat showed
    wall   now, in Unix seconds
    refusals  what the master's ports turned away since its start, by reason
    """
    clusters = list_clusters(status, memory, heartbeat_s, wall)
    slaves = list_slaves(status, rates, heartbeat_s)
    head_age_s = None if memory.head_at is None else max(0.0, wall - memory.head_at)
    return {
        "format": FORMAT,
        "run": clean_text(status.get("run", "–")),
        "term": number_of(status.get("term")),
        "uptime_s": seconds_of(status.get("uptime_s")),
        "at": seconds_of(wall),
        "health": judge_health(status, clusters, slaves, list(memory.rounds), head_age_s),
        "head": _head(status, head_age_s),
        "progress": _progress(status),
        "round": _round(status),
        "rounds": {kind: number_of(n) for kind, n in islice(status.get("rounds", {}).items(), 8)},
        "ranges": {key: number_of(n) for key, n in islice(status.get("ranges", {}).items(), 8)},
        "clusters": clusters,
        "slaves": slaves,
        "links": list_links(status, seen),
        "timeline": _timeline(memory, wall),
        "history": [_round_row(r) for r in reversed(memory.rounds)],
        "events": [
            {
                "at": seconds_of(e.at),
                "gravity": e.gravity.value,
                "who": clean_text(e.who, NAME_CHARS),
                "what": e.what,
                "times": e.times,
            }
            for e in islice(reversed(memory.events), MOST_EVENTS)
        ],
        "rejections": [
            {"who": r.who, "what": r.what, "why": r.why, "at": seconds_of(r.at), "times": r.times}
            for r in islice(reversed(memory.rejections.values()), MOST_REJECTIONS)
        ],
        "refusals": _refusals(refusals),
        "losses": _losses(memory),
    }


def _head(status: Mapping[str, Any], age_s: float | None) -> dict[str, Any]:
    durability = status.get("durability") or {}
    return {
        "version": clean_text(status.get("head", "–")),
        "age_s": seconds_of(age_s),
        "loss": number_of(status.get("last_loss")),
        "durable": bool(durability.get("head")),
        "finished": status.get("finished"),
    }


def _progress(status: Mapping[str, Any]) -> dict[str, Any]:
    progress = status.get("progress") or {}
    tokens, target = progress.get("tokens"), progress.get("tokens_target") or None
    return {"tokens": number_of(tokens), "target": number_of(target)}


def _round(status: Mapping[str, Any]) -> dict[str, Any]:
    round_ = status.get("round") or {}
    return {
        "number": number_of(round_.get("round")),
        "state": clean_text(round_.get("state", "–")),
        "reason": clean_text(round_.get("reason") or ""),
        "pushes": len(round_.get("pushes") or ()),
    }


def _timeline(memory: PageMemory, wall: float) -> dict[str, Any]:
    """The last rounds and what the clusters did meanwhile; times in seconds before now."""
    begun = [r.begin for r in memory.rounds][-ROUNDS_DRAWN:]
    since = min([wall - LEAST_DRAWN_S, *begun])
    since = max(since, wall - MOST_DRAWN_S)
    spans = memory.spans.list_spans(since)[-MOST_SPANS:]
    lanes = list(dict.fromkeys(s.lane for s in reversed(spans) if s.lane != RUN_LANE))  # the busiest lately first
    shown = [RUN_LANE, *sorted(lanes[:MOST_LANES])]
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


def _round_row(r: Any) -> dict[str, Any]:
    return {
        "round": r.round,
        "kind": r.kind,
        "version": r.version,
        "reason": r.reason,
        "at": seconds_of(r.end),
        "phases": {kind: seconds_of(s) for kind, s in r.phases.items()},
        "from": [[clean_text(name), kind, reason] for name, kind, reason in r.outcomes[:MOST_FROM]],
        "more": max(0, len(r.outcomes) - MOST_FROM),
    }


def _refusals(refusals: Mapping[str, int]) -> list[list[Any]]:
    """[reason, how often], the most frequent first."""
    often = sorted(refusals.items(), key=lambda item: (-item[1], item[0]))
    return [[clean_text(reason), number_of(n)] for reason, n in often[:MOST_REASONS]]


def _losses(memory: PageMemory) -> dict[str, Any]:
    """All points; a page that has this revision already is not sent them again."""
    return {
        "revision": memory.curves.revision,
        "run": _points(memory.curves.run),
        "clusters": [{"name": clean_text(name), "points": _points(c)} for name, c in memory.curves.clusters.items()],
    }


def _points(curve: LossCurve) -> list[list[float | int | None]]:
    return [[p.tokens, round(p.wall, 1), number_of(p.loss)] for p in curve.list_points()]
