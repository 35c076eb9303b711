"""Names that are never used twice (docs/architecture.md#invariant-5).

A version is named by the outer steps that θ has had and by the round that made it, `v12@r17`: after a rollback a
new v7 is made by another round, so no name has two contents. A transfer (push or pull) is named by its
sender: (cluster, incarnation, seq); seq rises strictly within one incarnation, over pushes and pulls together.
The pull that follows the Outcome of push s has the seq s, too.
"""

from __future__ import annotations

import re

from dips.dataclass import dataclass
from dips.errors import ConfigError

_VERSION = re.compile(r"v(\d+)@r(\d+)")
PULLER = ".puller"
READERS = (".operator", PULLER)  # ends of the names under which such certificates join: they only pull
_NAME = re.compile(r"[a-z0-9]([a-z0-9._-]{0,61}[a-z0-9])?")


@dataclass(frozen=True, slots=True, order=True)
class VersionId:
    """The name of a version, written `v3@r5`: the model after `version` outer steps, the last of them made by round
    `round`. The model of `dips init` is `v0@r0`."""

    version: int
    round: int

    def __hash__(self) -> int:  # a key of many dictionaries: a quarter of the generated method's time
        return self.round

    def __eq__(self, other: object) -> bool:  # half of the generated method's time, since it makes no tuples
        if other.__class__ is not VersionId:
            return NotImplemented
        return self is other or (self.round == other.round and self.version == other.version)

    def __str__(self) -> str:
        return f"v{self.version}@r{self.round}"

    @classmethod
    def parse(cls, text: str) -> VersionId:
        """Parse `v12@r17`. Raises ValueError for anything else."""
        match = _VERSION.fullmatch(text)
        if match is None:
            raise ValueError(f"expected a version name like v12@r17, got {text!r}")
        return cls(int(match[1]), int(match[2]))


GENESIS = VersionId(0, 0)


@dataclass(frozen=True, slots=True, order=True)
class PushId:
    """One push of one incarnation of a cluster."""

    cluster: str
    inc: int
    seq: int

    def __hash__(self) -> int:
        return hash(self.cluster) ^ self.seq

    def __str__(self) -> str:
        return f"{self.cluster}/{self.inc}#{self.seq}"


@dataclass(frozen=True, slots=True, order=True)
class PullId:
    """One pull of one incarnation of a cluster; seq counts pushes and pulls together."""

    cluster: str
    inc: int
    seq: int

    def __hash__(self) -> int:
        return hash(self.cluster) ^ self.seq

    def __str__(self) -> str:
        return f"{self.cluster}/{self.inc}^{self.seq}"


def reads_only(cluster: str) -> bool:
    """Whether a cluster of this name only pulls: an export or a follower. It never trains, and nothing waits for it.

    Told by the name, which is that of its certificate and which the ledger keeps; clusters' own names have no dots.
    """
    return cluster.endswith(READERS)


def check_name(name: str, what: str) -> str:
    """Return `name` if it is valid for a run, cluster or slave: file names, metrics and logs contain it. Raises
    ConfigError.
    """
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"{what} name {name!r} is not usable: expected 1 to 63 of a-z 0-9 . _ -, "
            "beginning and ending with a letter or digit"
        )
    return name
