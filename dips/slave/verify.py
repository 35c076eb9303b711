"""Reads snapshots and verifies them as a slave does before it uses them, without being one (`dips verify`).

The slave may be running: snapshots that it deletes or writes meanwhile are skipped, not reported as damaged.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import xxhash

from dips.dataclass import dataclass
from dips.errors import ConfigError, CorruptSnapshot
from dips.ids import VersionId
from dips.slave.snapshot_files import read_manifest, read_through
from dips.slave.snapshot_manifest import MANIFEST_FILE, MODEL_FILE


@dataclass(frozen=True, slots=True)
class Checked:
    """The result for one slave's snapshot of one version."""

    version: VersionId
    nbytes: int
    problem: str  # "" if it is intact


def snapshot_sizes(directory: Path) -> dict[VersionId, int]:
    """Return the snapshots in a slave's directory with their bytes, ascending; raise ConfigError if there is no
    directory.
    """
    if not directory.is_dir():
        raise ConfigError(f"{directory}: expected a slave's snapshot directory, there is none")
    found = {}
    for path in directory.glob("v*@r*"):
        try:
            version = VersionId.parse(path.name)
        except ValueError:  # another name of this form
            continue
        model = path / MODEL_FILE
        found[version] = model.stat().st_size if model.exists() else 0
    return dict(sorted(found.items()))


def check_snapshot(
    directory: Path, run: str, slave: str, version: VersionId, digest: str | None, read: Callable[[int], None]
) -> Checked | None:
    """Read and verify one snapshot; return None if it was deleted meanwhile.

    digest  of its manifest, from the ledger; None: the ledger is not at hand, or does not have it
    read    called with the bytes of each piece that was read, for a progress bar
    """
    path = directory / str(version)
    nbytes = 0

    def count(layer_bytes: int) -> None:
        nonlocal nbytes
        nbytes += layer_bytes
        read(layer_bytes)

    try:
        manifest = read_manifest(path)
        mine = (run, slave, version)
        if (manifest.run, manifest.slave, manifest.version) != mine:
            raise CorruptSnapshot(
                f"it is {manifest.version} of slave {manifest.slave} in run {manifest.run}, "
                f"expected {version} of slave {slave} in run {run}"
            )
        found = xxhash.xxh3_128_hexdigest((path / MANIFEST_FILE).read_bytes())
        if digest is not None and found != digest:
            raise CorruptSnapshot(f"its manifest hashes to {found}, the ledger says {digest}")
        read_through(path, manifest, count)
    except (CorruptSnapshot, OSError) as error:
        return None if not path.exists() else Checked(version, nbytes, str(error))
    return Checked(version, nbytes, "")
