"""The table of rights: a row for each method, no row is no, and nobody speaks for another."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dips.errors import Denied
from dips.identity.names import PeerIdentity, PeerRole
from dips.identity.rights import RIGHTS, check_enrolled, check_right
from dips.wire.generated import authority_pb2, cluster_pb2, operator_pb2, slave_pb2, status_pb2

FILES = (authority_pb2, cluster_pb2, operator_pb2, slave_pb2, status_pb2)
METHODS = {
    f"/{service.full_name}/{method.name}": method
    for file in FILES
    for service in file.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}
HEALTH = "/grpc.health.v1.Health/Check"

# Who may what, written out a second time: a slip in the table of rights is no expectation of these tests. A role with
# a star may in its own name only.
EXPECTED = """
    ClusterService/Join           cluster* operator* puller*
    ClusterService/CompareManifest cluster* operator*
    ClusterService/Heartbeat      cluster* operator* puller*
    ClusterService/RequestPush    cluster*
    ClusterService/FinishPush     cluster*
    ClusterService/AbortPush      cluster*
    ClusterService/AwaitRound     cluster*
    ClusterService/RequestPull    cluster* operator* puller*
    ClusterService/FinishPull     cluster* operator* puller*
    ClusterService/AdmitProbe     cluster* operator*
    ClusterService/RequestRanges  cluster*
    ClusterService/Leave          cluster* operator* puller*
    SlaveService/Register         slave*
    SlaveService/Heartbeat        slave*
    SlaveService/Staged           slave*
    SlaveService/Refused          slave*
    OrderService/Execute          master
    OperatorService/Readmit       operator
    OperatorService/Extend        operator
    OperatorService/Tune          operator
    OperatorService/Quarantine    operator
    OperatorService/Rollback      operator
    OperatorService/Rebalance     operator
    OperatorService/Begin         operator
    OperatorService/Seed          operator
    OperatorService/Recover       operator
    OperatorService/Drain         operator slave*
    OperatorService/DrainAll      operator
    OperatorService/Finalise      operator
    StatusService/Status          cluster operator viewer
    StatusService/Describe        cluster operator puller viewer
    AuthorityService/Renew        cluster master puller slave viewer
    AuthorityService/ListRevoked  authority cluster master operator puller slave viewer
"""
MAY = {f"/dips.v1.{method}": roles for method, *roles in map(str.split, EXPECTED.strip().splitlines())}
MAY[HEALTH] = list(PeerRole)


def who(role: PeerRole, name: str = "a") -> PeerIdentity:
    return PeerIdentity(name, role, "run")


def request_of(method: str, name: str) -> Any:
    """A request of `method` in the name of `name`, wherever such a request may bear one."""
    of_cluster = SimpleNamespace(cluster=name)
    return SimpleNamespace(cluster=name, slave=name, push=of_cluster, pull=of_cluster)


def test_each_method_has_a_row_and_each_row_a_method() -> None:
    assert set(RIGHTS) == set(METHODS) | {HEALTH} == set(MAY)


@pytest.mark.parametrize("method", sorted(METHODS))
def test_the_field_that_bears_the_name_is_of_the_request(method: str) -> None:
    descriptor = METHODS[method].input_type
    for part in filter(None, RIGHTS[method].own.split(".")):
        field = descriptor.fields_by_name[part]
        descriptor = field.message_type
    assert descriptor is None or not RIGHTS[method].own, "it ends at a string"


@pytest.mark.parametrize(("method", "role"), list(product(sorted(MAY), PeerRole)))
def test_only_those_of_the_row(method: str, role: PeerRole) -> None:
    """In its own name and, where that is not asked, in another's."""
    caller = who(role)
    own, other = request_of(method, caller.cluster_name), request_of(method, "b")
    if role not in {word.rstrip("*") for word in MAY[method]}:
        with pytest.raises(Denied, match="expected a certificate of"):
            check_right(caller, method, own)
        return
    check_right(caller, method, own)
    if f"{role}*" not in MAY[method]:
        check_right(caller, method, other)
        return
    with pytest.raises(Denied, match="got 'b'"):
        check_right(caller, method, other)


def test_a_cluster_is_not_the_operator_of_its_name() -> None:
    with pytest.raises(Denied):
        check_right(who(PeerRole.OPERATOR, "west"), "/dips.v1.ClusterService/Join", SimpleNamespace(cluster="west"))


def test_an_operator_drains_any_slave_and_a_slave_itself() -> None:
    method = "/dips.v1.OperatorService/Drain"
    check_right(who(PeerRole.OPERATOR), method, SimpleNamespace(slave="b"))
    check_right(who(PeerRole.SLAVE), method, SimpleNamespace(slave="a"))


def test_a_method_without_a_row_is_open_to_nobody() -> None:
    for role in PeerRole:
        with pytest.raises(Denied, match="open to nobody"):
            check_right(who(role), "/dips.v1.ClusterService/Fold", SimpleNamespace())


def test_clusters_that_the_run_file_does_not_list() -> None:
    check_enrolled(who(PeerRole.CLUSTER), None)
    check_enrolled(who(PeerRole.CLUSTER), ("a", "b"))
    check_enrolled(who(PeerRole.SLAVE), ("b",))
    with pytest.raises(Denied, match="a name of the run file's list"):
        check_enrolled(who(PeerRole.CLUSTER), ("b",))


def test_the_guide_says_all_that_an_operator_may() -> None:
    """It says that what its table lacks is refused, and lacked three requests of operators."""
    guide = (Path(__file__).parents[3] / "docs/guides/certificates.md").read_text()
    row = next(line for line in guide.splitlines() if line.startswith("| `operator` |")).replace(" ", "")
    asked = {method.rpartition("/")[2].lower() for method in RIGHTS if "/dips.v1.OperatorService/" in method}
    assert {word for word in asked if word not in row} == {"begin", "drainall"}, "parts of `seed` and of `drain`"
