"""The daemon's shell around the core: gRPC services, inbox, futures, the ledger's thread, and the links to slaves."""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from math import inf
from pathlib import Path
from typing import Any, TypeVar, cast

from google.protobuf.message import Message

from dips.config import RunFile
from dips.errors import (
    Busy,
    CorruptManifest,
    DifferentModel,
    DipsError,
    StaleTerm,
    UnavailableMaster,
    UnavailableSlave,
)
from dips.identity.names import PeerRole
from dips.ids import VersionId
from dips.master import genesis
from dips.master.core import (
    Action,
    HeartbeatReply,
    MasterCore,
    Outside,
    SentOrder,
    SlaveEndpoint,
    SlaveProgress,
    WriteRecords,
)
from dips.master.hooks import TrackProcesses, VersionProcesses
from dips.master.journal import Journal
from dips.master.ledger import Ledger
from dips.master.ledger_mirror import LedgerMirror
from dips.master.meters import RoundMeters, find_newest, follow_newest
from dips.master.standby import LeaseKeeper, name_holder, name_place
from dips.plain import to_plain
from dips.protocol import events, heartbeats
from dips.protocol.effects import Acknowledged, Exit, Failed, Note, Order, Refused, Reply, Result, name_subject
from dips.protocol.events import Event, ManifestOffered, OrderAnswered, OrderFailed
from dips.protocol.heartbeats import ClusterHeartbeat, SlaveHeartbeat
from dips.protocol.manifest import MAX_JSON_BYTES, Manifest
from dips.protocol.operator import explain_holdouts
from dips.protocol.records import Record, RolledBack
from dips.protocol.slaves import EXIT_STALE
from dips.protocol.view import RunView
from dips.tasks import Alarm, Fail, start_task
from dips.telemetry import logs
from dips.telemetry.logs import Log
from dips.telemetry.timeline import Timeline
from dips.transport import control
from dips.transport.endpoints import slave_peer
from dips.transport.gate import Guard
from dips.transport.ordered_calls import AnyCalls, NobodyListens, OrderedCalls
from dips.transport.tls import TlsSource
from dips.view.judging import judge_run, narrow_view, spell_view
from dips.wire import messages
from dips.wire.generated import cluster_pb2, names_pb2, operator_pb2, slave_pb2, status_pb2
from dips.wire.generated.cluster_pb2_grpc import ClusterServiceServicer
from dips.wire.generated.operator_pb2_grpc import OperatorServiceServicer
from dips.wire.generated.slave_pb2_grpc import OrderServiceStub, SlaveServiceServicer
from dips.wire.generated.status_pb2_grpc import StatusServiceServicer
from dips.wire.packed_manifest import ManifestTooLong, unpack_manifest

# ---- links ----------------------------------------------------------------------------------------------------------
# No order waits for the answer of another (transport/ordered_calls.py), since a snapshot takes minutes. core.py
# decides when an order is sent again and what counts as its failure. The meaning of orders is not known here.


RESEND_PAUSE_S = 0.1  # before an order is sent again to a slave that cannot take it yet


DialSlave = Callable[[str, str, TlsSource | None], AnyCalls]  # of name, address and our certificate


def dial_slave(slave: str, address: str, tls: TlsSource | None = None) -> OrderedCalls:
    """Open a connection to a slave's control server, for its orders."""
    peer = slave_peer(slave, address, tls)
    channel = control.open_channel(peer)
    execute = OrderServiceStub(channel).Execute
    return OrderedCalls(channel, execute, peer, lambda error: control.to_error(error, 0.0, peer, UnavailableSlave))


class SlaveLink:
    """The connection to one slave at one address."""

    def __init__(self, slave: str, address: str, tls: TlsSource | None = None, dial: DialSlave = dial_slave) -> None:
        self.slave, self.address = slave, address
        self._calls = dial(slave, address, tls)
        self._timeouts: dict[SentOrder, asyncio.Timeout] = {}

    async def execute_order(self, order: Order) -> OrderAnswered | OrderFailed:
        """Have an order carried out; failures of the slave or the link are returned, not raised."""
        clock = asyncio.get_running_loop().time
        sent = SentOrder(order, clock())
        ended: OrderAnswered | OrderFailed | None = None
        while ended is None:
            try:
                async with asyncio.timeout_at(sent.until) as timeout:
                    self._timeouts[sent] = timeout
                    while (ended := await self._send_once(sent, clock)) is None:
                        await asyncio.sleep(RESEND_PAUSE_S)
            except TimeoutError:
                ended = sent.on_error(UnavailableSlave("no answer"), clock())
            finally:
                self._timeouts.pop(sent, None)
        return ended

    def on_progress(self, progress: SlaveProgress) -> None:
        """Restart the deadlines of orders whose slave has worked, or waits for its disk."""
        for sent, timeout in self._timeouts.items():
            if progress.waiting is not None and sent.order.number not in progress.waiting:
                continue
            sent.on_progress(asyncio.get_running_loop().time(), progress.most_s)
            if not timeout.expired():
                timeout.reschedule(sent.until)

    async def close(self) -> None:
        await self._calls.close()

    async def _send_once(self, sent: SentOrder, clock: Callable[[], float]) -> OrderAnswered | OrderFailed | None:
        """Send the order once; return None to send it again."""
        try:
            reply = await self._calls.ask(messages.to_proto(sent.order), needs_listener=sent.needs_listener)
        except NobodyListens:
            return sent.on_refusal(UnavailableSlave(f"nobody listens at {self.address}"))
        except DipsError as error:
            return sent.on_error(error, clock())
        return sent.on_answer(messages.unwrap_oneof(reply))


class SlaveLinks:
    """The connections to all slaves that have registered."""

    def __init__(self, tls: TlsSource | None = None, dial: DialSlave = dial_slave) -> None:
        """`dial` opens the connection to a slave; the simulation has its own."""
        self._tls, self._dial = tls, dial
        self._links: dict[str, SlaveLink] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def learn_address(self, slave: str, address: str) -> None:
        """Open a link to the address of a slave's control server; a link to an earlier address is closed."""
        known = self._links.get(slave)
        if known is not None and known.address == address:
            return
        if known is not None:
            task = asyncio.get_running_loop().create_task(known.close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
        self._links[slave] = SlaveLink(slave, address, self._tls, self._dial)

    def on_progress(self, progress: SlaveProgress) -> None:
        """Restart the deadlines of a slave's orders, since it has worked or waits for its disk."""
        link = self._links.get(progress.slave)
        if link is not None:
            link.on_progress(progress)

    async def execute_order(self, order: Order) -> OrderAnswered | OrderFailed:
        """Have an order carried out by the slave that it names."""
        link = self._links.get(order.slave)
        if link is None:
            error = UnavailableSlave(f"{order.slave} has no address yet")
            return SentOrder(order, asyncio.get_running_loop().time()).on_refusal(error)
        return await link.execute_order(order)

    async def close(self) -> None:
        for link in self._links.values():
            await link.close()
        if self._closing:
            await asyncio.wait(self._closing)


# ---- outside --------------------------------------------------------------------------------------------------------


BASE = ".mirrored.sqlite"  # in the master's directory: a copy of the ledger on its way to the mirror
MIRROR_S = 5.0  # a mirror that takes longer is not waited for until it has caught up: rounds go on


class MasterOutside:
    """The daemon's implementation of `Outside` in `dips/master/core.py`."""

    def __init__(
        self,
        ledger: Ledger,
        tls: TlsSource | None = None,
        dial: DialSlave = dial_slave,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """`dial` opens the connection to a slave; `wall` returns Unix seconds, for the ledger's rows."""
        self._ledger, self._links, self._wall = ledger, SlaveLinks(tls, dial), wall
        self._thread = ThreadPoolExecutor(1, "ledger")
        self._written = 0  # transactions of this term, counted on the ledger's thread
        self._mirror: LedgerMirror | None = None
        self._lease: LeaseKeeper | None = None
        self._on_version: VersionProcesses | None = None
        self._track: TrackProcesses | None = None
        self._newest = find_newest(ledger.read_newest())  # replaced as a whole
        self.learn_address, self.on_progress = self._links.learn_address, self._links.on_progress

    def begin_mirror(self, config: RunFile, term: int, log: logs.Log, *, bound: bool = False) -> None:
        """Claim the term in the mirror, and begin to mirror the ledger; waits for each as long as for a transaction.

        With `bound` it waits for the mirror without end. Raise StaleTerm if another master has a later term.
        """
        store = genesis.mirror_of(config)
        if store is None:
            return
        if store.shares_disk():
            log.warning("mirror_on_the_same_disk", mirror=store.url, problem="lost with the ledger; is it mounted?")
        run, directory = config.shared.run, config.master.directory
        name, place = name_holder(config), name_place(config)
        self._lease = LeaseKeeper(store, run, term, name, directory, log, bound=bound, place=place)
        if not self._lease.start(MIRROR_S):
            raise StaleTerm(self._lease.explain_end())
        self._mirror = LedgerMirror(
            store, run, term, partial(self._take_claimed_base, self._lease, directory / BASE), MIRROR_S,
            time.monotonic, log, bound=self._lease.view().claimable,
        )  # fmt: skip
        self._mirror.start()
        self._lease.follow_mirror(self._mirror)

    def left_s(self) -> float:
        """Return how long this master may serve from now on: inf without a lease that a standby watches."""
        return inf if self._lease is None else self._lease.left_s()

    def explain_end(self) -> str:
        """Return why it may not serve any more."""
        return "" if self._lease is None else self._lease.explain_end()

    def begin_processes(self, config: RunFile, file: Path, log: logs.Log, fail: Fail) -> None:
        """Begin to run the run file's command for every n-th version, and to send rounds to its trackers; `fail` is
        called with exceptions of their tasks.
        """
        section, directory = config.master, config.master.directory.resolve()
        file = file.absolute()  # as it is named: what a link leads to may be replaced, as in a ConfigMap
        if section.on_version is not None:
            self._on_version = VersionProcesses(
                file, section.on_version, directory, self._find_unprocessed, self.write_records, log
            )
            self._on_version.start(fail)
        if section.track is not None:
            self._track = TrackProcesses(file, section.track, directory, log)
            self._track.start(fail)

    async def _find_unprocessed(self, every: int) -> VersionId | None:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, self._ledger.find_unprocessed, every)

    def complete_view(self, view: RunView) -> RunView:
        """Return the view with the newest version, the ledger's mirror and its lease, `master.on_version` and so on."""
        lease = None if self._lease is None else self._lease.view()
        older = () if lease is None else lease.find_holdouts(view.protocol_newest)
        return replace(
            view,
            newest=self._newest,
            ledger_mirror=None if self._mirror is None else self._mirror.view(),
            lease=lease,
            holdouts=(*view.holdouts, *older),
            on_version=None if self._on_version is None else self._on_version.view(),
            track=None if self._track is None else self._track.view(),
        )

    async def write_records(self, records: Sequence[Record]) -> None:
        """Write records; return when all are durable, in the mirror too unless it lags. The loop goes on meanwhile."""
        wall = self._wall()
        number = await asyncio.get_running_loop().run_in_executor(self._thread, self._write, records, wall)
        if self._mirror is not None:
            await self._mirror.follow(number, records, wall)

    def _write(self, records: Sequence[Record], wall: float) -> int:
        self._ledger.write_records(records, wall)
        if any(isinstance(record, RolledBack) for record in records):
            self._newest = find_newest(self._ledger.read_newest())
        else:
            self._newest = follow_newest(self._newest, records, wall)
        self._written += 1
        return self._written

    def _take_claimed_base(self, lease: LeaseKeeper, path: Path) -> tuple[int, Path]:
        lease.require_claim()  # the base is the first of a term's files
        return self._thread.submit(self._take_base, path).result()

    def _take_base(self, path: Path) -> tuple[int, Path]:
        self._ledger.copy_to(path)
        return self._written, path

    async def execute_order(self, order: Order) -> OrderAnswered | OrderFailed:
        return await self._links.execute_order(order)

    async def close(self) -> None:
        if self._on_version is not None:
            await self._on_version.stop()
        if self._track is not None:
            await self._track.stop()
        await self._links.close()
        if self._lease is not None:
            self._lease.close()
        if self._mirror is not None:
            self._mirror.close()
        self._thread.shutdown()


# ---- runtime --------------------------------------------------------------------------------------------------------
# What must stay true: one event loop owns the core, and it never waits for the disk. Messages that have arrived are
# passed in before the core acts on any deadline.


EXIT_BUG = 70  # EX_SOFTWARE
FLUSH_S = 5.0  # longest wait of a graceful stop for records being written

# Notes of every successful round: an outer step logs one line, version_committed. The timeline has all of them.
ROUTINE = frozenset(
    {
        *("push_granted", "push_committed", "round_opened", "round_applying", "round_persisting", "version_durable"),
    }
)


class Runtime:
    """One term of a master. `clock` returns monotonic seconds."""

    def __init__(
        self,
        core: MasterCore,
        outside: Outside,
        *,
        clock: Callable[[], float],
        log: Log,
        timeline: Timeline,
        journal: Journal | None = None,
        left_s: Callable[[], float] = lambda: inf,
        explain_end: Callable[[], str] = str,
    ) -> None:
        """`left_s` returns how long this master may serve from now on; then it ends, and `explain_end` says why."""
        self._left_s, self._explain_end = left_s, explain_end
        self._core, self._outside, self._clock = core, outside, clock
        self._log, self._timeline, self._journal, self.meters = log, timeline, journal, RoundMeters()
        self._inbox: deque[Callable[[float], None]] = deque()
        self._alarm = Alarm()
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._last_req = 0
        self._writing: asyncio.Task[None] | None = None
        self._lost = False  # the lease
        self._orders: set[asyncio.Task[None]] = set()
        self.on_slave_heartbeat: Callable[[SlaveHeartbeat], None] = lambda heartbeat: None  # called with each
        self._code: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    # ---- for servicers and app -------------------------------------------------------------------------------------

    def put_event(self, event: Event) -> None:
        """Put an event on the inbox."""
        self._put_arrived(lambda now: self._core.take_event(event, now))

    async def ask_core(self, make: Callable[[int], Event]) -> Result:
        """Put a question on the inbox and return its answer, once everything before it is durable."""
        req, answer = self._new_answer()
        try:
            self.put_event(make(req))  # decoding may raise
            result: Result = await answer
            return result
        finally:
            self._answers.pop(req, None)
            self._core.withdraw_question(req)

    async def take_heartbeat(self, heartbeat: ClusterHeartbeat | SlaveHeartbeat) -> Any:
        """Process a heartbeat; return its ClusterHeartbeatAnswer or SlaveHeartbeatAnswer."""
        if isinstance(heartbeat, SlaveHeartbeat):
            self.on_slave_heartbeat(heartbeat)
        req, answer = self._new_answer()
        self._put_arrived(lambda now: self._core.on_heartbeat(req, heartbeat, now))
        try:
            return await answer
        finally:
            self._answers.pop(req, None)

    def build_view(self) -> RunView:
        """Return the view of the run: the core's part and those outside it, judged with the newest heartbeats."""
        now = self._clock()
        view = self._outside.complete_view(self._core.build_view(now))
        if self._journal is not None:
            view = replace(view, journal=self._journal.read_status())
        return judge_run(view, self._core.heartbeats, now, self._core.heartbeat_s)

    @property
    def compute_s(self) -> float:
        """Return how long a slave may be silent in an order that computes, as an operator has last set it."""
        return self._core.compute_s

    def explain_unready(self) -> str:
        """Return why the run cannot take an outer step now; empty if it can."""
        return self._core.explain_unready()

    def fail(self, error: BaseException) -> None:
        """End `run` with EXIT_BUG: a task of this process has failed, and its work is not done any more."""
        self.stop(EXIT_BUG)
        self._log.error("a task of this master failed", error=repr(error), exc_info=error)

    def stop(self, code: int = 0) -> None:
        """End `run` with this exit code; only the first call counts."""
        if not self._code.done():
            self._code.set_result(code)

    async def run(self) -> int:
        """Serve until `stop` is called; return the exit code."""
        loop = asyncio.create_task(self._run_core(), name="loop")
        try:
            ends: list[asyncio.Future[Any]] = [self._code, loop]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if not self._lost:
                await self._flush_records()
        finally:
            tasks = [loop, *self._orders, *([self._writing] if self._writing else [])]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._refuse_all()
        return self._code.result()

    # ---- the loop --------------------------------------------------------------------------------------------------

    async def _run_core(self) -> None:
        """Pass in what arrived, let the core act on what is due, and sleep until there is something to do."""
        try:
            while not self._code.done():
                now = self._clock()
                if not self._may_serve():
                    return
                self._core.on_wake(now)
                while self._inbox:
                    self._inbox.popleft()(now)
                self._core.tick(now)
                self._carry_out(self._core.take_actions())
                until = min(self._core.sleep_until(now), self._clock() + self._left_s())
                await self._alarm.wait(max(0.0, until - self._clock()))
        except Exception as error:  # noqa: BLE001 (whatever it is: the core's state can no longer be trusted)
            self._log.error("the coordinator failed", error=repr(error), exc_info=error)
            self.stop(EXIT_BUG)

    def _put_arrived(self, arrived: Callable[[float], None]) -> None:
        self._inbox.append(arrived)
        self._alarm.ring()

    def _new_answer(self) -> tuple[int, asyncio.Future[Any]]:
        if self._code.done():
            raise UnavailableMaster("this master is stopping")
        self._last_req += 1
        answer = self._answers[self._last_req] = asyncio.get_running_loop().create_future()
        return self._last_req, answer

    # ---- carrying out ----------------------------------------------------------------------------------------------

    def _may_serve(self) -> bool:
        """Return whether the lease lasts; if not, end: a standby may begin soon, and nothing leaves any more."""
        if self._left_s() > 0.0:
            return True
        if not self._code.done():
            self._lost = True
            self._log.error("exit", code=EXIT_STALE, reason=self._explain_end())
            self.stop(EXIT_STALE)
        return False

    def _carry_out(self, actions: list[Action]) -> None:
        if not self._may_serve():
            return
        for action in actions:
            match action:
                case Order():
                    self._send_order(action)
                case Reply():
                    self._answer_question(action.req, action.result)
                case HeartbeatReply():
                    self._answer_question(action.req, action.answer)
                case WriteRecords():
                    self._writing = start_task(self._write_records(action.records), self.fail, "writer")
                case SlaveEndpoint():
                    self._outside.learn_address(action.slave, action.address)
                case SlaveProgress():
                    self._outside.on_progress(action)
                case Note():
                    (self._log.debug if action.kind in ROUTINE else self._log.info)(action.kind, **dict(action.fields))
                    self._timeline.record_mark(action.kind, **dict(action.fields))
                    self.meters.on_note(action.kind, dict(action.fields), self._clock())
                case Exit():
                    self._log.error("exit", code=action.code, reason=action.reason)
                    self.stop(action.code)

    def _answer_question(self, req: int, value: object) -> None:
        """Answer, unless the caller has gone."""
        future = self._answers.get(req)
        if future is not None and not future.done():
            future.set_result(value)

    async def _write_records(self, records: tuple[Record, ...]) -> None:
        self._writing = asyncio.current_task()
        try:
            await self._outside.write_records(records)
        except Exception as error:  # noqa: BLE001 (nothing behind it may leave, whatever it is)
            self._log.error("a record could not be written", error=repr(error), exc_info=error)
            self._carry_out([self._core.on_write_failed(error)])
            return
        self._core.on_written()
        self._carry_out(self._core.take_actions())

    def _send_order(self, order: Order) -> None:
        task = start_task(self._execute_order(order), self.fail)
        self._orders.add(task)
        task.add_done_callback(self._orders.discard)

    async def _execute_order(self, order: Order) -> None:
        begun, kind = self._clock(), type(order.body).__name__
        self._log.debug("order", order=order)
        ended = await self._outside.execute_order(order)
        took_s, how = self._clock() - begun, type(ended).__name__
        self._log.debug("order ended", number=order.number, slave=order.slave, kind=kind, how=how, took_s=took_s)
        self._timeline.record_mark(
            "order", slave=order.slave, order=kind, term=order.term, number=order.number, took_s=took_s, how=how,
            **name_subject(order.body),
        )  # fmt: skip
        self.put_event(ended)

    # ---- the end ---------------------------------------------------------------------------------------------------

    async def _flush_records(self) -> None:
        """Write the records that were decided before the end, if possible; each write may release further ones."""
        try:
            async with asyncio.timeout(FLUSH_S):
                while self._writing is not None and not self._writing.done():
                    await asyncio.wait([self._writing])
        except TimeoutError:
            self._log.warning("stopped before everything was written", waited_s=FLUSH_S)

    def _refuse_all(self) -> None:
        for future in self._answers.values():
            if not future.done():
                future.set_exception(UnavailableMaster("this master is stopping"))


# ---- manifest desk --------------------------------------------------------------------------------------------------
# Any enrolled cluster may send a manifest of any size and as often as it likes. So only one is read at a time, at most
# twice as large as the run's own, and for at most a tenth of the time: other callers are asked to wait, which agents
# do.


LEAST_BYTES = 1 << 16  # of JSON, always read: takes some milliseconds
TIMES = 2  # of the run's own JSON: a larger model differs in more than a person would read
REST = 9.0  # pause until the next comparison, in durations of the last


class ManifestDesk:
    """Compares manifests for one master. `clock` returns monotonic seconds."""

    def __init__(self, text: str, clock: Callable[[], float] = time.monotonic) -> None:
        """`text` is the JSON of the run's own manifest."""
        self._most = min(MAX_JSON_BYTES, max(LEAST_BYTES, TIMES * len(text.encode())))
        self._ours, self._clock = Manifest.from_json(text), clock
        self._reading, self._free_at = False, clock()

    async def compare(self, offered: ManifestOffered) -> Acknowledged:
        """Raise DifferentModel with the first differences, or another error if it is no manifest; return if it is the
        run's.
        """
        begun = self._clock()
        if self._reading or begun < self._free_at:
            raise Busy("manifest: the master compares one model at a time: wait and ask again")
        self._reading = True
        return await asyncio.shield(self._read_apart(offered, begun))  # the thread goes on if the caller hangs up

    async def _read_apart(self, offered: ManifestOffered, begun: float) -> Acknowledged:
        try:
            return await asyncio.to_thread(self._find_differences, offered)
        finally:
            self._reading, now = False, self._clock()
            self._free_at = now + REST * (now - begun)

    def _find_differences(self, offered: ManifestOffered) -> Acknowledged:
        try:
            text = unpack_manifest(offered.packed, offered.digest, self._most)
        except ManifestTooLong as error:
            raise DifferentModel(
                f"this model is not the run's: its manifest has more than {self._most} bytes, expected some "
                f"{len(self._ours.to_json())}; `dips check --model` says where they differ"
            ) from error
        theirs = Manifest.from_json(text)
        if theirs.digest != offered.digest:
            raise CorruptManifest(
                f"expected a manifest of digest {offered.digest[:12]}, as announced, got {theirs.digest[:12]}"
            )
        lines = self._ours.describe_differences(theirs)
        if not lines:
            return Acknowledged()
        raise DifferentModel("this model is not the run's: " + "; ".join(lines))


# ---- servicer -------------------------------------------------------------------------------------------------------
# A question whose answer is Pending is kept open by the core (core.py). The Coordinator decides which question is legal
# when.


ReplyMessage = TypeVar("ReplyMessage", bound=Message)
_LOOKERS = frozenset({PeerRole.OPERATOR, PeerRole.VIEWER})  # who see all of the run


class ClusterServicer(ClusterServiceServicer):
    """The service called by agents."""

    def __init__(
        self, runtime: Runtime, desk: ManifestDesk | None = None, wall: Callable[[], float] = time.time
    ) -> None:
        """`desk` compares models; None: there is no model yet."""
        self._runtime, self._desk, self._wall = runtime, desk, wall

    async def Join(self, request: Any, context: Any) -> cluster_pb2.JoinReply:
        return await self._answer_question(request, events.ClusterJoined, cluster_pb2.JoinReply)

    async def CompareManifest(self, request: Any, context: Any) -> cluster_pb2.CompareManifestReply:
        if self._desk is None:
            raise UnavailableMaster("this run has no model yet: join again")
        result = await self._desk.compare(messages.from_proto(request, events.ManifestOffered))
        return cast(cluster_pb2.CompareManifestReply, messages.wrap_oneof(result, cluster_pb2.CompareManifestReply))

    async def Heartbeat(self, request: Any, context: Any) -> cluster_pb2.ClusterHeartbeatAnswer:
        answer = await self._runtime.take_heartbeat(messages.from_proto(request, heartbeats.ClusterHeartbeat))
        return cast(cluster_pb2.ClusterHeartbeatAnswer, messages.to_proto(answer))

    async def RequestPush(self, request: Any, context: Any) -> cluster_pb2.RequestPushReply:
        return await self._answer_question(request, events.PushRequested, cluster_pb2.RequestPushReply)

    async def FinishPush(self, request: Any, context: Any) -> cluster_pb2.FinishPushReply:
        return await self._answer_question(request, events.PushFinished, cluster_pb2.FinishPushReply)

    async def AbortPush(self, request: Any, context: Any) -> cluster_pb2.AbortPushReply:
        return await self._answer_question(request, events.PushAborted, cluster_pb2.AbortPushReply)

    async def AwaitRound(self, request: Any, context: Any) -> cluster_pb2.AwaitRoundReply:
        return await self._answer_question(request, events.RoundAwaited, cluster_pb2.AwaitRoundReply)

    async def RequestPull(self, request: Any, context: Any) -> cluster_pb2.RequestPullReply:
        return await self._answer_question(
            request, events.PullRequested, cluster_pb2.RequestPullReply, wall=self._wall()
        )

    async def FinishPull(self, request: Any, context: Any) -> cluster_pb2.FinishPullReply:
        return await self._answer_question(request, events.PullFinished, cluster_pb2.FinishPullReply)

    async def AdmitProbe(self, request: Any, context: Any) -> cluster_pb2.AdmitProbeReply:
        return await self._answer_question(request, events.ProbeAsked, cluster_pb2.AdmitProbeReply)

    async def RequestRanges(self, request: Any, context: Any) -> cluster_pb2.RequestRangesReply:
        return await self._answer_question(request, events.RangesRequested, cluster_pb2.RequestRangesReply)

    async def Leave(self, request: Any, context: Any) -> cluster_pb2.LeaveReply:
        return await self._answer_question(request, events.ClusterLeft, cluster_pb2.LeaveReply)

    async def _answer_question(
        self, request: Message, question: type[Any], reply: type[ReplyMessage], **local: float
    ) -> ReplyMessage:
        """`local`: fields of the question that do not travel."""
        result = await _ask_master(self._runtime, lambda req: messages.from_proto(request, question, req=req, **local))
        return cast(ReplyMessage, messages.wrap_oneof(result, reply))


class SlaveServicer(SlaveServiceServicer):
    """The service called by slaves."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    async def Register(self, request: Any, context: Any) -> slave_pb2.Registered:
        result = await _ask_master(
            self._runtime, lambda req: messages.from_proto(request, events.SlaveRegistered, req=req)
        )
        return cast(slave_pb2.Registered, messages.to_proto(result))

    async def Heartbeat(self, request: Any, context: Any) -> slave_pb2.SlaveHeartbeatAnswer:
        answer = await self._runtime.take_heartbeat(messages.from_proto(request, heartbeats.SlaveHeartbeat))
        return cast(slave_pb2.SlaveHeartbeatAnswer, messages.to_proto(answer))

    async def Staged(self, request: Any, context: Any) -> names_pb2.Acknowledged:
        self._runtime.put_event(messages.from_proto(request, events.PushStaged))
        return cast(names_pb2.Acknowledged, messages.to_proto(Acknowledged()))

    async def Refused(self, request: Any, context: Any) -> names_pb2.Acknowledged:
        self._runtime.put_event(messages.from_proto(request, events.PushRefused))
        return cast(names_pb2.Acknowledged, messages.to_proto(Acknowledged()))


def _audited(kind: type[Any], reply: type[Message]) -> Callable[..., Any]:
    """Return a method that asks the core in the caller's name, which the ledger records with the time."""

    async def answer(self: OperatorServicer, request: Message, context: Any) -> Message:
        caller = events.LOCAL_CALLER if self._guard is None else self._guard.name_caller(context.auth_context())
        wall = self._wall()
        result = await _ask_master(
            self._runtime,
            lambda req: events.OperatorAsked(req, caller, wall, messages.from_proto(request, kind, req=req)),
        )
        return messages.wrap_oneof(result, reply)

    return answer


class OperatorServicer(OperatorServiceServicer):
    """The service called by operators; the ledger records the caller and the time of each request."""

    def __init__(
        self,
        runtime: Runtime,
        begin: Callable[[events.RunProposed], None],
        guard: Guard | None = None,
        wall: Callable[[], float] = time.time,
        lack_room: Callable[[], str] = lambda: "",
    ) -> None:
        """`begin` creates the run's ledger, or raises why not; it does nothing if the run has begun with that model.
        `lack_room` returns why the run's protocol cannot be raised on the ledger's disk.
        """
        self._runtime, self._begin, self._guard, self._wall = runtime, begin, guard, wall
        self._lack_room = lack_room

    async def Begin(self, request: Any, context: Any) -> operator_pb2.BeginReply:
        self._begin(messages.from_proto(request, events.RunProposed))
        return cast(operator_pb2.BeginReply, messages.wrap_oneof(Acknowledged(), operator_pb2.BeginReply))

    Seed = _audited(events.SeedAsked, operator_pb2.SeedReply)
    Recover = _audited(events.RecoverAsked, operator_pb2.SeedReply)
    Readmit = _audited(events.ReadmissionAsked, operator_pb2.ReadmitReply)
    Rollback = _audited(events.RollbackAsked, operator_pb2.RollbackReply)
    Rebalance = _audited(events.RebalanceAsked, operator_pb2.RebalanceReply)
    Drain = _audited(events.DrainAsked, operator_pb2.DrainReply)
    DrainAll = _audited(events.DrainAllAsked, operator_pb2.DrainReply)
    Extend = _audited(events.ExtensionAsked, operator_pb2.ExtendReply)
    Tune = _audited(events.TuningAsked, operator_pb2.TuneReply)
    Quarantine = _audited(events.QuarantineAsked, operator_pb2.QuarantineReply)
    _finalise = _audited(events.FinaliseAsked, operator_pb2.FinaliseReply)

    async def Finalise(self, request: Any, context: Any) -> operator_pb2.FinaliseReply:
        """Ask the core, but for a standby that speaks less, or a disk without room: the core knows of neither."""
        view, why = self._runtime.build_view(), ""
        if view.lease is not None and (holdouts := view.lease.find_holdouts(request.protocol)):
            why = explain_holdouts(holdouts, request.protocol)
        elif view.protocol < request.protocol:
            why = self._lack_room()
        if why:
            refused = Refused(0.0, why)
            return cast(operator_pb2.FinaliseReply, messages.wrap_oneof(refused, operator_pb2.FinaliseReply))
        return cast(operator_pb2.FinaliseReply, await self._finalise(request, context))


class StatusServicer(StatusServiceServicer):
    """The service called by `dips status`, the live view, `dips check` and whoever pulls.

    Operators and viewers see all; so does everybody in plain text. A cluster sees no other cluster, a puller none.
    """

    def __init__(
        self, runtime: Runtime, agreed: Mapping[str, Any], page: str | None = None, guard: Guard | None = None
    ) -> None:
        """`agreed` holds what never changes in a run: its name, shared options, their digest, the manifest; empty
        before it has a ledger. `page` is the URL of the page.
        """
        self._runtime, self._agreed, self._page, self._guard = runtime, agreed, page, guard

    async def Status(self, request: Any, context: Any) -> status_pb2.StatusReply:
        return status_pb2.StatusReply(json=spell_view(replace(self._build_view(context), page=self._page)))

    async def Describe(self, request: Any, context: Any) -> status_pb2.DescribeReply:
        view = self._build_view(context)
        if not self._agreed:
            raise UnavailableMaster(f"run {view.run!r} {view.waiting}")
        present = {key: to_plain(getattr(view, key)) for key in ("term", "head", "finished", "clusters")}
        slaves = {
            name: {"state": s.state, "reason": s.reason, "lanes": s.lanes, "key": s.key}
            for name, s in self._runtime.build_view().slaves.items()
        }
        return status_pb2.DescribeReply(json=json.dumps({**present, "slaves": slaves, **self._agreed}))

    def _build_view(self, context: Any) -> RunView:
        """Return what the caller may see."""
        view = self._runtime.build_view()
        if self._guard is None:
            return view
        caller = self._guard.identify_caller(context.auth_context())
        if caller is not None and caller.role in _LOOKERS:
            return view
        return narrow_view(view, caller.cluster_name if caller is not None else "")


async def _ask_master(runtime: Runtime, make: Callable[[int], events.Event]) -> Result:
    """Ask the core; raise the error of a Failed answer."""
    result = await runtime.ask_core(make)
    if isinstance(result, Failed):
        raise result.error(result.message)
    return result
