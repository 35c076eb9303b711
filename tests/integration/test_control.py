"""The control flow end to end: a real master on loopback, scripted clusters and slaves, every order over real gRPC."""

from __future__ import annotations

import asyncio
import hashlib
import json
import signal
import subprocess
import sys
import threading
import urllib.request
import zlib
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import structlog
import yaml
from grpc_health.v1 import health_pb2, health_pb2_grpc

from dips.config import OnVersionSection, RunFile, load_run
from dips.errors import (
    ConfigError,
    CorruptManifest,
    DifferentModel,
    DipsError,
    FailedDisk,
    RemoteProtocolError,
    StaleIncarnation,
    StaleTerm,
    UnavailableMaster,
    UnavailableSlave,
    UnresponsiveSlave,
)
from dips.ids import GENESIS, PullId, PushId, VersionId
from dips.master.app import serve
from dips.master.core import SlaveProgress
from dips.master.genesis import ledger_path, make_run
from dips.master.ledger import Ledger
from dips.master.runtime import SlaveLink, SlaveLinks
from dips.protocol import effects, events
from dips.protocol.effects import Order
from dips.protocol.enums import Activity, TrainerState
from dips.protocol.heartbeats import (
    ClusterHeartbeat,
    ClusterHeartbeatAnswer,
    SlaveHeartbeat,
    SlaveHeartbeatAnswer,
    Transfer,
)
from dips.transport import control
from dips.transport.endpoints import master_peer
from dips.wire import messages
from dips.wire.generated import slave_pb2, status_pb2
from dips.wire.generated.cluster_pb2_grpc import ClusterServiceStub
from dips.wire.generated.slave_pb2_grpc import (
    OrderServiceServicer,
    SlaveServiceStub,
    add_OrderServiceServicer_to_server,
)
from dips.wire.generated.status_pb2_grpc import StatusServiceStub
from tests.integration.cluster_harness import free_port
from tests.push_digest import digest_push

V1 = VersionId(1, 1)


def model() -> dict[str, Any]:
    return {f"layers.{i}.w": np.full((4, 4), 0.5 + i, np.float32) for i in range(4)}


def write_run(tmp_path: Path, **shared: Any) -> Path:
    """Write a run file for a master on a free port and two slaves."""
    slaves = [
        {"name": f"s{i}", "master": "127.0.0.1:1", "directory": f"s{i}", "initial_model": "m/initial"} for i in range(2)
    ]
    timing = {"window_s": 0.05}
    raw = {
        "shared": {"run": "toy", "heartbeat_s": 0.8, **shared},
        "master": {"listen": "127.0.0.1:0", "directory": "m", "http": "127.0.0.1:0", "timing": timing},
        "slaves": slaves,
        "tls": False,
    }
    path = tmp_path / "dips.yaml"
    path.write_text(yaml.safe_dump(raw))
    return path


def file_of(config: RunFile) -> Path:
    return config.master.directory.parent / "dips.yaml"


@asynccontextmanager
async def master(config: RunFile) -> AsyncIterator[str]:
    """A master in this process; yields its address and ends it by SIGTERM's own way."""
    ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(serve(config, file_of(config), structlog.get_logger(), ready.set_result))
    await asyncio.wait([ready, task], return_when=asyncio.FIRST_COMPLETED)
    if task.done():
        task.result()
    try:
        yield ready.result()
    finally:
        signal.raise_signal(signal.SIGTERM)
        assert await task == 0
        assert not {thread.name for thread in threading.enumerate()} & {"journal", "ledger_0"}, "all is closed"


class SlaveScript(OrderServiceServicer):
    """A slave that holds nothing: answers each order as a real one would, and remembers what it was told."""

    def __init__(self, name: str, layers: int = 2) -> None:
        self.name, self.layers = name, layers
        self.orders: list[Order] = []
        self.sinc = self.term = 0
        self.memory: VersionId | None = None
        self.address = ""
        self.raises: dict[type, DipsError] = {}
        self.told_more = asyncio.Event()
        self.hold: asyncio.Event | None = None  # no order of a kind of `holds` is answered before it is set
        self.holds: tuple[type, ...] = (object,)

    async def Execute(self, request: Any, context: Any) -> slave_pb2.Answer:
        order = messages.from_proto(request, Order)
        self.orders.append(order)
        self.told_more.set()
        if self.hold is not None and isinstance(order.body, self.holds):
            await self.hold.wait()
        if type(order.body) in self.raises:
            raise self.raises[type(order.body)]
        return messages.wrap_oneof(self.answer(order.body), slave_pb2.Answer)  # type: ignore[return-value]

    def answer(self, body: effects.OrderBody) -> events.Answer:
        match body:
            case effects.Measure():
                return events.Measured((0.25,) * self.layers, True, digest=digest_push(body.push))
            case effects.Fold():
                return events.Folded((1.0,) * self.layers)
            case effects.Apply():
                return events.Prepared(body.version)
            case effects.Persist():
                return events.Persisted(body.version, f"digest-{self.name}")
            case effects.Commit():
                self.memory = body.version
        return events.Done()

    def told(self) -> list[str]:
        return [type(order.body).__name__ for order in self.orders]

    async def has_heard(self, count: int) -> None:
        """Return when so many orders have come."""
        while len(self.orders) < count:
            self.told_more.clear()
            await asyncio.wait_for(self.told_more.wait(), 10)

    async def register(self, stub: Any) -> list[str]:
        """Register until Hold; return the orders heard on the way."""
        heard = []
        while True:
            complete = (self.memory,) if self.memory and self.memory.version else ()
            said = events.SlaveRegistered(
                0, self.name, f"nonce-{self.name}", "toy", self.address, ("127.0.0.1:9",), self.term,
                self.memory, None, complete, 2, "",
            )  # fmt: skip
            answer = messages.from_proto(await ask(stub.Register, said), effects.Registered)
            self.sinc, self.term = answer.sinc, answer.term
            heard.append(type(answer.order).__name__)
            if isinstance(answer.order, effects.Hold):
                return heard
            assert isinstance(answer.order, effects.LoadVersion)
            self.memory = answer.order.version

    async def heartbeat(self, stub: Any) -> SlaveHeartbeatAnswer:
        said = SlaveHeartbeat(self.name, self.sinc, self.term, self.memory, (), (), 1, 2, 3, 4, 0.0, 0.0)
        return messages.from_proto(await ask(stub.Heartbeat, said), SlaveHeartbeatAnswer)


@asynccontextmanager
async def listening(slave: SlaveScript) -> AsyncIterator[SlaveScript]:
    """Serve a scripted slave on a free port."""
    server = control.make_server(lambda method, error: pytest.fail(f"{method}: {error!r}"))
    add_OrderServiceServicer_to_server(slave, server)
    slave.address = f"127.0.0.1:{control.bind_server(server, slave.address or '127.0.0.1:0', 'slaves.listen')}"
    await server.start()
    try:
        yield slave
    finally:
        await server.stop(None)


CALLS_EACH = 20  # of a connection at once, in a burst


async def ask(method: Any, obj: object) -> Any:
    return await control.call_method(
        method, messages.to_proto(obj), deadline_s=15.0, peer="the master", unavailable=UnavailableMaster
    )


def _manifest_of(config: RunFile) -> str:
    with closing(Ledger.open(ledger_path(config), readonly=True, verified=False)) as ledger:
        return ledger.run_row().manifest


class ClusterScript:
    """A scripted cluster: speaks for an agent that has no ranks."""

    def __init__(self, config: RunFile, channel: Any, name: str = "a") -> None:
        self.config, self.channel, self.stub = config, channel, ClusterServiceStub(channel)
        self.address = ""
        self.name, self.inc = name, 0
        self.done = Counter[str]()  # tokens and inner steps, as heartbeats tell them

    async def join(self, nonce: str = "n1", manifest: str | None = None, digest: str | None = None) -> effects.Joined:
        """Join as an agent does: by the model's digest, and with the manifest itself if the master wants it."""
        text = _manifest_of(self.config) if manifest is None else manifest
        sha256 = hashlib.sha256(text.encode()).hexdigest()
        said = events.ClusterJoined(
            0, self.name, nonce, self.config.shared.run, sha256, digest or self.config.shared.digest, take_over=True
        )
        joined = messages.unwrap_oneof(await ask(self.stub.Join, said))
        if isinstance(joined, effects.ManifestWanted):
            offered = events.ManifestOffered(self.name, sha256, zlib.compress(text.encode()))
            joined = messages.unwrap_oneof(await ask(self.stub.CompareManifest, offered))
        assert isinstance(joined, effects.Joined), joined
        self.inc = joined.inc
        return joined

    async def join_and_pull(self) -> None:
        """Join, and hold the head (seq 1): what every cluster does before it trains."""
        await self.join()
        pull = PullId(self.name, self.inc, 1)
        granted = await self.ask("RequestPull", events.PullRequested(0, pull, 1))
        assert isinstance(granted, effects.Grant), granted
        await self.ask("FinishPull", events.PullFinished(0, pull, True))

    async def ask(self, method: str, said: object) -> Any:
        return messages.unwrap_oneof(await ask(getattr(self.stub, method), said))

    async def heartbeat(self, tokens: int, inner_steps: int) -> None:
        """Tell of work done, as far as a heartbeat can."""
        self.done.update(tokens=tokens, inner_steps=inner_steps)
        tokens, steps = min(self.done["tokens"], (1 << 53) - 1), self.done["inner_steps"]
        said = ClusterHeartbeat(
            self.name, self.inc, TrainerState.TRAINING, Activity.PUSH, 1, steps, 0, 0, 2.5, GENESIS, 0, 0, 0.0,
            tokens_consumed=tokens,
        )  # fmt: skip
        await ask(self.stub.Heartbeat, said)

    async def push(self, seq: int, slaves: list[SlaveScript], slave_stub: Any, tokens: int = 100) -> Any:
        """Push, commit, and return what the round said of it."""
        push = PushId(self.name, self.inc, seq)
        granted = await self.ask("RequestPush", events.PushRequested(0, push, GENESIS, 1))
        assert isinstance(granted, effects.Grant), granted
        for slave in slaves:
            await ask(slave_stub.Staged, events.PushStaged(slave.name, slave.sinc, push, 64))
        await self.heartbeat(tokens, 64)
        committed = await self.ask("FinishPush", events.PushFinished(0, push, tokens, 64, (), 2.5))
        assert committed == effects.Committed()
        return await self.ask("AwaitRound", events.RoundAwaited(0, push))


@asynccontextmanager
async def running_master(config: RunFile) -> AsyncIterator[tuple[ClusterScript, list[SlaveScript], Any]]:
    """A master with two registered slaves and a channel for a cluster."""
    async with AsyncExitStack() as stack:
        address = await stack.enter_async_context(master(config))
        channel = await stack.enter_async_context(control.open_channel(master_peer(address, None)))
        slaves = [await stack.enter_async_context(listening(SlaveScript(f"s{i}"))) for i in range(2)]
        stub = SlaveServiceStub(channel)
        for slave in slaves:
            assert await slave.register(stub) == ["LoadVersion", "Hold"]
        cluster = ClusterScript(config, channel)
        cluster.address = address
        yield cluster, slaves, stub


@pytest.fixture
def config(tmp_path: Path) -> RunFile:
    loaded = load_run(write_run(tmp_path))
    make_run(loaded, model())
    return loaded


# ---- the main story ------------------------------------------------------------------------------------------------


async def test_a_push_becomes_a_version(config: RunFile) -> None:
    """From Join to FinishPull through every order: the version has its row, and the cluster its Outcome and pull."""
    async with running_master(config) as (cluster, slaves, stub):
        joined = await cluster.join()
        assert (joined.inc, joined.head, joined.term) == (1, GENESIS, 1)
        await cluster.join_and_pull()
        outcome = await cluster.push(2, slaves, stub)
        assert (outcome.kind, outcome.version, outcome.progress.tokens) == ("accepted", V1, 100)
        assert [s.name for s in outcome.pull.slaves] == ["s0", "s1"] and outcome.pull.version == V1
        assert outcome.pull.slaves[0].lanes == ("127.0.0.1:9",)
        done = await cluster.ask("FinishPull", events.PullFinished(0, PullId("a", 1, 2), True))
        assert done == effects.Acknowledged()
        await asyncio.gather(*[slave.has_heard(9) for slave in slaves])
    for slave in slaves:
        assert slave.told()[:2] == ["OpenPull", "ClosePull"]
        assert slave.told()[2:] == ["OpenPush", "Measure", "Fold", "Apply", "Persist", "Commit", "ClosePull"]
        numbers = [order.number for order in slave.orders]
        assert numbers == sorted(numbers) and {order.term for order in slave.orders} == {1}
    ledger = Ledger.open(ledger_path(config))
    (row,) = ledger.read_history()
    ledger.close()
    assert (row.kind, row.version, row.tokens) == ("applied", V1, 100)
    assert [fold.push for fold in row.folds] == [PushId("a", 1, 2)]


async def test_a_new_master_remembers(config: RunFile) -> None:
    """After a restart the term is higher, the head stands, and the Outcome is told again from the ledger; the page has
    the rounds before it."""
    port = free_port()
    http = {"http": f"127.0.0.1:{port}"}
    config = config.model_copy(update={"master": config.master.model_copy(update=http)})
    async with running_master(config) as (cluster, slaves, stub):
        await cluster.join_and_pull()
        await cluster.push(2, slaves, stub)
    async with AsyncExitStack() as stack:
        address = await stack.enter_async_context(master(config))
        channel = await stack.enter_async_context(control.open_channel(master_peer(address, None)))
        stub = SlaveServiceStub(channel)
        for slave in slaves:
            assert (await slave.heartbeat(stub)).register
            await stack.enter_async_context(listening(slave))
            assert await slave.register(stub) == ["Hold"]
            assert (slave.term, slave.sinc) == (2, 1)
        again = ClusterScript(config, channel)
        again.inc = 1
        outcome = await again.ask("AwaitRound", events.RoundAwaited(0, PushId("a", 1, 2)))
        assert (outcome.kind, outcome.version) == ("accepted", V1)
        grant = await again.ask("RequestPull", events.PullRequested(0, PullId("a", 1, 3), 1))
        assert grant.version == V1
        page = await asyncio.to_thread(read_page, port)
    assert [point[0] for point in page["curves"]["run"]] == [100]


def read_page(port: int) -> Any:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/state", timeout=10) as answer:
        return json.load(answer)


async def test_status_shows_everybody_with_a_reason(config: RunFile) -> None:
    """The status is JSON with every cluster's and slave's state, its reason, and what its newest heartbeat told; with
    where the page is, and what the master runs for its operator."""
    section = OnVersionSection(every=2, command=("true",))
    config = config.model_copy(update={"master": config.master.model_copy(update={"on_version": section})})
    async with running_master(config) as (cluster, slaves, stub):
        await cluster.join()
        said = ClusterHeartbeat(
            "a", 1, TrainerState.TRAINING, Activity.INNER, 1, 12, 300, 0, float("nan"), GENESIS, 0, 0, 0.0
        )
        answer = messages.from_proto(await ask(cluster.stub.Heartbeat, said), ClusterHeartbeatAnswer)
        assert (answer.standing, answer.term, answer.lease_s) == ("live", 1, 4.0)
        assert not (await slaves[0].heartbeat(stub)).register
        status_stub = StatusServiceStub(cluster.channel)
        reply = await control.call_method(
            status_stub.Status,
            status_pb2.StatusRequest(),
            deadline_s=5.0,
            peer="the master",
            unavailable=UnavailableMaster,
        )
        status = json.loads(reply.json)
    assert (status["page"], status["on_version"]["every"]) == ("http://127.0.0.1:0/", 2)
    assert status["clusters"]["a"]["heartbeat"]["inner_steps"] == 12
    assert status["clusters"]["a"]["heartbeat"]["loss"] is None
    assert status["clusters"]["a"]["reason"] and status["slaves"]["s0"]["reason"]
    assert status["slaves"]["s0"]["heartbeat"]["pool_limit"] == 2 and status["slaves"]["s1"]["heartbeat"] is None


async def test_a_slave_that_refuses_breaks_the_round_not_the_run(config: RunFile) -> None:
    """An Apply that fails on one slave skips the round; the cluster hears it in the slave's words, and goes on."""
    async with running_master(config) as (cluster, slaves, stub):
        await cluster.join_and_pull()
        slaves[1].raises[effects.Apply] = DipsError("out of memory")
        outcome = await cluster.push(2, slaves, stub)
        assert outcome.kind == "skipped" and "s1" in outcome.reason and "out of memory" in outcome.reason
        slaves[1].raises.clear()
        assert (await cluster.push(3, slaves, stub)).version == VersionId(1, 2)


async def test_a_burst_of_calls_is_answered(config: RunFile) -> None:
    """Calls that come all at once, as after a stall, wait their turn; gRPC's own limit of 1,000 would cancel some."""
    async with running_master(config) as (cluster, _, _), AsyncExitStack() as stack:
        await cluster.join()
        said = ClusterHeartbeat("a", 1, TrainerState.TRAINING, Activity.INNER, 1, 12, 300, 0, 2.0, GENESIS, 0, 0, 0.0)
        peer = master_peer(cluster.address, None)
        channels = [await stack.enter_async_context(control.open_channel(peer)) for _ in range(1500 // CALLS_EACH)]
        stubs = [ClusterServiceStub(channel) for channel in channels] * CALLS_EACH
        answers = await asyncio.gather(*[ask(stub.Heartbeat, said) for stub in stubs])
    assert {answer.standing for answer in answers} == {"live"}


# ---- bad input -----------------------------------------------------------------------------------------------------


async def test_a_model_of_another_shape_is_told_where(config: RunFile) -> None:
    """A cluster whose manifest differs hears the first differences, by class and by name; others are not disturbed."""
    other = '{"format":1,"layers":[{"name":"layers.0","parameters":[["layers.0.w",[4,5]]]}]}'
    async with running_master(config) as (cluster, _, _):
        with pytest.raises(DifferentModel, match=r"layers\.0\.w: expected shape \(4, 4\), got \(4, 5\)"):
            await cluster.join(manifest=other)
        with pytest.raises(ConfigError, match="digest"):
            await cluster.join(digest="0" * 64)
        assert (await cluster.join()).inc == 1


async def test_an_older_incarnation_is_fenced(config: RunFile) -> None:
    """A retried Join gets its own incarnation again; another process gets the next one, and the old one is stale."""
    async with running_master(config) as (cluster, _, _):
        assert [(await cluster.join("n1")).inc for _ in range(2)] == [1, 1]
        assert (await cluster.join("n2")).inc == 2
        with pytest.raises(StaleIncarnation, match="a/1 is fenced"):
            await cluster.ask("RequestPull", events.PullRequested(0, PullId("a", 1, 1), 1))


async def test_a_hostile_name_changes_nothing(config: RunFile) -> None:
    """A name that could be a path is refused at the door."""
    async with running_master(config) as (cluster, _, _):
        cluster.name = "../../etc/passwd"
        with pytest.raises(DipsError, match="cluster name"):
            await cluster.join()


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("value", [NAN, INF, -INF, 1e300, -1.0])
@pytest.mark.parametrize("field", ["step_s", "bytes_per_s"])
async def test_a_number_that_is_none_costs_its_sender(config: RunFile, field: str, value: float) -> None:
    """A heartbeat with NaN, infinity or the like is refused by name, to a cluster and to a slave; the master serves
    on.
    """
    said = ClusterHeartbeat(
        "a", 1, TrainerState.TRAINING, Activity.INNER, 1, 12, 300, 0, 2.0, GENESIS, 0, 0, 0.0, aligned_steps=64
    )
    transfer = Transfer("a", 1, 1, True, 1, 2, value)
    async with running_master(config) as (cluster, slaves, stub):
        await cluster.join()
        with pytest.raises(RemoteProtocolError, match=field):
            await ask(cluster.stub.Heartbeat, replace(said, **{field: value}))
        with pytest.raises(RemoteProtocolError, match="bytes_per_s"):
            await ask(stub.Heartbeat, SlaveHeartbeat("s0", 1, 1, GENESIS, (), (transfer,), 1, 2, 3, 4, 0.0, 0.0))
        for good in (replace(said, step_s=5e-324, bytes_per_s=5e-324), replace(said, step_s=2.0**53), said):
            answer = messages.from_proto(await ask(cluster.stub.Heartbeat, good), ClusterHeartbeatAnswer)
            assert answer.standing == "live"
        assert not (await slaves[0].heartbeat(stub)).register


@pytest.mark.parametrize("what", ["[" * 60_000, '"shape":' * 10, "[Infinity]", "[NaN]", "[true]", "[-1]", "[1e400]"])
async def test_a_manifest_that_is_none_costs_its_sender(config: RunFile, what: str) -> None:
    """JSON nested without end, and dimensions that are none: CorruptManifest for the asker, and the next one joins."""
    text = what if what[1:2] == "[" else f'{{"format":1,"layers":[{{"name":"l","parameters":[["l.w",{what}]]}}]}}'
    async with running_master(config) as (cluster, _, _):
        with pytest.raises(CorruptManifest):
            await cluster.join(manifest=text)
        assert (await cluster.join()).inc == 1


async def test_more_tokens_than_can_be_counted(config: RunFile) -> None:
    """Two pushes of 2⁶³ − 1 tokens, and of all that a run can count: each refused, and the next one's are read."""
    many = 10**12
    async with running_master(config) as (cluster, slaves, stub):
        await cluster.join_and_pull()
        for seq, tokens in ((2, (1 << 63) - 1), (3, (1 << 63) - 1), (4, (1 << 53) - 1)):
            with pytest.raises(RemoteProtocolError, match="tokens"):
                await cluster.push(seq, slaves, stub, tokens=tokens)
            await cluster.ask("AbortPush", events.PushAborted(0, PushId("a", 1, seq), "its tokens were refused"))
        outcome = await cluster.push(5, slaves, stub, tokens=many)
        assert (outcome.kind, outcome.progress.tokens) == ("accepted", many)
    async with master(config) as address, control.open_channel(master_peer(address, None)) as channel:
        assert (await slaves[0].heartbeat(SlaveServiceStub(channel))).register
    ledger = Ledger.open(ledger_path(config), readonly=True)
    assert ledger.read_tokens()["a"]["accepted"] == many
    ledger.close()


async def test_a_master_that_has_a_successor_ends(config: RunFile) -> None:
    """A slave that has seen a later term ends this master with 75."""
    ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(serve(config, file_of(config), structlog.get_logger(), ready.set_result))
    slave = SlaveScript("s0")
    slave.term, slave.address = 9, "127.0.0.1:9"
    async with control.open_channel(master_peer(await ready, None)) as channel:
        with pytest.raises(StaleTerm, match=r"has seen term 9.*dips-master recover"):
            await slave.register(SlaveServiceStub(channel))
    assert await task == 75


async def test_ledger_and_run_file_must_agree(tmp_path: Path, config: RunFile) -> None:
    """Another run, other shared options, other slaves: each refused by name."""
    with pytest.raises(ConfigError, match=r"run 'toy', the run file's shared\.run is 'other'"):
        await serve(load_run(path := write_run(tmp_path, run="other")), path, structlog.get_logger())
    with pytest.raises(ConfigError, match=r"shared\.codec: the run has 'fp32', this file 'bf16': put the options back"):
        await serve(load_run(write_run(tmp_path, codec="bf16")), path, structlog.get_logger())
    fewer = config.model_copy(update={"slaves": config.slaves[:1]})
    with pytest.raises(ConfigError, match="places layers on s0, s1, the run file's slaves are s0"):
        await serve(fewer, path, structlog.get_logger())


async def test_a_port_in_use_and_a_second_master(config: RunFile, tmp_path: Path) -> None:
    """A second master on the ledger, or on the port, says so and leaves the first alone."""
    async with master(config) as address:
        with pytest.raises(ConfigError, match="in use by another master"):
            await serve(config, file_of(config), structlog.get_logger())
        elsewhere = config.master.model_copy(update={"listen": address, "directory": tmp_path / "other"})
        other = config.model_copy(update={"master": elsewhere})
        make_run(other, model())
        with pytest.raises(ConfigError, match=f"master.listen: cannot listen on {address}"):
            await serve(other, file_of(config), structlog.get_logger())


# ---- the way to a slave --------------------------------------------------------------------------------------------


def order(number: int, deadline_s: float = 5.0, body: effects.OrderBody | None = None) -> Order:
    return Order("s0", 1, 1, number, body or effects.Ping(), deadline_s)


async def test_orders_arrive_in_the_order_of_their_giving_and_wait_for_no_answer() -> None:
    """A hundred orders given at once, before the link is up: all have come, in their order, when the first is answered.

    In a process that has used gRPC calls of their own may pass this, too; the test below has a new one.
    """
    async with listening(SlaveScript("s0")) as slave:
        slave.hold = asyncio.Event()
        link = SlaveLink("s0", slave.address)
        waiting = asyncio.gather(*[link.execute_order(order(n)) for n in range(100)])
        await slave.has_heard(100)
        slave.hold.set()
        answers = await waiting
        await link.close()
    assert [o.number for o in slave.orders] == list(range(100))
    assert all(isinstance(a, events.OrderAnswered) for a in answers)


def test_orders_of_a_new_process_arrive_in_their_order() -> None:
    """The first hundred orders of a master, as above."""
    test = test_orders_arrive_in_the_order_of_their_giving_and_wait_for_no_answer.__name__
    call = f"import asyncio, {__name__} as tests; asyncio.run(tests.{test}())"
    subprocess.run([sys.executable, "-c", call], check=True, timeout=60)


async def test_a_snapshot_holds_up_no_other_order() -> None:
    """While Persist is not answered, what can be answered at once is, within 0.5 s; Persist is, later."""
    async with listening(SlaveScript("s0")) as slave:
        slave.hold, slave.holds = asyncio.Event(), (effects.Persist,)
        link = SlaveLink("s0", slave.address)
        persist = asyncio.create_task(link.execute_order(order(1, body=effects.Persist(V1), deadline_s=60.0)))
        await slave.has_heard(1)
        begun = asyncio.get_running_loop().time()
        ping = await link.execute_order(order(2))
        assert isinstance(ping, events.OrderAnswered) and asyncio.get_running_loop().time() - begun < 0.5
        assert not persist.done()
        slave.hold.set()
        assert isinstance(await persist, events.OrderAnswered)
        await link.close()


async def test_what_a_broken_stream_left_without_answer_comes_again_in_its_order() -> None:
    """The slave's process dies with ten orders under way; the next one at its address hears them, then a new one."""
    link: SlaveLink | None = None
    async with listening(SlaveScript("s0")) as first:
        first.hold = asyncio.Event()
        link = SlaveLink("s0", first.address)
        waiting = asyncio.gather(*[link.execute_order(order(n, deadline_s=30.0)) for n in range(10)])
        await first.has_heard(10)
    second = SlaveScript("s0")
    second.address = first.address
    waiting = asyncio.gather(waiting, link.execute_order(order(10, deadline_s=30.0)))
    async with listening(second):
        await waiting
        await link.close()
    assert [o.number for o in second.orders] == list(range(11))


async def test_a_slave_at_a_new_address_gets_its_orders_there() -> None:
    """It registers anew from elsewhere: the link to where it was is closed. At the end both are."""
    async with listening(SlaveScript("s0")) as before, listening(SlaveScript("s0")) as after:
        links = SlaveLinks()
        for number, slave in enumerate((before, before, after, after)):
            links.learn_address("s0", slave.address)
            assert isinstance(await links.execute_order(order(number)), events.OrderAnswered)
        await links.close()
        assert not any(task.get_name().startswith("calls to ") for task in asyncio.all_tasks())
    assert [[o.number for o in slave.orders] for slave in (before, after)] == [[0, 1], [2, 3]]


async def test_a_refusal_and_a_stale_term_are_told_apart() -> None:
    """What a slave raises comes back as a failure of its kind, with the slave's words."""
    async with listening(SlaveScript("s0")) as slave:
        slave.raises = {effects.Ping: StaleTerm("seen 5"), effects.Retire: StaleIncarnation("sinc 2")}
        link = SlaveLink("s0", slave.address)
        stale = await link.execute_order(order(1))
        refused = await link.execute_order(order(2, body=effects.Retire(())))
        await link.close()
    assert isinstance(stale, events.OrderFailed) and (stale.error, stale.reason) == (StaleTerm, "seen 5")
    assert isinstance(refused, events.OrderFailed) and (refused.error, refused.reason) == (StaleIncarnation, "sinc 2")


async def test_an_order_to_a_slave_that_works_has_its_whole_time_again() -> None:
    """Its deadline passes twice while the slave's heartbeats tell of work; when nothing is told it is over. So is one
    that does not wait for the disk, where they tell of a wait."""
    async with listening(SlaveScript("s0")) as slave:
        slave.hold = asyncio.Event()
        links = SlaveLinks()
        links.learn_address("s0", slave.address)
        waiting, other = (asyncio.create_task(links.execute_order(order(n, deadline_s=0.6))) for n in (1, 2))
        for of in ("s0", "s0", "nobody", "s0", "s0", "s0"):
            await asyncio.sleep(0.2)
            links.on_progress(SlaveProgress(of, frozenset({1})))
        assert not waiting.done() and other.done()
        links.on_progress(SlaveProgress("s0"))
        failed = await waiting
        slave.hold.set()
        await links.close()
    for ended in (failed, await other):
        assert isinstance(ended, events.OrderFailed) and ended.error is UnresponsiveSlave


async def test_an_order_to_a_slave_that_never_registered_fails() -> None:
    failed = await SlaveLinks().execute_order(order(1))
    assert isinstance(failed, events.OrderFailed) and "s0 has no address yet" in failed.reason


async def test_a_broken_disk_is_said_at_once() -> None:
    """A slave that is there and cannot write is no link to be tried again: the master hears it by one call."""
    async with listening(SlaveScript("s0")) as slave:
        slave.raises = {effects.Persist: FailedDisk("s0 cannot write: no space left")}
        link = SlaveLink("s0", slave.address)
        failed = await link.execute_order(order(1, body=effects.Persist(VersionId(1, 1))))
        await link.close()
    assert isinstance(failed, events.OrderFailed) and failed.error is FailedDisk
    assert failed.reason == "s0 cannot write: no space left"
    assert len(slave.orders) == 1


async def test_nobody_there_is_unresponsive_at_the_deadline() -> None:
    """An order to a closed port is given up as unresponsive when its deadline passes, not before and not for ever."""
    slave = SlaveScript("s0")
    async with listening(slave):
        pass
    link = SlaveLink("s0", slave.address)
    began = asyncio.get_running_loop().time()
    failed = await link.execute_order(order(1, deadline_s=0.5))
    took = asyncio.get_running_loop().time() - began
    await link.close()
    assert isinstance(failed, events.OrderFailed) and failed.error is UnresponsiveSlave
    assert 0.5 <= took < 3.0


async def test_a_slot_at_a_slave_that_nobody_listens_for_is_refused_at_once() -> None:
    """A trainer stands still for it; the next incarnation of the slave, at the same address, is found within
    seconds.
    """
    slave, open_push = SlaveScript("s0"), effects.OpenPush(PushId("a", 1, 1), 1, 5.0)
    async with listening(slave):
        link = SlaveLink("s0", slave.address)
        opened = await link.execute_order(order(1, body=open_push))
    began = asyncio.get_running_loop().time()
    failed = await link.execute_order(order(2, deadline_s=20.0, body=open_push))
    took = asyncio.get_running_loop().time() - began
    assert isinstance(opened, events.OrderAnswered)
    assert isinstance(failed, events.OrderFailed) and failed.error is UnavailableSlave
    assert "nobody listens" in failed.reason and took < 2.0
    async with listening(slave):
        async with asyncio.timeout(10.0):
            while not isinstance(await link.execute_order(order(3, body=open_push)), events.OrderAnswered):
                await asyncio.sleep(0.1)
    await link.close()


async def test_a_link_that_comes_back_carries_the_order() -> None:
    """An order given while the slave's server is away is carried out when it is back, within its deadline."""
    slave = SlaveScript("s0")
    async with listening(slave):
        pass
    link = SlaveLink("s0", slave.address)
    giving = asyncio.create_task(link.execute_order(order(1, deadline_s=20.0)))
    done, _ = await asyncio.wait([giving], timeout=0.3)
    assert not done
    async with listening(slave):
        assert isinstance(await giving, events.OrderAnswered)
    await link.close()


# ---- the process ---------------------------------------------------------------------------------------------------


def test_the_process_serves_and_ends_by_sigterm(tmp_path: Path, config: RunFile) -> None:
    """`dips-master` logs its addresses, is healthy, answers Prometheus, and ends with 0 by SIGTERM."""
    process = start(tmp_path)
    try:
        assert process.stderr is not None
        scraped = next(json.loads(line)["address"] for line in process.stderr if '"http"' in line)
        address = next(json.loads(line)["address"] for line in process.stderr if '"serving"' in line)
        assert asyncio.run(health(address)) == health_pb2.HealthCheckResponse.SERVING
        with urllib.request.urlopen(f"http://{scraped}/metrics", timeout=10) as answer:
            assert b'dips_head_version{run="toy"} 0.0' in answer.read()
        process.terminate()
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.communicate()


async def health(address: str) -> int:
    async with control.open_channel(master_peer(address, None)) as channel:
        reply = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=10)
        return int(reply.status)


def test_the_process_without_a_ledger_waits(tmp_path: Path, config: RunFile) -> None:
    """Before `dips init` or `dips seed` the master answers that it waits, and goes on when a ledger is there."""
    ledger_path(config).unlink()
    process = start(tmp_path)
    try:
        assert process.stderr is not None
        said = next(json.loads(line) for line in process.stderr if '"no_ledger"' in line)
        assert "dips seed" in said["waits"] and "do not seed it" in said["remedy"]
        assert asyncio.run(health(said["address"])) == health_pb2.HealthCheckResponse.SERVING
        make_run(config, model())
        address = next(json.loads(line)["address"] for line in process.stderr if '"serving"' in line)
        assert asyncio.run(health(address)) == health_pb2.HealthCheckResponse.SERVING
        process.terminate()
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.communicate()


def start(tmp_path: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "dips.master.app", "--config", str(tmp_path / "dips.yaml")]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
