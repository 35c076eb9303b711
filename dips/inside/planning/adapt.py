"""Gears and new plans of a planned pipeline: what to change when its links sag, and when (SpanTrain §3.4).

A *gear* is a set of frozen orders whose micro-batches are cut into 1, 2 or 4 pieces. Small pieces fill the pipeline
earlier and hide slow transfers, and pay each action's fixed seconds more often. Gears have the same layers on the same
devices and sum the same loss, so a change between two steps leaves the gradients as they are.

`GearAdapter` takes the seconds of transfers, asks the simulator for each gear's step at the rates that they show, and
says when to change. The rule:

* A way, from one stage to another, is judged by windows of 20 transfers (S§4.6): the median of those for which the
  receiver waited. Of others only an upper bound is known: they came before they were needed.
* A change needs steps that are at least 5 % shorter, summed over the last n windows. n is 1 at first and doubles with
  every change, up to 64: a border that flaps is soon judged by its mean, and the gear stays.

Where no gear helps, because the rate itself lacks, other layers on other devices may. `PlanWatch` says when a search
for a new plan is worth its seconds, and `judge_plan` whether what was found is worth a restart:

* A link, from one node to another, is off when each of its last n windows is over, or each under, what the present
  plan, or the last search, took it for, by a quarter; then their mean counts. n is 3 at first and doubles with every
  search, and with every plan that a search has led to, up to 3072: a link that flaps has few new plans.
* A new plan needs steps that are at least 10 % shorter than those of the best gear, at the measured rates.

Mended, of S§3.4: its text changes sizes "below a predefined threshold" of bandwidth, within a step and for each group
of devices. Here a prediction takes the place of the threshold, since the same rate asks for small pieces in one
pipeline and not in another; and a step is played in one gear, whose orders were checked to end.

Known limits: what a link lost is taken for its rate, not for its latency; devices are taken to be as fast as planned;
a link that no border of the plan crosses is taken to be as the profile has it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache
from itertools import islice
from statistics import fmean, median
from typing import Any, Generic, TypeVar

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
PLAN_WINDOWS, MOST_DOUBLINGS = 3, 10  # of a link before a new plan is searched for, and how often that doubles
OFF = 1.25  # over or under the rate that a link was planned with, from which on a search is worth its seconds
PLAN_GAIN = 0.1  # of a step, for which a plan is changed: all ranks start anew
LEAST_SLOWDOWN = 0.01  # a transfer that took its latency alone shows no rate
Way = tuple[int, int]  # the stage that sends, and the stage that receives
Link = tuple[str, str]  # the node that sends, and the node that receives
Key = TypeVar("Key", Way, Link)
Gears = Mapping[int, SimulatedPipeline]  # by pieces: the pipeline with its frozen orders, at the rates of the plan


class Adapting(StrEnum):
    """Changes that a pipeline may make by itself when links sag."""

    OFF = "off"
    GEARS = "gears"  # the pieces of its micro-batches
    ASK = "ask"  # gears; and it says which new plan would be better
    AUTO = "auto"  # gears; and it starts anew with a better plan


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


class TransferWindows(Generic[Key]):
    """Transfers by way or by link, in windows of 20, and how many times the planned seconds the last window took."""

    def __init__(self) -> None:
        self.slowdowns: dict[Key, float] = {}
        """Measured seconds over the plan's, latencies apart, of each key with a whole window."""
        self._open: dict[Key, list[tuple[float, bool]]] = {}

    def record(self, key: Key, slowdown: float, waited: bool) -> bool:
        """Put a transfer into the window of its key; return whether that has ended."""
        window = self._open.setdefault(key, [])
        window.append((slowdown, waited))
        if len(window) < WINDOW:
            return False
        if known := [slowdown for slowdown, waited in window if waited]:
            self.slowdowns[key] = median(known)
        else:  # all came before they were needed: no slower than that
            self.slowdowns[key] = min(self.slowdowns.get(key, 1.0), *(slowdown for slowdown, _ in window))
        window.clear()
        return True


def compare_transfer(transfer: TimedTransfer, route: Route) -> float | None:
    """Return a transfer's seconds over those of its route, latencies apart; None for one without bytes."""
    planned_s = transfer.nbytes * route.byte_s
    return max(transfer.seconds - route.latency_s, 0.0) / planned_s if planned_s > 0 else None


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
        self._windows = TransferWindows[Way]()
        self._predicted: deque[dict[int, float]] = deque(maxlen=MOST_WINDOWS)  # seconds of each gear, by window
        self._needed = 1
        self._predict = lru_cache(MOST_WINDOWS)(self._predict_steps)  # links often are as they were

    def take_transfers(self, transfers: Iterable[TimedTransfer]) -> GearChange | None:
        """Record the transfers of a step, in order; return what to change before the next one."""
        ended = [self._record(one) for one in transfers]
        if not any(ended) or len(self._gears) == 1:
            return None
        slowdowns = self._windows.slowdowns.items()
        self._predicted.append(self._predict(tuple((way, _shorten(s, 3)) for way, s in slowdowns)))
        return self._choose()

    def _predict_steps(self, slowdowns: tuple[tuple[Way, float], ...]) -> dict[int, float]:
        """Seconds of a step in each gear."""
        return predict_steps(self._gears, dict(slowdowns))

    def _record(self, transfer: TimedTransfer) -> bool:
        """Put a transfer into the window of its way; return whether that has ended."""
        way = self._stage_of[transfer.sender], self._stage_of[transfer.receiver]
        slowdown = compare_transfer(transfer, self._route(transfer.sender, transfer.receiver))
        return slowdown is not None and self._windows.record(way, slowdown, transfer.waited)

    def _choose(self) -> GearChange | None:
        if len(self._predicted) < self._needed:
            return None
        last = list(islice(reversed(self._predicted), self._needed))
        mean_s = {n: sum(of[n] for of in last) / len(last) for n in self._gears}
        best = min(mean_s, key=mean_s.__getitem__)
        if mean_s[best] > mean_s[self.gear] * (1 - GAIN):
            return None
        way, slowdown = max(self._windows.slowdowns.items(), key=lambda item: item[1])
        change = GearChange(self.gear, best, mean_s[self.gear], mean_s[best], len(last), way, slowdown)
        self.gear, self._needed = best, min(2 * self._needed, MOST_WINDOWS)
        return change


def slow_routes(pipeline: SimulatedPipeline, factor: Callable[[str, str], float]) -> SimulatedPipeline:
    """Return the pipeline whose transfers take so many times the seconds per byte from one device to another."""

    def route(sender: str, receiver: str) -> Route:
        planned, by = pipeline.route(sender, receiver), factor(sender, receiver)
        return Route(planned.latency_s, tuple((thing, cost * by) for thing, cost in planned.uses))

    return replace(pipeline, route=route)


def slow_ways(pipeline: SimulatedPipeline, slowdowns: Mapping[Way, float]) -> SimulatedPipeline:
    """Return the pipeline whose transfers take so many times the seconds per byte on each way."""
    stage_of = {d.name: s for s, stage in enumerate(pipeline.stages) for d in stage.devices}
    return slow_routes(pipeline, lambda sender, receiver: slowdowns.get((stage_of[sender], stage_of[receiver]), 1.0))


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


# ---- a new plan ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PlanWanted:
    """Links have other rates than planned: search for a plan with these."""

    rates: Mapping[Link, float]  # bytes a second of the links that are off
    old_s: float  # of a step in the best gear, at the rates of all links that were measured
    windows: int
    link: Link  # that is furthest off
    slowdown: float  # its seconds over those of the present plan


class PlanVerdict(StrEnum):
    """The fate of a plan that was found."""

    OFFERED = "new plan"  # it lies beside the present one
    ADOPTED = "new plan taken"  # it has taken the place of the present one
    WITHDRAWN = "new plan withdrawn"  # what was offered before is no better any more


REMEDIES: Mapping[PlanVerdict, str] = {
    PlanVerdict.OFFERED: "To accept, rename it and the new profile, and start anew",
    PlanVerdict.ADOPTED: "It begins after the next accepted push, or when the job is started anew",
    PlanVerdict.WITHDRAWN: "What was offered is removed",
}


@dataclass(frozen=True, slots=True)
class PlanChange:
    """A new plan, and why."""

    verdict: PlanVerdict
    old_s: float  # of a step, as predicted at the measured rates: in the best gear of the present plan
    new_s: float
    windows: int
    link: Link
    slowdown: float
    plan: str  # its name
    file: str = ""  # where it lies

    def __str__(self) -> str:
        """Return the change with its reason, and what to do."""
        link = f"{self.link[0]} to {self.link[1]} takes {self.slowdown:.2f} × the planned seconds"
        return (
            f"{self.verdict}: {link} over {self.windows} windows; predicted {self.new_s:.3g} s a step, not "
            f"{self.old_s:.3g}. {REMEDIES[self.verdict]}{': ' if self.file else ''}{self.file}"
        )


class PlanWatch:
    """Says when to search for a new plan, by the transfers between nodes. One rank has it."""

    def __init__(self, gears: Gears, replans: int = 0) -> None:
        """Begin with the plan's rates.

        gears    of the present plan, by pieces
        replans  how many plans in a row came of a search like this, the present one included
        """
        self._gears, self._route = dict(gears), gears[1].route
        self._windows = TransferWindows[Link]()
        self._doublings = replans
        self._last: dict[Link, deque[float]] = {}  # slowdowns of the last windows
        self._byte_s: dict[Link, float] = {}  # seconds per byte as planned
        self._searched: dict[Link, float] = {}  # slowdowns with which a plan was searched for last
        self._known: dict[Link, float] = {}  # those of searches that came to an end

    @property
    def needed(self) -> int:
        """Windows of a link by whose mean it is judged."""
        return PLAN_WINDOWS << min(self._doublings, MOST_DOUBLINGS)

    def take_transfers(self, transfers: Iterable[TimedTransfer]) -> PlanWanted | None:
        """Record the transfers of a step; return what to search with, if links are off."""
        ended: dict[Link, None] = {}
        for one in transfers:
            if (link := self._record(one)) is not None:
                last = self._last.setdefault(link, deque(maxlen=self.needed))
                last.append(max(self._windows.slowdowns[link], LEAST_SLOWDOWN))
                ended[link] = None
        off = [link for link in ended if len(self._last[link]) == self.needed and self._is_off(link)]
        if not off:
            return None
        means = {link: fmean(last) for link, last in self._last.items()}
        worst = max(off, key=lambda link: _how_far(means[link], self._known.get(link, 1.0)))
        wanted = PlanWanted(
            rates={
                link: 1 / (self._byte_s[link] * slowdown)
                for link, slowdown in means.items()
                if max(_how_far(slowdown, of) for of in (1.0, self._known.get(link, 1.0))) > OFF
            },
            old_s=self._predict(means),
            windows=self.needed,
            link=worst,
            slowdown=means[worst],
        )
        self._searched = means
        self._last.clear()
        self._doublings += 1
        return wanted

    def settle_search(self) -> None:
        """Take the rates of the last search as known. Without this, as after a search that failed, another follows."""
        self._known |= self._searched

    def _record(self, transfer: TimedTransfer) -> Link | None:
        """Put a transfer into the window of its link; return the link if that has ended."""
        link = node_of(transfer.sender), node_of(transfer.receiver)
        route = self._route(transfer.sender, transfer.receiver)
        slowdown = compare_transfer(transfer, route)
        if link[0] == link[1] or slowdown is None:
            return None
        self._byte_s[link] = route.byte_s
        return link if self._windows.record(link, slowdown, transfer.waited) else None

    def _is_off(self, link: Link) -> bool:
        """Whether each of the last windows says that a link is slower than known, or each that it is faster."""
        known, last = self._known.get(link, 1.0), self._last[link]
        return min(last) > known * OFF or max(last) < known / OFF

    def _predict(self, slowdowns: Mapping[Link, float]) -> float:
        """Seconds of a step in the best gear."""

        def factor(sender: str, receiver: str) -> float:
            return slowdowns.get((node_of(sender), node_of(receiver)), 1.0)

        return min(simulate(slow_routes(gear, factor), spans=False).seconds for gear in self._gears.values())


def _how_far(slowdown: float, known: float) -> float:
    """By what factor, one way or the other, a link is from what it was taken for."""
    return max(slowdown / known, known / slowdown)


def node_of(device: str) -> str:
    """Return the node of a device, which is called node.number."""
    return device.rpartition(".")[0] or device


def judge_plan(
    wanted: PlanWanted, present: Mapping[str, Any], found: Mapping[str, Any], adapting: Adapting, offered: bool
) -> PlanChange | None:
    """Return what becomes of a plan that was found; None if it is no better, and nothing was offered before.

    present, found  contents of plan.yaml
    offered         whether a plan that was found before still lies beside the present one
    Errors          ConfigError for a plan that these ranks could not play with these batches
    """
    try:
        new_s, name, samples = float(found["step_s"]), str(found["plan"]), found["samples"]
        devices = _list_devices(found)
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"a new plan: expected what `dips plan cluster` writes, got {error!r}") from error
    if samples != present["samples"] or devices != _list_devices(present):
        raise ConfigError(
            f"a new plan: expected one of {present['samples']:g} samples for {', '.join(_list_devices(present))}, got "
            f"{samples:g} for {', '.join(devices)}: profile or model were changed; plan yourself, and start anew"
        )
    better = new_s <= wanted.old_s * (1 - PLAN_GAIN)
    if not better and not offered:
        return None
    asked = PlanVerdict.ADOPTED if adapting is Adapting.AUTO else PlanVerdict.OFFERED
    verdict = asked if better else PlanVerdict.WITHDRAWN
    return PlanChange(verdict, wanted.old_s, new_s, wanted.windows, wanted.link, wanted.slowdown, name)


def _list_devices(plan: Mapping[str, Any]) -> list[str]:
    return sorted(str(device) for stage in plan["pipeline"]["stages"] for device in stage["devices"])


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
