"""What a master costs at 1,000 clusters and 1,000 slaves: the deciding part alone, in one process, on one core.

The real MasterCore, Coordinator and Judge (scale_run.py) under scripted peers that answer at once. The whole life of a
push is all its events, from request to the end of the pull after it: eight orders to each slave, and their answers. A
heartbeat is judged, answered and weighed; a slave's says which list of what is live it has. The wire and the ledger's
disk are not in it, but what is said and written is counted in bytes. The journal's thread is measured apart.
"""

from __future__ import annotations

import gc
import time
import tracemalloc
from collections.abc import Callable

from benchmarks.harness import Bench, main
from benchmarks.scale_run import ScaleRun
from dips.master.journal import JournalStep, spell_step
from dips.protocol import codec
from dips.protocol.effects import Grant
from dips.protocol.heartbeats import SlaveHeartbeatAnswer
from dips.protocol.records import VersionCommitted
from dips.wire.messages import to_proto

CLUSTERS = 1_000  # and as many slaves
QUICK = 100
LAYERS_EACH = 4  # layers of a slave
MOST_LIFE_S, MOST_HEARTBEAT_S = 0.25, 100e-6  # what these must stay below, at 1,000 × 1,000
RANKS = 8
PULLING = 20  # clusters that pull while heartbeats are measured
LEDGER_CLUSTERS = (10, 100, 1_000)
LEDGER_SLAVES, ROUNDS = 10, 60  # more rounds than any history keeps


def measure(bench: Bench, many: int = 0, ledger_clusters: tuple[int, ...] = ()) -> None:
    """Lives, heartbeats, waiting, pulling, bytes, memory, rows; smaller only for a test."""
    many = many or (QUICK if bench.quick else CLUSTERS)
    bench.say(f"{many} clusters, {many} slaves")
    run = ScaleRun(many, many, LAYERS_EACH * many)
    run.beat_all(1)
    _lives(bench, run)
    _heartbeats(bench, run)
    _waiting(bench, run)
    _pulling(bench, run)
    _aligned(bench, run)
    _memory(bench, many)
    _rows(bench, ledger_clusters or (LEDGER_CLUSTERS[:2] if bench.quick else LEDGER_CLUSTERS))
    bench.note(f"all of it at {many} clusters and {many} slaves, each with {LAYERS_EACH} layers, on one core")


def _timed(run: ScaleRun, work: Callable[[], object]) -> float:
    """Seconds of the core in this work."""
    before = sum(run.took.values())
    work()
    return sum(run.took.values()) - before


def _lives(bench: Bench, run: ScaleRun) -> None:
    lives = []
    run.took.clear()
    run.count.clear()
    for number in range(bench.runs):
        bench.say(f"life {number + 1} of {bench.runs}")
        lives.append(_timed(run, lambda cluster=run.clusters[number]: run.live_push(cluster, 2)))  # type: ignore[misc]
    kinds = sorted(run.took, key=lambda kind: -run.took[kind])
    for kind in kinds:
        if run.count[kind] >= len(run.slaves):
            bench.row(f"event: {kind}", run.took[kind] / run.count[kind], "s")
    _below(bench, "a push's whole life", sorted(lives)[len(lives) // 2], MOST_LIFE_S)
    run.journaled = True
    run.live_push(run.clusters[bench.runs], 2)
    run.journaled = False
    begun = time.perf_counter()
    spelled = [spell_step(step) for step in map(JournalStep._make, run.steps)]
    bench.row("journal of a push's life", time.perf_counter() - begun, "s")
    bench.row("journal, a line", sum(map(len, spelled)) / len(spelled), "B")


def _heartbeats(bench: Bench, run: ScaleRun) -> None:
    bench.say("heartbeats")
    for kind, beat in (("a cluster", lambda: _beat_clusters(run)), ("a slave", lambda: _beat_slaves(run))):
        _below(bench, f"heartbeat of {kind}", _timed(run, beat) / len(run.slaves), MOST_HEARTBEAT_S)


def _beat_clusters(run: ScaleRun, aligned: int = 0) -> None:
    for cluster in run.clusters:
        run.beat_cluster(cluster, 50, aligned)


def _beat_slaves(run: ScaleRun, **known: int) -> SlaveHeartbeatAnswer | None:
    answers = [run.beat_slave(slave, **known) for slave in run.slaves]
    return answers[-1] if answers else None


def _waiting(bench: Bench, run: ScaleRun) -> None:
    """Every cluster asks for a slot, again and again: all but a few are told to wait."""
    asking = run.clusters[2 * bench.runs :]
    bench.say(f"{len(asking)} clusters ask for {run.slots} slots")
    for cluster in asking:
        run.open_push(cluster, 2)
    took = _timed(run, lambda: [run.open_push(cluster, 3) for cluster in asking[run.slots :]])
    _below(bench, "ask for a slot while all wait", took / len(asking[run.slots :]), MOST_HEARTBEAT_S)
    for cluster in asking:
        run.abort_push(cluster, 2)
    run.answer_orders()


def _pulling(bench: Bench, run: ScaleRun) -> None:
    """While some pull: what a slave is told when it has another list, and when it has the present one."""
    bench.say(f"{PULLING} clusters pull")
    granted = [run.open_pull(cluster, 9, RANKS) for cluster in run.clusters[:PULLING]]
    first = _beat_slaves(run)
    assert isinstance(first, SlaveHeartbeatAnswer) and first.live is not None
    whole, number = len(to_proto(first).SerializeToString()), first.live.number
    again = _beat_slaves(run, live=number)
    bench.row("heartbeat's answer, another list", whole, "B")
    bench.row("heartbeat's answer, the same list", len(to_proto(again).SerializeToString()), "B")
    seconds = bench.together({"first": lambda: to_proto(first), "again": lambda: to_proto(again)}, runs=50)
    bench.row("spell it, another list", seconds["first"], "s")
    bench.row("spell it, the same list", seconds["again"], "s")
    grant = granted[-1]
    assert isinstance(grant, Grant)
    bench.row(f"a grant, {RANKS} ranks", len(to_proto(grant).SerializeToString()), "B")
    bench.row("spell a grant", bench.together({"grant": lambda: to_proto(grant)}, runs=20)["grant"], "s")


def _aligned(bench: Bench, run: ScaleRun) -> None:
    bench.say("aligned pace")
    _beat_clusters(run, aligned=64)
    took = _timed(run, lambda: _beat_clusters(run, aligned=64)) / len(run.clusters)
    _below(bench, "heartbeat of a cluster, aligned", took, MOST_HEARTBEAT_S)


def _memory(bench: Bench, many: int) -> None:
    bench.say("memory")
    base = _traced(10, 10)
    bench.row("memory of a cluster", (_traced(many, 10) - base) / (many - 10), "B")
    bench.row("memory of a slave, its layers too", (_traced(10, many) - base) / (many - 10), "B")


def _traced(clusters: int, slaves: int) -> int:
    """Bytes that a run holds after everybody's first heartbeats."""
    gc.collect()
    tracemalloc.start()
    run = ScaleRun(clusters, slaves, LAYERS_EACH * slaves)
    run.beat_all(1)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return held


def _rows(bench: Bench, sizes: tuple[int, ...]) -> None:
    """What a commit writes when all histories are full."""
    first = 0
    for clusters in sizes:
        bench.say(f"rows with {clusters} clusters")
        run = ScaleRun(clusters, LEDGER_SLAVES, LEDGER_SLAVES)
        run.beat_all(1)
        for number in range(ROUNDS):
            run.live_push(run.clusters[number % clusters], 2 + number)
        run.records.clear()
        run.live_push(run.clusters[0], 2 + ROUNDS)
        (commit,) = (record for record in run.records if isinstance(record, VersionCommitted))
        size = len(codec.encode_text(commit))
        first = first or size
        name = f"row of a commit, {clusters} clusters"
        bench.row(name, size, "B", against=f"{sizes[0]} clusters", of=first, least=0.9, less=True)


def _below(bench: Bench, name: str, value: float, most: float) -> None:
    bench.row(name, value, "s", against="at most", of=most, least=1.0, less=True)


if __name__ == "__main__":
    main("scale", __doc__, measure)
