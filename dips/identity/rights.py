"""Rights: which roles may call which method; a method without a row may not be called.

`own` is the field of the request that must have the caller's own name, since clusters and slaves speak only for
themselves.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from dips.errors import Denied
from dips.identity.names import PeerIdentity, PeerRole

_ALL = frozenset(PeerRole)
_JOINERS = frozenset({PeerRole.CLUSTER, PeerRole.OPERATOR})
_PULLERS = _JOINERS | {PeerRole.PULLER}  # `dips export --master` and `dips follow` pull as clusters do
_LOOKERS = frozenset({PeerRole.CLUSTER, PeerRole.OPERATOR, PeerRole.VIEWER})  # a cluster sees itself alone
_CLUSTER, _SLAVE, _MASTER = frozenset({PeerRole.CLUSTER}), frozenset({PeerRole.SLAVE}), frozenset({PeerRole.MASTER})
_OPERATOR = frozenset({PeerRole.OPERATOR})
# An operator's certificate may do everything: a person signs each.
_RENEWED = frozenset({PeerRole.MASTER, PeerRole.SLAVE, PeerRole.CLUSTER, PeerRole.PULLER, PeerRole.VIEWER})


@dataclass(frozen=True, slots=True)
class Right:
    """The roles that may call a method, and the field that must name the caller."""

    roles: frozenset[PeerRole]
    own: str = ""  # field of the request; empty: none
    own_of: frozenset[PeerRole] = _ALL  # the roles for which `own` is checked; an operator may drain any slave


RIGHTS: Mapping[str, Right] = {
    "/dips.v1.ClusterService/Join": Right(_PULLERS, "cluster"),
    "/dips.v1.ClusterService/CompareManifest": Right(_JOINERS, "cluster"),
    "/dips.v1.ClusterService/Heartbeat": Right(_PULLERS, "cluster"),
    "/dips.v1.ClusterService/RequestPush": Right(_CLUSTER, "push.cluster"),
    "/dips.v1.ClusterService/FinishPush": Right(_CLUSTER, "push.cluster"),
    "/dips.v1.ClusterService/AbortPush": Right(_CLUSTER, "push.cluster"),
    "/dips.v1.ClusterService/AwaitRound": Right(_CLUSTER, "push.cluster"),
    "/dips.v1.ClusterService/RequestPull": Right(_PULLERS, "pull.cluster"),
    "/dips.v1.ClusterService/FinishPull": Right(_PULLERS, "pull.cluster"),
    "/dips.v1.ClusterService/AdmitProbe": Right(_JOINERS, "cluster"),
    "/dips.v1.ClusterService/RequestRanges": Right(_CLUSTER, "cluster"),
    "/dips.v1.ClusterService/Leave": Right(_PULLERS, "cluster"),
    "/dips.v1.SlaveService/Register": Right(_SLAVE, "slave"),
    "/dips.v1.SlaveService/Heartbeat": Right(_SLAVE, "slave"),
    "/dips.v1.SlaveService/Staged": Right(_SLAVE, "slave"),
    "/dips.v1.SlaveService/Refused": Right(_SLAVE, "slave"),
    "/dips.v1.OrderService/Execute": Right(_MASTER),
    "/dips.v1.OperatorService/Readmit": Right(_OPERATOR),
    "/dips.v1.OperatorService/Extend": Right(_OPERATOR),
    "/dips.v1.OperatorService/Tune": Right(_OPERATOR),
    "/dips.v1.OperatorService/Quarantine": Right(_OPERATOR),
    "/dips.v1.OperatorService/Begin": Right(_OPERATOR),
    "/dips.v1.OperatorService/Seed": Right(_OPERATOR),
    "/dips.v1.OperatorService/Recover": Right(_OPERATOR),
    "/dips.v1.OperatorService/Rollback": Right(_OPERATOR),
    "/dips.v1.OperatorService/Rebalance": Right(_OPERATOR),
    "/dips.v1.OperatorService/Drain": Right(_OPERATOR | _SLAVE, "slave", own_of=_SLAVE),  # before its pod ends
    "/dips.v1.OperatorService/DrainAll": Right(_OPERATOR),
    "/dips.v1.OperatorService/Finalise": Right(_OPERATOR),
    "/dips.v1.StatusService/Status": Right(_LOOKERS),
    "/dips.v1.StatusService/Describe": Right(_LOOKERS | _PULLERS),
    "/dips.v1.AuthorityService/Renew": Right(_RENEWED),  # the request's name: Authority.renew
    "/dips.v1.AuthorityService/ListRevoked": Right(_ALL),
    "/grpc.health.v1.Health/Check": Right(_ALL),
}


def check_right(caller: PeerIdentity, method: str, request: Any) -> None:
    """Return if `caller` may call `method` with this request; raise Denied with the reason if not."""
    right = RIGHTS.get(method)
    if right is None:
        raise Denied(f"{method}: expected a call that some role may make, got one that is open to nobody")
    if caller.role not in right.roles:
        raise Denied(f"{method}: expected a certificate of {_either(right.roles)}, got that of {caller}")
    if not right.own or caller.role not in right.own_of:
        return
    named = attrgetter(right.own)(request)
    own = caller.cluster_name if caller.role in _PULLERS else caller.name
    if named != own:
        raise Denied(f"{method}: expected the name of {caller}, got {named[:64]!r}")


def check_enrolled(caller: PeerIdentity, clusters: Collection[str] | None) -> None:
    """Raise Denied for a cluster that is not in the run file's `clusters`; None allows all."""
    if caller.role is PeerRole.CLUSTER and clusters is not None and caller.name not in clusters:
        raise Denied(f"clusters: expected a name of the run file's list, got {caller}; add it there if it may join")


def _either(roles: frozenset[PeerRole]) -> str:
    return " or ".join(sorted(roles))
