"""Which slaves of its machine a master kills, and when it starts them again."""

from __future__ import annotations

import asyncio
import errno
import subprocess
import sys
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import structlog
from structlog.testing import capture_logs

from dips.config import SlaveSection
from dips.ids import GENESIS
from dips.master import supervisor as supervision
from dips.master.supervisor import LEAST_MOVED, LOST_LEASES, STEADY_S, Child, ProcessWatch, Supervisor
from dips.protocol.enums import SlaveState
from dips.protocol.heartbeats import SlaveHeartbeat
from dips.protocol.options import TimingOptions
from dips.protocol.view import SlaveView
from tests.open_files import nothing_left_open
from tests.waiting import eventually

COMPUTE_S = 10.0
HOLDS = """
import pathlib, sys, time
from dips.files import PidLock
lock = PidLock(pathlib.Path(sys.argv[1]), busy="", advice="")
print("up", flush=True)
time.sleep(600)
"""


def unheard(error: BaseException) -> None:
    raise AssertionError("a task of the supervisor failed") from error


def patient() -> float:
    return COMPUTE_S


def heartbeat(slave: str, worked: int) -> SlaveHeartbeat:
    return SlaveHeartbeat(slave, 1, 1, GENESIS, (), (), 0, 0, 0, 0, 0.0, 0.0, worked)


async def test_an_adopted_slave_that_loads_for_long_is_not_killed(tmp_path: Path) -> None:
    """It has not registered with this master, but heartbeats say that its disk works; when they cease to, it goes.

    It has the time that an operator has set, not that of the run file.
    """
    section = SlaveSection(name="s", master="h:1", directory=tmp_path / "s", initial_model=tmp_path / "m")
    section.directory.mkdir()
    process = subprocess.Popen([sys.executable, "-c", HOLDS, str(section.lock)], stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"up\n"
    seen = {"s": SlaveView(SlaveState.AWAITED)}
    timing, compute_s = TimingOptions(heartbeat_s=0.01, compute_s=COMPUTE_S), COMPUTE_S
    supervisor = Supervisor(
        tmp_path / "dips.yaml",
        [section],
        tmp_path,
        timing,
        lambda: seen,
        lambda: compute_s,
        structlog.get_logger(),
        unheard,
    )
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
        compute_s = 4 * COMPUTE_S  # `dips set`
        now += 2 * COMPUTE_S
        for _ in range(5):
            await asyncio.sleep(0.01)
            assert process.poll() is None, "killed before the time that an operator has set"
        now += 2 * COMPUTE_S
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


# ---- when a process hangs ------------------------------------------------------------------------------------------

TIMING = TimingOptions(heartbeat_s=1.0, lease_heartbeats=5, compute_s=COMPUTE_S)
LEASES_S = LOST_LEASES * TIMING.lease_s


def watched(adopted: bool = False, sinc: int = 3) -> ProcessWatch:
    return ProcessWatch(TIMING, patient, adopted, sinc, begun=0.0)


def test_a_slave_that_is_lost_while_its_process_lives_is_killed_after_two_leases() -> None:
    """Since it was lost, and not since it was started; at the very beginning of the clock too."""
    for begun in (0.0, 100.0):
        watch = watched()
        assert watch.explain_hang("ready", 4, 0.0, 0, begun) == ""
        assert watch.explain_hang("lost", 4, 0.0, 0, begun) == ""
        assert watch.explain_hang("lost", 4, 0.0, 0, begun + LEASES_S - 0.1) == ""
        assert "lost for 10.0 s" in watch.explain_hang("lost", 4, 0.0, 0, begun + LEASES_S)


def test_a_slave_that_comes_back_each_time_is_not_killed() -> None:
    """Its times of being lost do not add up: a link that flaps costs no process that is healthy."""
    watch = watched()
    for at in range(0, 100, 10):
        assert watch.explain_hang("lost", 4, 0.0, 0, float(at)) == ""
        assert watch.explain_hang("lost", 4, 0.0, 0, at + 8.0) == ""
        assert watch.explain_hang("restoring", 4, 0.0, 0, at + 9.0) == ""


def test_a_process_that_has_not_registered_is_not_what_is_lost() -> None:
    """The Coordinator still shows the process before it; one that was adopted is that process."""
    for at in (0.0, 100.0):
        assert watched().explain_hang("lost", 3, 0.0, 0, at) == ""
    fresh, adopted = watched(), watched(adopted=True)
    for at in (0.0, LEASES_S):
        assert fresh.explain_hang("lost", 3, 0.0, 0, at) == ""
        killed = adopted.explain_hang("lost", 3, 0.0, 0, at)
    assert killed


def test_an_adopted_slave_that_brings_its_snapshot_back_is_not_killed() -> None:
    """It has no incarnation, so it sends no heartbeats: the bytes that its process moves tell that it works.

    What a process logs while it waits does not; and nobody kills a process of ours that has not begun.
    """
    watch = watched(adopted=True)
    for at in range(1, 100):
        assert watch.explain_hang("awaited", 0, -1e9, at * LEAST_MOVED, 0.9 * COMPUTE_S * at) == ""
    last = 0.9 * COMPUTE_S * 99
    assert watch.explain_hang("awaited", 0, -1e9, 100 * LEAST_MOVED - 1, last + COMPUTE_S - 0.1) == ""
    assert "does no work" in watch.explain_hang("awaited", 0, -1e9, 100 * LEAST_MOVED - 1, last + COMPUTE_S)
    assert watched().explain_hang("awaited", 0, -1e9, 0, 100 * COMPUTE_S) == ""


async def test_the_bytes_that_a_process_moves_are_seen(tmp_path: Path) -> None:
    """Read and written, as the kernel counts them."""
    code = "import sys; sys.stdin.read(1); open(sys.argv[1], 'wb').write(bytes(1 << 20)); sys.stdin.read(1)"
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "f")], stdin=subprocess.PIPE)
    assert process.stdin is not None
    child = Child(process.pid, None)
    try:
        before = child.read_moved_bytes()
        process.stdin.write(b"x")
        process.stdin.flush()
        await eventually(lambda: child.read_moved_bytes() >= before + LEAST_MOVED)
    finally:
        child.stop_watching()
        process.kill()
        process.wait()
        process.stdin.close()


# ---- starting again ------------------------------------------------------------------------------------------------


class DeadChild:
    """A process that has ended."""

    pid, code, adopted, alive = 1, 1, False, False


async def test_a_slave_that_dies_is_started_again_after_a_pause_that_doubles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to half a minute; after a process that was steady from the shortest again. What cannot be started likewise."""
    section = SlaveSection(name="s", master="h:1", directory=tmp_path / "s", initial_model=tmp_path / "m")
    section.directory.mkdir()
    supervisor = Supervisor(
        tmp_path / "dips.yaml", [section], tmp_path, TIMING, dict, patient, structlog.get_logger(), unheard
    )
    now, pauses = 0.0, list[float]()

    def start(slave: SlaveSection) -> Any:
        if len(pauses) == 2:
            raise OSError("no memory for a process")
        return DeadChild()

    async def run_until_it_dies(slave: SlaveSection, child: Any) -> None:
        nonlocal now
        now += STEADY_S - 1.0 if len(pauses) != 8 else STEADY_S

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 10:
            raise asyncio.CancelledError

    supervisor._clock = lambda: now
    monkeypatch.setattr(supervisor, "_start_process", start)
    monkeypatch.setattr(supervisor, "_watch_child", run_until_it_dies)
    with monkeypatch.context() as patch:
        patch.setattr(asyncio, "sleep", sleep)
        with pytest.raises(asyncio.CancelledError):
            await supervisor._keep_running(section)
    full = [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 0.5, 1.0]
    assert [pause / 2 <= most and most <= 2 * pause for pause, most in zip(pauses, full, strict=True)] == [True] * 10


# ---- what it looks with --------------------------------------------------------------------------------------------


async def test_a_full_disk_does_not_close_the_supervisors_eyes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A log that cannot be kept short is told once each time; a slave that is lost from then on is seen to be.

    Its task ended with the OSError, and nobody heard of it: a slave that hung was never killed.
    """
    section = SlaveSection(name="s", master="h:1", directory=tmp_path / "s", initial_model=tmp_path / "m")
    seen = {"s": SlaveView(SlaveState.READY, sinc=1)}
    timing, looks = TimingOptions(heartbeat_s=0.001), list[Path]()

    def fail(log: Path, most_bytes: int) -> None:
        looks.append(log)
        if len(looks) != 3:  # the disk has room for a moment
            raise OSError(errno.ENOSPC, "no space left on the device")

    monkeypatch.setattr(supervision, "truncate_log", fail)
    with capture_logs() as logs:
        supervisor = Supervisor(
            tmp_path / "dips.yaml",
            [section],
            tmp_path,
            timing,
            lambda: dict(seen),
            patient,
            structlog.get_logger(),
            unheard,
        )
        looking = asyncio.create_task(supervisor._refresh_view())
        await eventually(lambda: len(looks) >= 6)
        seen["s"] = SlaveView(SlaveState.LOST, sinc=1)
        await eventually(lambda: supervisor._seen["s"].state == "lost")
        looking.cancel()
    assert len([row for row in logs if row["log_level"] == "warning"]) == 2


@pytest.mark.parametrize("stop", [True, False])
async def test_slaves_end_with_a_master_that_is_stopped_only(tmp_path: Path, stop: bool) -> None:
    """One that ends otherwise leaves them to the next, and what it watched them with is closed."""
    supervisor = Supervisor(tmp_path / "f", [], tmp_path, TIMING, dict, patient, structlog.get_logger(), unheard)
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        with nothing_left_open():
            child = supervisor._children["s"] = Child(process.pid, process)
            await supervisor.stop_supervising(stop=stop)
            assert child.alive is not stop
    finally:
        process.kill()
        process.wait()


async def test_a_slave_that_has_no_layers_yet_is_left_alone(tmp_path: Path) -> None:
    """It is new in the run file, and not in the run before `dips rebalance` has ended: its master would have ended."""
    section = SlaveSection(name="s", master="h:1", directory=tmp_path / "s", initial_model=tmp_path / "m")
    timing, log = TimingOptions(heartbeat_s=0.001), structlog.get_logger()
    supervisor = Supervisor(tmp_path / "f", [section], tmp_path, timing, dict, patient, log, unheard)
    clock = count(1)
    supervisor._clock = lambda: 1000.0 * next(clock)
    child = Child.start(["sleep", "600"], tmp_path / "log")
    watching = asyncio.create_task(supervisor._watch_child(section, child))
    try:
        await eventually(lambda: watching.done() or next(clock) > 9)
        assert child.alive and not watching.done()
    finally:
        await child.end(0.0)
    await watching


async def test_slaves_are_looked_at_once_a_heartbeat(tmp_path: Path) -> None:
    """And not as often as the loop turns: it has a master to run."""
    looks = count(1)
    timing = TimingOptions(heartbeat_s=1000.0)

    def view() -> Any:
        assert next(looks) < 3
        return {}

    supervisor = Supervisor(tmp_path / "f", [], tmp_path, timing, view, patient, structlog.get_logger(), unheard)
    supervisor.start()
    for _ in range(3):
        await asyncio.sleep(0)
    await supervisor.stop_supervising(stop=False)
    assert next(looks) == 2


async def test_a_bug_in_the_supervisor_is_heard_at_once(tmp_path: Path) -> None:
    """Whoever runs it ends then, instead of going on with slaves that nobody supervises."""
    heard: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()

    def broken() -> Any:
        raise KeyError("slaves")

    supervisor = Supervisor(
        tmp_path / "f", [], tmp_path, TIMING, broken, patient, structlog.get_logger(), heard.set_result
    )
    supervisor.start()
    async with asyncio.timeout(20):
        assert isinstance(await heard, KeyError)
    await supervisor.stop_supervising(stop=False)
