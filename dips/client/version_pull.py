"""Pulling a version of a run into memory from any host that reaches the master and the slaves, without a cluster or
torch.

The puller joins as a cluster of its own name that never trains, pins the version by a pull as every cluster does,
renews its lease by heartbeats during the transfer, and leaves. No round waits for it. Two pullers with one name fence
each other.
"""

from __future__ import annotations

import asyncio
import json
import threading
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from dips.client.agent.agent import MasterLink
from dips.client.rank.transfer import TransferIdentity, TransferRate, TransferStats, pull_pieces
from dips.errors import Denied, StaleIncarnation, UnavailableMaster
from dips.ids import PullId, VersionId, check_name
from dips.protocol.effects import Dropped, Finished, Grant, Joined, Pending, Refused, Result
from dips.protocol.enums import Activity, ClusterStanding, TrainerState
from dips.protocol.events import ClusterJoined, ClusterLeft, PullFinished, PullRequested
from dips.protocol.heartbeats import ClusterHeartbeat
from dips.protocol.manifest import Manifest
from dips.transport import control, curve
from dips.transport.endpoints import Endpoint
from dips.wire.chunks import F32, Piece
from dips.wire.generated.status_pb2 import DescribeRequest
from dips.wire.generated.status_pb2_grpc import StatusServiceStub

CALL_S = 10.0
HEARTBEAT_S = 2.0  # longest pause between two heartbeats
LEASE_HEARTBEATS = 5  # heartbeats per lease, as clusters send them
GRANT_S = 60.0  # for the slaves to register and to pin the version
RETRY_S = 0.2
FIRST_SEQ = 1  # seq of the incarnation's only pull

# (run, version, manifest) → an array for all parameters, concatenated in the manifest's order.
MakeRoom = Callable[[str, VersionId, Manifest], F32]


@dataclass(frozen=True, slots=True)
class PulledVersion:
    """The version that was pulled, with statistics of its transfer."""

    version: VersionId
    stats: TransferStats


async def pull_version(
    master: Endpoint, name: str, make_room: MakeRoom, version: VersionId | None = None, stall_s: float = 30.0
) -> PulledVersion:
    """Pull a version of the run of `master`, as a cluster named `name`.

    version  a version that the slaves still keep; None: the head
    Errors   UnavailableMaster, UnavailableSlave; ConfigError: the version is no longer kept; StaleIncarnation: another
             process with this name joined; Denied: the name belongs to another; also the errors of `make_room`
    """
    check_name(name, "cluster")
    described = await _describe_run(master)
    link, digest = MasterLink(master, described["shared"]), Manifest.from_json(described["manifest"]).digest
    try:
        event = ClusterJoined(0, name, uuid.uuid4().hex, described["run"], digest, described["config_digest"])
        joined = await link.ask_master(event)
        if not isinstance(joined, Joined):
            raise _unexpected("Joined", joined)
        try:
            return await _pull_joined(link, described, PullId(name, joined.inc, FIRST_SEQ), version, make_room, stall_s)
        finally:
            await link.ask_master(ClusterLeft(0, name, joined.inc, 0))
    finally:
        await link.close()


async def _describe_run(master: Endpoint) -> dict[str, Any]:
    channel = control.open_channel(master)
    try:
        reply = await control.call_method(
            StatusServiceStub(channel).Describe, DescribeRequest(), deadline_s=CALL_S,
            peer=master, unavailable=UnavailableMaster, explain=True,
        )  # fmt: skip
    finally:
        await channel.close()
    described: dict[str, Any] = json.loads(reply.json)
    return described


async def _pull_joined(
    link: MasterLink,
    described: dict[str, Any],
    pull: PullId,
    version: VersionId | None,
    make_room: MakeRoom,
    stall_s: float,
) -> PulledVersion:
    """Pull as an incarnation that has joined; the transfer has ended when this returns."""
    cancel, rates = threading.Event(), [TransferRate(0, 0, 0.0)]
    keep = asyncio.create_task(_keep_lease(link, pull, rates, cancel))
    try:
        keys = curve.new_keys()
        grant = await _await_grant(link, PullRequested(0, pull, 1, version, (keys.public,)), keep)
        manifest = Manifest.from_json(described["manifest"])
        room = await asyncio.to_thread(make_room, described["run"], grant.version, manifest)
        identity = TransferIdentity(described["run"], pull.cluster, pull.inc, pull.seq, 0, keys)
        stats = await _move(grant, identity, list_pieces(manifest, room), stall_s, cancel, rates)
        await link.ask_master(PullFinished(0, pull, True))
    except BaseException:
        if keep.done() and not keep.cancelled() and (error := keep.exception()) is not None:
            raise error from None  # the reason why the transfer was cancelled
        raise
    finally:
        keep.cancel()
        await asyncio.gather(keep, return_exceptions=True)
    return PulledVersion(grant.version, stats)


async def _move(
    grant: Grant,
    identity: TransferIdentity,
    pieces: list[Piece],
    stall_s: float,
    cancel: threading.Event,
    rates: list[TransferRate],
) -> TransferStats:
    """Transfer the bytes in a thread; the thread has ended when this returns, also after a cancellation."""

    def move() -> TransferStats:
        report = lambda rate: rates.__setitem__(0, rate)  # noqa: E731 (a name of its own would add nothing)
        return pull_pieces(grant, identity, pieces, stall_s=stall_s, cancel=cancel, progress=report)

    moving = asyncio.create_task(asyncio.to_thread(move))
    try:
        return await asyncio.shield(moving)
    except asyncio.CancelledError:
        cancel.set()
        await asyncio.gather(moving, return_exceptions=True)
        raise


def list_pieces(manifest: Manifest, room: F32) -> list[Piece]:
    """Return all parameters as pieces of one flat array."""
    sizes = [(l, p, parameter.numel) for l, layer in enumerate(manifest.layers)
             for p, parameter in enumerate(layer.parameters)]  # fmt: skip
    ends = [0]
    for _, _, numel in sizes:
        ends.append(ends[-1] + numel)
    return [
        Piece(l, p, 0, numel, room[begin:end])
        for (l, p, numel), (begin, end) in zip(sizes, pairwise(ends), strict=True)
        if numel
    ]


async def _await_grant(link: MasterLink, question: PullRequested, keep: asyncio.Task[None]) -> Grant:
    """Ask the master until the slaves have pinned the version; return the grant."""
    why = "it does not answer"
    try:
        async with asyncio.timeout(GRANT_S):
            while True:
                if keep.done():
                    keep.result()
                result = await link.ask_master(question)
                match result:
                    case Grant():
                        return result
                    case Pending(reason):
                        why, pause_s = reason, RETRY_S
                    case Refused():
                        why, pause_s = result.reason, result.retry_after_s
                    case _:
                        raise _unexpected("a grant", result)
                await asyncio.sleep(pause_s)
    except TimeoutError:
        raise UnavailableMaster(f"no pull was granted within {GRANT_S:g} s: {why}") from None


async def _keep_lease(link: MasterLink, pull: PullId, rates: list[TransferRate], cancel: threading.Event) -> None:
    """Send heartbeats; cancel the transfer and raise StaleIncarnation if the incarnation was replaced or its lease ran
    out.
    """
    pause_s = HEARTBEAT_S
    while True:
        rate = rates[0]
        heartbeat = ClusterHeartbeat(
            pull.cluster, pull.inc, TrainerState.STARTING, Activity.PULL, 0, 0, 0, 0, 0.0, None,
            rate.nbytes, rate.total, rate.bytes_per_s, transfer_seq=pull.seq,
        )  # fmt: skip
        try:
            answer = await link.send_heartbeat(heartbeat, CALL_S)
        except UnavailableMaster:
            pass  # it may come back within the lease; a transfer needs it only at its end
        else:
            if answer.standing is not ClusterStanding.LIVE:
                cancel.set()
                why = "another one joined by this name, or the lease ran out"
                raise StaleIncarnation(f"{pull.cluster}/{pull.inc} is {answer.standing}: {why}")
            pause_s = min(HEARTBEAT_S, answer.lease_s / LEASE_HEARTBEATS)
        await asyncio.sleep(pause_s)


def _unexpected(wanted: str, result: Result) -> Exception:
    if isinstance(result, Finished):
        return UnavailableMaster(f"the run is finished at {result.version}, which is not to be pulled any more")
    reason = getattr(result, "reason", "")
    if isinstance(result, Dropped):
        return UnavailableMaster(f"the pull was dropped: {reason}")
    return Denied(f"expected {wanted}, the master answered {type(result).__name__}: {reason}")
