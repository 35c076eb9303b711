"""How a slave's process ends: by a signal, or by an error of its own."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from dips.errors import FailedDisk
from dips.slave.app import _until_stopped


async def test_an_error_of_its_own_ends_a_slave_with_that_error() -> None:
    """It ended with 0, after which nothing starts it again."""

    async def break_off() -> None:
        raise FailedDisk("its disk is broken")

    with pytest.raises(FailedDisk, match="its disk is broken"):
        await _until_stopped(asyncio.create_task(break_off()))


async def test_a_signal_ends_a_slave_without_an_error() -> None:
    """What runs is over when its parts are closed."""
    running = asyncio.create_task(asyncio.Event().wait())
    asyncio.get_running_loop().call_soon(os.kill, os.getpid(), signal.SIGTERM)
    await _until_stopped(running)
    assert running.cancelled()
