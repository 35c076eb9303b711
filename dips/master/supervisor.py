"""Starts and supervises the slaves whose `supervisor` is `exec`: child processes held by their pidfds."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from pathlib import Path
from random import Random

from dips.config import SlaveSection
from dips.files import lock_holder, umask_given
from dips.protocol.enums import SlaveState
from dips.protocol.heartbeats import SlaveHeartbeat
from dips.protocol.options import TimingOptions
from dips.protocol.view import SlaveView
from dips.tasks import Fail, start_task
from dips.telemetry.logs import Log
from dips.transport.backoff import Backoff

# ---- children -------------------------------------------------------------------------------------------------------
# One process that the master supervises, held by its pidfd, so that a pid that the kernel reuses is not mistaken for
# it.
#
# It may be a child, or a process that a former master started and this one adopted; either way its end is noticed.


class Child:
    """A process that is alive, or whose end was noticed. Must be created inside the event loop."""

    def __init__(self, pid: int, popen: subprocess.Popen[bytes] | None, *, whole_group: bool = False) -> None:
        """With `whole_group` the rest of its process group is killed when it ends, before its pid can be reused.

        Raise ProcessLookupError if no process has this pid.
        """
        self.pid, self.adopted, self._popen, self._whole_group = pid, popen is None, popen, whole_group
        self._fd = os.pidfd_open(pid)
        self._ended = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._fd, self._on_death)

    @classmethod
    def start(cls, command: Sequence[str], log: Path, cwd: Path | None = None, *, whole_group: bool = False) -> Child:
        """Start a process in its own session that appends to `log`; raise OSError if it cannot be started."""
        with log.open("ab") as out:  # its own descriptor: the process outlives us
            popen = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                cwd=cwd,
                start_new_session=True,
                umask=umask_given(),
            )
        try:
            return cls(popen.pid, popen, whole_group=whole_group)
        except OSError:  # no descriptor is left to watch it with
            popen.kill()
            popen.wait()
            raise

    @property
    def alive(self) -> bool:
        return not self._ended.is_set()

    @property
    def code(self) -> int | None:
        """Exit code, negative for a signal; None while it runs, and for a process that is not our child."""
        return self._popen.poll() if self._popen is not None else None

    def read_moved_bytes(self) -> int:
        """Return the bytes that it has read and written since its start, files and sockets; 0 if unknown."""
        try:
            lines = Path(f"/proc/{self.pid}/io").read_text().splitlines()
            counts = dict(line.split(": ", 1) for line in lines)
            return int(counts["rchar"]) + int(counts["wchar"])
        except (OSError, KeyError, ValueError):
            return 0

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal, unless it has ended."""
        if self.alive:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._fd, number)

    def kill_group(self) -> None:
        """Kill the process and its process group, which it must lead, unless it has ended."""
        if self.alive:  # not reaped yet, so its pid is not reused
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    async def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for its end; return whether it ended within `timeout_s`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._ended.wait()
        return not self.alive

    async def end(self, grace_s: float) -> None:
        """Send SIGTERM, then SIGKILL after `grace_s`; return when it has ended."""
        self.send_signal(signal.SIGTERM)
        if not await self.wait(grace_s):
            self.send_signal(signal.SIGKILL)
            await self.wait()

    def _on_death(self) -> None:
        self._loop.remove_reader(self._fd)
        os.close(self._fd)
        if self._whole_group:
            self.kill_group()
        if self._popen is not None:
            self._popen.wait()
        self._ended.set()

    def stop_watching(self) -> None:
        """Stop watching; the process goes on."""
        if self.alive:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)


def truncate_log(log: Path, most_bytes: int) -> None:
    """Limit a log that another process appends to: above the size it is copied to `<log>.1`, then emptied.

    Lines that are written between the two are lost, which is acceptable for a log. A copy for which there is no room
    leaves no part, which would keep the last room of the ledger's disk.
    """
    with suppress(FileNotFoundError):
        if log.stat().st_size > most_bytes:
            former = log.with_name(log.name + ".1")
            try:
                shutil.copyfile(log, former)
            except OSError:
                former.unlink(missing_ok=True)
                raise
            os.truncate(log, 0)


class BoundedLogs:
    """Keeps logs of other processes short; a failure is logged once and tried again, while the processes go on."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._unbounded: set[Path] = set()

    async def bound_log(self, path: Path, most_bytes: int) -> None:
        """Limit a log, as `truncate_log` does."""
        try:
            await asyncio.to_thread(truncate_log, path, most_bytes)
            self._unbounded.discard(path)
        except OSError as error:
            if path not in self._unbounded:
                self._log.warning("a log cannot be kept short", log=str(path), why=str(error))
            self._unbounded.add(path)


# ---- supervisor -----------------------------------------------------------------------------------------------------
# Starts and supervises the slaves whose `supervisor` is `exec`: child processes on the master's own machine.
#
# A slave that dies is started again after a pause that doubles. A slave that the Coordinator has lost while its process
# is alive (stopped, hung, unresponsive) is killed through its pidfd, and so is an adopted one that neither registers
# nor works for `compute_s`: it may be loading a snapshot for a former master, which its heartbeats show; or restoring
# one from its mirror before its first registration, which the bytes that it reads and writes show. There are never two
# processes for one slave: a new one is started only when the old one has certainly ended, and the lock of the snapshot
# directory identifies the old one, even to a later master. So a master that was killed finds its slaves alive, with θ
# still in memory. A slave's output goes to <master.directory>/slaves/.
#
# A master that is stopped by SIGTERM stops its slaves. One that ends for another reason (74: its ledger; 75: a later
# master exists) leaves them to the next master.


FIRST_PAUSE_S = 0.5  # before a slave that died is started again; doubles
LONGEST_PAUSE_S = 30.0
STEADY_S = 60.0  # a process that ran for this long is restarted after the first pause again
LOST_LEASES = 2  # a live process whose slave has been lost for this many leases hangs
END_GRACE_S = 30.0  # between SIGTERM and SIGKILL: time to finish a snapshot
LEAST_MOVED = 1 << 20  # bytes read and written that count as work: more than a waiting process logs
LOG_BYTES = 16 << 20  # of each slave's log, and as much of the former one

LOST, AWAITED = SlaveState.LOST.value, SlaveState.AWAITED.value

Seen = Mapping[str, SlaveView]


@dataclass
class ProcessWatch:
    """Decides whether a live process of a slave hangs. Reads no clock: the supervisor passes all times."""

    timing: TimingOptions
    compute_s: Callable[[], float]  # asked at each look: an operator may change it
    adopted: bool
    sinc_before: int  # the slave's incarnation when the watch began
    begun: float
    lost_since: float | None = None
    moved: tuple[int, float] = (0, -inf)  # bytes that it had read and written, and when they last rose by LEAST_MOVED

    def explain_hang(self, state: str, sinc: int, worked_at: float, moved: int, now: float) -> str:
        """Return why the process is to be killed; empty if it does not hang.

        state, sinc  of its slave, as the Coordinator sees it
        worked_at    when its heartbeats last reported work
        moved        bytes that it has read and written
        """
        registered = self.adopted or sinc > self.sinc_before
        self.lost_since = (now if self.lost_since is None else self.lost_since) if state == LOST else None
        if moved - self.moved[0] >= LEAST_MOVED:
            self.moved = moved, now
        if self.lost_since is not None and registered:
            lost_s = now - self.lost_since
            return f"lost for {lost_s:.1f} s while its process lives" if lost_s >= self._most_lost_s else ""
        idle_s = now - max(self.begun, worked_at, self.moved[1])
        if self.adopted and state == AWAITED and idle_s >= self.compute_s():
            return "it did not register with this master, and does no work"
        return ""

    @property
    def _most_lost_s(self) -> float:
        return LOST_LEASES * self.timing.lease_s


class Supervisor:
    """Supervises slaves. `view_slaves` returns them as the Coordinator sees them now."""

    def __init__(
        self,
        config: Path,
        slaves: Sequence[SlaveSection],
        directory: Path,
        timing: TimingOptions,
        view_slaves: Callable[[], Seen],
        compute_s: Callable[[], float],
        log: Log,
        fail: Fail,
    ) -> None:
        """`fail` is called with exceptions of the tasks, since slaves must not run unsupervised unnoticed. `compute_s`
        returns how long an adopted slave may do no work, as an operator has last set it.
        """
        self._config, self._slaves, self._timing, self._view, self._log = config, slaves, timing, view_slaves, log
        self._compute_s, self._fail = compute_s, fail
        self._directory = directory / "slaves"
        self._seen: Seen = {}
        self._children: dict[str, Child] = {}
        self._worked: dict[str, tuple[int, float]] = {}  # our slaves → (bytes processed, when they last rose)
        self._logs = BoundedLogs(log)
        self._tasks: list[asyncio.Task[None]] = []
        self._clock = asyncio.get_running_loop().time

    def on_slave_heartbeat(self, heartbeat: SlaveHeartbeat) -> None:
        """Record how much a slave has processed, even one that has not registered with this master yet."""
        before = self._worked.get(heartbeat.slave)
        ours = heartbeat.slave in {slave.name for slave in self._slaves}
        if ours and (before is None or heartbeat.work_bytes != before[0]):
            self._worked[heartbeat.slave] = heartbeat.work_bytes, self._clock()

    def start(self) -> None:
        """Start or adopt every slave, and keep them running."""
        self._directory.mkdir(parents=True, exist_ok=True)
        loops = [self._refresh_view(), *(self._keep_running(slave) for slave in self._slaves)]
        self._tasks = [start_task(loop, self._fail) for loop in loops]

    async def stop_supervising(self, stop: bool) -> None:
        """Stop supervising. With `stop`, end the slaves too and return when all of them have ended."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        living = [child for child in self._children.values() if child.alive]
        if stop:
            await asyncio.gather(*(child.end(END_GRACE_S) for child in living))
        for child in living:
            child.stop_watching()

    async def _refresh_view(self) -> None:
        while True:
            self._seen = self._view()
            for slave in self._slaves:
                await self._logs.bound_log(self._log_path(slave), LOG_BYTES)
            await asyncio.sleep(self._timing.heartbeat_s)

    async def _keep_running(self, slave: SlaveSection) -> None:
        backoff = Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S, Random())
        while True:
            began = self._clock()
            try:
                child = self._adopt_child(slave) or self._start_process(slave)
            except OSError as error:
                pause_s = backoff.next_pause_s()
                self._log.error("a slave cannot be started", slave=slave.name, why=str(error), again_in_s=pause_s)
            else:
                self._children[slave.name] = child
                await self._watch_child(slave, child)
                if self._clock() - began >= STEADY_S:
                    backoff.reset()
                pause_s = backoff.next_pause_s()
                self._log.warning("slave ended", slave=slave.name, pid=child.pid, code=child.code, again_in_s=pause_s)
            await asyncio.sleep(pause_s)

    def _adopt_child(self, slave: SlaveSection) -> Child | None:
        """Adopt the process that holds the directory now: a former master's slave, or one started by hand."""
        pid = lock_holder(slave.lock)
        if not pid.isdigit():
            return None
        try:
            child = Child(int(pid), None)
        except ProcessLookupError:  # it has ended since; its lock is free now
            return None
        self._log.info("slave adopted", slave=slave.name, pid=child.pid)
        return child

    def _start_process(self, slave: SlaveSection) -> Child:
        command = [sys.executable, "-m", "dips.slave.app", "--config", str(self._config), "--name", slave.name]
        child = Child.start(command, self._log_path(slave))
        self._log.info("slave started", slave=slave.name, pid=child.pid, log=str(self._log_path(slave)))
        return child

    async def _watch_child(self, slave: SlaveSection, child: Child) -> None:
        """Return when the process has ended; kill it if it hangs."""
        watch = ProcessWatch(self._timing, self._compute_s, child.adopted, self._seen_sinc(slave), self._clock())
        while not await child.wait(self._timing.heartbeat_s):
            _, worked_at = self._worked.get(slave.name, (0, -inf))
            seen, moved = self._seen.get(slave.name), child.read_moved_bytes()
            state = seen.state.value if seen is not None else ""
            if why := watch.explain_hang(state, self._seen_sinc(slave), worked_at, moved, self._clock()):
                await self._kill_child(slave, child, why)

    async def _kill_child(self, slave: SlaveSection, child: Child, why: str) -> None:
        self._log.error("slave hangs: killed", slave=slave.name, pid=child.pid, why=why)
        child.send_signal(signal.SIGKILL)
        await child.wait()

    def _seen_sinc(self, slave: SlaveSection) -> int:
        seen = self._seen.get(slave.name)
        return seen.sinc if seen is not None else 0

    def _log_path(self, slave: SlaveSection) -> Path:
        return self._directory / f"{slave.name}.log"
