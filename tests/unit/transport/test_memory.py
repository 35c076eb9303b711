"""Message memory stays in the process between two messages."""

from __future__ import annotations

import ctypes
import mmap
import resource

import numpy as np
import pytest

from dips.transport.lane import Lane

MIB = 1 << 20


def test_the_next_bodies_cost_no_page_faults():
    """In a process with a lane, eight MiB that are taken, written and freed twenty times are faulted in once or twice:
    left to itself, glibc returns all but two of them to the kernel each time."""
    if not hasattr(ctypes.CDLL(None), "mallopt"):
        pytest.skip("no glibc to tell")
    Lane(0, "127.0.0.1", 0, 10.0).close()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        bodies = [np.empty(MIB, np.uint8) for _ in range(8)]
        for body in bodies:
            body.fill(1)
        del body, bodies
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    assert faults < 24 * MIB / mmap.PAGESIZE
