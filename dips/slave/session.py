"""A slave's conversation with its master: register until Hold, beat, report what was staged or refused.

Never gives up on a master that does not answer: it backs off, says so, and asks again. What must stay true: a beat's
answer is believed only about the registration under which the beat was sent (a slave that registers again loses its
open round), and beats go on whatever the shard's thread is busy with. It does not know how orders arrive.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any

from dips.errors import Busy, Stale, Unavailable, UnavailableMaster
from dips.protocol.effects import Registered, RegisterLater
from dips.protocol.events import PushRefused, PushStaged
from dips.protocol.heartbeats import SlaveHeartbeat, SlaveHeartbeatAnswer
from dips.slave.moving import Report
from dips.slave.owner import Owner
from dips.slave.ports import Flow
from dips.slave.shard import Shard
from dips.telemetry.logs import Log
from dips.transport.backoff import Backoff
from dips.transport.control import call
from dips.wire.messages import from_proto, to_proto

CALL_S = 10.0  # for a Register or a report to be answered
BACKOFF_S = (0.2, 5.0)  # first and longest pause between two tries to reach the master


@dataclass(frozen=True, slots=True)
class Identity:
    """Who this process is, and where it is reached."""

    run: str
    slave: str
    nonce: str  # of the process
    address: str  # host:port of its control server
    lanes: tuple[str, ...]  # host:port of each data lane
    master: str  # host:port
    key: str = ""  # public, of the data lanes; empty: they are plain


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes since the start of the process."""

    bytes_in: int
    bytes_out: int


class Session:
    """The four loops; `stub` and `beat_stub` are SlaveService stubs on channels of their own.

    `prepare(registered)` runs on the owner's thread before the shard is welcomed: it may refuse by ConfigError.
    """

    def __init__(
        self,
        identity: Identity,
        owner: Owner,
        flow: Flow,
        stub: Any,
        beat_stub: Any,
        beat_s: float,
        prepare: Callable[[Registered], None],
        traffic: Callable[[], Traffic],
        log: Log,
    ) -> None:
        self._who, self._owner, self._flow = identity, owner, flow
        self._stub, self._beat_stub, self._beat_s = stub, beat_stub, beat_s
        self._prepare, self._traffic, self._log = prepare, traffic, log
        self._peer = f"the master at {identity.master}"
        self._registration = 0  # counts Registers; odd ones are under way, see _beat
        self._wanted = asyncio.Event()
        self._news = asyncio.Event()
        self._live: SlaveHeartbeatAnswer | None = None  # the newest list of what is live
        self._healing = asyncio.Event()

    async def run(self) -> None:
        """Live until cancelled; raise DipsError if the master refuses this slave for good."""
        loop = asyncio.get_running_loop()
        self._owner.changed = lambda: _wake(loop, self._news)
        self._wanted.set()
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._keep_registered())
                tasks.create_task(self._keep_beating())
                tasks.create_task(self._keep_healing())
                tasks.create_task(self._keep_reporting())
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None  # one is enough to end: the first says why
        finally:
            self._owner.changed = lambda: None  # the loop may end before the shard's thread

    # ---- registering -----------------------------------------------------------------------------------

    async def _keep_registered(self) -> None:
        while True:
            await self._wanted.wait()
            self._registration += 1
            await self._register_until_hold()
            self._wanted.clear()
            self._registration += 1

    async def _register_until_hold(self) -> None:
        backoff = Backoff(*BACKOFF_S, Random())
        while True:
            try:
                wait_s = await self._register_once()
            except (Unavailable, Busy, Stale, OSError) as error:  # OSError: our disk cannot be listed
                pause_s = backoff.next_pause_s()
                self._log.warning("register_failed", master=self._who.master, why=str(error), again_in_s=pause_s)
                await asyncio.sleep(pause_s)
                continue
            if wait_s is None:
                return
            await asyncio.sleep(wait_s)

    async def _register_once(self) -> float | None:
        """Register and do what is ordered; return None on Hold, else seconds until the next Register."""
        registered = await self._register()
        order = registered.order
        held, reason = await self._owner.run(lambda shard: (shard.follow(order), shard.reason))
        if held:
            self._log.info("ready", sinc=registered.sinc, term=registered.term, version=str(registered.head))
            return None
        if isinstance(order, RegisterLater):
            self._log.info("register_waits", why=order.reason, again_in_s=order.retry_after_s)
            return order.retry_after_s
        if reason:
            self._log.error("register_order_failed", why=reason, again_in_s=BACKOFF_S[1])
            return BACKOFF_S[1]
        self._log.info("register_order_done", order=str(order))
        return 0.0

    async def _register(self) -> Registered:
        who = self._who
        said = await self._owner.run(lambda s: s.registration(0, who.nonce, who.run, who.address, who.lanes, who.key))
        raw = await self._call(self._stub.Register, said, CALL_S)
        registered = from_proto(raw, Registered)
        await self._owner.run(lambda shard: self._welcome(shard, registered))
        return registered

    def _welcome(self, shard: Shard, registered: Registered) -> None:
        self._prepare(registered)
        shard.welcome(registered)

    # ---- beating ---------------------------------------------------------------------------------------

    async def _keep_beating(self) -> None:
        answered = True
        while True:
            await asyncio.sleep(self._beat_s)
            if self._owner.standing.sinc == 0:
                continue
            try:
                await self._beat()
                if not answered:
                    self._log.info("master_back", master=self._who.master)
                answered = True
            except (Unavailable, Busy) as error:
                if answered:
                    self._log.warning("master_silent", master=self._who.master, why=str(error))
                answered = False
            except Stale as error:
                self._log.warning("beat_refused", why=str(error))
                self._want_registration(self._registration)

    async def _beat(self) -> None:
        before = self._registration
        raw = await self._call(self._beat_stub.Beat, self._said(), max(self._beat_s, 1.0))
        answer = from_proto(raw, SlaveHeartbeatAnswer)
        if answer.register or answer.term > self._owner.standing.term:
            self._want_registration(before)
            return
        self._live = answer
        self._healing.set()

    async def _keep_healing(self) -> None:
        """Apart from the beats, since it needs a turn of the shard's thread, which may be busy for minutes."""
        while True:
            await self._healing.wait()
            self._healing.clear()
            answer = self._live
            assert answer is not None
            dropped = await self._owner.run(partial(Shard.heal, answer=answer))
            if dropped:
                self._log.warning("healed", dropped=dropped, why="open here, and not live at the master")

    def _want_registration(self, asked_under: int) -> None:
        """Register again, unless that happened, or began, since the beat was sent."""
        if asked_under == self._registration and asked_under % 2 == 0:
            self._wanted.set()

    def _said(self) -> SlaveHeartbeat:
        standing, traffic = self._owner.standing, self._traffic()
        return SlaveHeartbeat(
            slave=self._who.slave,
            sinc=standing.sinc,
            term=standing.term,
            memory=standing.memory,
            staged=standing.staged,
            transfers=self._flow.transfers(),
            pool_used=standing.pool_used,
            pool_limit=standing.pool_limit,
            bytes_in=traffic.bytes_in,
            bytes_out=traffic.bytes_out,
            persist_s=self._owner.persist_s,
            apply_s=self._owner.apply_s,
        )

    # ---- reporting -------------------------------------------------------------------------------------

    async def _keep_reporting(self) -> None:
        while True:
            await self._news.wait()
            self._news.clear()
            for report in await self._owner.run(lambda shard: shard.take_reports()):
                await self._report(report)

    async def _report(self, report: Report) -> None:
        """Tell until heard; a master that knows better (Stale) hears the truth with the next Register."""
        slave, sinc = self._who.slave, self._owner.standing.sinc
        backoff = Backoff(*BACKOFF_S, Random())
        while True:
            try:
                if report.reason:
                    refused = PushRefused(slave, sinc, report.push, report.reason)
                    await self._call(self._stub.Refused, refused, CALL_S)
                else:
                    staged = PushStaged(slave, sinc, report.push, report.nbytes)
                    await self._call(self._stub.Staged, staged, CALL_S)
                return
            except Stale as error:
                self._log.info("report_stale", push=str(report.push), why=str(error))
                return
            except (Unavailable, Busy):
                await asyncio.sleep(backoff.next_pause_s())

    async def _call(self, method: Any, said: object, deadline_s: float) -> Any:
        return await call(method, to_proto(said), deadline_s=deadline_s, peer=self._peer, unavailable=UnavailableMaster)


def _wake(loop: asyncio.AbstractEventLoop, event: asyncio.Event) -> None:
    loop.call_soon_threadsafe(event.set)
