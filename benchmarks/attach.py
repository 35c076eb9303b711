"""How long a trainer with a model of 50,000 tensors takes to attach, and what of it its own rank takes.

A real master, slave, agents and trainers on loopback. The names are DeepSeek-V3's and the tensors small, since no
stage before the first pull looks at elements. Attach: from rank 0's question by way of the agent to the master and
back, which begins the cluster's incarnation; a wrong model: until the trainer has the list of differences. Then what a
rank of a job of 64 gathers and plans, from the messages of 64 ranks that are made here.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.harness import Bench, main
from benchmarks.large_model import large_shapes, small_shapes
from benchmarks.whole_run import WholeRun
from dips.client.parallel.plan import Holding, RankLayout, gather_layouts, make_plan
from dips.client.parallel.rect import box_rects
from dips.protocol.manifest import Manifest

LIMIT_S = 2.0
RANKS = 64
RANKS_PER_HOST = 8
ME = 5  # the rank that plans
WITHIN_S = 120.0
KINDS = {"c": "right", "w": "wrong", "o": "whole"}  # by the first letter of a cluster


class AttachRun(WholeRun):
    """A run whose clusters attach one after another."""

    def __init__(self, directory: Path, manifest: Manifest, each: int) -> None:
        super().__init__(directory, manifest, clusters=0, slaves=1, versions=0, slots=1)
        self.names = [f"{letter}{i}" for letter in KINDS for i in range(each)]

    def attach(self, name: str) -> dict[str, float]:
        """Start a cluster, let it attach when its model is there, and return its stages."""
        agent = self._start_cluster(name)
        self._await(self.meeting / f"ready.{name}", agent)
        (self.meeting / f"go.{name}").touch()
        found = self.meeting / f"{name}.json"
        self._await(found, agent)
        agent.wait(WITHIN_S)
        stages: dict[str, float] = json.loads(found.read_text())
        return stages

    def _words(self, name: str) -> list[str]:
        return ["benchmarks.attach_rank", name, KINDS[name[0]], str(self.meeting)]

    def _await(self, path: Path, agent: subprocess.Popen[bytes]) -> None:
        end = time.monotonic() + WITHIN_S
        while not path.exists():
            if time.monotonic() > end or agent.poll() not in (None, 0, 65):
                name = path.name.split(".")[-1] if path.name.startswith("ready") else path.stem
                log = (self.directory / f"{name}.log").read_text(errors="replace")
                raise RuntimeError(f"{path.name} was not written:\n{log[-3000:]}")
            time.sleep(0.02)


class Gathered:
    """Stands for the collectives of a job whose other ranks have spoken."""

    def __init__(self, said: list[list[bytes]]) -> None:
        self.rank, self._said = ME, said

    def all_gather(self, message: bytes) -> list[bytes]:
        return self._said.pop(0)


class Spoken(Exception):
    """Ends a rank that has said what is wanted of it."""


class Speaker:
    """Stands for the collectives of a rank of which only its first message is wanted."""

    def __init__(self, rank: int) -> None:
        self.rank, self.message = rank, b""

    def all_gather(self, message: bytes) -> list[bytes]:
        self.message = message
        raise Spoken


def sharded_layout(rank: int, shapes: list[tuple[str, tuple[int, ...]]]) -> RankLayout:
    """What one rank of FSDP2 holds: a shard of the first dim of every parameter."""

    def hold(shape: tuple[int, ...]) -> Holding:
        step = -(-shape[0] // RANKS)
        begin, end = min(rank * step, shape[0]), min((rank + 1) * step, shape[0])
        rects = tuple(box_rects(shape, (begin, *(0 for _ in shape[1:])), (end - begin, *shape[1:])))
        return Holding(shape, rects, rects)

    ways = {shape: hold(shape) for shape in {shape for _, shape in shapes}}
    return RankLayout.from_claims([(name, ways[shape]) for name, shape in shapes], f"host{rank // RANKS_PER_HOST}")


def first_message(rank: int, layout: RankLayout) -> bytes:
    speaker = Speaker(rank)
    try:
        gather_layouts(layout, "", speaker)
    except Spoken:
        pass
    return speaker.message


def measure(bench: Bench) -> None:
    """Real processes, then a large job's plan."""
    each = 1 if bench.quick else 5
    manifest = Manifest.from_shapes(small_shapes())
    count = sum(len(layer.parameters) for layer in manifest.layers)
    with (
        tempfile.TemporaryDirectory() as directory,
        AttachRun(Path(directory), manifest, each) as run,
    ):
        found: dict[str, list[dict[str, float]]] = {letter: [] for letter in KINDS}
        for name in run.names:
            bench.say(name)
            found[name[0]].append(run.attach(name))
    _rows(bench, count, found)
    _plan_rows(bench)


def _rows(bench: Bench, count: int, found: dict[str, list[dict[str, float]]]) -> None:
    def middle(letter: str, *stages: str) -> float:
        return median(sum(stage[name] for name in stages) for stage in found[letter])

    limit: dict[str, Any] = {"against": "promised", "of": LIMIT_S, "least": 1.0, "less": True}
    bench.row(f"attach, {count} tensors", middle("c", "digest", "attach"), "s", **limit)
    bench.row("of that: the manifest's JSON and digest", middle("c", "digest"), "s")
    bench.row("attach, a wrong model", middle("w", "digest", "attach"), "s", **limit)
    bench.row("before it: layout and plan of one rank", middle("c", "layout"), "s")
    bench.row("before it: host memory", middle("c", "memory"), "s")
    bench.row("OuterLoop from call to return, with the first pull", middle("o", "whole"), "s")


def _plan_rows(bench: Bench) -> None:
    bench.say(f"the plan of {RANKS} ranks")
    shapes = list(large_shapes())
    layouts = [sharded_layout(rank, shapes) for rank in range(RANKS)]
    said = [first_message(rank, layout) for rank, layout in enumerate(layouts)]
    took = bench.together(
        {
            "say": lambda: first_message(ME, layouts[ME]),
            "gather": lambda: gather_layouts(layouts[ME], "", Gathered([said])),
            "plan": lambda: make_plan(gather_layouts(layouts[ME], "", Gathered([said]))[0], ME),
        }
    )
    limit: dict[str, Any] = {"against": "promised", "of": LIMIT_S, "least": 1.0, "less": True}
    bench.row(f"plan of {RANKS} ranks × {len(shapes)} tensors, one rank", took["say"] + took["plan"], "s", **limit)
    bench.row("of that: reading all layouts", took["gather"], "s")
    bench.note(f"a rank gathers {RANKS * max(map(len, said)) / 1e3:.0f} kB of layouts")


if __name__ == "__main__":
    main("attach", __doc__, measure)
