"""How long a real `dips-master` takes to start on a ledger of 999, 1,001 and 100,000 versions, and the memory of it.

The ledger is written by Ledger.write_records in the transactions in which a master writes it: a round is reserved,
clusters lease ranges, a version is committed with the folds, outcomes and statistics of four clusters on two slaves,
the version before the last one is retired. It lies on a tmpfs while it grows, since fsync of half a million
transactions is not what is measured; the master opens a copy of it on the disk.

Seconds are from the start of the process until its log says that it serves; memory is the peak of the process until
then (VmHWM), which the process on a ledger without versions shows without it. What the versions add to the seconds is
held against SQLite alone: its integrity_check, and a walk over every row, as fetched by Python.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from random import Random

import numpy as np
import yaml

from benchmarks.harness import Bench, main
from benchmarks.record import ROOT
from benchmarks.whole_run import free_port
from dips.commands.planning import MASTER_BYTES
from dips.config import RunFile, load_run
from dips.ids import GENESIS, PushId, VersionId
from dips.master import genesis
from dips.master.ledger import Ledger
from dips.outer_step import nesterov_step
from dips.protocol.enums import OutcomeKind, Role
from dips.protocol.records import (
    FoldRow,
    IncarnationGiven,
    OutcomeRow,
    PenaltyRow,
    RangesLeased,
    Record,
    RoundReserved,
    ScoreHistory,
    VersionCommitted,
    VersionsRetired,
)

VERSIONS = (999, 1_001, 100_000)
CLUSTERS, SLAVES = ("north", "east", "south", "west"), ("ps0", "ps1")
TOKENS, STEPS, RANGES = 4_000_000, 500, 4
KEPT = 2  # newest versions that are not retired
HISTORY = 50  # rounds in the score history
TMPFS = Path("/dev/shm")
START_S = 300.0
MOST_S = 60.0  # for 100,000 versions: 70 days of a round a minute, and a restart is not to be felt as an outage
MOST_BYTES = MASTER_BYTES  # what `dips plan memory` counts for a master
LEAST = 0.2  # what the versions add is at most five times what SQLite alone takes


class GrowingLedger:
    """The ledger of a run of four clusters that all push in each round."""

    def __init__(self, config: RunFile) -> None:
        layers = {f"layers.{i}.weight": np.ones(4, np.float32) for i in range(4)}
        genesis.make_run(config, layers)
        self._ledger = Ledger.open(genesis.ledger_path(config), wall=time.time)
        self._ledger.start_term()
        self._ledger.write_records([IncarnationGiven(Role.CLUSTER, name, 1, name) for name in CLUSTERS])
        self._ledger.write_records([IncarnationGiven(Role.SLAVE, name, 1, name) for name in SLAVES])
        self._rng, self._n = Random(1), 0

    def grow(self, versions: int) -> None:
        while self._n < versions:
            self._n += 1
            for transaction in self._round(self._n):
                self._ledger.write_records(transaction)

    def close(self) -> None:
        self._ledger.close()

    def _round(self, n: int) -> Iterator[list[Record]]:
        at = 60.0 * n
        yield [RoundReserved(n, at)]
        ranges = {name: tuple(range(at, at + RANGES)) for name, at in zip(CLUSTERS, self._first_ranges(n), strict=True)}
        for name, leased in ranges.items():
            yield [RangesLeased(name, 1, n, leased)]
        yield [self._version(n, ranges, at + 50.0)]
        if n > KEPT:
            yield [VersionsRetired((VersionId(n - KEPT, n - KEPT),))]

    @staticmethod
    def _first_ranges(n: int) -> list[int]:
        return [(n * len(CLUSTERS) + i) * RANGES for i in range(len(CLUSTERS))]

    def _version(self, n: int, ranges: dict[str, tuple[int, ...]], at: float) -> VersionCommitted:
        rng, version, parent = self._rng, VersionId(n, n), VersionId(n - 1, n - 1) if n > 1 else GENESIS
        norms = {name: rng.gauss(2.0, 0.1) for name in CLUSTERS}
        pushes = {name: PushId(name, 1, n + 1) for name in CLUSTERS}
        return VersionCommitted(
            version, parent, True,
            tuple(
                FoldRow(push, parent, TOKENS, STEPS, 1.0, norms[name], 0.5, rng.gauss(3.0, 0.1), ranges[name])
                for name, push in pushes.items()
            ),
            tuple(
                OutcomeRow(push, OutcomeKind.ACCEPTED, "", TOKENS, STEPS, norms[name], 0.5, ranges[name])
                for name, push in pushes.items()
            ),
            nesterov_step(0.25, 0.7, 0.9), 3.0 * rng.random(), False,
            tuple((slave, f"{rng.getrandbits(128):032x}") for slave in SLAVES),
            tuple(
                PenaltyRow(name, n, norm, 0.1, norm, 0, 0, False, n, norm, float(STEPS)) for name, norm in norms.items()
            ),
            ScoreHistory(tuple(rng.random() for _ in range(HISTORY)), tuple(rng.random() for _ in range(HISTORY))),
            at,
        )  # fmt: skip


def measure(bench: Bench) -> None:
    """One ledger that grows, and a master on a copy of it at each length."""
    lengths = VERSIONS[:-1] if bench.quick else VERSIONS
    with tempfile.TemporaryDirectory(dir=TMPFS) as growing, tempfile.TemporaryDirectory() as disk:
        config = _write_run(Path(growing))
        ledger = GrowingLedger(config)
        empty_s, empty_bytes = _start_master(config, Path(disk) / "0")
        bench.row("start, no version", empty_s, "s")
        bench.row("memory of no version", empty_bytes, "B")
        for versions in lengths:
            bench.say(f"{versions:,} versions")
            begun = time.perf_counter()
            ledger.grow(versions)
            bench.say(f"written in {time.perf_counter() - begun:.1f} s")
            took_s, peak = _start_master(config, Path(disk) / str(versions))
            read_s = _read_plainly(genesis.ledger_path(config))
            least = 1.0 if versions == max(VERSIONS) else None
            bench.row(f"start, {versions:,} versions", took_s, "s", against="limit", of=MOST_S, least=least, less=True)
            bench.row(
                f"more than with none, {versions:,} versions", took_s - empty_s, "s",
                against="SQLite alone", of=read_s, least=least and LEAST, less=True,
            )  # fmt: skip
            bench.row(
                f"memory, {versions:,} versions", peak, "B", against="limit", of=MOST_BYTES, least=least, less=True
            )
            bench.row(f"file, {versions:,} versions", _file_bytes(config), "B")
        ledger.close()


def _write_run(directory: Path) -> RunFile:
    file = directory / "dips.yaml"
    slaves = [
        {"name": name, "master": "127.0.0.1:1", "directory": name, "initial_model": "m/initial"} for name in SLAVES
    ]
    run = {
        "shared": {"run": "long"}, "tls": False, "slaves": slaves,
        "master": {"directory": "m", "listen": f"127.0.0.1:{free_port()}"},
    }  # fmt: skip
    file.write_text(yaml.safe_dump(run))
    return load_run(file)


def _file_bytes(config: RunFile) -> float:
    return float(genesis.ledger_path(config).stat().st_size)


def _read_plainly(path: Path) -> float:
    """Seconds in which SQLite checks the file and gives every row of it."""
    with closing(sqlite3.connect(path)) as db:
        begun = time.perf_counter()
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        for (table,) in db.execute("SELECT name FROM sqlite_schema WHERE type = 'table'").fetchall():
            for _ in db.execute(f"SELECT * FROM {table}"):
                pass
        return time.perf_counter() - begun


def _start_master(config: RunFile, place: Path) -> tuple[float, float]:
    """Copy the run to the disk and start its master; return its seconds until it serves, and its peak memory."""
    source = config.master.directory.parent
    with _run_copied(source, place) as file:
        begun = time.perf_counter()
        with (place / "log").open("wb") as log:
            command = [sys.executable, "-m", "dips.master.app", "--config", str(file)]
            master = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)
        try:
            while b"serving" not in (place / "log").read_bytes():
                if master.poll() is not None or time.perf_counter() - begun > START_S:
                    raise RuntimeError((place / "log").read_text()[-3000:])
                time.sleep(0.01)
            took_s = time.perf_counter() - begun
            peak = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{master.pid}/status").read_text())
            assert peak is not None
            return took_s, float(peak[1]) * 1024
        finally:
            master.send_signal(signal.SIGTERM)
            master.wait(60)


@contextmanager
def _run_copied(source: Path, place: Path) -> Iterator[Path]:
    """A copy of a run, its ledger with what is in the WAL; gone when the block ends."""
    shutil.copytree(source, place, ignore=shutil.ignore_patterns("ledger.sqlite*"))
    with closing(Ledger.open(source / "m" / genesis.LEDGER, readonly=True)) as ledger:
        ledger.copy_to(place / "m" / genesis.LEDGER)
    os.sync()
    try:
        yield place / "dips.yaml"
    finally:
        shutil.rmtree(place)


if __name__ == "__main__":
    main("ledger_start", __doc__, measure)
