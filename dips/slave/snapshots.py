"""The snapshots of one slave on its disk: the versions of its root, those staged for it, and its first model.

A snapshot is written aside, fsynced and renamed, so it is complete or it is not there, and it is used only after every
digest agrees: the newest few are read at the start, archives when they are wanted. Half-written, damaged and foreign
ones are skipped with a log line, and left for a person. One process locks the directory as long as it runs. The master
decides what is written and deleted; by itself a slave removes only what it had not finished writing.
"""

from __future__ import annotations

import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from math import inf
from pathlib import Path

import numpy as np

from dips.errors import ConfigError, CorruptSnapshot, FailedDisk, LocalProtocolError, Stale
from dips.files import PidLock, explain_unwritable, lock_holder, make_directory
from dips.ids import GENESIS, VersionId
from dips.outer.kernel_pool import WorkMeter
from dips.protocol.manifest import Layer, Manifest
from dips.slave.ports import READ_AT_START, Arrays
from dips.store.files import (
    ASIDE,
    HALF_REMOVED,
    REBALANCE_LOCK,
    STAGING,
    delete_version,
    map_version,
    promote_if_ours,
    put_version,
    read_layer,
    read_manifest,
    read_through,
    reserve_version,
    staged_path,
    staged_versions,
    write_version,
)
from dips.store.tensorfile import F32, OnPiece
from dips.store.version import MANIFEST_FILE, OLD_LAYOUT, VersionManifest, digest_of, version_of
from dips.tasks import SpacedLooks
from dips.telemetry.logs import Log

_LOCK = ".lock"
FilesState = tuple[tuple[str | int, ...], ...]  # changes with the files of a version, and with who may read them
LOOK_S = 5.0  # longest wait for a look at the first model, which may lie on a network's disk
MOST_READS = 3  # of a snapshot that its disk refuses to read, before it is passed over: an error may pass

# ---- first model ----------------------------------------------------------------------------------------------------
# v0@r0 is the version that `dips seed` put into the slave's own root, or the one in the root that `initial_model`
# names. Neither is used unless its layers have the digests of the ledger. It is never deleted, since a run may roll
# back to v0@r0.


class InitialModel:
    """The layers of v0@r0 of one slave; `bind_layers` sets which these are."""

    def __init__(self, root: Path, run: str, given: Path | None, on_piece: OnPiece) -> None:
        """`given` is the root that `dips init` wrote, with all layers of the model; None: the slave waits for `dips
        seed`.
        """
        self.given, self._run, self._on_piece = given, run, on_piece
        self._folders = [root / str(GENESIS) for root in (root, given) if root is not None]
        self._model: Manifest | None = None
        self._digests: Mapping[int, str] = {}
        self._bad: dict[Path, tuple[FilesState, str]] = {}  # files of no use, and why
        self._good: dict[Path, tuple[FilesState, VersionManifest]] = {}  # those that fit, by the state of the manifest

    def bind_layers(self, model: Manifest, digests: Mapping[int, str]) -> None:
        """Set the layers that are needed, and their digests."""
        if digests != self._digests or model != self._model:
            self._bad.clear()
            self._good.clear()
        self._model, self._digests = model, digests

    def is_held(self) -> bool:
        """Whether there is a version whose manifest has the right layers and digests; its bytes are compared when they
        are read.

        Does not raise. Before the layers are known, any v0@r0 counts.
        """
        return any(self._check_folder(folder) is not None for folder in self._folders)

    def describe_unfit(self) -> str:
        """Describe why what is here does not fit; "" if there is nothing, or one fits."""
        if self.is_held():
            return ""
        found = [self._bad[folder][1] for folder in self._folders if folder in self._bad]
        if self.given is not None and any(map(os.path.isfile, (self.given, self.given / OLD_LAYOUT))):
            found.append(f"{self.given}: expected a directory with {GENESIS}/ of `dips init`: make the run anew")
        return "; ".join(found)

    def read_layers(self, theta: Arrays, momentum: Arrays) -> None:
        """Fill θ, and m with 0; raise CorruptSnapshot for another model, FileNotFoundError if there is none."""
        folder, manifest = self._choose_folder()
        try:
            for record in manifest.layers:
                if record.index in self._digests:
                    read_layer(folder, manifest, record, theta[record.index], momentum[record.index], self._on_piece)
        except (CorruptSnapshot, OSError) as error:
            self._good.pop(folder, None)  # it is looked at again: a file may have gone
            if isinstance(error, CorruptSnapshot):
                self._bad[folder] = (files_state(folder), str(error))
            raise

    def map_layers(self) -> Arrays | None:
        """Map θ; return None before the layers are known, or without a version."""
        if self._model is None or not self.is_held():
            return None
        folder, manifest = self._choose_folder()
        return map_version(folder, manifest, self._digests.keys())

    def require_layers(self, folder: Path, manifest: VersionManifest) -> None:
        """Raise CorruptSnapshot unless a version has the first model's layers, by its digests."""
        assert self._model is not None, "the initial model was to be compared before this slave knew its layers"
        records = {record.index: record for record in manifest.layers}
        for index, expected in self._digests.items():
            layer, record = self._model.layers[index], records.get(index)
            if record is None or record.layer != layer:
                found = f"has the layer {record.layer}" if record else "does not hold it"
                raise CorruptSnapshot(f"{folder}: expected layer {layer.name} of this run's model, it {found}")
            if record.theta != expected or record.momentum:
                raise CorruptSnapshot(
                    f"{folder}: layer {layer.name} is not this run's first model:"
                    f" expected xxh3-128 {expected}, got {record.theta}"
                )

    def _choose_folder(self) -> tuple[Path, VersionManifest]:
        if self._model is None:
            raise LocalProtocolError("the initial model was to be read before this slave knew its layers")
        for folder in self._folders:
            if (manifest := self._check_folder(folder)) is not None:
                return folder, manifest
        unfit = self.describe_unfit()
        lacking = f"what is there does not fit: {unfit}" if unfit else "there is none"
        raise FileNotFoundError(
            f"initial_model: expected the first model of this slave's layers in {self._folders[-1]}, {lacking}: "
            "run `dips seed`, or copy <master.directory>/initial/ of this run's `dips init` to where "
            "initial_model points"
        )

    def _check_folder(self, folder: Path) -> VersionManifest | None:
        """Return the manifest of a v0@r0 that fits; None if there is none, or it was found unfit. While its manifest is
        the same file nothing else is looked at again: a version comes and goes with its directory.
        """
        stamp = _state_of([folder / MANIFEST_FILE])
        if stamp and folder in self._good and self._good[folder][0] == stamp:
            return self._good[folder][1]
        try:
            if not folder.is_dir() or (folder in self._bad and self._bad[folder][0] == files_state(folder)):
                return None
            manifest = read_manifest(folder)
            if manifest.run != self._run:
                raise CorruptSnapshot(f"{folder}: is of run {manifest.run}, expected run {self._run}")
            if self._model is not None:
                self.require_layers(folder, manifest)
            self._good[folder] = (stamp, manifest)
            return manifest
        except CorruptSnapshot as error:
            self._bad[folder] = (files_state(folder), str(error))
        except OSError as error:  # it may pass: the next look reads the same files again
            self._bad[folder] = ((), str(error))
        return None


def files_state(folder: Path) -> FilesState:
    """Return a value that differs if the files of a version were replaced or changed, or may be read by others."""
    try:
        return _state_of(folder.iterdir())
    except OSError:
        return ()


def _state_of(files: Iterable[Path]) -> FilesState:
    try:
        found = [(file.name, file.stat()) for file in files]
    except OSError:
        return ()
    # Not by the time of the last change of any kind: a copy to the mirror links the files.
    return tuple(sorted((name, s.st_ino, s.st_size, s.st_mtime_ns, s.st_mode, s.st_uid, s.st_gid) for name, s in found))


# ---- snapshots ------------------------------------------------------------------------------------------------------


class Snapshots:
    """Implements `ports.Disk` with files; used by one thread, and by a second for one write, read or deletion at a
    time.
    """

    def __init__(
        self,
        directory: Path,
        run: str,
        slave: str,
        initial_model: Path | None,
        log: Log,
        meter: WorkMeter | None = None,
        most_reads: int = MOST_READS,
    ) -> None:
        """Lock the directory for this process; raise ConfigError, naming it, if another slave holds it, FailedDisk if
        its disk is full, read-only or broken.

        most_reads  reads of a snapshot that the disk may refuse until it is passed over
        """
        self._meter = meter or WorkMeter()
        self._directory, self._run, self._slave = directory, run, slave
        self._initial = InitialModel(directory, run, initial_model, self._meter.add)
        self._log, self._most_reads = log, most_reads
        self._initial_looks = SpacedLooks(self._look_for_initial, "initial-model", 0.0, LOOK_S, time.monotonic)
        self._holds_initial = self._said_missing = False
        self._whole: set[VersionId] = set()  # verified, or written by this process
        self._bad: dict[VersionId, FilesState] = {}  # skipped, with the state of their files then; logged once
        self._refused: Counter[VersionId] = Counter()  # reads that the disk has refused since the last that it did not
        self._manifest: Manifest | None = None
        self._genesis: dict[int, str] = {}
        self._sinc = 0
        self._lock = self._take_directory()
        staged_into = self._is_staged_into()
        for path in sorted(directory.glob(ASIDE + "*")):
            if not (staged_into and path.name.startswith(STAGING)):
                self._remove_unfinished(path)

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
        with explain_unwritable(f"directory: {self._directory}"):
            make_directory(self._directory)
            return PidLock(self._directory / _LOCK, busy=busy, advice="one slave for a directory")

    def _is_staged_into(self) -> bool:
        """Whether a `dips rebalance` copies into the directory now, or may do so: its lock is another user's."""
        try:
            return bool(lock_holder(self._directory / REBALANCE_LOCK))
        except OSError:
            return True

    def _remove_unfinished(self, path: Path) -> None:
        try:
            shutil.rmtree(path)
        except OSError as error:  # as of files that root has brought here: they take room, and nothing else
            self._log.error("snapshot_unfinished", path=str(path), reason=str(error), remedy="remove it")
        else:
            self._log.warning("snapshot_unfinished", path=str(path), done="removed: it was never renamed into place")

    def _require_directory(self) -> None:
        """Create the directory again if it was removed: the served version is in memory, and is written again. By its
        lock, since somebody else may have made a directory in its place: the mirror notes there what it has seen.
        """
        if self._lock.is_in_place():
            return
        self._log.error("directory_gone", path=str(self._directory), done="made anew; its snapshots are lost")
        self._lock.close()
        self._whole.clear()
        try:
            self._lock = self._take_directory()
        except (ConfigError, FailedDisk) as error:
            raise OSError(str(error)) from error

    def complete_versions(self, look_for: Collection[VersionId] = ()) -> tuple[VersionId, ...]:
        """Return versions whose snapshot was verified, of this run and slave, ascending. The READ_AT_START newest that
        are whole and those of `look_for` are read for that, each once.

        One that was skipped is read again when its files have changed, since it may have been repaired. Raise OSError
        if the disk refuses to read one, which may be whole all the same: without it the run would be rolled back.
        """
        found, left = self._list_versions(), READ_AT_START
        for version in sorted(found, key=lambda v: v.round, reverse=True):
            if (left > 0 or version in look_for) and self._verify_once(version):
                left -= 1
        return tuple(sorted(self._whole & found))

    def unread_versions(self) -> tuple[VersionId, ...]:
        """Return the other versions with a directory here, which may be damaged or foreign, ascending."""
        return tuple(sorted(v for v in self._list_versions() - self._whole if not self._is_known_bad(v)))

    def _list_versions(self) -> set[VersionId]:
        self._require_directory()
        found = {version for path in self._directory.iterdir() if (version := version_of(path)) is not None} - {GENESIS}
        if self._manifest is None:  # bind_layers may promote a staged snapshot
            found.update(staged_versions(self._directory))
        return found

    def _verify_once(self, version: VersionId) -> bool:
        """Whether a snapshot is whole; it is read unless this process knows."""
        if version in self._whole or self._is_known_bad(version):
            return version in self._whole
        try:
            self._verify_snapshot(version)
        except CorruptSnapshot as error:
            self._pass_over(version, error)
            return False
        except OSError as error:
            if self._is_tried_again(version, error):
                raise OSError(error.errno, error.strerror, str(self._directory / str(version))) from error
            return False
        self._note_whole(version)
        return True

    def _is_tried_again(self, version: VersionId, error: OSError) -> bool:
        """Count a read that the disk has refused; after the last, pass the snapshot over, and return False."""
        self._whole.discard(version)
        self._refused[version] += 1
        if self._refused[version] < self._most_reads:
            return True
        self._pass_over(version, error)
        return False

    def _note_whole(self, version: VersionId) -> None:
        self._whole.add(version)
        self._refused.pop(version, None)

    def _is_known_bad(self, version: VersionId) -> bool:
        known = self._bad.get(version)  # once: the disk's thread forgets what it deletes
        return known is not None and known == files_state(self._path_of(version))

    def reserve_room(self, version: VersionId, nbytes: int) -> None:
        """Reserve space for `nbytes` of θ and m, in the files that `write_snapshot` fills; raise OSError if full."""
        self._require_directory()
        model, aside = self._require_model(f"room for {version}"), self._aside_path(version)
        held = 2 * sum(model.layers[index].nbytes for index in self._genesis)
        assert nbytes == held, f"room for {nbytes} bytes was to be reserved, the layers have {held}"
        try:
            reserve_version(aside, self._run, version, model, self._genesis)
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
        digest = self._write_aside(version, theta, momentum, is_wanted)
        self._whole.add(version)
        self._bad.pop(version, None)
        return digest

    def read_snapshot(self, version: VersionId, theta: Arrays, momentum: Arrays) -> None:
        """Fill both and verify every digest; v0@r0 comes from the initial model, with momentum 0."""
        path = self._directory / str(version)
        if version == GENESIS:
            self._initial.read_layers(theta, momentum)
            return
        try:
            manifest = self._checked_manifest(version)
            self._check_layers(manifest, path)
            with self._meter.long_work(f"reads {version}", manifest.parameter_bytes):
                for record in manifest.layers:
                    read_layer(path, manifest, record, theta[record.index], momentum[record.index], self._meter.add)
        except CorruptSnapshot as error:
            self._pass_over(version, error)
            raise
        except OSError as error:
            self._is_tried_again(version, error)
            raise
        self._note_whole(version)

    def holds_initial(self) -> bool:
        """Whether v0@r0 can be read, by its names and shapes; as last known while the disk that it lies on is silent,
        for which a slave that has the head does not keep its master waiting.
        """
        self._initial_looks.look_if_due()
        return self._holds_initial

    def _look_for_initial(self) -> None:
        """Look whether v0@r0 can be read; if it should be here and is not, log that once."""
        held = self._holds_initial = self._initial.is_held()
        if not held and self._initial.given is not None and not self._said_missing:
            remedy = "run `dips seed`, or copy it from <master.directory>/initial/ of `dips init`"
            where = "or name where it lies under the key initial_model"
            path, unfit = str(self._initial.given), self._initial.describe_unfit()
            event, found = ("initial_model_unfit", {"found": unfit}) if unfit else ("initial_model_missing", {})
            self._log.error(event, path=path, **found, remedy=f"{remedy}, {where}")
            self._said_missing = True

    def keep_initial(self, theta: Arrays) -> None:
        """Make v0@r0 durable, read it back and compare digests, which detects a slot that was freed meanwhile and a
        faulty disk; raise CorruptSnapshot, and keep nothing, if it is another model.
        """
        self._require_directory()
        model, aside = self._require_model("the first model"), self._aside_path(GENESIS)
        owner, path = (self._run, self._slave, self._sinc), self._directory / str(GENESIS)
        try:
            aside.mkdir(exist_ok=True)
            arrays = (theta[index] for index in self._genesis)
            write_version(aside, owner, GENESIS, model, self._genesis, arrays, self._meter.add, momentum=False)
            manifest = read_manifest(aside)
            self._initial.require_layers(aside, manifest)
            read_through(aside, manifest, self._meter.add)
            put_version(aside, path)
        finally:
            shutil.rmtree(aside, ignore_errors=True)

    def keep_model(self, version: VersionId, theta: Arrays, digests: tuple[str, ...]) -> tuple[str, VersionId | None]:
        """Make a version durable, with m of the newest snapshot of these layers, 0 without one, and read it back;
        return the digest of its manifest, and that snapshot's version.

        Versions that a rollback has undone are newer than the head, and stay on the disk for a while: m comes from one
        that is below this version if there is any.

        Raise CorruptSnapshot, and keep nothing, if θ does not have its digests: its slot was freed meanwhile, or the
        disk is faulty.
        """
        self._require_directory()
        model, aside = self._require_model(f"{version}"), self._aside_path(version)
        layers = {index: model.layers[index] for index in self._genesis}
        momentum_of = self.newest_of(layers, before=version.version)
        flat = self.merge_momentum(((index, theta[index]) for index in self._genesis), momentum_of)
        try:
            aside.mkdir(exist_ok=True)
            owner = (self._run, self._slave, self._sinc)
            digest = write_version(aside, owner, version, model, self._genesis, flat, self._meter.add)
            manifest = read_manifest(aside)
            for record, expected in zip(manifest.layers, digests, strict=True):
                if record.theta != expected:
                    got = f"expected xxh3-128 {expected}, got {record.theta}"
                    raise CorruptSnapshot(f"{aside}: layer {record.layer.name} of {version}: {got}")
            read_through(aside, manifest, self._meter.add)
            put_version(aside, self._directory / str(version))
        finally:
            shutil.rmtree(aside, ignore_errors=True)
        self._whole.add(version)
        return digest, momentum_of

    def newest_of(self, layers: Mapping[int, Layer], before: float = inf) -> VersionId | None:
        """Return the newest whole snapshot of just these layers, verified, if there is one of a version with a number
        below `before`; None if there is none. Another ledger may have placed other layers on this slave.
        """
        for version in sorted(self._list_versions(), key=lambda v: (v.version >= before, -v.round)):
            if not self._verify_once(version):
                continue
            records = read_manifest(self._path_of(version)).layers
            if {record.index: record.layer for record in records} == layers:
                return version
        return None

    def merge_momentum(self, thetas: Iterable[tuple[int, F32]], momentum_of: VersionId | None) -> Iterator[F32]:
        """Iterate over θ of each layer, as given, and m of it from a snapshot, 0 without one; in one layer's memory."""
        if momentum_of is None:
            for _, theta in thetas:
                yield theta
                yield np.zeros_like(theta)
            return
        folder = self._path_of(momentum_of)
        manifest = read_manifest(folder)
        records = {record.index: record for record in manifest.layers}
        for index, theta in thetas:
            yield theta
            momentum = np.empty_like(theta)
            read_layer(folder, manifest, records[index], None, momentum)
            yield momentum

    def map_theta(self, version: VersionId) -> Arrays | None:
        """Map θ of a snapshot that this process wrote or verified; return None if there is none.

        The files are not verified again, and this call returns at once: readers pay for their pages once. v0@r0 comes
        from the initial model.
        """
        path = self._directory / str(version)
        try:
            if version in self._whole:
                manifest = self._checked_manifest(version)
                return map_version(path, manifest, {record.index for record in manifest.layers})
            if version == GENESIS:
                return self._initial.map_layers()
        except (CorruptSnapshot, OSError) as error:
            self._log.warning("snapshot_not_mapped", version=str(version), path=str(path), reason=str(error))
        return None

    def map_momentum(self, version: VersionId) -> tuple[Arrays, tuple[str, ...]] | None:
        """Map m of a snapshot that this process wrote or verified, with the digests of θ and m of each layer."""
        if version not in self._whole:
            return None
        path = self._directory / str(version)
        try:
            manifest = self._checked_manifest(version)
            digests = tuple(chain.from_iterable((record.theta, record.momentum) for record in manifest.layers))
            return map_version(path, manifest, {record.index for record in manifest.layers}, momentum=True), digests
        except (CorruptSnapshot, OSError) as error:
            self._log.warning("snapshot_not_mapped", version=str(version), path=str(path), reason=str(error))
        return None

    def delete_snapshots(self, versions: tuple[VersionId, ...]) -> None:
        """Remove snapshots, each renamed first, so that a half-removed one is never taken for a snapshot. One of
        another owner, which the master knows by its name alone, is left for a person.

        A reader whose source is a map of the file keeps it: Linux frees an unlinked file, and its disk space, when its
        last map is gone. Each removal counts as progress. Raise the first error after all were tried. What former
        deletions have left goes, too: it has lost its name, so that nobody asks for it.
        """
        for left in self._directory.glob(f"{HALF_REMOVED}*"):
            shutil.rmtree(left, ignore_errors=True)
        failed = list[OSError]()
        for version in versions:
            try:
                self._delete_snapshot(version)
            except OSError as error:
                failed.append(error)
            self._meter.add(1)  # progress of any size tells a slow disk from one that hangs
        if failed:
            raise failed[0]

    def _delete_snapshot(self, version: VersionId) -> None:
        if version == GENESIS:
            return
        path = self._directory / str(version)
        if path.exists() and not self._is_foreign(path):
            delete_version(path)
        if (staged := staged_path(self._directory, version)).exists():  # of a rebalance that failed
            shutil.rmtree(staged)
        self._whole.discard(version)
        self._bad.pop(version, None)
        self._refused.pop(version, None)

    def _is_foreign(self, path: Path) -> bool:
        try:
            manifest = read_manifest(path)
        except (CorruptSnapshot, OSError):
            return False
        return (manifest.run, manifest.slave) != (self._run, self._slave)

    # ---- writing --------------------------------------------------------------------------------

    def _aside_path(self, version: VersionId) -> Path:
        return self._directory / f"{ASIDE}{version}"

    def _require_model(self, what: str) -> Manifest:
        if self._manifest is None:
            raise LocalProtocolError(f"{what} was ordered before this slave knew its layers")
        return self._manifest

    def _write_aside(self, version: VersionId, theta: Arrays, momentum: Arrays, is_wanted: Callable[[], bool]) -> str:
        """Write a snapshot under a temporary name and rename it; return the digest of its manifest."""
        self._require_directory()
        aside = self._aside_path(version)
        try:
            aside.mkdir(exist_ok=True)
            digest = self._write_into(aside, version, theta, momentum, is_wanted)
            self._rename_snapshot(aside, version)
        except BaseException:
            shutil.rmtree(aside, ignore_errors=True)  # a full disk must not stay full of incomplete snapshots
            raise
        return digest

    def _find_same(self, version: VersionId, theta: Arrays, momentum: Arrays) -> str | None:
        """Return the digest of an existing snapshot's manifest if it has these bytes, else None."""
        try:
            manifest = self._checked_manifest(version)
        except (CorruptSnapshot, OSError) as error:
            self._pass_over(version, error)
            return None
        held = {i: (digest_of(theta[i]), digest_of(momentum[i])) for i in theta}
        if held != {r.index: (r.theta, r.momentum) for r in manifest.layers}:
            return None
        return manifest.digest

    def _write_into(
        self, aside: Path, version: VersionId, theta: Arrays, momentum: Arrays, is_wanted: Callable[[], bool]
    ) -> str:
        model = self._require_model(f"a snapshot of {version}")
        flat = chain.from_iterable((theta[index], momentum[index]) for index in theta)

        def on_piece(nbytes: int) -> None:
            self._meter.add(nbytes)
            if not is_wanted():
                raise Stale(f"the snapshot of {version} is wanted no more")

        return write_version(aside, (self._run, self._slave, self._sinc), version, model, theta, flat, on_piece)

    def _rename_snapshot(self, aside: Path, version: VersionId) -> None:
        path = self._directory / str(version)
        if path.exists():
            self._log.warning("snapshot_replaced", version=str(version), path=str(path))
        put_version(aside, path)

    # ---- verifying --------------------------------------------------------------------------------

    def _pass_over(self, version: VersionId, error: Exception) -> None:
        self._whole.discard(version)
        self._bad[version] = files_state(self._path_of(version))
        path = self._directory / str(version)
        self._log.error("snapshot_passed_over", version=str(version), path=str(path), reason=str(error))

    def _checked_manifest(self, version: VersionId) -> VersionManifest:
        """Read a snapshot's manifest; raise CorruptSnapshot if it is not this slave's or the file has another size."""
        path = self._path_of(version)
        manifest = read_manifest(path)
        manifest.require_owner(self._run, self._slave, version, str(path))
        return manifest

    def _path_of(self, version: VersionId) -> Path:
        path = self._directory / str(version)
        return path if path.exists() else staged_path(self._directory, version)

    def _verify_snapshot(self, version: VersionId) -> None:
        """Read the whole snapshot and compare every digest, with the memory of a piece."""
        manifest = self._checked_manifest(version)
        with self._meter.long_work(f"verifies {version}", manifest.parameter_bytes):
            read_through(self._path_of(version), manifest, self._meter.add)

    def _check_layers(self, manifest: VersionManifest, path: Path) -> None:
        if self._manifest is None:
            raise LocalProtocolError(f"{path} was to be read before this slave knew its layers")
        expected = {index: self._manifest.layers[index] for index in self._genesis}
        found = {record.index: record.layer for record in manifest.layers}
        if found != expected:
            raise CorruptSnapshot(
                f"{path}: expected the layers {sorted(expected)} of this run's model, got {sorted(found)}"
                f"{' with other parameters' if found.keys() == expected.keys() else ''}"
            )
