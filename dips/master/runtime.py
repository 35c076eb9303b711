"""Runs the Coordinator and the Judge: one inbox, one ordered outbox, no decision of its own (design.md section 5).

What must stay true: one task owns both machines; effects leave in their order; nothing behind a Record leaves before
it is durable, answers to RPCs included; the loop never waits for the disk (why.md 29). Silence counts only while
somebody listens: after a gap every deadline moves, and what lies unread is read before anybody is judged (why.md 12).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from math import isinf
from typing import Any

from dips.errors import UnavailableMaster
from dips.master.journal import Journal
from dips.master.outbox import Outbox
from dips.master.ports import CoordinatorLike, JudgeLike, Outside
from dips.protocol.alignment import Alignment
from dips.protocol.effects import Effect, Exit, Joined, Note, Order, Registered, Reply, Result
from dips.protocol.enums import ClusterStanding
from dips.protocol.events import (
    Blind,
    ClusterJoined,
    ClusterLeft,
    ClusterSilent,
    Event,
    SlaveRegistered,
    Ticked,
)
from dips.protocol.heartbeats import ClusterHeartbeat, ClusterHeartbeatAnswer, SlaveHeartbeat, SlaveHeartbeatAnswer
from dips.telemetry.logs import Log
from dips.telemetry.timeline import Timeline

EXIT_LEDGER = 74  # EX_IOERR: a record could not be written; the next life reads what is true
EXIT_BUG = 70  # EX_SOFTWARE
FLUSH_S = 5.0  # a graceful stop waits so long for what is on its way out


@dataclass(frozen=True, slots=True)
class _Beat:
    """A beat on the inbox; its answer leaves by the outbox."""

    beat: ClusterHeartbeat | SlaveHeartbeat
    answer: asyncio.Future[Any]


@dataclass(frozen=True, slots=True)
class _Tell:
    """An answer on the outbox that is no effect of the Coordinator."""

    answer: asyncio.Future[Any]
    value: object


class Runtime:
    """One life of a master. `clock` is monotonic seconds; `beat_s` and `lease_s` as in TimingOptions."""

    def __init__(
        self,
        coordinator: CoordinatorLike,
        judge: JudgeLike,
        outside: Outside,
        *,
        term: int,
        beat_s: float,
        lease_s: float,
        clock: Callable[[], float],
        log: Log,
        timeline: Timeline,
        journal: Journal | None = None,
    ) -> None:
        self._coordinator, self._judge, self._outside = coordinator, judge, outside
        self._alignment = Alignment()
        self._term, self._beat_s, self._lease_s, self._clock = term, beat_s, lease_s, clock
        self._log, self._timeline, self._journal = log, timeline, journal
        self._inbox: deque[Event | _Beat] = deque()
        self._wake = asyncio.Event()
        self._outbox: Outbox[Order | Reply | Note | Exit | _Tell] = Outbox(outside.write, self._leave)
        self._changed = asyncio.Event()
        self._questions: dict[int, asyncio.Future[Result]] = {}
        self._last_req = 0
        self._orders: set[asyncio.Task[None]] = set()
        self._code: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._judging_from = 0.0  # after a gap: nobody is judged before this time
        self.beats: dict[
            tuple[str, str], tuple[ClusterHeartbeat | SlaveHeartbeat, float]
        ] = {}  # newest by (role, name), when heard

    # ---- for servicers and app -------------------------------------------------------------------------------------

    def tell(self, event: Event) -> None:
        """Put a fact on the inbox."""
        self._inbox.append(event)
        self._wake.set()

    async def ask(self, make: Callable[[int], Event]) -> Result:
        """Put a question on the inbox and return its answer, once everything before it is durable."""
        self._last_req += 1
        req, answer = self._last_req, asyncio.get_running_loop().create_future()
        if self._code.done():
            raise UnavailableMaster("this master is stopping")
        self._questions[req] = answer
        try:
            self.tell(make(req))
            result: Result = await answer
            return result
        finally:
            self._questions.pop(req, None)

    async def beat(self, beat: ClusterHeartbeat | SlaveHeartbeat) -> Any:
        """Take a beat; return its ClusterHeartbeatAnswer or SlaveHeartbeatAnswer."""
        if self._code.done():
            raise UnavailableMaster("this master is stopping")
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._inbox.append(_Beat(beat, answer))
        self._wake.set()
        return await answer

    @property
    def changed(self) -> asyncio.Event:
        """Set at the next change of the Coordinator's state that may turn a Pending into something else."""
        return self._changed

    def view(self) -> dict[str, Any]:
        now, timing = self._clock(), self._coordinator.window_timing()
        picture = self._coordinator.view(now)
        for name, cluster in picture.get("clusters", {}).items():
            cluster["pace"] = self._alignment.explain(name, timing, now)
        return picture if self._journal is None else {**picture, "journal": self._journal.told()}

    def stop(self, code: int = 0) -> None:
        """End `run` with this exit code; the first call counts."""
        if not self._code.done():
            self._code.set_result(code)
        self._wake.set()

    async def run(self) -> int:
        """Serve until told to stop; return the exit code."""
        tasks = [asyncio.create_task(self._look(), name="loop"), asyncio.create_task(self._send(), name="outbox")]
        ends: list[asyncio.Future[Any]] = [self._code, *tasks]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            await self._flush(tasks[1])
        finally:
            for task in (*tasks, *self._orders):
                task.cancel()
            await asyncio.gather(*tasks, *self._orders, return_exceptions=True)
            self._refuse_all()
        return self._code.result()

    # ---- the loop --------------------------------------------------------------------------------------------------

    async def _look(self) -> None:
        """Drain the inbox, judge, tick; sleep until somebody speaks or something is due."""
        try:
            expected = self._clock()
            while not self._code.done():
                now = self._clock()
                self._notice_gap(now, expected)
                self._drain(now)
                if now >= self._judging_from:
                    self._judge_and_tick(now)
                expected = now + self._sleep_s(now)
                await self._sleep_until(expected)
        except Exception as error:  # noqa: BLE001 (whatever it is: the machine's state can no longer be trusted)
            self._log.critical("the coordinator failed", error=repr(error), exc_info=error)
            self.stop(EXIT_BUG)

    def _notice_gap(self, now: float, expected: float) -> None:
        gap_s = now - expected
        if gap_s <= self._beat_s:
            return
        self._log.warning("blind", gap_s=round(gap_s, 3))
        self._judge.shift(gap_s)
        self._alignment.shift(gap_s)
        self._step(Blind(gap_s), now)
        self._judging_from = now + self._beat_s / 2  # what lies in the sockets is read first

    def _drain(self, now: float) -> None:
        while self._inbox and not self._code.done():
            item = self._inbox.popleft()
            if isinstance(item, _Beat):
                self._hear(item, now)
                continue
            if isinstance(item, ClusterJoined):  # it may fence a life, whose tokens the beats have told
                for event in self._judge.report_tokens(item.cluster):
                    self._step(event, now)
            self._step(item, now)

    def _judge_and_tick(self, now: float) -> None:
        for event in self._judge.verdicts(now):
            if isinstance(event, ClusterSilent):
                self._alignment.forget(event.cluster)
            self._step(event, now)
        if now >= self._coordinator.next_deadline():
            self._step(Ticked(), now)

    def _sleep_s(self, now: float) -> float:
        """Until the next deadline, and at most a beat, so that a gap is noticed."""
        if self._inbox:
            return 0.0
        due = min(self._coordinator.next_deadline(), self._judge.next_deadline())
        due = max(due, self._judging_from)
        return self._beat_s if isinf(due) else min(self._beat_s, max(0.001, due - now))

    async def _sleep_until(self, when: float) -> None:
        """Return at `when`, or as soon as something lies in the inbox."""
        try:
            async with asyncio.timeout(max(0.0, when - self._clock())):
                await self._wake.wait()
        except TimeoutError:
            pass  # nobody spoke: that is what the deadline is for
        self._wake.clear()

    # ---- one event -------------------------------------------------------------------------------------------------

    def _step(self, event: Event, now: float) -> None:
        effects = self._decide(event, now)
        self._log.debug("event", was=event, effects=len(effects))
        for effect in effects:
            if isinstance(effect, Reply):
                self._welcome(event, effect.result, now)
            self._outbox.put(effect)
        asked = hasattr(event, "req") or isinstance(event, Ticked)
        if not asked or any(not isinstance(effect, Reply) for effect in effects):
            self._changed.set()
            self._changed = asyncio.Event()

    def _decide(self, event: Event, now: float) -> list[Effect]:
        """Step, and let the journal have what went in and what came out."""
        if self._journal is None:
            return self._coordinator.step(event, now)
        if self._journal.due():
            self._journal.begin(self._coordinator.state())
        try:
            effects = self._coordinator.step(event, now)
        except Exception as error:
            self._journal.took(event, now, error)
            raise
        self._journal.took(event, now, effects)
        return effects

    def _welcome(self, event: Event, result: Result, now: float) -> None:
        """A life begins or ends by this answer: the Judge and the links must know before anything follows from it."""
        match event, result:
            case ClusterJoined(), Joined():
                self._judge.welcome_cluster(event.cluster, result.inc, now)
            case SlaveRegistered(), Registered():
                self._judge.welcome_slave(event.slave, result.sinc, now)
                self._outside.learn(event.slave, event.address)
            case ClusterLeft(), _:
                if self._coordinator.cluster_standing(event.cluster, event.inc)[0] is ClusterStanding.GONE:
                    self._judge.forget_cluster(event.cluster)
                    self._alignment.forget(event.cluster)
                    self.beats.pop(("cluster", event.cluster), None)

    def _hear(self, item: _Beat, now: float) -> None:
        answer: ClusterHeartbeatAnswer | SlaveHeartbeatAnswer
        if isinstance(item.beat, ClusterHeartbeat):
            answer = self._hear_cluster(item.beat, now)
        else:
            answer = self._hear_slave(item.beat, now)
        self._outbox.put(_Tell(item.answer, answer))

    def _hear_cluster(self, beat: ClusterHeartbeat, now: float) -> ClusterHeartbeatAnswer:
        for event in self._judge.on_cluster_heartbeat(beat, now):
            self._step(event, now)
        standing, push, pull = self._coordinator.cluster_standing(beat.cluster, beat.inc)
        if standing is ClusterStanding.LIVE:  # so only names that the Coordinator knows are kept
            self.beats["cluster", beat.cluster] = (beat, now)
            self._alignment.record_heartbeat(beat)
        due = self._alignment.push_in_s(beat.cluster, self._coordinator.window_timing(), now)
        return ClusterHeartbeatAnswer(
            self._term, self._lease_s, standing, push, pull, self._coordinator.progress(), due
        )

    def _hear_slave(self, beat: SlaveHeartbeat, now: float) -> SlaveHeartbeatAnswer:
        for event in self._judge.on_slave_heartbeat(beat, now):
            self._step(event, now)
        register, as_of, pushes, pulls = self._coordinator.slave_live(beat.slave, beat.sinc)
        register = register or beat.term != self._term
        if not register:
            self.beats["slave", beat.slave] = (beat, now)
        return SlaveHeartbeatAnswer(self._term, self._lease_s, register, as_of, pushes, pulls)

    # ---- the outbox ------------------------------------------------------------------------------------------------

    async def _send(self) -> None:
        try:
            await self._outbox.run()
        except Exception as error:  # noqa: BLE001 (nothing behind it may leave, whatever it is)
            self._log.critical("a record could not be written", error=repr(error), exc_info=error)
            self.stop(EXIT_LEDGER)

    def _leave(self, item: Order | Reply | Note | Exit | _Tell) -> None:
        match item:
            case Order():
                task = asyncio.create_task(self._carry_out(item))
                self._orders.add(task)
                task.add_done_callback(self._orders.discard)
            case Reply():
                _resolve(self._questions.get(item.req), item.result)
            case _Tell():
                _resolve(item.answer, item.value)
            case Note():
                self._log.info(item.kind, **dict(item.fields))
                self._timeline.mark(item.kind, **dict(item.fields))
            case Exit():
                self._log.error("exit", code=item.code, reason=item.reason)
                self.stop(item.code)

    async def _carry_out(self, order: Order) -> None:
        self._log.debug("order", order=order)
        self.tell(await self._outside.execute(order))

    # ---- the end ---------------------------------------------------------------------------------------------------

    async def _flush(self, sender: asyncio.Task[None]) -> None:
        """What was decided before the end leaves, unless it cannot."""
        if sender.done():
            return
        joined = asyncio.create_task(self._outbox.empty())
        await asyncio.wait([joined, sender], timeout=FLUSH_S, return_when=asyncio.FIRST_COMPLETED)
        joined.cancel()

    def _refuse_all(self) -> None:
        beats = [item.answer for item in self._inbox if isinstance(item, _Beat)]
        beats += [item.answer for item in self._outbox.rest() if isinstance(item, _Tell)]
        for future in (*self._questions.values(), *beats):
            if not future.done():
                future.set_exception(UnavailableMaster("this master is stopping"))


def _resolve(future: asyncio.Future[Any] | None, value: object) -> None:
    """Answer, unless the asker has gone."""
    if future is not None and not future.done():
        future.set_result(value)
