"""Snapshots written by `dips rebalance` or `dips recover` that wait for a row in the ledger to become versions.

    .rebalanced-v12@r17   complete; beside v12@r17, which holds the former layers, or without it

A crash may follow the row, so the staged snapshots are promoted by the command when it is repeated, or by the slave
when the master names its layers. Before the row a rebalanced one is ignored: the layers that the master names are still
those of v12@r17. A recovered one is of a round that the ledger has reserved, so the master orders it deleted, like the
snapshots of a round that was skipped.
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
KEPT = "old-"  # prefix with --keep-old; a person may delete these


def staged_path(directory: Path, version: VersionId) -> Path:
    return directory / f"{STAGED}{version}"


def staged_versions(directory: Path) -> list[VersionId]:
    """Return the versions with a staged snapshot here, ascending."""
    names = (path.name.removeprefix(STAGED) for path in directory.glob(STAGED + "*"))
    return sorted(version for name in names if (version := version_of(Path(name))) is not None)


def stage_snapshot(aside: Path, version: VersionId) -> None:
    """Rename a durable snapshot to its staged name, replacing another one of this version."""
    staged = staged_path(aside.parent, version)
    if staged.exists():
        shutil.rmtree(staged)
    aside.rename(staged)
    sync_path(aside.parent)


def promote_if_ours(directory: Path, version: VersionId, layers: Collection[int]) -> bool:
    """Promote a staged snapshot if it holds just these layers and the present one does not; return whether it was."""
    if _layers_of(staged_path(directory, version)) != set(layers) or _layers_of(directory / str(version)) == set(
        layers
    ):
        return False
    promote_snapshot(directory, version)
    return True


def promote_snapshot(directory: Path, version: VersionId, discard: Callable[[Path], None] | None = None) -> None:
    """Rename a staged snapshot to its final name after `discard` of the present one. It has one of the two names at any
    time.
    """
    path = directory / str(version)
    if path.exists():
        (discard or delete_snapshot)(path)
    staged_path(directory, version).rename(path)
    sync_path(directory)


def delete_snapshot(path: Path) -> None:
    """Remove a snapshot, renamed first, so that a half-removed one is never taken for a snapshot."""
    aside = path.with_name(f"{ASIDE}old-{path.name}")
    path.rename(aside)
    sync_path(path.parent)
    shutil.rmtree(aside)


def keep_snapshot(path: Path) -> None:
    """Rename a snapshot so that it is neither read nor deleted any more; earlier kept ones stay."""
    names = (path.with_name(f"{KEPT}{path.name}{again}") for again in chain([""], (f"-{n}" for n in count(2))))
    path.rename(next(name for name in names if not name.exists()))
    sync_path(path.parent)


def _layers_of(path: Path) -> set[int] | None:
    """Return the layers in a snapshot's manifest; None if there is none."""
    try:
        return {record.index for record in read_manifest(path).layers}
    except CorruptSnapshot:
        return None
