"""The thread that maintains a slave's mirror, and its copies from the slave's disk and back."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from random import Random
from typing import IO

import xxhash

from dips.dataclass import dataclass
from dips.errors import Corrupt, CorruptSnapshot, DipsError, FailedMirror
from dips.files import sync_path
from dips.ids import VersionId
from dips.mirror import PIECE_BYTES, MirrorStore
from dips.outer.kernel_pool import WorkMeter
from dips.protocol.events import MirrorReport
from dips.slave.mirror_plan import STALL_S, MirrorJob, MirrorJobKind, MirrorPlan, Restored
from dips.slave.snapshot_files import ASIDE, MANIFEST_FILE, MODEL_FILE, SnapshotManifest
from dips.slave.tensorfile import ITEM
from dips.telemetry.logs import Log
from dips.transport.backoff import Backoff

# ---- mirror copy ----------------------------------------------------------------------------------------------------
# Copies one snapshot from a slave's disk into its mirror, and back: `<mirror>/<run>/<slave>/v12@r17/`.
#
# In both directions the bytes are compared with the digests in the snapshot's manifest while they are copied, so
# damaged bytes are not carried over. The manifest is written last: a folder without one is an unfinished copy and is
# not used.


MOST_MANIFEST_BYTES = 64 << 20

Moved = Callable[[int], None]  # called with the number of bytes of each piece copied


@dataclass(frozen=True, slots=True)
class MirrorListing:
    """The versions in a slave's mirror, ascending by round."""

    whole: tuple[VersionId, ...] = ()
    outdated: tuple[
        VersionId, ...
    ] = ()  # with other layers, from before a rebalance, or damaged: to be replaced or deleted
    reason: str = ""  # why the last one that is not in `whole` was ignored


def list_copies(
    store: MirrorStore,
    run: str,
    slave: str,
    log: Log,
    layers: Collection[int] | None = None,
    rotten: Mapping[VersionId, str] | None = None,
) -> MirrorListing:
    """List the versions whose copy is complete by its manifest and size; others are ignored, with a warning in the log.

    layers  layers that this slave holds, if known: a copy of other layers may have the same name
    rotten  versions whose bytes were found damaged → their `copy_state` then: not read again until that changes
    """
    whole, outdated, reason = list[VersionId](), list[VersionId](), ""
    for version in _list_versions(store):
        try:
            _, manifest = _read_manifest(store, run, slave, version)
        except Corrupt as error:
            reason = str(error)
        else:
            held = sorted(record.index for record in manifest.layers)
            if layers is not None and held != sorted(layers):
                reason = (
                    f"{store.url}/{version}: holds the layers {held}, this slave {sorted(layers)} since a rebalance"
                )
            elif rotten and version in rotten and rotten[version] == copy_state(store, version):
                reason = f"{store.url}/{version}: its bytes are not its digests'; it is replaced or deleted"
            else:
                whole.append(version)
                continue
            outdated.append(version)
        log.warning("mirror_passed_over", version=str(version), mirror=store.url, reason=reason)
    return MirrorListing(tuple(whole), tuple(outdated), reason)


def copy_state(store: MirrorStore, version: VersionId) -> str:
    """Return a string that differs if the copy's model file was replaced or changed."""
    return store.file_state(f"{version}/{MODEL_FILE}")


def _list_versions(store: MirrorStore) -> list[VersionId]:
    found = []
    for name in store.list_names():
        try:
            found.append(VersionId.parse(name))
        except ValueError:  # not a version's folder
            continue
    return sorted(found, key=lambda v: v.round)


def copy_out(store: MirrorStore, directory: Path, version: VersionId, moved: Moved) -> None:
    """Copy a snapshot; raise CorruptSnapshot if its bytes do not have their digests, FailedMirror for all other
    failures.

    A snapshot that is deleted meanwhile is copied to its end, since its file is open.
    """
    path, folder = directory / str(version), str(version)
    try:
        text = (path / MANIFEST_FILE).read_bytes()
        source = (path / MODEL_FILE).open("rb")
    except OSError as error:
        raise FailedMirror(f"{path} cannot be copied: {error}") from error
    with source:
        manifest = SnapshotManifest.from_json(text.decode(), str(path / MANIFEST_FILE))
        store.remove_path(folder)
        with store.create_file(f"{folder}/{MODEL_FILE}") as target:
            _pass_verified(source, target, manifest, str(path / MODEL_FILE), moved)
    arrived = store.file_size(f"{folder}/{MODEL_FILE}")
    if arrived != manifest.size:
        raise FailedMirror(f"{store.url}/{folder}/{MODEL_FILE}: expected {manifest.size} bytes, {arrived} arrived")
    store.write_file(f"{folder}/{MANIFEST_FILE}", text)


def bring_back(store: MirrorStore, directory: Path, run: str, slave: str, version: VersionId, moved: Moved) -> None:
    """Restore a snapshot into a slave's directory; it is durable on return.

    Raise CorruptSnapshot if the copy is not complete, FailedMirror if the mirror fails, OSError if this disk does.
    """
    text, manifest = _read_manifest(store, run, slave, version)
    partial, name = directory / f"{ASIDE}{version}", f"{version}/{MODEL_FILE}"
    try:
        partial.mkdir(exist_ok=True)
        with (partial / MODEL_FILE).open("wb") as target:
            with store.open_file(name) as source:
                _pass_verified(source, target, manifest, f"{store.url}/{name}", moved)
            _sync(target)
        with (partial / MANIFEST_FILE).open("wb") as target:
            target.write(text)
            _sync(target)
        sync_path(partial)
        partial.rename(directory / str(version))
        sync_path(directory)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _read_manifest(store: MirrorStore, run: str, slave: str, version: VersionId) -> tuple[bytes, SnapshotManifest]:
    where = f"{store.url}/{version}"
    text = store.read_file(f"{version}/{MANIFEST_FILE}", MOST_MANIFEST_BYTES)
    if text is None:
        raise CorruptSnapshot(f"{where} has no manifest: it was not copied to its end")
    try:
        manifest = SnapshotManifest.from_json(text.decode(), f"{where}/{MANIFEST_FILE}")
    except UnicodeDecodeError as error:
        raise CorruptSnapshot(f"{where}/{MANIFEST_FILE}: is no manifest: {error}") from error
    if (manifest.run, manifest.slave, manifest.version) != (run, slave, version):
        raise CorruptSnapshot(
            f"{where}: expected {version} of slave {slave} in run {run}, got {manifest.version} of slave "
            f"{manifest.slave} in run {manifest.run}"
        )
    size = store.file_size(f"{version}/{MODEL_FILE}")
    if manifest.size != size:
        raise CorruptSnapshot(f"{where}/{MODEL_FILE}: expected {manifest.size} bytes, got {size}")
    return text, manifest


def _pass_verified(source: IO[bytes], target: IO[bytes], manifest: SnapshotManifest, where: str, moved: Moved) -> None:
    """Copy a model file: its header, then θ and m of each layer, and verify the digest of each."""
    length = source.read(8)
    header = int.from_bytes(length, "little")
    numel = sum(record.layer.numel for record in manifest.layers)
    if 8 + header + 2 * ITEM * numel != manifest.size:
        raise CorruptSnapshot(
            f"{where}: a header of {header} bytes and {numel} parameters are not {manifest.size} bytes"
        )
    target.write(length)
    _pass(source, target, header, where, moved)
    for record in manifest.layers:
        for part, expected in (("theta", record.theta), ("momentum", record.momentum)):
            found = _pass(source, target, ITEM * record.layer.numel, where, moved)
            if found != expected:
                raise CorruptSnapshot(
                    f"{where}: {part} of layer {record.layer.name}: expected xxh3-128 {expected}, got {found}"
                )


def _pass(source: IO[bytes], target: IO[bytes], nbytes: int, where: str, moved: Moved) -> str:
    """Copy `nbytes` bytes; return their digest."""
    digest = xxhash.xxh3_128()
    while nbytes:
        piece = source.read(min(nbytes, PIECE_BYTES))
        if not piece:
            raise CorruptSnapshot(f"{where}: ends {nbytes} bytes early")
        digest.update(piece)
        target.write(piece)
        nbytes -= len(piece)
        moved(len(piece))
    return digest.hexdigest()


def _sync(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())


# ---- snapshot mirror ------------------------------------------------------------------------------------------------
# The thread that maintains a slave's mirror: carries out the jobs of MirrorPlan, beside everything else that the slave
# does.
#
# What must stay true: the shard's thread and the event loop never wait for it; they set the wanted versions, and read a
# report. A mount that hangs must not keep the process alive, so its thread is a daemon. Before each Register of a slave
# that serves no version, `restore` copies back versions that are newer in the mirror than on the disk (on a new
# machine, all of them), and those that the master asked for, since all others have them. Damaged copies are remembered:
# each is read once, and not before each Register.


BACKOFF_S = (1.0, 60.0)  # first and longest pause between two tries of a mirror that fails
IDLE_S = 3600.0  # longest wait of the thread if nothing happens
TOLD_S = 30.0  # between two log lines of a restore that goes on


class SnapshotMirror:
    """One slave's mirror; `want` and `report` may be called from any thread, and return at once."""

    def __init__(
        self,
        store: MirrorStore,
        directory: Path,
        run: str,
        slave: str,
        log: Log,
        clock: Callable[[], float],
        meter: WorkMeter | None = None,
    ) -> None:
        """`meter` counts the bytes that are restored, which shows progress however long it takes."""
        self._store, self._directory, self._run, self._slave = store, directory, run, slave
        self._log, self._clock, self._meter = log, clock, meter or WorkMeter()
        self._plan = MirrorPlan(Backoff(*BACKOFF_S, Random()))
        self._layers: tuple[int, ...] | None = None  # None before the master has named them
        self._rotten: dict[VersionId, str] = {}  # copies found damaged, with their `copy_state` then
        self._job = threading.Lock()  # held while bytes move, in either direction
        self._changed = threading.Condition()
        self._ended = False
        self._thread = threading.Thread(target=self._keep, name="mirror", daemon=True)

    def start(self) -> None:
        """Start the thread; it copies when the master has named versions."""
        self._thread.start()

    def close(self) -> None:
        """Begin no other job; a job that runs is not waited for."""
        with self._changed:
            self._ended = True
            self._changed.notify()

    def want(self, versions: tuple[VersionId, ...]) -> None:
        """Set the versions that the mirror should hold, as the master named them."""
        with self._changed:
            self._plan.want(versions)
            self._changed.notify()

    def report(self) -> MirrorReport:
        """Return the versions that the mirror holds, and why it holds no more."""
        with self._changed:
            return self._plan.report(self._clock())

    def bind_layers(self, layers: tuple[int, ...]) -> None:
        """Set the layers of this slave; copies with other layers do not count."""
        with self._changed:
            if self._layers != layers:
                self._layers = layers
                self._plan.list_again()
                self._changed.notify()

    # ---- before the slave serves -------------------------------------------------------------------------------------

    def restore(self, on_disk: tuple[VersionId, ...], look_for: tuple[VersionId, ...] = ()) -> Restored:
        """Restore every version of a later round than all on the disk, the newest first, and those of `look_for`.

        Raise FailedMirror if the mirror fails, or the job being done hangs.
        """
        if not self._job.acquire(timeout=STALL_S):
            raise FailedMirror(f"{self._store.url}: nothing has moved for {STALL_S:g} s")
        try:
            return self._bring_back(set(on_disk), set(look_for))
        except FailedMirror as error:
            self._tell(partial(self._plan.on_failed, str(error), self._clock()))
            raise
        finally:
            self._job.release()

    def _bring_back(self, on_disk: set[VersionId], look_for: set[VersionId]) -> Restored:
        listing = self._list_mirror()  # the next Register reports it
        newest = max((v.round for v in on_disk), default=0)
        brought, rotten, reason = list[VersionId](), False, listing.reason
        for version in reversed(listing.whole):
            if version in on_disk or (version.round < newest and version not in look_for):
                continue
            try:
                self._bring_back_one(version)
                brought.append(version)
            except Corrupt as error:
                reason = reason or str(error)
                self._log.error("mirror_passed_over", version=str(version), reason=str(error))
                self._rotten[version] = copy_state(self._store, version)
                rotten = True
        if rotten:
            self._list_mirror()  # so that the report omits copies that were found damaged just now
        if not listing.whole and not reason:
            reason = f"its mirror {self._store.url} holds no snapshot of it either: is it mounted?"
        return Restored(tuple(brought), reason)

    def _bring_back_one(self, version: VersionId) -> None:
        self._put_aside(self._directory / str(version))
        begun = told = self._clock()
        nbytes = 0
        self._log.info("restoring", version=str(version), mirror=self._store.url)

        def on_moved(moved: int) -> None:
            nonlocal nbytes, told
            nbytes += moved
            self._meter.add(moved)
            if self._clock() - told >= TOLD_S:
                told = self._clock()
                self._log.info("restoring", version=str(version), done_mb=nbytes // 10**6, took_s=round(told - begun))

        bring_back(self._store, self._directory, self._run, self._slave, version, on_moved)
        self._log.info("restored", version=str(version), mirror=self._store.url, took_s=self._clock() - begun)

    def _list_mirror(self) -> MirrorListing:
        listing = list_copies(
            self._store, self._run, self._slave, self._log, self._layers, self._rotten
        )  # fmt: skip
        self._tell(partial(self._plan.on_listed, listing.whole, listing.outdated))
        return listing

    def _put_aside(self, damaged: Path) -> None:
        """Rename a damaged snapshot that is in the place of a version, for a person to look at."""
        if damaged.exists():
            kept = damaged.with_name(f"damaged-{damaged.name}")
            shutil.rmtree(kept, ignore_errors=True)
            damaged.rename(kept)

    # ---- the thread --------------------------------------------------------------------------------------------------

    def _keep(self) -> None:
        while (job := self._wait_for_job()) is not None:
            try:
                self._do(job)
            except (DipsError, OSError) as error:
                self._log.warning("mirror_fails", job=job.kind.value, reason=str(error))
                with self._changed:
                    self._plan.on_failed(str(error), self._clock())

    def _wait_for_job(self) -> MirrorJob | None:
        """Return the next job when it is due; None at the end."""
        with self._changed:
            while not self._ended:
                now = self._clock()
                job = self._plan.next_job(now)
                if job is not None:
                    return job
                self._changed.wait(min(self._plan.next_deadline(now) - now, IDLE_S))
        return None

    def _do(self, job: MirrorJob) -> None:
        with self._job:
            self._do_alone(job)

    def _do_alone(self, job: MirrorJob) -> None:
        if job.kind is MirrorJobKind.LIST:
            self._list_mirror()
            return
        if job.kind is MirrorJobKind.DELETE:
            for version in job.versions:
                self._store.remove_path(str(version))
            self._tell(partial(self._plan.on_done, job))
            return
        begun = self._clock()
        copy_out(self._store, self._directory, job.versions[0], self._on_moved)
        self._tell(partial(self._plan.on_done, job))
        self._log.info("mirrored", version=str(job.versions[0]), took_s=self._clock() - begun)

    def _tell(self, happened: Callable[[], None]) -> None:
        with self._changed:
            happened()

    def _on_moved(self, _: int) -> None:
        with self._changed:
            self._plan.on_moved(self._clock())
