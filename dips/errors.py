"""All errors of Di-PS, by fault and remedy; one table maps class → gRPC status → exit code → advice.

A message says what was expected, what came, and from whom. A lost round is a value, not an exception.
"""

from __future__ import annotations

import errno
from dataclasses import dataclass


class DipsError(Exception):
    """Base class of all errors that Di-PS raises deliberately."""


class ConfigError(DipsError):
    """The configuration is wrong: the process does not start; the message names file and key."""


class DifferentModel(ConfigError):
    """A cluster's model is not the run's."""


class ProtocolError(DipsError):
    """A message violated the protocol."""


class LocalProtocolError(ProtocolError):
    """This process violated the protocol: a bug."""


class RemoteProtocolError(ProtocolError):
    """The peer violated the protocol: drop the peer, serve the others."""


class Stale(DipsError):
    """A message is out of date: refresh or rejoin."""


class StaleTerm(Stale):
    """An order of a master that has a successor."""


class StaleIncarnation(Stale):
    """A message of an earlier incarnation of a cluster or slave."""


class StalePush(Stale):
    """A push or pull whose seq is at or below the highest closed one."""


class StaleVersion(Stale):
    """A version that is not, or no longer, held."""


class Unavailable(DipsError):
    """A process does not answer, which is no fault: ask again, with backoff."""


class UnavailableMaster(Unavailable):
    """The master does not answer."""


class UnavailableSlave(Unavailable):
    """A slave does not answer."""


class UnresponsiveSlave(UnavailableSlave):
    """A slave did not answer an order before its deadline."""


class FailedDisk(DipsError):
    """A slave's disk failed: it is full, read-only or broken."""


class FailedMirror(FailedDisk):
    """A mirror is full, gone or failing; the mirrored process continues."""


class Busy(DipsError):
    """A pool or a lane is full: wait."""


class BusyDisk(Busy):
    """A disk is still working on earlier requests, which may take any time."""


class UnreadSnapshot(BusyDisk):
    """A snapshot on a disk must be read and verified before it can be used."""


class Denied(DipsError):
    """This identity may not do this."""


class Corrupt(DipsError):
    """Bytes that are wrong, and will be wrong when read again."""


class CorruptFrame(Corrupt):
    """A frame whose checksum, size or place is wrong."""


class CorruptSnapshot(Corrupt):
    """A snapshot whose digest is wrong, or of another run."""


class CorruptManifest(Corrupt):
    """A manifest that cannot be read, or that is not the ledger's."""


class CorruptLedger(Corrupt):
    """A ledger whose pages cannot be read, or whose rows are not those written."""


class Diverged(DipsError):
    """The model has values that are not finite, and this job cannot repair it by itself."""


# An OSError with one of these says that a disk is full, read-only or broken: a FailedDisk, wherever it was raised.
OF_THE_DISK = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO})


@dataclass(frozen=True, slots=True)
class Treatment:
    """The treatment of a class of error: gRPC status name, exit code (sysexits.h), metric label, advice."""

    status: str
    exit_code: int
    label: str
    advice: str  # "": the message contains it


# The first row whose class matches is used, so subclasses come before their bases.
TREATMENTS: tuple[tuple[type[DipsError], Treatment], ...] = (
    (DifferentModel, Treatment("INVALID_ARGUMENT", 78, "config", "train the model that `dips init` made the run of")),
    (ConfigError, Treatment("INVALID_ARGUMENT", 78, "config", "")),
    (LocalProtocolError, Treatment("INTERNAL", 70, "local_protocol", "report this: it is a bug of Di-PS")),
    (RemoteProtocolError, Treatment("INVALID_ARGUMENT", 76, "remote_protocol", "the peer is at fault: see its log")),
    (Stale, Treatment("FAILED_PRECONDITION", 75, "stale", "refresh or rejoin")),
    (Unavailable, Treatment("UNAVAILABLE", 69, "unavailable", "start who is missing, or wait for it; then try again")),
    (FailedDisk, Treatment("ABORTED", 74, "disk", "make room on that disk, or repair it")),
    (Busy, Treatment("RESOURCE_EXHAUSTED", 75, "busy", "wait and ask again")),
    (Denied, Treatment("PERMISSION_DENIED", 77, "denied", "check whose name this process bears")),
    (Corrupt, Treatment("DATA_LOSS", 65, "corrupt", "use an intact copy")),
    (DipsError, Treatment("UNKNOWN", 1, "other", "see the message")),
)


def treatment_of(error: DipsError) -> Treatment:
    """Return how `error` is shown and counted."""
    return next(t for cls, t in TREATMENTS if isinstance(error, cls))


def class_named(name: str) -> type[DipsError] | None:
    """Return the class of this module with the name that a peer sent; None for an unknown name."""
    found = globals().get(name)
    return found if isinstance(found, type) and issubclass(found, DipsError) else None
