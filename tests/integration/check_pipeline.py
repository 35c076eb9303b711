"""`Pipeline` on the ranks of random plans, each against one process.

check_pipeline.py OUT WHAT[=COUNT]...     writes OUT as JSON

Each WHAT is a function here, on the device of DIPS_TEST_DEVICE. Ranks are forked for each plan from this process, which
has imported torch once.
"""

from __future__ import annotations

import copy
import json
import multiprocessing
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from queue import Empty
from threading import Timer
from typing import Any

import pytest
import structlog
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import yaml
from torch import nn
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from benchmarks.accelerator import DEVICE, take_device
from benchmarks.pipeline_rank import spell_plan
from dips.client import OuterLoop
from dips.client.parallel.adapter import is_dtensor
from dips.errors import DipsError
from dips.inside.pipeline import EmulatedDevice, Pipeline, PlanReplaced, replan
from dips.inside.pipeline.memory import HostCategory
from dips.inside.pipeline.orders import lower_order, read_pipeline
from dips.inside.pipeline.parts import _mix_seed
from dips.inside.pipeline.torch_runtime import RankStage
from dips.inside.planning.adapt import PlanChange, PlanVerdict
from dips.inside.planning.profile import GB
from dips.inside.planning.schedules import SPLITTING, ScheduleName
from dips.inside.planning.search import deal_microbatches
from dips.inside.planning.simulate import (
    MemoryCategory,
    PartBytes,
    PassSeconds,
    PipelineDevice,
    PipelineStage,
    Prediction,
    Route,
    SimulatedPipeline,
    StalledPipeline,
    freeze_orders,
    simulate,
)

WIDTH, VOCABULARY, LENGTH, SAMPLES = 6, 11, 5, 2
COLLECTIVE_S, ENDS_S = 60.0, 120.0
GRADIENT = {torch.float32: 1e-6, torch.float64: 1e-12}
STEPPED = {torch.float32: 1e-5, torch.float64: 1e-10}
STEPS = 3


# ---- plans -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PlannedCase:
    """A plan, and the model that it is for."""

    plan: dict[str, Any]
    layers: int
    dtype: torch.dtype
    dropout: float = 0.0
    samples: int = SAMPLES
    tied: bool = False  # the head's weight is the embedding's, and that of one block another's
    norm: float | None = None  # gradients are clipped to it
    saved: bool = False  # a checkpoint goes on by another plan

    @property
    def ranks(self) -> int:
        return sum(len(stage["devices"]) for stage in self.plan["pipeline"]["stages"])

    def build(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield layers of which one has no parameters, and none a number of them that ranks divide evenly."""
        embed, head = (
            nn.Embedding(VOCABULARY, WIDTH, dtype=self.dtype), nn.Linear(WIDTH, VOCABULARY, dtype=self.dtype)
        )  # fmt: skip
        blocks = [nn.Tanh() if i == 1 else ResidualTanh(self.dropout, self.dtype) for i in range(self.layers - 2)]
        if self.tied:
            head.weight, blocks[-1].inner.weight = embed.weight, blocks[0].inner.weight
        yield "embed", embed
        yield from ((f"blocks.{i}", block) for i, block in enumerate(blocks))
        yield "head", head

    @property
    def microbatches(self) -> list[int]:
        """How many each device of the first stage has."""
        return list(self.plan["pipeline"]["stages"][0]["microbatches"])

    @property
    def gears(self) -> list[int]:
        """Pieces of a micro-batch that are played in turn."""
        return [gear["pieces"] for gear in self.plan["pipeline"].get("gears", [{"pieces": 1}])]

    def batch(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return inputs and targets of a global batch; samples have unequally many tokens."""
        count = sum(self.microbatches)
        rows = torch.randint(
            VOCABULARY, (self.samples * count, LENGTH + 1), generator=torch.Generator().manual_seed(step)
        ).to(DEVICE)
        targets = rows[:, 1:].clone()
        targets[::3, 0] = -100
        return rows[:, :-1], targets


class ResidualTanh(nn.Module):
    """A block with dropout, whose output is a view: a split backward would detach it in place, which torch refuses."""

    inner: nn.Linear

    def __init__(self, dropout: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.inner, self.drop = nn.Linear(WIDTH, WIDTH, dtype=dtype), nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x + self.drop(torch.tanh(self.inner(x)))).view_as(x)


def make_case(
    schedule: str,
    sizes: tuple[int, ...],
    ministages: int = 1,
    microbatches: int = 6,
    layers: int = 8,
    seed: int = 0,
    recompute: bool = False,
    dtype: torch.dtype = torch.float64,
    dropout: float = 0.0,
    pieces: tuple[int, ...] = (),
    offload: bool = False,
    **rest: Any,
) -> PlannedCase:
    """Simulate a pipeline of devices whose speeds are drawn, and write its plan, with gears of so many pieces a
    micro-batch; `rest` is of the case. Raises StalledPipeline.
    """
    draw, parts = random.Random(seed), len(sizes) * ministages
    cuts = [0, *sorted(draw.sample(range(1, layers), parts - 1)), layers]
    drawn = draw.getstate()

    def cut(number: int) -> SimulatedPipeline:
        draw.setstate(drawn)
        stages = []
        for s, size in enumerate(sizes):
            names = [f"s{s}d{i}" for i in range(size)]
            speeds = [number * draw.uniform(1, 4) for _ in names]
            shares = deal_microbatches(tuple(1 / speed for speed in speeds), number * microbatches)
            seconds = [tuple(_draw_seconds(draw, speed) for _ in range(ministages)) for speed in speeds]
            collective = tuple(draw.uniform(0, 2) for _ in range(ministages)) if size > 1 else ()
            devices = tuple(
                PipelineDevice(name, share, row) for name, share, row in zip(names, shares, seconds, strict=True)
            )
            depth = number * draw.randint(1, microbatches)
            stages.append(PipelineStage(devices, collective, collective, depth=depth))
        return SimulatedPipeline(
            ScheduleName(schedule),
            tuple(stages),
            (1.0 / number,) * (parts - 1),
            lambda a, b: Route(0.01, (((a, b), 0.5),)),
            ministages,
            keep=ministages == 1,
            offload=offload,
        )

    samples, pipeline = max((SAMPLES, *pieces)), cut(1)
    gears = {number: freeze_orders(made := cut(number), simulate(made).orders) for number in pieces}
    plan = spell_plan(pipeline, simulate(pipeline), cuts, samples, recompute, gears)
    return PlannedCase(plan, layers, dtype, dropout, samples, **rest)


def _draw_seconds(draw: random.Random, speed: float) -> PassSeconds:
    return PassSeconds(*(draw.uniform(0.5, 1.5) / speed for _ in range(3)))


def draw_case(seed: int) -> PlannedCase:
    """Draw up to 3 stages of 1 to 3 ranks, every schedule, 1 to 4 ministages, unequal layers and shares; with and
    without recompute, offload, dropout, shared parameters, a limit of the norm, a checkpoint, and gears.
    """
    draw = random.Random(seed)
    schedule = draw.choice([*ScheduleName, *[ScheduleName.BREADTH_FIRST] * 3])  # which has ministages and offload
    sizes = tuple(draw.randint(1, 3) for _ in range(draw.randint(1, 3)))
    if schedule in (ScheduleName.ONE_F_ONE_B, ScheduleName.ZB_H1):
        sizes = (sizes[0],) * len(sizes)
    ministages = draw.randint(1, 4) if schedule is ScheduleName.BREADTH_FIRST else 1
    layers = draw.randint(max(4, len(sizes) * ministages), 13)
    rest = {
        "microbatches": draw.randint(max(2, *sizes), 7), "layers": layers, "seed": seed,
        "recompute": draw.random() < 0.5, "dtype": draw.choice([torch.float32, torch.float64]),
        "tied": layers > 4 and draw.random() < 0.5, "dropout": draw.choice([0.0, 0.2]),
        "offload": schedule is ScheduleName.BREADTH_FIRST and draw.random() < 0.6,
        "norm": draw.choice([None, 0.05]), "saved": draw.random() < 0.5,
    }  # fmt: skip
    if not rest["offload"] and not rest["dropout"] and draw.random() < 0.5:  # gears draw other random numbers
        rest["pieces"] = (1, 2)
    try:
        return make_case(schedule, sizes, ministages, **rest)
    except StalledPipeline:  # unequal shares: only what takes micro-batches as they arrive gets to its end
        splits = schedule in SPLITTING
        return make_case("compact_zb" if splits else "breadth_first", sizes, ministages, **rest)


def summed_loss(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), targets.flatten(), reduction="sum")


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=1e-2)


def make_pipeline(case: PlannedCase, **options: Any) -> Pipeline:
    given = {"loss": summed_loss, "collective_s": COLLECTIVE_S, "device": DEVICE, **options}
    return Pipeline(case.build, case.plan, **given)


# ---- ranks -----------------------------------------------------------------------------------------------------------

OfRank = Callable[[int], Any]
DIES = 9  # exit code of a rank that a check lets die


def on_ranks(count: int, play: OfRank, dying: Collection[int] = ()) -> list[Any]:
    """Fork a rank for each number, and return what `play` returns on each; an exception as its text.

    dying   ranks that end by `die`, and tell nothing
    Raises  AssertionError if a rank ends otherwise than it should, as by an abort
    """
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as directory:
        queue = context.Queue()
        ranks = [context.Process(target=_play_rank, args=(r, count, directory, play, queue)) for r in range(count)]
        for process in ranks:
            process.start()
        found: dict[int, Any] = {}
        try:
            while len(found) < count - len(dying):
                try:
                    rank, told = queue.get(timeout=ENDS_S)
                except Empty as error:
                    raise AssertionError(f"expected an answer of {count} ranks, got {found}") from error
                found[rank] = told
            for process in ranks:
                process.join(30)
        finally:
            for process in ranks:
                if process.is_alive():
                    process.kill()
                    process.join()
    ended = [process.exitcode for process in ranks]
    assert ended == [DIES if rank in dying else 0 for rank in range(count)], (ended, found)
    return [found.get(rank) for rank in range(count)]


def die() -> None:
    """End this rank as a crash does: without a word."""
    os._exit(DIES)


def _play_rank(rank: int, count: int, directory: str, play: OfRank, queue: Any) -> None:
    torch.set_num_threads(1)
    os.environ["LOCAL_WORLD_SIZE"] = str(count)
    take_device(DEVICE, rank)
    backend = dist.get_default_backend_for_device(DEVICE)
    dist.init_process_group(backend, init_method=f"file://{directory}/store", rank=rank, world_size=count)
    try:
        told = play(rank)
    except Exception as error:  # noqa: BLE001  # told to the test, which knows what is expected
        told = f"{type(error).__name__}: {error}"
    queue.put((rank, told))
    queue.close()
    queue.join_thread()
    if isinstance(told, str) and told.startswith("Unavailable: "):
        os._exit(0)  # others are gone
    dist.barrier()
    dist.destroy_process_group()


# ---- against one process ---------------------------------------------------------------------------------------------


class OneProcess:
    """The model in one process, under the names that the pipeline gives."""

    def __init__(self, case: PlannedCase) -> None:
        torch.manual_seed(0)
        named, self.grad_norm = list(case.build()), 0.0
        self.model = nn.Sequential(*(layer for _, layer in named)).to(DEVICE)
        self.case, self.named = (
            case,
            {
                f"{named[int(number)][0]}.{rest}": p
                for number, rest, p in (
                    (*path.split(".", 1), p) for path, p in self.model.named_parameters(remove_duplicate=False)
                )
            },
        )

    def backward(self, batch: tuple[torch.Tensor, torch.Tensor], step: int = 0) -> float:
        loss = self.compute(batch, step)
        loss.backward()
        return float(loss.detach())

    def evaluate(self, batch: tuple[torch.Tensor, torch.Tensor]) -> float:
        self.model.eval()
        with torch.no_grad():
            loss = float(self.compute(batch, 0))
        self.model.train()
        return loss

    def compute(self, batch: tuple[torch.Tensor, torch.Tensor], step: int) -> torch.Tensor:
        """Return the mean loss; with dropout micro-batch by micro-batch, each layer with a seed of its own."""
        size = self.case.samples if self.case.dropout else len(batch[0])
        total = torch.zeros((), dtype=self.case.dtype, device=DEVICE)
        for number, (x, targets) in enumerate(zip(*(of.split(size) for of in batch), strict=True)):
            for at, layer in enumerate(self.model):
                if self.case.dropout:
                    torch.manual_seed(_mix_seed(0, step, number, at))
                x = layer(x)
            total = total + summed_loss(x, targets)
        return total / int((batch[1] != -100).sum())

    def train(self, optimizer: torch.optim.Optimizer, batch: tuple[torch.Tensor, torch.Tensor], step: int) -> float:
        """Take a step of the optimizer; return the loss before it."""
        loss = self.backward(batch, step)
        if self.case.norm is not None:
            self.grad_norm = float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.case.norm))
        optimizer.step()
        optimizer.zero_grad()
        return loss


def local(tensor: Any) -> torch.Tensor:
    return tensor.to_local() if is_dtensor(tensor) else tensor


def whole(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor() if is_dtensor(tensor) else tensor


def worst_error(pipe: Pipeline, alone: OneProcess, of: Callable[[Any], Any]) -> float:
    """The largest difference of this rank's share of a parameter's tensor from that of one process, over that one's
    largest element. Shares that are offloaded lie in host memory.
    """
    worst = 0.0
    for part in pipe.parts:
        for name, parameter in part.named_parameters():
            wanted, held = of(alone.named[name]), of(parameter)
            if held is None and name in part.tied_names:
                continue  # the gradient of a copy, which its owner has
            scale = wanted.abs().max().clamp(min=1e-30)
            if is_dtensor(held):
                shape, at = compute_local_shape_and_global_offset(held.shape, held.device_mesh, held.placements)
                wanted = wanted[tuple(slice(begin, begin + n) for begin, n in zip(at, shape, strict=True))]
            if wanted.numel():
                worst = max(worst, float(((local(held).to(DEVICE) - wanted).abs().max() / scale).detach()))
    return worst


def fused_adamw(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=1e-4, fused=True)


class KeptGradients(torch.optim.SGD):
    """Leaves parameters and gradients as they are."""

    def step(self, closure: Any = None) -> Any:
        """Do nothing."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing."""


def compare_case(case: PlannedCase, directory: str | None, _: int) -> dict[str, Any]:
    """Gradients of a step, and what three steps of AdamW make of the parameters; one rank's part of it, with the
    seconds that copies took and their whole parameters where layers share some.
    """
    steps_itself = case.tied or case.plan["pipeline"]["offload"]
    held = {"optimizer": lambda part: KeptGradients(part.parameters())} if steps_itself else {}
    adapt = "gears" if len(case.gears) > 1 else "off"
    pipe, alone = make_pipeline(case, adapt=adapt, **held), OneProcess(case)
    pipe._gear = pipe._gears[case.gears[-1]]
    losses = abs(pipe.step(case.batch(0)) - alone.backward(case.batch(0)))
    gradient = worst_error(pipe, alone, lambda p: p.grad)
    pipe.close()
    pipe, alone = make_pipeline(case, optimizer=adamw, max_grad_norm=case.norm, adapt=adapt), OneProcess(case)
    optimizer = adamw(alone.model)
    for step in range(STEPS):
        pipe._gear = pipe._gears[case.gears[step % len(case.gears)]]
        losses = max(losses, abs(pipe.step(case.batch(step)) - alone.train(optimizer, case.batch(step), step)))
        if case.norm is not None:
            losses = max(losses, abs(alone.grad_norm - (pipe.grad_norm or 0.0)))
    tied_s = pipe._times.spent.get("tied", 0.0)
    losses = max(losses, abs(pipe.evaluate(case.batch(9)) - alone.evaluate(case.batch(9))))
    stepped = worst_error(pipe, alone, lambda p: p)
    assert pipe.tokens == int((case.batch(0)[1] != -100).sum())
    if directory is not None:
        dcp.save(pipe.state_dict(), checkpoint_id=directory)
    found = {"gradient": gradient, "stepped": stepped, "loss": losses}
    if case.tied:
        found |= {"tied_s": tied_s, "held": full_parameters(pipe)}
    pipe.close()
    return found


def go_on(case: PlannedCase, directory: str, _: int) -> dict[str, float]:
    """Load what `compare_case` has saved of another plan, and take a step more; one rank's part of it."""
    pipe, alone = make_pipeline(case, optimizer=adamw, max_grad_norm=case.norm), OneProcess(case)
    optimizer, losses = adamw(alone.model), [0.0, 0.0]
    state = pipe.state_dict()
    dcp.load(state, checkpoint_id=directory)
    pipe.load_state_dict(state)
    for step in range(STEPS + 1):
        losses[0] = alone.train(optimizer, case.batch(step), step)
    losses[1] = pipe.step(case.batch(STEPS))
    stepped = worst_error(pipe, alone, lambda p: p)
    pipe.close()
    return {"gradient": 0.0, "stepped": stepped, "loss": abs(losses[1] - losses[0])}


def check_case(case: PlannedCase) -> list[dict[str, Any]]:
    """Raise AssertionError if a rank of the case is off, or one that goes on from its checkpoint by another plan, or a
    shared parameter differs from its copy by a bit; return what all ranks found.
    """
    with tempfile.TemporaryDirectory() as directory:
        found = on_ranks(case.ranks, partial(compare_case, case, directory if case.saved else None))
        later = []
        if case.saved and all(isinstance(of, dict) for of in found):
            other = make_case("breadth_first", (2,), 2, sum(case.microbatches), case.layers, 5, recompute=True)
            later = on_ranks(2, partial(go_on, replace(case, plan=other.plan), directory))
    shown = json.dumps({**case.plan, "case": repr(replace(case, plan={}))})
    assert all(isinstance(of, dict) for of in found + later), (found, later, shown)
    assert find_worst(found + later, "gradient") <= GRADIENT[case.dtype], (found, later, shown)
    assert find_worst(found + later, "stepped") <= STEPPED[case.dtype], (found, later, shown)
    assert find_worst(found + later, "loss") <= STEPPED[case.dtype], (found, later, shown)
    if case.tied:
        held: Named = {}
        for of in found:
            held |= of["held"]
        copy = f"blocks.{case.layers - 3}.inner.weight"
        assert held["head.weight"] == held["embed.weight"] and held[copy] == held["blocks.0.inner.weight"], shown
    return found


def find_worst(found: list[dict[str, Any]], key: str) -> float:
    return max(of[key] for of in found)


SIX = (
    make_case("breadth_first", (1, 2), 2),
    make_case("compact_zb", (1, 2, 1), dtype=torch.float32),  # stages in the middle alone split their backward
    make_case("1f1b", (1, 1), recompute=True),
    make_case("zb_h1", (2, 2), microbatches=4),
    make_case("gpipe", (3,), recompute=True, dtype=torch.float32),
    make_case("breadth_first", (1,), 3),
)


def six(_: int) -> list[float]:
    """Each schedule once; the worst error of a gradient."""
    return [find_worst(check_case(case), "gradient") for case in SIX]


def drawn(count: int) -> int:
    """So many plans that are drawn; return how many."""
    for seed in range(count):
        check_case(draw_case(seed))
    return count


GEARED = (
    make_case("breadth_first", (1, 2), 2, microbatches=4, pieces=(1, 2, 4)),
    make_case("compact_zb", (2, 1), microbatches=3, pieces=(1, 2, 4)),
)


def geared(_: int) -> list[dict[str, list[float]]]:
    """Gradients in each gear and after a change back, loss of a step and of an evaluation, against one process."""

    def play(case: PlannedCase, _: int) -> dict[str, list[float]]:
        pipe, alone = make_pipeline(case, adapt="gears"), OneProcess(case)
        wanted = alone.backward(case.batch(0))
        found: dict[str, list[float]] = {"gradient": [], "loss": [], "evaluated": [], "gear": []}
        for gear in (1, 2, 4, 1):
            pipe._gear = pipe._gears[gear]  # the adapter may change it once more after the step
            found["gear"].append(pipe.gear)
            for part in pipe.parts:
                part.zero_grad()
            found["loss"].append(abs(pipe.step(case.batch(0)) - wanted))
            found["evaluated"].append(abs(pipe.evaluate(case.batch(0)) - wanted))
            found["gradient"].append(worst_error(pipe, alone, lambda p: p.grad))
        return found

    return [of for case in GEARED for of in on_ranks(case.ranks, partial(play, case))]


def narrow(_: int) -> list[dict[str, list[float]]]:
    """Of a plan whose borders are as computed, and in bf16: the error of gradients, the bytes that ranks send, and the
    type in which parts compute.
    """

    def play(case: PlannedCase, _: int) -> tuple[float, int, bool]:
        sent, send, begin = list[int](), RankStage._send, RankStage.get_fwd_send_ops

        def count(stage: RankStage, *given: Any) -> dist.P2POp:
            sent.append((made := send(stage, *given)).tensor.nbytes)
            return made

        def check(stage: RankStage, chunk: int) -> list[dist.P2POp]:
            (output,), _ = stage.fwd_cache[chunk]
            made = begin(stage, chunk)
            assert output.untyped_storage().nbytes() == output.element_size(), "what was sent is kept"
            return made

        RankStage._send, RankStage.get_fwd_send_ops = count, check  # type: ignore[method-assign]
        pipe, alone = make_pipeline(case), OneProcess(case)
        computed = set[torch.dtype]()
        for part in pipe.parts:
            part.register_forward_hook(lambda _, __, output: computed.add(output.dtype))
        pipe.step(case.batch(0))
        alone.backward(case.batch(0))
        return worst_error(pipe, alone, lambda p: p.grad), sum(sent), computed == {torch.float32}

    case, found = make_case("compact_zb", (1, 2), dtype=torch.float32), []
    for bf16 in (False, True):
        plan = {**case.plan, "pipeline": {**case.plan["pipeline"], "bf16_borders": bf16}}
        of = on_ranks(case.ranks, partial(play, replace(case, plan=plan)))
        found.append({key: [each[at] for each in of] for at, key in enumerate(("gradient", "bytes", "fp32"))})
    return found


class HalfLinear(nn.Linear):
    """A layer that computes in bf16 by autocast, which the meta device has not, and gives what it computed."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(DEVICE, torch.bfloat16):
            return super().forward(x)


class WideLinear(nn.Linear):
    """A layer that computes in fp32, whatever it takes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.float())


@dataclass(frozen=True)
class CastCase(PlannedCase):
    """A plan for layers whose outputs are of 16 bits under autocast."""

    def build(self) -> Iterator[tuple[str, nn.Module]]:
        yield "embed", nn.Embedding(VOCABULARY, WIDTH)
        yield from ((f"blocks.{i}", HalfLinear(WIDTH, WIDTH)) for i in range(self.layers - 2))
        yield "head", WideLinear(WIDTH, VOCABULARY)


def autocast(_: int) -> list[float]:
    """The error of gradients on each rank, with borders between ranks, and between ministages of one rank."""

    def play(case: PlannedCase, _: int) -> float:
        pipe, alone = make_pipeline(case), OneProcess(case)
        pipe.step(case.batch(0))
        alone.backward(case.batch(0))
        return worst_error(pipe, alone, lambda p: p.grad)

    made = [make_case("compact_zb", (1, 2), dtype=torch.float32), make_case("breadth_first", (1,), 2)]
    return [of for one in made for of in on_ranks(one.ranks, partial(play, CastCase(one.plan, one.layers, one.dtype)))]


def replaced(_: int) -> list[dict[str, Any]]:
    """Ranks of which one looks for the new plan in another directory, until it is copied there: in which steps all have
    it, and what each is told when a push was accepted. (Of an OuterLoop without an agent, whose count is set.)
    """

    case = replace(GEARED[1], dtype=torch.float32)

    def play(directory: Path, rank: int) -> dict[str, Any]:
        os.environ["DIPS_ALONE"], replan.LOOKS = "1", 2
        own = directory / str(int(rank == 2)) / "plan.yaml"
        pipe = Pipeline(case.build, own, loss=summed_loss, collective_s=COLLECTIVE_S, adapt="auto")
        outer, had, told = OuterLoop(pipe.parts), [], ""

        def step() -> None:
            pipe.step(case.batch(0))
            had.append(pipe._replacement is not None and pipe._replacement.is_whole)

        try:
            with structlog.testing.capture_logs() as logs:
                step()
                if not rank:
                    own.write_text(own.read_text() + "\n# another plan\n")
                    assert pipe._replacement is not None
                    pipe._replacement._found = PlanChange(PlanVerdict.ADOPTED, 2.0, 1.0, 3, ("s0d0", "s1d0"), 4.0, "p")
                for _ in range(replan.LOOKS + 2):
                    step()
                dist.barrier()
                if rank == 2:
                    shutil.copy(directory / "0" / "plan.yaml", own)
                dist.barrier()
                step()
                step()  # no push was accepted: they go on
                outer._log._counts["accepted"] += 1
                step()
        except PlanReplaced as replaced:
            told = str(replaced).replace(str(own), "PLAN")
        saved = pipe.state_dict()["steps"]
        warned = [log["why"] for log in logs if log["event"] == "new_plan_not_shared"]
        return {"had": had, "told": told, "warned": warned, "new": str(pipe.new_plan), "saved": saved}

    with tempfile.TemporaryDirectory() as made:
        for each in ("0", "1"):
            (directory := Path(made) / each).mkdir()
            origin = {"profile": "profile.yaml", "model": "model.yaml", "replans": 0}
            (directory / "plan.yaml").write_text(yaml.safe_dump({**case.plan, "samples": 12, "made_from": origin}))
            for name in ("profile.yaml", "model.yaml"):
                (directory / name).touch()
        return on_ranks(case.ranks, partial(play, Path(made)))


# ---- what else a step is ---------------------------------------------------------------------------------------------

UNEQUAL = make_case("breadth_first", (1, 2), 2)  # three ranks, two ministages
OTHER = make_case("compact_zb", (2, 1), seed=4)
ALONE = make_case("gpipe", (1,))
LEARNED = make_case(  # of train_pipeline.py
    "breadth_first", (2, 1), 3, dtype=torch.float32, dropout=0.1, tied=True, offload=True, recompute=True
)
TIED = (
    make_case("breadth_first", (1, 2), 2, tied=True),
    make_case("compact_zb", (3, 2), seed=1, tied=True),  # shards of the copies begin elsewhere
    make_case("gpipe", (2,), recompute=True, tied=True),  # owner and copy in one part
    make_case("breadth_first", (1,), 3, tied=True),
    make_case("breadth_first", (1, 2), 3, tied=True, offload=True, recompute=True),  # shards wait in host memory
    # A part is an activation alone, which holds nothing.
    make_case("breadth_first", (2,), 4, seed=4, tied=True, offload=True, norm=0.05, saved=True),
)
Named = dict[str, list[float]]


def full_parameters(pipe: Pipeline) -> Named:
    return {name: whole(p.detach()).flatten().tolist() for part in pipe.parts for name, p in part.named_parameters()}


def worst_difference(found: list[Any], wanted: Named) -> float:
    """Between the parameters of some ranks, which together hold the model, and a whole one."""
    assert set().union(*found) == set(wanted)
    return max(abs(a - b) for of in found for name in of for a, b in zip(of[name], wanted[name], strict=True))


def clipped(_: int) -> dict[str, Any]:
    """Two steps of SGD whose gradients are clipped to half their norm."""

    def play(case: PlannedCase, _: int) -> dict[str, Any]:
        def sgd(module: nn.Module) -> torch.optim.Optimizer:
            return torch.optim.SGD(module.parameters(), lr=1.0)

        alone = OneProcess(case)
        alone.backward(case.batch(0))
        norm = float(torch.linalg.vector_norm(torch.cat([p.grad.flatten() for p in alone.model.parameters()])))
        alone.model.zero_grad()
        pipe, optimizer = make_pipeline(case, optimizer=sgd, max_grad_norm=norm / 2), sgd(alone.model)
        norms = []
        for step in range(2):
            pipe.step(case.batch(step))
            alone.backward(case.batch(step))
            wanted = torch.nn.utils.clip_grad_norm_(alone.model.parameters(), norm / 2)
            norms.append(abs(float(wanted) - (pipe.grad_norm or 0.0)))
            optimizer.step()
            optimizer.zero_grad()
        return {"stepped": worst_error(pipe, alone, lambda p: p), "norm": max(norms)}

    found = [of for case in (UNEQUAL, TIED[1]) for of in on_ranks(case.ranks, partial(play, case))]
    assert all(isinstance(of, dict) for of in found), found
    return {key: max(of[key] for of in found) for key in ("stepped", "norm")}


def tied(_: int) -> list[bool]:
    """Of each case whether every rank took its time over copies; all else is held to its bounds."""
    return [all(of["tied_s"] > 0 for of in check_case(case)) for case in TIED]


def dropout(_: int) -> dict[str, Any]:
    """Two steps with dropout under three plans, and the loss of an evaluation."""
    cases = [replace(case, dropout=0.3) for case in (ALONE, UNEQUAL, make_case("1f1b", (1, 1), recompute=True))]

    def play(case: PlannedCase, _: int) -> tuple[list[float], Named]:
        pipe = make_pipeline(case, optimizer=adamw)
        losses = [pipe.step(case.batch(step)) for step in range(2)]
        losses.append(pipe.evaluate(case.batch(0)))
        kept = next(pipe.parts[0].children()).eval()  # as a frozen layer that drops nothing
        again = pipe.evaluate(case.batch(0))
        assert again == losses[-1] and not kept.training and all(part.training for part in pipe.parts)
        return losses, full_parameters(pipe)

    found = [on_ranks(case.ranks, partial(play, case)) for case in cases]
    ((losses, wanted),) = found[0]
    return {
        "losses": [losses, *([of[0] for of in ranks] for ranks in found[1:])],
        "worst": [worst_difference([of[1] for of in ranks], wanted) for ranks in found[1:]],
    }


def saved(_: int) -> dict[str, Any]:
    """A checkpoint of one plan is loaded into another, and into its own; the next step of each. One of the beginning
    is, too, and the job that saved it stays what one process is.
    """
    with tempfile.TemporaryDirectory() as directory:

        def save(_: int) -> tuple[float, Named, float]:
            pipe, alone = make_pipeline(TIED[0], optimizer=adamw), OneProcess(TIED[0])
            dcp.save(pipe.state_dict(), checkpoint_id=f"{directory}/0")
            assert not any(one.state for one in pipe.optimizers), "they have stepped"
            for step in range(2):
                pipe.step(UNEQUAL.batch(step))
            dcp.save(pipe.state_dict(), checkpoint_id=f"{directory}/2")
            loss, optimizer = pipe.step(UNEQUAL.batch(2)), adamw(alone.model)
            for step in range(3):
                alone.train(optimizer, UNEQUAL.batch(step), step)
            return loss, full_parameters(pipe), worst_error(pipe, alone, lambda p: p)

        def load(case: PlannedCase, first: int, _: int) -> tuple[float, Named, int]:
            pipe = make_pipeline(replace(case, tied=True), optimizer=adamw, seed=7)
            state = pipe.state_dict()
            dcp.load(state, checkpoint_id=f"{directory}/{first}")
            pipe.load_state_dict(state)
            losses = [pipe.step(case.batch(step)) for step in range(first, 3)]
            return losses[-1], full_parameters(pipe), pipe.steps

        before = on_ranks(UNEQUAL.ranks, save)
        assert all(isinstance(of, tuple) for of in before), before
        wanted: Named = {}
        for _, of, _ in before:
            wanted |= of
        worst, losses, steps = [max(of[2] for of in before)], [before[0][0]], []
        for case, first in ((UNEQUAL, 2), (OTHER, 2), (ALONE, 2), (ALONE, 0)):
            after = on_ranks(case.ranks, partial(load, case, first))
            worst.append(worst_difference([of[1] for of in after], wanted))
            losses.append(after[0][0])
            steps.append(after[-1][2])
    return {"worst": worst, "losses": losses, "steps": steps}


# ---- memory ----------------------------------------------------------------------------------------------------------

WIDE, ROWS = 16, 3  # of a micro-batch


@dataclass(frozen=True)
class AccountedCase(PlannedCase):
    """A plan of equal layers, which take and give rows of the same width, and a loss that is a sum of squares."""

    width: int = WIDE

    def build(self) -> Iterator[tuple[str, nn.Module]]:
        for i in range(self.layers):
            yield f"blocks.{i}", nn.Sequential(nn.Linear(self.width, self.width, dtype=self.dtype), nn.Tanh())

    def batch(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        shape = self.samples * sum(self.microbatches), self.width
        inputs = torch.randn(shape, generator=torch.Generator().manual_seed(step), dtype=self.dtype).to(DEVICE)
        return inputs, inputs.flip(0)


def square_loss(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (output - targets).square().sum()


def account_case(
    ministages: int, offload: bool, recompute: bool, layers: int = 16, ranks: tuple[int, ...] = (1, 2),
    width: int = WIDE, rows: int = ROWS, dtype: torch.dtype = torch.float64,
) -> tuple[AccountedCase, Prediction]:  # fmt: skip
    """Plan stages of so many ranks with sizes of AccountedCase's layers, whose optimizer is AdamW."""
    parameters, border = dtype.itemsize * (width + 1) * width, dtype.itemsize * rows * width
    parts = len(ranks) * ministages
    cuts = [layers * part // parts for part in range(parts + 1)]

    def size_of(part: int, sharers: int) -> PartBytes:
        count = cuts[part + 1] - cuts[part]
        # The model's input is counted nowhere. Without recompute each layer keeps what it gave, which the next one
        # takes, and the loss its difference.
        boundary = border * (count - (part == 0))
        kept = boundary if recompute else boundary + border * (1 + (part == parts - 1))
        share = parameters * count / sharers if sharers > 1 else 0.0
        return PartBytes(
            parameters * count, parameters * count, share, share, 2 * parameters * count / sharers, kept, boundary
        )

    def stage_of(s: int, count: int) -> PipelineStage:
        sizes = tuple(size_of(v * len(ranks) + s, count) for v in range(ministages))
        devices = tuple(
            PipelineDevice(
                f"s{s}d{i}", tuple(range(i, 6, count)), (PassSeconds(1.0, 1.0, 1.0),) * ministages, (), sizes, 1e-9
            )
            for i in range(count)
        )
        collective = (0.001,) * ministages if count > 1 else ()
        return PipelineStage(devices, collective, collective)

    pipeline = SimulatedPipeline(
        ScheduleName.BREADTH_FIRST, tuple(stage_of(s, count) for s, count in enumerate(ranks)), (1.0,) * (parts - 1),
        lambda a, b: Route(0.01, ()), ministages, keep=ministages == 1, offload=offload,
    )  # fmt: skip
    played = simulate(pipeline)
    plan = spell_plan(pipeline, played, cuts, rows, recompute)
    return AccountedCase(plan, layers, dtype, samples=rows, width=width), played


def accounted(ministages: int) -> list[dict[str, Any]]:
    """The most bytes of each category on each rank, by account and by plan; how far its model is from one process.

    ministages  with offload alone; none: 1 to 8, with offload and without
    """

    def play(case: AccountedCase, rank: int) -> tuple[dict[str, int], float]:
        pipe, alone = make_pipeline(case, optimizer=adamw, loss=square_loss), OneProcess(case)
        optimizer = adamw(alone.model)
        for step in range(2):
            inputs, targets = case.batch(step)
            pipe.step((inputs, targets))
            (square_loss(alone.model(inputs), targets) / targets.numel()).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert not pipe.memory.held[MemoryCategory.GATHERED], "parameters are gathered after a step"
        shards = pipe._memory._shards
        in_host = sum(of.nbytes for of in shards._host.values()) if shards is not None else 0
        assert pipe.memory.held[HostCategory.OFFLOADED] == in_host, "activations are in host memory after a step"
        peaks = {str(category): nbytes for category, nbytes in pipe.memory.peaks.items()}
        peaks["peak"] = pipe.memory.peak_bytes
        with torch.no_grad():
            wanted = float(square_loss(alone.model(inputs), targets)) / targets.numel()
        assert pipe.evaluate((inputs, targets)) == pytest.approx(wanted, rel=1e-10)
        return peaks, worst_error(pipe, alone, lambda p: p)

    found = []
    ways = [(False, True), (True, True), (False, False)]
    for count, (offload, recompute) in [(ministages, ways[1])] if ministages else product((1, 2, 4, 8), ways):
        case, played = account_case(count, offload, recompute)
        devices = read_pipeline(case.plan, "plan").devices
        for device, told in zip(devices, on_ranks(len(devices), partial(play, case)), strict=True):
            assert not isinstance(told, str), told
            planned = {str(category): nbytes for category, nbytes in played.category_bytes[device].items()}
            found.append(
                {
                    "ministages": count, "offload": offload, "recompute": recompute, "device": device,
                    "account": told[0], "plan": {**planned, "peak": played.peak_bytes[device]}, "worst": told[1],
                }
            )  # fmt: skip
    return found


def allocated(_: int) -> list[dict[str, Any]]:
    """On an accelerator: the most bytes of a rank by its allocator, by account and by plan; and of the seconds of
    copies, the share in which a kernel of the computation ran.
    """

    def play(case: AccountedCase, _: int) -> tuple[int, int, dict[str, float]]:
        memory: Any = torch.get_device_module(DEVICE)
        batch = case.batch(0)
        before = memory.memory_allocated()
        pipe = make_pipeline(case, optimizer=fused_adamw, loss=square_loss)
        for _ in range(2):
            pipe.step(batch)
        memory.reset_peak_memory_stats()
        pipe.step(batch)
        peak = memory.max_memory_allocated() - before
        with torch.profiler.profile(activities=torch.profiler.supported_activities()) as profiler:
            pipe.step(batch)
        return peak, pipe.memory.peak_bytes, overlap_shares(profiler)

    found = []
    for ministages, offload, recompute in [(1, False, False), (4, False, True), (4, True, True)]:
        case, played = account_case(
            ministages, offload, recompute, ranks=(1,), width=4096, rows=4096, dtype=torch.float32
        )
        (told,) = on_ranks(1, partial(play, case))
        assert not isinstance(told, str), told
        way = {"ministages": ministages, "offload": offload, "recompute": recompute}
        (planned,) = played.peak_bytes.values()
        found.append({**way, "allocator": told[0], "account": told[1], "plan": planned, "overlap": told[2]})
    return found


def overlap_shares(profiler: torch.profiler.profile) -> dict[str, float]:
    """Of the seconds of copies each way, the share in which a kernel ran that was no copy."""
    spans = [
        (event.name, event.time_range.start, event.time_range.end)
        for event in profiler.events()
        if event.device_type is not torch.autograd.DeviceType.CPU
    ]
    kernels = sorted((begin, end) for name, begin, end in spans if not name.startswith(("Memcpy", "Memset")))
    found = {}
    for way in ("Memcpy HtoD", "Memcpy DtoH"):
        copies = [(begin, end) for name, begin, end in spans if name.startswith(way) and end - begin > 100.0]  # µs
        both, reached = 0.0, 0.0
        for begin, end in copies:
            reached = begin
            for of, to in kernels:
                if to > reached and of < end:
                    both += min(to, end) - max(of, reached)
                    reached = min(to, end)
        total = sum(end - begin for begin, end in copies)
        found[way] = both / total if total else 0.0
    return found


def offloaded(_: int) -> dict[str, Any]:
    """Shards in host memory whose optimizers step at the end, and a checkpoint of them that another plan loads."""
    (case, _), (other, _) = account_case(4, True, True), account_case(1, False, True)

    def make(one: AccountedCase, norm: float = 1e-3) -> Pipeline:
        return make_pipeline(one, optimizer=adamw, loss=square_loss, max_grad_norm=norm)

    def places(pipe: Pipeline) -> list[int]:
        return [local(p).data_ptr() for part in pipe.parts for p in part.parameters()]

    def save(directory: str, rank: int) -> tuple[float, bool, Named]:
        pipe, alone = make(case), OneProcess(case)
        optimizer, before = adamw(alone.model), places(pipe)
        for step in range(2):
            inputs, targets = case.batch(step)
            pipe.step((inputs, targets))
            (square_loss(alone.model(inputs), targets) / targets.numel()).backward()
            torch.nn.utils.clip_grad_norm_(alone.model.parameters(), 1e-3)
            optimizer.step()
            optimizer.zero_grad()
        worst = worst_error(pipe, alone, lambda p: p)
        dcp.save(pipe.state_dict(), checkpoint_id=directory)
        pipe.step(case.batch(2))
        return worst, places(pipe) == before, full_parameters(pipe)

    def load(directory: str, one: AccountedCase, rank: int) -> Named:
        pipe = make(one)
        pipe.step(one.batch(5))
        state = pipe.state_dict()
        dcp.load(state, checkpoint_id=directory)
        pipe.load_state_dict(state)
        pipe.step(one.batch(2))
        return full_parameters(pipe)

    with tempfile.TemporaryDirectory() as directory:
        found = on_ranks(3, partial(save, directory))
        wanted: Named = {}
        for *_, of in found:
            wanted |= of
        after = [worst_difference(on_ranks(3, partial(load, directory, one)), wanted) for one in (case, other)]
    return {"worst": max(of[0] for of in found), "stayed": all(of[1] for of in found), "loaded": max(after)}


# ---- what is seen ----------------------------------------------------------------------------------------------------


def seen(_: int) -> list[list[dict[str, Any]]]:
    """Of a plan whose shards wait in host memory and whose parts step at the end, and of one in other gears with shared
    parameters: where a step went, what a run is told of it, its trace, and what is refused.
    """
    geared = replace(GEARED[0], dtype=torch.float32, tied=True)
    offloaded = replace(account_case(4, True, True)[0], dtype=torch.float32)

    def play(case: PlannedCase, directory: str, gear: int, options: dict[str, Any], rank: int) -> dict[str, Any]:
        os.environ["DIPS_ALONE"] = "1"
        pipe = make_pipeline(case, optimizer=adamw, **options)
        outer, told = OuterLoop(pipe.parts), list[Any]()
        outer.report_pipeline = lambda **of: told.append(of)  # type: ignore[method-assign]
        path, refused = Path(directory) / "step.json", list[str]()
        for _ in range(2):
            try:
                pipe.write_timeline(path / "file" if path.exists() else path)
            except DipsError as error:
                refused.append(f"{type(error).__name__}: {error}".replace(directory, "DIR"))
            path.touch()
            pipe._gear = pipe._gears[gear]
            pipe.step(case.batch(0))
        pipe.evaluate(case.batch(0))
        pipe.write_timeline(path)
        held = {str(category): nbytes for category, nbytes in pipe.memory.peaks.items()}
        return {
            "seconds": pipe.last_seconds, "told": told, "refused": refused, "trace": path.read_text(),
            "peaks": held | {"peak": pipe.memory.peak_bytes},
        }  # fmt: skip

    found = []
    for case, gear, options in (
        (offloaded, 1, {"loss": square_loss, "max_grad_norm": 1.0}), (geared, 2, {"adapt": "gears"})
    ):  # fmt: skip
        with tempfile.TemporaryDirectory() as directory:
            found.append(on_ranks(case.ranks, partial(play, case, directory, gear, options)))
    return found


def too_small(_: int) -> dict[str, list[str]]:
    """What ranks are told of devices with less memory than their plan needs, or than they come to hold."""
    case, played = account_case(2, False, True)
    needs = {device: nbytes / GB for device, nbytes in played.peak_bytes.items()}

    def told(make: Callable[[], Pipeline], case: PlannedCase) -> str:
        try:
            make().step(case.batch(0))
        except DipsError as error:
            return f"{type(error).__name__}: {error}"
        return "nothing"

    def start(share: float, rank: int) -> str:
        memory = share * needs["s1d0"] if rank == 1 else 1.0
        emulate = EmulatedDevice(memory_gb=memory)
        return told(lambda: make_pipeline(case, loss=square_loss, optimizer=adamw, emulate=emulate), case)

    def grow(rank: int) -> str:
        emulate = EmulatedDevice(memory_gb=6e-6)
        return told(lambda: make_pipeline(ALONE, optimizer=adamw, emulate=emulate), ALONE)

    return {
        "start": on_ranks(3, partial(start, 0.9)),
        "enough": on_ranks(3, partial(start, 1.01)),
        "grow": on_ranks(1, grow),
    }


# ---- bad inputs ------------------------------------------------------------------------------------------------------


def _spoil_gears(spoil: Callable[[list[Any]], Any]) -> PlannedCase:
    plan = copy.deepcopy(GEARED[0].plan)
    spoil(plan["pipeline"]["gears"])
    return replace(GEARED[0], plan=plan)


LESS_GEARED = _spoil_gears(lambda gears: gears.pop())
MISGEARED = _spoil_gears(lambda gears: gears[1].update(orders=gears[2]["orders"]))


def refused(_: int) -> dict[str, list[str]]:
    """The sentences that each of three ranks is told."""

    def play(rank: int) -> dict[str, str]:
        def told(run: Callable[[], Any]) -> str:
            try:
                run()
            except DipsError as error:
                return f"{type(error).__name__}: {error}"
            return "nothing"

        def nan_loss(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            return summed_loss(output, targets) * float("nan")

        def build_otherwise() -> Iterator[Any]:
            yield from UNEQUAL.build()
            yield nn.Tanh()

        def build_normed() -> Iterator[Any]:
            yield from UNEQUAL.build()
            yield "norm", nn.BatchNorm1d(VOCABULARY)

        def build_tied() -> Iterator[Any]:
            yield from replace(UNEQUAL, tied=rank != 1).build()

        def build_frozen() -> Iterator[Any]:
            yield from ((name, layer.requires_grad_(name == "head")) for name, layer in UNEQUAL.build())

        def build_frozen_tie() -> Iterator[Any]:
            for name, layer in replace(UNEQUAL, tied=True).build():
                if name == "embed":
                    layer.weight.requires_grad_(False)
                yield name, layer

        def unfreeze(pipe: Pipeline) -> None:
            for part in pipe.parts:
                part.requires_grad_()

        other = OTHER.plan if rank == 2 else UNEQUAL.plan
        inputs, targets = UNEQUAL.batch(0)
        pipe = make_pipeline(UNEQUAL)
        short = (inputs[:-1], targets[:-1])
        checkpoint = pipe.state_dict() if rank else {**pipe.state_dict(), "model": {}}
        tuned = Pipeline(build_frozen, UNEQUAL.plan, loss=summed_loss, optimizer=adamw)
        shares = Pipeline(build_frozen_tie, UNEQUAL.plan, loss=summed_loss, optimizer=adamw)
        found = {
            "frozen": told(lambda: tuned.step((inputs, targets))),
            "unfrozen": told(lambda: (unfreeze(tuned), tuned.step((inputs, targets)))),
            "frozen, shared": told(lambda: shares.step((inputs, targets))),
            "unfrozen, shared": told(lambda: (unfreeze(shares), shares.step((inputs, targets)))),
            "ranks": told(lambda: make_pipeline(ALONE)),
            "no file": told(lambda: Pipeline(UNEQUAL.build, "/nowhere/plan.yaml", loss=summed_loss)),
            "model": told(lambda: Pipeline(build_otherwise, UNEQUAL.plan, loss=summed_loss)),
            "tied, no optimizer": told(lambda: make_pipeline(TIED[0])),
            "ties differ": told(lambda: Pipeline(build_tied, UNEQUAL.plan, loss=summed_loss, optimizer=adamw)),
            "BatchNorm": told(lambda: Pipeline(build_normed, UNEQUAL.plan, loss=summed_loss)),
            "no layers": told(lambda: Pipeline(lambda: nn.Linear(3, 3), UNEQUAL.plan, loss=summed_loss)),
            "plans differ": told(lambda: Pipeline(UNEQUAL.build, other, loss=summed_loss)),
            "seeds differ": told(lambda: make_pipeline(UNEQUAL, seed=rank)),
            "a device twice": told(lambda: make_pipeline(UNEQUAL, device_name=f"s1d{min(rank, 1)}")),
            "no such device": told(lambda: make_pipeline(UNEQUAL, device_name=f"s{rank}d0")),
            "norm": told(lambda: make_pipeline(UNEQUAL, max_grad_norm=-1.0)),
            "gears differ": told(lambda: make_pipeline(GEARED[0] if rank else LESS_GEARED, adapt="gears")),
            "adapt differs": told(lambda: make_pipeline(GEARED[0], adapt="gears" if rank == 1 else "off")),
            "adapt": told(lambda: make_pipeline(GEARED[0], adapt="on")),
            "no file to plan from": told(lambda: make_pipeline(GEARED[0], adapt="ask")),
            "orders of a gear": told(lambda: make_pipeline(MISGEARED, adapt="gears")),
            "batch on one rank": told(lambda: pipe.step(short if rank == 1 else (inputs, targets))),
            "no targets": told(lambda: pipe.step((inputs, torch.full_like(targets, -100)))),
            "calls differ": told(lambda: (pipe.evaluate if rank == 1 else pipe.step)((inputs, targets))),
            "inputs": told(lambda: pipe.step((inputs.float(), targets))),
            "checkpoint": told(lambda: pipe.load_state_dict(checkpoint)),
            "then": told(lambda: pipe.step((inputs, targets))),
            "NaN": told(lambda: make_pipeline(UNEQUAL, loss=nan_loss, optimizer=adamw).step((inputs, targets))),
            "NaN, clipped": told(
                lambda: make_pipeline(UNEQUAL, loss=nan_loss, max_grad_norm=1.0).step((inputs, targets))
            ),
        }
        pipe.close()
        found["closed"] = told(lambda: pipe.step((inputs, targets)))
        return found

    found = on_ranks(UNEQUAL.ranks, play)
    assert all(isinstance(of, dict) for of in found), found
    return {what: [of[what] for of in found] for what in found[0]}


def a_rank_dies(every: int) -> list[list[Any]]:
    """One rank ends after so many actions of its order, after whose last shared parameters are summed, and in plans
    with other actions before the first of each kind; each of the others tells how long it waited, and what for.
    Return rank, the kind of action that is not played, and what all ranks tell.
    """
    found = []
    for case, dying, point, kind in (*_list_points(TIED[0], every or 1), *(p for c in KINDS for p in _list_kinds(c))):

        def play(rank: int, case: PlannedCase = case, dying: int = dying, point: int = point) -> Any:
            pipe = make_pipeline(case, optimizer=adamw, max_grad_norm=case.norm, collective_s=DEAD_S)
            pipe.step(case.batch(0))
            if rank == dying:
                end_after(pipe, point)
            began = time.monotonic()
            try:
                pipe.step(case.batch(1))
            except DipsError as error:
                return f"{type(error).__name__}: {error} | {time.monotonic() - began:.1f}"
            return "nothing"

        found.append([dying, kind, on_ranks(case.ranks, play, dying=(dying,))])
    return found


DEAD_S = 5.0
KINDS = (replace(TIED[4], norm=0.05), make_case("compact_zb", (1, 2, 1)))  # copies to and from host memory; I and W


def _list_points(case: PlannedCase, every: int = 1) -> Iterator[tuple[PlannedCase, int, int, str]]:
    """Yield each rank's actions and the end of its order: its number, that of the action, and its kind."""
    plan = read_pipeline(case.plan, "plan")
    for dying, device in enumerate(plan.devices):
        kinds = [*(str(action.op) for action in lower_order(plan, device)), "end"]
        yield from ((case, dying, point, kind) for point, kind in [*enumerate(kinds)][::every])


def _list_kinds(case: PlannedCase) -> Iterator[tuple[PlannedCase, int, int, str]]:
    """Yield of each rank's actions the first of each kind."""
    yield from {(point[1], point[3]): point for point in [*_list_points(case)][::-1]}.values()


def end_after(pipe: Pipeline, point: int, steps: int = 0) -> None:
    """Let this rank die when it has played so many actions, after some whole steps."""
    play, played = pipe._gear.runtime.play, []

    def play_some(order: Any, *rest: Any) -> Any:
        played.append(order)
        if len(played) <= steps:
            return play(order, *rest)
        Timer(DEAD_S / 5, die).start()  # its sends may have no receiver
        with suppress(Exception):
            play(order[:point], *rest)
        return die()

    pipe._gear.runtime.play = play_some


def a_rank_stops(_: int) -> list[Any]:
    """One rank does not come to a step; what the others are told, and after how long."""

    def play(rank: int) -> Any:
        pipe = make_pipeline(UNEQUAL, collective_s=DEAD_S)
        began = time.monotonic()
        if rank == 1:
            time.sleep(2 * DEAD_S)
            die()
        try:
            pipe.step(UNEQUAL.batch(0))
        except DipsError as error:
            return f"{type(error).__name__}: {error} | {time.monotonic() - began:.1f}"
        return "nothing"

    return on_ranks(UNEQUAL.ranks, play, dying=(1,))


def mistaken(_: int) -> dict[str, str]:
    """What is told of a loss, and of an optimizer, that fail on the only rank there is."""

    def fail(*_: Any) -> Any:
        raise RuntimeError("it does not fit")

    def optimizer_that_fails(part: nn.Module) -> torch.optim.Optimizer:
        made = adamw(part)
        made.register_step_pre_hook(fail)
        return made

    given: dict[str, dict[str, Any]] = {"loss": {"loss": fail}, "optimizer": {"optimizer": optimizer_that_fails}}
    return {
        what: on_ranks(1, lambda rank, of=of: make_pipeline(ALONE, **of).step(ALONE.batch(0)))[0]
        for what, of in given.items()
    }


def repeated(count: int) -> int:
    """So many jobs of one plan with ministages, each of which must end without an abort; return how many."""
    for _ in range(count):
        check_case(UNEQUAL)
    return count


if __name__ == "__main__":
    words = [word.partition("=") for word in sys.argv[2:]]
    told = {name: globals()[name](int(count or 0)) for name, _, count in words}
    Path(sys.argv[1]).write_text(json.dumps(told))
