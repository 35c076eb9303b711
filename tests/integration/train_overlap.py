"""A training script whose every inner step adds one number to every element, while pushes and pulls move beside it.

    train_overlap.py OUT STEP_S DELTA [FRAGMENTS]     its first start dies when it has frozen so many of its first push

With one cluster, outer lr 1 and no momentum the outer step gives θ_{v+1} = θ_pushed, so a merge must leave θ_local as
it is: after n inner steps every element of every rank is n·DELTA, whatever moved meanwhile. Asserted at every step. At
its end each rank writes to OUT.RANK how many steps it took, how many of them while something was out, and the numbers
that its elements are: as many as fragments were frozen at different steps.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from train_constant import lay_out, local, one_number

from dips.client import OuterLoop
from dips.client.rank.steps import OpenTransfer


def numbers(model: nn.Module) -> list[float]:
    """Those that the elements on this rank are."""
    return sorted({value for p in model.parameters() for value in local(p).detach().unique().tolist()})


def frozen_fragments(outer: OuterLoop) -> int:
    """How many fragments of the present transfer have been frozen, or asked for; -1 if there is none."""
    moving = outer._outer_steps._in_flight
    gate = moving.transfer._gate if isinstance(moving, OpenTransfer) else None
    return gate.open if gate is not None and gate.count > 1 else -1


def main(out: Path, step_s: float, delta: float, crash_after: int = 0) -> None:
    rank = int(os.environ.get("RANK", "0"))
    model = lay_out()
    steps, beside, versions = 0, 0, set[str]()
    with OuterLoop(model) as outer:
        while not outer.finished:
            with torch.no_grad():
                for parameter in model.parameters():
                    local(parameter).add_(delta)
            steps += 1
            time.sleep(step_s)
            moving, before = outer.moving, outer.version
            outer.step(tokens=8, loss=1.0)
            if frozen_fragments(outer) == crash_after and os.environ["DIPS_ATTEMPT"] == "1":
                os._exit(9)
            beside += moving
            versions.add(str(outer.version))
            if outer.finished:
                break  # the last version replaces what was trained after its last push
            number = one_number(model)
            assert number is None or number == steps * delta, (
                f"{number} after {steps} steps, {before} → {outer.version}"
            )
    found = {"steps": steps, "beside": beside, "versions": sorted(versions), "ends": numbers(model)}
    out.with_name(f"{out.name}.{rank}").write_text(json.dumps(found))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3]), *map(int, sys.argv[4:]))
