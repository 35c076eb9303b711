"""Starts and supervises the slaves whose `performer` is `exec`: processes of the master's own machine (why.md 28).

A slave that dies is started again, with a pause that doubles; one that the Coordinator has lost while its process lives
(stopped, hung, deaf) is killed by its pidfd. Never are there two: a new one is started when the old one is seen dead,
and the lock of the snapshot directory says who the old one is, also to a master that was started since. So a master
that was killed finds its slaves alive, with θ in their memory. What a slave prints lies in <master.directory>/slaves/.

A master that is stopped by SIGTERM stops its slaves. One that ends for another reason (74: its ledger; 75: a later
master exists) leaves them to the next.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dips.config import SlaveSection
from dips.master.children import Child, bound, holder
from dips.protocol.options import TimingOptions
from dips.telemetry.logs import Log

FIRST_PAUSE_S = 0.5  # before a slave that died is started again; doubles
MOST_PAUSE_S = 30.0
STEADY_S = 60.0  # a life as long as this begins with the first pause again
LOST_LEASES = 2  # a process that lives, and is lost for so many leases, hangs
END_GRACE_S = 30.0  # between SIGTERM and SIGKILL: a snapshot under way may be finished
LOG_BYTES = 16 << 20  # of each slave's log, and as much of the one before

Seen = Mapping[str, Mapping[str, Any]]  # of each slave: state, sinc (Coordinator.view)


class Performer:
    """`look` gives the slaves as the Coordinator sees them now."""

    def __init__(
        self,
        config: Path,
        slaves: Sequence[SlaveSection],
        directory: Path,
        timing: TimingOptions,
        look: Callable[[], Seen],
        log: Log,
    ) -> None:
        self._config, self._slaves, self._timing, self._look, self._log = config, slaves, timing, look, log
        self._directory = directory / "slaves"
        self._seen: Seen = {}
        self._children: dict[str, Child] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._clock = asyncio.get_running_loop().time

    def begin(self) -> None:
        """Start or adopt every slave, and keep them going."""
        self._directory.mkdir(parents=True, exist_ok=True)
        works = [self._keep_looking(), *(self._keep(slave) for slave in self._slaves)]
        self._tasks = [asyncio.create_task(work) for work in works]

    async def end(self, stop: bool) -> None:
        """Supervise no more; `stop`: end the slaves too, and return when all are dead."""
        for task in self._tasks:
            task.cancel()
        for done in await asyncio.gather(*self._tasks, return_exceptions=True):
            if isinstance(done, Exception):
                self._log.error("the performer failed", why=repr(done))
        living = [child for child in self._children.values() if child.alive]
        if stop:
            await asyncio.gather(*(child.end(END_GRACE_S) for child in living))
        for child in living:
            child.forget()

    async def _keep_looking(self) -> None:
        while True:
            self._seen = self._look()
            for slave in self._slaves:
                await asyncio.to_thread(bound, self._log_of(slave), LOG_BYTES)
            await asyncio.sleep(self._timing.beat_s)

    async def _keep(self, slave: SlaveSection) -> None:
        pause_s = FIRST_PAUSE_S
        while True:
            began = self._clock()
            try:
                child = self._adopt(slave) or self._start(slave)
            except OSError as error:
                self._log.error("a slave cannot be started", slave=slave.name, why=str(error), again_in_s=pause_s)
            else:
                self._children[slave.name] = child
                await self._watch(slave, child)
                pause_s = FIRST_PAUSE_S if self._clock() - began >= STEADY_S else pause_s
                self._log.warning("slave ended", slave=slave.name, pid=child.pid, code=child.code, again_in_s=pause_s)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, MOST_PAUSE_S)

    def _adopt(self, slave: SlaveSection) -> Child | None:
        """Who holds the directory now: a slave of a former master, or one that was started by hand."""
        pid = holder(slave.lock)
        if pid is None:
            return None
        try:
            child = Child(pid, None)
        except ProcessLookupError:  # it died since we looked; its lock is free now
            return None
        self._log.info("slave adopted", slave=slave.name, pid=pid)
        return child

    def _start(self, slave: SlaveSection) -> Child:
        command = [sys.executable, "-m", "dips.slave.app", "--config", str(self._config), "--name", slave.name]
        child = Child.start(command, self._log_of(slave))
        self._log.info("slave started", slave=slave.name, pid=child.pid, log=str(self._log_of(slave)))
        return child

    async def _watch(self, slave: SlaveSection, child: Child) -> None:
        """Return when it is dead; kill it if it hangs."""
        sinc_before = self._sinc(slave)
        lost_since: float | None = None
        begun = self._clock()
        while not await child.wait(self._timing.beat_s):
            registered = self._sinc(slave) > sinc_before or child.adopted
            state = self._seen.get(slave.name, {}).get("state")
            lost = registered and state == "lost"
            lost_since = (lost_since or self._clock()) if lost else None
            if lost_since is not None and self._clock() - lost_since >= LOST_LEASES * self._timing.lease_s:
                await self._kill(slave, child, f"lost for {self._clock() - lost_since:.1f} s while its process lives")
            elif child.adopted and state == "starting" and self._clock() - begun >= self._timing.compute_s:
                await self._kill(slave, child, "it did not register with this master")

    async def _kill(self, slave: SlaveSection, child: Child, why: str) -> None:
        self._log.error("slave hangs: killed", slave=slave.name, pid=child.pid, why=why)
        child.signal(signal.SIGKILL)
        await child.wait()

    def _sinc(self, slave: SlaveSection) -> int:
        return int(self._seen.get(slave.name, {}).get("sinc", 0))

    def _log_of(self, slave: SlaveSection) -> Path:
        return self._directory / f"{slave.name}.log"
