"""Whom the master of a machine kills among the slaves that a former master left there."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import structlog

from dips.config import SlaveSection
from dips.ids import GENESIS
from dips.master.supervisor import Supervisor
from dips.protocol.heartbeats import SlaveHeartbeat
from dips.protocol.options import TimingOptions

COMPUTE_S = 10.0
HOLDS = """
import pathlib, sys, time
from dips.pidlock import PidLock
lock = PidLock(pathlib.Path(sys.argv[1]), busy="", advice="")
print("up", flush=True)
time.sleep(600)
"""


def heartbeat(slave: str, worked: int) -> SlaveHeartbeat:
    return SlaveHeartbeat(slave, 1, 1, GENESIS, (), (), 0, 0, 0, 0, 0.0, 0.0, worked)


async def test_an_adopted_slave_that_loads_for_long_is_not_killed(tmp_path: Path) -> None:
    """It has not registered with this master, but heartbeats say that its disk works; when they cease to, it goes."""
    section = SlaveSection(name="s", master="h:1", directory=tmp_path / "s", initial_model=tmp_path / "m")
    section.directory.mkdir()
    process = subprocess.Popen([sys.executable, "-c", HOLDS, str(section.lock)], stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"up\n"
    seen: dict[str, Any] = {"s": {"state": "starting", "sinc": 0}}
    timing = TimingOptions(heartbeat_s=0.01, compute_s=COMPUTE_S)
    supervisor = Supervisor(tmp_path / "dips.yaml", [section], tmp_path, timing, lambda: seen, structlog.get_logger())
    now = 0.0
    supervisor._clock = lambda: now
    supervisor.start()
    try:
        for worked in range(20):
            supervisor.on_slave_heartbeat(heartbeat("s", worked))
            supervisor.on_slave_heartbeat(heartbeat("of another master", worked))
            await asyncio.sleep(0.01)
            assert process.poll() is None, "killed while it worked"
            now += 0.8 * COMPUTE_S
        now += COMPUTE_S
        async with asyncio.timeout(30):
            while process.poll() is None:
                supervisor.on_slave_heartbeat(heartbeat("s", 19))
                await asyncio.sleep(0.01)
        assert set(supervisor._worked) == {"s"}
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        await supervisor.stop_supervising(stop=True)
