"""The daemon's shell around the core of a slave, with a scripted master and without a socket."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from random import Random
from typing import Any

import pytest
import structlog
from structlog.testing import capture_logs

from dips.errors import Busy, ConfigError, FailedMirror, LocalProtocolError, StaleTerm, UnavailableMaster
from dips.ids import GENESIS, PullId, PushId, VersionId
from dips.outer import reference
from dips.outer.kernel_pool import KernelPool
from dips.outer.versions import Versions
from dips.outer_step import nesterov_step
from dips.protocol.effects import (
    Acknowledged,
    Apply,
    Commit,
    DropPush,
    Fold,
    Hold,
    LoadVersion,
    Measure,
    OpenPush,
    Order,
    OrderBody,
    Persist,
    Ping,
    Registered,
    RegisterLater,
    SlaveOrder,
)
from dips.protocol.events import Done, MirrorReport, Persisted, PushRefused, PushStaged, SlaveRegistered
from dips.protocol.heartbeats import LiveTransfers, SlaveHeartbeat, SlaveHeartbeatAnswer, Transfer
from dips.protocol.manifest import Manifest
from dips.slave.core import SlaveCore
from dips.slave.mirror_plan import Restored
from dips.slave.ports import (
    Arrays,
    FlowEvent,
    Meters,
    PushOver,
    RankMoved,
    Released,
    SlaveAction,
    SlaveIdentity,
    SlaveTiming,
    Staged,
)
from dips.slave.runtime import ShardThread, SlaveRuntime, SlaveServiceLink
from dips.slave.shard import OpenTransfers, Shard
from dips.slave.snapshot_mirror import SnapshotMirror
from dips.transport.endpoints import master_peer
from dips.wire.generated import slave_pb2
from dips.wire.messages import from_proto, to_proto, unwrap_oneof
from tests.unit.slave.shard_rig import read_prepared

MANIFEST = Manifest.from_shapes([("a.w", (3,))])
PUSH = PushId("x", 1, 1)
HEARTBEAT_S = 0.01
BUSY_RETRY_S = 0.02


class BufferFlow:
    """Gives the shard's buffers to the test, and news to the inbox."""

    def __init__(self) -> None:
        self.on_event: Callable[[FlowEvent], None] | None = None
        self.pushes: dict[PushId, Arrays] = {}

    def start(self, sinc: int, on_event: Callable[[FlowEvent], None]) -> None:
        self.on_event = on_event

    def open_push(
        self, push: PushId, order: tuple[int, ...], buffers: Arrays, deadline_s: float, codec: str, keys: object = ()
    ) -> None:
        self.pushes[push] = buffers

    def drop_push(self, push: PushId) -> None:
        self.pushes.pop(push, None)

    def open_pull(
        self, pull: PullId, version: VersionId, source: Arrays, chain: object = (), keys: object = ()
    ) -> None:
        raise AssertionError("no pull is opened here")

    def close_pull(self, pull: PullId) -> None:
        raise AssertionError("no pull is closed here")

    def admit_probe(self, cluster: str, key: str) -> None:
        raise AssertionError("no probe is admitted here")

    def list_transfers(self) -> tuple[Transfer, ...]:
        return (Transfer("x", 1, 1, True, 4, 12),)


class GatedDisk:
    def __init__(self) -> None:
        self.may_write, self.may_read = threading.Event(), threading.Event()
        self.may_read.set()
        self.writes = 0

    def reserve_room(self, version: VersionId, nbytes: int) -> None:
        """There is room."""

    def release_room(self, version: VersionId) -> None:
        """There is room."""

    def complete_versions(self, look_for: Collection[VersionId] = ()) -> tuple[VersionId, ...]:
        return ()

    def unread_versions(self) -> tuple[VersionId, ...]:
        return ()

    def holds_initial(self) -> bool:
        return True

    def write_snapshot(self, version: VersionId, theta: Arrays, momentum: Arrays, is_wanted: Callable[[], bool]) -> str:
        self.writes += 1
        assert self.may_write.wait(10)
        return "d1ge57"

    def read_snapshot(self, version: VersionId, theta: Arrays, momentum: Arrays) -> None:
        assert self.may_read.wait(10)
        theta[0].fill(1.0)
        momentum[0].fill(0.0)

    def delete_snapshots(self, versions: tuple[VersionId, ...]) -> None:
        raise AssertionError("nothing is deleted here")


class ScriptedMaster:
    """Answers by a script: `orders` one after another for Register, the last for ever; then `heartbeat` for every
    heartbeat.
    """

    def __init__(self, *orders: SlaveOrder | Exception) -> None:
        self.orders = list(orders)
        self.term = 1
        self.registered: list[SlaveRegistered] = []
        self.heartbeats: list[SlaveHeartbeat] = []
        self.reports: list[PushStaged | PushRefused] = []
        self.heartbeat: SlaveHeartbeatAnswer | Exception = SlaveHeartbeatAnswer(
            1, 10.0, False, 10**6, LiveTransfers(1, (PUSH,), ())
        )
        self.unresponsive_reports = 0
        self.happened = asyncio.Condition()

    async def Register(self, request: Any, timeout: float) -> Any:
        await self._note(self.registered, from_proto(request, SlaveRegistered, req=0))
        order = self.orders.pop(0) if len(self.orders) > 1 else self.orders[0]
        if isinstance(order, Exception):
            raise order
        return to_proto(Registered(self.term, 7, order, GENESIS, (0,), ("",), MANIFEST.to_json()))

    async def Heartbeat(self, request: Any, timeout: float) -> Any:
        await self._note(self.heartbeats, from_proto(request, SlaveHeartbeat))
        if isinstance(self.heartbeat, Exception):
            raise self.heartbeat
        return to_proto(self.heartbeat)

    async def Staged(self, request: Any, timeout: float) -> Any:
        return await self._hear(from_proto(request, PushStaged))

    async def Refused(self, request: Any, timeout: float) -> Any:
        return await self._hear(from_proto(request, PushRefused))

    async def until(self, holds: Callable[[], bool]) -> None:
        """Wait for the script to come so far; at most 10 s."""
        async with asyncio.timeout(10), self.happened:
            await self.happened.wait_for(holds)

    async def _hear(self, report: PushStaged | PushRefused) -> Any:
        if self.unresponsive_reports:
            self.unresponsive_reports -= 1
            raise UnavailableMaster("away")
        await self._note(self.reports, report)
        return to_proto(Acknowledged())

    async def _note(self, where: list[Any], what: Any) -> None:
        async with self.happened:
            where.append(what)
            self.happened.notify_all()


class ScriptedMirror(SnapshotMirror):
    """Restores as a test says, on the thread of the real one."""

    def __init__(self, restore: Callable[[tuple[VersionId, ...], tuple[VersionId, ...]], Restored]) -> None:
        self.restore = restore  # type: ignore[assignment,method-assign]
        self.wanted: list[tuple[VersionId, ...]] = []

    def want(self, versions: tuple[VersionId, ...]) -> None:
        self.wanted.append(versions)


class RunningSlave:
    """A slave's runtime under way, its parts at hand."""

    def __init__(
        self,
        master: ScriptedMaster,
        thread: ThreadPoolExecutor,
        prepare: Callable[[Registered], None],
        restore: Callable[[tuple[VersionId, ...], tuple[VersionId, ...]], Restored] | None,
    ) -> None:
        self.executor, self.mirror = thread, None if restore is None else MirrorReport((), "")
        self.flow = BufferFlow()
        log = structlog.get_logger()
        self.marks = list[tuple[str, dict[str, Any]]]()
        self.thread = ShardThread(thread, time.monotonic, log, lambda kind, **fields: self.marks.append((kind, fields)))
        versions, on_event = Versions(KernelPool(reference), 1, 0), self.thread.on_flow_event
        self.shard = Shard("s", versions, GatedDisk(), self.flow, on_event, prepare)
        self.thread.own_shard(self.shard)
        who = SlaveIdentity("run", "s", "nonce", "h:1", ("h:2",), "m:1")
        self.core = SlaveCore(
            who,
            SlaveTiming(HEARTBEAT_S, busy_retry_s=BUSY_RETRY_S),
            lambda: self.thread.standing,
            self.flow.list_transfers,
            self.meters,
            Random(),
        )
        self.copies = None if restore is None else ScriptedMirror(restore)
        link = SlaveServiceLink(master, master, master_peer("m:1", None))
        self.runtime = SlaveRuntime(self.core, self.thread, link, log, self.copies)
        self.task = asyncio.create_task(self.runtime.run())
        self.master = master
        self.number = 0

    def meters(self) -> Meters:
        return Meters(5, 6, self.thread.persist_s, self.thread.apply_s, mirror=self.mirror)

    async def ready(self) -> None:
        """Wait until Hold was followed and a heartbeat was answered: a heartbeat alone may come before the last
        Register.
        """
        await self.master.until(lambda: self.core.serving and bool(self.master.heartbeats))

    async def order(self, body: OrderBody, deadline_s: float = 10.0, number: int | None = None) -> Any:
        self.number += number is None
        request = to_proto(Order("s", 7, 1, self.number if number is None else number, body, deadline_s))
        assert isinstance(request, slave_pb2.Order)
        return unwrap_oneof(await self.runtime.Execute(request, None))


@asynccontextmanager
async def living(
    master: ScriptedMaster,
    prepare: Callable[[Registered], None] = lambda _: None,
    restore: Callable[[tuple[VersionId, ...], tuple[VersionId, ...]], Restored] | None = None,
) -> AsyncIterator[RunningSlave]:
    with ThreadPoolExecutor(1) as thread:
        incarnation = RunningSlave(master, thread, prepare, restore)
        try:
            yield incarnation
        finally:
            incarnation.task.cancel()
            await asyncio.gather(incarnation.task, return_exceptions=True)


async def test_it_registers_until_hold_then_heartbeats() -> None:
    """Away, RegisterLater and Load are followed by another Register with the same nonce; then heartbeats name it."""
    master = ScriptedMaster(UnavailableMaster("away"), RegisterLater(0.001, "restoring"), LoadVersion(GENESIS), Hold())
    async with living(master) as incarnation:
        await incarnation.ready()
        await master.until(lambda: master.heartbeats[-1].memory == GENESIS)
        assert [r.memory for r in master.registered] == [None, None, None, GENESIS]
        assert {r.nonce for r in master.registered} == {"nonce"}
        heartbeat = master.heartbeats[-1]
        assert (heartbeat.slave, heartbeat.sinc, heartbeat.term) == ("s", 7, 1)
        assert (heartbeat.bytes_in, heartbeat.bytes_out, heartbeat.transfers[0].nbytes) == (5, 6, 4)
        assert heartbeat.pool_limit == 12 * 5
        assert not incarnation.task.done()


async def test_it_registers_when_its_mirror_was_looked_at() -> None:
    """A mirror that fails is tried again; one that hangs does not keep the process from ending."""
    found: list[Restored | Exception] = [FailedMirror("gone"), Restored((), "is it mounted?")]
    gate = threading.Event()

    def restore(on_disk: tuple[VersionId, ...], look_for: tuple[VersionId, ...]) -> Restored:
        if not found:
            gate.wait(10)
            return Restored(())
        one = found.pop(0)
        if isinstance(one, Exception):
            raise one
        return one

    master = ScriptedMaster(RegisterLater(0.001, "restoring"))
    async with living(master, restore=restore):
        await master.until(lambda: bool(master.registered))
        assert (len(master.registered), master.registered[0].reason) == (1, "is it mounted?")
    gate.set()


async def test_what_the_master_wants_mirrored_is_passed_on() -> None:
    """To the mirror; a slave without one goes on as before."""
    wanted = (VersionId(1, 1), VersionId(2, 2))
    for restore in (lambda *_: Restored(()), None):
        master = ScriptedMaster(LoadVersion(GENESIS), Hold())
        master.heartbeat = SlaveHeartbeatAnswer(1, 10.0, False, 10**6, LiveTransfers(1, (), ()), wanted)
        async with living(master, restore=restore) as incarnation:
            await incarnation.ready()
            seen = len(master.heartbeats)
            await master.until(lambda seen=seen, master=master: len(master.heartbeats) >= seen + 2)
            assert not incarnation.task.done()
            assert incarnation.copies is None or set(incarnation.copies.wanted) == {wanted}


async def test_its_calls_end_with_it() -> None:
    """Those that are over are kept by nobody, and one that hangs is given up: no task outlives the slave."""

    class HangingMaster(ScriptedMaster):
        hangs = False

        async def Heartbeat(self, request: Any, timeout: float) -> Any:
            answer = await super().Heartbeat(request, timeout)
            if self.hangs:
                await asyncio.Event().wait()
            return answer

    master = HangingMaster(LoadVersion(GENESIS), Hold())
    async with living(master) as incarnation:
        await incarnation.ready()
        await master.until(lambda: len(master.heartbeats) >= 5)
        assert len(incarnation.runtime._tasks) <= 1
        master.hangs = True
        seen = len(master.heartbeats)
        await master.until(lambda: len(master.heartbeats) > seen)
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_it_registers_again_when_a_heartbeat_says_so() -> None:
    """A master that does not know us as ready gets a Register; a heartbeat sent before it asks for no second one."""
    master = ScriptedMaster(LoadVersion(GENESIS), Hold())
    async with living(master) as incarnation:
        await incarnation.ready()
        assert len(master.registered) == 2
        master.heartbeat = SlaveHeartbeatAnswer(1, 10.0, True, 0, LiveTransfers(1, (), ()))
        await master.until(lambda: len(master.registered) == 3)
        master.heartbeat = SlaveHeartbeatAnswer(1, 10.0, False, 0, LiveTransfers(1, (), ()))
        seen = len(master.heartbeats)
        await master.until(lambda: len(master.heartbeats) >= seen + 5)
        assert len(master.registered) <= 4


@pytest.mark.parametrize("trouble", [UnavailableMaster("gone"), StaleTerm("you are early")])
async def test_a_master_that_goes_away_is_waited_for(trouble: Exception) -> None:
    """Heartbeats that fail end nothing; after a refusal as stale the slave registers with whoever answers."""
    master = ScriptedMaster(LoadVersion(GENESIS), Hold())
    with capture_logs() as logs:
        async with living(master) as incarnation:
            await incarnation.ready()
            master.heartbeat = trouble
            seen = len(master.heartbeats)
            await master.until(lambda: len(master.heartbeats) >= seen + 3)
            master.term = 2
            master.heartbeat = SlaveHeartbeatAnswer(2, 10.0, False, 0, LiveTransfers(1, (), ()))
            await master.until(lambda: master.heartbeats[-1].term == 2)
            assert not incarnation.task.done()
    assert {"master_silent", "heartbeat_refused"} & {line["event"] for line in logs}


@pytest.mark.parametrize("error", [ConfigError("slave 's': no such slave"), LocalProtocolError("our bug")])
async def test_a_refusal_for_good_ends_the_session(error: Exception) -> None:
    """What no waiting mends is raised, so that the daemon ends with its message and code."""
    async with living(ScriptedMaster(error)) as incarnation:
        with pytest.raises(type(error), match=str(error)):
            await asyncio.wait_for(incarnation.task, 10)


async def test_a_bug_of_the_core_ends_the_session() -> None:
    """A slave that went on without what was to be done would look as if it worked."""
    async with living(ScriptedMaster(Hold())) as incarnation:
        incarnation.mirror = MirrorReport((), "")  # which it does not have
        with pytest.raises(AssertionError, match="a slave without a mirror"):
            await asyncio.wait_for(incarnation.task, 10)


async def test_a_machine_without_the_memory_ends_the_session() -> None:
    """The sum is checked before memory is taken: too little ends the process with the numbers."""

    def prepare(registered: Registered) -> None:
        raise ConfigError("slots, pinned: this slave needs ..")

    async with living(ScriptedMaster(LoadVersion(GENESIS)), prepare) as incarnation:
        with pytest.raises(ConfigError, match="this slave needs"):
            await asyncio.wait_for(incarnation.task, 10)
        assert incarnation.shard.versions.limit_bytes == 0


async def test_staged_and_refused_are_told_until_heard() -> None:
    """News of the flow reaches the master although it was away at first; every heartbeat repeats what is staged."""
    master = ScriptedMaster(LoadVersion(GENESIS), Hold())
    master.unresponsive_reports = 2
    async with living(master) as incarnation:
        await incarnation.ready()
        assert await incarnation.order(OpenPush(PUSH, 1, 60.0)) == Done()
        assert incarnation.flow.on_event is not None
        incarnation.flow.on_event(Staged(PUSH, 12))
        await master.until(lambda: master.reports == [PushStaged("s", 7, PUSH, 12)])
        await master.until(lambda: master.heartbeats[-1].staged == (PUSH,))
        incarnation.flow.on_event(PushOver(PUSH, "it stalled"))
        await master.until(lambda: master.reports[1:] == [PushRefused("s", 7, PUSH, "it stalled")])


async def test_the_timeline_has_the_end_of_each_transfer() -> None:
    """`dips trace` draws a push by when the first and the last byte of each rank came, and the end of each pull."""
    master, pull = ScriptedMaster(LoadVersion(GENESIS), Hold()), PullId("x", 1, 1)
    async with living(master) as incarnation:
        await incarnation.ready()
        await incarnation.order(OpenPush(PUSH, 1, 60.0))
        on_event, now = incarnation.flow.on_event, time.monotonic()
        assert on_event is not None
        on_event(Staged(PUSH, 12, (RankMoved(0, 12, now - 3.0, now - 1.0),)))
        on_event(PushOver(PUSH, "it stalled"))
        on_event(Released(pull, "closed"))
        await incarnation.order(Ping())
    (_, opened), (staged, moved), *ended, (_, pinged) = incarnation.marks
    assert (opened["order"], pinged["order"]) == ("OpenPush", "Ping")
    assert (staged, moved["push"], moved["nbytes"]) == ("push_staged", str(PUSH), 12)
    (rank,) = moved["ranks"]
    assert (rank["rank"], rank["nbytes"]) == (0, 12) and 1.0 <= rank["until_s"] == pytest.approx(rank["since_s"] - 2.0)
    assert ended == [
        ("push_over", {"push": str(PUSH), "reason": "it stalled"}),
        ("pull_released", {"pull": str(pull), "reason": "closed"}),
    ]


async def test_one_timer_waits_however_many_orders_have_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each order plans the next turn anew, and the former plan is given up: it would plan another one for ever."""
    master, turns = ScriptedMaster(LoadVersion(GENESIS), Hold()), list[float]()
    async with living(master) as incarnation:
        await incarnation.ready()
        tick = incarnation.core.tick

        def counted(now: float) -> list[SlaveAction]:
            turns.append(now)
            return tick(now)

        monkeypatch.setattr(incarnation.core, "tick", counted)
        for _ in range(50):
            await incarnation.order(Ping())
        seen = len(master.heartbeats)
        turns.clear()
        await master.until(lambda: len(master.heartbeats) >= seen + 4)
    assert len(turns) <= 8


async def test_orders_are_answered_while_a_snapshot_is_loaded() -> None:
    """The disk takes as long as it takes: a Ping has its answer, an OpenPush that came early waits for the version."""
    master = ScriptedMaster(LoadVersion(GENESIS), Hold())
    async with living(master) as incarnation:
        disk = incarnation.shard._disk
        assert isinstance(disk, GatedDisk)
        disk.may_read.clear()
        await master.until(lambda: len(master.registered) == 1)
        while incarnation.shard.versions.loading is None:
            await asyncio.sleep(0.001)
        opening = asyncio.create_task(incarnation.order(OpenPush(PUSH, 1, 60.0)))
        assert await asyncio.wait_for(incarnation.order(Ping()), 5) == Done()
        assert not opening.done()
        assert len(master.registered) == 1
        disk.may_read.set()
        await incarnation.ready()
        assert await opening == Done()


async def test_heartbeats_go_on_while_the_shard_is_busy() -> None:
    """An order that takes long does not silence the slave: heartbeats read the last standing."""
    master = ScriptedMaster(LoadVersion(GENESIS), Hold())
    async with living(master) as incarnation:
        await incarnation.ready()
        gate = threading.Event()
        working = asyncio.wrap_future(incarnation.executor.submit(gate.wait, 10))
        seen = len(master.heartbeats)
        await master.until(lambda: len(master.heartbeats) >= seen + 5)
        gate.set()
        assert await working is True


async def test_a_heartbeat_heals_what_the_master_does_not_list() -> None:
    """A push that is not live at the master is dropped here, and its slot is free again."""
    master = ScriptedMaster(LoadVersion(GENESIS), Hold())
    async with living(master) as incarnation:
        await incarnation.ready()
        await incarnation.order(OpenPush(PUSH, 1, 60.0))
        master.heartbeat = SlaveHeartbeatAnswer(1, 10.0, False, 10**6, LiveTransfers(1, (), ()))
        await master.until(lambda: not incarnation.flow.pushes)


async def test_busy_is_tried_again_until_the_deadline() -> None:
    """An OpenPush that finds no slot waits for a DropPush behind it; without one it is refused before its deadline, and
    one whose caller has hung up is not tried again.
    """
    master = ScriptedMaster(LoadVersion(GENESIS), Hold())
    other = PushId("y", 1, 1)
    master.heartbeat = SlaveHeartbeatAnswer(1, 10.0, False, 0, LiveTransfers(1, (), ()))
    async with living(master) as incarnation:
        await incarnation.ready()
        await incarnation.order(OpenPush(PUSH, 1, 60.0))
        with pytest.raises(Busy):
            await incarnation.order(OpenPush(other, 1, 60.0), deadline_s=0.2)
        waiting = asyncio.create_task(incarnation.order(OpenPush(other, 1, 60.0)))
        await incarnation.order(Ping())
        assert not waiting.done()
        given_up = asyncio.create_task(incarnation.order(OpenPush(PushId("z", 1, 1), 1, 60.0)))
        await incarnation.order(Ping())
        given_up.cancel()  # the master has hung up
        await incarnation.order(DropPush(PUSH, "over"))
        assert await waiting == Done()
        await incarnation.order(DropPush(other, "over"))
        await asyncio.sleep(4 * BUSY_RETRY_S)
        assert not incarnation.flow.pushes


async def test_orders_of_a_round_through_the_servicer() -> None:
    """Orders and answers pass the wire's spelling unchanged, and the time of Apply is in the heartbeats."""
    master = ScriptedMaster(LoadVersion(GENESIS), Hold())
    async with living(master) as incarnation:
        await incarnation.ready()
        await incarnation.order(OpenPush(PUSH, 1, 60.0))
        incarnation.flow.pushes[PUSH][0].fill(0.5)
        assert incarnation.flow.on_event is not None
        incarnation.flow.on_event(Staged(PUSH, 12))
        measured = await incarnation.order(Measure(1, PUSH, GENESIS))
        assert (measured.layer_sq, measured.finite) == ((0.75,), True)
        assert (await incarnation.order(Fold(1, PUSH, 1.0))).acc_sq == (0.75,)
        prepared = await incarnation.order(Apply(1, VersionId(1, 1), nesterov_step(1.0, 0.7, 0.8)))
        assert read_prepared(prepared) == VersionId(1, 1)
        await master.until(lambda: master.heartbeats[-1].apply_s > 0)


async def test_a_snapshot_is_written_beside_the_orders() -> None:
    """While the served version is being written, a push opens and an Apply waits; a repeated Persist writes once."""
    master = ScriptedMaster(LoadVersion(GENESIS), Hold())
    async with living(master) as incarnation:
        await incarnation.ready()
        disk = incarnation.shard._disk
        assert isinstance(disk, GatedDisk)
        await make_version(incarnation, 1, PUSH, GENESIS)
        await incarnation.order(Commit(VersionId(1, 1), ()))
        persist = Persist(VersionId(1, 1))
        first = asyncio.create_task(incarnation.order(persist, number=100))
        second = PushId(PUSH.cluster, PUSH.inc, PUSH.seq + 1)
        master.heartbeat = SlaveHeartbeatAnswer(1, 10.0, False, 10**6, LiveTransfers(1, (second,), ()))
        apply = asyncio.create_task(make_version(incarnation, 2, second, VersionId(1, 1)))
        await master.until(lambda: incarnation.shard.versions.folded)
        first.cancel()  # the connection breaks, and the order is sent again
        again = asyncio.create_task(incarnation.order(persist, number=100))
        await asyncio.sleep(0.05)
        assert not (apply.done() or again.done())
        disk.may_write.set()
        assert await again == Persisted(VersionId(1, 1), "d1ge57")
        assert read_prepared(await apply) == VersionId(2, 2)
        assert disk.writes == 1
        await master.until(lambda: master.heartbeats[-1].persist_s >= 0.05)
        assert incarnation.thread.spent["persist"].list_buckets()[-1] == ("+Inf", 1.0)
        assert incarnation.thread.spent["persist"].total >= 0.05


async def make_version(incarnation: RunningSlave, round_: int, push: PushId, head: VersionId) -> Any:
    """One push in, up to Prepared."""
    await incarnation.order(OpenPush(push, 1, 60.0))
    incarnation.flow.pushes[push][0].fill(0.5)
    assert incarnation.flow.on_event is not None
    incarnation.flow.on_event(Staged(push, 12))
    await incarnation.order(Measure(round_, push, head))
    await incarnation.order(Fold(round_, push, 1.0))
    return await incarnation.order(Apply(round_, VersionId(head.version + 1, round_), nesterov_step(1.0, 0.7, 0.8)))


async def test_a_failure_in_news_of_the_flow_is_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for the flow's news to be taken in, so a failure there must reach the log."""
    with capture_logs() as logs, ThreadPoolExecutor(1) as thread:
        owner = ShardThread(thread, time.monotonic, structlog.get_logger())
        shard = Shard("s", Versions(KernelPool(reference), 1, 0), GatedDisk(), BufferFlow(), owner.on_flow_event)
        monkeypatch.setattr(OpenTransfers, "on_flow_event", None)
        owner.own_shard(shard)
        owner.on_flow_event(Staged(PUSH, 12))
    assert [line["event"] for line in logs] == ["flow_event_failed"]
