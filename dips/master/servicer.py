"""The master's gRPC services: each call is one question, heartbeat or event for the runtime."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar, cast

from google.protobuf.message import Message

from dips.errors import Busy, CorruptManifest, DifferentModel, UnavailableMaster
from dips.identity.names import PeerRole
from dips.master.runtime import Runtime
from dips.plain import to_plain
from dips.protocol import events, heartbeats
from dips.protocol.effects import Acknowledged, Failed, Result
from dips.protocol.events import ManifestOffered
from dips.protocol.manifest import MAX_JSON_BYTES, Manifest
from dips.protocol.view import RunView
from dips.transport.gate import Guard
from dips.view.judging import narrow_view, spell_view
from dips.wire import messages
from dips.wire.generated import cluster_pb2, names_pb2, operator_pb2, slave_pb2, status_pb2
from dips.wire.generated.cluster_pb2_grpc import ClusterServiceServicer
from dips.wire.generated.operator_pb2_grpc import OperatorServiceServicer
from dips.wire.generated.slave_pb2_grpc import SlaveServiceServicer
from dips.wire.generated.status_pb2_grpc import StatusServiceServicer
from dips.wire.packed_manifest import ManifestTooLong, unpack_manifest

# ---- manifest desk --------------------------------------------------------------------------------------------------
# Compares a cluster's model with the run's, in a thread and outside the core.
#
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


Reply = TypeVar("Reply", bound=Message)
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
        self, request: Message, question: type[Any], reply: type[Reply], **local: float
    ) -> Reply:
        """`local`: fields of the question that do not travel."""
        result = await _ask_master(self._runtime, lambda req: messages.from_proto(request, question, req=req, **local))
        return cast(Reply, messages.wrap_oneof(result, reply))


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
        begin: Callable[[events.RunProposed], Awaitable[None]],
        guard: Guard | None = None,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """`begin` creates the run's ledger, or raises why not; it does nothing if the run has begun with that model."""
        self._runtime, self._begin, self._guard, self._wall = runtime, begin, guard, wall

    async def Begin(self, request: Any, context: Any) -> operator_pb2.BeginReply:
        await self._begin(messages.from_proto(request, events.RunProposed))
        return cast(operator_pb2.BeginReply, messages.wrap_oneof(Acknowledged(), operator_pb2.BeginReply))

    Seed = _audited(events.SeedAsked, operator_pb2.SeedReply)
    Readmit = _audited(events.ReadmissionAsked, operator_pb2.ReadmitReply)
    Rollback = _audited(events.RollbackAsked, operator_pb2.RollbackReply)
    Drain = _audited(events.DrainAsked, operator_pb2.DrainReply)
    DrainAll = _audited(events.DrainAllAsked, operator_pb2.DrainReply)
    Extend = _audited(events.ExtensionAsked, operator_pb2.ExtendReply)
    Tune = _audited(events.TuningAsked, operator_pb2.TuneReply)
    Quarantine = _audited(events.QuarantineAsked, operator_pb2.QuarantineReply)


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
