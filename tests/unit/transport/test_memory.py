"""Message memory stays in the process between two messages."""

from __future__ import annotations

import ctypes
import mmap
import resource

import numpy as np
import pytest

from dips.transport.memory import keep_message_memory

MIB = 1 << 20


def test_the_next_body_costs_no_page_faults():
    """A MiB that is allocated, written and freed a hundred times over is faulted in a few times at most."""
    if not hasattr(ctypes.CDLL(None), "mallopt"):
        pytest.skip("no glibc to tell")
    keep_message_memory()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(100):
        np.empty(MIB, np.uint8).fill(1)
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    assert faults < 10 * MIB / mmap.PAGESIZE
