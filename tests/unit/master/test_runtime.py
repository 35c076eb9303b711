"""The runtime: what arrives reaches the core, what it orders is carried out, and whoever waits gets an answer."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from math import inf
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import structlog

from dips.errors import RemoteProtocolError, UnavailableMaster
from dips.identity.names import PeerRole
from dips.ids import GENESIS, PullId, PushId, VersionId
from dips.master.core import EXIT_LEDGER, MasterCore, SlaveProgress
from dips.master.journal import Journal
from dips.master.runtime import EXIT_BUG, Runtime, StatusServicer
from dips.protocol.alignment import WindowTiming
from dips.protocol.effects import (
    Effect,
    Exit,
    Joined,
    Note,
    Order,
    Pending,
    Ping,
    Progress,
    Reply,
)
from dips.protocol.enums import Activity, ClusterStanding, ClusterState, Role, TrainerState
from dips.protocol.events import (
    Blind,
    ClusterJoined,
    ClusterSilent,
    Done,
    Event,
    OrderAnswered,
    OrderFailed,
    PushStaged,
    RoundAwaited,
    Ticked,
)
from dips.protocol.heartbeats import ClusterHeartbeat, LiveTransfers, SlaveHeartbeat
from dips.protocol.membership import Judge
from dips.protocol.options import TimingOptions
from dips.protocol.records import IncarnationGiven, Record
from dips.protocol.slaves import EXIT_STALE
from dips.protocol.view import ClusterView, JournalView, RunView
from dips.telemetry.timeline import Timeline, read_marks
from tests.guarded_master import GuardedMaster

HEARTBEAT_S = 0.05
TIMING = TimingOptions(heartbeat_s=HEARTBEAT_S, lease_heartbeats=4)
PUSH = PushId("a", 1, 1)
JOIN = ("a", "nonce", "run", "{}", "digest")


class ScriptedCoordinator:
    """Remembers its events; answers each by a script: type of event → effects."""

    term, proven_term = 3, 2  # never so in earnest: which one is told shows
    compute_s = 300.0

    def __init__(self) -> None:
        self.seen: list[Event] = []
        self.script: dict[type, Callable[[Any], list[Effect]]] = {}
        self.deadline = inf
        self.standing = ClusterStanding.LIVE
        self.heard = asyncio.Event()

    def step(self, event: Event, now: float) -> list[Effect]:
        self.seen.append(event)
        self.heard.set()
        if isinstance(event, Ticked):
            self.deadline = inf
        return self.script.get(type(event), lambda _: [])(event)

    def next_deadline(self) -> float:
        return self.deadline

    def progress(self) -> Progress:
        return Progress(0, 0, None)

    def cluster_standing(self, cluster: str, inc: int) -> tuple[ClusterStanding, PushId | None, PullId | None]:
        return self.standing, PUSH, None

    def slave_live(self, slave: str, sinc: int) -> tuple[bool, int, LiveTransfers]:
        return False, 7, LiveTransfers(1, (PUSH,), ())

    def window_timing(self) -> WindowTiming:
        return WindowTiming(None, 1, 0)

    def build_view(self, now: float) -> RunView:
        return RunView(term=len(self.seen))

    def kinds(self) -> list[str]:
        return [type(e).__name__ for e in self.seen]


class RecordingOutside:
    """A disk that may be held and may fail; slaves that answer Done, and may be held."""

    def __init__(self) -> None:
        self.written: list[Record] = []
        self.executed: list[int] = []
        self.addresses: dict[str, str] = {}
        self.progress: list[SlaveProgress] = []
        self.disk = asyncio.Event()
        self.disk.set()
        self.slaves = asyncio.Event()
        self.slaves.set()
        self.fails = False

    async def write_records(self, records: Sequence[Record]) -> None:
        await self.disk.wait()
        if self.fails:
            raise OSError("disk full")
        self.written += records

    def complete_view(self, view: RunView) -> RunView:
        return view

    def on_progress(self, progress: SlaveProgress) -> None:
        self.progress.append(progress)

    def learn_address(self, slave: str, address: str) -> None:
        self.addresses[slave] = address

    async def execute_order(self, order: Order) -> OrderAnswered | OrderFailed:
        self.executed.append(order.number)
        await self.slaves.wait()
        return OrderAnswered(order.slave, order.sinc, order.number, Done())


class Clock:
    """The real monotonic clock, and what a test adds to it."""

    def __init__(self) -> None:
        self.added = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.added


class RunningMaster:
    """A running runtime with everything that a test watches."""

    def __init__(self, tmp_path: Path, timing: TimingOptions = TIMING) -> None:
        self.coordinator, self.outside, self.clock = ScriptedCoordinator(), RecordingOutside(), Clock()
        self.judge = Judge(timing)
        self.path = tmp_path / "timeline.jsonl"
        self.timeline = Timeline(tmp_path, "r", "master", "master")
        core = MasterCore(self.coordinator, self.judge, timing, self.clock())
        log = structlog.get_logger()
        self.left_s = inf
        self.journal = Journal(tmp_path, "r", 3, 1, log)
        self.runtime = Runtime(
            core, self.outside, clock=self.clock, log=log, timeline=self.timeline, journal=self.journal,
            left_s=lambda: self.left_s,
        )  # fmt: skip

    async def heard(self, kind: type) -> Any:
        """Return the first event of a kind, when it has come."""
        while True:
            self.coordinator.heard.clear()
            for event in self.coordinator.seen:
                if isinstance(event, kind):
                    return event
            await self.coordinator.heard.wait()


@asynccontextmanager
async def running(tmp_path: Path, timing: TimingOptions = TIMING) -> AsyncIterator[RunningMaster]:
    made = RunningMaster(tmp_path, timing)
    task = asyncio.create_task(made.runtime.run())
    try:
        async with asyncio.timeout(10):
            yield made
    finally:
        made.runtime.stop()
        await task
        made.timeline.close()
        made.journal.close()


def joins(event: ClusterJoined) -> list[Effect]:
    given = IncarnationGiven(Role.CLUSTER, event.cluster, 1, event.nonce)
    return [given, Reply(event.req, Joined(3, 1, GENESIS, Progress(0, 0, None), ()))]


async def test_the_view_has_the_journal(tmp_path: Path) -> None:
    """Nothing is written yet, but will be with the first step, and no step waits."""
    async with running(tmp_path) as h:
        assert h.runtime.build_view().journal == JournalView(True, 0, 0)


async def test_what_arrives_wakes_the_master(tmp_path: Path) -> None:
    """It sleeps for a heartbeat if nothing is due; a caller does not wait for that."""
    async with running(tmp_path, TimingOptions(heartbeat_s=60.0)) as h:
        for _ in range(2):  # at the second it sleeps
            await h.runtime.take_heartbeat(heartbeat())


async def test_an_answer_waits_for_its_record(tmp_path: Path) -> None:
    """Joined is sent when its incarnation is on disk, not before (docs/rationale.md#29)."""
    async with running(tmp_path) as h:
        h.coordinator.script[ClusterJoined] = joins
        h.outside.disk.clear()
        asking = asyncio.create_task(h.runtime.ask_core(lambda req: ClusterJoined(req, *JOIN)))
        await h.heard(ClusterJoined)
        done, _ = await asyncio.wait([asking], timeout=0.1)
        assert not done and h.outside.written == []
        h.outside.disk.set()
        assert isinstance(await asking, Joined)
        assert h.outside.written == [IncarnationGiven(Role.CLUSTER, "a", 1, "nonce")]


async def test_a_heartbeat_tells_nothing_that_is_not_durable(tmp_path: Path) -> None:
    """A heartbeat's answer stands behind the records of the steps before it."""
    async with running(tmp_path) as h:
        h.coordinator.script[ClusterJoined] = joins
        h.outside.disk.clear()
        asking = asyncio.create_task(h.runtime.ask_core(lambda req: ClusterJoined(req, *JOIN)))
        await h.heard(ClusterJoined)
        heartbeating = asyncio.create_task(h.runtime.take_heartbeat(heartbeat()))
        done, _ = await asyncio.wait([heartbeating], timeout=0.1)
        assert not done
        h.outside.disk.set()
        answer = await heartbeating
        assert (answer.term, answer.standing, answer.push, answer.lease_s) == (
            2,
            ClusterStanding.LIVE,
            PUSH,
            TIMING.lease_s,
        )
        await asking


async def test_orders_leave_in_order_behind_their_record(tmp_path: Path) -> None:
    """Orders begin in the order in which they were given, after the record before them; their answers are events."""
    async with running(tmp_path) as h:
        orders = [Order("s", 1, 3, number, Ping(), 1.0) for number in (1, 2, 3)]
        h.coordinator.script[PushStaged] = lambda e: [orders[0], IncarnationGiven(Role.SLAVE, "s", 1, "n"), *orders[1:]]
        h.outside.disk.clear()
        h.runtime.put_event(PushStaged("s", 1, PUSH, 4))
        first = await h.heard(OrderAnswered)
        assert (first.number, h.outside.executed) == (1, [1])
        h.outside.disk.set()
        while len([e for e in h.coordinator.seen if isinstance(e, OrderAnswered)]) < 3:
            h.coordinator.heard.clear()
            await h.coordinator.heard.wait()
        assert h.outside.executed == [1, 2, 3]
        await asyncio.sleep(0)
        assert h.runtime._orders == set(), "what has ended is forgotten"


async def test_a_slaves_heartbeat_reaches_its_orders_and_its_supervisor(tmp_path: Path) -> None:
    """Work that it tells of extends their deadlines; whoever supervises processes hears each, and no cluster's."""
    async with running(tmp_path) as h:
        seen = list[SlaveHeartbeat]()
        h.runtime.on_slave_heartbeat = seen.append
        told = [replace(slave_heartbeat(3), work_bytes=work) for work in (0, 5)]
        for each in (*told, heartbeat()):
            await h.runtime.take_heartbeat(each)
        assert (seen, h.outside.progress) == (told, [SlaveProgress("s")])


async def test_notes_are_measured(tmp_path: Path) -> None:
    """From those of a round come the durations of its phases."""
    async with running(tmp_path) as h:
        h.coordinator.script[PushStaged] = lambda e: [Note("round_opened", ()), Note("round_applying", ())]
        h.runtime.put_event(PushStaged("s", 1, PUSH, 4))
        await h.heard(PushStaged)
        await asyncio.sleep(0)
        assert h.runtime.meters.phases["window"].list_buckets()[-1][1] == 1


async def test_a_record_that_cannot_be_written_ends_the_master(tmp_path: Path) -> None:
    """Exit 74, nothing answered, and the asker learns that this master is unavailable."""
    made = RunningMaster(tmp_path)
    made.coordinator.script[ClusterJoined] = joins
    made.outside.fails = True
    ending = asyncio.create_task(made.runtime.run())
    with pytest.raises(UnavailableMaster, match="stopping"):
        await made.runtime.ask_core(lambda req: ClusterJoined(req, *JOIN))
    assert await ending == EXIT_LEDGER
    with pytest.raises(UnavailableMaster):
        await made.runtime.take_heartbeat(heartbeat())
    made.timeline.close()


async def test_what_is_written_after_the_lease_ended_is_told_to_nobody(tmp_path: Path) -> None:
    """A disk that was slow holds the answer back until a standby may serve: it does not leave, and the exit is 75."""
    made = RunningMaster(tmp_path)
    made.coordinator.script[ClusterJoined] = joins
    made.outside.disk.clear()
    ending = asyncio.create_task(made.runtime.run())
    asking = asyncio.create_task(made.runtime.ask_core(lambda req: ClusterJoined(req, *JOIN)))
    await made.heard(ClusterJoined)
    made.left_s = 0.0
    made.outside.disk.set()
    with pytest.raises(UnavailableMaster, match="stopping"):
        await asking
    assert await ending == EXIT_STALE
    made.timeline.close()


async def test_a_lease_that_ends_ends_a_master_that_is_idle(tmp_path: Path) -> None:
    """It need not be asked anything: it wakes when its lease is over."""
    made = RunningMaster(tmp_path)
    until = made.clock() + 0.2
    made.runtime._left_s = lambda: until - made.clock()
    async with asyncio.timeout(10):
        assert await made.runtime.run() == EXIT_STALE
    assert until <= made.clock() < until + TIMING.heartbeat_s
    made.timeline.close()


async def test_exit_is_obeyed(tmp_path: Path) -> None:
    """The Coordinator's Exit ends the runtime with its code, after what stands before it has left."""
    made = RunningMaster(tmp_path)
    made.coordinator.script[PushStaged] = lambda e: [Note("round_skipped", (("round", "4"),)), Exit(75, "a later term")]
    ending = asyncio.create_task(made.runtime.run())
    made.runtime.put_event(PushStaged("s", 1, PUSH, 4))
    assert await ending == 75
    made.timeline.close()
    (line,) = read_marks(made.path)
    assert (line["kind"], line["round"]) == ("round_skipped", "4")


async def test_a_bug_of_the_coordinator_ends_the_master(tmp_path: Path) -> None:
    """A machine that raised is not trusted with another event: exit 70."""
    made = RunningMaster(tmp_path)

    def breaks(event: Event) -> list[Effect]:
        raise AssertionError("impossible")

    made.coordinator.script[PushStaged] = breaks
    ending = asyncio.create_task(made.runtime.run())
    made.runtime.put_event(PushStaged("s", 1, PUSH, 4))
    assert await ending == EXIT_BUG
    made.timeline.close()


async def test_a_task_that_fails_ends_the_master(tmp_path: Path) -> None:
    """Its work is not done any more: exit 70, and what ends it later does not change that."""
    made = RunningMaster(tmp_path)
    ending = asyncio.create_task(made.runtime.run())
    made.runtime.fail(KeyError("slaves"))
    made.runtime.stop()
    assert await ending == EXIT_BUG
    made.timeline.close()


async def test_who_sees_all_of_a_run(tmp_path: Path) -> None:
    """Operators and viewers; a cluster sees itself, who pulls no cluster, and so does one whom nothing names."""
    story = GuardedMaster(tmp_path)
    view = RunView(clusters={name: ClusterView(ClusterState.IDLE) for name in ("west", "east")})
    runtime: Any = SimpleNamespace(build_view=lambda: view)
    servicer = StatusServicer(runtime, {}, guard=story.guard)

    async def seen_by(context: dict[str, Any]) -> list[str]:
        asker = SimpleNamespace(auth_context=lambda: context)
        return list(json.loads((await servicer.Status(None, asker)).json)["clusters"])

    for role, seen in (
        (PeerRole.OPERATOR, ["west", "east"]), (PeerRole.VIEWER, ["west", "east"]), (PeerRole.CLUSTER, ["west"]),
        (PeerRole.PULLER, []),
    ):  # fmt: skip
        assert await seen_by(story.context("west", role)) == seen, role
    assert await seen_by({}) == []


async def test_nobody_dies_of_our_absence(tmp_path: Path) -> None:
    """After a gap of a minute the leases have moved: Blind comes first, and the cluster that heartbeats on is not
    judged.
    """
    async with running(tmp_path) as h:
        h.coordinator.script[ClusterJoined] = joins
        await h.runtime.ask_core(lambda req: ClusterJoined(req, *JOIN))
        h.clock.added += 60.0
        blind = await h.heard(Blind)
        assert blind.gap_s == pytest.approx(60.0, abs=1.0)
        for _ in range(8):
            await h.runtime.take_heartbeat(heartbeat())
            await asyncio.sleep(HEARTBEAT_S / 2)
        assert "ClusterSilent" not in h.coordinator.kinds()
        await h.heard(ClusterSilent)  # and when it does fall silent, it is judged as ever


async def test_after_a_gap_the_unread_is_read_first(tmp_path: Path) -> None:
    """A deadline that passed while nobody looked is not acted upon before what lay in the inbox."""
    async with running(tmp_path) as h:
        h.coordinator.deadline = h.clock() + 30.0
        await asyncio.sleep(HEARTBEAT_S)
        h.clock.added += 60.0
        h.runtime.put_event(PushStaged("s", 1, PUSH, 4))
        await h.heard(Ticked)
        assert h.coordinator.kinds() == ["Blind", "PushStaged", "Ticked"]


async def test_a_deadline_is_a_tick(tmp_path: Path) -> None:
    """Ticked comes at the Coordinator's deadline, without anybody speaking."""
    async with running(tmp_path) as h:
        h.coordinator.deadline = due = h.clock() + 0.15
        await h.heard(Ticked)
        assert h.clock() >= due
        assert h.coordinator.kinds() == ["Ticked"]


async def test_stop_refuses_those_who_wait(tmp_path: Path) -> None:
    """A graceful stop answers open questions with UnavailableMaster instead of leaving them to their deadline."""
    made = RunningMaster(tmp_path)
    ending = asyncio.create_task(made.runtime.run())
    asking = asyncio.create_task(made.runtime.ask_core(lambda req: RoundAwaited(req, PUSH)))
    await made.heard(RoundAwaited)
    made.runtime.stop()
    assert await ending == 0
    with pytest.raises(UnavailableMaster):
        await asking
    made.timeline.close()


async def test_orders_under_way_end_with_the_master(tmp_path: Path) -> None:
    """No task of a master that has stopped waits for a slave."""
    made = RunningMaster(tmp_path)
    made.coordinator.script[PushStaged] = lambda e: [Order("s", 1, 3, 1, Ping(), 1.0)]
    made.outside.slaves.clear()
    ending = asyncio.create_task(made.runtime.run())
    made.runtime.put_event(PushStaged("s", 1, PUSH, 4))
    while not made.outside.executed:
        await asyncio.sleep(0)
    made.runtime.stop()
    assert await ending == 0
    assert asyncio.all_tasks() == {asyncio.current_task()}
    made.timeline.close()


async def test_what_is_decided_when_a_master_stops_is_written(tmp_path: Path) -> None:
    """A disk that is slow at SIGTERM: whoever was given an incarnation would be given it twice."""
    made = RunningMaster(tmp_path)
    made.coordinator.script[ClusterJoined] = joins
    made.outside.disk.clear()
    ending = asyncio.create_task(made.runtime.run())
    asking = asyncio.create_task(made.runtime.ask_core(lambda req: ClusterJoined(req, *JOIN)))
    await made.heard(ClusterJoined)
    made.runtime.stop()
    done, _ = await asyncio.wait([ending], timeout=0.1)
    assert not done
    made.outside.disk.set()
    assert await ending == 0 and isinstance(await asking, Joined)
    assert made.outside.written == [IncarnationGiven(Role.CLUSTER, "a", 1, "nonce")]
    made.timeline.close()


async def test_a_question_whose_caller_has_gone_is_asked_no_more(tmp_path: Path) -> None:
    """Else each that hangs up is carried along, and asked again and again, until its patience is over."""
    async with running(tmp_path) as h:
        h.coordinator.script[RoundAwaited] = lambda e: [Reply(e.req, Pending("the round is open"))]
        asking = asyncio.create_task(h.runtime.ask_core(lambda req: RoundAwaited(req, PUSH)))
        await h.heard(RoundAwaited)
        assert h.runtime._core._held.next_deadline() < inf
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        assert h.runtime._core._held.next_deadline() == inf


async def test_an_answer_to_whom_has_just_hung_up_harms_nobody(tmp_path: Path) -> None:
    """The question is withdrawn at the loop's next turn only."""
    async with running(tmp_path) as h:
        asking = asyncio.create_task(h.runtime.ask_core(lambda req: RoundAwaited(req, PUSH)))
        await h.heard(RoundAwaited)
        asking.cancel()
        h.runtime._answer_question(1, Pending("the round is open"))
        await asyncio.gather(asking, return_exceptions=True)
        h.runtime._answer_question(1, Pending("the round is open"))


async def test_a_request_that_is_refused_while_it_is_read_leaves_nothing(tmp_path: Path) -> None:
    """206 bytes each were 3.6 GB a day at the rate that one peer is allowed."""

    def refuse(_req: int) -> Event:
        raise RemoteProtocolError("no push is named")

    async with running(tmp_path) as h:
        for _ in range(3):
            with pytest.raises(RemoteProtocolError):
                await h.runtime.ask_core(refuse)
        await h.runtime.take_heartbeat(heartbeat())
        assert h.runtime._answers == {}


def heartbeat(inner_steps: int = 0) -> ClusterHeartbeat:
    return ClusterHeartbeat(
        "a", 1, TrainerState.TRAINING, Activity.INNER, 1, inner_steps, 0, 0, 0.0, VersionId(0, 0), 0, 0, 0.0
    )


def slave_heartbeat(term: int) -> SlaveHeartbeat:
    return SlaveHeartbeat("s", 1, term, GENESIS, (), (), 0, 0, 0, 0, 0.0, 0.0)
