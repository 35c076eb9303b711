"""Brings a ledger that was restored from a backup above every name that was told since (why.md 2).

Terms, rounds and lives must never be used twice. What was told after the backup is partly on disks (journals are named
by their term, snapshots by their round) and partly only in the memory of slaves and agents, so the counters jump past
what is found by a thousand: numbers are free, mixtures of two contents under one name are not.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from dips.config import RunFile
from dips.errors import ConfigError
from dips.ids import GENESIS, VersionId
from dips.master import genesis, journal
from dips.master.ledger import Ledger
from dips.protocol.records import ClusterEnded, IncarnationGiven, LedgerState, Record, RoundEnded, RoundReserved

SPARE = 1_000  # names left out above the highest that was found: rounds that were skipped leave no trace on disks
REASON = "counters raised by dips-master recover"


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be done, and what it costs."""

    state: LedgerState
    term: int  # the next master's is above it
    round: int  # likewise
    found_term: int
    found_round: int
    abandoned: tuple[VersionId, ...]  # on disks of this machine, and not in the ledger
    head: VersionId | None  # the newest of the ledger's versions that is in all slaves' directories, if all are here
    missing: tuple[Path, ...]  # directories that are not on this machine

    def told(self) -> str:
        """The plan, for a person."""
        s = self.state
        lines = [
            f"ledger of run {s.row.run}: term {s.term}, rounds below {s.next_round}, head {s.versions[-1].version}",
            f"found on this machine: term {self.found_term}, round {self.found_round}",
            f"raised to: term {self.term}, round {self.round}, lives of clusters and slaves by {SPARE}",
            "abandoned: " + (", ".join(map(str, self.abandoned)) or "no version that lies on this machine"),
        ]
        if self.missing:
            lines.append(
                f"note: not on this machine: {', '.join(map(str, self.missing))}; if versions there are newer than "
                f"round {self.round}, say so by --round-above"
            )
        elif self.head is None:
            lines.append("no version of this ledger is in the directories of all slaves: restore those of its time too")
        else:
            lines.append(f"the run goes on from {self.head}" + self._rolled_back())
        return "\n".join(lines)

    def carry_out(self, ledger: Ledger) -> None:
        """Write the counters; each row says why."""
        ledger.start_term(above=self.term - 1)
        records: list[Record] = [
            RoundReserved(self.round, 0.0),
            RoundEnded(self.round, "skipped", REASON, (), (), 0.0),
        ]
        for role, peers in (("slave", self.state.slaves), ("cluster", self.state.clusters)):
            records += [IncarnationGiven(role, peer.name, peer.inc + SPARE, REASON) for peer in peers]
        records += [ClusterEnded(peer.name, peer.inc + SPARE, REASON, 0, 0.0) for peer in self.state.clusters]
        ledger.write(records)

    def _rolled_back(self) -> str:
        head = self.state.versions[-1].version
        return "" if self.head == head else f": {head} is not in the directories of all slaves any more"


@contextmanager
def opened(config: RunFile) -> Iterator[Ledger]:
    """Hold the run's ledger; raise ConfigError if a master does, or there is none."""
    ledger = Ledger.open(genesis.ledger_path(config), wall=time.time)
    try:
        yield ledger
    finally:
        ledger.close()


def plan(config: RunFile, ledger: Ledger, term_above: int = 0, round_above: int = 0) -> Plan:
    """Look at everything on this machine that carries a term or a round; changes nothing."""
    state = ledger.state()
    if state.row.run != config.shared.run:
        raise ConfigError(
            f"{genesis.ledger_path(config)} is the ledger of run {state.row.run!r}, the run file's is "
            f"{config.shared.run!r}"
        )
    offered = {slave.directory: _versions(slave.directory) for slave in config.slaves if slave.directory.is_dir()}
    missing = tuple(slave.directory for slave in config.slaves if slave.directory not in offered)
    on_disk = {version for versions in offered.values() for version in versions}
    found_term = max(state.term, term_above, journal.newest_term(config.master.directory))
    found_round = max(state.next_round - 1, round_above, *(v.round for v in on_disk), 0)
    ours = [v.version for v in state.versions]
    begins = not any(v.retired for v in state.versions)  # v0@r0 is offered until the first snapshots are retired
    common = [v for v in ours if (v == GENESIS and begins) or all(v in versions for versions in offered.values())]
    return Plan(
        state=state,
        term=found_term + SPARE,
        round=found_round + SPARE,
        found_term=found_term,
        found_round=found_round,
        abandoned=tuple(sorted(v for v in on_disk if v not in ours)),
        head=common[-1] if common and not missing else None,
        missing=missing,
    )


def _versions(directory: Path) -> list[VersionId]:
    """Versions by the names of a slave's snapshots; whether they are whole, the slave says when it registers."""
    found = []
    for path in directory.glob("v*@r*"):
        try:
            found.append(VersionId.parse(path.name))
        except ValueError:  # something else of that shape: `dips verify` looks into directories
            continue
    return found
