"""The rows of `benchmarks convergence`: what is compared with what, as studies of dips/study.

All are of four clusters, 50 % apart, if a row does not say otherwise. An inner step takes four seconds of virtual time
on the fastest cluster and a transfer half a second, so that a round of H 64 is some four minutes.
"""

from __future__ import annotations

from typing import Any

Rows = dict[str, dict[str, Any]]

STEP_S = 4.0
FULL_STEPS, BAD_STEPS, QUICK_STEPS, LOOK_STEPS = 10_240, 5_120, 6_000, 600
SEEDS, QUICK_SEEDS = [1, 2, 3], [1, 2, 3, 4, 5]


def make_fleet(*times: float, **keys: Any) -> list[dict[str, Any]]:
    """Clusters whose inner steps take so many times what the fastest one's takes."""
    return [{"step_s": STEP_S * t, **keys} for t in times]


def spread(clusters: int, disparity: float) -> list[dict[str, Any]]:
    """Evenly from the fastest to the slowest, which takes 1 + disparity times as long."""
    return make_fleet(*(1.0 + disparity * i / max(clusters - 1, 1) for i in range(clusters)))


HALF = (1.0, 1.17, 1.33, 1.5)
FIVEFOLD = (1.0, 1.38, 2.18, 5.23)
FLEETS: dict[str, list[dict[str, Any]]] = {
    "half": make_fleet(*HALF),
    "fivefold": make_fleet(*FIVEFOLD),
    **{f"apart {share:.0%}": spread(4, share) for share in (0.0, 0.25, 1.0, 2.0)},
    **{f"{n} clusters": spread(n, 0.5) for n in (1, 2, 8)},
    "stragglers": make_fleet(*HALF, straggles=0.01),
    "jitter": make_fleet(*HALF, jitter=1.0),
    "growing": [{"step_s": STEP_S, "joins": at} for at in (0.0, 0.25, 0.5, 0.5, 0.75, 0.75, 0.75, 0.75)],
    "shrinking": [{"step_s": STEP_S, "leaves": at} for at in (1.0, 0.75, 0.5, 0.5, 0.25, 0.25, 0.25, 0.25)],
}
BASE: dict[str, Any] = {
    "fleet": "half", "inner_steps": 32, "pace": "aligned", "inner.lr": 4e-3, "outer.lr": 0.7, "outer.momentum": 0.8,
    "outer.clip": {}, "inner.warmup": 0.05,
}  # fmt: skip
WAITING = {"pace": "steps", "timing.window_s": 100_000.0}  # a window that closes when all are in: synchronous
PAPER = {"pace": "steps", "outer.clip": {"norm": 1.0}}
EDIT = {
    "outer.merge": "edit", "penalty.gates": ["edit"], "outer.lr": 0.8, "outer.momentum": 0.85,
    "outer.clip": {"norm": 10.0, "per_layer": True},
}  # fmt: skip
MUON = {"inner.optimizer": "muon"}
SHARE = {"pace": "steps", "outer.step": "share"}
LRS = {"inner.lr": [2e-3, 4e-3, 8e-3]}
DP_LRS = {"inner.lr": [4e-3, 8e-3, 1.6e-2]}

QUICK: Rows = {
    "synchronous": {"method": "synchronous", "seeds": QUICK_SEEDS},
    "aligned, 50 %": {"seeds": QUICK_SEEDS},
    "steps with share, 50 %": {**SHARE, "seeds": QUICK_SEEDS[:3]},
    "the paper's preset, 50 %": {**PAPER, "seeds": [1]},
    "naive asynchronous, 50 %": {"method": "naive", "seeds": [1, 2]},
    "aligned, 5.23 ×": {"fleet": "fivefold", "seeds": [1, 2]},
    "aligned with rda, 5.23 ×": {"fleet": "fivefold", "outer.merge": "rda", "seeds": [1, 2]},
    "aligned with Muon, 5.23 ×": {"fleet": "fivefold", **MUON, "seeds": [1]},
    "data parallel": {"method": "data_parallel", "tune": DP_LRS, "seeds": [1]},
}

METHOD_ROWS: Rows = {  # each at the best of its inner learning rates
    "data parallel": {"method": "data_parallel", "tune": DP_LRS},
    "data parallel with Muon": {"method": "data_parallel", **MUON, "tune": DP_LRS},
    "synchronous": {"method": "synchronous", "tune": LRS},
    "post-local SGD": {"method": "post_local", "tune": LRS},
    "naive asynchronous": {"method": "naive", "tune": LRS},
    "the paper's preset": {**PAPER, "tune": LRS},
    "EDiT": {**EDIT, **WAITING, "tune": LRS},
    "A-EDiT": {**EDIT, "tune": LRS},
    "aligned": {"tune": LRS},
    "aligned with rda": {"outer.merge": "rda", "tune": LRS},
    "aligned with Muon": {**MUON, "tune": LRS},
    "steps with share": {**SHARE, "tune": LRS},
}
APART = ("apart 0%", "apart 25%", "apart 100%", "apart 200%", "fivefold")
FACTOR_ROWS: Rows = {  # one factor at a time
    **{f"aligned, {fleet}": {"fleet": fleet} for fleet in APART},
    **{f"aligned with rda, {fleet}": {"fleet": fleet, "outer.merge": "rda"} for fleet in APART},
    **{f"steps with share, {fleet}": {**SHARE, "fleet": fleet} for fleet in APART},
    **{f"aligned, H {h}": {"inner_steps": h} for h in (16, 32, 128, 256)},
    **{f"synchronous, H {h}": {"method": "synchronous", "inner_steps": h} for h in (16, 32, 128, 256)},
    **{f"aligned, {n} clusters": {"fleet": f"{n} clusters"} for n in (1, 2, 8)},
    **{f"synchronous, {n} clusters": {"fleet": f"{n} clusters", "method": "synchronous"} for n in (1, 2, 8)},
    "overlap": {"overlap": True},
    "overlap in four fragments": {"overlap": True, "fragments": 4},
    "int8 pushes": {"codec": "int8"},
    "int4 pushes": {"codec": "int4"},
    "int8 both ways": {"codec": "int8", "pull_codec": "int8"},
    "stragglers": {"fleet": "stragglers"},
    "jitter of 100 %": {"fleet": "jitter"},
    "unlike data": {"task.unlike": True},
    "unlike data, synchronous": {"task.unlike": True, "method": "synchronous"},
    "growing 1-2-4-8": {"fleet": "growing"},
    "shrinking 8-4-2-1": {"fleet": "shrinking"},
    "steps": {"pace": "steps"},
    "steps, the paper's clip": PAPER,
    "steps with rda": {"pace": "steps", "outer.merge": "rda"},
    "steps with share and rda": {**SHARE, "outer.merge": "rda"},
    "steps with share and rda, fivefold": {**SHARE, "outer.merge": "rda", "fleet": "fivefold"},
    "aligned with rda and Muon, fivefold": {"outer.merge": "rda", "fleet": "fivefold", **MUON},
    "aligned with edit's weights": {"outer.merge": "edit", "outer.clip": {"norm": 10.0, "per_layer": True}},
    "aligned with edit's weights, fivefold": {
        "outer.merge": "edit",
        "outer.clip": {"norm": 10.0, "per_layer": True},
        "fleet": "fivefold",
    },
    "aligned with edit's weights of the paper, fivefold": {
        "outer.merge": "edit-paper",
        "outer.clip": {"norm": 10.0, "per_layer": True},
        "fleet": "fivefold",
    },
    "aligned, the paper's clip": {"outer.clip": {"norm": 1.0}},
    "aligned, relative clip": {"outer.clip": {"relative": 2.0}},
    "aligned, no gate": {"penalty.gates": []},
    "aligned, log scores": {"penalty.score": "log"},
    "aligned, all gates": {"penalty.gates": ["dips", "direction", "loss", "replay"]},
    "aligned, plain averaging": {"outer.lr": 1.0, "outer.momentum": 0.0},
    "aligned, momentum 0.9": {"outer.momentum": 0.9},
    "aligned, outer lr 0.5": {"outer.lr": 0.5},
    "aligned, outer lr 1.0": {"outer.lr": 1.0},
    "aligned, outer lr auto": {"outer.lr": "auto"},
    "aligned, delayed Nesterov": {"outer.step": "delayed_nesterov"},
    "steps, delayed Nesterov": {"pace": "steps", "outer.step": "delayed_nesterov"},
    "steps, tokens per step": {"pace": "steps", "outer.weights": "tokens_per_step"},
    "steps, stale ones weigh less": {"pace": "steps", "outer.staleness_alpha": 0.5},
    "larger: aligned": {"task.width": 128, "task.hidden": 352, "seeds": [1]},
    "larger: synchronous": {"task.width": 128, "task.hidden": 352, "method": "synchronous", "seeds": [1]},
    "larger: data parallel": {"task.width": 128, "task.hidden": 352, "method": "data_parallel", "seeds": [1]},
}
