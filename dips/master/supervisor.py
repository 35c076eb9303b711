"""Starts and supervises the slaves whose `supervisor` is `exec`: child processes on the master's own machine.

A slave that dies is started again after a pause that doubles. One that the Coordinator has lost while its process is
alive (stopped, hung, unresponsive) is killed through its pidfd, and so is an adopted one that neither registers nor
works for `compute_s`: it may be loading a snapshot for a former master, and its heartbeats tell how far it is. There
are never two processes for one slave: a new one is started only when the old one is known to be dead, and the lock of
the snapshot directory names the old one, also to a master that was started later. A master that was killed therefore
finds its slaves alive, with θ still in memory.
A slave's output goes to <master.directory>/slaves/.

A master that is stopped by SIGTERM stops its slaves. One that ends for another reason (74: its ledger; 75: a later
master exists) leaves them to the next master.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

from dips.config import SlaveSection
from dips.master.children import Child, truncate_log
from dips.pidlock import lock_holder
from dips.protocol.heartbeats import SlaveHeartbeat
from dips.protocol.options import TimingOptions
from dips.telemetry.logs import Log
from dips.transport.backoff import Backoff

FIRST_PAUSE_S = 0.5  # before a slave that died is started again; doubles
LONGEST_PAUSE_S = 30.0
STEADY_S = 60.0  # a process that ran for so long is restarted after the first pause again
LOST_LEASES = 2  # a process that is alive but has been lost for so many leases hangs
END_GRACE_S = 30.0  # between SIGTERM and SIGKILL: time to finish a snapshot
LOG_BYTES = 16 << 20  # of each slave's log, and as much of the one before

Seen = Mapping[str, Mapping[str, Any]]  # of each slave: state, sinc (Coordinator.view)


class Supervisor:
    """`view_slaves` returns the slaves as the Coordinator sees them now."""

    def __init__(
        self,
        config: Path,
        slaves: Sequence[SlaveSection],
        directory: Path,
        timing: TimingOptions,
        view_slaves: Callable[[], Seen],
        log: Log,
    ) -> None:
        self._config, self._slaves, self._timing, self._view, self._log = config, slaves, timing, view_slaves, log
        self._directory = directory / "slaves"
        self._seen: Seen = {}
        self._children: dict[str, Child] = {}
        self._worked: dict[str, tuple[int, float]] = {}  # of our slaves: bytes worked through, when they last rose
        self._tasks: list[asyncio.Task[None]] = []
        self._clock = asyncio.get_running_loop().time

    def on_slave_heartbeat(self, heartbeat: SlaveHeartbeat) -> None:
        """A slave says how much it has worked through; also one that has not registered with this master yet."""
        before = self._worked.get(heartbeat.slave)
        ours = any(slave.name == heartbeat.slave for slave in self._slaves)
        if ours and (before is None or heartbeat.work_bytes != before[0]):
            self._worked[heartbeat.slave] = heartbeat.work_bytes, self._clock()

    def start(self) -> None:
        """Start or adopt every slave, and keep them running."""
        self._directory.mkdir(parents=True, exist_ok=True)
        loops = [self._refresh_view(), *(self._keep_running(slave) for slave in self._slaves)]
        self._tasks = [asyncio.create_task(loop) for loop in loops]

    async def stop_supervising(self, stop: bool) -> None:
        """Stop supervising. With `stop`, end the slaves too and return when all of them are dead."""
        for task in self._tasks:
            task.cancel()
        for done in await asyncio.gather(*self._tasks, return_exceptions=True):
            if isinstance(done, Exception):
                self._log.error("the supervisor failed", why=repr(done))
        living = [child for child in self._children.values() if child.alive]
        if stop:
            await asyncio.gather(*(child.end(END_GRACE_S) for child in living))
        for child in living:
            child.stop_watching()

    async def _refresh_view(self) -> None:
        while True:
            self._seen = self._view()
            for slave in self._slaves:
                await asyncio.to_thread(truncate_log, self._log_path(slave), LOG_BYTES)
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
        """Take over the process that holds the directory now: a former master's slave, or one started by hand."""
        pid = lock_holder(slave.lock)
        if not pid.isdigit():
            return None
        try:
            child = Child(int(pid), None)
        except ProcessLookupError:  # it has died since; its lock is free now
            return None
        self._log.info("slave adopted", slave=slave.name, pid=child.pid)
        return child

    def _start_process(self, slave: SlaveSection) -> Child:
        command = [sys.executable, "-m", "dips.slave.app", "--config", str(self._config), "--name", slave.name]
        child = Child.start(command, self._log_path(slave))
        self._log.info("slave started", slave=slave.name, pid=child.pid, log=str(self._log_path(slave)))
        return child

    async def _watch_child(self, slave: SlaveSection, child: Child) -> None:
        """Return when the process is dead; kill it if it hangs."""
        sinc_before = self._seen_sinc(slave)
        lost_since: float | None = None
        begun = self._clock()
        while not await child.wait(self._timing.heartbeat_s):
            registered = self._seen_sinc(slave) > sinc_before or child.adopted
            state = self._seen.get(slave.name, {}).get("state")
            lost = registered and state == "lost"
            lost_since = (lost_since or self._clock()) if lost else None
            if lost_since is not None and self._clock() - lost_since >= LOST_LEASES * self._timing.lease_s:
                await self._kill_child(
                    slave, child, f"lost for {self._clock() - lost_since:.1f} s while its process lives"
                )
            elif child.adopted and state == "starting":
                _, worked_at = self._worked.get(slave.name, (0, begun))
                if self._clock() - max(begun, worked_at) >= self._timing.compute_s:
                    await self._kill_child(slave, child, "it did not register with this master, and does no work")

    async def _kill_child(self, slave: SlaveSection, child: Child, why: str) -> None:
        self._log.error("slave hangs: killed", slave=slave.name, pid=child.pid, why=why)
        child.send_signal(signal.SIGKILL)
        await child.wait()

    def _seen_sinc(self, slave: SlaveSection) -> int:
        return int(self._seen.get(slave.name, {}).get("sinc", 0))

    def _log_path(self, slave: SlaveSection) -> Path:
        return self._directory / f"{slave.name}.log"
