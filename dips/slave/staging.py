"""Versions staged in the slaves' roots beside what they serve: what `dips rebalance` and `dips recover` do to disks.

A version is made in parts, one for each slave: written aside, staged beside what is there and read back, in all roots
or in none. Existing versions are not changed before the ledger has the row; then the parts get their names. It does not
know the ledger: the caller says what a part is of, and when a version becomes the slaves'.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np

from dips.config import RunFile, SlaveSection
from dips.dataclass import dataclass
from dips.errors import CorruptSnapshot, DipsError, FailedDisk
from dips.ids import VersionId
from dips.protocol.manifest import Manifest
from dips.protocol.records import RunRow
from dips.slave.snapshot_mirror import SnapshotMirror
from dips.slave.snapshots import Snapshots
from dips.store.files import (
    STAGING,
    SyncQueue,
    copy_layer,
    make_manifest,
    promote_version,
    read_manifest,
    read_through,
    reserve_version,
    stage_version,
    staged_path,
    staged_versions,
    write_manifest,
    write_version,
)
from dips.store.mirror import MirrorStore
from dips.store.tensorfile import F32, Reader, map_behind
from dips.store.version import (
    LayerRecord,
    VersionManifest,
    digest_of,
    layer_file,
    layer_header,
    split_layer,
)
from dips.telemetry.logs import Log

Digests = Mapping[tuple[int, str], str]  # (round, slave) → digest of the manifest, from the ledger

# ---- staging --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class VersionPart:
    """One slave's layers of a version, to be staged in its root."""

    run: str
    slave: str
    version: VersionId
    directory: Path
    model: Manifest
    layers: tuple[int, ...]
    fill: Callable[[Path], str]  # fills a directory, durably; returns the digest of its manifest
    digest: str = ""  # that digest, if it is known before: the part of an earlier try is taken if it has it

    @property
    def aside(self) -> Path:
        return self.directory / f"{STAGING}{self.version}"

    @property
    def staged(self) -> Path:
        return staged_path(self.directory, self.version)


def stage_parts(parts: Sequence[VersionPart], show: Callable[[str], None] = lambda _: None) -> dict[str, str]:
    """Stage all parts and read them back; return the digests by slave.

    Room for all is reserved before any is written. Raise CorruptSnapshot naming what is damaged, FailedDisk: then
    nothing is left of any part.
    """
    digests = dict[str, str]()
    try:
        for part in parts:
            _make_room(part)
        for part in parts:
            show(f"{part.slave} {part.version}: writing")
            digests[part.slave] = _stage_part(part)
        for part in parts:
            show(f"{part.slave} {part.version}: reading back")
            read_through(part.staged, read_manifest(part.staged))
    except (OSError, DipsError) as error:
        for part in parts:
            for path in (part.aside, part.staged):
                shutil.rmtree(path, ignore_errors=True)
        if isinstance(error, OSError):
            raise FailedDisk(f"the run is as it was: {error}") from error
        raise
    return digests


def _make_room(part: VersionPart) -> None:
    """Delete what interrupted tries have left, but for this part if it is staged; reserve disk space for it if not."""
    for version in staged_versions(part.directory):
        if version != part.version:
            shutil.rmtree(staged_path(part.directory, version))
    for left in part.directory.glob(STAGING + "*"):
        shutil.rmtree(left, ignore_errors=True)
    if not _is_staged(part):
        reserve_version(part.aside, part.run, part.version, part.model, part.layers)


def _stage_part(part: VersionPart) -> str:
    if _is_staged(part):
        return part.digest
    digest = part.fill(part.aside)
    stage_version(part.aside, part.version)
    return digest


def _is_staged(part: VersionPart) -> bool:
    try:
        return read_manifest(part.staged).digest == part.digest
    except CorruptSnapshot:
        return False


def finish_staged(directory: Path, slave: str, digests: Digests, log: Log) -> tuple[list[VersionId], list[VersionId]]:
    """Promote the staged snapshots that have a row; return (promoted, staged without a row).

    A damaged one is logged and left for a person.
    """
    finished, without_row = list[VersionId](), list[VersionId]()
    for version in staged_versions(directory):
        try:
            digest = read_manifest(staged_path(directory, version)).digest
        except CorruptSnapshot as error:
            log.warning("snapshot_passed_over", reason=str(error))
            continue
        if digest == digests.get((version.round, slave)):
            promote_version(directory, version)
            finished.append(version)
        else:
            without_row.append(version)
    return finished, without_row


# ---- rebalance ------------------------------------------------------------------------------------------------------
# A layer's file is copied as it is, from the version that the slave has, or fetched; both are verified on the way.


def _copy_records(
    folder: Path, manifest: VersionManifest, records: Iterable[LayerRecord], aside: Path, queue: SyncQueue
) -> None:
    for record in records:
        path = folder / record.file
        with path.open("rb") as source, (aside / record.file).open("r+b") as target:  # its room is reserved
            copy_layer(source, target.write, manifest, record, str(path))
            target.truncate()
        queue.add_file(aside / record.file, record.size)


Fetch = Callable[[Mapping[int, tuple[F32, F32]]], Mapping[int, tuple[str, str]]]  # fills θ, m; returns their digests
FETCHED = 256  # layers that are fetched at a time: each is a mapped file


def plan_fetch(
    owner: tuple[str, str, int], version: VersionId, directory: Path, model: Manifest, layers: Sequence[int],
    fetch: Fetch,
) -> VersionPart:  # fmt: skip
    """Return the part that copies the layers which a version in `directory` has, and fetches the others from the slaves
    that hold them; nothing is copied yet. What an earlier try has staged is the part.

    owner  run, slave and incarnation
    """
    staged = find_version(staged_path(directory, version), *owner[:2])
    whole = staged is not None and [record.index for record in staged.layers] == list(layers)
    near = find_version(directory / str(version), *owner[:2])
    fill = partial(_fetch_layers, owner, version, model, layers, (directory / str(version), near), fetch)
    digest = staged.digest if staged is not None and whole else ""
    return VersionPart(owner[0], owner[1], version, directory, model, tuple(layers), fill, digest)


def find_version(folder: Path, run: str, slave: str) -> VersionManifest | None:
    """Return the manifest of a version whose files are complete; None if there is none of this slave."""
    try:
        manifest = read_manifest(folder)
    except CorruptSnapshot:
        return None
    return manifest if (manifest.run, manifest.slave) == (run, slave) else None


def _fetch_layers(
    owner: tuple[str, str, int], version: VersionId, model: Manifest, layers: Sequence[int],
    near: tuple[Path, VersionManifest | None], fetch: Fetch, aside: Path,
) -> str:  # fmt: skip
    queue, folder = SyncQueue(), near[0]
    records = {r.index: r for r in near[1].layers if r.index in layers} if near[1] is not None else {}
    if near[1] is not None:
        _copy_records(folder, near[1], records.values(), aside, queue)
    away = [index for index in layers if index not in records]
    for begin in range(0, len(away), FETCHED):
        for record in _fetch_some(owner[0], version, model, away[begin : begin + FETCHED], fetch, aside):
            records[record.index] = record
            queue.add_file(aside / record.file, record.size)
    queue.sync_files()
    return write_manifest(aside, make_manifest(owner, version, model, (records[index] for index in layers)).to_json())


def _fetch_some(
    run: str, version: VersionId, model: Manifest, layers: Sequence[int], fetch: Fetch, aside: Path
) -> Iterator[LayerRecord]:
    """Fetch layers into their files, and compare what has come with the digests of the slaves that hold them."""
    flats, headers = dict[int, tuple[F32, F32]](), {}
    for index in layers:
        layer = model.layers[index]
        headers[index] = layer_header(run, version, layer, momentum=True)
        both = map_behind(aside / layer_file(index), headers[index], 2 * layer.numel)
        flats[index] = both[: layer.numel], both[layer.numel :]
    told = fetch(flats)
    for index, parts in flats.items():
        layer, found = model.layers[index], (digest_of(parts[0]), digest_of(parts[1]))
        if found != told.get(index):
            expected = " and ".join(told.get(index, ("none",)))
            raise CorruptSnapshot(
                f"{aside}: layer {layer.name} of {version}: expected θ and m of xxh3-128 {expected}, as its slave "
                f"has them, got {' and '.join(found)}"
            )
        yield LayerRecord(index, layer, *found, len(headers[index]) + 2 * layer.nbytes)


def read_kept(folder: Path, manifest: VersionManifest) -> None:
    """Read a version that stays where it is, before the older ones, its only substitutes, are given up."""
    try:
        read_through(folder, manifest)
    except OSError as error:
        raise FailedDisk(f"the run is as it was: {error}") from error


# ---- recover --------------------------------------------------------------------------------------------------------
# θ of every layer comes from a model's file, so that the model is one that was saved, not a mixture of two moments.
# Momentum comes from each slave's newest complete snapshot, on its disk or in its mirror; where neither has one it is
# 0, the initial value in torch's SGD.


@dataclass(frozen=True, slots=True)
class SlaveFinding:
    """The remaining data of one slave."""

    slave: str
    layers: tuple[int, ...]
    momentum_of: VersionId | None  # its newest complete snapshot; None: momentum is lost
    lacking: str = ""  # why its mirror restored nothing; "" if it did, or there is none


class Rebuild:
    """The directories of all slaves, locked until the caller's stack is closed."""

    def __init__(self, config: RunFile, row: RunRow, digests: Digests, model: Path, log: Log, locks: ExitStack) -> None:
        """Lock the directories; promote snapshots staged by an earlier try whose row is in `digests`, delete other
        staged ones. Raise ConfigError if a slave runs.

        model  file with all parameters of `row`, in fp32 and finite
        locks  unlocks the directories when it is closed
        """
        self._manifest, self._row, self._model, self._log = Manifest.from_json(row.manifest), row, model, log
        self._disks = dict[str, Snapshots]()
        self._sections = {name: config.slave_section(name) for name, _ in row.placement}
        self.finished: set[VersionId] = set()  # versions that this try promoted for an earlier one
        for name, section in self._sections.items():
            disk = self._disks[name] = Snapshots(
                section.directory, row.run, name, section.initial_model, log, most_reads=1
            )  # fmt: skip
            locks.callback(disk.close)
        for name, section in self._sections.items():
            finished, without_row = finish_staged(section.directory, name, digests, log)
            self.finished.update(finished)
            for version in without_row:
                shutil.rmtree(staged_path(section.directory, version))

    def look_at_disks(self) -> list[SlaveFinding]:
        """Read every directory, restore what is newer in its mirror, and return which slaves still have momentum."""
        found = []
        for name, layers in self._row.placement:
            lacking = self._bring_back(name, layers)
            found.append(SlaveFinding(name, layers, self._newest_of(name, layers), lacking))
        return found

    def stage_version(
        self, version: VersionId, found: Sequence[SlaveFinding], sinc: int
    ) -> tuple[tuple[str, str], ...]:
        """Stage the version's snapshots; return (slave, digest of its manifest) for the ledger's row.

        The version's round must be reserved in the ledger, if there is one, so that a slave that starts without the row
        is not taken as proof of a newer ledger. Raise FailedDisk; then nothing is staged.
        """
        parts = [
            VersionPart(
                self._row.run, one.slave, version, self._sections[one.slave].directory, self._manifest, one.layers,
                partial(self._write_part, version, one, sinc),
            )
            for one in found
        ]  # fmt: skip
        return tuple(stage_parts(parts).items())

    def place_version(self, version: VersionId) -> None:
        """Promote the staged snapshots of a version whose row is durable."""
        for section in self._sections.values():
            promote_version(section.directory, version)

    def layer_names(self, layers: Sequence[int]) -> tuple[str, ...]:
        return tuple(self._manifest.layers[layer].name for layer in layers)

    def _bring_back(self, name: str, layers: tuple[int, ...]) -> str:
        """Restore from the slave's mirror as at its start; return why nothing was restored, "" if all is there."""
        section, disk = self._sections[name], self._disks[name]
        if section.mirror is None:
            return ""
        try:
            mirror = self._open_mirror(section)
            mirror.bind_layers(layers)
            return mirror.restore((*disk.complete_versions(), *disk.unread_versions())).reason
        except FailedDisk as error:  # the mirror's, or its own: the operator is asked with that reason
            return str(error)

    def _open_mirror(self, section: SlaveSection) -> SnapshotMirror:
        assert section.mirror is not None
        run, name, directory = self._row.run, section.name, section.directory
        store = MirrorStore(section.mirror, run, name, of=directory)
        return SnapshotMirror(store, directory, run, name, self._log, time.monotonic)

    def _newest_of(self, name: str, layers: Sequence[int]) -> VersionId | None:
        return self._disks[name].newest_of({index: self._manifest.layers[index] for index in layers})

    def _write_part(self, version: VersionId, found: SlaveFinding, sinc: int, aside: Path) -> str:
        flat = self._disks[found.slave].merge_momentum(self._read_model(found.layers), found.momentum_of)
        owner = (self._row.run, found.slave, sinc)
        return write_version(aside, owner, version, self._manifest, found.layers, flat)

    def _read_model(self, layers: Sequence[int]) -> Iterator[tuple[int, F32]]:
        with Reader(self._model) as reader:
            for index in layers:
                layer = self._manifest.layers[index]
                array = np.empty(layer.numel, np.float32)
                for parameter, flat in split_layer(layer, array):
                    reader.read_into(parameter.name, parameter.shape, flat)
                yield index, array
