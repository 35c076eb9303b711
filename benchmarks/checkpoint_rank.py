"""A training script without training that saves by torch.distributed.checkpoint while it pushes; see checkpoint.py.

    checkpoint_rank.py OUT LAYERS LAYER_NUMEL STEP_S DISK_BPS RUNS

Runs under torchrun, FSDP2 over its ranks. RUNS times, and once before to warm up: an outer step alone, a save alone,
both begun together. Rank 0 writes to OUT, as a line of JSON for each turn, the seconds of each. An outer step lasts
from the call that begins it until its version is in the model; a save from its call until it is written. DISK_BPS:
bytes a second that each rank's disk takes; 0: as many as it can.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from benchmarks.outer_rank import BenchModel
from dips.client import OuterLoop

GAP_S = 0.3  # between two turns: what the last one left behind is over


class PacedDisk(FileSystem):
    """Files that take so many bytes a second."""

    def __init__(self, bps: float) -> None:
        super().__init__()
        self._bps = bps

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        with super().create_stream(path, mode) as stream:
            yield Paced(stream, self._bps)


class Paced:
    """A file whose writes last as long as a slow disk's."""

    def __init__(self, stream: Any, bps: float) -> None:
        self._stream, self._bps, self._free_at = stream, bps, time.monotonic()

    def write(self, words: Any) -> int:
        self._free_at = max(self._free_at, time.monotonic()) + memoryview(words).nbytes / self._bps
        written: int = self._stream.write(words)
        time.sleep(max(0.0, self._free_at - time.monotonic()))
        return written

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class CheckpointTurns:
    """Outer steps and saves of one rank."""

    def __init__(self, model: BenchModel, outer: OuterLoop, step_s: float, directory: Path, disk_bps: float) -> None:
        self._model, self._outer, self._step_s, self._disk_bps = model, outer, step_s, disk_bps
        self._directory, self._group, self._saves = directory, dist.new_group(backend="gloo"), 0

    def take(self, step: bool, save: bool) -> dict[str, float]:
        """One turn; return the seconds of what it was."""
        self.train(GAP_S)
        took: dict[str, float] = {}
        saving = self._save(took) if save else None
        if step:
            took["step"] = self._outer_step()
        while not self._agreed(saving is None or saving.done()):
            self.train(self._step_s)
        if saving is not None:
            saving.result()
            dist.barrier()
            shutil.rmtree(self._directory, ignore_errors=True)
        return took

    def train(self, seconds: float) -> None:
        for _ in range(max(1, round(seconds / self._step_s))):
            with torch.no_grad():
                for parameter in self._model.parameters():
                    assert isinstance(parameter, DTensor)
                    parameter.to_local().add_(1e-3)
            time.sleep(self._step_s)
            self._outer.step(tokens=1)

    def _outer_step(self) -> float:
        begun, base = time.perf_counter(), self._outer.version
        self._outer.push()
        while self._outer.version == base:  # overlap: full
            self.train(self._step_s)
        return time.perf_counter() - begun

    def _save(self, took: dict[str, float]) -> Future[Any]:
        writer = FileSystemWriter(self._directory)
        if self._disk_bps:
            writer.fs = PacedDisk(self._disk_bps)
        begun = time.perf_counter()
        state = {"model": self._model.state_dict(), "outer": self._outer.state_dict()}
        saving = async_save(state, storage_writer=writer, process_group=self._group)
        assert isinstance(saving, Future)
        saving.add_done_callback(lambda _: took.update(save=time.perf_counter() - begun))
        return saving

    def _agreed(self, done: bool) -> bool:
        least = torch.tensor([int(done)])
        dist.all_reduce(least, op=dist.ReduceOp.MIN)
        return bool(least)


def main(out: Path, layers: int, numel: int, step_s: float, disk_bps: float, runs: int) -> None:
    warnings.filterwarnings("ignore")  # torch's own, of its planner
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = BenchModel(layers, numel)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    lines = []
    with OuterLoop(model) as outer:
        turns = CheckpointTurns(model, outer, step_s, out.with_suffix(".saved"), disk_bps)
        for _ in range(runs + 1):
            alone, save = turns.take(step=True, save=False), turns.take(step=False, save=True)
            lines.append({"alone": {**alone, **save}, "both": turns.take(step=True, save=True)})
    if dist.get_rank() == 0:
        out.write_text("".join(json.dumps(line) + "\n" for line in lines[1:]))
    dist.destroy_process_group()


if __name__ == "__main__":
    out, layers, numel, step_s, disk_bps, runs = sys.argv[1:]
    main(Path(out), int(layers), int(numel), float(step_s), float(disk_bps), int(runs))
