"""The rows of `benchmarks convergence`: what is compared with what, as studies of dips/study.

All are of four clusters, 50 % apart, if a row does not say otherwise. An inner step takes four seconds of virtual time
on the fastest cluster and a transfer half a second, so that a round of H 64 is some four minutes.
"""

from __future__ import annotations

from typing import Any

Rows = dict[str, dict[str, Any]]

STEP_S = 4.0
THIRD_S = 60.0  # about a third of a cycle of H 32: the longest window before all push together
ROUNDS = 40  # of a run, and of every cluster in it: the fewer, the less is seen of the outer step
FULL_STEPS, BAD_STEPS, CLAIM_STEPS, LOOK_STEPS = ROUNDS * 4 * 64, 5_120, 6_000, 600
SEEDS, FACTOR_SEEDS = [1, 2, 3], [1, 2]


def make_fleet(*times: float, **keys: Any) -> list[dict[str, Any]]:
    """Clusters whose inner steps take so many times what the fastest one's takes."""
    return [{"step_s": STEP_S * t, **keys} for t in times]


def spread(clusters: int, disparity: float) -> list[dict[str, Any]]:
    """Evenly from the fastest to the slowest, which takes 1 + disparity times as long."""
    return make_fleet(*(1.0 + disparity * i / max(clusters - 1, 1) for i in range(clusters)))


STEADY = {"task.batch": 8}  # under bad data: as in long runs, a push tells its cluster's data from noise


def spell_clusters(count: int) -> str:
    return f"{count} cluster{'s' if count > 1 else ''}"


HALF = (1.0, 1.17, 1.33, 1.5)
FIVEFOLD = (1.0, 1.38, 2.18, 5.23)
FLEETS: dict[str, list[dict[str, Any]]] = {
    "half": make_fleet(*HALF),
    "fivefold": make_fleet(*FIVEFOLD),
    **{f"apart {share:.0%}": spread(4, share) for share in (0.0, 0.25, 1.0, 2.0)},
    **{spell_clusters(n): spread(n, 0.5) for n in (1, 2, 4, 8, 9)},
    "tenfold": make_fleet(1.0, 2.0, 5.0, 10.0),
    "a third bad": [*({"step_s": STEP_S, "fault": "shuffled"} for _ in range(3)), *spread(6, 0.5)],
    "stragglers": make_fleet(*HALF, straggles=0.01),
    "jitter": make_fleet(*HALF, jitter=1.0),
    "growing": [{"step_s": STEP_S, "joins": at} for at in (0.0, 0.25, 0.5, 0.5, 0.75, 0.75, 0.75, 0.75)],
    "shrinking": [{"step_s": STEP_S, "leaves": at} for at in (1.0, 0.75, 0.5, 0.5, 0.25, 0.25, 0.25, 0.25)],
}
RECIPE_FLEETS = {  # a fleet → how many clusters synchronous DiLoCo has beside it
    "1 cluster": 1, "2 clusters": 2, "half": 4, "fivefold": 4, "tenfold": 4, "jitter": 4, "growing": 4,
    "9 clusters": 9, "a third bad": 9,
}  # fmt: skip
RECIPE_STEPS = {n: ROUNDS * 32 * max(n, 4) for n in (1, 2, 4, 9)}
BASE: dict[str, Any] = {
    "fleet": "half", "inner_steps": 32, "pace": "aligned", "inner.lr": 4e-3, "outer.lr": 0.7, "outer.momentum": 0.8,
    "outer.step": "nesterov", "outer.clip": {}, "penalty.gates": ["dips"], "inner.warmup": 0.05, "task.batch": 4,
}  # fmt: skip
WAITING = {"pace": "steps", "timing.window_s": 100_000.0}  # a window that closes when all are in: synchronous
PAPER = {"pace": "steps", "outer.clip": {"norm": 1.0}}
EDIT = {  # A-EDiT to the letter, with its warm-up: its clusters train for a time, as with pace `aligned`
    "outer.merge": "edit-paper", "penalty.gates": ["edit"], "outer.lr": 0.8, "outer.momentum": 0.85,
    "outer.clip": {"norm": 10.0, "per_layer": True}, "parallel": 0.1,
}  # fmt: skip
MUON = {"inner.optimizer": "muon"}
SHARE = {"pace": "steps", "outer.step": "share"}
RDA = {"outer.merge": "rda", "layers": "module"}
RDA_PAPER = {"outer.merge": "rda-paper", "layers": "module"}
OURS = {"outer.step": "share"}  # of the preset: beside pace aligned and no clip
DP = "data parallel"
LRS = {"inner.lr": [2e-3, 4e-3, 8e-3]}
OUTER_LRS = {**LRS, "outer.lr": [0.35, 0.5, 0.7, 1.0], "outer.momentum": [0.0, 0.4, 0.8, 0.9, 0.95]}
DP_LRS = {"inner.lr": [4e-3, 8e-3, 1.6e-2]}

METHOD_ROWS: Rows = {  # each at the best of its inner rates, and of its outer rates and momenta if it takes outer steps
    "synchronous": {"method": "synchronous", "tune": OUTER_LRS},
    "synchronous with Muon": {"method": "synchronous", **MUON, "tune": OUTER_LRS},
    "data parallel": {"method": "data_parallel", "tune": DP_LRS},
    "data parallel with Muon": {"method": "data_parallel", **MUON, "tune": LRS},
    "post-local SGD": {"method": "synchronous", "parallel": 0.1, "outer.lr": 1.0, "outer.momentum": 0.0, "tune": LRS},
    "naive asynchronous": {"method": "naive", "tune": OUTER_LRS},
    "HeLoCo": {"method": "heloco", "tune": OUTER_LRS},
    "Di-PS, the paper's preset": {**PAPER, "tune": LRS},
    "EDiT": {**EDIT, **WAITING, "tune": OUTER_LRS},
    "A-EDiT": {**EDIT, "tune": OUTER_LRS},
    "ours": {**OURS, "tune": OUTER_LRS},
    "ours with rda": {**OURS, **RDA, "tune": OUTER_LRS},
    "ours with rda of the paper": {**OURS, **RDA_PAPER, "tune": OUTER_LRS},
    "ours, steps": {**OURS, "pace": "steps", "tune": OUTER_LRS},
    "ours with Muon": {**OURS, **MUON, "tune": OUTER_LRS},
    "ours with Muon, 2-bit pushes": {**OURS, **MUON, "codec": "int2", "tune": OUTER_LRS},
}
APART = ("apart 0%", "apart 25%", "apart 100%", "apart 200%", "fivefold")
LARGER = {"task.width": 128, "task.hidden": 352}
EDIT_MERGE = {"outer.merge": "edit", "outer.clip": {"norm": 10.0, "per_layer": True}}


def hold_against_synchronous(row: str, **keys: Any) -> Rows:
    """A row of a setting of its own, and synchronous DiLoCo in the same one."""
    beside = f"synchronous, {row.partition(', ')[2]}"
    return {beside: {"method": "synchronous", **keys}, row: {**keys, "compare": beside}}


def run_once(rows: Rows) -> Rows:
    """One seed each: a difference of less than a percent says nothing there."""
    return {name: {**keys, "seeds": [1]} for name, keys in rows.items()}


FACTOR_ROWS: Rows = {  # one factor at a time (Di-PS, Figures 7 and 12; EDiT, Figures 6c and 7a)
    "synchronous": {"method": "synchronous"},
    "aligned": {},
    "aligned with rda": {"outer.merge": "rda"},
    "steps": {"pace": "steps"},
    "steps with share": SHARE,
    **{f"aligned, {fleet}": {"fleet": fleet} for fleet in APART},
    **{f"aligned with rda, {fleet}": {"fleet": fleet, "outer.merge": "rda"} for fleet in APART},
    **{f"steps with share, {fleet}": {**SHARE, "fleet": fleet} for fleet in APART},
    **hold_against_synchronous("aligned, H 16", inner_steps=16),
    **hold_against_synchronous("aligned, H 32", inner_steps=32),
    **hold_against_synchronous("aligned, H 128", inner_steps=128, steps=ROUNDS * 4 * 128),
    **hold_against_synchronous("aligned, H 256", inner_steps=256, steps=ROUNDS * 4 * 256, seeds=[1]),
    **hold_against_synchronous("aligned, 1 cluster", fleet="1 cluster"),
    **hold_against_synchronous("aligned, 2 clusters", fleet="2 clusters"),
    **hold_against_synchronous("aligned, 8 clusters", fleet="8 clusters", steps=ROUNDS * 8 * 64),
    **hold_against_synchronous("aligned, unlike data", **{"task.unlike": True}),
    **hold_against_synchronous("aligned, larger model", **LARGER, seeds=[1]),
    **run_once({
        "overlap": {"overlap": True},
        "overlap in four fragments": {"overlap": True, "fragments": 4},
        "int8 pushes": {"codec": "int8"},
        "int4 pushes": {"codec": "int4"},
        "int8 both ways": {"codec": "int8", "pull_codec": "int8"},
        "stragglers": {"fleet": "stragglers"},
        "jitter of 100 %": {"fleet": "jitter"},
        "growing 1-2-4-8": {"fleet": "growing"},
        "shrinking 8-4-2-1": {"fleet": "shrinking"},
        "steps, the paper's clip": PAPER,
        "steps with share in windows of a third": {**SHARE, "timing.window_s": 2 * THIRD_S},
        "steps with rda": {"pace": "steps", "outer.merge": "rda"},
        "steps with share and rda": {**SHARE, "outer.merge": "rda"},
        "steps with share and rda, fivefold": {**SHARE, "outer.merge": "rda", "fleet": "fivefold"},
        "steps, adaptive window": {"pace": "steps", "timing.window": "adaptive"},
        "aligned with edit's weights": EDIT_MERGE,
        "aligned with edit's weights, fivefold": {**EDIT_MERGE, "fleet": "fivefold"},
        "aligned with the weights of EDiT's paper, fivefold": {
            **EDIT_MERGE, "outer.merge": "edit-paper", "fleet": "fivefold",
        },
        "A-EDiT": EDIT,  # and its ablations (EDiT, Figure 7a)
        "A-EDiT without its gate": {**EDIT, "penalty.gates": []},
        "A-EDiT without its weights": {**EDIT, "outer.merge": "mean"},
        "A-EDiT without its clip": {**EDIT, "outer.clip": {}},
        "naive asynchronous": {"method": "naive"},  # Di-PS, Figure 2b
        "naive asynchronous, apart 0%": {"method": "naive", "fleet": "apart 0%"},
        "aligned, the paper's clip": {"outer.clip": {"norm": 1.0}},
        "aligned, relative clip": {"outer.clip": {"relative": 2.0}},
        "aligned, no gate": {"penalty.gates": []},
        "aligned, all gates": {"penalty.gates": ["dips", "direction", "loss", "replay"]},
        "aligned, plain averaging": {"outer.lr": 1.0, "outer.momentum": 0.0},
        "aligned, momentum 0.9": {"outer.momentum": 0.9},
        "aligned, outer lr 0.5": {"outer.lr": 0.5},
        "aligned, outer lr 1.0": {"outer.lr": 1.0},
        "aligned, outer lr auto": {"outer.lr": "auto"},
    }),
}  # fmt: skip

# The same rows at 0.13, 1.0 and 10 million parameters: what of the small model carries over. The largest takes twenty
# minutes a run, at a rate that falls with its width.
SIZES: dict[str, dict[str, Any]] = {
    "0.13 M": {"tune": LRS, "steps": FULL_STEPS, "seeds": FACTOR_SEEDS},
    "1.0 M": {
        "task.width": 160,
        "task.layers": 3,
        "task.hidden": 440,
        "tune": {"inner.lr": [1e-3, 2e-3, 4e-3]},
        "steps": FULL_STEPS // 2,
        "seeds": FACTOR_SEEDS,
    },
    "10 M": {
        "task.width": 448,
        "task.layers": 4,
        "task.heads": 8,
        "task.hidden": 1232,
        "inner.lr": 1e-3,
        "steps": FULL_STEPS // 4,
        "seeds": [1],
    },
}
SIZED: Rows = {
    "synchronous": {"method": "synchronous"},
    DP: {"method": "data_parallel"},
    "ours": OURS,
    "ours, fivefold": {**OURS, "fleet": "fivefold"},
    "ours with rda, fivefold": {**OURS, **RDA, "fleet": "fivefold"},
    "ours, steps": {**OURS, "pace": "steps"},
}
SIZE_ROWS: Rows = {
    f"{row}, {size}": {**keys, **of, **({"compare": f"synchronous, {size}"} if row != "synchronous" else {})}
    for size, of in SIZES.items()
    for row, keys in SIZED.items()
}

# The best inner learning rate by the number of clusters (EDiT, Figures 6a and 6b), never at a grid's edge.
RATE_LRS = {"inner.lr": [1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2]}
RATE_ROWS: Rows = {
    **{
        f"data parallel, {spell_clusters(n)}": {"method": "data_parallel", "fleet": spell_clusters(n), "tune": RATE_LRS}
        for n in (1, 2, 4, 8)
    },
    **{
        f"EDiT, {spell_clusters(n)}": {**EDIT, **WAITING, "fleet": spell_clusters(n), "tune": RATE_LRS}
        for n in (2, 4, 8)
    },
}

# One recipe without a knob, wherever it is put; `synchronous` beside it at the best of its inner learning rates.
RECIPE = {**OURS, "codec": "int8", "pull_codec": "int8", "penalty.gates": ["dips", "direction", "loss", "replay"]}
RECIPE_ROWS: Rows = {
    **{
        f"synchronous, {n}": {"method": "synchronous", "fleet": spell_clusters(n), "steps": steps, "tune": LRS}
        for n, steps in RECIPE_STEPS.items()
    },
    **{
        f"recipe, {fleet}": {**RECIPE, "fleet": fleet, "steps": RECIPE_STEPS[n], "compare": f"synchronous, {n}"}
        for fleet, n in RECIPE_FLEETS.items()
    },
    "recipe with Muon, fivefold": {**RECIPE, **MUON, "fleet": "fivefold", "steps": RECIPE_STEPS[4], "compare": DP},
    DP: {"method": "data_parallel", "fleet": "4 clusters", "steps": RECIPE_STEPS[4], "tune": DP_LRS},
}
