"""A version's snapshot beside the disk's own sequential write and fsync of as many bytes in the same run.

The snapshot is the slave's (`dips.slave.snapshots`: safetensors and manifest, digests, fsync of files and directories,
rename); the disk's own is one file of as many bytes, written in 8 MiB pieces and fsynced, through the page cache and
past it (O_DIRECT): the faster of the two counts. All in the same directory, in turn, each over a file system that was
synced before.

A slave's start is measured on a directory of two versions and on one of a hundred, out of the page cache: until it
knows what it may tell its master.

The study: what writing the folded sum (4 B a parameter, replayed bit for bit by Apply) with a full snapshot (8 B)
every k versions would take instead, to write and to recover.
"""

from __future__ import annotations

import argparse
import mmap
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import structlog

from benchmarks.harness import Bench, Seconds, main
from benchmarks.lone_slave import equal_layers
from dips.ids import VersionId
from dips.outer import kernels
from dips.outer.kernel_pool import KernelPool
from dips.outer.pool import BYTES, Arrays, Pool
from dips.outer_step import nesterov_step
from dips.protocol.manifest import Manifest
from dips.slave.snapshots import Snapshots
from dips.store import tensorfile

LAYERS = 16
LEAST = 0.8
PIECE = 8 << 20  # bytes of one write of the disk's own
EVERY = (2, 4, 8)  # k
VERSION = VersionId(1, 1)  # the one that is recovered
FEW, MANY = 2, 100  # versions on the disk of a slave that starts
AS_FAST = 0.8  # of the speed with FEW
KEPT_NUMEL = 1 << 20  # of each of them


def measure(bench: Bench) -> None:
    """Snapshot, plain write and sum in turn; then a recovery of both kinds."""
    numel = 1 << 24 if bench.quick else 1 << 27
    manifest = equal_layers(numel, LAYERS)
    pool = Pool({i: layer.numel for i, layer in enumerate(manifest.layers)}, 4)
    for bank in pool.banks:
        for array in bank.arrays.values():
            array[:] = np.random.default_rng(bank.number).standard_normal(array.size, np.float32)
    theta, momentum, acc, theta_next = (bank.arrays for bank in pool.banks)
    with tempfile.TemporaryDirectory(dir=bench.args.directory, prefix="dips-bench-") as made:
        directory = Path(made)
        disk = _snapshots(directory / "ps0", manifest)
        bench.say(f"{8 * numel / 1e9:.2f} GB a snapshot, {bench.runs} runs, in {directory}")
        plain, folded = directory / "plain", directory / "sum"
        took = bench.together(
            {
                "snapshot": partial(_snapshot, disk, theta, momentum),
                "plain": lambda: _timed(lambda: _write(plain, [theta, momentum]), plain),
                "direct": lambda: _timed(lambda: _write_direct(plain, 2 * BYTES * numel), plain),
                "sum": lambda: _timed(lambda: _write_sum(folded, manifest, acc)),
            },
            runs=2 * bench.runs + 1,
        )
        read = _recovery(bench.runs, disk, folded, manifest, [theta, momentum, acc, theta_next])
        disk.close()
        started = _starts(bench, directory)
    full = 2.0 * BYTES * numel
    own = full / min(took["plain"], took["direct"])
    bench.row("disk, through the page cache", full / took["plain"], "B/s")
    bench.row("disk, past the page cache", full / took["direct"], "B/s")
    bench.row("snapshot", full / took["snapshot"], "B/s", against="the disk's own write", of=own, least=LEAST)
    bench.row("folded sum", full / 2 / took["sum"], "B/s", against="the disk's own write", of=own)
    what = f"a slave's start, {MANY} versions kept"
    bench.row(what, started[MANY], "s", against=f"{FEW} kept", of=started[FEW], least=AS_FAST, less=True)
    for k in EVERY:
        average = (took["snapshot"] + (k - 1) * took["sum"]) / k
        worst = read["full"] + (k - 1) * read["replay"]
        what = f"study, full every {k}"
        bench.row(f"{what}: bytes a version", BYTES * (1 + 1 / k), "B/parameter", against="full each", of=8, less=True)
        bench.row(f"{what}: time a version", average, "s", against="full each", of=took["snapshot"], less=True)
        bench.row(f"{what}: recovery at worst", worst, "s", against="full each", of=read["full"], less=True)
    bench.note(
        "recovery: files out of the page cache; a snapshot is read and its digests compared, a sum read and applied"
    )


def _snapshots(directory: Path, manifest: Manifest) -> Snapshots:
    disk = Snapshots(directory, "bench", "ps0", directory / "none", structlog.get_logger())
    layers = range(len(manifest.layers))
    disk.bind_layers(manifest, layers, [""] * len(layers), 1)
    return disk


def _snapshot(disk: Snapshots, theta: Arrays, momentum: Arrays) -> Seconds:
    disk.delete_snapshots((VERSION,))
    return _timed(lambda: disk.write_snapshot(VERSION, theta, momentum))


def _starts(bench: Bench, directory: Path) -> dict[int, float]:
    """Median seconds until a slave knows what its disk holds, by the number of versions there."""
    manifest = equal_layers(KEPT_NUMEL, LAYERS)
    theta = {i: np.random.default_rng(i).standard_normal(x.numel, np.float32) for i, x in enumerate(manifest.layers)}
    for kept in (FEW, MANY):
        disk = _snapshots(directory / f"kept{kept}", manifest)
        for number in range(1, kept + 1):
            disk.write_snapshot(VersionId(number, number), theta, theta)
        disk.close()

    def start(kept: int) -> Seconds:
        def look() -> None:
            disk = Snapshots(directory / f"kept{kept}", "bench", "ps0", directory / "none", structlog.get_logger())
            named = len(disk.complete_versions()) + len(disk.unread_versions())
            disk.close()
            if named != kept:
                raise RuntimeError(f"expected {kept} versions, the slave named {named}")

        return Seconds(_cold(look, *directory.glob(f"kept{kept}/*/*.safetensors")))

    took = bench.together({str(kept): partial(start, kept) for kept in (FEW, MANY)}, runs=2 * bench.runs + 1)
    return {kept: took[str(kept)] for kept in (FEW, MANY)}


def _timed(work: Callable[[], object], remove: Path | None = None) -> Seconds:
    """Seconds of `work` over a file system with nothing left to write."""
    os.sync()
    begun = time.perf_counter()
    work()
    took = Seconds(time.perf_counter() - begun)
    if remove is not None:
        remove.unlink()
    return took


def _write(path: Path, banks: Sequence[Arrays]) -> None:
    with path.open("wb", buffering=0) as file:
        for arrays in banks:
            for array in arrays.values():
                view = array.view(np.uint8).data
                for at in range(0, len(view), PIECE):
                    file.write(view[at : at + PIECE])
        os.fsync(file.fileno())


def _write_direct(path: Path, nbytes: int) -> None:
    """Past the page cache, from one aligned piece of random bytes again and again."""
    with mmap.mmap(-1, PIECE) as piece:
        piece.write(np.random.default_rng(0).bytes(PIECE))
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | getattr(os, "O_DIRECT", 0))
        try:
            for _ in range(nbytes // PIECE):
                os.write(fd, piece)
            os.fsync(fd)
        finally:
            os.close(fd)


def _write_sum(path: Path, manifest: Manifest, acc: Arrays) -> None:
    shapes = [(p.name, p.shape) for layer in manifest.layers for p in layer.parameters]
    tensorfile.write_tensors(path, {}, shapes, acc.values())


def _recovery(
    runs: int, disk: Snapshots, folded: Path, manifest: Manifest, banks: Sequence[Arrays]
) -> dict[str, float]:
    """Median seconds to read a full snapshot, and to read one sum and replay it: each of up to k − 1 adds that."""
    theta, momentum, acc, theta_next = banks
    kernels.warm_up()
    workers, steps = os.cpu_count() or 1, dict.fromkeys(theta, nesterov_step(1.0, 0.7, 0.8))

    def replay() -> None:
        with tensorfile.Reader(folded) as reader:
            for i, layer in enumerate(manifest.layers):
                reader.read_into(layer.parameters[0].name, layer.parameters[0].shape, acc[i])
        kernel_pool.apply(theta, acc, momentum, steps, theta_next)

    with ThreadPoolExecutor(workers, "kernel") as threads:
        kernel_pool = KernelPool(kernels, threads, workers)
        again = {"full": lambda: disk.read_snapshot(VERSION, theta, momentum), "replay": replay}
        files = (folded, *folded.parent.glob("ps0/*/*.safetensors"))
        return {name: statistics.median(_cold(work, *files) for _ in range(runs)) for name, work in again.items()}


def _cold(work: Callable[[], object], *files: Path) -> float:
    """Seconds of `work` with the files out of the page cache."""
    for path in files:
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def arguments(parser: argparse.ArgumentParser) -> None:
    """What only this benchmark is told."""
    parser.add_argument("--directory", type=Path, help="on the disk to measure; default: the temporary directory")


if __name__ == "__main__":
    main("persist", __doc__, measure, arguments)
