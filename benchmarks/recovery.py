"""How long a dead slave, master or cluster is missed, what that consists of, and what it costs the other clusters.

A run of real daemons over loopback, two slaves and two clusters that take inner steps of one length. One process is
killed with SIGKILL in the middle of its inner steps and started again at once, as a supervisor would: so nobody waits
for a lease, and what is measured is the process, not a deadline. Then a round is made, and the next one is killed.

Slave: until the master has it READY again with the head. Master: until it has heard every slave and every cluster.
Cluster: agent and trainer, until its first new inner step. The others' lost time: what their calls of `step` took in
which no push was under way (a round, made or skipped, is no lost time), from the kill to the next version. A call that
never gave the processor up waited for nobody: it was sent to the back of a busy machine's queue.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from benchmarks.harness import Bench, main
from benchmarks.lone_slave import equal_layers
from benchmarks.whole_run import WholeRun
from dips.commands.status import ask_status
from dips.errors import DipsError
from dips.protocol.manifest import Manifest
from dips.telemetry import timeline
from dips.transport.endpoints import master_peer

LAYERS, SLAVES, CLUSTERS = 16, 2, 2
STEP_S, INNER_STEPS = 0.1, 40  # H: 4 s of inner time, within which a process that is started at once is back
WINDOW_S = 0.3
HEARTBEAT_S = 1.0
WITHIN_S = 90.0
RUNS = 5
HEARD_S = 0.01  # between two looks at the status
PARTS = {
    "slave": ("process serves", "loaded, READY", "next version"),
    "master": ("process serves", "slaves READY", "clusters heard", "next version"),
    "cluster": ("trainer started", "trainer attached", "joined", "pulled", "first inner step"),
}
RECOVERED = {"slave": 2, "master": 3, "cluster": 5}  # so many of the parts are the recovery itself
Mark = Mapping[str, Any]


class RecoveryRun(WholeRun):
    """A run without an end, whose processes can be killed and started again."""

    def __init__(self, directory: Path, manifest: Manifest) -> None:
        super().__init__(directory, manifest, clusters=CLUSTERS, slaves=SLAVES, versions=0)

    def _run_file(self) -> dict[str, Any]:
        file = super()._run_file()
        file["master"]["timing"] = {"window_s": WINDOW_S}
        file["shared"]["heartbeat_s"] = HEARTBEAT_S
        return file

    def _keys(self, name: str) -> dict[str, Any]:
        return {"pace": {"steps": INNER_STEPS}}

    def _words(self, name: str) -> list[str]:
        layers = self._manifest.layers
        words = [name, str(len(layers)), str(layers[0].numel), str(STEP_S), str(self.meeting)]
        return ["benchmarks.recovery_rank", *words]

    def marks(self, who: str, kind: str, since: float = 0.0, **fields: object) -> list[Mark]:
        """Lines of a timeline after a time, by kind and fields."""
        path = self.timeline(who)
        lines = timeline.read_marks(path) if path.exists() else iter(())
        return [m for m in lines if m["kind"] == kind and m["at"] > since and fields.items() <= m.items()]

    def logged(self, name: str, event: str) -> float:
        """When the present life of a process logged an event."""
        for line in (self.directory / f"{name}.log").read_text(errors="replace").splitlines():
            with suppress(json.JSONDecodeError):
                said = json.loads(line)
                if said.get("event") == event:
                    return datetime.fromisoformat(said["timestamp"]).timestamp()
        raise ValueError(f"{name} has not logged {event}")

    def until(self, holds: Callable[[], Any], what: str) -> Any:
        """Wait; return what held; raise RuntimeError if it does not in time."""
        end = time.monotonic() + WITHIN_S
        while not (found := holds()):
            if time.monotonic() > end:
                raise RuntimeError(f"not within {WITHIN_S:g} s: {what}")
            time.sleep(HEARD_S)
        return found

    def status(self) -> dict[str, Any] | None:
        try:
            return asyncio.run(ask_status(master_peer(self._address, None), deadline_s=1.0))
        except DipsError:
            return None

    def next_version(self, since: float) -> float:
        """When the first version was committed after a time."""
        return float(self.until(lambda: self.marks("master", "version_committed", since), "a version")[0]["at"])

    def amid_inner_steps(self) -> None:
        """Return when both clusters have just begun their inner steps after a round."""
        seen = {name: self.marks(name, "pull_end") for name in self.clusters}
        self.until(
            lambda: all(len(self.marks(name, "pull_end")) > len(seen[name]) for name in self.clusters),
            "both clusters pull",
        )


def measure(bench: Bench) -> None:
    """Kill each role in turn, several times."""
    numel = (4_000_000 if bench.quick else bench.args.parameters) // LAYERS * LAYERS
    times: dict[str, list[list[float]]] = {role: [] for role in PARTS}
    lost: dict[str, list[float]] = {role: [] for role in PARTS}
    with (
        tempfile.TemporaryDirectory() as directory,
        RecoveryRun(Path(directory) / "run", equal_layers(numel, LAYERS)) as run,
    ):
        bench.say(f"{numel:,} parameters, {SLAVES} slaves, {CLUSTERS} clusters")
        run.next_version(0.0)
        for number in range(bench.runs if bench.quick else RUNS):
            for role, once in ROLES.items():
                run.amid_inner_steps()
                at, moments = once(run, number)
                parts = [after - before for before, after in zip((at, *moments), moments, strict=False)]
                times[role].append(parts)
                end = run.next_version(moments[-1]) if role == "cluster" else moments[-1]
                others = [name for name in run.clusters if role != "cluster" or name != run.clusters[1]]
                lost[role].append(max(_lost(run, name, at, end) for name in others))
                bench.say(f"{role}: {', '.join(f'{p:.2f}' for p in parts)} s; others lost {lost[role][-1]:.3f} s")
    for role in PARTS:
        _rows(bench, role, times[role], lost[role])
    bench.note(
        f"medians of {len(times['slave'])}; restarted at once; "
        f"heartbeats of {HEARTBEAT_S:g} s; inner steps of {STEP_S:g} s"
    )
    bench.note(
        "others lose: calls of `step` that wait with no push under way, from the kill to the next version; the worst"
    )


def slave_killed(run: RecoveryRun, number: int) -> tuple[float, list[float]]:
    """Kill a slave; return when, and the moments of its recovery."""
    name = run.slaves[number % SLAVES]
    at = run.kill(name)
    run.start(name)
    ready = run.until(lambda: run.marks("master", "slave_ready", at, slave=name), f"{name} is READY")[0]["at"]
    return at, [run.logged(name, "serving"), ready, run.next_version(ready)]


def master_killed(run: RecoveryRun, number: int) -> tuple[float, list[float]]:
    """Kill the master; until it has heard everybody."""
    at = run.kill("master")
    run.start("master")

    def heard() -> bool:
        status = run.status()
        known = (status or {}).get("clusters", {})
        return all("heard_s" in known.get(name, {}) for name in run.clusters)

    run.until(heard, "the master hears every cluster")
    clusters = time.time()
    ready = run.until(
        lambda: len(found := run.marks("master", "slave_ready", at)) >= SLAVES and found, "both slaves are READY"
    )[SLAVES - 1]["at"]
    served = run.logged("master", "serving")
    return at, [served, ready, max(ready, clusters), run.next_version(ready)]


def cluster_killed(run: RecoveryRun, number: int) -> tuple[float, list[float]]:
    """Kill an agent with its trainer; until the first call of `step` of the next trainer."""
    name = run.clusters[1]
    at = run.kill(name)
    run.start(name)
    pulled = run.until(lambda: run.marks(name, "pull_end", at, installed=True), f"{name} pulls")[0]["at"]
    call = run.until(lambda: [c for c in run.lines(name) if c["begun"] > pulled], f"{name} takes an inner step")[0]
    first = [run.marks(name, kind, at)[0]["at"] for kind in ("trainer_start", "trainer_attached", "joined")]
    return at, [*first, pulled, call["begun"]]


ROLES: dict[str, Callable[[RecoveryRun, int], tuple[float, list[float]]]] = {
    "slave": slave_killed,
    "master": master_killed,
    "cluster": cluster_killed,
}


def _lost(run: RecoveryRun, name: str, begin: float, end: float) -> float:
    """Seconds that a cluster stood still in calls of `step` without a push."""
    pushes = [m["at"] for m in run.marks(name, "push_begin", begin - WITHIN_S)]
    return lost_s([c for c in run.lines(name) if begin < c["ended"] and c["begun"] < end], pushes)


def lost_s(calls: Iterable[Mark], pushes: Sequence[float]) -> float:
    """What calls took that waited for something, and in which no push began."""
    quiet = [c for c in calls if c["waits"] and not any(c["begun"] <= at <= c["ended"] for at in pushes)]
    return float(sum(c["ended"] - c["begun"] for c in quiet))


def _rows(bench: Bench, role: str, times: list[list[float]], lost: list[float]) -> None:
    own = statistics.median(sum(parts[: RECOVERED[role]]) for parts in times)
    bench.row(f"{role} killed, recovered", own, "s")
    for k, part in enumerate(PARTS[role]):
        bench.row(f"  {part}", statistics.median(parts[k] for parts in times), "s")
    bench.row(
        f"others lost, {role} killed", max(statistics.median(lost), 1e-6), "s", against="one inner step", of=STEP_S,
        least=1.0, less=True,
    )  # fmt: skip


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--parameters", type=int, default=100_000_000)


if __name__ == "__main__":
    main("recovery", __doc__, measure, _arguments)
