"""Push and pull over encrypted lanes beside plain ones, per core: processor time of rank and slave for each GB.

The rank's side runs here (`dips.client.rank.transfer`), each slave's is the data flow of a `dips-slave` in a process of
its own, on loopback: one with keys, whose ranks ZAP asks, one plain. They take turns, run for run. Bytes count once. A
rate per core is what one core could move if nothing else limited it. AES-GCM is what the plain lane would come to if
each frame were sealed and opened by `cryptography` as well: the library's calls alone, without copies or a protocol.
"""

from __future__ import annotations

import itertools
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from benchmarks import link_end
from benchmarks.harness import Bench, Seconds, cpu_s, main
from benchmarks.line_program import LineProgram, open_programs
from benchmarks.namespaces import End
from dips.client.rank import transfer
from dips.client.rank.transfer import Piece, TransferIdentity
from dips.ids import GENESIS
from dips.protocol.effects import Grant, SlaveAddress
from dips.transport import curve
from dips.transport.memory import keep_message_memory

LEAST = 0.3  # of the plain lane's rate per core; CURVE has 0.35 to 0.40 on two cores: benchmarks/README.md
FRAME_BYTES = 1 << 20
AES_FRAMES = 256
HERE = End("", "127.0.0.1")
WAYS = ("push", "pull")


@dataclass
class LaneWay:
    """One slave and this rank, over its lanes."""

    slave: LineProgram
    grant: Grant
    pieces: list[Piece]
    keys: curve.KeyPair
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
    keep_message_memory()  # as every transfer does; else each frame costs page faults, three times what AES costs
    sealed = _aes_gcm_s(AES_FRAMES // 4 if bench.quick else AES_FRAMES)
    for lanes in (1, 2):
        bench.say(f"{mib} MiB, {lanes} lanes, {bench.runs} runs")
        _measure(bench, mib, lanes, sealed)
    bench.note("processor time: of both processes, kernel included; rate per core: its inverse")
    bench.note("CURVE: CurveZMQ of the pyzmq wheel (libsodium's XSalsa20-Poly1305), in libzmq's I/O threads")
    bench.note(f"AES-GCM: {1e9 * sealed / FRAME_BYTES:.3f} s/GB to seal and open frames of 1 MiB, one thread, this run")


def _measure(bench: Bench, mib: int, lanes: int, sealed: float) -> None:
    nbytes, what = mib << 20, f"{lanes} lane{'s' if lanes > 1 else ''}"
    with open_programs() as start:

        def begin(secret: bool) -> LaneWay:
            keys = curve.new_keys()
            words = [keys.public] if secret else []
            slave = start(HERE, "link_end", "slave", "127.0.0.1", str(lanes), str(mib), *words)
            addresses, _, public = slave.first.partition(" ")
            layers = tuple(range(link_end.LAYERS))
            there = SlaveAddress(link_end.SLAVE, link_end.SINC, tuple(addresses.split(",")), layers, public)
            model = link_end.manifest(mib)
            pieces = [Piece(i, 0, 0, x.numel, np.ones(x.numel, np.float32)) for i, x in enumerate(model.layers)]
            grant = Grant(GENESIS, (there,), link_end.WAIT_S)
            return LaneWay(slave, grant, pieces, keys, itertools.count(1), {way: [] for way in WAYS})

        ways = {"CURVE": begin(True), "plain": begin(False)}
        works: dict[str, Callable[[], object]] = {}
        for word in WAYS:
            for name, way in ways.items():
                works[f"{name} {word}"] = lambda way=way, word=word: way.move(word)  # type: ignore[misc]
        took = bench.together(works)
    for word in WAYS:
        own, plain = (statistics.median(ways[name].used[word][1:]) / nbytes for name in ("CURVE", "plain"))
        bench.row(f"CURVE {word}, {what}: rate", nbytes / took[f"CURVE {word}"], "B/s",
                  against="plain", of=nbytes / took[f"plain {word}"])  # fmt: skip
        bench.row(f"CURVE {word}, {what}: rate per core", 1 / own, "B/s", against="plain", of=1 / plain, least=LEAST)
        bench.row(
            f"CURVE {word}, {what}: processor time", 1e9 * own, "s/GB", against="plain", of=1e9 * plain, less=True
        )
        with_aes = plain + sealed / FRAME_BYTES
        bench.row(f"AES-GCM {word}, {what}: rate per core", 1 / with_aes, "B/s", against="plain", of=1 / plain)


def _aes_gcm_s(frames: int) -> float:
    """Processor seconds to seal one frame and to open it, each with its header bound to it."""
    cipher, body, header = AESGCM(os.urandom(32)), os.urandom(FRAME_BYTES), bytes(64)
    begun = time.process_time()
    for number in range(frames):
        nonce = number.to_bytes(12, "little")
        cipher.decrypt(nonce, cipher.encrypt(nonce, body, header), header)
    return (time.process_time() - begun) / frames


if __name__ == "__main__":
    main("curve", __doc__, measure)
