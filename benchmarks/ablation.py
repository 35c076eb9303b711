"""What each part of the data flow brings, on links shaped by `tc tbf`: the paper's Figure 13, part by part.

* pipeline: against the same push with its stages one after another (in_turn.py), over the link on which the processor's
  stages and the wire take the same time; the processor's are measured first;
* lanes: several against one, plain and encrypted, over 10 Gbit/s;
* order: planned against random with four workers and two slaves, each behind a link of 100 Mbit/s: slaves that ask
  several workers at once (the default), slaves that ask one at a time, workers that go to one slave after another;
* a second cluster that comes when the first is half through, against the optimum;
* all together against none of it, at three sizes; held at the middle one.

A gain is a ratio of two medians (means where orders are random); where the middle halves of the two overlap there is
none, as a note says. Notes say what the limit is: bytes against the line's rate, processor time against what the
cores have.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from statistics import mean, median, quantiles

from benchmarks.cast import RANDOM, TURNS, Cast, random_order
from benchmarks.harness import Bench, main
from benchmarks.line_program import LineProgram, open_programs
from benchmarks.namespaces import End, missing, network
from dips.codecs import Codec
from dips.protocol.order import Worker, make_lines, places_for_slave
from dips.transport.intake import CONCURRENT_STREAMS, MOST_EACH
from dips.transport.lane import available_cores

PIPELINE, LANES, ORDER, JOIN, TOGETHER = 1.3, 1.2, 1.2, 1 / 1.1, 1.16  # what must be reached
TOGETHER_MIB = (96, 384, 768)  # of parameters
LANES_CORES = 4  # from which on lanes are held: both ends, a slave's kernels and the kernel's share them
WIRE_BOUND = 0.85  # of the line's rate: then nothing but fewer bytes makes a push shorter
PAYLOAD = 1448 / 1514  # of a packet's bytes on the line
MOST_MBIT, WORKERS_MBIT = 10_000.0, 100.0  # tbf is accurate up to the first
IN_TURN, PRODUCT = "in_turn", "link_end"
SEVERAL, SINGLE, WALKING = "slaves ask 4 at once", "slaves ask one at a time", "workers go to one slave at a time"
SERVING = ((SEVERAL, PRODUCT, CONCURRENT_STREAMS), (SINGLE, PRODUCT, 1), (WALKING, IN_TURN, MOST_EACH))


@dataclass(frozen=True, slots=True)
class Took:
    """One push of each cluster that took part."""

    seconds: float  # from the first one's begin to the last one's end
    processor_s: float  # of all ends together, the kernel's work for them included
    staging_s: float  # in turn: what the processor's own stages took


class Ends:
    """Slaves, and the ranks of some clusters, as processes on their hosts."""

    def __init__(self, cast: Cast, slaves: Sequence[LineProgram], ranks: Mapping[str, Sequence[LineProgram]]) -> None:
        self.cast, self._slaves, self._ranks, self._number = cast, slaves, ranks, 0

    def push(self, rule: str, second_after_s: float | None = None) -> Took:
        """Push once, asked and asking by `rule`; a second cluster begins so many seconds after the first."""
        self._number += 1
        names = list(self._ranks)[: 1 if second_after_s is None else 2]
        begun, used, staging = time.perf_counter(), 0.0, 0.0
        for number, name in enumerate(names):
            if number and second_after_s is not None:
                time.sleep(max(0.0, begun + second_after_s - time.perf_counter()))
            self._begin(name, rule)
        if len(names) > 1:
            self._line_up(names)
        for name in names:
            for rank in self._ranks[name]:
                _, processor_s, *own = rank.read_answer()
                used, staging = used + processor_s, staging + sum(own)
        seconds = time.perf_counter() - begun
        for name in names:
            for slave in self._slaves:
                processor_s, *own = slave.ask_program("end", (name, self._number))
                used, staging = used + processor_s, staging + sum(own)
        return Took(seconds, used, staging)

    def _begin(self, name: str, rule: str) -> None:
        push, cast = (name, self._number), self.cast
        for index, slave in enumerate(self._slaves):
            planned = places_for_slave(index, cast.slaves, 0, cast.ranks)
            places = planned if rule == TURNS else random_order(cast.ranks, f"{push}/{index}")
            slave.ask_program("push", push, places, [rank.first for rank in self._ranks[name]])
        for rank in self._ranks[name]:
            rank.send_request("push", self._number, [slave.first for slave in self._slaves], rule)

    def _line_up(self, names: Sequence[str]) -> None:
        """As asking.reorder_pushes does it: half of the first, all of the second is left."""
        cast = self.cast
        first, second = (Worker((share,) * cast.slaves, 1.0) for share in (0.5, 1.0))
        asked = make_lines([first] * cast.ranks + [second] * cast.ranks, cast.slaves)
        for slave, workers in zip(self._slaves, asked, strict=True):
            place = {worker: place for place, worker in enumerate(workers)}
            for number, name in enumerate(names):
                own = range(number * cast.ranks, (number + 1) * cast.ranks)
                slave.ask_program("places", (name, self._number), [place[worker] for worker in own])


@contextmanager
def ends(
    cast: Cast, hosts: Mapping[str, End], module: str, *, clusters: int = 1, lanes: int = 1,
    concurrent_streams: int = CONCURRENT_STREAMS,
    secret: str = "plain",
) -> Iterator[Ends]:  # fmt: skip
    """The processes; hosts are s0 … for the slaves, a0 …, b0 … for the ranks."""
    with open_programs() as start:
        own = (str(concurrent_streams), str(lanes), secret) if module == PRODUCT else (str(concurrent_streams),)
        slaves = [
            start(hosts[f"s{i}"], module, "slave", str(cast), str(i), hosts[f"s{i}"].ip, *own)
            for i in range(cast.slaves)
        ]
        ranks = {
            name: [start(hosts[f"{name}{r}"], module, "rank", str(cast), name, str(r)) for r in range(cast.ranks)]
            for name in "ab"[:clusters]
        }
        yield Ends(cast, slaves, ranks)


def hosts_of(cast: Cast, mbit: float | None, clusters: int = 1) -> dict[str, float | None]:
    """Every slave and every worker behind a link of its own."""
    workers = [f"{name}{rank}" for name in "ab"[:clusters] for rank in range(cast.ranks)]
    return {**{f"s{i}": mbit for i in range(cast.slaves)}, **dict.fromkeys(workers, mbit)}


def middle(runs: Sequence[Took]) -> Took:
    """Medians."""
    seconds, used, staging = ([getattr(t, key) for t in runs] for key in ("seconds", "processor_s", "staging_s"))
    return Took(median(seconds), median(used), median(staging))


def in_turns(works: Mapping[str, Callable[[], Took]], runs: int) -> dict[str, list[Took]]:
    """Each work so often, one after the other, so that a slow minute slows all of them; the first time is not kept."""
    took: dict[str, list[Took]] = {name: [] for name in works}
    for run in range(-1, runs):
        for name, work in works.items():
            made = work()
            if run >= 0:
                took[name].append(made)
    return took


def line_share(took: Took, cast: Cast, mbit: float) -> float:
    """Which share of a push the slaves' lines were busy."""
    return cast.wire_bytes / cast.slaves / (mbit * 1e6 / 8 * PAYLOAD) / took.seconds


def limit(took: Took, cast: Cast, mbit: float) -> str:
    """How near a push is to what the lines and the cores can do."""
    busy, wire = took.processor_s / (available_cores() * took.seconds), line_share(took, cast, mbit)
    name = "the wire" if wire >= WIRE_BOUND else "the processor" if busy >= 0.85 else "neither alone"
    return f"{name} (line busy {wire:.0%}, {available_cores()} cores busy {busy:.0%})"


def gain(
    bench: Bench, name: str, on: Sequence[Took], off: Sequence[Took], *, against: str, least: float | None = None,
    middle_of: Callable[[Iterable[float]], float] = median,
) -> None:  # fmt: skip
    """Add the row of a part: with it and without it. Where the middle halves of both overlap there is no gain, and no
    ratio.
    """
    with_it, without = ([took.seconds for took in each] for each in (on, off))
    slow, fast = quantiles(with_it, n=4, method="inclusive")[2], quantiles(without, n=4, method="inclusive")[0]
    of: float | None = middle_of(without)
    if slow >= fast:
        bench.note(f"{name}: no gain: {against} took {of:.3g} s")
        of = None
    bench.row(name, middle_of(with_it), "s", against=against, of=of, least=least, less=True)


# ---- the rows --------------------------------------------------------------------------------------------------------


def pipeline(bench: Bench) -> None:
    """One rank, one slave; int8 gives the processor more to do for a byte. Held where the two times can be equal."""
    for codec, mib in ((Codec.FP32, 512), (Codec.INT8, 384)):
        cast = Cast(slaves=1, ranks=1, layers=16, numel=(mib // (4 if bench.quick else 1)) << 18, codec=codec)
        bench.say(f"pipeline, {codec}: the processor's stages")
        with network(hosts_of(cast, None)) as hosts, ends(cast, hosts, IN_TURN) as serial:
            free = middle(in_turns({"free": lambda: serial.push(TURNS)}, bench.runs)["free"])
        equal = cast.wire_bytes * 8e-6 / PAYLOAD / free.staging_s
        mbit = round(min(equal, MOST_MBIT))
        bench.say(f"pipeline, {codec}, over {mbit} Mbit/s")
        with (
            network(hosts_of(cast, mbit)) as hosts,
            ends(cast, hosts, IN_TURN) as serial,
            ends(cast, hosts, PRODUCT) as product,
        ):
            took = in_turns({"off": lambda: serial.push(TURNS), "on": lambda: product.push(TURNS)}, bench.runs)
        on, off = middle(took["on"]), middle(took["off"])
        least = PIPELINE if equal <= MOST_MBIT else None
        gain(bench, f"pipeline, {codec}", took["on"], took["off"], against="one after another", least=least)
        stages = f"stages {free.staging_s:.2f} s, wire {cast.wire_bytes * 8e-6 / PAYLOAD / mbit:.2f} s"
        bench.note(f"pipeline, {codec}: {stages}; on: {limit(on, cast, mbit)}; off: {limit(off, cast, mbit)}")


def several_lanes(bench: Bench) -> None:
    """One rank, one slave, 10 Gbit/s. Held where one lane is bound by its core and others are free: where it fills the
    line none helps.
    """
    cast = Cast(slaves=1, ranks=1, layers=16, numel=(128 if bench.quick else 512) << 18)
    bench.say("lanes over 10 Gbit/s")
    for secret in ("plain", "encrypted"):
        with (
            network(hosts_of(cast, MOST_MBIT)) as hosts,
            ends(cast, hosts, PRODUCT, lanes=1, secret=secret) as one,
            ends(cast, hosts, PRODUCT, lanes=2, secret=secret) as two,
        ):
            took = in_turns({"one": lambda: one.push(TURNS), "two": lambda: two.push(TURNS)}, bench.runs)
        one_lane, lanes = middle(took["one"]), middle(took["two"])
        bound = line_share(one_lane, cast, MOST_MBIT) < WIRE_BOUND and available_cores() >= LANES_CORES
        least = LANES if secret == "encrypted" and bound else None
        gain(bench, f"2 lanes, {secret}, 10 Gbit/s", took["two"], took["one"], against="1 lane", least=least)
        for name, each in (("1 lane", one_lane), ("2 lanes", lanes)):
            bench.note(f"{name}, {secret}: {limit(each, cast, MOST_MBIT)}")


def order(bench: Bench) -> None:
    """Four workers, two slaves, each behind 100 Mbit/s. Means over so many random orders, since one may be lucky."""
    cast = Cast(slaves=2, ranks=4, layers=8, numel=(8 if bench.quick else 16) << 18)
    runs = {TURNS: bench.runs, RANDOM: 6 if bench.quick else 20}
    bench.say(f"order: 4 workers, 2 slaves, {WORKERS_MBIT:g} Mbit/s each, {runs[RANDOM]} random orders")
    took: dict[tuple[str, str], list[Took]] = {}
    with network(hosts_of(cast, WORKERS_MBIT)) as hosts:
        for kind, module, concurrent_streams in SERVING:
            with ends(cast, hosts, module, concurrent_streams=concurrent_streams) as made:
                for rule in (TURNS, RANDOM):
                    took[kind, rule] = in_turns({rule: partial(made.push, rule)}, runs[rule])[rule]
    for kind, _, _ in SERVING:
        gain(
            bench, f"planned order, {kind}", took[kind, TURNS], took[kind, RANDOM],
            against="random", least=ORDER if kind == SINGLE else None, middle_of=mean,
        )  # fmt: skip
    bench.note(
        "an order shortens a push where slaves serve one at a time; those that ask several at once keep their lines "
        "full in any order, since who has nothing to give is overtaken: there the limit is the wire, whatever the order"
    )
    for (kind, used), each in took.items():
        bench.note(f"{kind}, {used}: {limit(middle(each), cast, WORKERS_MBIT)}")


def second_cluster(bench: Bench) -> None:
    """Two workers a cluster, two slaves; the optimum keeps both slaves' lines full to the end."""
    cast = Cast(slaves=2, ranks=2, layers=8, numel=(12 if bench.quick else 24) << 18)
    alone_s = cast.wire_bytes / cast.slaves / (WORKERS_MBIT * 1e6 / 8)
    bench.say("a second cluster comes when the first is half through")
    with network(hosts_of(cast, WORKERS_MBIT, 2)) as hosts, ends(cast, hosts, PRODUCT, clusters=2) as both:
        took = middle(in_turns({"both": lambda: both.push(TURNS, alone_s / 2)}, bench.runs)["both"])
    bench.row(
        "second cluster half-way, both done", took.seconds, "s",
        against="both slaves' lines full to the end", of=2 * alone_s, least=JOIN, less=True,
    )  # fmt: skip
    bench.note(f"the optimum counts bytes of parameters: packets carry {PAYLOAD:.3f} of it")


def together(bench: Bench) -> None:
    """Four workers, two slaves, where processor and wire take the same time, all parts against none."""
    for mib in TOGETHER_MIB[:2] if bench.quick else TOGETHER_MIB:
        _together(bench, mib)


def _together(bench: Bench, mib: int) -> None:
    cast, what = Cast(slaves=2, ranks=4, layers=16, numel=mib << 18, codec=Codec.INT8), f"all together, int8, {mib} MiB"
    bench.say(f"{what}: the processor's stages")
    with network(hosts_of(cast, None)) as hosts, ends(cast, hosts, IN_TURN) as serial:
        free = middle(in_turns({"free": lambda: serial.push(TURNS)}, bench.runs)["free"])
    mbit = round(min(cast.wire_bytes * 8e-6 / PAYLOAD / free.staging_s, MOST_MBIT))
    with (
        network(hosts_of(cast, mbit)) as hosts,
        ends(cast, hosts, IN_TURN) as none,
        ends(cast, hosts, PRODUCT) as all_parts,
    ):
        took = in_turns({"on": lambda: all_parts.push(TURNS), "off": lambda: none.push(RANDOM)}, bench.runs + 3)
    least = TOGETHER if mib == TOGETHER_MIB[1] else None
    gain(bench, what, took["on"], took["off"], against="none of it", least=least, middle_of=mean)
    bench.note(f"{what}: {limit(middle(took['on']), cast, mbit)}; none: {limit(middle(took['off']), cast, mbit)}")


def measure(bench: Bench) -> None:
    """Every part, then all."""
    bench.skip_if(missing())
    for part in (pipeline, several_lanes, order, second_cluster, together):
        part(bench)


if __name__ == "__main__":
    main("ablation", __doc__, measure)
