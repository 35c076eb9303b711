"""The snapshots of one slave on its disk: one directory a version, `v12@r17/`, of model.safetensors and manifest.json.

A snapshot is written aside, fsynced and renamed, so it is whole or it is not there, and it is believed after every
digest agrees. Half-written, damaged and foreign ones are passed over loudly, and left for a person. One process holds
the directory as long as it runs. The master says what to write and what to delete; on its own account a slave removes
nothing but what it had not finished writing.

v0@r0 has no snapshot: see initial_model.py.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path

import xxhash

from dips.errors import ConfigError, CorruptSnapshot, LocalProtocolError, Stale
from dips.fsync import make_directory, sync_path
from dips.ids import GENESIS, VersionId
from dips.outer.work_meter import WorkMeter
from dips.pidlock import PidLock
from dips.protocol.manifest import Manifest
from dips.slave import tensorfile
from dips.slave.initial_model import InitialModel
from dips.slave.ports import Arrays
from dips.slave.snapshot_files import (
    ASIDE,
    map_layers,
    read_layer,
    read_manifest,
    read_through,
    version_of,
    write_snapshot,
)
from dips.slave.snapshot_manifest import MANIFEST_FILE, MODEL_FILE, THETA, SnapshotManifest, digest_of
from dips.slave.staged_snapshots import promote_if_ours, stage_snapshot, staged_path, staged_versions
from dips.slave.tensorfile import Reader
from dips.telemetry.logs import Log

LISTING_BYTES = 4096  # for each parameter, in the two lists of a snapshot: a name, a shape, places, digests
_LOCK = ".lock"


class Snapshots:
    """Implements `ports.Disk` on files; used by one thread, and by a second one for one `write_snapshot` at a time."""

    def __init__(
        self,
        directory: Path,
        run: str,
        slave: str,
        initial_model: Path | None,
        log: Log,
        meter: WorkMeter | None = None,
    ) -> None:
        """Take the directory for this process; raise ConfigError, naming it, if another slave holds it."""
        self._meter = meter or WorkMeter()
        self._directory, self._run, self._slave = directory, run, slave
        self._initial = InitialModel(directory, run, initial_model, self._meter.add)
        self._log = log
        self._said_missing = False
        self._whole: set[VersionId] = set()  # verified, or written by us
        self._bad: dict[VersionId, object] = {}  # passed over, and the state of its files then; logged once
        self._manifest: Manifest | None = None
        self._genesis: dict[int, str] = {}
        self._sinc = 0
        self._lock = self._take_directory()
        for path in sorted(directory.glob(ASIDE + "*")):
            log.warning("snapshot_unfinished", path=str(path), done="removed: it was never renamed into place")
            shutil.rmtree(path)

    def bind_layers(self, manifest: Manifest, layers: Sequence[int], genesis: Sequence[str], sinc: int) -> None:
        """Learn from Registered which layers are ours and what they hash to at v0@r0.

        A snapshot that a rebalance has left for just these layers takes its place.
        """
        self._manifest, self._sinc = manifest, sinc
        self._genesis = dict(zip(layers, genesis, strict=True))
        self._initial.bind_layers(manifest, self._genesis)
        for version in staged_versions(self._directory):
            if promote_if_ours(self._directory, version, layers):
                self._log.info("snapshot_rebalanced", version=str(version), layers=list(layers))
                self._whole.discard(version)

    def close(self) -> None:
        """Give the directory back."""
        self._lock.close()

    def _take_directory(self) -> PidLock:
        busy = f"directory: {self._directory} is held by another running slave"
        try:
            make_directory(self._directory)
            return PidLock(self._directory / _LOCK, busy=busy, advice="one slave for a directory")
        except OSError as error:
            raise ConfigError(f"directory: {self._directory} cannot be used for snapshots: {error}") from error

    def _require_directory(self) -> None:
        """Make the directory anew if somebody removed it: what is served lies in memory, and is written again."""
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
        """Versions whose snapshot is whole and of this run and slave, ascending; each is read through once.

        One that was passed over is read again when its files are others: somebody has put it back.
        """
        found = {version for path in self._directory.iterdir() if (version := version_of(path)) is not None}
        if self._manifest is None:  # bind may put what is staged into its place
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
        """Take room for a snapshot of `nbytes` of θ and m, in the file that `write_snapshot` fills; OSError if full."""
        self._require_directory()
        aside = self._aside_path(version)
        try:
            aside.mkdir(exist_ok=True)
            tensorfile.reserve_file(aside / MODEL_FILE, nbytes + self._listing_bytes())
        except BaseException:
            shutil.rmtree(aside, ignore_errors=True)
            raise

    def release_room(self, version: VersionId) -> None:
        """Give reserved room back; a directory that cannot be removed is removed at the next start."""
        shutil.rmtree(self._aside_path(version), ignore_errors=True)

    def write_snapshot(
        self, version: VersionId, theta: Arrays, momentum: Arrays, is_wanted: Callable[[], bool] = lambda: True
    ) -> str:
        """Make a snapshot durable; return the digest of its manifest. One that holds other bytes is replaced."""
        if version in self._whole and (known := self._find_same(version, theta, momentum)):
            return known
        digest = self._write_aside(version, theta, momentum, is_wanted, self._rename_snapshot)
        self._whole.add(version)
        self._bad.pop(version, None)
        return digest

    def stage_snapshot(self, version: VersionId, theta: Arrays, momentum: Arrays) -> str:
        """The same for a version whose row is still to be written: it counts when `promote_snapshot` has named it."""
        return self._write_aside(version, theta, momentum, lambda: True, stage_snapshot)

    def read_snapshot(self, version: VersionId, theta: Arrays, momentum: Arrays) -> None:
        """Fill both, verifying every digest; v0@r0 comes from the initial model, with momentum 0."""
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
        """Whether v0@r0 can be read, as far as names and shapes tell; if it should lie here, say so once."""
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
        """Make v0@r0 durable; CorruptSnapshot if it is another model."""
        self._require_directory()
        self._initial.keep_layers(theta)

    def map_theta(self, version: VersionId) -> Arrays | None:
        """θ of a snapshot that this process wrote or verified, as a map of its file; None if there is none.

        Not read through again: who reads a version pays for its pages once, and this call returns at once. v0@r0 comes
        from the initial model, if its layers lie in the file as they lie in memory.
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
        """Remove snapshots, each first out of its name, so that a half-removed one is never taken for one.

        A reader whose source is a map of the file keeps it: Linux frees an unlinked file when the last map of it is
        gone, so its room on the disk comes back then, not now. Each one that is gone counts as worked through.
        """
        for version in versions:
            path, aside = self._directory / str(version), self._aside_path(version)
            if path.exists():
                path.rename(aside)
                sync_path(self._directory)
                shutil.rmtree(aside)
            if (staged := staged_path(self._directory, version)).exists():  # of a rebalance that came to nothing
                shutil.rmtree(staged)
            self._whole.discard(version)
            self._bad.pop(version, None)
            self._meter.add(1)  # a step of any size tells a disk that is slow from one that hangs

    # ---- writing --------------------------------------------------------------------------------

    def _aside_path(self, version: VersionId) -> Path:
        return self._directory / f"{ASIDE}{version}"

    def _listing_bytes(self) -> int:
        """What header and manifest may need beside the numbers, generously."""
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
        """Write a snapshot under a name that nobody believes, then give it another; return its manifest's digest."""
        self._require_directory()
        aside = self._aside_path(version)
        try:
            aside.mkdir(exist_ok=True)
            manifest = self._write_into(aside, version, theta, momentum, is_wanted)
            give_name(aside, version)
        except BaseException:
            shutil.rmtree(aside, ignore_errors=True)  # a full disk must not stay full of halves
            raise
        return xxhash.xxh3_128_hexdigest(manifest)

    def _find_same(self, version: VersionId, theta: Arrays, momentum: Arrays) -> str | None:
        """The digest of a snapshot's manifest, if these are its bytes."""
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
        """Another one when the files of a snapshot are others, or have changed."""
        return tuple(_state_of_file(self._path_of(version) / name) for name in (MODEL_FILE, MANIFEST_FILE))

    def _checked_manifest(self, version: VersionId) -> SnapshotManifest:
        """Read a snapshot's manifest; raise CorruptSnapshot if it is not ours or the file has another size."""
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
        """Read the whole snapshot through and compare every digest; one layer's memory at a time."""
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
