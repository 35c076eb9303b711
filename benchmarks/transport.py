"""Push into and pull from a real slave process over loopback, every check on, beside bare ZeroMQ and gRPC streaming.

The rank's side runs here (`dips.client.rank.transfer`), the slave is a `dips-slave` process with its memory, lanes and
its control server under a scripted master. Bytes count once. A push is timed from HELLO to the last DONE (all bytes
are checked and in the slot), a pull from HELLO until every byte is checked and in the caller's array. A slave remembers
the checksums of a version's chunks: `first pull` is one for which it has to make them all, `pull` one for which it made
them before; the harder one is held, too.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from benchmarks.bare import BareZmq, GrpcStream
from benchmarks.harness import Bench, cpu_s, main
from benchmarks.lone_slave import LoneSlave, equal_layers
from benchmarks.rank import BenchRank
from dips.outer.pool import BYTES

LAYERS = 8
KIB = 1 << 10
DEFAULT_CHUNK = 1024 * KIB
LEAST = {"push": 0.6, "pull": 0.7, "first pull": 0.7}
TIMES_GRPC = 2.0


def measure(bench: Bench) -> None:
    """Every chunk size with every number of lanes."""
    nbytes = (64 if bench.quick else 256) << 20
    for chunk_bytes in (256 * KIB, DEFAULT_CHUNK):
        for lanes in (1, 2):
            bench.say(f"{nbytes >> 20} MiB in chunks of {chunk_bytes // KIB} KiB, {lanes} lanes, {bench.runs} runs")
            _measure(bench, nbytes, chunk_bytes, lanes)
    bench.note("bare ZeroMQ: PUSH → PULL of the same messages on as many lanes, no checks, received and dropped")
    bench.note(
        "checked bare ZeroMQ: with the checksum made and compared, and the copy into place: what the checks leave"
    )
    bench.note("first pull: in chunks that nobody has pulled; pull: the slave remembers their checksums")
    bench.note("gRPC: one stream of the same chunks as protobuf messages, checksums on both ends, copied into place")
    bench.note("raw gRPC: one stream of the same chunks as bare bytes, no protobuf, no checks, received and dropped")
    bench.note(
        "processor time: of both processes, kernel included; a rate of 1/(s/GB) × cores is all that cores can give"
    )
    bench.note("held at the default chunk of 1 MiB; smaller ones are shown")


def _measure(bench: Bench, nbytes: int, chunk_bytes: int, lanes: int) -> None:
    manifest = equal_layers(nbytes // BYTES, LAYERS)
    with (
        tempfile.TemporaryDirectory() as directory,
        LoneSlave(Path(directory), manifest, chunk_bytes=chunk_bytes, lanes=["127.0.0.1:0"] * lanes) as slave,
        BareZmq(nbytes, chunk_bytes, lanes) as bare,
        GrpcStream(nbytes, chunk_bytes) as stream,
    ):
        rank = BenchRank(slave)
        took = bench.together(
            {
                "push": rank.push, "bare push": bare.push, "raw gRPC push": stream.push,
                "first pull": rank.pull_first,
                "pull": rank.pull, "bare pull": bare.pull, "raw gRPC pull": stream.pull,
                "checked push": bare.push_checked, "checked pull": bare.pull_checked,
                "gRPC push": stream.push_checked, "gRPC pull": stream.pull_checked,
            }
        )  # fmt: skip
        used = {
            name: processor_s(work, peer, bench.runs)
            for name, work, peer in (
                ("push", rank.push, slave.pid), ("bare push", bare.push, bare.pid),
                ("pull", rank.pull, slave.pid), ("bare pull", bare.pull, bare.pid),
                ("first pull", rank.pull_first, slave.pid),
                ("checked push", bare.push_checked, bare.pid), ("checked pull", bare.pull_checked, bare.pid),
            )
        }  # fmt: skip
    what = f"{chunk_bytes // KIB} KiB, {lanes} lane{'s' if lanes > 1 else ''}"
    held = chunk_bytes == DEFAULT_CHUNK
    for kind, least in LEAST.items():
        name, way = f"{kind}, {what}", kind.split()[-1]
        rate = nbytes / took[kind]
        bare_rate, checked, raw, like = (nbytes / took[f"{p} {way}"] for p in ("bare", "checked", "raw gRPC", "gRPC"))
        bench.row(name, rate, "B/s", against="bare ZeroMQ", of=bare_rate, least=least if held else None)
        bench.row(name, rate, "B/s", against="checked bare ZeroMQ", of=checked)
        bench.row(name, rate, "B/s", against="gRPC", of=like, least=TIMES_GRPC if held else None)
        bench.row(name, rate, "B/s", against="raw gRPC", of=raw)
        own, plain = (1e9 * used[key] / nbytes for key in (kind, f"bare {way}"))
        bench.row(f"{name}: processor time", own, "s/GB", against="bare ZeroMQ", of=plain, less=True)
    for way in ("push", "pull"):
        bare_rate, checked, raw = (nbytes / took[f"{p} {way}"] for p in ("bare", "checked", "raw gRPC"))
        name = f"checked bare ZeroMQ {way}, {what}"
        bench.row(name, checked, "B/s", against="bare ZeroMQ", of=bare_rate)
        own, plain = (1e9 * used[f"{p} {way}"] / nbytes for p in ("checked", "bare"))
        bench.row(f"{name}: processor time", own, "s/GB", against="bare ZeroMQ", of=plain, less=True)
        bench.row(f"bare ZeroMQ {way}, {what}", bare_rate, "B/s", against="raw gRPC", of=raw)


def processor_s(work: Callable[[], object], peer: int, runs: int) -> float:
    """Seconds of processor time that one `work` costs this process and its peer together."""
    before = cpu_s(peer) + cpu_s(os.getpid())
    for _ in range(runs):
        work()
    return (cpu_s(peer) + cpu_s(os.getpid()) - before) / runs


if __name__ == "__main__":
    main("transport", __doc__, measure)
