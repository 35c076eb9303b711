"""Runs an example, but nobody trains before all clusters have joined: how fast torchrun starts is not what is measured.

meeting_rank.py DIRECTORY CLUSTERS EXAMPLE.py [WORDS…]
"""

from __future__ import annotations

import os
import runpy
import sys
import time
from pathlib import Path
from typing import Any

import torch

from dips.client import OuterLoop
from dips.client.rank.joining import CLUSTER_FILE


def meet(directory: Path, clusters: int) -> None:
    """Make every OuterLoop wait, once it has joined, until all clusters have."""
    join = OuterLoop.__init__

    def joined(self: OuterLoop, *words: Any, **options: Any) -> None:
        join(self, *words, **options)
        (directory / f"{Path(os.environ[CLUSTER_FILE]).stem}.joined").touch()
        while len(list(directory.glob("*.joined"))) < clusters:
            time.sleep(0.05)

    OuterLoop.__init__ = joined  # type: ignore[method-assign]


if __name__ == "__main__":
    torch.set_num_threads(1)
    meet(Path(sys.argv[1]), int(sys.argv[2]))
    del sys.argv[1:3]
    sys.argv[0] = sys.argv.pop(1)
    sys.path.insert(0, str(Path(sys.argv[0]).parent))
    runpy.run_path(sys.argv[0], run_name="__main__")
