"""The shape of a seed's run: its clusters, slaves and options, drawn so that two minutes hold two dozen rounds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from random import Random

from dips.codecs import Codec
from dips.protocol.enums import (
    DurabilityMode,
    GateName,
    MergeRule,
    PersistFailurePolicy,
    RequeuePolicy,
    StepRule,
    WeightRule,
    WindowRule,
)
from dips.protocol.gates import OF_NORMS
from dips.protocol.options import Clip, DataOptions, Options, OuterOptions, PenaltyOptions, StopOptions, TimingOptions
from dips.sim.heap import Chance
from dips.sim.scenario import ClusterShape, DataShape, Scenario

FAULTS_S = 76.0  # simulated seconds with faults
MOST_ROLLBACK = 1_000_000  # no operator of a simulated run says `dips rollback`: the stories of it are transcripts
QUIET_S = 50.0  # and without: everything heals
CROWD = 3
MORE_S = 50.0  # for a seed whose faults left no time for rounds
DEADLINES: Mapping[str, float] = {  # by field of TimingOptions: short ones; the bounds of Liveness are sums of them
    "heartbeat_s": 1.9,
    "lease_heartbeats": 4,
    "hang_s": 12.0,
    "order_s": 4.0,
    "compute_s": 8.0,
    "transfer_s": 12.0,
    "least_transfer_s": 30.0,
    "busy_retry_s": 0.7,
}
OVERLAP_SLOWNESS = 3.0  # of inner steps that go on while parameters move: a round holds ten of them, not twenty


def scenario_of(seed: int) -> Scenario:
    """Draw a run; everything that is drawn later has a generator of its own, so that no seed changes by it."""
    return _windows(Chance(seed).generator_for("anchor"), _draw(seed))


def _draw(seed: int) -> Scenario:
    chance = Chance(seed)
    rng = chance.generator_for("settings")
    slaves, clusters = rng.randint(2, 3), rng.randint(2, 3)
    layers = rng.randint(slaves, 4)
    ranks = [rng.choice((1, 1, 2, 2, 3)) for _ in range(clusters)]
    shapes = tuple(ClusterShape(n, 0.12 + 0.3 * rng.random()) for n in ranks)
    return Scenario(
        clusters=_cut(chance.generator_for("fragments"), _ways(chance.generator_for("ways"), shapes)),
        slaves=slaves,
        layers=layers,
        ranges_at_once=chance.generator_for("ranges").choice((2, 6, 6)),
        parameters=chance.generator_for("parameters").choice(((3,), (2, 1))),
        slots=rng.randint(1, 2),
        pinned=rng.randint(0, 1),
        inner_steps=rng.randint(2, 3),
        options=_gates(
            chance.generator_for("gates"),
            _rules(chance.generator_for("rules"), _options(chance.generator_for("options"))),
        ),
        lasts_s=FAULTS_S + QUIET_S + MORE_S,
        quiet_at=FAULTS_S,
        seeded=chance.generator_for("seeded").random() < 0.8,
        mirrors=chance.generator_for("mirrors").random() < 0.6,
        steady=False,
        samples=chance.generator_for("samples").choice((None, None, DataShape(2, 1), DataShape(7, 2), DataShape(2, 3))),
        pull_codec=chance.generator_for("pull codec").choice(
            (Codec.FP32, Codec.FP32, Codec.BF16, Codec.INT8, Codec.INT8)
        ),
    )


def plain_of(seed: int) -> Scenario:
    """Draw the same run with the paper's rules and gates, so that drawing others moves no seed of it."""
    return replace(_draw(seed), options=_options(Chance(seed).generator_for("options")))


def crowd_of(seed: int) -> Scenario:
    """Draw the same run with three times as many clusters, and one slot for all of them."""
    drawn = scenario_of(seed)
    return replace(drawn, clusters=drawn.clusters * CROWD, slots=1)


def _ways(rng: Random, shapes: tuple[ClusterShape, ...]) -> tuple[ClusterShape, ...]:
    """How each cluster runs: half of the seeds have clusters of each kind, mostly beside others."""
    aligns, overlaps = rng.random() < 0.6, rng.random() < 0.5
    return tuple(_way(rng, shape, aligns, overlaps) for shape in shapes)


def _cut(rng: Random, shapes: tuple[ClusterShape, ...]) -> tuple[ClusterShape, ...]:
    """Half of the clusters that overlap move in fragments."""
    drawn = [rng.choice((1, 1, 2, 3)) for _ in shapes]
    return tuple(replace(s, fragments=n if s.overlap else 1) for s, n in zip(shapes, drawn, strict=True))


def _way(rng: Random, shape: ClusterShape, aligns: bool, overlaps: bool) -> ClusterShape:
    aligned_steps = rng.randint(2, 6) if rng.random() < 0.8 and aligns else 0
    overlap = rng.random() < 0.8 and overlaps
    step_s = shape.step_s * (OVERLAP_SLOWNESS if overlap else 1.0)
    restarts = rng.choice((0, 3, 3, 3, 3, 3))
    return replace(shape, step_s=step_s, aligned_steps=aligned_steps, overlap=overlap, restarts=restarts)


def _gates(rng: Random, options: Options) -> Options:
    """Half of the seeds gate by `dips` alone, the others by any one of norms at most, and some of the other gates."""
    if rng.random() < 0.5:
        return options
    of_norms = rng.choice(((), *((gate,) for gate in GateName if gate in OF_NORMS)))
    others = [gate for gate in GateName if gate not in OF_NORMS and rng.random() < 0.6]
    gates = [*of_norms, *others]
    rng.shuffle(gates)
    warmup = rng.choice((1, 2, 2, 4))
    return replace(
        options, penalty=replace(options.penalty, gates=tuple(gates), warmup_rounds=warmup)
    )  # fmt: skip


def _rules(rng: Random, options: Options) -> Options:
    """Half of the seeds step by the paper's rules, the others by any that may stand beside a lossy pull codec."""
    if rng.random() < 0.5:
        return options
    clip = rng.choice((options.outer.clip, Clip(), replace(options.outer.clip, per_layer=True)))
    outer = OuterOptions(
        lr=rng.choice((0.7, 0.7, "auto")),
        clip=clip,
        merge=rng.choice(tuple(MergeRule)),
        step=rng.choice((StepRule.NESTEROV, StepRule.SHARE)),
        weights=rng.choice(tuple(WeightRule)),
    )
    return replace(options, outer=outer)


def _windows(rng: Random, drawn: Scenario) -> Scenario:
    """Half of the seeds have windows that adapt."""
    timing = replace(drawn.options.timing, window=rng.choice(tuple(WindowRule)))
    return replace(drawn, options=replace(drawn.options, timing=timing))


def _options(rng: Random) -> Options:
    """Short deadlines; every option that changes what is safe is drawn."""
    timing = replace(TimingOptions(window_s=rng.choice((0.3, 0.6, 1.2, None))), **dict(DEADLINES))
    penalty = PenaltyOptions(warmup_rounds=2, history=4, gate_patience=3)
    outer = OuterOptions(clip=Clip(norm=rng.choice((0.05, 1.0))))
    stop = StopOptions(versions=rng.randint(8, 14) if rng.random() < 0.1 else 0)
    later = len(Codec) - 3  # they share a sixth: a new codec moves few of the seeds that are kept
    codec = rng.choices(tuple(Codec), (6, 2, 2, *[2 / later] * later))[0]
    durability = rng.choices(tuple(DurabilityMode), (5, 4))[0]
    failing, requeue = rng.choices(tuple(PersistFailurePolicy), (3, 1))[0], rng.choice(tuple(RequeuePolicy))
    return Options(
        outer, penalty, stop, DataOptions(ranges=5000), timing, codec=codec,
        durability=durability, on_persist_failure=failing, requeue=requeue, most_rollback=MOST_ROLLBACK,
    )  # fmt: skip
