"""A slave's connections end with it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import structlog
from grpc import ChannelConnectivity, aio

from dips.config import MasterSection, RunFile, Shared, SlaveSection
from dips.slave import app
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
