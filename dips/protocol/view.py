"""The Coordinator's state as plain data, for `dips status` and the live view: each state with its reason."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from dips.protocol import mirrors, seeding, window
from dips.protocol.entities import Cluster, Slave
from dips.protocol.enums import DurabilityState
from dips.protocol.roster import in_order, name_some
from dips.protocol.run_state import RunState

UNDONE_SHOWN = 8  # the newest; `dips history` knows all


def build_view(run: RunState, now: float) -> dict[str, Any]:
    """JSON-able; never a label of a metric."""
    r = run.round
    return {
        "run": run.row.run,
        "term": run.term,
        "uptime_s": now - run.started,
        "head": str(run.head),
        "progress": {"tokens": run.tokens_accepted, "tokens_target": run.targets.tokens},
        "targets": asdict(run.targets),
        "tuned": {key: None if change.off else change.value for key, change in run.tuned.items()},
        "untuned": list(run.untuned),
        "finished": str(run.finished) if run.finished else None,
        "round": {
            "state": str(r.state) if r else "idle",
            "round": r.number if r else None,
            "reason": window.explain_round(run, r) if r else _why_idle(run),
            "pushes": [str(p.id) for p in r.pushes] if r else [],
        },
        "rounds": dict(run.counts),
        "met": {"all": sum(pushes >= here for pushes, here in run.met), "versions": len(run.met)},
        "durability": {
            "mode": str(run.options.durability),
            "state": str(run.durability.state),
            "reason": run.durability.reason,
            "red": run.durability.state is not DurabilityState.DURABLE,
            "head": run.versions[run.head].durable,
        },
        "rollback": {"red": run.rollback_steps > 0, "steps": run.rollback_steps, "reason": run.rollback_waits},
        "undone": [str(v) for v in run.undone][-UNDONE_SHOWN:],
        "undone_total": len(run.undone),
        "clusters": {c.name: _view_cluster(run, c) for c in run.clusters.values()},
        "slaves": {s.name: _view_slave(run, s, now) for s in run.slaves.values()},
        "ranges": {
            "total": run.ranges.total,
            "free": run.ranges.free,
            "leased": run.ranges.leased,
            "settled": run.ranges.settled.count,
            "undone": len(run.ranges.undone),
        },
    }


def explain_unready(run: RunState) -> str:
    """Why the run cannot take an outer step now, whatever clusters do; empty: it can."""
    if not run.is_proven:
        away = name_some([s.name for s in in_order(run.slaves, run.roster.unregistered)])
        return f"not yet registered: {away}"
    return run.why_missing()


def _why_idle(run: RunState) -> str:
    if run.finished:
        return f"the run is finished at {run.finished}"
    if run.durability.state is DurabilityState.STOPPED:
        return run.durability.reason
    missing = run.slaves_missing()
    if unseeded := seeding.explain_unseeded(run):
        return unseeded
    if missing and run.rollback_waits:
        return run.rollback_waits
    if missing:
        return "waits for " + ", ".join(f"{s.name} ({s.state})" for s in missing)
    return "the slaves are flipping" if run.flipping is not None else "waits for the first push"


def _view_cluster(run: RunState, c: Cluster) -> dict[str, Any]:
    statistics = run.penalty.penalty_row(c.name)
    return {
        "inc": c.inc,
        "state": str(c.state),
        "reason": c.reason,
        "base": str(c.base) if c.base else None,
        "staleness": run.staleness_of(c.base),
        "pace_s": c.push_interval_s,
        "last_push_steps": c.outcome.inner_steps if c.outcome else None,
        "bandwidth_bytes_per_s": c.bytes_per_s,
        "accepted": c.counts["accepted"],
        "gated": c.counts["gated"],
        "skipped": c.counts["skipped"],
        "tokens_accepted": c.tokens["accepted"],
        "tokens_gated": c.tokens["gated"],
        "tokens_lost": c.tokens["lost"],
        "tokens_undone": c.tokens["undone"],
        "claims_refused": c.claims_refused,
        "norm": statistics.last_norm,
        "score": c.outcome.score if c.outcome else 0.0,
        "quarantined": statistics.quarantined or c.name in run.quarantined,
        "differs": {str(by): said for by, said in run.penalty.find_differences(c.name).items()},
        "quarantine": run.quarantined.get(c.name, ""),
    }


def _view_slave(run: RunState, s: Slave, now: float) -> dict[str, Any]:
    return {
        "sinc": s.sinc,
        "state": str(s.state),
        "reason": s.reason,
        "address": s.address,
        "lanes": list(s.lanes),
        "key": s.key,
        "version": str(s.memory) if s.memory else None,
        "slots": s.slots,
        "slots_used": len(run.transfers.pushes),
        "mirror": mirrors.view_mirror(run, s, now),
    }
