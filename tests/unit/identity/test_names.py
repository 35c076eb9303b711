"""Names in certificates: one meaning each."""

from __future__ import annotations

import pytest

from dips.errors import ConfigError, Denied
from dips.identity.names import PeerIdentity, PeerRole, make_identity, parse_san


@pytest.mark.parametrize("role", sorted(set(PeerRole) - {PeerRole.MASTER, PeerRole.AUTHORITY}))
def test_a_name_reads_back(role: PeerRole) -> None:
    identity = make_identity("west-2_b", role, "run.of.july")
    assert identity.san == f"west-2_b.{role}.run.of.july.dips"
    assert parse_san(identity.san) == identity


@pytest.mark.parametrize(
    "san",
    [
        "",
        "dips",
        "a.cluster.dips",
        "a.cluster.run",
        "a.cluster..dips",
        ".cluster.run.dips",
        "a.king.run.dips",
        "A.cluster.run.dips",
        "a.b.cluster.run.dips",
        "*.cluster.run.dips",
        "a.cluster.run.dips.",
        "west.master.run.dips",
        "a.cluster.run.dips\x00",
        f"{'a' * 64}.cluster.run.dips",
        f"a.cluster.{'.'.join(['r' * 60] * 5)}.dips",
    ],
)
def test_what_is_no_name_of_ours_is_denied(san: str) -> None:
    with pytest.raises(Denied):
        parse_san(san)


def test_a_name_with_dots_could_be_read_in_two_ways() -> None:
    """`a.cluster.b` as a slave's name would read as cluster `a` of another run."""
    with pytest.raises(ConfigError, match="dots separate"):
        make_identity("a.cluster.b", PeerRole.SLAVE, "r")


def test_a_run_has_one_master_and_one_authority() -> None:
    assert make_identity("authority", PeerRole.AUTHORITY, "r").san == "authority.authority.r.dips"
    with pytest.raises(ConfigError, match="one authority"):
        make_identity("west", PeerRole.AUTHORITY, "r")
    assert make_identity("master", PeerRole.MASTER, "r").san == "master.master.r.dips"
    with pytest.raises(ConfigError, match="one master"):
        make_identity("mistress", PeerRole.MASTER, "r")


def test_an_operator_pulls_under_a_name_that_no_cluster_can_have() -> None:
    assert PeerIdentity("ada", PeerRole.OPERATOR, "r").cluster_name == "ada.operator"
    assert PeerIdentity("ada", PeerRole.CLUSTER, "r").cluster_name == "ada"
