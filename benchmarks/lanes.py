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
from dataclasses import dataclass

import numpy as np

from benchmarks import link_end
from benchmarks.harness import Bench, Seconds, cpu_s, main
from benchmarks.line_program import LineProgram, open_programs
from benchmarks.namespaces import End
from dips.client.rank import transfer
from dips.client.rank.transfer import Piece, TransferIdentity
from dips.ids import GENESIS
from dips.protocol.effects import Grant, SlaveAddress
from dips.transport import seal

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
        before, begun = self._processor_s(), time.perf_counter()
        self.slave.ask_program(word, number)
        identity = TransferIdentity(link_end.RUN, link_end.CLUSTER, 1, number, 0, self.keys)
        getattr(transfer, f"{word}_pieces")(self.grant, identity, self.pieces)
        took = Seconds(time.perf_counter() - begun)
        self.slave.ask_program("end", number)
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
    bench.note(f"cipher: {seal.CIPHERS[seal.fastest_cipher()].__name__}")


def _measure(bench: Bench, mib: int, lanes: int) -> None:
    nbytes, what = mib << 20, f"{lanes} lane{'s' if lanes > 1 else ''}"
    with open_programs() as start:

        def begin(secret: bool) -> LaneWay:
            keys = seal.new_keys()
            words = [keys.public] if secret else []
            slave = start(HERE, "link_end", "slave", "127.0.0.1", str(lanes), str(mib), *words)
            addresses, _, public = slave.first.partition(" ")
            layers = tuple(range(link_end.LAYERS))
            there = SlaveAddress(link_end.SLAVE, link_end.SINC, tuple(addresses.split(",")), layers, public)
            model = link_end.manifest(mib)
            pieces = [Piece(i, 0, 0, x.numel, np.ones(x.numel, np.float32)) for i, x in enumerate(model.layers)]
            grant = Grant(GENESIS, (there,), link_end.WAIT_S)
            return LaneWay(slave, grant, pieces, keys, itertools.count(1), {way: [] for way in WAYS})

        ways = {"encrypted": begin(True), "plain": begin(False)}
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
