"""The Coordinator's state as plain data, for `dips status` and the live view: each state with its reason."""

from __future__ import annotations

from typing import Any

from dips.protocol.world import Cluster, Slave, World

UNDONE_SHOWN = 8  # the newest; `dips history` knows all


def view(w: World, now: float) -> dict[str, Any]:
    """JSON-able; never a label of a metric."""
    r = w.round
    return {
        "run": w.row.run,
        "term": w.term,
        "uptime_s": now - w.started,
        "head": str(w.head),
        "progress": {"tokens": w.tokens_accepted, "tokens_target": w.options.stop.tokens},
        "finished": str(w.finished) if w.finished else None,
        "round": {
            "state": str(r.state) if r else "idle",
            "round": r.number if r else None,
            "reason": r.reason if r else _why_idle(w),
            "pushes": [str(p.id) for p in r.pushes] if r else [],
        },
        "rounds": dict(w.counts),
        "durability": {
            "mode": w.options.durability,
            "state": w.durability.state,
            "reason": w.durability.reason,
            "red": w.durability.state != "durable",
            "head": w.versions[w.head].durable,
        },
        "undone": [str(v) for v in w.undone][-UNDONE_SHOWN:],
        "undone_total": len(w.undone),
        "clusters": {c.name: _cluster(w, c) for c in w.clusters.values()},
        "slaves": {s.name: _slave(w, s) for s in w.slaves.values()},
        "ranges": {
            "total": w.ranges.total,
            "free": w.ranges.free,
            "leased": w.ranges.leased,
            "settled": len(w.ranges.settled),
            "undone": len(w.ranges.undone),
        },
    }


def _why_idle(w: World) -> str:
    if w.finished:
        return f"the run is finished at {w.finished}"
    if w.durability.state == "stopped":
        return w.durability.reason
    missing = w.slaves_missing()
    if missing and w.rollback_waits:
        return w.rollback_waits
    if missing:
        return "waits for " + ", ".join(f"{s.name} ({s.state})" for s in missing)
    return "the slaves are flipping" if w.flipping is not None else "waits for the first push"


def _cluster(w: World, c: Cluster) -> dict[str, Any]:
    statistics = w.penalty.row(c.name)
    return {
        "inc": c.inc,
        "state": str(c.state),
        "reason": c.reason,
        "base": str(c.base) if c.base else None,
        "staleness": w.staleness(c.base),
        "pace_s": c.pace,
        "bandwidth_bytes_per_s": c.bytes_per_s,
        "accepted": c.counts["accepted"],
        "gated": c.counts["gated"],
        "skipped": c.counts["skipped"],
        "tokens_accepted": c.tokens["accepted"],
        "tokens_gated": c.tokens["gated"],
        "tokens_lost": c.tokens["lost"],
        "tokens_undone": c.tokens["undone"],
        "norm": statistics.last_norm,
        "score": c.outcome.score if c.outcome else 0.0,
        "quarantined": statistics.quarantined,
    }


def _slave(w: World, s: Slave) -> dict[str, Any]:
    return {
        "sinc": s.sinc,
        "state": str(s.state),
        "reason": s.reason,
        "address": s.address,
        "lanes": list(s.lanes),
        "version": str(s.memory) if s.memory else None,
        "slots": s.slots,
        "slots_used": len(w.open_pushes()),
    }
