"""The command `dips verify`: checks all snapshots against the ledger, bit for bit."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.table import Table

from dips.commands.options import AS_JSON, CONFIG, open_ledger
from dips.config import RunFile, SlaveSection, load_run
from dips.errors import ConfigError
from dips.ids import GENESIS, VersionId

EXIT_NOT_INTACT = 65
INTACT, MISSING = "intact", "missing"

Results = Mapping[str, Mapping[VersionId, str]]  # by slave and version: INTACT, MISSING, or what is wrong


@dataclass(frozen=True, slots=True)
class Known:
    """The versions in the ledger; empty if the ledger is not here."""

    lineage: tuple[VersionId, ...]  # not retired, oldest first
    durable: VersionId | None  # the newest version announced as durable; None: no ledger
    digests: Mapping[tuple[int, str], str]


def verify(
    config: CONFIG,
    slave: Annotated[
        str | None, typer.Option("--slave", help="Check only this slave; default all on this machine.")
    ] = None,
    as_json: AS_JSON = False,
) -> None:
    """Read all snapshots, and compare every digest.

    Each layer's bytes are compared with the snapshot's manifest, and the manifest with the ledger, for every slave in
    the run file whose directory is on this machine. Needs some MiB of memory and one read of the disk; slaves and
    master may be running. Without a ledger here (on a slave's own machine) snapshots are compared with their manifests.

    A slave does the same when it starts, and skips damaged snapshots: then the run is rolled back to the newest
    version that every slave has intact, which this command names.

    Exit codes: 0 the newest durable version is intact; 65 it is not, or neither a snapshot nor the ledger is here; 78
    no directory is here, or no such slave, or one directory is named for several (--slave).

    \b
    Example:
      dips verify --config dips.yaml
      dips verify --config dips.yaml --slave slave-0
    """
    run_file = load_run(config)
    known, here = _known_versions(run_file), _local_slaves(run_file, slave)
    results = _read_snapshots(run_file, here, known)
    verdict, code = judge_results(results, known, len(here) == len(run_file.slaves))
    if as_json:
        found = {name: {str(version): said for version, said in of.items()} for name, of in results.items()}
        print(json.dumps({"intact": not code, "verdict": verdict, "slaves": found}))
    else:
        Console().print(_results_table(results, known))
        print(verdict)
    if code:
        raise typer.Exit(code)


def judge_results(results: Results, known: Known, all_here: bool) -> tuple[str, int]:
    """Return whether the newest durable version can be served, else which version could be, with the exit code."""
    on_disk = sorted({v for found in results.values() for v in found})
    if known.durable is None and not on_disk:
        none = f"no snapshot is on {', '.join(results)}, and without the ledger nothing says which there should be"
        return none, EXIT_NOT_INTACT
    newest = known.durable if known.durable is not None else on_disk[-1]
    if newest == GENESIS:
        return "v0@r0 is read from the initial model; there is no snapshot to verify", 0
    bad = {name: found.get(newest, MISSING) for name, found in results.items() if found.get(newest) != INTACT}
    where = "on all slaves" if all_here else f"on {', '.join(results)}"
    if not bad:
        return f"the newest durable version {newest} is intact {where}", 0
    candidates = known.lineage or tuple(on_disk)
    whole = [v for v in candidates if all(found.get(v) == INTACT for found in results.values())]
    back = whole[-1] if whole else GENESIS
    problems = "; ".join(f"{name}: {problem}" for name, problem in bad.items())
    here = "" if all_here else ", if the other slaves have it"
    verdict = (
        f"the newest durable version {newest} is not intact ({problems}); the run would be rolled back to {back}{here}"
    )
    return verdict, EXIT_NOT_INTACT


def _known_versions(config: RunFile) -> Known:
    from dips.master.genesis import ledger_path

    path = ledger_path(config)
    if not path.exists():
        print(f"note: no ledger at {path}: snapshots are held against their own manifests only", file=sys.stderr)
        return Known((), None, {})
    with open_ledger(config) as ledger:
        versions = ledger.read_state().versions
        lineage = tuple(v.version for v in versions if not v.retired and v.version != GENESIS)
        durable = [v.version for v in versions if v.durable]
        return Known(lineage, durable[-1] if durable else GENESIS, ledger.read_digests())


def _local_slaves(config: RunFile, only: str | None) -> list[SlaveSection]:
    if only is not None:
        return [config.slave_section(only)]
    here = [s for s in config.slaves if s.directory.is_dir()]
    for away in (s for s in config.slaves if not s.directory.is_dir()):
        print(f"note: {away.name} is not on this machine ({away.directory})", file=sys.stderr)
    if not here:
        raise ConfigError("no slave's directory is on this machine: run this where they are")
    owners = dict[Path, str]()
    for s in here:
        if (owner := owners.setdefault(s.directory.resolve(), s.name)) != s.name:
            raise ConfigError(
                f"{s.directory} is the directory of {owner} and of {s.name}, which have machines of their own: name "
                "the one that is here by --slave"
            )
    return here


def _read_snapshots(config: RunFile, slaves: Sequence[SlaveSection], known: Known) -> Results:
    from dips.store import files as reading

    found = {slave.name: reading.version_sizes(slave.directory) for slave in slaves}
    results: dict[str, dict[VersionId, str]] = {}
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("reading", total=sum(size for sizes in found.values() for size in sizes.values()))
        for slave in slaves:
            mine = results.setdefault(slave.name, {})
            for version in found[slave.name]:
                progress.update(task, description=f"{slave.name} {version}")
                digest = known.digests.get((version.round, slave.name))
                checked = reading.check_version(
                    slave.directory, config.shared.run, slave.name, version, digest, lambda n: progress.advance(task, n)
                )
                if checked is not None:
                    mine[version] = checked.problem or INTACT
    return results


def _results_table(results: Results, known: Known) -> Table:
    table = Table(title="snapshots", title_justify="left", title_style="bold")
    for column in ("version", "ledger", *results):
        table.add_column(column, overflow="fold")
    for version in sorted({*known.lineage, *(v for found in results.values() for v in found)}):
        cells = [found.get(version, MISSING) for found in results.values()]
        says = "committed" if version in known.lineage else ("–" if known.durable is None else "no version, or retired")
        style = "" if all(cell == INTACT for cell in cells) else "red" if version in known.lineage else "dim"
        table.add_row(str(version), says, *cells, style=style)
    return table
