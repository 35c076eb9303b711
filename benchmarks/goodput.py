"""Goodput under faults: tokens that are in θ, over those of the same run undisturbed; ours and peers, one trace.

benchmarks/goodput_trace.json is played against eight tiny clusters: something fails each 29 s for 30 minutes. Clusters,
two servers and a coordinator are processes on hosts of their own (namespaces.py); whoever has no servers is spared
their failures. Inner steps are slept (0.1 s), an outer step follows each 20.

    kill   SIGKILL of all processes of a host, which its supervisor starts again after `for_s`
    stop   SIGSTOP, and SIGCONT after `for_s`
    cut    its cable is unplugged for `for_s`, and nobody is told
    slow   its link has a tenth of its rate for `for_s`
    disk   its disk (a tmpfs on its directory) is full for `for_s`

    ours     Di-PS, `pace: aligned` and `overlap: full`
    gloo     an all-reduce of everybody; after a failure all begin again at the newest checkpoint
    torchft  its DiLoCo with a lighthouse, in an environment of its own (peer_environments.py)

Every parameter is one number that cluster and version determine (tests/chaos/train_chaos.py), so a replay of the outer
steps in ten lines (tests/chaos/predict.py) tells θ: the reference. A system whose θ is another has no goodput.
With --minutes or --quick the first minutes of the trace are played.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from itertools import combinations
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import numpy as np
import numpy.typing as npt

from benchmarks import namespaces
from benchmarks.harness import Bench, main
from benchmarks.namespaces import End
from benchmarks.peer_environments import CACHE, PEERS, make_environment
from benchmarks.peer_rank import OuterStepSeen
from benchmarks.peer_run import PeerRun, PeerWork, read_lines
from benchmarks.whole_run import Processes, WholeRun
from dips.master import genesis
from dips.master.ledger import Ledger
from dips.protocol.grouping import Grouping
from dips.view.points import RoundHistory
from tests.chaos import predict
from tests.chaos.disks import full, small_disk
from tests.chaos.train_chaos import NUMEL, SHAPES, START, constant

TRACE = Path(__file__).with_name("goodput_trace.json")
SYSTEMS = ("ours", "gloo", "torchft", "forgather")
CLUSTERS, SERVERS = 8, 2
EVERY_S, MINUTES = 29.0, 30.0
SEED = 107  # its first two minutes kill a server and a cluster, cut off one and stop one
STEP_S, INNER_STEPS, TOKENS = 0.1, 20, 64
LINK_MBIT, SLOW_SHARE = 20.0, 0.1
DISK_KIB = 1 << 16
BEGIN_S = 180.0  # until all take part in outer steps; 8 imports of torch, on two cores
QUICK_MINUTES = 2.0
HEARTBEAT_S = 2.0
EVER = 1_000_000  # rounds
PEER_WORK = PeerWork(CLUSTERS, NUMEL, INNER_STEPS, STEP_S)
# Seconds that a failure lasts, and its weight among the others.
KINDS = {"kill": (1, 5, 8), "stop": (2, 10, 4), "cut": (2, 12, 4), "slow": (10, 25, 3), "disk": (5, 15, 2)}
COORDINATOR_WEIGHT, SERVER_WEIGHT = 1, 1  # where each cluster has 1


# ---- the trace ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TraceFault:
    """What fails, when, and for how long."""

    at_s: float
    what: str  # of KINDS
    who: str  # cluster0 … cluster7, server0, server1, coordinator
    for_s: float


@dataclass(frozen=True, slots=True)
class FaultTrace:
    """Faults in the order of their times, none before the end of the one before."""

    clusters: int
    servers: int
    minutes: float
    faults: tuple[TraceFault, ...]

    def first(self, minutes: float) -> FaultTrace:
        """Those that begin and end within the first minutes."""
        kept = tuple(f for f in self.faults if f.at_s + f.for_s <= 60 * minutes)
        return FaultTrace(self.clusters, self.servers, minutes, kept)


def make_trace(seed: int = SEED) -> FaultTrace:
    """Draw a trace; that of SEED is the published one."""
    rng = random.Random(seed)
    hosts = [f"cluster{i}" for i in range(CLUSTERS)]
    hosts += [f"server{i}" for i in range(SERVERS)] * SERVER_WEIGHT + ["coordinator"] * COORDINATOR_WEIGHT
    weights = [weight for _, _, weight in KINDS.values()]
    faults = []
    for number in range(1, int(60 * MINUTES / EVERY_S) + 1):
        what = rng.choices(list(KINDS), weights)[0]
        shortest, longest, _ = KINDS[what]
        faults.append(TraceFault(EVERY_S * number, what, rng.choice(hosts), round(rng.uniform(shortest, longest), 1)))
    return FaultTrace(CLUSTERS, SERVERS, MINUTES, tuple(faults))


def read_trace(path: Path = TRACE) -> FaultTrace:
    """Read a trace; raise ValueError, with the fault, for one that cannot be played."""
    made = json.loads(path.read_text())
    trace = FaultTrace(**{**made, "faults": tuple(TraceFault(**fault) for fault in made["faults"])})
    parts = {"coordinator", *(f"cluster{i}" for i in range(trace.clusters))}
    parts |= {f"server{i}" for i in range(trace.servers)}
    before_s = 0.0
    for fault in trace.faults:
        if fault.what not in KINDS or fault.who not in parts or fault.for_s <= 0:
            raise ValueError(f"{path}: {fault}: expected {', '.join(KINDS)} at {', '.join(sorted(parts))}, for > 0 s")
        if fault.at_s < before_s:
            raise ValueError(f"{path}: {fault} begins before the one before it ends, at {before_s:g} s")
        before_s = fault.at_s + fault.for_s
    return trace


def spell_trace(trace: FaultTrace) -> str:
    """The text of a trace's file: a line for each fault."""
    head = [f' "{key}": {json.dumps(value)},' for key, value in asdict(trace).items() if key != "faults"]
    faults = ",\n".join(f"  {json.dumps(asdict(fault))}" for fault in trace.faults)
    return "\n".join(["{", *head, ' "faults": [', faults, " ]", "}", ""])


# ---- systems --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Counted:
    """What a system did between two times."""

    tokens: int  # in θ
    wrong: str  # how θ differs from the reference, empty if it does not


class System(Protocol):
    """What a trace is played against; in a `with` its processes run, and are all ended on exit."""

    processes: Processes
    directory: Path

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None: ...

    def name(self, who: str) -> str | None:
        """The process, and host, that plays this part of a trace; None: nobody does."""

    def start(self, name: str) -> object: ...

    def begun(self) -> bool:
        """Whether all clusters have taken part in an outer step."""

    def count(self, begin: float, end: float) -> Counted:
        """What was done between two times (Unix seconds)."""


class GoodputRun(WholeRun):
    """Ours. Two slaves, eight clusters; the clusters' files are in `meeting`, so beside their disks."""

    def __init__(self, directory: Path, hosts: Mapping[str, End]) -> None:
        manifest = genesis.manifest_of(self._tensors(), Grouping())
        super().__init__(
            directory, manifest, clusters=CLUSTERS, slaves=SERVERS, versions=0, window_s=None, hosts=hosts
        )  # fmt: skip
        self._shared |= {
            "outer": {
                "lr": predict.LR, "momentum": predict.MOMENTUM, "step": "nesterov", "clip": {"norm": predict.CLIP},
            },
            "heartbeat_s": HEARTBEAT_S,
        }  # fmt: skip
        self.processes = self._processes

    def name(self, who: str) -> str | None:
        return who.replace("cluster", "c").replace("server", "ps").replace("coordinator", "master")

    def begun(self) -> bool:
        return {fold.push.cluster for r in self._history() for fold in r.folds} == set(self.clusters)

    def count(self, begin: float, end: float) -> Counted:
        seen = {name: self._installed(name) for name in self.clusters}  # first: then every row is there
        with self._ledger() as ledger:
            lineage, rounds = [row.version for row in ledger.read_state().versions], ledger.read_history(EVER)
        kept = set(lineage)
        tokens = sum(r.tokens for r in rounds if r.version in kept and r.ended and begin <= r.ended < end)
        try:
            predict.check_lineage(rounds, lineage)
            predict.check_once(rounds, lineage)
            predicted = predict.predict(rounds)
            for name, versions in seen.items():
                predict.check_numbers(versions, predicted, name)
        except AssertionError as error:
            return Counted(tokens, str(error))
        torn = [path.read_text() for path in self.meeting.glob("*.torn")]
        return Counted(tokens, "; ".join(torn))

    def _tensors(self) -> dict[str, npt.NDArray[np.float32]]:
        return {name: np.full(shape, START, np.float32) for name, shape in SHAPES.items()}

    def _keys(self, name: str) -> dict[str, Any]:
        return {"pace": {"aligned": INNER_STEPS}, "overlap": "full", "max_restarts": 1000}

    def _words(self, name: str) -> list[str]:
        return ["tests.chaos.train_chaos", name, str(self.meeting / f"{name}.out"), str(TOKENS), str(STEP_S)]

    def _ledger(self) -> closing[Ledger]:
        return closing(Ledger.open(self.directory / "master" / genesis.LEDGER, readonly=True))

    def _history(self) -> list[RoundHistory]:
        with self._ledger() as ledger:
            return ledger.read_history(EVER)

    def _installed(self, name: str) -> list[tuple[str, float]]:
        path = self.meeting / f"{name}.seen"
        return [(version, number) for version, number in read_lines(path)]


class GoodputPeer(PeerRun):
    """A peer, which has no servers."""

    def name(self, who: str) -> str | None:
        return None if who.startswith("server") else who.replace("cluster", "c").replace("coordinator", "master")

    def begun(self) -> bool:
        return all(self.steps().values())

    def count(self, begin: float, end: float) -> Counted:
        steps = self.steps()
        found = replay(steps)
        last = {seen.step: seen.at for each in steps.values() for seen in each}
        inside = [step for step, at in last.items() if begin <= at < end]
        tokens = sum(INNER_STEPS * TOKENS * len(found.contributed.get(step, ())) for step in inside)
        return Counted(tokens, found.wrong)


@dataclass(frozen=True, slots=True)
class ReplayedSteps:
    """The outer steps of a peer as ten lines of Python take them."""

    contributed: dict[int, frozenset[str]]  # by outer step: whose progress is in it
    wrong: str


def replay(steps: Mapping[str, Sequence[OuterStepSeen]]) -> ReplayedSteps:
    """Take each outer step again, of those who say that they were in it and, of those who say nothing, of some.

    A cluster that dies between an outer step and its line says nothing, and may have been in it. One that has come back
    in a step says that it was not in it; torchft lets it bring the parameters of the cluster that it was healed from
    once more. A step that was taken again, after a checkpoint, counts as it was taken last.
    """
    theta, m, contributed = np.float32(START), np.float32(0), dict[int, frozenset[str]]()
    last: dict[int, dict[str, OuterStepSeen]] = {}
    for name, each in steps.items():
        for seen in each:
            last.setdefault(seen.step, {})[name] = seen
    for number in range(1, max(last, default=0) + 1):
        said = last.get(number, {})
        newest = max(said.values(), key=lambda seen: seen.at, default=None)
        if newest is None:
            return ReplayedSteps(contributed, f"nobody saw outer step {number}")
        for names in _contributors(said, steps):
            pushed = [float(np.float32(constant(name, number - 1, 0))) for name in names]
            mean = np.float32(sum(float(theta) - p for p in pushed) / len(pushed))
            next_m = np.float32(predict.MOMENTUM) * m + mean
            next_theta = theta - np.float32(predict.LR) * (mean + np.float32(predict.MOMENTUM) * next_m)
            if abs(float(next_theta) - newest.number) < predict.TOLERANCE:
                break
        else:
            return ReplayedSteps(contributed, f"outer step {number} of {', '.join(sorted(said))}: θ is {newest.number}")
        theta, m, contributed[number] = next_theta, next_m, frozenset(names)
    return ReplayedSteps(contributed, "")


def _contributors(said: Mapping[str, OuterStepSeen], clusters: Iterable[str]) -> Iterator[list[str]]:
    """Whose parameters may have been averaged in one outer step, the likeliest first; one may stand there twice."""
    sure = [name for name, seen in said.items() if seen.took_part]
    silent, back = [name for name in clusters if name not in said], len(said) - len(sure)
    for count in range(len(silent) + 1):
        for more in combinations(silent, count):
            names = [*sure, *more]
            copies = [[], *([name] * back for name in names)] if back else [[]]
            yield from ([*names, *twice] for twice in copies if names)


# ---- playing --------------------------------------------------------------------------------------------------------


@contextmanager
def _killed(system: System, host: End, name: str) -> Iterator[None]:
    system.processes.kill(name)
    yield
    system.start(name)


@contextmanager
def _stopped(system: System, host: End, name: str) -> Iterator[None]:
    system.processes.signal(name, signal.SIGSTOP)
    try:
        yield
    finally:
        system.processes.signal(name, signal.SIGCONT)


PLAYED: dict[str, Callable[[System, End, str], AbstractContextManager[None]]] = {
    "kill": _killed,
    "stop": _stopped,
    "cut": lambda system, host, name: namespaces.cut(host),
    "slow": lambda system, host, name: namespaces.slowed(host, SLOW_SHARE),
    "disk": lambda system, host, name: full(system.directory / name),
}


def play(
    system: System, hosts: Mapping[str, End], trace: FaultTrace, say: Callable[[str], None]
) -> tuple[float, float]:
    """Play a trace from now on; return when it began and when its minutes were over (Unix seconds)."""
    begin = time.time()
    for fault in trace.faults:
        name = system.name(fault.who)
        if name is not None:
            _sleep_until(begin + fault.at_s)
            say(f"{fault.at_s:5.0f} s: {fault.what} {fault.who} for {fault.for_s:g} s")
            with PLAYED[fault.what](system, hosts[name], name):
                _sleep_until(begin + fault.at_s + fault.for_s)
    end = begin + 60 * trace.minutes
    _sleep_until(end)
    return begin, end


def _sleep_until(at: float) -> None:
    time.sleep(max(0.0, at - time.time()))


def live(
    make: Callable[[Path, Mapping[str, End]], System], trace: FaultTrace, say: Callable[[str], None] = lambda _: None
) -> Counted:
    """Run a system through a trace; raise RuntimeError if not all clusters take part within BEGIN_S."""
    names = ["master", *(f"ps{i}" for i in range(SERVERS)), *(f"c{i}" for i in range(CLUSTERS))]
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dips-bench-"))) / "run"
        for name in names:
            stack.enter_context(small_disk(directory / name, DISK_KIB))
        hosts = stack.enter_context(namespaces.network(dict.fromkeys(names, LINK_MBIT)))
        system = stack.enter_context(make(directory, hosts))
        over = time.monotonic() + BEGIN_S
        while not system.begun():
            if time.monotonic() > over:
                raise RuntimeError(f"not all clusters took part in an outer step within {BEGIN_S:g} s")
            time.sleep(0.2)
        begin, end = play(system, hosts, trace, say)
        return system.count(begin, end)


# ---- the benchmark --------------------------------------------------------------------------------------------------


def find_systems(bench: Bench) -> dict[str, Callable[[Path, Mapping[str, End]], System]]:
    """Those that can be run here; a row that says why for each that cannot."""
    made: dict[str, Callable[[Path, Mapping[str, End]], System]] = {}
    for name in bench.args.system or SYSTEMS:
        python, reason = make_environment(name, bench.args.environments, bench.say) if name in PEERS else (None, "")
        if reason:
            bench.row(f"goodput, {name}: {reason}", 0.0, "")
        elif name == "ours":
            made[name] = GoodputRun
        else:
            made[name] = partial(GoodputPeer, name, python or Path(sys.executable), PEER_WORK)
    return made


def measure(bench: Bench) -> None:
    """Each system undisturbed, then with the trace."""
    bench.skip_if(namespaces.missing())
    minutes = bench.args.minutes or (QUICK_MINUTES if bench.quick else MINUTES)
    trace = read_trace().first(minutes)
    undisturbed = FaultTrace(trace.clusters, trace.servers, max(1.0, minutes / 5), ())
    ideal = CLUSTERS * TOKENS / STEP_S
    for name, make in find_systems(bench).items():
        bench.say(f"{name}, undisturbed, {undisturbed.minutes:g} min")
        try:
            calm = live(make, undisturbed)
            bench.say(f"{name}, {len(trace.faults)} faults in {minutes:g} min")
            found = live(make, trace, bench.say)
        except RuntimeError as error:
            bench.row(f"goodput, {name}: {error}", 0.0, "")
            continue
        rate = calm.tokens / (60 * undisturbed.minutes)
        bench.row(f"tokens a second, {name}, undisturbed", rate, "1/s", against="no outer loop", of=ideal)
        least = None if bench.quick or name != "ours" else 0.97
        bench.row(
            f"goodput, {name}, {len(trace.faults)} faults in {minutes:g} min", found.tokens / (60 * minutes), "1/s",
            against="undisturbed", of=rate or None, least=least,
        )  # fmt: skip
        for when, counted in (("undisturbed", calm), ("faults", found)):
            bench.row(f"θ is the reference's, {name}, {when}", float(not counted.wrong), "", against="yes", of=1.0,
                      least=1.0 if name == "ours" else None)  # fmt: skip
            if counted.wrong:
                bench.note(f"θ of {name}, {when}: {counted.wrong}")
    bench.note(f"links of {LINK_MBIT:g} Mbit/s; a supervisor starts what was killed; peers have no servers to lose")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    parser.add_argument("--minutes", type=float, help="of the trace, from its beginning")
    parser.add_argument("--system", action="append", choices=SYSTEMS, help="all by default; may be repeated")
    parser.add_argument("--environments", type=Path, default=CACHE, metavar="DIRECTORY", help=f"of peers; {CACHE}")


if __name__ == "__main__":
    main("goodput", __doc__, measure, add_arguments)
