"""A `dips-slave` whose disk takes SLOW_FSYNC_S for each snapshot: `python slow_disk_slave.py --config … --name …`.

The kernel's write-out is what is slow: each piece of a snapshot is with the kernel at once and on the platter late.
"""

from __future__ import annotations

import os
import time
from typing import Any

from dips.slave import app, snapshots, tensorfile

PIECES = 50  # the snapshot's time in so many


def main() -> None:
    seconds, write = float(os.environ["SLOW_FSYNC_S"]), tensorfile.write_tensors

    def write_slowly(path: Any, metadata: Any, shapes: Any, data: Any, on_piece: Any) -> int:
        for _ in range(PIECES):
            time.sleep(seconds / PIECES)
            on_piece(1)
        return write(path, metadata, shapes, data, on_piece)

    snapshots.tensorfile.write_tensors = write_slowly  # type: ignore[assignment]  # the one place that writes snapshots
    app.main()


if __name__ == "__main__":
    main()
