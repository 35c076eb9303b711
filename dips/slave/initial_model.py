"""The source of v0@r0 on a slave: the model that `dips seed` sent into its directory, or else the file that
`initial_model` names.

Neither is used unless its layers have the digests of the ledger. A seeded model is written aside, read back, compared
and renamed: it is complete, or it is not there. It is never deleted, since a run may roll back to v0@r0.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from dips.errors import CorruptSnapshot
from dips.files import sync_path
from dips.ids import GENESIS
from dips.protocol.manifest import Manifest
from dips.slave import tensorfile
from dips.slave.ports import F32, Arrays
from dips.slave.snapshot_files import ASIDE, digest_of, map_layers, split_layer
from dips.slave.tensorfile import Reader

OWN_FILE = "initial.safetensors"

_Version = tuple[Path, int, int]  # identifies a file's contents: path, size and time of change


class InitialModel:
    """The layers of v0@r0 of one slave; `bind_layers` sets which these are."""

    def __init__(self, directory: Path, run: str, given: Path | None, on_piece: Callable[[int], None]) -> None:
        """`given` is the file that `dips init` wrote, with all layers of the model; None: the slave waits for `dips
        seed`.
        """
        self._own, self.given, self._run, self._on_piece = directory / OWN_FILE, given, run, on_piece
        self._manifest: Manifest | None = None
        self._digests: Mapping[int, str] = {}
        self._bad: dict[_Version, str] = {}  # files of no use, and why
        self._good: set[_Version] = set()  # files in which every tensor has its name and shape

    def bind_layers(self, manifest: Manifest, digests: Mapping[int, str]) -> None:
        """Set the layers that are needed, and their digests."""
        if digests != self._digests:
            self._bad.clear()
            self._good.clear()
        self._manifest, self._digests = manifest, digests

    def is_held(self) -> bool:
        """Whether there is a file whose tensors have the right names and shapes; digests are compared when it is read.

        Does not raise. Before the layers are known, any file counts.
        """
        return any(self._may_serve(version) for version in self._find_versions())

    def describe_unfit(self) -> str:
        """Describe why the files that are here do not fit; "" if there are none, or one fits."""
        return "; ".join(self._bad[version] for version in self._find_versions() if version in self._bad)

    def read_layers(self, theta: Arrays, momentum: Arrays) -> None:
        """Fill θ, and m with 0; raise CorruptSnapshot for another model, FileNotFoundError if there is none."""
        version = self._choose_file()
        try:
            with Reader(version[0], self._on_piece) as reader:
                for index in self._digests:
                    self._read_layer(reader, index, theta[index])
        except CorruptSnapshot as error:
            self._bad[version] = str(error)
            raise
        for index in self._digests:
            momentum[index].fill(0.0)

    def map_layers(self) -> Arrays | None:
        """Map θ from the file; return None before the layers are known, or without a file."""
        if self._manifest is None or not self.is_held():
            return None
        layers = {index: self._manifest.layers[index] for index in self._digests}
        return map_layers(self._choose_file()[0], layers, "")

    def keep_layers(self, theta: Arrays) -> None:
        """Write a seeded model durably; raise CorruptSnapshot, and keep nothing, if it is another model, OSError if the
        disk fails.
        """
        assert self._manifest is not None, "nothing is brought to a slave that knows no layers"
        aside = self._own.with_name(f"{ASIDE}initial")
        try:
            aside.mkdir(exist_ok=True)
            self._write_checked(aside / OWN_FILE, theta)
            (aside / OWN_FILE).replace(self._own)
            sync_path(self._own.parent)
        finally:
            shutil.rmtree(aside, ignore_errors=True)

    # ---- files ---------------------------------------------------------------------------------

    def _find_versions(self) -> list[_Version]:
        """Return the files that exist, the seeded one first."""
        found = []
        for path in (self._own, self.given):
            try:
                if path is not None:
                    status = path.stat()
                    found.append((path, status.st_size, status.st_mtime_ns))
            except OSError:
                continue
        return found

    def _choose_file(self) -> _Version:
        for version in self._find_versions():
            if self._may_serve(version):
                return version
        unfit = self.describe_unfit()
        lacking = f"what is there does not fit: {unfit}" if unfit else "there is none"
        raise FileNotFoundError(
            f"initial_model: expected the first model of this slave's layers at {self.given or self._own}, {lacking}: "
            "run `dips seed`, or copy <master.directory>/initial/model.safetensors of this run's `dips init` to where "
            "initial_model points"
        )

    def _may_serve(self, version: _Version) -> bool:
        if version in self._bad:
            return False
        if self._manifest is not None and version not in self._good:
            try:
                with Reader(version[0]) as reader:
                    for index in self._digests:
                        for parameter in self._manifest.layers[index].parameters:
                            reader.check_tensor(parameter.name, parameter.shape)
            except (CorruptSnapshot, OSError) as error:
                self._bad[version] = str(error)
                return False
            self._good.add(version)
        return True

    def _read_layer(self, reader: Reader, index: int, flat: F32) -> None:
        """Fill one layer and compare its digest."""
        assert self._manifest is not None, "the initial model was to be read before this slave knew its layers"
        layer, expected = self._manifest.layers[index], self._digests[index]
        for parameter, piece in split_layer(layer, flat):
            reader.read_into(parameter.name, parameter.shape, piece)
        if (found := digest_of(flat)) != expected:
            raise CorruptSnapshot(
                f"{reader.path}: layer {layer.name} is not this run's first model:"
                f" expected xxh3-128 {expected}, got {found}"
            )

    def _write_checked(self, path: Path, theta: Arrays) -> None:
        """Write the model, read it back and compare digests, which detects a slot that was freed meanwhile and a faulty
        disk.
        """
        assert self._manifest is not None
        layers = {index: self._manifest.layers[index] for index in self._digests}
        shapes = [(p.name, p.shape) for layer in layers.values() for p in layer.parameters]
        metadata = {"format": "pt", "run": self._run, "version": str(GENESIS)}
        tensorfile.write_tensors(path, metadata, shapes, (theta[index] for index in layers), self._on_piece)
        with Reader(path, self._on_piece) as reader:
            for index, layer in layers.items():
                self._read_layer(reader, index, np.empty(layer.numel, np.float32))
