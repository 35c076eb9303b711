"""The name in a certificate: `<name>.<role>.<run>.dips`, one DNS name, never an address.

Tunnels, balancers and address translation do not matter, since no peer is identified by its address. Names of the
processes have no dots, so that each certificate names exactly one role of one run.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from dips.errors import ConfigError, Denied
from dips.ids import check_name, reads_only

SUFFIX = "dips"
MOST_QUOTED = 253  # characters of a refused name, as many as a DNS name has
MASTER_NAME, AUTHORITY_NAME = "master", "authority"  # a run has one of each


class PeerRole(StrEnum):
    """The role of a process in a run."""

    MASTER = "master"
    SLAVE = "slave"
    CLUSTER = "cluster"
    OPERATOR = "operator"
    PULLER = "puller"
    VIEWER = "viewer"
    AUTHORITY = "authority"


_ONLY = {PeerRole.MASTER: MASTER_NAME, PeerRole.AUTHORITY: AUTHORITY_NAME}


@dataclass(frozen=True, slots=True)
class PeerIdentity:
    """The identity that a certificate gives its holder."""

    name: str
    role: PeerRole
    run: str

    def __str__(self) -> str:
        return f"{self.role} {self.name!r} of run {self.run!r}"

    @property
    def san(self) -> str:
        """The certificate's only subject alternative name."""
        return f"{self.name}.{self.role}.{self.run}.{SUFFIX}"

    @property
    def label(self) -> str:
        """The base name of its files."""
        return f"{self.name}.{self.role}"

    @property
    def cluster_name(self) -> str:
        """The cluster name that it may use: who only pulls joins under a name that no cluster can have."""
        return self.label if reads_only(self.label) else self.name


def make_identity(name: str, role: PeerRole, run: str) -> PeerIdentity:
    """Return an identity; raise ConfigError if its names cannot be part of a certificate's name."""
    check_name(run, "run")
    check_name(name, str(role))
    if "." in name:
        raise ConfigError(f"{role} name {name!r}: dots separate the parts of a certificate's name; use - instead")
    if (only := _ONLY.get(role, name)) != name:
        raise ConfigError(f"a run has one {role}, its certificate's name is {only!r}, got {name!r}")
    return PeerIdentity(name, role, run)


def parse_san(san: str) -> PeerIdentity:
    """Parse a certificate's name; raise Denied for one that is not of Di-PS."""
    name, _, rest = san.partition(".")
    role, _, rest = rest.partition(".")
    run, dot, suffix = rest.rpartition(".")
    if not dot or suffix != SUFFIX or role not in list(PeerRole):
        raise Denied(f"expected a certificate for <name>.<role>.<run>.{SUFFIX}, got {san[:MOST_QUOTED]!r}")
    try:
        return make_identity(name, PeerRole(role), run)
    except ConfigError as error:
        raise Denied(str(error)) from error
