"""The agent's calls to the master: each question is one gRPC call; the master's errors are raised as their classes.

Heartbeats have their own connection, so that no long poll delays them. This file does not know what a question means or
when it is legal.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, cast

from grpc import aio

from dips.differences import differing_options
from dips.errors import ConfigError, Denied, DifferentModel, DipsError, UnavailableMaster
from dips.protocol.effects import Result
from dips.protocol.events import (
    ClusterJoined,
    ClusterLeft,
    ManifestOffered,
    ProbeAsked,
    PullFinished,
    PullRequested,
    PushAborted,
    PushFinished,
    PushRequested,
    RangesRequested,
    RoundAwaited,
)
from dips.protocol.heartbeats import ClusterHeartbeat, ClusterHeartbeatAnswer
from dips.transport import control
from dips.transport.endpoints import Endpoint
from dips.wire.generated.cluster_pb2_grpc import ClusterServiceStub
from dips.wire.generated.status_pb2 import DescribeRequest
from dips.wire.generated.status_pb2_grpc import StatusServiceStub
from dips.wire.messages import from_proto, to_proto, unwrap_oneof

CALL_S = 10.0  # a question that the master answers at once
POLL_S = 30.0  # a question that the master may hold open for about 10 s

# Question → (method of ClusterService, deadline).
CALLS: Mapping[type, tuple[str, float]] = {
    ClusterJoined: ("Join", CALL_S),
    ManifestOffered: ("CompareManifest", CALL_S),
    PushRequested: ("RequestPush", POLL_S),
    PushFinished: ("FinishPush", POLL_S),
    PushAborted: ("AbortPush", CALL_S),
    RoundAwaited: ("AwaitRound", POLL_S),
    PullRequested: ("RequestPull", POLL_S),
    PullFinished: ("FinishPull", CALL_S),
    ProbeAsked: ("AdmitProbe", POLL_S),
    RangesRequested: ("RequestRanges", POLL_S),
    ClusterLeft: ("Leave", CALL_S),
}


class MasterLink:
    """Two channels to one master; they connect at the first call and reconnect after each loss."""

    def __init__(self, peer: Endpoint, shared: Mapping[str, Any]) -> None:
        """Open the channels; `shared` is this cluster's shared options, to name those that differ from the run's."""
        self._peer, self._shared = peer, shared
        self._channels: tuple[aio.Channel, aio.Channel] = (control.open_channel(peer), control.open_channel(peer))
        self._questions, self._heartbeats = (ClusterServiceStub(channel) for channel in self._channels)

    async def ask_master(self, event: object) -> Result:
        """Send a question and return the reply. Raises UnavailableMaster if none comes in time, and the errors the
        master raised.
        """
        method, deadline_s = CALLS[type(event)]
        try:
            reply = await self._call_method(getattr(self._questions, method), event, deadline_s)
        except DifferentModel:
            raise
        except ConfigError as error:
            raise await self._name_keys(error) from error
        return cast(Result, unwrap_oneof(reply))

    async def send_heartbeat(self, heartbeat: ClusterHeartbeat, deadline_s: float) -> ClusterHeartbeatAnswer:
        """Send a heartbeat and return its answer; raises as `ask_master` does."""
        return from_proto(
            await self._call_method(self._heartbeats.Heartbeat, heartbeat, deadline_s), ClusterHeartbeatAnswer
        )

    async def close(self) -> None:
        for channel in self._channels:
            await channel.close()

    async def _name_keys(self, refused: ConfigError) -> ConfigError:
        """Return the refusal with the names of the keys that differ; the master, which compared digests, is asked for
        its options.
        """
        describe = StatusServiceStub(self._channels[0]).Describe
        try:
            reply = await control.call_method(
                describe, DescribeRequest(), deadline_s=CALL_S, peer=self._peer, unavailable=UnavailableMaster
            )
            lines = differing_options(self._shared, json.loads(reply.json)["shared"])
        except DipsError:
            return refused
        return ConfigError("; ".join(lines) + ": copy the run file's section `shared`") if lines else refused

    async def _call_method(self, method: Any, event: object, deadline_s: float) -> Any:
        try:
            return await control.call_method(
                method, to_proto(event), deadline_s=deadline_s, peer=self._peer, unavailable=UnavailableMaster,
                explain=isinstance(event, ClusterJoined),
            )  # fmt: skip
        except UnavailableMaster as error:  # gRPC does not tell that the TLS handshake failed
            if self._peer.tls is not None and (expired := self._peer.tls.find_expiry()):
                raise Denied(expired) from error
            raise
