"""The snapshots of one slave on its disk: one directory for each version, `v12@r17/`, and those staged for it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection, Sequence
from itertools import chain, count
from pathlib import Path

import xxhash

from dips.errors import ConfigError, CorruptSnapshot, LocalProtocolError, Stale
from dips.files import PidLock, make_directory, sync_path
from dips.ids import GENESIS, VersionId
from dips.outer.kernel_pool import WorkMeter
from dips.protocol.manifest import Manifest
from dips.slave import tensorfile
from dips.slave.initial_model import InitialModel
from dips.slave.ports import Arrays
from dips.slave.snapshot_files import (
    ASIDE,
    MANIFEST_FILE,
    MODEL_FILE,
    THETA,
    SnapshotManifest,
    digest_of,
    map_layers,
    read_layer,
    read_manifest,
    read_through,
    version_of,
    write_snapshot,
)
from dips.slave.tensorfile import Reader
from dips.telemetry.logs import Log

# ---- staged snapshots -----------------------------------------------------------------------------------------------
# Snapshots written by `dips rebalance` or `dips recover` that wait for a row in the ledger to become versions.
#
#     .rebalanced-v12@r17   complete; beside v12@r17, which holds the former layers, or without it
#
# A crash may follow the row, so the staged snapshots are promoted by the command when it is repeated, or by the slave
# when the master names its layers. Before the row a rebalanced one is ignored: the layers that the master names are
# still those of v12@r17. A recovered one is of a round that the ledger has reserved, so the master orders it deleted,
# like the snapshots of a round that was skipped.


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


# ---- snapshots ------------------------------------------------------------------------------------------------------
# The snapshots of one slave on its disk: one directory for each version, `v12@r17/`, of model.safetensors and
# manifest.json.
#
# A snapshot is written aside, fsynced and renamed, so it is complete or it is not there, and it is used only after
# every digest agrees. Half-written, damaged and foreign ones are skipped with a log line, and left for a person. One
# process locks the directory as long as it runs. The master decides what is written and deleted; by itself a slave
# removes only what it had not finished writing.
#
# v0@r0 has no snapshot: see initial_model.py.


LISTING_BYTES = 4096  # for each parameter, in the header and manifest of a snapshot: name, shape, offsets, digests
_LOCK = ".lock"


class Snapshots:
    """Implements `ports.Disk` with files; used by one thread, and by a second for one `write_snapshot` at a time."""

    def __init__(
        self,
        directory: Path,
        run: str,
        slave: str,
        initial_model: Path | None,
        log: Log,
        meter: WorkMeter | None = None,
    ) -> None:
        """Lock the directory for this process; raise ConfigError, naming it, if another slave holds it."""
        self._meter = meter or WorkMeter()
        self._directory, self._run, self._slave = directory, run, slave
        self._initial = InitialModel(directory, run, initial_model, self._meter.add)
        self._log = log
        self._said_missing = False
        self._whole: set[VersionId] = set()  # verified, or written by this process
        self._bad: dict[VersionId, object] = {}  # skipped, with the state of their files then; logged once
        self._manifest: Manifest | None = None
        self._genesis: dict[int, str] = {}
        self._sinc = 0
        self._lock = self._take_directory()
        for path in sorted(directory.glob(ASIDE + "*")):
            log.warning("snapshot_unfinished", path=str(path), done="removed: it was never renamed into place")
            shutil.rmtree(path)

    def bind_layers(self, manifest: Manifest, layers: Sequence[int], genesis: Sequence[str], sinc: int) -> None:
        """Set the layers of this slave and their digests at v0@r0, from Registered.

        A snapshot that a rebalance has staged for just these layers is promoted.
        """
        self._manifest, self._sinc = manifest, sinc
        self._genesis = dict(zip(layers, genesis, strict=True))
        self._initial.bind_layers(manifest, self._genesis)
        for version in staged_versions(self._directory):
            if promote_if_ours(self._directory, version, layers):
                self._log.info("snapshot_rebalanced", version=str(version), layers=list(layers))
                self._whole.discard(version)

    def close(self) -> None:
        """Unlock the directory."""
        self._lock.close()

    def _take_directory(self) -> PidLock:
        busy = f"directory: {self._directory} is held by another running slave"
        try:
            make_directory(self._directory)
            return PidLock(self._directory / _LOCK, busy=busy, advice="one slave for a directory")
        except OSError as error:
            raise ConfigError(f"directory: {self._directory} cannot be used for snapshots: {error}") from error

    def _require_directory(self) -> None:
        """Create the directory again if it was removed: the served version is in memory, and is written again."""
        if self._directory.exists():
            return
        self._log.error("directory_gone", path=str(self._directory), done="made anew; its snapshots are lost")
        self._lock.close()
        self._whole.clear()
        try:
            self._lock = self._take_directory()
        except ConfigError as error:
            raise OSError(str(error)) from error

    def complete_versions(self) -> tuple[VersionId, ...]:
        """Return versions whose snapshot is complete and of this run and slave, ascending; each is read once to verify
        it.

        One that was skipped is read again when its files have changed, since it may have been repaired.
        """
        found = {version for path in self._directory.iterdir() if (version := version_of(path)) is not None}
        if self._manifest is None:  # bind_layers may promote a staged snapshot
            found.update(staged_versions(self._directory))
        for version in sorted(found - self._whole):
            if version in self._bad and self._bad[version] == self._state_of(version):
                continue
            try:
                self._verify_snapshot(version)
                self._whole.add(version)
            except (CorruptSnapshot, OSError) as error:
                self._pass_over(version, error)
        return tuple(sorted(self._whole & found))

    def reserve_room(self, version: VersionId, nbytes: int) -> None:
        """Reserve space for `nbytes` of θ and m, in the file that `write_snapshot` fills; raise OSError if full."""
        self._require_directory()
        aside = self._aside_path(version)
        try:
            aside.mkdir(exist_ok=True)
            tensorfile.reserve_file(aside / MODEL_FILE, nbytes + self._listing_bytes())
        except BaseException:
            shutil.rmtree(aside, ignore_errors=True)
            raise

    def release_room(self, version: VersionId) -> None:
        """Release reserved space; a directory that cannot be removed now is removed at the next start."""
        shutil.rmtree(self._aside_path(version), ignore_errors=True)

    def write_snapshot(
        self, version: VersionId, theta: Arrays, momentum: Arrays, is_wanted: Callable[[], bool] = lambda: True
    ) -> str:
        """Make a snapshot durable; return the digest of its manifest. A snapshot with other bytes is replaced."""
        if version in self._whole and (known := self._find_same(version, theta, momentum)):
            return known
        digest = self._write_aside(version, theta, momentum, is_wanted, self._rename_snapshot)
        self._whole.add(version)
        self._bad.pop(version, None)
        return digest

    def stage_snapshot(self, version: VersionId, theta: Arrays, momentum: Arrays) -> str:
        """Write a snapshot of a version whose row is still to be written; it counts after `promote_snapshot`."""
        return self._write_aside(version, theta, momentum, lambda: True, stage_snapshot)

    def read_snapshot(self, version: VersionId, theta: Arrays, momentum: Arrays) -> None:
        """Fill both and verify every digest; v0@r0 comes from the initial model, with momentum 0."""
        path = self._directory / str(version)
        if version == GENESIS and not path.exists():
            if self._manifest is None:
                raise LocalProtocolError("the initial model was to be read before this slave knew its layers")
            self._initial.read_layers(theta, momentum)
            return
        try:
            manifest = self._checked_manifest(version)
            self._check_layers(manifest, path)
            with Reader(path / MODEL_FILE, self._meter.add) as reader:
                for record in manifest.layers:
                    read_layer(reader, record, theta[record.index], momentum[record.index])
        except (CorruptSnapshot, OSError) as error:
            self._pass_over(version, error)
            raise

    def holds_initial(self) -> bool:
        """Whether v0@r0 can be read, by its names and shapes; if it should be here and is not, log that once."""
        held = self._initial.is_held()
        if not held and self._initial.given is not None and not self._said_missing:
            remedy = "run `dips seed`, or copy it from <master.directory>/initial/ of `dips init`"
            where = "or name where it lies under the key initial_model"
            path, unfit = str(self._initial.given), self._initial.describe_unfit()
            event, found = ("initial_model_unfit", {"found": unfit}) if unfit else ("initial_model_missing", {})
            self._log.error(event, path=path, **found, remedy=f"{remedy}, {where}")
            self._said_missing = True
        return held

    def keep_initial(self, theta: Arrays) -> None:
        """Make v0@r0 durable; raise CorruptSnapshot if it is another model."""
        self._require_directory()
        self._initial.keep_layers(theta)

    def map_theta(self, version: VersionId) -> Arrays | None:
        """Map θ of a snapshot that this process wrote or verified; return None if there is none.

        The file is not verified again, and this call returns at once: readers pay for its pages once. v0@r0 comes from
        the initial model, if its layers have the same order in the file as in memory.
        """
        path = self._directory / str(version)
        try:
            if version in self._whole:
                layers = {record.index: record.layer for record in self._checked_manifest(version).layers}
                return map_layers(path / MODEL_FILE, layers, THETA)
            if version == GENESIS:
                return self._initial.map_layers()
        except (CorruptSnapshot, OSError) as error:
            self._log.warning("snapshot_not_mapped", version=str(version), path=str(path), reason=str(error))
        return None

    def delete_snapshots(self, versions: tuple[VersionId, ...]) -> None:
        """Remove snapshots, each renamed first, so that a half-removed one is never taken for a snapshot.

        A reader whose source is a map of the file keeps it: Linux frees an unlinked file, and its disk space, when its
        last map is gone. Each removal counts as progress.
        """
        for version in versions:
            path, aside = self._directory / str(version), self._aside_path(version)
            if path.exists():
                path.rename(aside)
                sync_path(self._directory)
                shutil.rmtree(aside)
            if (staged := staged_path(self._directory, version)).exists():  # of a rebalance that failed
                shutil.rmtree(staged)
            self._whole.discard(version)
            self._bad.pop(version, None)
            self._meter.add(1)  # progress of any size tells a slow disk from one that hangs

    # ---- writing --------------------------------------------------------------------------------

    def _aside_path(self, version: VersionId) -> Path:
        return self._directory / f"{ASIDE}{version}"

    def _listing_bytes(self) -> int:
        """Return an upper bound of the bytes of header and manifest."""
        listed = sum(len(self._manifest.layers[i].parameters) for i in self._genesis) if self._manifest else 0
        return LISTING_BYTES * (1 + listed)

    def _write_aside(
        self,
        version: VersionId,
        theta: Arrays,
        momentum: Arrays,
        is_wanted: Callable[[], bool],
        give_name: Callable[[Path, VersionId], None],
    ) -> str:
        """Write a snapshot under a temporary name, then call `give_name`; return the digest of its manifest."""
        self._require_directory()
        aside = self._aside_path(version)
        try:
            aside.mkdir(exist_ok=True)
            manifest = self._write_into(aside, version, theta, momentum, is_wanted)
            give_name(aside, version)
        except BaseException:
            shutil.rmtree(aside, ignore_errors=True)  # a full disk must not stay full of incomplete snapshots
            raise
        return xxhash.xxh3_128_hexdigest(manifest)

    def _find_same(self, version: VersionId, theta: Arrays, momentum: Arrays) -> str | None:
        """Return the digest of an existing snapshot's manifest if it has these bytes, else None."""
        path = self._directory / str(version) / MANIFEST_FILE
        try:
            records = self._checked_manifest(version).layers
            text = path.read_bytes()
        except (CorruptSnapshot, OSError) as error:
            self._pass_over(version, error)
            return None
        held = {i: (digest_of(theta[i]), digest_of(momentum[i])) for i in theta}
        if held != {r.index: (r.theta, r.momentum) for r in records}:
            return None
        return xxhash.xxh3_128_hexdigest(text)

    def _write_into(
        self, aside: Path, version: VersionId, theta: Arrays, momentum: Arrays, is_wanted: Callable[[], bool]
    ) -> bytes:
        if self._manifest is None:
            raise LocalProtocolError(f"a snapshot of {version} was ordered before this slave knew its layers")
        flat = chain.from_iterable((theta[index], momentum[index]) for index in theta)

        def on_piece(nbytes: int) -> None:
            self._meter.add(nbytes)
            if not is_wanted():
                raise Stale(f"the snapshot of {version} is wanted no more")

        return write_snapshot(
            aside, (self._run, self._slave, self._sinc), version, self._manifest, theta, flat, on_piece
        )

    def _rename_snapshot(self, aside: Path, version: VersionId) -> None:
        path = self._directory / str(version)
        if path.exists():
            self._log.warning("snapshot_replaced", version=str(version), path=str(path))
            self._remove_old(path, version)
        aside.rename(path)
        sync_path(self._directory)

    def _remove_old(self, path: Path, version: VersionId) -> None:
        old = self._directory / f"{ASIDE}old-{version}"
        path.rename(old)
        shutil.rmtree(old)

    # ---- verifying --------------------------------------------------------------------------------

    def _pass_over(self, version: VersionId, error: Exception) -> None:
        self._whole.discard(version)
        self._bad[version] = self._state_of(version)
        path = self._directory / str(version)
        self._log.error("snapshot_passed_over", version=str(version), path=str(path), reason=str(error))

    def _state_of(self, version: VersionId) -> tuple[tuple[int, int, int] | None, ...]:
        """Return a value that differs if the files of a snapshot were replaced or changed."""
        return tuple(_state_of_file(self._path_of(version) / name) for name in (MODEL_FILE, MANIFEST_FILE))

    def _checked_manifest(self, version: VersionId) -> SnapshotManifest:
        """Read a snapshot's manifest; raise CorruptSnapshot if it is not this slave's or the file has another size."""
        path = self._path_of(version)
        manifest = read_manifest(path)
        mine = (self._run, self._slave, version)
        if (manifest.run, manifest.slave, manifest.version) != mine:
            raise CorruptSnapshot(
                f"{path}: expected {version} of slave {self._slave} in run {self._run},"
                f" got {manifest.version} of slave {manifest.slave} in run {manifest.run}"
            )
        return manifest

    def _path_of(self, version: VersionId) -> Path:
        path = self._directory / str(version)
        return path if path.exists() else staged_path(self._directory, version)

    def _verify_snapshot(self, version: VersionId) -> None:
        """Read the whole snapshot and compare every digest, with the memory of one layer."""
        read_through(self._path_of(version), self._checked_manifest(version), self._meter.add)

    def _check_layers(self, manifest: SnapshotManifest, path: Path) -> None:
        if self._manifest is None:
            raise LocalProtocolError(f"{path} was to be read before this slave knew its layers")
        expected = {index: self._manifest.layers[index] for index in self._genesis}
        found = {record.index: record.layer for record in manifest.layers}
        if found != expected:
            raise CorruptSnapshot(
                f"{path}: expected the layers {sorted(expected)} of this run's model, got {sorted(found)}"
                f"{' with other parameters' if found.keys() == expected.keys() else ''}"
            )


def _state_of_file(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns
