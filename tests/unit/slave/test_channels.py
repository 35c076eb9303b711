"""A slave's connections end with it, and it holds its directory until its work on the disk has ended."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import structlog
from grpc import ChannelConnectivity, aio

from dips.config import MasterSection, RunFile, Shared, SlaveSection
from dips.files import lock_holder
from dips.ids import VersionId
from dips.protocol.effects import Order, Persist
from dips.protocol.events import Done
from dips.slave import app
from dips.slave.ports import WorkOnDisk
from dips.transport import control
from dips.transport.endpoints import Endpoint


async def test_a_slave_that_ends_leaves_no_channel_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither that of its calls nor that of its heartbeats, which goes on beside them."""
    opened, open_channel = list[aio.Channel](), control.open_channel

    def recorded(endpoint: Endpoint) -> aio.Channel:
        opened.append(open_channel(endpoint))
        return opened[-1]

    monkeypatch.setattr(control, "open_channel", recorded)
    model = tmp_path / "model.safetensors"
    section = SlaveSection(name="s0", master="127.0.0.1:1", directory=tmp_path / "s0", initial_model=model)
    config = RunFile(shared=Shared(run="r"), master=MasterSection(directory=tmp_path), slaves=(section,), tls=False)
    ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    serving = asyncio.create_task(app.serve(config, section, structlog.get_logger(), ready.set_result))
    await asyncio.wait_for(ready, 30)
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)
    assert [channel.get_state() for channel in opened] == [ChannelConnectivity.SHUTDOWN] * 2


async def test_a_slave_that_stops_holds_its_directory_until_its_snapshot_is_written(tmp_path: Path) -> None:
    """A slave that is started meanwhile would remove what the former one has not finished writing, and write there."""
    section = SlaveSection(name="s0", master="127.0.0.1:1", directory=tmp_path / "s0")
    config = RunFile(shared=Shared(run="r"), master=MasterSection(directory=tmp_path), slaves=(section,), tls=False)
    writes, order = threading.Event(), Order("s0", 1, 1, 1, Persist(VersionId(1, 1)), 10.0)
    holders = list[str]()

    def write_slowly() -> Done:
        writes.set()
        time.sleep(0.5)
        holders.append(lock_holder(section.lock))
        return Done()

    async with AsyncExitStack() as stack:
        parts = app._build_parts(config, section, structlog.get_logger(), stack)
        master = Endpoint("the master", section.master)
        runtime = app._make_runtime(config, parts, "127.0.0.1:2", master, stack)
        running = asyncio.create_task(runtime.run())
        runtime._do_action(WorkOnDisk(1, order, write_slowly))
        assert await asyncio.to_thread(writes.wait, 10)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    assert holders == [str(os.getpid())]
