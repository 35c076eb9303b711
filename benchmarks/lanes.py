"""Push and pull over encrypted lanes beside plain ones, per core: processor time of rank and slave for each GB.

The rank's side runs here (`dips.client.rank.transfer`), each slave's is the data flow of a `dips-slave` in a process of
its own, on loopback: one with keys, one plain. They take turns, run for run. Bytes count once. A rate per core is what
one core could move if nothing else limited it. The cipher is the one that the lanes themselves choose here.
"""

from __future__ import annotations

import itertools
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from benchmarks.cast import RUN, SINC, WAIT_S, Cast
from benchmarks.harness import Bench, Seconds, cpu_s, main
from benchmarks.line_program import LineProgram, open_programs
from benchmarks.namespaces import End
from dips.client.rank import transfer
from dips.client.rank.transfer import Piece, TransferIdentity
from dips.ids import GENESIS, VersionId
from dips.protocol.effects import Grant, SlaveAddress
from dips.transport import seal
from dips.transport.intake import CONCURRENT_STREAMS

LEAST = 0.8  # of the plain lane's rate per core, with AES in hardware
HERE = End("", "127.0.0.1")
WAYS = ("push", "pull")


@dataclass
class LaneWay:
    """One slave and this rank, over its lanes."""

    slave: LineProgram
    grant: Grant
    pieces: list[Piece]
    keys: seal.KeyPair
    numbers: itertools.count[int]
    used: dict[str, list[float]]

    def move(self, word: str) -> Seconds:
        """Move everything once; note the processor time of both ends, return the seconds."""
        number = next(self.numbers)
        moved, version = ("west", number), VersionId(number, number)
        before, begun = self._processor_s(), time.perf_counter()
        self.slave.ask_program(word, moved, [0], [self.keys.public])
        identity = TransferIdentity(RUN, "west", 1, number, 0, self.keys)
        getattr(transfer, f"{word}_pieces")(replace(self.grant, version=version), identity, self.pieces)
        took = Seconds(time.perf_counter() - begun)
        self.slave.ask_program("end", moved)
        self.used[word].append(self._processor_s() - before)
        return took

    def _processor_s(self) -> float:
        return cpu_s(self.slave.pid) + cpu_s(os.getpid())


def measure(bench: Bench) -> None:
    """One lane, and two."""
    mib = 64 if bench.quick else 512
    for lanes in (1, 2):
        bench.say(f"{mib} MiB, {lanes} lanes, {bench.runs} runs")
        _measure(bench, mib, lanes)
    bench.note("processor time: of both processes, kernel included; rate per core: its inverse")
    bench.note(f"cipher: {seal.CIPHERS[seal.fastest_cipher()].of_key.__name__}")


def _measure(bench: Bench, mib: int, lanes: int) -> None:
    cast = Cast(slaves=1, ranks=1, layers=4, numel=mib << 18)
    nbytes, what = cast.nbytes, f"{lanes} lane{'s' if lanes > 1 else ''}"
    with open_programs() as start:

        def begin(secret: str) -> LaneWay:
            words = (HERE.ip, str(CONCURRENT_STREAMS), str(lanes), secret)
            slave = start(HERE, "link_end", "slave", str(cast), "0", *words)
            addresses, public = slave.first
            grant = Grant(GENESIS, (SlaveAddress("s0", SINC, tuple(addresses), cast.held_by(0), public),), WAIT_S)
            pieces, used = cast.pieces(0, 1.0), {way: list[float]() for way in WAYS}
            return LaneWay(slave, grant, pieces, seal.new_keys(), itertools.count(1), used)

        ways = {secret: begin(secret) for secret in ("encrypted", "plain")}
        works: dict[str, Callable[[], object]] = {}
        for word in WAYS:
            for name, way in ways.items():
                works[f"{name} {word}"] = lambda way=way, word=word: way.move(word)  # type: ignore[misc]
        took = bench.together(works)
    for word in WAYS:
        own, plain = (statistics.median(ways[name].used[word][1:]) / nbytes for name in ("encrypted", "plain"))
        bench.row(f"encrypted {word}, {what}: rate", nbytes / took[f"encrypted {word}"], "B/s",
                  against="plain", of=nbytes / took[f"plain {word}"])  # fmt: skip
        bench.row(
            f"encrypted {word}, {what}: rate per core", 1 / own, "B/s", against="plain", of=1 / plain, least=LEAST
        )
        bench.row(
            f"encrypted {word}, {what}: processor time", 1e9 * own, "s/GB", against="plain", of=1e9 * plain, less=True
        )


if __name__ == "__main__":
    main("lanes", __doc__, measure)
