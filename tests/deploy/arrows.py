"""Who may dial whom: the design's table, and what NetworkPolicies allow between two pods."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from tests.deploy.kubectl import Manifest
from tests.deploy.pods import INDEX, NAME, POD_NAME, Pod, selects

MASTER, SLAVE, CLUSTER, SEED = "dips-master", "dips-slave", "dips-cluster", "dips-seed"
OURS = (MASTER, SLAVE, CLUSTER, SEED)
NAMESPACE = "kubernetes.io/metadata.name"  # the label that every namespace has
PROMETHEUS, NAMES, OUTSIDE, STRANGER, STORE = "prometheus", "kube-dns", "outside", "stranger", "store"
CONTROL, ORDERS, LANES, HTTP, DNS = 7800, 7810, (7811, 7812), 9400, 53
EVERY = frozenset({CONTROL, ORDERS, *LANES, HTTP, DNS, 22, 443, 29410, 29500, 40000})  # that are tried

# docs/architecture.md, "Processes", as (who dials, whom, on which ports).
ARROWS: frozenset[tuple[str, str, int]] = frozenset(
    {
        (CLUSTER, MASTER, CONTROL),
        (SLAVE, MASTER, CONTROL),
        (SEED, MASTER, CONTROL),
        (MASTER, SLAVE, ORDERS),
        *((who, SLAVE, lane) for who in (CLUSTER, SEED) for lane in LANES),
        *((CLUSTER, CLUSTER, port) for port in EVERY),  # the nodes of one job
        *((PROMETHEUS, daemon, HTTP) for daemon in (MASTER, SLAVE, CLUSTER)),
        *((who, NAMES, DNS) for who in OURS),
    }
)
# What production adds: clusters of other places.
TO_STORE = frozenset((who, STORE, 443) for who in (MASTER, SLAVE))  # of mirrors
FROM_OUTSIDE = frozenset({(OUTSIDE, MASTER, CONTROL), *((OUTSIDE, SLAVE, lane) for lane in LANES)})


@dataclass(frozen=True)
class Party:
    """Somebody who dials or is dialled: a pod, or an address outside."""

    role: str
    namespace: str = ""  # empty: no pod
    labels: dict[str, str] = field(default_factory=dict)
    ports: dict[str, int] = field(default_factory=dict)
    ip: str = ""

    @staticmethod
    def of(pod: Pod) -> Party:
        return Party(pod.app, pod.namespace, pod.labels, pod.ports)


class Policies:
    """The NetworkPolicies of all namespaces together."""

    def __init__(self, objects: list[Manifest]) -> None:
        self._policies = [o for o in objects if o["kind"] == "NetworkPolicy"]
        self._namespaces = {
            o["metadata"]["name"]: {NAMESPACE: o["metadata"]["name"], **o["metadata"].get("labels", {})}
            for o in objects
            if o["kind"] == "Namespace"
        }  # fmt: skip

    def allowed_ports(self, source: Party, target: Party) -> frozenset[int]:
        """Those of EVERY on which `source` reaches `target` by TCP."""
        leaving = self._opened("Egress", source, target, target)
        entering = self._opened("Ingress", target, source, target)
        return leaving & entering

    def _opened(self, way: str, subject: Party, other: Party, target: Party) -> frozenset[int]:
        policies = [p for p in self._policies if way in p["spec"]["policyTypes"] and self._concerns(p, subject)]
        if not policies:
            return EVERY  # no policy speaks of it
        opened: set[int] = set()
        for rule in (r for p in policies for r in p["spec"].get(way.lower(), ())):
            peers = rule.get("to" if way == "Egress" else "from")
            namespace = subject.namespace
            if peers is None or any(self._is_peer(peer, other, namespace) for peer in peers):
                opened |= _numbers(rule.get("ports"), target)
        return frozenset(opened)

    def _concerns(self, policy: Manifest, party: Party) -> bool:
        same = party.namespace == policy["metadata"].get("namespace", "default")
        return same and selects(policy["spec"].get("podSelector"), party.labels)

    def _is_peer(self, peer: dict[str, Any], party: Party, namespace: str) -> bool:
        if "ipBlock" in peer:
            inside = bool(party.ip) and ipaddress.ip_address(party.ip) in ipaddress.ip_network(peer["ipBlock"]["cidr"])
            return inside and not peer["ipBlock"].get("except")
        if not party.namespace:
            return False
        if "namespaceSelector" in peer:
            labels = self._namespaces.get(party.namespace, {NAMESPACE: party.namespace})
            if not selects(peer["namespaceSelector"], labels):
                return False
        elif party.namespace != namespace:
            return False
        return selects(peer.get("podSelector"), party.labels)


def _numbers(ports: list[dict[str, Any]] | None, target: Party) -> set[int]:
    if ports is None:
        return set(EVERY)
    named = [p["port"] for p in ports if p.get("protocol", "TCP") == "TCP"]
    return {n for n in (target.ports.get(p) if isinstance(p, str) else p for p in named) if n is not None}


def strangers() -> list[Party]:
    """Everybody who is none of ours: in our namespaces, beside them, and outside."""
    return [
        Party(PROMETHEUS, "monitoring", {NAME: "prometheus"}),
        Party(NAMES, "kube-system", {"k8s-app": "kube-dns"}),
        Party(STRANGER, "dips", {NAME: "somebody"}),
        Party(STRANGER, "training", {NAME: "somebody"}),
        Party(STRANGER, "default", {NAME: CLUSTER}),  # the right name in the wrong namespace
        Party(STRANGER, "monitoring", {NAME: "grafana"}),
        Party(OUTSIDE, ip="198.51.100.7"),
        Party(STORE, ip="192.0.2.5"),
        Party(STRANGER, ip="203.0.113.9"),
    ]


def find_wrong_arrows(
    objects: list[Manifest], pods: list[Pod], arrows: frozenset[tuple[str, str, int]]
) -> Iterator[str]:
    """Where the policies allow another set of ports than the table does, for every pair of which one is ours."""
    policies = Policies(objects)
    ours, others = [Party.of(pod) for pod in pods], strangers()
    pairs = [(a, b) for a in ours for b in (*ours, *others)] + [(a, b) for a in others for b in ours]
    for source, target in dict.fromkeys((_Key(a), _Key(b)) for a, b in pairs):
        wanted = {port for port in EVERY if (source.role, target.role, port) in arrows}
        found = policies.allowed_ports(source.party, target.party)
        if found != wanted:
            too_many, missing = sorted(found - wanted), sorted(wanted - found)
            yield f"{source} → {target}: open and not an arrow: {too_many}; an arrow and not open: {missing}"


class _Key:
    """A party that is the same as another with the same namespace and labels: replicas are looked at once."""

    def __init__(self, party: Party) -> None:
        self.party, self.role = party, party.role
        labels = sorted((k, v) for k, v in party.labels.items() if k not in (POD_NAME, INDEX))
        self._told = f"{party.namespace or party.ip}/{party.role}", tuple(labels)

    def __str__(self) -> str:
        return self._told[0]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and self._told == other._told

    def __hash__(self) -> int:
        return hash(self._told)
