"""A slave's control server answers the standard health service, with or without a master; one that died comes back."""

from __future__ import annotations

import asyncio
import os
import resource
import shutil
import signal
import socket
import sys
import threading
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from dips.config import MasterSection, RunFile, Shared, SlaveSection
from dips.errors import ConfigError
from dips.files import lock_holder
from dips.slave.app import serve
from dips.telemetry import logs
from dips.transport import control
from dips.transport.endpoints import master_peer
from tests.integration.cluster_harness import Run

MODEL = {"w": np.zeros(4, np.float32)}
WHO_ASKS = """
import os, time
print("no socket for whom it starts" if "NOTIFY_SOCKET" not in os.environ else os.environ)
time.sleep(60)
"""


@pytest.mark.parametrize("role", ["master", "slave", "client"])
def test_systemd_hears_that_a_daemon_serves_runs_and_stops(tmp_path: Path, role: str) -> None:
    """By a real socket: READY once, WATCHDOG as long as the process runs and not while it stands still, STOPPING."""
    watchdog_s = 0.4
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd, Run(tmp_path, MODEL, slaves=1) as run:
        systemd.bind(str(tmp_path / "notify"))
        systemd.settimeout(30)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
            patch.setenv("WATCHDOG_USEC", str(int(1e6 * watchdog_s)))
            process = {
                "master": run.start_master,
                "slave": lambda: run.start_slave("ps0"),
                "client": lambda: run.start_cluster("a", [sys.executable, "-c", WHO_ASKS]),
            }[role]()
        assert [systemd.recv(100) for _ in range(4)] == [b"READY=1", *3 * [b"WATCHDOG=1"]]
        os.kill(process.pid, signal.SIGSTOP)
        systemd.settimeout(2 * watchdog_s)
        with suppress(TimeoutError):
            for _ in range(4):  # what was sent before
                systemd.recv(100)
        with pytest.raises(TimeoutError):
            systemd.recv(100)
        os.kill(process.pid, signal.SIGCONT)
        process.terminate()
        systemd.setblocking(False)
        told = [systemd.recv(100)]
        while told[-1] != b"STOPPING=1":
            told.append(systemd.recv(100))
        assert set(told[:-1]) <= {b"WATCHDOG=1"}
    if role == "client":
        assert "no socket for whom it starts" in (tmp_path / "a.log").read_text()


async def test_a_slave_without_a_master_is_healthy_and_waits(tmp_path: Path) -> None:
    """Liveness is the process's own affair, so a probe does not kill a slave that waits for its master; with its end
    it gives back its directory, its ports and every thread. It takes as many open files as it may have.
    """
    (tmp_path / "mirror").mkdir()
    section = SlaveSection(
        name="s0",
        master="127.0.0.1:1",
        directory=tmp_path / "s0",
        initial_model=tmp_path / "model.safetensors",
        mirror=(tmp_path / "mirror").as_uri(),
    )
    config = RunFile(shared=Shared(run="test"), master=MasterSection(directory=tmp_path), slaves=(section,), tls=False)
    ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    before, limits = set(threading.enumerate()), resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limits[1] - 1, limits[1]))
    incarnation = asyncio.create_task(serve(config, section, logs.configure_log("slave", "s0"), ready.set_result))
    channel = control.open_channel(master_peer(await asyncio.wait_for(ready, 30), None))
    try:
        stub = health_pb2_grpc.HealthStub(channel)
        answer = await stub.Check(health_pb2.HealthCheckRequest(service="dips.v1.OrderService"), timeout=5)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        assert not incarnation.done()
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == limits[1]
        assert {thread.name for thread in set(threading.enumerate()) - before} >= {"mirror", "timeline", "shard_0"}
        with pytest.raises(ConfigError, match="is held by another running slave"):
            await serve(config, section, logs.configure_log("slave", "s0"))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        await channel.close()
        incarnation.cancel()
        await asyncio.gather(incarnation, return_exceptions=True)
    for thread in set(threading.enumerate()) - before:
        if not thread.name.startswith(("asyncio", "Thread-")):  # of the loop's own executor, and of gRPC
            thread.join(10)
            assert not thread.is_alive(), thread.name
    assert not lock_holder(section.lock)


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
        run.until(lambda: "name that is free, got ps0" in slave.tail(), 60, "one without its directory waits")
