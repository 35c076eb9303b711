"""Both ends of a link over which a rank moves its model in fragments beside training, driven by lines.

python -m benchmarks.fragment_end slave IP       says its lane's address; then [push | pull, N], [end, N]
python -m benchmarks.fragment_end rank ADDRESS   [push | pull, N, FRAGMENTS, INTERVAL] → [[seconds, bytes], …]: what its
                                                 device has sent (push) or received (pull) by then, sampled beside it

The rank is a job of one with a real model and host memory; an inner step of it is a pause.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch import nn

from benchmarks.line_program import print_answer, read_requests
from benchmarks.link_end import CLUSTER, RUN, SINC, SLAVE, STALL_S, WAIT_S, slave
from dips.client.parallel import HostMemory, lay_out
from dips.client.rank.agent_client import JobCollectives
from dips.client.rank.shard_transfer import ShardTransfer, TransferRequest
from dips.client.rank.transfer import TransferIdentity
from dips.ids import GENESIS
from dips.protocol.effects import Grant, SlaveAddress
from dips.protocol.manifest import Manifest

LAYERS, WIDTH = 16, 512  # 1 MiB each
STEP_S, SAMPLE_S = 0.02, 0.02
COUNTERS = {"push": "tx_bytes", "pull": "rx_bytes"}


def build() -> nn.Module:
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)])


def manifest() -> Manifest:
    return Manifest.from_shapes((name, tuple(p.shape)) for name, p in build().named_parameters())


class FragmentRank:
    """A rank that trains beside its transfers."""

    def __init__(self, address: str) -> None:
        self._collectives, self._model = JobCollectives(), build()
        self._transfers: dict[int, ShardTransfer] = {}  # by fragments
        there = SlaveAddress(SLAVE, SINC, (address,), tuple(range(len(manifest().layers))))
        self._grant = Grant(GENESIS, (there,), WAIT_S)

    def move(self, kind: str, number: int, fragments: int, interval: int) -> list[tuple[float, int]]:
        """Push, or pull and merge, beside training; return the samples."""
        transfers = self._transfers.setdefault(fragments, self._make_transfers(fragments))
        request = TransferRequest(self._grant, TransferIdentity(RUN, CLUSTER, 1, number, 0), lambda *_: "")
        if kind == "pull":
            transfers._memory.keep_pushed_shard()  # as a push before it would: a merge needs what was pushed
        with _sampled(COUNTERS[kind]) as samples:
            begin = transfers.begin_push if kind == "push" else transfers.begin_pull
            moving = begin(request, True, interval)
            while (result := moving.poll()) is None:
                time.sleep(STEP_S)
                transfers.on_inner_step()
        if not result.ok or (kind == "pull" and not transfers.merge_version(GENESIS)):
            raise RuntimeError(f"{kind} {number}: {result}")
        return samples

    def _make_transfers(self, fragments: int) -> ShardTransfer:
        layout = lay_out(self._model, self._collectives)
        memory = HostMemory(layout.adapter, layout.held, layout.plan, self._collectives)
        return ShardTransfer(memory, self._collectives, STALL_S, fragments=fragments)


@contextmanager
def _sampled(counter: str) -> Iterator[list[tuple[float, int]]]:
    """Look at the device's counter now and then; the last sample is taken at the end."""
    file, over = Path("/sys/class/net/w0/statistics") / counter, threading.Event()
    begun, before, samples = time.perf_counter(), int(file.read_text()), list[tuple[float, int]]()

    def take_sample() -> None:
        samples.append((time.perf_counter() - begun, int(file.read_text()) - before))

    def take_samples() -> None:
        while not over.wait(SAMPLE_S):
            take_sample()

    thread = threading.Thread(target=take_samples)
    take_sample()
    thread.start()
    try:
        yield samples
    finally:
        over.set()
        thread.join()
        take_sample()


def rank(address: str) -> None:
    """Move as told."""
    mine = FragmentRank(address)
    print_answer("ok")
    for kind, number, fragments, interval in read_requests():
        print_answer(mine.move(kind, number, fragments, interval))


if __name__ == "__main__":
    slave(manifest(), sys.argv[2]) if sys.argv[1] == "slave" else rank(sys.argv[2])
