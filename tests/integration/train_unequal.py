"""A training script whose ranks do not call the outer loop alike: rank 1 leaves early, and never says goodbye.

    train_unequal.py OUT

The error of each rank lies in OUT.RANK.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from train_constant import ConstantModel

from dips.client import OuterLoop
from dips.errors import LocalProtocolError


def main(out: Path) -> None:
    dist.init_process_group("gloo")
    outer = OuterLoop(torch.nn.parallel.DistributedDataParallel(ConstantModel()))
    begun = time.monotonic()
    if dist.get_rank() != 1:
        try:
            for _ in range(3):
                outer.step(tokens=8)
        except LocalProtocolError as error:
            out.with_name(f"{out.name}.{dist.get_rank()}").write_text(f"{time.monotonic() - begun:.1f} {error}")
    else:
        time.sleep(20)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
