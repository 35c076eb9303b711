"""The steps of `dips rebalance`, in order: lock everything, read, plan, copy, read back, write the row, clean up.

At any interruption the old placement is complete until the row is written, and the new placement afterwards; a
repetition starts again and skips completed steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from dips.cgroup import available_memory
from dips.config import RunFile, SlaveSection
from dips.errors import ConfigError
from dips.files import PidLock
from dips.ids import GENESIS, VersionId
from dips.master.genesis import check_is_of_run, ledger_path
from dips.master.ledger import Ledger
from dips.master.local_audit import make_local_row
from dips.protocol.manifest import Manifest
from dips.protocol.rebalancing import RebalancePlan, plan_rebalance
from dips.protocol.records import LedgerState
from dips.protocol.run_state import OLD_LEDGER
from dips.slave import staging
from dips.slave.machine import memory_of
from dips.store.files import delete_version, keep_version, promote_version

MOST_MOVES = 40  # layers that the plan lists by name


@dataclass(frozen=True, slots=True)
class Rebalancing:
    """The plan of a rebalance, and the copies on disk that it needs."""

    plan: RebalancePlan
    run: str
    model: Manifest
    copies: tuple[staging.VersionPart, ...]
    kept: Mapping[str, staging.Placed]  # snapshots of slaves whose layers do not change

    @property
    def changes_nothing(self) -> bool:
        return not self.copies and set(self.plan.before) == set(self.plan.after)


def show_plan(after: RunFile, before: RunFile | None) -> None:
    """Print the plan of `rebalance_run`; raises the errors that it would raise before copying."""
    with closing(Ledger.open(ledger_path(after), readonly=True)) as ledger:
        _describe(_plan(after, before, ledger), after)


def rebalance_run(after: RunFile, before: RunFile | None, keep_old: bool) -> None:
    """Move the layers to the slaves of `after`; `before` gives the directories of slaves that `after` does not name.

    Raises ConfigError if a daemon runs or a file is not usable, CorruptSnapshot, FailedDisk: then nothing has changed.
    """
    sections = _sections(after, before)
    discard = keep_version if keep_old else delete_version
    with _holding(after, sections) as ledger:
        _finish_last(ledger, sections, discard)
        work = _plan(after, before, ledger)
        _describe(work, after)
        version = work.plan.version
        if not work.changes_nothing:
            digests = _make_snapshots(work)
            ledger.start_term()  # from here on a former master that was taken for dead cannot write
            placed = ", ".join(name for name, _ in work.plan.after)
            ledger.write_records([*work.plan.records(digests), make_local_row("rebalance", f"to {placed}")])
            for copy in work.copies:
                promote_version(copy.directory, version, discard)
        in_use = {section.directory.resolve() for section in after.slaves}
        for section in sections:
            present = version if section.directory.resolve() in in_use else None
            staging.clean_directory(section.directory, work.run, present, discard)
        names = ", ".join(section.name for section in after.slaves)
        print(f"{version} lies on {names}: start the master and these slaves with the new run file")


def _sections(after: RunFile, before: RunFile | None) -> list[SlaveSection]:
    """Return every old and new slave once per directory. Raises ConfigError if a directory is missing or used by two
    slaves.
    """
    found: dict[Path, SlaveSection] = {}
    for section in (*after.slaves, *(before.slaves if before else ())):
        if not section.directory.is_dir():
            if section in after.slaves:
                raise ConfigError(
                    f"slaves.{section.name}.directory: {section.directory} is not here: mount it, or make it if it is "
                    "to be new"
                )
            continue  # find_placed raises if it is needed
        owner = found.setdefault(section.directory.resolve(), section)
        if owner.name != section.name:
            raise ConfigError(
                f"directory: {section.directory} is said to be of {owner.name} and of {section.name}: each slave has "
                "its own"
            )
    return list(found.values())


@contextmanager
def _holding(after: RunFile, sections: Sequence[SlaveSection]) -> Iterator[Ledger]:
    """Lock the ledger and all directories, so that no daemon starts meanwhile. Raises ConfigError naming all
    that run.
    """
    running: list[str] = []
    with ExitStack() as stack:
        try:
            ledger = Ledger.open(ledger_path(after), wall=time.time)
            stack.callback(ledger.close)
        except ConfigError as error:
            running.append(str(error))
        for section in sections:
            try:
                lock = PidLock(section.lock, busy=f"{section.name} runs on {section.directory}", advice="stop it first")
                stack.callback(lock.close)
            except ConfigError as error:
                running.append(str(error))
            except OSError as error:
                running.append(f"slaves.{section.name}.directory: {section.directory} cannot be used: {error}")
        if running:
            raise ConfigError("; ".join(running))
        yield ledger


def _finish_last(ledger: Ledger, sections: Sequence[SlaveSection], discard: Callable[[Path], None]) -> None:
    """Finish an interrupted rebalance whose row is in the ledger: rename its staged snapshots."""
    digests, placed = ledger.read_digests(), dict(ledger.run_row().placement)
    for section in sections:
        if section.name in placed:
            staging.finish_staged(section.directory, section.name, digests, lambda e: print(f"note: {e}"), discard)


def _plan(after: RunFile, before: RunFile | None, ledger: Ledger) -> Rebalancing:
    state, digests = ledger.read_state(), ledger.read_digests()
    for run_file in (after, before):
        if run_file is not None:
            check_is_of_run(run_file, state.row)
    run, model = state.row.run, Manifest.from_json(state.row.manifest)
    held = {
        name: staging.find_placed(_where(name, after, before), run, name, layers, digests)
        for name, layers in state.row.placement
    }
    _check_ledger_is_new(state, held)
    plan = plan_rebalance(state, model, held, [section.name for section in after.slaves])
    _check_memory(plan, model, after)
    if plan.version == GENESIS:  # read from the initial model, independent of the placement
        return Rebalancing(plan, run, model, (), {})
    holder = {layer: held[name][plan.version] for name, layers in plan.before for layer in layers}
    incarnations, was = dict(plan.incarnations), dict(plan.before)
    copies, kept = [], {}
    for name, layers in plan.after:
        directory = after.slave_section(name).directory
        if was.get(name) == layers and held[name][plan.version][0].parent.resolve() == directory.resolve():
            kept[name] = held[name][plan.version]
        else:
            sources = {layer: holder[layer] for layer in layers}
            owner = (run, name, incarnations[name])
            copies.append(staging.plan_copy(owner, plan.version, directory, model, sources))
    return Rebalancing(plan, run, model, tuple(copies), kept)


def _where(name: str, after: RunFile, before: RunFile | None) -> list[Path]:
    """Return the directories that may hold a slave's snapshots, by the new run file or the old one."""
    sections = [s for f in (after, before) if f is not None for s in f.slaves if s.name == name]
    if not sections:
        known = "the run file of --old does not name it either" if before else "name its run file by --old"
        raise ConfigError(f"{name} holds layers, and the new run file does not say where: {known}")
    return list(dict.fromkeys(section.directory for section in sections))


def _check_ledger_is_new(state: LedgerState, held: Mapping[str, Collection[VersionId]]) -> None:
    """Raise ConfigError if a snapshot's round is not reserved in this ledger, as the master does when slaves
    register.
    """
    for name, versions in held.items():
        newest = max((version.round for version in versions), default=0)
        if newest >= state.next_round:
            raise ConfigError(
                f"{name} holds a version of round {newest}, this ledger knows rounds below {state.next_round}: "
                f"{OLD_LEDGER}"
            )


def _check_memory(plan: RebalancePlan, model: Manifest, after: RunFile) -> None:
    """Compare each slave's memory sum with its `memory_bytes`, or with this machine's memory."""
    for name, layers in plan.after:
        section = after.slave_section(name)
        memory = memory_of(section, sum(model.layers[layer].numel for layer in layers), after.shared.pull_codec)
        try:
            memory.require_memory(section.memory_bytes or available_memory())
        except ConfigError as error:
            hint = "" if section.memory_bytes else "; if its machine is another one, say slaves.memory_bytes"
            raise ConfigError(f"slaves.{name}: {error}{hint}") from error


def _make_snapshots(work: Rebalancing) -> dict[str, str]:
    """Copy and verify all snapshots of the new placement; return their digests. On failure nothing is left behind."""
    total = 2 * sum(copy.nbytes for copy in work.copies) + sum(manifest.nbytes for _, manifest in work.kept.values())
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=total)
        return staging.stage_parts(
            work.copies,
            work.kept,
            lambda nbytes: progress.advance(task, nbytes),
            lambda what: progress.update(task, description=what),
        )


# ---- the plan, for a person ------------------------------------------------------------------------------------------


def _describe(work: Rebalancing, after: RunFile) -> None:
    """Print the moves, the snapshots to be written, and each slave's memory sum."""
    plan, model = work.plan, work.model
    print(f"run {work.run}: {plan.version} lies on {', '.join(name for name, _ in plan.before)}")
    if plan.undone:
        print(f"undone, since they are not on every disk: {', '.join(map(str, plan.undone))}")
    for move in plan.moves[:MOST_MOVES]:
        layer = model.layers[move.layer]
        print(f"  {layer.name}: {move.source} → {move.target}, {_megabytes(2 * layer.nbytes)}")
    if len(plan.moves) > MOST_MOVES:
        print(f"  and {len(plan.moves) - MOST_MOVES} more")
    moved = sum(2 * model.layers[move.layer].nbytes for move in plan.moves)
    written = sum(copy.nbytes for copy in work.copies)
    print(f"moved: {len(plan.moves)} of {len(model.layers)} layers, {_megabytes(moved)} of θ and m")
    print(f"written: {len(work.copies)} whole snapshots, {_megabytes(written)}")
    for name, layers in plan.after:
        numel = sum(model.layers[layer].numel for layer in layers)
        memory = memory_of(after.slave_section(name), numel, after.shared.pull_codec)
        print(f"{name}: {len(layers)} layers, memory {memory.describe_sum()}")


def _megabytes(nbytes: int) -> str:
    return f"{nbytes / 1e6:.1f} MB"
