"""A planned pipeline of 2 + 1 + 1 ranks under Di-PS: it computes a step, and then sets every parameter to one number.

    train_pipeline.py CLUSTER TOKENS CLUSTERS OUT

After each step that ends with another version each rank writes (version, number) to OUT.RANK. While OUT.die.N are
there, each attempt removes one, and its last rank dies after N actions of its order. The cluster `learner` trains
another model by AdamW instead, and writes its losses.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from check_pipeline import LEARNED, adamw, end_after, make_case, make_pipeline
from torch import nn
from train_constant import WORDS, ConstantModel, constant, local, one_number

from dips.client import OuterLoop
from dips.inside.pipeline import Pipeline

CASE = make_case("breadth_first", (2, 1, 1), 2, microbatches=4, layers=6)  # a layer for each part


def build() -> Iterator[tuple[str, nn.Module]]:
    """Yield the layers of the constant model, and two without parameters."""
    model = ConstantModel()
    yield "embed", model.embed
    yield from ((f"blocks.{i}", block) for i, block in enumerate(model.blocks))
    yield from ((f"between.{i}", nn.Tanh()) for i in range(2))
    yield "head", model.head


def squares(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (output.squeeze(-1) - targets).square().sum()


def main(cluster: str, tokens: int, clusters: int, out: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, seen = dist.get_rank(), []
    pipe = Pipeline(build, CASE.plan, loss=squares)
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randint(WORDS, (8, 3), generator=generator)
    points = sorted(out.parent.glob(f"{out.name}.die.*"))
    with OuterLoop(pipe.parts) as outer:
        out.with_name(f"{out.name}.{len(points)}.ready.{rank}").touch()
        while len(list(out.parent.glob("*.ready.0"))) < clusters:
            time.sleep(0.05)
        if points and rank == dist.get_world_size() - 1:
            points[0].unlink()
            end_after(pipe, int(points[0].suffix[1:]), steps=1)
        while True:
            if not seen or seen[-1][0] != str(outer.version):
                seen.append((str(outer.version), one_number(nn.ModuleList(pipe.parts))))
                out.with_name(f"{out.name}.{rank}").write_text(json.dumps(seen))
            if outer.finished:
                break
            pipe.step((inputs, torch.zeros(8, 3)))
            with torch.no_grad():
                for part in pipe.parts:
                    for parameter in part.parameters():
                        local(parameter).fill_(constant(cluster, outer.version.version))
                        parameter.grad = None
            outer.step(tokens=tokens)
    pipe.close()
    dist.barrier()
    dist.destroy_process_group()


def learn(_: str, steps: int, __: int, out: Path) -> None:
    """Train on one batch by the ministages' own optimizers."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    pipe, losses = make_pipeline(LEARNED, optimizer=adamw), []
    with OuterLoop(pipe.parts) as outer:
        while not outer.finished and len(losses) < steps:
            losses.append(pipe.step(LEARNED.batch(0)))
            outer.step(tokens=pipe.tokens, loss=losses[-1])
    out.with_name(f"{out.name}.{dist.get_rank()}").write_text(json.dumps([str(outer.version), losses]))
    pipe.close()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    (learn if sys.argv[1] == "learner" else main)(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
