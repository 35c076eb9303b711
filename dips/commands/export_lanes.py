"""Versions pulled over the lanes, from any host, directly into a file: `dips export --master`, `dips follow`."""

from __future__ import annotations

import asyncio
import errno
from contextlib import suppress
from pathlib import Path

import numpy as np

from dips.client.version_pull import pull_version, pulling_name
from dips.files import explain_unwritable, make_directory, make_private_file, name_aside, sync_path
from dips.ids import VersionId
from dips.protocol.manifest import Manifest
from dips.store import tensorfile
from dips.transport.endpoints import Endpoint

NAME = "export"  # of the puller in plain text; two pullers with one name exclude each other


def export_over_lanes(master: Endpoint, version: VersionId | None, output: Path, name: str = NAME) -> VersionId:
    """Write a version of the run of `master`, None: the head. Raises ConfigError if it is no longer kept."""
    file = VersionFile(output)
    try:
        pulled = asyncio.run(pull_version(master, pulling_name(master, name), file.make_room, version))
        file.publish()
    finally:
        file.close()
    return pulled.version


class VersionFile:
    """A safetensors file that holds one whole version at a time, and is replaced by the next one.

    Readable by its owner only. Whoever has it open keeps the version that it opened.
    """

    def __init__(self, output: Path) -> None:
        """Raise ConfigError if a directory is there."""
        self.output = output
        with explain_unwritable(output):
            self._aside = name_aside(output)
        self._inode = 0  # of the file beside the output that we have begun; another one is another process's
        self._room: tensorfile.F32 | None = None  # of the version that was pulled last

    def make_room(self, run: str, version: VersionId, manifest: Manifest) -> tensorfile.F32:
        """Return the memory of a new file beside the output, filled as the last one was. Raises ConfigError."""
        shapes = [(p.name, p.shape) for layer in manifest.layers for p in layer.parameters]
        with explain_unwritable(self.output):
            make_directory(self.output.parent)
            make_private_file(self._aside)
            self._inode = self._aside.stat().st_ino
            room = tensorfile.map_new(self._aside, {"format": "pt", "run": run, "version": str(version)}, shapes)
        if self._room is not None:
            np.copyto(room, self._room)
        self._room = room
        return room

    def publish(self) -> None:
        """Put the new file in the place of the output; durable on return."""
        with explain_unwritable(self.output):
            sync_path(self._aside)
            if self._aside.stat().st_ino != self._inode:  # and not whole yet
                raise FileExistsError(errno.EEXIST, "another process writes to it, too", str(self.output))
            self._aside.rename(self.output)
            sync_path(self.output.parent)

    def close(self) -> None:
        """Remove what is unfinished. Idempotent."""
        with suppress(OSError):
            if self._aside.stat().st_ino == self._inode:
                self._aside.unlink()
