"""Keeps freed memory of messages in the process for the next ones.

libzmq allocates each body that arrives. glibc returns such memory to the kernel as soon as it is free, so the next body
costs page faults and zeroed pages again: measured 80 to 130 µs for each MiB, as much as its copy into place. The kept
memory is bounded by what may be in transit. Without glibc nothing is changed.
"""

from __future__ import annotations

import ctypes
from functools import cache

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h
KEEP_BYTES = 128 << 20  # free memory at the end of a heap that is not returned
HEAP_BYTES = 4 << 20  # larger blocks are mapped, and returned when freed: arrays, never messages


@cache
def keep_message_memory() -> None:
    """Configure malloc once for the process, where there is glibc."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    mallopt(_M_MMAP_THRESHOLD, HEAP_BYTES)
    mallopt(_M_TRIM_THRESHOLD, KEEP_BYTES)
