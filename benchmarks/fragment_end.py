"""A rank that moves its model in fragments beside training, driven by lines; the other end is that of link_end.py.

python -m benchmarks.fragment_end ADDRESS   [push | pull, N, FRAGMENTS, INTERVAL] → [[seconds, bytes], …]: what its
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

from benchmarks.cast import RUN, SINC, WAIT_S, Cast
from benchmarks.line_program import print_answer, read_requests
from benchmarks.link_end import STALL_S
from dips.client.parallel import HostMemory, lay_out
from dips.client.rank.agent_client import JobCollectives
from dips.client.rank.shard_transfer import ShardTransfer, TransferRequest
from dips.client.rank.transfer import TransferIdentity
from dips.ids import VersionId
from dips.protocol.effects import Grant, SlaveAddress

LAYERS, WIDTH = 16, 512  # 1 MiB each
STEP_S, SAMPLE_S = 0.02, 0.02
CAST = Cast(slaves=1, ranks=1, layers=LAYERS, numel=LAYERS * WIDTH * WIDTH)  # as the slave is to hold it
COUNTERS = {"push": "tx_bytes", "pull": "rx_bytes"}


def build() -> nn.Module:
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)])


class FragmentRank:
    """A rank that trains beside its transfers."""

    def __init__(self, address: str) -> None:
        self._collectives, self._model = JobCollectives(), build()
        self._transfers: dict[int, ShardTransfer] = {}  # by fragments
        self._slaves = (SlaveAddress("s0", SINC, (address,), CAST.held_by(0)),)

    def move(self, kind: str, number: int, fragments: int, interval: int) -> list[tuple[float, int]]:
        """Push, or pull and merge, beside training; return the samples."""
        transfers = self._transfers.setdefault(fragments, self._make_transfers(fragments))
        version = VersionId(number, number)
        grant = Grant(version, self._slaves, WAIT_S)
        request = TransferRequest(grant, TransferIdentity(RUN, "west", 1, number, 0), lambda *_: "")
        if kind == "pull":
            transfers._memory.keep_pushed_shard()  # as a push before it would: a merge needs what was pushed
        with _sampled(COUNTERS[kind]) as samples:
            begin = transfers.begin_push if kind == "push" else transfers.begin_pull
            moving = begin(request, True, interval)
            while (result := moving.poll()) is None:
                time.sleep(STEP_S)
                transfers.on_inner_step()
        if not result.ok or (kind == "pull" and not transfers.merge_version(version)):
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
    rank(sys.argv[1])
