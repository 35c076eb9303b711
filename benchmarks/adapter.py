"""The gain of changing gears when links sag, and that it never costs much (docs/guides/inside.md, SpanTrain §3.4).

    python -m benchmarks adapter --part cut       # a real pipeline on shaped links whose rate is cut in mid-run
    python -m benchmarks adapter --part traces    # 40 random traces of rates, in the simulator
    python -m benchmarks adapter --part crossings    # which way of training is the fastest at a line's rate

Layers are slept: what is measured are the orders, the transfers and the adapter, not this machine's arithmetic.
"""

from __future__ import annotations

import argparse
import os
import random
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import astuple, dataclass, replace
from functools import lru_cache
from itertools import pairwise
from statistics import fmean, median
from tempfile import TemporaryDirectory

from benchmarks.adapter_crossings import measure_crossings
from benchmarks.harness import Bench, main
from benchmarks.line_program import LineProgram, ask_programs, open_programs
from benchmarks.namespaces import End, missing, network, slowed
from dips.inside.planning.adapt import PIECES, GearAdapter, Gears, TimedTransfer, Way, predict_steps, slow_ways
from dips.inside.planning.schedules import ScheduleName, list_share
from dips.inside.planning.simulate import (
    PassSeconds,
    PipelineStage,
    Route,
    SimulatedPipeline,
    freeze_orders,
    make_chain,
    simulate,
    tune_depths,
)

FIXED = 0.05  # of an action's seconds: what a piece takes however small it is


def make_gears(chain: SimulatedPipeline, fixed: float = FIXED) -> dict[int, SimulatedPipeline]:
    """Return the gears of a chain of single devices, as `dips plan cluster` makes them."""
    gears = {}
    for pieces in PIECES:
        share = fixed + (1 - fixed) / pieces
        stages = tuple(
            replace(
                stage,
                devices=tuple(
                    replace(
                        d,
                        microbatches=tuple(range(pieces * len(d.microbatches))),
                        seconds=tuple(PassSeconds(share * t.f, share * t.i, share * t.w) for t in d.seconds),
                    )
                    for d in stage.devices
                ),
            )
            for stage in chain.stages
        )
        cut = replace(chain, stages=stages, border_bytes=tuple(n / pieces for n in chain.border_bytes))
        tuned, played = (
            tune_depths(cut, 100) if cut.schedule is ScheduleName.COMPACT_ZB else (cut, simulate(cut, spans=False))
        )
        gears[pieces] = freeze_orders(tuned, played.orders)
    return gears


# ---- a cut link ------------------------------------------------------------------------------------------------------

STAGES, MICROBATCHES, SAMPLES = 4, 4, 32  # S§4.1: a batch of 128, by 32
FORWARD_S, TRANSFER = 0.4, 0.75  # of a micro-batch; seconds of a border's transfer over those of a forward
LINK_MBIT, LATENCY_S = 100.0, 0.0005
CUTS = (0.4, 0.6)  # of the rate; S§4.4
GAINED = 1.25  # × the tokens of a run without
BEFORE, REACTS, AFTER = 1, 12, 4  # steps: before the cut; until the gear changes, at most; judged


def make_chain_of(forward_s: float, transfer: float, fixed: float = FIXED) -> tuple[dict[int, SimulatedPipeline], int]:
    """Return the gears of the chain on links of `LINK_MBIT`, and the rows of 32 bytes that go over a border."""
    byte_s = 8 / (LINK_MBIT * 1e6) * 1514 / 1448  # a packet has headers
    rows = round(transfer * forward_s / byte_s / SAMPLES / 32)
    chain = make_chain(ScheduleName.COMPACT_ZB, [PassSeconds(*[forward_s] * 3)] * STAGES, [0.0] * 3, MICROBATCHES)
    chain = replace(
        chain,
        border_bytes=(32.0 * rows * SAMPLES,) * (STAGES - 1),
        route=lambda a, b: Route(LATENCY_S, ((("out", a), byte_s), (("in", b), byte_s))),
    )
    return make_gears(chain, fixed), rows


def measure_cut(bench: Bench) -> None:
    """Tokens a second after the cut, with the adapter over without; first over the best constant number of pieces."""
    bench.skip_if(missing())
    gears, rows = make_chain_of(FORWARD_S, TRANSFER)
    with open_ranks() as (hosts, ranks):
        for cut in CUTS[:1] if bench.quick else CUTS:

            def play(pieces: int, adapt: bool, cut: float = cut) -> float:
                """Median seconds of a step after the cut."""
                count = BEFORE, REACTS if adapt else 0, AFTER
                steps = play_cut(hosts, ranks, (gears, rows, FIXED), pieces, adapt, cut, count)
                shown = " ".join(f"{of.seconds:.2f}/{of.gear}" for of in steps)
                bench.say(f"cut by {cut:.0%}, {'adapter' if adapt else f'{pieces} pieces'}: {shown} (seconds/gear)")
                for why in {of.why: None for of in steps if of.why}:
                    bench.say(why)
                return median(of.seconds for of in steps[-AFTER:])

            wanted = predict_steps(gears, {(a, b): 1 / (1 - cut) for a in range(STAGES) for b in range(STAGES)})
            best = min(wanted, key=wanted.__getitem__)
            on, off = play(1, adapt=True), play(1, adapt=False)
            constant = off if best == 1 else play(best, adapt=False)
            tokens, name = SAMPLES * MICROBATCHES, f"rate cut by {cut:.0%}"
            bench.row(f"{name}: samples/s", tokens / on, "", against=f"always {best} pieces", of=tokens / constant)
            bench.row(f"{name}: samples/s", tokens / on, "", against="without", of=tokens / off, least=GAINED)
            bench.row(f"{name}: a step without", off, "s", against="the simulator", of=wanted[1])
            bench.row(f"{name}: a step with", on, "s", against="the simulator", of=wanted[best])
    bench.note(
        f"{STAGES} stages, {MICROBATCHES} micro-batches, F = I = W = {FORWARD_S:g} s slept, {FIXED:.0%} of it whatever "
        f"the size, a transfer {TRANSFER:g} of a forward; the bound is ≥ {GAINED:g}, medians of {AFTER} steps, with "
        "the adapter after it has changed; always so many pieces: those that are best in the simulator; "
        f"load of the machine {os.getloadavg()[0]:.1f}"
    )


@dataclass(frozen=True, slots=True)
class PlayedStep:
    """A step of all ranks; gear and reason are those after it."""

    seconds: float
    gear: int
    why: str
    loss: float


@contextmanager
def open_ranks() -> Iterator[tuple[Sequence[End], Sequence[LineProgram]]]:
    with (
        TemporaryDirectory() as directory,
        network({f"r{i}": LINK_MBIT for i in range(STAGES)}, "10.231.11") as hosts,
        open_programs() as start,
    ):
        ends = list(hosts.values())
        words = [("pipeline_rank", str(i), str(STAGES), f"{directory}/store") for i in range(STAGES)]
        with ThreadPoolExecutor(STAGES) as pool:  # each answers when all have come
            yield ends, list(pool.map(lambda i: start(ends[i], *words[i]), range(STAGES)))


def play_cut(
    hosts: Sequence[End],
    ranks: Sequence[LineProgram],
    made: tuple[Gears, int, float],
    pieces: int,
    adapt: bool,
    cut: float,
    steps: tuple[int, int, int],
) -> list[PlayedStep]:
    """Play steps of a new pipeline before all links are cut, until the gear changes, and then.

    made    gears, rows and fixed share of `make_chain_of`
    pieces  of a micro-batch in the plan's own orders
    steps   before the cut; until the gear changes, at most; after that
    """
    from benchmarks.pipeline_rank import spell_plan

    gears, rows, fixed = made
    gear = gears[pieces]
    plan = spell_plan(gear, simulate(gear), range(STAGES + 1), SAMPLES // pieces, gears=gears if adapt else None)
    of_piece = fixed / (fixed + (1 - fixed) / pieces)
    ask_programs(ranks, "begin", plan, astuple(gear.stages[0].devices[0].seconds[0]), of_piece, rows, adapt)
    played = [_step(ranks) for _ in range(steps[0])]
    with ExitStack() as stack:
        for host in hosts:
            stack.enter_context(slowed(host, 1 - cut))
        for _ in range(steps[1]):
            played.append(_step(ranks))
            if played[-1].gear != played[0].gear:
                break
        played += [_step(ranks) for _ in range(steps[2])]
    ask_programs(ranks, "end")
    return played


def _step(ranks: Sequence[LineProgram]) -> PlayedStep:
    begins, ends, *told = zip(*ask_programs(ranks, "step"), strict=True)
    gears, reasons, losses = (set(of) for of in told)
    assert len(gears) == len(reasons) == len(losses) == 1, f"ranks differ: {told}"
    return PlayedStep(max(ends) - min(begins), gears.pop(), reasons.pop(), losses.pop())


# ---- traces ----------------------------------------------------------------------------------------------------------

TRACES, STEPS, SEED = 40, 100, 34
NO_WORSE = 0.97  # of a run without
JITTER, WAITED = 0.1, 0.5  # of the logarithm of a transfer's seconds; share of transfers that a receiver waits for


def measure_traces(bench: Bench) -> None:
    """Seconds of a run without the adapter over those of one with it, and with each of S§3.4's ways, for each trace."""
    found = list[tuple[float, float, int]]()
    beside: dict[str, list[float]] = {}
    for number in range(8 if bench.quick else TRACES):
        rng = random.Random(SEED * 1000 + number)
        gears = draw_gears(rng)
        kind, trace = draw_trace(rng, STEPS, len(gears[1].stages) - 1)
        on, constant, driven = play_trace(rng, gears, trace)
        changes = sum(a != b for a, b in pairwise(driven))
        found.append((constant[1] / on, min(constant.values()) / on, changes))
        for name, seconds in play_papers_ways(gears, trace, driven).items():
            beside.setdefault(name, []).append(constant[1] / seconds)
        if number % 8 == 7:
            bench.say(f"{number + 1} traces, the last one a {kind}: {found[-1][0]:.2f} with {changes} changes")
    gained, best, changes_made = zip(*found, strict=True)
    bench.row("worst trace, over the best constant number of pieces", min(best), "×", against="it", of=1.0)
    bench.row("worst trace, over a run without", min(gained), "×", against="it", of=1.0, least=NO_WORSE)
    bench.row("mean of the traces, over a run without", fmean(gained), "×", against="it", of=1.0)
    bench.row("most changes of gear in a trace", max(changes_made), "")
    for name, each in beside.items():
        bench.row(f"beside it, {name}: mean, over a run without", fmean(each), "×", against="it", of=1.0)
        bench.row(f"beside it, {name}: worst", min(each), "×", against="it", of=1.0)
    bench.note(f"{len(found)} traces of {STEPS} steps; the bound is ≥ {NO_WORSE:g} of a run without, for every trace")
    bench.note(
        "beside it: where rates are known it is without a window, and pieces change for any gain. By arrival a stage "
        "takes the first action of its order whose input is here, whatever memory that needs: gpipe is then no gpipe. "
        "Orders as they come: by arrival at the plan's rates, then frozen; stages with unequal pieces have no others, "
        "and a step in which pieces change is played by arrival. Not played: smaller pieces in the backward alone "
        "(S§3.4's third), since the graph of a whole micro-batch has no backward of its half"
    )


def draw_gears(rng: random.Random) -> dict[int, SimulatedPipeline]:
    """Chains of 2 to 4 stages, 2 to 6 micro-batches, any schedule, fixed seconds of 2 to 20 % of an action."""
    p = rng.randint(2, 4)
    seconds = [PassSeconds(*(rng.uniform(0.05, 0.15) for _ in range(3))) for _ in range(p)]
    links = [rng.uniform(0.005, 0.1) for _ in range(p - 1)]
    chain = make_chain(
        rng.choice(list(ScheduleName)), seconds, links, rng.choice((2, 4, 6)), rng.choice((0.0, 0.002, 0.02))
    )
    return make_gears(chain, rng.choice((0.02, 0.05, 0.1, 0.2)))


def draw_trace(rng: random.Random, steps: int, borders: int) -> tuple[str, list[list[float]]]:
    """Draw the kind of a trace, and by border and step by how much its transfers are slower than planned."""
    kind = rng.choice(list(KINDS))
    return kind, [KINDS[kind](rng, steps) for _ in range(borders)]


def _sag(rng: random.Random, steps: int) -> list[float]:
    begin = rng.randrange(steps)
    end, slow = rng.randint(begin, steps), rng.uniform(1, 8)
    return [slow if begin <= step < end else 1.0 for step in range(steps)]


def _flap(rng: random.Random, steps: int) -> list[float]:
    half, slow = rng.choice((1, 2, 3, 5, 10, 20, 40)), rng.uniform(1, 8)
    return [slow if step // half % 2 else 1.0 for step in range(steps)]


def _drift(rng: random.Random, steps: int) -> list[float]:
    now, made = 1.0, []
    for step in range(steps):
        if step % 10 == 0:
            now = min(8.0, max(0.5, now * rng.lognormvariate(0, 0.3)))
        made.append(now)
    return made


def _jump(rng: random.Random, steps: int) -> list[float]:
    now, made = 1.0, []
    for _ in range(steps):
        now = rng.choice((0.5, 1.0, 1.0, 1.5, 2.5, 4.0, 8.0)) if rng.random() < 0.03 else now
        made.append(now)
    return made


KINDS: Mapping[str, Callable[[random.Random, int], list[float]]] = {
    "sag": _sag, "flap": _flap, "drift": _drift, "jump": _jump
}  # fmt: skip


def play_trace(
    rng: random.Random, gears: Gears, trace: Sequence[Sequence[float]]
) -> tuple[float, dict[int, float], list[int]]:
    """Return the seconds of all steps with the adapter and in each gear, and the gear of each step."""
    adapter, on, driven = GearAdapter(gears), 0.0, list[int]()
    constant = dict.fromkeys(gears, 0.0)

    @lru_cache
    def seconds_of(slow: tuple[float, ...]) -> dict[int, float]:
        return predict_steps(gears, _both_ways(slow))

    for slow in zip(*trace, strict=True):
        on += seconds_of(slow)[adapter.gear]
        driven.append(adapter.gear)
        for pieces, seconds in seconds_of(slow).items():
            constant[pieces] += seconds
        adapter.take_transfers(_time_transfers(rng, gears[adapter.gear], _both_ways(slow)))
    return on, constant, driven


def _both_ways(slow: Sequence[float]) -> dict[Way, float]:
    return {way: factor for border, factor in enumerate(slow) for way in ((border, border + 1), (border + 1, border))}


def _time_transfers(
    rng: random.Random, gear: SimulatedPipeline, slowdowns: Mapping[Way, float]
) -> Iterator[TimedTransfer]:
    """Yield what ranks would measure: of transfers that came before they were waited for, only a bound."""
    for (a, b), slow in slowdowns.items():
        sender, receiver = gear.stages[a].devices[0], gear.stages[b].devices[0]
        nbytes, route = gear.border_bytes[min(a, b)], gear.route(sender.name, receiver.name)
        for _ in sender.microbatches:
            seconds = route.latency_s + nbytes * route.byte_s * slow * rng.lognormvariate(0, JITTER)
            waited = rng.random() < WAITED
            yield TimedTransfer(
                sender.name, receiver.name, nbytes, seconds if waited else seconds * rng.uniform(1, 3), waited
            )


# ---- S§3.4's own ways ------------------------------------------------------------------------------------------------
# The paper cuts in each stage by itself, in the middle of a step, and a stage computes what has come. Ours changes all
# stages between two steps, and plays frozen orders.

Pieces = tuple[int, ...]  # of a micro-batch, in each stage
Slow = tuple[float, ...]  # by border: seconds of a transfer over the plan's


def play_papers_ways(gears: Gears, trace: Sequence[Sequence[float]], driven: Sequence[int]) -> dict[str, float]:
    """Return the seconds of all steps in each way.

    driven  the gear of each step with the adapter
    """
    count = len(gears[1].stages)
    ours, mixed = MixedGears(gears), MixedGears({n: _freeze_as_they_come(gear) for n, gear in gears.items()})
    within = plan = (1,) * count
    before: Slow = (1.0,) * (count - 1)
    took: dict[str, float] = defaultdict(float)
    for slow, gear in zip(zip(*trace, strict=True), driven, strict=True):
        took["gears, rates known"] += ours.predict(ours.choose_alike(before), slow)
        alike = mixed.choose_alike(before)
        took["gears, rates known, orders as they come"] += mixed.predict(alike, slow)
        took["pieces per border, rates known, orders as they come"] += mixed.predict(mixed.choose(alike, before), slow)
        sagged = {s for b, (new, old) in enumerate(zip(slow, before, strict=True)) if new != old for s in (b, b + 1)}
        changed = mixed.choose(within, slow, sagged)
        took["pieces within a step, on the borders that changed"] += mixed.predict(
            within, slow, None if changed == within else changed
        )
        took["order by arrival, pieces as planned"] += ours.predict(plan, slow, plan)
        took["order by arrival, gears as ours"] += ours.predict((gear,) * count, slow, (gear,) * count)
        before, within = slow, changed
    return took


class MixedGears:
    """Pipelines of single devices whose stages are in different gears."""

    def __init__(self, gears: Gears) -> None:
        self._gears = gears
        self.predict = lru_cache(None)(self._predict)
        self._freeze = lru_cache(None)(self._freeze_order)

    def choose_alike(self, slow: Slow) -> Pieces:
        """Return the best of those that are the same in all stages."""
        count = len(self._gears[1].stages)
        return min(((n,) * count for n in self._gears), key=lambda pieces: self.predict(pieces, slow))

    def choose(self, pieces: Pieces, slow: Slow, free: Collection[int] | None = None) -> Pieces:
        """Return the best pieces at these rates: stage by stage, of those that are `free`, until none gets better."""
        best, tried = pieces, self.predict(pieces, slow)
        improved = True
        while improved:
            improved = False
            for s in range(len(pieces)) if free is None else sorted(free):
                for n in self._gears:
                    moved = (*best[:s], n, *best[s + 1 :])
                    if (seconds := self.predict(moved, slow)) < tried - 1e-12:
                        best, tried, improved = moved, seconds, True
        return best

    def _predict(self, pieces: Pieces, slow: Slow, then: Pieces | None = None) -> float:
        """Return the seconds of a step. With `then` the stages cut so from its second micro-batch on, and compute what
        has come; else they repeat orders that were frozen at the plan's rates.
        """
        if then is None:
            played = self._freeze(pieces)
        elif len({*pieces, *then}) == 1:
            played = replace(self._gears[pieces[0]], by_arrival=True)
        else:
            played = self._mix(pieces, then)
        return simulate(slow_ways(played, _both_ways(slow)), spans=False).seconds

    def _freeze_order(self, pieces: Pieces) -> SimulatedPipeline:
        if len(set(pieces)) == 1:
            return self._gears[pieces[0]]
        return _freeze_as_they_come(self._mix(pieces, pieces))

    def _mix(self, first: Pieces, others: Pieces) -> SimulatedPipeline:
        """Return the pipeline that cuts the first micro-batch in one way and the others in another.

        A piece has the place in its stage's order that it has in the order of its gear.
        """
        plan, slots = self._gears[1], max(self._gears)  # of a micro-batch
        count = len(plan.stages[0].devices[0].microbatches)
        stages = []
        for s, pair in enumerate(zip(first, others, strict=True)):
            cuts = [pair[0], *[pair[1]] * (count - 1)]
            of_gear = {n: self._gears[n].stages[s].devices[0] for n in pair}
            places = [
                (place / len(device.order), replace(action, microbatch=m * slots + piece * slots // n))
                for n, device in of_gear.items()
                for place, action in enumerate(device.order)
                if action.microbatch is not None
                for m, piece in (divmod(action.microbatch, n),)
                if cuts[m] == n
            ]
            order = tuple(action for _, action in sorted(places, key=lambda pair: pair[0]))
            device = replace(
                of_gear[pair[0]],
                microbatches=list_share(order),
                order=order,
                seconds_of={slots // n: device.seconds for n, device in of_gear.items()},
            )
            stages.append(PipelineStage((device,)))
        return replace(
            plan,
            stages=tuple(stages),
            border_bytes=tuple(nbytes / slots for nbytes in plan.border_bytes),
            slots=slots * count,
            by_arrival=True,
        )


def _freeze_as_they_come(pipeline: SimulatedPipeline) -> SimulatedPipeline:
    """Return the pipeline with the orders that its own have by arrival, at the plan's rates."""
    played = simulate(replace(pipeline, by_arrival=True), spans=False)
    return replace(freeze_orders(pipeline, played.orders), by_arrival=False)


PARTS: dict[str, Callable[[Bench], None]] = {
    "cut": measure_cut,
    "traces": measure_traces,
    "crossings": measure_crossings,
}


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--part", choices=list(PARTS), default="cut", help="what to compare")


def measure(bench: Bench) -> None:
    PARTS[bench.args.part](bench)


if __name__ == "__main__":
    main("adapter", __doc__, measure, _arguments)
