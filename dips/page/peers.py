"""Clusters and slaves as the page lists them: bounded rows, each with a word, its gravity and why."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dips.page.events import LEFT, Gravity
from dips.page.memory import LastOutcome, PageMemory
from dips.page.text import clean_text, number_of, seconds_of

MOST_CLUSTERS = 48  # listed, those that ask for attention first; the rest is summed
MOST_SLAVES = 48
SILENT_HEARTBEATS = 2.0  # so long without a word, and it is shown as silent; its lease ends after five
LEAST_FREE = 0.05  # of a slave's disk; less asks for a look
ENDED = frozenset({LEFT, "its incarnation ended", "known from the ledger"})
CRASHING = "crashing"  # what a cluster's note begins with while its trainer is dead
_PLAIN_REASONS = frozenset({"training", "joined", "asks for a push", "its push is committed"})
_RANK = {Gravity.BROKEN: 0, Gravity.ATTENTION: 1, Gravity.GOOD: 2, Gravity.PLAIN: 3}
Peer = Mapping[str, Any]
Judgement = tuple[str, Gravity, str]  # the word for its state, how grave that is, and why


def list_clusters(status: Mapping[str, Any], memory: PageMemory, heartbeat_s: float, wall: float) -> dict[str, Any]:
    """The rows, how many there are, and what is not listed in one sum."""
    uptime_s, finished = float(status.get("uptime_s") or 0.0), bool(status.get("finished"))
    clusters = status.get("clusters", {})
    judged = {
        name: _judge_cluster(c, memory.outcomes.get(name), heartbeat_s, uptime_s, finished)
        for name, c in clusters.items()
    }
    listed, rest = _cut_rows(judged, MOST_CLUSTERS)
    return {
        "rows": [_cluster_row(n, clusters[n], judged[n], memory.outcomes.get(n), wall) for n in listed],
        "count": len(clusters),
        "live": sum(c.get("state") != "gone" for c in clusters.values()),
        "rest": {"count": len(rest), "tokens": sum(clusters[name].get("tokens_accepted") or 0 for name in rest)},
    }


def list_slaves(
    status: Mapping[str, Any], rates: Mapping[str, tuple[float, float]], heartbeat_s: float
) -> dict[str, Any]:
    """Likewise of slaves; `rates` are bytes a second, in and out."""
    uptime_s, slaves = float(status.get("uptime_s") or 0.0), status.get("slaves", {})
    judged = {name: _judge_slave(s, heartbeat_s, uptime_s) for name, s in slaves.items()}
    listed, rest = _cut_rows(judged, MOST_SLAVES)
    return {
        "rows": [_slave_row(name, slaves[name], judged[name], rates.get(name)) for name in listed],
        "count": len(slaves),
        "ready": sum(s.get("state") == "ready" for s in slaves.values()),
        "rest": {"count": len(rest)},
    }


def _cut_rows(judged: Mapping[str, Judgement], most: int) -> tuple[list[str], list[str]]:
    """Names to list, in their order, and the others; if there are too many, those that are well are left out first."""
    kept = sorted(judged, key=lambda name: (_RANK[judged[name][1]], name))
    return sorted(kept[:most]), kept[most:]


def _cluster_row(name: str, c: Peer, judged: Judgement, last: LastOutcome | None, wall: float) -> dict[str, Any]:
    word, gravity, why = judged
    return {
        "name": clean_text(name),
        "word": word,
        "gravity": gravity,
        "why": clean_text(why),
        "note": clean_text(c.get("note") or ""),
        "flags": [f"flagged, not gated: {clean_text(said)}" for _, said in sorted((c.get("differs") or {}).items())],
        "live": c.get("state") != "gone",
        "base": c.get("base"),
        "staleness": number_of(c.get("staleness")),
        "loss": number_of(c.get("loss")),
        "tokens": number_of(c.get("tokens_accepted")),
        "tokens_gated": number_of(c.get("tokens_gated")),
        "tokens_lost": number_of(c.get("tokens_lost")),
        "pace_s": number_of(c.get("pace_s")),
        "last_push_steps": number_of(c.get("last_push_steps")),
        "step_s": number_of(c.get("step_s")),
        "inner_steps": number_of(c.get("inner_steps")),
        "accepted": number_of(c.get("accepted")),
        "gated": number_of(c.get("gated")),
        "skipped": number_of(c.get("skipped")),
        "score": number_of(c.get("score")),
        "rate": number_of(c.get("bytes_per_s") or c.get("bandwidth_bytes_per_s")),
        "heard_s": seconds_of(c.get("heard_s")),
        "last": None
        if last is None
        else {"kind": last.kind, "reason": last.reason, "round": last.round, "ago_s": seconds_of(wall - last.at)},
    }


def _judge_cluster(c: Peer, last: LastOutcome | None, heartbeat_s: float, uptime_s: float, finished: bool) -> Judgement:
    state, reason = str(c.get("state", "–")), str(c.get("reason") or "")
    note = str(c.get("note") or "")
    if state == "gone":
        quiet = finished or reason in ENDED
        return ("left" if quiet else "gone"), (Gravity.PLAIN if quiet else Gravity.ATTENTION), reason
    if c.get("quarantined"):
        return "quarantined", Gravity.ATTENTION, f"until an operator readmits it (dips cluster readmit); {reason}"
    if (silent_s := _silent_s(c, heartbeat_s, uptime_s)) is not None:
        return "silent", Gravity.ATTENTION, _explain_silence(silent_s, c, state)
    if c.get("trainer") == "dead":
        crashing = note.startswith(CRASHING)
        return ("crashing" if crashing else "stopped"), Gravity.ATTENTION, "" if crashing else reason
    if last is not None and last.kind == "gated":
        return state, Gravity.ATTENTION, f"its last push was gated: {last.reason}"
    if state == "idle" and c.get("trainer") == "starting":
        return "starting", Gravity.PLAIN, note
    if state == "idle":
        return state, Gravity.PLAIN if finished else Gravity.ATTENTION, reason
    dull = reason in _PLAIN_REASONS or reason.startswith(("trains on ", "pulling ", "it has "))
    return ("in the round" if state == "committed" else state), Gravity.GOOD, "" if dull else reason


def _silent_s(peer: Peer, heartbeat_s: float, uptime_s: float) -> float | None:
    """Since when nothing was heard, if that is too long; one never heard counts from this master's start."""
    heard_s = peer.get("heard_s")
    since = uptime_s if heard_s is None else float(heard_s)
    return since if since > SILENT_HEARTBEATS * heartbeat_s else None


def _explain_silence(silent_s: float, peer: Peer, state: str) -> str:
    when = "since this master started" if peer.get("heard_s") is None else f"for {silent_s:.0f} s"
    return f"no heartbeat {when}; it was {state}"


def _slave_row(name: str, s: Peer, judged: Judgement, rates: tuple[float, float] | None) -> dict[str, Any]:
    word, gravity, why = judged
    mirror = s.get("mirror")
    rates = None if word in ("lost", "silent") else rates
    return {
        "name": clean_text(name),
        "word": word,
        "gravity": gravity,
        "why": clean_text(why),
        "address": clean_text(s.get("address") or ""),
        "version": s.get("version"),
        "slots": number_of(s.get("slots")),
        "slots_used": number_of(s.get("slots_used")),
        "pool_used": number_of(s.get("pool_used")),
        "pool_limit": number_of(s.get("pool_limit")),
        "disk_free": number_of(s.get("disk_free")) if s.get("disk_total") else None,
        "disk_total": number_of(s.get("disk_total") or None),
        "persist_s": number_of(s.get("persist_s")),
        "apply_s": number_of(s.get("apply_s")),
        "mirror_behind": number_of(mirror.get("behind_versions")) if mirror else None,
        "mirrored": mirror is not None,
        "rate_in": number_of(rates[0]) if rates else None,
        "rate_out": number_of(rates[1]) if rates else None,
        "heard_s": seconds_of(s.get("heard_s")),
    }


def _judge_slave(s: Peer, heartbeat_s: float, uptime_s: float) -> Judgement:
    state, reason, mirror = str(s.get("state", "–")), str(s.get("reason") or ""), s.get("mirror") or {}
    if state == "lost":
        return state, Gravity.BROKEN, reason
    if state != "ready":
        return state, Gravity.ATTENTION, reason
    if (silent_s := _silent_s(s, heartbeat_s, uptime_s)) is not None:
        return "silent", Gravity.ATTENTION, _explain_silence(silent_s, s, state)
    if (total := s.get("disk_total")) and s.get("disk_free", 0) < LEAST_FREE * total:
        return state, Gravity.ATTENTION, f"its disk is nearly full: {s.get('disk_free', 0) / total:.1%} are free"
    if mirror.get("failing"):
        return state, Gravity.ATTENTION, f"its mirror fails: {mirror.get('reason') or '–'}"
    return state, Gravity.GOOD, "" if reason.startswith("serves ") else reason
