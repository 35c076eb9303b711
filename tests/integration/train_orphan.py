"""A training script whose ranks stand still in a collective for ever after their first outer step: torchrun's workers.

torchrun --nproc-per-node 2 train_orphan.py OUT    appends the process id of each rank to OUT
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch.distributed as dist
from train_constant import ConstantModel

from dips.client import OuterLoop


def main(out: Path) -> None:
    dist.init_process_group("gloo")
    OuterLoop(ConstantModel())
    for number in (signal.SIGTERM, signal.SIGHUP):  # the kernel wakes a stopped torchrun whose parent died by SIGHUP
        signal.signal(number, signal.SIG_IGN)  # as unresponsive as a rank in a collective of C++ code
    with out.open("a") as file:
        file.write(f"{os.getpid()}\n")
    while True:
        time.sleep(600)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
