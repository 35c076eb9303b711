"""A training script without training, for recovery.py: inner steps of one length, each told with its times.

    recovery_rank.py CLUSTER LAYERS LAYER_NUMEL STEP_S MEETING

Appends a line of JSON for each call of `step` to MEETING/CLUSTER.jsonl: when it was made and when it returned (Unix
seconds), and the version then installed.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from benchmarks.outer_rank import Model
from dips.client import OuterLoop


def main(name: str, layers: int, numel: int, step_s: float, meeting: Path) -> None:
    with OuterLoop(Model(layers, numel)) as outer, (meeting / f"{name}.jsonl").open("a", buffering=1) as out:
        while not outer.finished:
            time.sleep(step_s)
            begun = time.time()
            outer.step(tokens=1)
            out.write(json.dumps({"begun": begun, "ended": time.time(), "version": str(outer.version)}) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]), Path(sys.argv[5]))
