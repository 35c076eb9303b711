"""One rank of the cluster of ranks.py.

    ranks_rank.py MEETING PLAN        (a plan as JSON)

Writes MEETING/rankN.json: seconds of each install, merge, subtraction and freeze, and of `step` when nothing is due;
bytes of host and device memory above those before OuterLoop was made.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from benchmarks.accelerator import take_device
from benchmarks.outer_rank import BenchModel
from benchmarks.timed_rank import Memory
from dips.client import OuterLoop
from dips.client.rank.shard_transfer import ShardTransfer
from dips.ids import VersionId

INSTALLS = 5


class Stopwatch:
    """Seconds of each call of some methods, from a moment at which all ranks are there."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}

    def time_calls(self, owner: Any, method: str, name: str) -> None:
        """Have each call of `owner.method` timed as `name`."""
        inner: Callable[..., Any] = getattr(owner, method)
        times = self.seconds.setdefault(name, [])

        def timed(*args: Any, **keys: Any) -> Any:
            dist.barrier()
            begun = time.perf_counter()
            result = inner(*args, **keys)
            times.append(time.perf_counter() - begun)
            return result

        setattr(owner, method, timed)


def time_both(transfer: ShardTransfer, version: VersionId, watch: Stopwatch) -> None:
    """Install and merge what lies in host memory, in turn, when nothing else goes on."""
    memory = transfer._memory
    watch.time_calls(transfer, "merge_version", "merge")
    watch.time_calls(transfer, "install_version", "install")
    watch.time_calls(memory, "subtract_in_place", "subtract")
    watch.time_calls(memory, "gather_pieces", "freeze")
    watch.time_calls(memory, "keep_pushed_shard", "keep")
    for _ in range(INSTALLS + 1):
        memory.gather_pieces()
        memory.keep_pushed_shard()
        memory.subtract_in_place()
        if not transfer.merge_version(version):
            raise RuntimeError("it was installed, not merged")
        transfer.install_version(version)


def train_rounds(outer: OuterLoop, part: nn.Module, rounds: int) -> tuple[list[float], list[float]]:
    """Train until so many versions were merged; return the seconds of the calls of `step` that asked nothing, and those
    of the processor in each."""
    quiet: list[float] = []
    spent: list[float] = []
    first = outer.version.version
    while outer.version.version < first + rounds:
        with torch.no_grad():
            for parameter in part.parameters():
                parameter.add_(1e-6)
        asks = outer._state.steps_until_poll <= 1
        begun, before = time.perf_counter(), time.thread_time()
        outer.step(tokens=1, loss=1.0)
        after, ended = time.thread_time(), time.perf_counter()
        if not asks:
            quiet.append(ended - begun)
            spent.append(after - before)
    return quiet, spent


def main(meeting: Path, plan: dict[str, Any]) -> None:
    rank = int(os.environ["LOCAL_RANK"])
    device = take_device(plan["device"], rank)
    dist.init_process_group(None if device.type != "cpu" else "gloo")
    model = BenchModel(plan["layers"], plan["parameters"] // plan["layers"])
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to(device)
    memory, watch = Memory(), Stopwatch()
    with OuterLoop(model) as outer:
        transfer = outer._shard_transfer
        quiet, spent = train_rounds(outer, model.layers[0], plan["rounds"])
        outer._outer_steps.settle_transfers()
        time_both(transfer, outer.version, watch)
        beyond = memory.beyond()
        seconds = {name: times[1:] for name, times in watch.seconds.items()}
        found = {
            **seconds, "peak": beyond["host"], "device": beyond["device"],
            "sum": transfer.sum_host_bytes(True).total_bytes,
            "step": median(spent), "step_wall": median(quiet), "step_mean": mean(spent), "steps": len(quiet),
        }  # fmt: skip
        (meeting / f"rank{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
