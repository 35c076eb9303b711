"""A slave's control server answers the standard health service, with or without a master."""

from __future__ import annotations

import asyncio
from pathlib import Path

from grpc_health.v1 import health_pb2, health_pb2_grpc

from dips.config import MasterSection, RunFile, Shared, SlaveSection
from dips.slave.app import serve
from dips.telemetry import logs
from dips.transport import control
from dips.transport.endpoints import master_peer


async def test_a_slave_without_a_master_is_healthy_and_waits(tmp_path: Path) -> None:
    """Liveness is the process's own affair, so a probe does not kill a slave that waits for its master."""
    section = SlaveSection(
        name="s0",
        master="127.0.0.1:1",
        directory=tmp_path / "s0",
        initial_model=tmp_path / "model.safetensors",
        threads=1,
    )
    config = RunFile(
        shared=Shared(run="test"), master=MasterSection(directory=tmp_path), slaves=(section,), insecure=True
    )
    ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    incarnation = asyncio.create_task(serve(config, section, logs.configure_log("slave", "s0"), ready.set_result))
    channel = control.open_channel(master_peer(await asyncio.wait_for(ready, 30), None))
    try:
        stub = health_pb2_grpc.HealthStub(channel)
        answer = await stub.Check(health_pb2.HealthCheckRequest(service="dips.v1.OrderService"), timeout=5)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        assert not incarnation.done()
    finally:
        await channel.close()
        incarnation.cancel()
        await asyncio.gather(incarnation, return_exceptions=True)
