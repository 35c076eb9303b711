"""Resident memory of a real slave process during rounds of 1 to 4 contributions, beside the sum that it printed.

The slave is a `dips-slave` under a scripted master; pushes are real transfers of a rank in this process, as many at
once as there are slots; with a pinned version a pull of the older one stays open over every commit. The value is the
most memory that ever was resident (VmHWM), from the start of the process to its end.
"""

from __future__ import annotations

import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.harness import Bench, main
from benchmarks.lone_slave import LoneSlave, equal_layers
from benchmarks.rank import BenchRank
from dips.ids import GENESIS, VersionId
from dips.outer_step import nesterov_step
from dips.protocol.effects import Apply, ClosePull, Commit, Fold, Measure, Persist, Retire

LAYERS = 16
CONTRIBUTIONS = (1, 2, 3, 4)
AT_MOST = 1.05  # times the printed sum
DEADLINE_S = 60.0


def measure(bench: Bench) -> None:
    """Slots 1 and 2, pinned 0 and 1."""
    numel = 20_000_000 if bench.quick else 200_000_000
    for slots in (1, 2):
        for pinned in (0, 1):
            bench.say(f"{numel:,} parameters, {slots} slots, {pinned} pinned: rounds of {CONTRIBUTIONS} contributions")
            _measure(bench, numel, slots, pinned)
    bench.note("peak: VmHWM of the process over its whole incarnation; the ratio is sum ÷ peak, at least 1/1.05")


def _measure(bench: Bench, numel: int, slots: int, pinned: int) -> None:
    with (
        tempfile.TemporaryDirectory() as directory,
        LoneSlave(Path(directory), equal_layers(numel, LAYERS), slots=slots, pinned=pinned) as slave,
    ):
        promised = slave.memory_sum
        assert slave.printed_sum() == promised.describe_sum(), "the slave prints another sum"
        rank, idle = BenchRank(slave), slave.resident()
        version = GENESIS
        for contributions in CONTRIBUTIONS:
            version = outer_step(slave, rank, version, contributions, slots, pinned)
        rank.pull(version)
        peak = slave.peak()
    what = f"{slots} slots, {pinned} pinned"
    bench.row(f"idle, {what}", float(idle), "B")
    bench.row(
        f"peak, {what}", float(peak), "B",
        against="the printed sum", of=float(promised.total_bytes), least=1 / AT_MOST, less=True,
    )  # fmt: skip
    pool = f"{promised.per_parameter} B a parameter"
    bench.row(f"peak above the pool, {what}", float(peak - promised.pool_bytes), "B", against=pool)


def outer_step(
    slave: LoneSlave, rank: BenchRank, version: VersionId, contributions: int, slots: int, pinned: int
) -> VersionId:
    """Take one whole outer step; return the version that it made."""
    made = VersionId(version.version + 1, version.round + 1)
    reader = slave.next_pull("reader")
    if pinned:
        slave.open_pull(reader, version)
    pushes = [slave.next_push(f"c{i}") for i in range(contributions)]
    for begin in range(0, contributions, slots):
        some = pushes[begin : begin + slots]
        with ThreadPoolExecutor(slots) as clusters:
            list(clusters.map(rank.bring, some))
        for push in some:
            slave.order(Measure(made.round, push, version))
            slave.order(Fold(made.round, push, 1.0))
    slave.order(Apply(made.round, made, nesterov_step(1 / contributions, 0.7, 0.8)))
    slave.order(Persist(made))
    slave.order(Commit(made, ()))
    if pinned:
        slave.order(ClosePull(reader))
    slave.order(Retire((version,)))
    return made


if __name__ == "__main__":
    main("memory", __doc__, measure)
