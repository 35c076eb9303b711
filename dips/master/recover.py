"""Raises the counters of a ledger that was restored from a backup above every name that was used since.

Terms, rounds and incarnations must never be used twice. Those used after the backup are partly on disks (journals are
named by their term, snapshots by their round) and partly only in the memory of slaves and agents, so the counters jump
a thousand past the highest that is found: unused numbers are free, while two contents with one name are not.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import xxhash

from dips.config import RunFile, SlaveSection
from dips.dataclass import dataclass
from dips.errors import ConfigError, FailedMirror
from dips.ids import GENESIS, VersionId
from dips.master import genesis, journal
from dips.master.ledger import Ledger
from dips.master.local_audit import make_local_row
from dips.master.restore import SPARE, newest_term
from dips.outer_step import NO_STEP
from dips.protocol.enums import Role, RoundResult
from dips.protocol.records import (
    ClusterEnded,
    IncarnationGiven,
    LedgerRestored,
    LedgerState,
    Record,
    RoundEnded,
    RoundReserved,
    VersionCommitted,
    lies_in,
)
from dips.store.mirror import MirrorStore

REASON = "counters raised by dips-master recover"
MANIFEST_FILE = "manifest.json"  # in each snapshot of a slave, and in each copy of one
MOST_MANIFEST_BYTES = 64 << 20  # some 300 bytes for each layer and parameter: limits what is read from a mirror


@dataclass(frozen=True, slots=True)
class RecoveryPlan:
    """The actions of a recovery, and their cost."""

    state: LedgerState
    term: int  # the next master's term is above it
    round: int  # the next round is above it
    found_term: int
    found_round: int
    abandoned: tuple[VersionId, ...]  # on disks of this machine, not in the ledger, and not adopted
    head: VersionId | None  # the newest of the ledger's versions that all slaves have, here or in mirrors, if known
    newer: VersionId | None  # the newest that all slaves here have, here or in mirrors, and was made after the backup
    missing: tuple[Path, ...]  # directories that are not on this machine
    unread: tuple[str, ...]  # mirrors that cannot be read, and why
    adopted: VersionId | None
    digests: tuple[tuple[str, str], ...]  # of the adopted version: (slave, digest of its snapshot's manifest)

    def describe_lines(self) -> str:
        """Return the plan as lines for a person."""
        s = self.state
        lines = [
            f"ledger of run {s.row.run}: term {s.term}, rounds below {s.next_round}, head {s.versions[-1].version}",
            f"found on this machine: term {self.found_term}, round {self.found_round}",
            f"raised to: term {self.term}, round {self.round}, incarnations of clusters and slaves by {SPARE}",
            f"abandoned: {', '.join(map(str, self.abandoned)) or 'no version that lies on this machine'}",
        ]
        if self.missing:
            elsewhere = ", ".join(map(str, self.missing))
            lines.append(f"note: not on this machine: {elsewhere}; name what is newer there by --round-above")
        lines += [f"note: {why}; name what is newer there by --round-above or --term-above" for why in self.unread]
        return "\n".join([*lines, self._describe_next_head()])

    def carry_out(self, ledger: Ledger) -> None:
        """Write the counters; each row has the reason."""
        ledger.start_term(above=self.term - 1)
        records: list[Record] = self._adoption_records() if self.adopted else []
        records += [RoundReserved(self.round, 0.0), RoundEnded(self.round, RoundResult.SKIPPED, REASON, (), (), 0.0)]
        peers_inc = [peer.inc for peer in (*self.state.slaves, *self.state.clusters)]
        records.append(LedgerRestored(REASON, self.round, self.round, max(peers_inc, default=0) + SPARE))
        for role, peers in ((Role.SLAVE, self.state.slaves), (Role.CLUSTER, self.state.clusters)):
            records += [IncarnationGiven(role, peer.name, peer.inc + SPARE, REASON) for peer in peers]
        for peer in self.state.clusters:  # with the one that lived when the backup was made end its leases
            living = () if peer.ended else (peer.inc,)
            records += [ClusterEnded(peer.name, inc, REASON, 0, 0.0) for inc in (*living, peer.inc + SPARE)]
        adopted = f" --adopt {self.adopted}" if self.adopted else ""
        records.append(make_local_row("dips-master recover", f"term {self.term}, round {self.round}{adopted}"))
        ledger.write_records(records)

    def _describe_next_head(self) -> str:
        head = self.state.versions[-1].version
        if self.adopted:
            return f"the run goes on from {self.adopted}, adopted; whose pushes are in it since {head} nobody knows"
        offer = f"; or from {self.newer} with --adopt {self.newer}" if self.newer else ""
        if self.missing:
            return (
                f"the run goes on from the newest version of this ledger that all slaves offer, at most {head}{offer}"
            )
        if self.head is None:
            lacking = "no version of this ledger is in all slaves' directories or mirrors"
            return f"{lacking}: put snapshots of its time back{offer}"
        gone = "" if self.head == head else f": {head} is not in all slaves' directories or mirrors any more"
        return f"the run goes on from {self.head}{gone}{offer}"

    def _adoption_records(self) -> list[Record]:
        """Return the rows of a version without folds: its bytes are on the disks, its history is lost."""
        assert self.adopted is not None
        s = self.state
        row = VersionCommitted(
            self.adopted, s.versions[-1].version, True, (), (), NO_STEP, 0.0, False, self.digests, s.penalty, s.history,
            0.0,
        )  # fmt: skip
        return [RoundReserved(self.adopted.round, 0.0), row]


@contextmanager
def open_ledger(config: RunFile) -> Iterator[Ledger]:
    """Open and lock the run's ledger. Raises ConfigError if a master has locked it, or if it does not exist."""
    ledger = Ledger.open(genesis.ledger_path(config), wall=time.time)
    try:
        yield ledger
    finally:
        ledger.close()


def make_plan(
    config: RunFile, ledger: Ledger, term_above: int = 0, round_above: int = 0, adopt: VersionId | None = None
) -> RecoveryPlan:
    """Find everything on this machine and in mirrors that has a term or a round; changes nothing.

    Versions that are only in a mirror count, since the slave restores them. Raise ConfigError if the ledger is of
    another run, or `adopt` is not newer than it or missing both on some slave and in its mirror.
    """
    state = ledger.read_state()
    if state.row.run != config.shared.run:
        raise ConfigError(
            f"{genesis.ledger_path(config)} is the ledger of run {state.row.run!r}, the run file's is "
            f"{config.shared.run!r}"
        )
    mirrored, unread = _list_mirrors(config)
    here = [s for s in config.slaves if s.directory.is_dir()]
    offered = {s.name: {*_snapshot_versions(s.directory), *mirrored.get(s.name, ())} for s in here}
    ours, on_disk = [v.version for v in state.versions], set[VersionId]().union(*offered.values(), *mirrored.values())
    common = [v for v in sorted(on_disk) if all(v in versions for versions in offered.values())]
    newer = [v for v in common if _is_newer(v, state)]
    if adopt is not None:
        _check_adoptable(adopt, state, {name: adopt in versions for name, versions in offered.items()})
    begins = not any(v.retired for v in state.versions)  # v0@r0 is offered until the first snapshots are retired
    held = [v for v in ours if v in common or (v == GENESIS and begins)]
    missing = tuple(s.directory for s in config.slaves if s.name not in offered)
    mirrored_term, unread_ledger = _find_mirrored_term(config)
    found_term = max(state.term, term_above, journal.newest_term(config.master.directory), mirrored_term)
    found_round = max(state.next_round - 1, round_above, *(v.round for v in on_disk), adopt.round if adopt else 0)
    return RecoveryPlan(
        state=state,
        term=found_term + SPARE,
        round=found_round + SPARE,
        found_term=found_term,
        found_round=found_round,
        abandoned=tuple(v for v in sorted(on_disk) if v not in ours and v != adopt),
        head=held[-1] if held and not missing else None,
        newer=newer[-1] if newer else None,
        missing=missing,
        unread=(*unread_ledger, *unread),
        adopted=adopt,
        digests=tuple((s.name, _manifest_digest(config, s, adopt)) for s in here if adopt),
    )


def _is_newer(version: VersionId, state: LedgerState) -> bool:
    """Return whether a version may have been made after this ledger's end; or after that of the copy from which it was
    restored, if none has been made since.
    """
    head, number = state.versions[-1].version, version.round
    unknown = number >= state.next_round or lies_in(number, state.unknown_rounds)
    return unknown and number > head.round and version.version > head.version


def _check_adoptable(version: VersionId, state: LedgerState, held: dict[str, bool]) -> None:
    if not _is_newer(version, state):
        raise ConfigError(
            f"--adopt: {version} is not newer than this ledger, whose head is {state.versions[-1].version} and whose "
            f"next round is {state.next_round}: what it does not name of its own time never was a version"
        )
    lacking = [name for name, holds in held.items() if not holds]
    if lacking:
        raise ConfigError(f"--adopt: {version} is not in the directory of {', '.join(lacking)}, nor in its mirror")


def _manifest_digest(config: RunFile, slave: SlaveSection, version: VersionId) -> str:
    """Return the digest of the snapshot's manifest in the slave's directory, or else of the copy in its mirror."""
    path = slave.directory / str(version) / MANIFEST_FILE
    store = _mirror_of(config, slave)
    if path.exists() or store is None:
        return xxhash.xxh3_128_hexdigest(path.read_bytes())
    content = store.read_file(f"{version}/{MANIFEST_FILE}", MOST_MANIFEST_BYTES)
    if content is None:
        raise ConfigError(f"--adopt: {store.url}/{version} has no {MANIFEST_FILE}: it was not copied to its end")
    return xxhash.xxh3_128_hexdigest(content)


def _mirror_of(config: RunFile, slave: SlaveSection) -> MirrorStore | None:
    return None if slave.mirror is None else MirrorStore(slave.mirror, config.shared.run, slave.name)


def _find_mirrored_term(config: RunFile) -> tuple[int, tuple[str, ...]]:
    """Return the newest term in the ledger's mirror, which a standby or a restore may have claimed, or why it cannot be
    read.
    """
    store = genesis.mirror_of(config)
    try:
        return (0 if store is None else newest_term(store)), ()
    except FailedMirror as error:
        return 0, (f"master.mirror: {error}",)


def _list_mirrors(config: RunFile) -> tuple[dict[str, list[VersionId]], tuple[str, ...]]:
    """Return the versions in each slave's mirror, by their names, and why mirrors cannot be read."""
    found, unread = dict[str, list[VersionId]](), list[str]()
    for slave in config.slaves:
        store = _mirror_of(config, slave)
        try:
            if store is not None:
                found[slave.name] = _versions_of(store.list_names())
        except FailedMirror as error:
            unread.append(f"slaves.{slave.name}.mirror: {error}")
    return found, tuple(unread)


def _snapshot_versions(directory: Path) -> list[VersionId]:
    """Return the versions of a slave's snapshots by their names; whether they are complete is checked when it
    registers.
    """
    return _versions_of(path.name for path in directory.glob("v*@r*"))


def _versions_of(names: Iterable[str]) -> list[VersionId]:
    found = []
    for name in names:
        try:
            found.append(VersionId.parse(name))
        except ValueError:  # another name of this form: `dips verify` checks directories
            continue
    return found
