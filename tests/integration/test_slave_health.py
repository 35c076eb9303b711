"""A slave's control server answers the standard health service, with or without a master; one that died comes back."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import numpy as np
from grpc_health.v1 import health_pb2, health_pb2_grpc

from dips.config import MasterSection, RunFile, Shared, SlaveSection
from dips.slave.app import serve
from dips.telemetry import logs
from dips.transport import control
from dips.transport.endpoints import master_peer
from tests.integration.cluster_harness import Run


async def test_a_slave_without_a_master_is_healthy_and_waits(tmp_path: Path) -> None:
    """Liveness is the process's own affair, so a probe does not kill a slave that waits for its master."""
    section = SlaveSection(
        name="s0",
        master="127.0.0.1:1",
        directory=tmp_path / "s0",
        initial_model=tmp_path / "model.safetensors",
    )
    config = RunFile(shared=Shared(run="test"), master=MasterSection(directory=tmp_path), slaves=(section,), tls=False)
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


def test_a_slave_that_died_comes_back_at_once_in_its_directory(tmp_path: Path) -> None:
    """The master need not hear it silent for two heartbeats, here two minutes; a process elsewhere it lets wait."""
    with Run(tmp_path, {"w": np.zeros(8, np.float32)}, shared={"heartbeat_s": 60.0}, slaves=1) as run:
        master, slave = run.start_master(), run.start_slave("ps0")
        run.until(lambda: '"slave_ready"' in master.tail(), 60, "the slave is READY")
        slave.kill()
        slave = run.start_slave("ps0")
        run.until(lambda: master.tail().count('"slave_ready"') == 2, 60, "its next process is READY")
        slave.kill()
        shutil.rmtree(tmp_path / "ps0")
        slave = run.start_slave("ps0")
        run.until(lambda: "the name ps0 is taken" in slave.tail(), 60, "one without its directory waits")
