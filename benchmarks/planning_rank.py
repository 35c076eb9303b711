"""A rank that repeats the frozen order of a simulated pipeline: real bytes by gloo, computations as sleeps.

    planning_rank.py RANK RANKS STORE

Each request is a play: its number, this rank's stage (null: it only comes to the barriers), the number of stages, the
order as [operation, micro-batch], seconds of each operation, and the bytes of the border before and after. The
answer is the seconds from the first barrier to the end of the last action. No rank begins an action before its input
is here: what a schedule decided is not decided again.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from benchmarks.line_program import print_answer, read_requests
from benchmarks.pipeline_rank import join_ranks

MOST_MICROBATCHES = 100


def main(rank: int, ranks: int, store: str) -> None:
    """Join the others, then play what is asked for."""
    join_ranks(rank, ranks, store)
    for request in read_requests():
        print_answer(play(*request))
    dist.destroy_process_group()


def play(
    number: int,
    stage: int | None,
    stages: int,
    order: Sequence[tuple[str, int]],
    seconds: Mapping[str, float],
    border_bytes: tuple[int, int],
) -> float:
    """Play one order; return its seconds."""
    if stage is None:
        dist.barrier()
        dist.barrier()
        return 0.0
    microbatches = sorted({m for _, m in order})

    def tag(m: int, backward: bool) -> int:
        return 2 * (number * MOST_MICROBATCHES + m) + backward

    waits: dict[tuple[str, int], dist.Work | None] = {}
    buffers = []
    for m in microbatches:
        for op, peer, nbytes in (("F", stage - 1, border_bytes[0]), ("I", stage + 1, border_bytes[1])):
            if 0 <= peer < stages:
                buffers.append(torch.empty(nbytes, dtype=torch.uint8))
                waits[op, m] = dist.irecv(buffers[-1], peer, tag=tag(m, op == "I"))
    outgoing = {
        +1: torch.zeros(border_bytes[1], dtype=torch.uint8),
        -1: torch.zeros(border_bytes[0], dtype=torch.uint8),
    }
    sends = []
    dist.barrier()
    begun = time.perf_counter()
    for op, m in order:
        work = waits.get(("I" if op == "B" else op, m))
        if work is not None:
            work.wait()
        time.sleep(seconds[op])
        direction = {"F": 1, "I": -1, "B": -1}.get(op, 0)
        if direction and 0 <= stage + direction < stages:
            sends.append(dist.isend(outgoing[direction], stage + direction, tag=tag(m, direction < 0)))
    took = time.perf_counter() - begun
    for send in sends:
        if send is not None:
            send.wait()
    dist.barrier()
    return took


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
