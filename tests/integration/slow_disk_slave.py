"""A `dips-slave` whose disk is silent for SLOW_FSYNC_S in the one fsync of each snapshot:
`python slow_disk_slave.py --config … --name …`.

Every byte is with the kernel by then, and nothing tells that it goes on: a full write-back, NFS, a volume over the
network do so.
"""

from __future__ import annotations

import os
import time

from dips.slave import app
from dips.store.version import MANIFEST_FILE


def main() -> None:
    seconds, sync = float(os.environ["SLOW_FSYNC_S"]), os.fsync

    def sync_slowly(descriptor: int) -> None:
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith(f"/{MANIFEST_FILE}"):
            time.sleep(seconds)
        sync(descriptor)

    os.fsync = sync_slowly
    app.main()


if __name__ == "__main__":
    main()
