"""Gears of a planned pipeline: what to change when its links sag, and when (SpanTrain §3.4).

A *gear* is a set of frozen orders whose micro-batches are cut into 1, 2 or 4 pieces. Small pieces fill the pipeline
earlier and hide slow transfers, and pay each action's fixed seconds more often. Gears have the same layers on the same
devices and sum the same loss, so a change between two steps leaves the gradients as they are.

`GearAdapter` takes the seconds of transfers, asks the simulator for each gear's step at the rates that they show, and
says when to change. The rule:

* A way, from one stage to another, is judged by windows of 20 transfers (S§4.6): the median of those for which the
  receiver waited. Of others only an upper bound is known: they came before they were needed.
* A change needs steps that are at least 5 % shorter, summed over the last n windows. n is 1 at first and doubles with
  every change, up to 64: a border that flaps is soon judged by its mean, and the gear stays.

Mended, of S§3.4: its text changes sizes "below a predefined threshold" of bandwidth, within a step and for each group
of devices. Here a prediction takes the place of the threshold, since the same rate asks for small pieces in one
pipeline and not in another; and a step is played in one gear, whose orders were checked to end.

Known limits: what a link lost is taken for its rate, not for its latency; devices are taken to be as fast as planned.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice
from statistics import median
from typing import Any

from dips.errors import ConfigError
from dips.inside.planning.schedules import ScheduleName, list_share, parse_order
from dips.inside.planning.simulate import (
    PassSeconds,
    PipelineDevice,
    PipelineStage,
    Route,
    SimulatedPipeline,
    StalledPipeline,
    simulate,
)

PIECES = (1, 2, 4)  # of a micro-batch, by gear
WINDOW = 20  # transfers of a way
GAIN = 0.05  # of a step, for which a gear is changed
MOST_WINDOWS = 64  # over which a gain is summed
Way = tuple[int, int]  # the stage that sends, and the stage that receives
Gears = Mapping[int, SimulatedPipeline]  # by pieces: the pipeline with its frozen orders, at the rates of the plan


@dataclass(frozen=True, slots=True)
class TimedTransfer:
    """One transfer between two devices. `waited`: the receiver waited for it, so the seconds are those it took."""

    sender: str
    receiver: str
    nbytes: float
    seconds: float
    waited: bool


@dataclass(frozen=True, slots=True)
class GearChange:
    """The gear from the next step on, and why."""

    old: int
    new: int
    old_s: float  # of a step as predicted at the measured rates, mean of the windows that counted
    new_s: float
    windows: int
    way: Way  # that is slowest, measured over planned
    slowdown: float

    def __str__(self) -> str:
        """Return the change with its reason."""
        link = f"stage {self.way[0]} to {self.way[1]} takes {self.slowdown:.2f} × the planned seconds"
        return (
            f"gear {self.old} to {self.new}: {link}; predicted {self.new_s:.3g} s a step instead of {self.old_s:.3g}, "
            f"over {self.windows} window{'s' if self.windows > 1 else ''}"
        )


class GearAdapter:
    """Chooses the gear of a pipeline by its transfers. One rank has it, and tells the others."""

    def __init__(self, gears: Gears) -> None:
        """Begin in the plan's own gear, of one piece.

        gears  by pieces; `parse_gears` returns them
        """
        self.gear = 1
        """Pieces of a micro-batch, now."""
        self._gears = dict(gears)
        plan = gears[1]
        self._stage_of = {d.name: s for s, stage in enumerate(plan.stages) for d in stage.devices}
        self._route = plan.route
        self._windows: dict[Way, list[tuple[float, bool]]] = {}
        self._slowdowns: dict[Way, float] = {}  # measured seconds over the plan's, latencies apart
        self._predicted: deque[dict[int, float]] = deque(maxlen=MOST_WINDOWS)  # seconds of each gear, by window
        self._needed = 1
        self._predict = lru_cache(MOST_WINDOWS)(self._predict_steps)  # links often are as they were

    def take_transfers(self, transfers: Iterable[TimedTransfer]) -> GearChange | None:
        """Record the transfers of a step, in order; return what to change before the next one."""
        ended = [self._record(one) for one in transfers]
        if not any(ended) or len(self._gears) == 1:
            return None
        self._predicted.append(self._predict(tuple((way, _shorten(s, 3)) for way, s in self._slowdowns.items())))
        return self._choose()

    def _predict_steps(self, slowdowns: tuple[tuple[Way, float], ...]) -> dict[int, float]:
        """Seconds of a step in each gear."""
        return predict_steps(self._gears, dict(slowdowns))

    def _record(self, transfer: TimedTransfer) -> bool:
        """Put a transfer into the window of its way; return whether that has ended."""
        way = self._stage_of[transfer.sender], self._stage_of[transfer.receiver]
        route = self._route(transfer.sender, transfer.receiver)
        planned_s = transfer.nbytes * route.byte_s
        if planned_s <= 0:
            return False
        window = self._windows.setdefault(way, [])
        window.append((max(transfer.seconds - route.latency_s, 0.0) / planned_s, transfer.waited))
        if len(window) < WINDOW:
            return False
        if known := [slowdown for slowdown, waited in window if waited]:
            self._slowdowns[way] = median(known)
        else:  # all came before they were needed: no slower than that
            self._slowdowns[way] = min(self._slowdowns.get(way, 1.0), *(slowdown for slowdown, _ in window))
        window.clear()
        return True

    def _choose(self) -> GearChange | None:
        if len(self._predicted) < self._needed:
            return None
        last = list(islice(reversed(self._predicted), self._needed))
        mean_s = {n: sum(of[n] for of in last) / len(last) for n in self._gears}
        best = min(mean_s, key=mean_s.__getitem__)
        if mean_s[best] > mean_s[self.gear] * (1 - GAIN):
            return None
        way = max(self._slowdowns, key=self._slowdowns.__getitem__)
        change = GearChange(
            self.gear, best, mean_s[self.gear], mean_s[best], len(last), way, self._slowdowns[way]
        )  # fmt: skip
        self.gear, self._needed = best, min(2 * self._needed, MOST_WINDOWS)
        return change


def slow_ways(pipeline: SimulatedPipeline, slowdowns: Mapping[Way, float]) -> SimulatedPipeline:
    """Return the pipeline whose transfers take so many times the seconds per byte on each way."""
    stage_of = {d.name: s for s, stage in enumerate(pipeline.stages) for d in stage.devices}

    def route(sender: str, receiver: str) -> Route:
        planned = pipeline.route(sender, receiver)
        factor = slowdowns.get((stage_of[sender], stage_of[receiver]), 1.0)
        return Route(planned.latency_s, tuple((thing, cost * factor) for thing, cost in planned.uses))

    return replace(pipeline, route=route)


def predict_steps(gears: Gears, slowdowns: Mapping[Way, float]) -> dict[int, float]:
    """Return the seconds of a step in each gear."""
    return {pieces: simulate(slow_ways(gear, slowdowns), spans=False).seconds for pieces, gear in gears.items()}


def keep_useful(gears: Gears) -> dict[int, SimulatedPipeline]:
    """Return the gear of one piece, and those that would be changed to if all links had 1, ½, ¼ or ⅛ of their rate."""
    stages = range(len(gears[1].stages))
    useful = {1}
    for factor in (1.0, 2.0, 4.0, 8.0):
        seconds = predict_steps(gears, {(a, b): factor for a in stages for b in stages})
        best = min(seconds, key=seconds.__getitem__)
        if seconds[best] <= seconds[1] * (1 - GAIN):
            useful.add(best)
    return {n: gear for n, gear in gears.items() if n in useful}


# ---- in the plan -----------------------------------------------------------------------------------------------------


def spell_gears(gears: Gears) -> dict[str, Any]:
    """Return gears as two keys of a plan's `pipeline`: `gears`, and `costs`, which the simulator needs besides."""
    base = gears[1]
    return {
        "gears": [
            {
                "pieces": pieces,
                "step_s": _shorten(simulate(gear, spans=False).seconds),
                "seconds": {
                    d.name: [[_shorten(t.f), _shorten(t.i), _shorten(t.w)] for t in d.seconds]
                    for stage in gear.stages
                    for d in stage.devices
                },
            }
            | ({"orders": _spell_orders(gear)} if pieces > 1 else {})  # those of one piece are the plan's
            for pieces, gear in gears.items()
        ],
        "costs": {
            "border_bytes": list(map(_shorten, base.border_bytes)),
            "collectives": [
                {
                    "gather_s": list(map(_shorten, stage.gather_s)),
                    "reduce_s": list(map(_shorten, stage.reduce_s)),
                    "uses": list(map(_spell_thing, stage.collective_uses)),
                }
                for stage in base.stages
            ],
            "links": [
                {
                    "from": a,
                    "to": b,
                    "latency_s": _shorten(base.route(a, b).latency_s),
                    "uses": [[_spell_thing(thing), _shorten(cost)] for thing, cost in base.route(a, b).uses],
                }
                for a, b in sorted({pair for gear in gears.values() for pair in _list_pairs(gear)})
            ],
        },
    }  # fmt: skip


def _spell_orders(pipeline: SimulatedPipeline) -> dict[str, str]:
    return {d.name: " ".join(map(str, d.order)) for stage in pipeline.stages for d in stage.devices}


def parse_gears(pipeline: Mapping[str, Any], name: str) -> dict[int, SimulatedPipeline]:
    """Return the gears of a plan's `pipeline`, by pieces; none if the plan has none.

    Errors   ConfigError for gears that `spell_gears` would not have written
    """
    if "gears" not in pipeline:
        return {}
    try:
        gears = {int(row["pieces"]): _parse_gear(pipeline, row) for row in pipeline["gears"]}
        for gear in gears.values():
            simulate(gear, spans=False)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, StalledPipeline) as error:
        raise ConfigError(f"{name}: pipeline.gears: expected what `dips plan cluster` writes, got {error!r}") from error
    if 1 not in gears or not gears.keys() <= set(PIECES):
        raise ConfigError(f"{name}: pipeline.gears: expected gears of 1, 2 and 4 pieces, got {sorted(gears)}")
    return gears


def _parse_gear(pipeline: Mapping[str, Any], row: Mapping[str, Any]) -> SimulatedPipeline:
    costs, count = pipeline["costs"], int(pipeline["ministages"])
    orders = row["orders"] if int(row["pieces"]) > 1 else pipeline["orders"]
    stages = []
    for stage, collective in zip(pipeline["stages"], costs["collectives"], strict=True):
        devices = []
        for device in map(str, stage["devices"]):
            order = parse_order(str(orders[device]))
            seconds = tuple(PassSeconds(float(f), float(i), float(w)) for f, i, w in row["seconds"][device])
            devices.append(PipelineDevice(device, list_share(order), seconds, order=order))
        stages.append(
            PipelineStage(
                tuple(devices),
                tuple(map(float, collective["gather_s"])),
                tuple(map(float, collective["reduce_s"])),
                tuple(map(str, collective["uses"])),
            )
        )
    routes = {
        (str(link["from"]), str(link["to"])): Route(
            float(link["latency_s"]), tuple((str(thing), float(cost)) for thing, cost in link["uses"])
        )
        for link in costs["links"]
    }
    return SimulatedPipeline(
        schedule=ScheduleName(pipeline["schedule"]),
        stages=tuple(stages),
        border_bytes=tuple(float(nbytes) / int(row["pieces"]) for nbytes in costs["border_bytes"]),
        route=lambda sender, receiver: routes[sender, receiver],
        ministages=count,
        keep=count == 1,
    )


def _list_pairs(pipeline: SimulatedPipeline) -> set[tuple[str, str]]:
    """The devices that send each other something, each way."""
    p = len(pipeline.stages)
    owners = [{m: d.name for d in stage.devices for m in d.microbatches} for stage in pipeline.stages]
    near = {frozenset((part % p, (part + 1) % p)) for part in range(p * pipeline.ministages - 1)}
    ways = [tuple(stages) for stages in near if len(stages) == 2]
    return {pair for s, t in (*ways, *(way[::-1] for way in ways)) for pair in _pair_devices(owners[s], owners[t])}


def _pair_devices(senders: Mapping[int, str], receivers: Mapping[int, str]) -> Iterator[tuple[str, str]]:
    return ((senders[m], receivers[m]) for m in senders)


def _spell_thing(thing: Any) -> str:
    return ":".join(map(str, thing)) if isinstance(thing, tuple) else str(thing)


def _shorten(value: float, digits: int = 6) -> float:
    return float(f"{value:.{digits}g}")
