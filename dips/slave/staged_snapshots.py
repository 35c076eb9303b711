"""Snapshots that `dips rebalance` or `dips recover` has written, until its row in the ledger makes them a version.

    .rebalanced-v12@r17   whole; beside v12@r17, which holds the layers of before, or without it

A crash may follow the row, so whoever learns of it puts them in their place: the command when it is repeated, or the
slave when the master names its layers. Before the row a rebalanced one is passed by: the layers that the master names
are still those of v12@r17. A recovered one is of a round that the ledger has reserved, so the master has it deleted,
like what was persisted in a round that broke.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection
from itertools import chain, count
from pathlib import Path

from dips.errors import CorruptSnapshot
from dips.fsync import sync_path
from dips.ids import VersionId
from dips.slave.snapshot_files import ASIDE, read_manifest, version_of

STAGED = ".rebalanced-"
KEPT = "old-"  # --keep-old: what a person may delete


def staged_path(directory: Path, version: VersionId) -> Path:
    return directory / f"{STAGED}{version}"


def staged_versions(directory: Path) -> list[VersionId]:
    """The versions of which a snapshot is staged here, ascending."""
    names = (path.name.removeprefix(STAGED) for path in directory.glob(STAGED + "*"))
    return sorted(version for name in names if (version := version_of(Path(name))) is not None)


def stage_snapshot(aside: Path, version: VersionId) -> None:
    """Give what was written aside, durably, its staged name; another try's of this version goes."""
    staged = staged_path(aside.parent, version)
    if staged.exists():
        shutil.rmtree(staged)
    aside.rename(staged)
    sync_path(aside.parent)


def promote_if_ours(directory: Path, version: VersionId, layers: Collection[int]) -> bool:
    """Put a staged snapshot in its place if it holds just these layers and what is there does not."""
    if _layers_of(staged_path(directory, version)) != set(layers) or _layers_of(directory / str(version)) == set(
        layers
    ):
        return False
    promote_snapshot(directory, version)
    return True


def promote_snapshot(directory: Path, version: VersionId, discard: Callable[[Path], None] | None = None) -> None:
    """Put a staged snapshot in its place; `discard` what was there. It is under one of the two names at any time."""
    path = directory / str(version)
    if path.exists():
        (discard or delete_snapshot)(path)
    staged_path(directory, version).rename(path)
    sync_path(directory)


def delete_snapshot(path: Path) -> None:
    """Remove a snapshot, first out of its name, so that a half-removed one is never taken for one."""
    aside = path.with_name(f"{ASIDE}old-{path.name}")
    path.rename(aside)
    sync_path(path.parent)
    shutil.rmtree(aside)


def keep_snapshot(path: Path) -> None:
    """Move a snapshot out of its name: nobody reads it any more, and nobody deletes it; beside what was kept before."""
    names = (path.with_name(f"{KEPT}{path.name}{again}") for again in chain([""], (f"-{n}" for n in count(2))))
    path.rename(next(name for name in names if not name.exists()))
    sync_path(path.parent)


def _layers_of(path: Path) -> set[int] | None:
    """Which layers a snapshot says that it holds; None if there is none."""
    try:
        return {record.index for record in read_manifest(path).layers}
    except CorruptSnapshot:
        return None
