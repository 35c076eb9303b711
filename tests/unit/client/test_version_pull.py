"""Pulling versions without a cluster, from a scripted master on a real port, and slaves that are a function."""

from __future__ import annotations

import asyncio
import atexit
import json
import threading
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
import numpy as np
import pytest
import torch
from grpc import aio

import dips
from dips.client import version_pull
from dips.client.rank.transfer import TransferStats
from dips.client.version_pull import VersionPuller, follow_versions, list_pieces, pull_version, pulling_name
from dips.errors import ConfigError, Denied, StaleIncarnation, UnavailableMaster, UnavailableSlave
from dips.ids import VersionId
from dips.protocol.effects import Acknowledged, Finished, Grant, Joined, Pending, Progress, Refused, SlaveAddress
from dips.protocol.enums import ClusterStanding
from dips.protocol.heartbeats import ClusterHeartbeatAnswer
from dips.protocol.manifest import Manifest
from dips.transport import control
from dips.transport.endpoints import Endpoint, master_peer
from dips.wire.generated import cluster_pb2, status_pb2
from dips.wire.generated.cluster_pb2_grpc import ClusterServiceServicer, add_ClusterServiceServicer_to_server
from dips.wire.generated.status_pb2_grpc import StatusServiceServicer, add_StatusServiceServicer_to_server
from dips.wire.messages import to_proto, wrap_oneof
from tests.waiting import eventually

V1, V2, V3, V4 = (VersionId(number, number) for number in (1, 2, 3, 4))
MANIFEST = Manifest.from_shapes([("a.w", (2, 3)), ("b.w", (4,)), ("c.w", (5,))])


class MasterOfPullers(ClusterServiceServicer, StatusServiceServicer):
    """Answers each kind of question in the order of a script, its last one again and again; and every heartbeat."""

    def __init__(self) -> None:
        self.standing, self.head, self.finished, self.lease_s = ClusterStanding.LIVE, V1, None, 1e6
        self.asked, self.beats, self.channels = list[tuple[str, Any]](), list[float](), list[aio.Channel]()
        self.script: dict[str, list[Any]] = {
            "Join": [Joined(1, 7, V1, Progress(0, 0, None), ())],
            "RequestPull": [Grant(V1, (), 60.0)],
        }
        self.busy = list[str]()  # methods whose next call is one too many, as gRPC itself answers
        self.denies = 0  # heartbeats that it refuses next
        self.manifest = MANIFEST
        self.peer: Endpoint

    async def Describe(self, request: Any, context: Any) -> Any:
        described = {"run": "r", "manifest": self.manifest.to_json(), "shared": {}, "config_digest": "d"}
        return status_pb2.DescribeReply(json=json.dumps(described))

    async def Heartbeat(self, request: Any, context: Any) -> Any:
        await self._refuse_busy("Heartbeat", context)
        if self.denies:
            self.denies -= 1
            why = "the cluster c.puller is not in the run file"
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, why, (("dips-error", "Denied"),))
        self.beats.append(asyncio.get_running_loop().time())
        progress = Progress(0, 0, self.finished)
        return to_proto(ClusterHeartbeatAnswer(1, self.lease_s, self.standing, None, None, progress, head=self.head))

    async def Join(self, request: Any, context: Any) -> Any:
        return self._answer("Join", request, cluster_pb2.JoinReply)

    async def RequestPull(self, request: Any, context: Any) -> Any:
        await self._refuse_busy("RequestPull", context)
        return self._answer("RequestPull", request, cluster_pb2.RequestPullReply)

    async def FinishPull(self, request: Any, context: Any) -> Any:
        self.asked.append(("FinishPull", request))
        return wrap_oneof(Acknowledged(), cluster_pb2.FinishPullReply)

    async def Leave(self, request: Any, context: Any) -> Any:
        await self._refuse_busy("Leave", context)
        self.asked.append(("Leave", request))
        return wrap_oneof(Acknowledged(), cluster_pb2.LeaveReply)

    async def _refuse_busy(self, method: str, context: Any) -> None:
        if method in self.busy:
            self.busy.remove(method)
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "Concurrent RPC limit exceeded!")

    def of(self, method: str) -> list[Any]:
        return [request for name, request in self.asked if name == method]

    def _answer(self, method: str, request: Any, reply: Any) -> Any:
        self.asked.append((method, request))
        answers = self.script[method]
        return wrap_oneof(answers.pop(0) if len(answers) > 1 else answers[0], reply)


@pytest.fixture
async def master(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[MasterOfPullers]:
    """A master; at the end no channel to it is left."""
    scripted, open_really = MasterOfPullers(), control.open_channel
    server = aio.server()
    add_ClusterServiceServicer_to_server(scripted, server)
    add_StatusServiceServicer_to_server(scripted, server)
    scripted.peer = master_peer(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}", None)
    await server.start()

    def open_channel(peer: Endpoint) -> aio.Channel:
        scripted.channels.append(open_really(peer))
        return scripted.channels[-1]

    monkeypatch.setattr(control, "open_channel", open_channel)
    monkeypatch.setattr(version_pull, "HEARTBEAT_S", 0.02)
    monkeypatch.setattr(version_pull, "RETRY_S", 0.02)
    monkeypatch.setattr(version_pull, "AGAIN_S", 0.05)
    yield scripted
    states = [channel.get_state() for channel in scripted.channels]
    assert set(states) == {grpc.ChannelConnectivity.SHUTDOWN}
    await server.stop(0)


class Slaves:
    """Fill every piece with the version's number; or fail, or move nothing until they are cancelled."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.failures = list[Exception | None]()  # of the next pulls; then they succeed
        self.moved = list[tuple[VersionId, Any, int]]()  # version, held, elements
        self.began_at = list[float]()  # seconds of the monotonic clock
        self.hangs, self.began, self.ended = False, threading.Event(), False
        monkeypatch.setattr(version_pull, "pull_pieces", self.pull)

    def pull(self, grant: Grant, base: Any, pieces: Any, *, cancel: threading.Event, held: Any, **_: Any) -> Any:
        self.began_at.append(time.monotonic())
        self.began.set()
        if self.hangs:
            assert cancel.wait(20)
            threading.Event().wait(0.05)  # a transfer takes a while to end
            self.ended = True
            raise UnavailableSlave("cancelled")
        if self.failures and (failure := self.failures.pop(0)):
            raise failure
        for piece in pieces:
            piece.array[:] = float(grant.version.version)
        self.moved.append((grant.version, held, sum(piece.array.size for piece in pieces)))
        return TransferStats(0, 0.0, 1)


@pytest.fixture
def slaves(monkeypatch: pytest.MonkeyPatch) -> Slaves:
    return Slaves(monkeypatch)


def make_room(run: str, version: VersionId, manifest: Manifest) -> Any:
    return np.zeros(sum(layer.numel for layer in manifest.layers), np.float32)


async def test_one_version_is_pulled_and_the_puller_leaves(master: MasterOfPullers, slaves: Slaves) -> None:
    """It waits for the lease of a process that had its name, and for the slaves; the master hears that it has it."""
    master.script["Join"].insert(0, Pending("c.puller lives"))
    master.script["RequestPull"][:0] = [Pending("pinning"), Refused(0.03, "no slot")]
    assert pulling_name(master.peer, "c") == "c.puller"
    room = make_room("r", V1, MANIFEST)
    pulled = await pull_version(master.peer, "c.puller", lambda *_: room, V1)
    assert pulled.version == V1 and bool((room == 1.0).all()) and slaves.moved == [(V1, None, 15)]
    assert [name for name, _ in master.asked] == [
        "Join", "Join", "RequestPull", "RequestPull", "RequestPull", "FinishPull", "Leave",
    ]  # fmt: skip
    assert len({request.pull.seq for request in master.of("RequestPull")}) == 1, "it is one pull"
    assert [request.installed for request in master.of("FinishPull")] == [True]


async def test_a_name_that_is_held_is_not_waited_for_for_ever(
    master: MasterOfPullers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor asked for as fast as the master answers; a run that has ended is not asked again."""
    monkeypatch.setattr(version_pull, "JOIN_S", 0.2)
    monkeypatch.setattr(version_pull, "HEARTBEAT_S", 0.05)
    master.script["Join"] = [Refused(0.02, "c.puller lives")]
    with pytest.raises(Denied, match=r"expected Joined, the master answered Refused: c\.puller lives"):
        await VersionPuller(master.peer, "c.puller").__aenter__()
    assert len(master.of("Join")) <= 6
    master.asked.clear()
    master.script["Join"] = [Finished(V2), Joined(1, 7, V1, Progress(0, 0, None), ())]
    with pytest.raises(UnavailableMaster, match="the run is finished at v2@r2"):
        await VersionPuller(master.peer, "c.puller").__aenter__()
    assert len(master.of("Join")) == 1


async def test_the_lease_of_a_process_that_was_killed_is_waited_for(
    master: MasterOfPullers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long a heartbeat is: with those of 10 s, for thousands of clusters, a follower that was started again
    would have been denied its own name."""
    monkeypatch.setattr(version_pull, "JOIN_S", 0.01)
    joined = Joined(1, 7, V1, Progress(0, 0, None), ())
    master.script["Join"] = [
        Refused(10.0, "it lives"),
        Refused(10.0, "it lives"),
        *[Pending("it is silent")] * 3,
        joined,
    ]
    async with VersionPuller(master.peer, "c.puller"):
        assert len(master.of("Join")) == 6


async def test_a_pull_that_is_not_granted_says_why(
    master: MasterOfPullers, slaves: Slaves, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After its time, in which the master was asked now and then."""
    monkeypatch.setattr(version_pull, "GRANT_S", 0.2)
    monkeypatch.setattr(version_pull, "RETRY_S", 0.05)
    master.script["RequestPull"] = [Pending("ps1 is not there")]
    async with VersionPuller(master.peer, "c.puller") as puller:
        with pytest.raises(UnavailableMaster, match=r"within 0\.2 s: ps1 is not there"):
            await puller.pull(make_room)
    assert len(master.of("RequestPull")) <= 6 and not slaves.moved


async def test_a_pull_that_fails_or_is_cancelled_has_ended(master: MasterOfPullers, slaves: Slaves) -> None:
    """Nothing is written into the array any more, and the master hears that it is over."""
    async with VersionPuller(master.peer, "c.puller") as puller:
        slaves.failures.append(UnavailableSlave("ps1 is gone"))
        with pytest.raises(UnavailableSlave, match="ps1 is gone"):
            await puller.pull(make_room)
        slaves.hangs = True
        slaves.began.clear()
        pulling = asyncio.create_task(puller.pull(make_room))
        await eventually(slaves.began.is_set)
        pulling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await pulling
        assert slaves.ended
        assert [request.installed for request in master.of("FinishPull")] == [False, False]
        slaves.hangs = False
        await puller.pull(make_room)
    assert len(slaves.moved) == 1, "what was cancelled does not cancel the next"


async def test_a_lost_lease_ends_everything(master: MasterOfPullers, slaves: Slaves) -> None:
    """A transfer, the next one before it is asked for, and who waits for news."""
    async with VersionPuller(master.peer, "c.puller") as puller:
        slaves.hangs = True
        pulling = asyncio.create_task(puller.pull(make_room))
        waiting = asyncio.create_task(puller.wait_for_news(V1))
        await eventually(slaves.began.is_set)
        master.standing = ClusterStanding.FENCED
        async with asyncio.timeout(20):
            for task in (pulling, waiting):
                with pytest.raises(StaleIncarnation, match=r"c\.puller/7 is fenced: another one joined by this name"):
                    await task
        assert slaves.ended and puller.is_over
        master.asked.clear()
        with pytest.raises(StaleIncarnation):
            await puller.pull(make_room)
        assert not master.of("RequestPull")


async def test_heartbeats_keep_the_lease_and_bring_the_head(
    master: MasterOfPullers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five for each lease, and never more often; an answer without a head changes none."""
    monkeypatch.setattr(version_pull, "HEARTBEAT_S", 60.0)
    master.lease_s, master.head = 0.25, None
    async with VersionPuller(master.peer, "c.puller") as puller:
        await eventually(lambda: len(master.beats) == 3)
        assert puller.head == V1
        assert master.beats[2] - master.beats[0] >= 0.09
        waiting = asyncio.create_task(puller.wait_for_news(V1))
        seen = len(master.beats)
        await eventually(lambda: len(master.beats) > seen + 1)
        assert not waiting.done()
        master.head = V2
        async with asyncio.timeout(20):
            assert await waiting is True and puller.head == V2
            assert await puller.wait_for_news(V1) is True
            master.finished = V2
            assert await puller.wait_for_news(V2) is False
            assert await puller.wait_for_news(V1) is True, "the last one is pulled, too"


async def test_layers_come_with_their_momentum_and_the_slaves_digests(master: MasterOfPullers, slaves: Slaves) -> None:
    """Two pulls of the same layers: of m, then of θ; digests of other layers are left out."""
    lanes = ("tcp://127.0.0.1:1",)
    slave = SlaveAddress("ps0", 1, lanes, (0, 1), digests=("t0", "m0", "t1", "m1"))
    master.script["RequestPull"] = [Grant(V2, (slave, SlaveAddress("ps1", 1, lanes, (2,), digests=("t2", "m2"))), 60.0)]
    layers = {1: (np.zeros(4, np.float32), np.zeros(4, np.float32)), 2: (np.zeros(5, np.float32),) * 2}
    async with VersionPuller(master.peer, "c.puller") as puller:
        digests = await puller.pull_layers(V2, layers)
    assert digests == {1: ("t1", "m1"), 2: ("t2", "m2")}
    assert [request.momentum for request in master.of("RequestPull")] == [True, False]
    assert all(bool((array == 2.0).all()) for arrays in layers.values() for array in arrays)
    assert [size for *_, size in slaves.moved] == [9, 9]


def test_pieces_lie_one_after_the_other() -> None:
    """In the manifest's order, or of the layers that are asked for."""
    room = np.arange(15, dtype=np.float32)
    assert [(p.layer, p.array.tolist()) for p in list_pieces(MANIFEST, room, [1, 2])] == [
        (1, [0.0, 1.0, 2.0, 3.0]), (2, [4.0, 5.0, 6.0, 7.0, 8.0]),
    ]  # fmt: skip
    assert [p.array[0] for p in list_pieces(MANIFEST, room)] == [0.0, 6.0, 10.0]


async def test_a_follower_goes_on_when_slaves_or_its_lease_were_lost(master: MasterOfPullers, slaves: Slaves) -> None:
    """Warned, after a pause, with an update where its array is whole."""
    taken, warned, left_at = list[VersionId](), list[str](), list[float]()

    async def take(version: VersionId) -> None:
        taken.append(version)
        if taken == [V1]:  # the next pull fails, the one after it brings what it has, then comes the new one
            master.head, master.script["RequestPull"] = (
                V2,
                [Grant(V1, (), 60.0), Grant(V1, (), 60.0), Grant(V2, (), 60.0)],
            )
            slaves.failures = [UnavailableSlave("ps1 is gone")]
        elif version == V2:
            master.standing = ClusterStanding.FENCED

    def warn(text: str) -> None:
        warned.append(text)
        if "fenced" in text:
            left_at.append(time.monotonic())
            master.standing, master.finished = ClusterStanding.LIVE, V2
            master.script["Join"] = [Joined(1, 8, V2, Progress(0, 0, V2), ())]

    async with asyncio.timeout(20):
        assert await follow_versions(master.peer, "c.puller", make_room, take, warn) == V2
    assert slaves.began_at[2] - slaves.began_at[1] >= 0.05
    assert not [beat for beat in master.beats if left_at[0] < beat < left_at[0] + 0.05]
    assert taken == [V1, V1, V2] and [held for _, held, _ in slaves.moved] == [None, None, V1]
    assert [text.partition(":")[0] for text in warned] == ["ps1 is gone; tried again in 0.05 s", "c.puller/7 is fenced"]
    assert len(master.of("Join")) == 2


async def test_a_follower_outlives_a_master_that_is_busy(master: MasterOfPullers, slaves: Slaves) -> None:
    """Too many call it at once, as after its restart: a heartbeat, a pull and a goodbye are each refused."""
    taken, warned = list[VersionId](), list[str]()

    async def take(version: VersionId) -> None:
        taken.append(version)
        if version == V1:
            master.busy = ["Heartbeat", "RequestPull"]
            await eventually(lambda: "Heartbeat" not in master.busy)
            master.head, master.script["RequestPull"] = V2, [Grant(V2, (), 60.0)]
        else:
            master.busy, master.finished = ["Leave"], V2

    async with asyncio.timeout(20):
        assert await follow_versions(master.peer, "c.puller", make_room, take, warned.append) == V2
    assert taken == [V1, V2] and master.busy == [] and len(master.of("Join")) == 1
    assert len(warned) == 1 and "Concurrent RPC limit exceeded!; tried again in 0.05 s" in warned[0]


@pytest.mark.parametrize("denies", [1, 2])
async def test_a_follower_outlives_a_refusal_that_heals(master: MasterOfPullers, slaves: Slaves, denies: int) -> None:
    """A wrong run file that was saved for a second ended all inference servers for good."""
    warned = list[str]()

    async def take(version: VersionId) -> None:
        if version == V1:
            master.denies = denies
            if denies == 1:
                master.head, master.finished, master.script["RequestPull"] = V2, V2, [Grant(V2, (), 60.0)]
            await eventually(lambda: master.denies < denies)

    follows = follow_versions(master.peer, "c.puller", make_room, take, warned.append)
    async with asyncio.timeout(20):
        if denies == 1:
            assert await follows == V2
        else:
            with pytest.raises(Denied, match="not in the run file"):
                await follows
    assert len(warned) == 1 and "not in the run file" in warned[0]


async def test_a_follower_whose_name_another_has_ends(
    master: MasterOfPullers, slaves: Slaves, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long it waits for its name: with heartbeats above 12 s it was denied it and tried again for ever."""
    monkeypatch.setattr(version_pull, "JOIN_S", 0.2)
    monkeypatch.setattr(version_pull, "HEARTBEAT_S", 0.05)
    monkeypatch.setattr(version_pull, "HEALED_S", 0.1)
    warned = list[str]()

    async def take(_: VersionId) -> None:
        master.standing, master.script["Join"] = ClusterStanding.FENCED, [Refused(0.01, "another one has it")]

    async with asyncio.timeout(20):
        with pytest.raises(Denied, match="another one has it"):
            await follow_versions(master.peer, "c.puller", make_room, take, warned.append)
    assert ["another one has it" in text for text in warned] == [False, True]


async def test_a_run_that_is_made_anew_with_another_model_is_not_followed(
    master: MasterOfPullers, slaves: Slaves
) -> None:
    """Its parameters came into an array that has the places of the former one's, under their names."""

    async def take(_: VersionId) -> None:
        master.manifest = Manifest.from_shapes([("a.w", (4,)), ("b.w", (2, 3)), ("c.w", (5,))])
        master.standing = ClusterStanding.GONE

    async with asyncio.timeout(20):
        with pytest.raises(ConfigError, match="now serves another run or model"):
            await follow_versions(master.peer, "c.puller", make_room, take, lambda _: None)
    assert [version for version, _, _ in slaves.moved] == [V1] and len(master.of("Leave")) == 2


async def test_a_follower_that_has_pulled_nothing_says_what_fails(master: MasterOfPullers, slaves: Slaves) -> None:
    """Its caller may be wrong: nothing is tried again."""
    slaves.failures = [UnavailableSlave("ps1 is gone")]

    async def take(version: VersionId) -> None:
        raise AssertionError

    with pytest.raises(UnavailableSlave, match="ps1 is gone"):
        await follow_versions(master.peer, "c.puller", make_room, take, pytest.fail)
    assert len(master.of("RequestPull")) == 1


# ---- a follower of a model ------------------------------------------------------------------------------------------


class ModelThatFollows(torch.nn.Module):
    """The run's model, and a buffer of its own."""

    def __init__(self, width: int = 3) -> None:
        super().__init__()
        for name, shape in {"a": (2, width), "b": (4,), "c": (5,)}.items():
            self.add_module(name, torch.nn.Module())
            self.get_submodule(name).register_parameter("w", torch.nn.Parameter(torch.zeros(shape)))

    def values(self) -> set[float]:
        return {float(value) for p in self.parameters() for value in p.detach().flatten()}


def follower_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "dips-follow"]


async def test_a_model_follows_a_run_to_its_end(
    master: MasterOfPullers, slaves: Slaves, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only `update` touches it, which waits as long as it is told to; then it leaves the run, and keeps its version.
    A script that ends without closing it leaves the run, too."""
    model, at_exit = ModelThatFollows(), list[Any]()
    monkeypatch.setattr(atexit, "register", at_exit.append)
    monkeypatch.setattr(atexit, "unregister", lambda call: at_exit.remove(call) if call in at_exit else None)
    with await asyncio.to_thread(dips.follow, model, master.peer.address) as follower:
        assert follower.close in at_exit
        assert follower.version == str(V1) and model.values() == {1.0} and not follower.finished
        assert follower.update() == str(V1), "there is no other"
        master.head, master.script["RequestPull"] = V2, [Grant(V2, (), 60.0)]
        await eventually(lambda: follower._arrived == V2)
        assert model.values() == {1.0} and not follower.finished
        assert follower.update() == str(V2) and model.values() == {2.0}
        waiting = asyncio.create_task(asyncio.to_thread(follower.update, 60.0))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        master.head, master.script["RequestPull"] = V3, [Grant(V3, (), 60.0)]
        async with asyncio.timeout(20):
            assert await waiting == str(V3)
        assert not follower.finished
        master.finished = V3
        async with asyncio.timeout(20):
            assert await asyncio.to_thread(follower.update, 60.0) == str(V3)
        assert follower.finished
    assert follower.close not in at_exit and not follower_threads()
    assert follower._loop.is_closed() and master.asked[-1][0] == "Leave"
    assert follower.update() == str(V3), "a run that has ended is no error"


async def test_what_is_awaited_is_kept_until_it_is_taken(master: MasterOfPullers, slaves: Slaves) -> None:
    """Versions that come faster than a model takes them do not starve it; what is not awaited makes room."""
    taken = list[float]()
    follower = await asyncio.to_thread(
        dips.follow, lambda views: taken.append(float(views["b.w"][0])), master.peer.address
    )
    slaves.hangs, hanging = False, threading.Event()
    pull = slaves.pull

    def pull_slowly(*args: Any, **more: Any) -> Any:
        hanging.wait(20)
        return pull(*args, **more)

    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(version_pull, "pull_pieces", pull_slowly)
            master.head, master.script["RequestPull"] = V2, [Grant(V2, (), 60.0)]
            await eventually(lambda: follower._arrived is None)
            assert follower.update() == str(V1), "the next is on its way, and awaited from now on"
            hanging.set()
            await eventually(lambda: follower._arrived == V2)
            master.head, master.script["RequestPull"] = V3, [Grant(V3, (), 60.0)]
            seen = len(master.beats)
            await eventually(lambda: len(master.beats) > seen + 2)
            assert follower._arrived == V2 and len(slaves.moved) == 2
            assert follower.update() == str(V2) and taken == [1.0, 2.0]
            await eventually(lambda: follower._arrived == V3)
            master.head, master.script["RequestPull"] = V4, [Grant(V4, (), 60.0)]
            await eventually(lambda: follower._arrived == V4)  # nobody awaited v3
            assert follower.update() == str(V4) and taken == [1.0, 2.0, 4.0]
    finally:
        hanging.set()
        await asyncio.to_thread(follower.close)
    with pytest.raises(ConfigError, match="this follower is closed"):
        follower.update()


@pytest.mark.filterwarnings("ignore:dips.follow. ps1 lost the head:UserWarning")
async def test_a_version_that_comes_again_is_offered_again(master: MasterOfPullers, slaves: Slaves) -> None:
    """A rollback ends the pull of the next one, whose beginning has overwritten it: nobody would have got it, and who
    waits for the end would have waited for ever."""
    model, began = ModelThatFollows(), slaves.began
    with await asyncio.to_thread(dips.follow, model, master.peer.address) as follower:
        master.head, master.script["RequestPull"] = V2, [Grant(V2, (), 60.0)]
        await eventually(lambda: follower._arrived == V2)
        slaves.failures = [UnavailableSlave("ps1 lost the head")]
        began.clear()
        master.head = V3
        await eventually(began.is_set)
        master.head = V2
        await eventually(lambda: follower._arrived == V2)
        assert follower.update() == str(V2) and model.values() == {2.0}
        slaves.failures = [UnavailableSlave("ps1 lost the head")]
        began.clear()
        master.head = V3
        await eventually(began.is_set)
        master.head = master.finished = V2
        async with asyncio.timeout(20):
            await asyncio.to_thread(follower.update, 60.0)
        assert follower.finished and model.values() == {2.0}


async def test_a_model_of_another_shape_ends_its_follower(master: MasterOfPullers, slaves: Slaves) -> None:
    """It is as it was, and nothing is left: no thread, no task, no lease."""
    model = ModelThatFollows(width=7)
    with pytest.raises(ConfigError, match=r"a\.w: expected the run's shape \(2, 3\), the model's is \(2, 7\)"):
        await asyncio.to_thread(dips.follow, model, master.peer.address)
    assert model.values() == {0.0} and not follower_threads() and master.asked[-1][0] == "Leave"
